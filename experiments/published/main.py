"""How right are plans? Plans of training steps that others have measured, beside what they measured; see README.md beside this.

``python -m experiments.published``

Each step is planned on GPUs that only compile (``jaxpp.target``): the bound, and the prediction with its range. Nothing runs. A GPU
is given more memory than it has: FSDP as jaxpp has it holds the parameters whole during a step, and of a program that does not fit
XLA would run parts again, which nobody measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import optax

import jaxpp
from experiments.options import ConfigError, Flag, check_figure, figure_file
from experiments.published.figure import Point, measured_figure
from experiments.published.rows import ROWS, Published
from experiments.results import Findings, columns, command, noted
from jaxpp.observe.bound import StepBound, bound_of
from jaxpp.runtime.progress import progress
from jaxpp.targets import GPU
from models.gpt import GPT
from models.named import Named, named

__all__ = ["Config", "Planned", "Result", "main", "pipeline", "plan", "run", "table"]

DESCRIPTION = "Plan training steps that others have measured, and compare the seconds."
ROOM = 1 << 40  # bytes: for every row
SHARDS: Mapping[str, Any] = {"zero-1": "optimizer", "fsdp": ["gradients", "parameters"]}


@dataclass(frozen=True)
class Config:
    """What is planned.

    Attributes:
        rows: only those in whose names one of these words occurs; all without.
        figure: file for the figure.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    rows: tuple[str, ...] = ()
    figure: Path = Path("experiments/published/out/published.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_figure(self)
        if not self.chosen:
            known = "\n  ".join(row.name for row in ROWS)
            raise ConfigError(f"--rows {' '.join(self.rows)}: no row has such a name. Fix: pass words of\n  {known}")

    @property
    def chosen(self) -> list[Published]:
        """The rows."""
        return [row for row in ROWS if not self.rows or any(word in f"{row.name}, {row.by}" for word in self.rows)]


@dataclass(frozen=True)
class Planned:
    """A published step beside its plan, in seconds.

    Attributes:
        row: what was published.
        measured: seconds of its step.
        bound: the least that the plan's programs take.
        predicted: what they likely take.
        low: the lower end of the prediction's range.
        high: the upper end.
        products: FLOPs of all matrix products of the step.
    """

    row: Published
    measured: float
    bound: float
    predicted: float
    low: float
    high: float
    products: float

    @property
    def error(self) -> float:
        """Of the prediction: how much longer it is than what was measured, as a part of it."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether what was measured lies in the range of the prediction."""
        return self.low <= self.measured <= self.high

    @property
    def holds(self) -> bool:
        """Whether the bound is one."""
        return self.bound <= self.measured


@dataclass(frozen=True)
class Result(Findings):
    """What was planned, and what came out.

    Attributes:
        config: what was planned.
        rows: one for each published step.
        figure: where the figure is, or None.
    """

    config: Config
    rows: tuple[Planned, ...]
    figure: Path | None = None


def pipeline(row: Published) -> tuple[jaxpp.Pipeline, Named]:
    """The pipeline that does what the row did, on GPUs that only compile, and its model."""
    stages = row.gpus // row.replicas
    again = row.recompute is True and stages == 1  # layer by layer, which the only stage does of itself if its layers say so
    model = named(row.model, attention=row.attention, dtype=row.compute, checkpoint=again, **row.changes)
    card = GPU.like(row.gpu, f"{row.card} with room", memory=ROOM)
    loop = "h" if isinstance(model.model, GPT) else "layers"
    remat = "least" if row.recompute is False or again else "recompute" if row.recompute is True else row.recompute
    pipe = jaxpp.Pipeline(
        model.loss_fn,
        optax.adamw(3e-4),
        num_stages=stages,
        num_microbatches=row.microbatches,
        schedule="1f1b",
        devices=jaxpp.target(card, row.gpus, hosts=row.hosts),
        data_parallel=row.replicas,
        shard=SHARDS.get(row.layout),
        remat=[*[remat] * (stages - 1), "least"] if stages > 1 else remat,
        cuts=[f"{loop}[{model.model.depth * k // stages}]" for k in range(1, stages)] if stages > 1 else None,
    )
    return pipe, model


def plan(row: Published) -> Planned:
    """Compile the step of a row, and compare."""
    pipe, model = pipeline(row)
    tokens = model.batch(row.sequences * row.microbatches * row.replicas, row.length)
    pipe.abstract_state(jax.eval_shape(model.init, jax.random.key(0)), tokens)
    bound = cast("StepBound", bound_of(pipe.engine, tokens, None))
    return Planned(row, row.seconds, bound.seconds, *bound.predicted, sum(bound.products.values()))


def run(config: Config) -> Result:
    """Plan every row."""
    found: list[Planned] = []
    with progress(config.chosen, desc="published steps") as bar:
        for row in bar:
            same = next((each for each in found if each.row.step == row.step), None)
            with noted(f"in the row {row.name}"):
                found.append(replace(same, row=row, measured=row.seconds) if same else plan(row))
    figure = figure_file("published", config)
    if figure:
        measured_figure([_point(each) for each in found], _summary(found)[0]).savefig(figure, dpi=150)
    return Result(config=config, rows=tuple(found), figure=figure)


def _point(planned: Planned) -> Point:
    return Point(planned.row.card, planned.measured, planned.predicted, planned.low, planned.high, planned.bound)


def table(result: Result) -> str:
    """A row for each published step, and what all of them say together."""
    head = ["step", "measured by", "measured", "bound", "predicted", "range", "error", "within", "bound holds"]
    cells = [head, *(_cells(each) for each in result.rows)]
    return "\n".join([*columns(cells, left=(0, 1)), "", *_summary(result.rows)])


def _cells(planned: Planned) -> list[str]:
    seconds = [f"{1e3 * each:,.1f}" for each in (planned.measured, planned.bound, planned.predicted)]
    span = f"{1e3 * planned.low:,.1f} to {1e3 * planned.high:,.1f}"
    said = ["yes" if each else "NO" for each in (planned.within, planned.holds)]
    return [planned.row.name, planned.row.by.partition(" (")[0], *seconds, span, f"{planned.error:+.0%}", *said]


def _summary(rows: Sequence[Planned]) -> list[str]:
    errors = sorted(abs(each.error) for each in rows)
    within, holds = sum(each.within for each in rows), sum(each.holds for each in rows)
    lines = [
        f"{len(rows)} steps: the median error of the prediction is {statistics.median(errors):.0%}, the largest {errors[-1]:.0%}"
    ]
    lines.append(f"{within} lie within the range that is printed; the bound holds for {holds}")
    return [*lines, "times are milliseconds of a step"]


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("published", Config, DESCRIPTION, run, table)
