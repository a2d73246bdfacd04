"""Where is the bubble? Measured beside simulated bubble and memory, for each schedule. See README.md beside this."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.problems import Problem, mlp
from experiments.results import Findings, columns, command
from jaxpp.errors import ArgumentError, JaxppError
from jaxpp.observe import Profile
from jaxpp.runtime.progress import progress
from jaxpp.schedule import SCHEDULES, make, simulate

__all__ = ["Config", "Result", "Row", "main", "make_pipe", "run", "table"]

DESCRIPTION = "Where is the bubble? Each schedule as it ran, beside what the virtual clock says."


@dataclass(frozen=True)
class Config:
    """The model, its pipeline, and what to keep.

    Attributes:
        schedules: to run; all of them unless given.
        ranks: rows of the schedules; each gets a device.
        microbatches: parts of the batch.
        examples: in each microbatch.
        width: features of each hidden layer, and of the input.
        depth: hidden layers; the same model for all schedules.
        steps: to trace; the one of median length counts.
        figures: draw each profile, and its pebble graph.
        out: folder for figures and traces; made if there is none.
        json: file to add the line of results to.
    """

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    ranks: int = 4
    microbatches: int = 8
    examples: int = 64
    width: int = 512
    depth: int = 16
    steps: int = 9
    figures: bool = True
    out: Path = Path("experiments/bubble/out")
    json: Path | None = None


@dataclass(frozen=True)
class Row:
    """One schedule as it ran.

    Attributes:
        name: of the schedule.
        seconds: of a step as it was traced.
        alone: of a step with each program as long as it takes alone, on devices of its own.
        ideal: bubble fraction on the virtual clock, with F, I and W equal on all stages.
        clock: the same with the durations that each action takes alone.
        measured: bubble fraction of the step, by the clock that the profile chose.
        causes: the parts of ranks x step in which ranks idled, by cause; by the same clock.
        uneven: the longest of the stages' actions of one kind over the shortest, alone; the largest of these over the kinds.
        trace_cost: a traced step over one that is not.
        residuals: most microbatches whose residuals a rank holds: on the virtual clock.
        bytes_of_residuals: most bytes of residuals on a device, measured at the device's peak.
        peak: most bytes on a device, measured: arrays of the step and temporaries.
        forecast: the same before the first step.
    """

    name: str
    seconds: float
    alone: float
    ideal: float
    clock: float
    measured: float
    causes: dict[str, float]
    uneven: float
    trace_cost: float
    residuals: float
    bytes_of_residuals: int
    peak: int
    forecast: int


@dataclass(frozen=True)
class Result(Findings):
    """What was run, and what came out.

    Attributes:
        config: what was run.
        rows: one a schedule.
        refused: why other schedules did not run, by name.
    """

    config: Config
    rows: tuple[Row, ...]
    refused: dict[str, str]

    @property
    def figures(self) -> str:
        """Where the figures are; empty if none were drawn."""
        return f"{self.config.out}, with pages and traces" if self.config.figures else ""


def make_pipe(config: Config, schedule: str) -> tuple[jaxpp.Pipeline, Problem]:
    """A pipeline of the MLP, and what it is given, the batch on the device.

    Args:
        config: sizes.
        schedule: name of the order.
    """
    made = make(schedule, num_ranks=config.ranks, num_microbatches=config.microbatches)
    problem = mlp(config.width, config.depth, config.microbatches * config.examples)
    problem = problem._replace(batch=jax.tree.map(jax.numpy.asarray, problem.batch))
    stages, count = made.num_stages, config.microbatches
    pipe = jaxpp.Pipeline(problem.loss_fn, optax.adam(1e-3), num_stages=stages, num_microbatches=count, schedule=made)
    return pipe, problem


def run(config: Config) -> Result:
    """Profile every schedule.

    Raises:
        JaxppError: not one schedule runs at these sizes.
    """
    ensure_devices(config.ranks)
    rows, refused = [], {}
    with progress(config.schedules, desc="schedules") as bar:
        for name in bar:
            try:
                pipe, problem = make_pipe(config, name)
            except JaxppError as error:
                refused[name] = str(error)
                continue
            rows.append(_row(config, name, pipe, problem))
    if not rows:
        reasons = [why.splitlines()[0] for why in refused.values()]
        raise ArgumentError("schedules", "at least one schedule must run at these sizes", reasons, "pass others")
    return Result(config, tuple(rows), refused)


def _row(config: Config, name: str, pipe: jaxpp.Pipeline, problem: Problem) -> Row:
    batch, key = problem.batch, jax.random.key(0)
    forecast = pipe.forecast(jax.eval_shape(problem.init, key), batch)
    profile = pipe.profile(pipe.init(problem.init, key, batch), batch, num_steps=config.steps)
    if config.figures:
        _draw(config.out, name, profile)
    per_rank = pipe.schedule.num_stages / pipe.schedule.num_ranks
    parts = np.sum([tuple(causes) for causes in profile.causes], axis=0) / (pipe.schedule.num_ranks * profile.seconds)
    peaks = profile.ledger.peaks.values()
    simulation = simulate(pipe.schedule)
    return Row(
        name=name,
        seconds=max(span.end for span in profile.spans),
        alone=max(span.end for span in profile.isolated),
        ideal=simulation.bubble_fraction,
        clock=profile.simulated_bubble_fraction,
        measured=profile.bubble_fraction,
        causes=dict(zip(profile.causes[0]._fields, parts.tolist(), strict=True)),
        uneven=_uneven(profile),
        trace_cost=profile.trace_cost,
        residuals=max(simulation.peak_residuals) / per_rank,
        bytes_of_residuals=max(sample.by_kind["residuals"] for sample in peaks),
        peak=max(sum(sample.kinds) + sample.temporaries for sample in peaks),
        forecast=max(forecast.peaks.values()),
    )


def _uneven(profile: Profile) -> float:
    """How much longer the longest stage's F, B, I or W takes than the shortest's, each alone; the first microbatch's aside."""
    found: dict[str, list[float]] = {}
    for span in profile.isolated:
        if span.action is not None and not span.sends and span.action.microbatch:
            found.setdefault(str(span.action.kind), []).append(span.end - span.start)
    return max((max(taken) / min(taken) for taken in found.values()), default=1.0)


def _draw(out: Path, name: str, profile: Profile) -> None:
    out.mkdir(parents=True, exist_ok=True)
    profile.figure().savefig(out / f"{name}.png")
    profile.pebble_figure().savefig(out / f"{name}_pebbles.png")
    (out / f"{name}.html").write_text(jaxpp.observe.to_html(profile))
    (out / f"{name}.trace.json").write_text(jaxpp.observe.to_perfetto(profile))


def table(result: Result) -> str:
    """The rows as text, and below them the schedules that did not run."""
    causes = ["fill, drain", "imbalance", "transfer", "dispatch", "optimizer", "other"]
    times = ["traced", "alone", "ideal", "clock", "bubble"]
    lines = [["schedule", *times, *causes, "uneven", "tracing", "residuals", "of them", "peak", "forecast"]]
    for row in result.rows:
        shares = [f"{share:.1%}" for share in (row.ideal, row.clock, row.measured, *row.causes.values())]
        sizes = [f"{size / 2**20:.1f} MiB" for size in (row.bytes_of_residuals, row.peak, row.forecast)]
        steps = [f"{1e3 * seconds:.1f} ms" for seconds in (row.seconds, row.alone)]
        ratios = [f"{row.uneven:.2f}", f"{row.trace_cost:.2f}", f"{row.residuals:g}"]
        lines.append([row.name, *steps, *shares, *ratios, *sizes])
    refused = [f"{name}: {why.splitlines()[0]}" for name, why in result.refused.items()]
    return "\n".join([*columns(lines), *refused])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("bubble", Config, DESCRIPTION, run, table)
