"""What does keeping less cost, and what does it save? The same step with each way to keep residuals, in one run. See README.md.

Times are medians over interleaved rounds, each next to a plain ``jax.jit`` step of the same model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import ConfigError, Flag, check_names, check_numbers, check_writable
from experiments.plain import Runner, plain_step
from experiments.problems import Problem
from experiments.remat.problems import PROBLEMS
from experiments.results import Findings, columns, command, noted
from jaxpp.runtime.progress import progress

__all__ = ["Config", "ConfigError", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Time a step, and count what it keeps, for each way to keep residuals."
WAYS = ("keep", "least", "recompute")
MIB = 2**20


@dataclass(frozen=True)
class Config:
    """The models and how they are run.

    Attributes:
        models: gpt, resnet, mlp.
        computes: types to compute in; parameters are float32.
        ways: what is passed as remat.
        stages: pipeline stages.
        microbatches: parts of a batch.
        schedule: order of the actions.
        rounds: interleaved rounds; 0 counts bytes and times nothing.
        steps: steps of each kind timed in a round, after one that is not.
        scan: the plain step loops over microbatches with lax.scan, which compiles sooner than its unrolled loop.
        gpt_width: features of the GPT's residual stream.
        gpt_depth: its blocks.
        gpt_heads: attention heads a block.
        gpt_length: tokens of a sequence.
        gpt_batch: sequences a step.
        gpt_vocabulary: tokens there are.
        dropout: rate, of the GPT.
        resnet_width: channels of the ResNet's first group.
        resnet_size: pixels of an image's side.
        resnet_batch: images a step.
        mlp_width: features of each hidden layer of the MLP.
        mlp_depth: its hidden layers.
        mlp_batch: examples a step.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = tuple(PROBLEMS)
    computes: tuple[str, ...] = ("float32", "bfloat16")
    ways: tuple[str, ...] = WAYS
    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    rounds: int = 9
    steps: int = 2
    scan: Flag = False
    gpt_width: int = 256
    gpt_depth: int = 8
    gpt_heads: int = 4
    gpt_length: int = 64
    gpt_batch: int = 32
    gpt_vocabulary: int = 256
    dropout: float = 0.0
    resnet_width: int = 16
    resnet_size: int = 32
    resnet_batch: int = 64
    mlp_width: int = 1024
    mlp_depth: int = 12
    mlp_batch: int = 1024
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, PROBLEMS, none=False)
        check_names("ways", self.ways, WAYS, none=False)
        wrong = [name for name in self.computes if name not in ("float32", "bfloat16", "float16")]
        if wrong:
            raise ConfigError(f"--computes {' '.join(wrong)}: not a floating type of JAX. Fix: pass float32 or bfloat16.")
        check_numbers(self, zero=("rounds",))
        batches = {"gpt": self.gpt_batch, "resnet": self.resnet_batch, "mlp": self.mlp_batch}
        uneven = [f"--{name}-batch {batches[name]}" for name in self.models if batches[name] % self.microbatches]
        if uneven:
            rule = f"the plain step divides its batch evenly into --microbatches {self.microbatches}"
            raise ConfigError(f"{', '.join(uneven)}: {rule}. Fix: pass a multiple of {self.microbatches}.")


@dataclass(frozen=True)
class Row:
    """What one way to keep residuals does to one model.

    Attributes:
        model: which.
        compute: the type it computes in.
        way: what was passed as remat.
        kept: bytes that a microbatch holds between forward and backward, on all stages together.
        keepable: what they are with ``keep``.
        peak: bytes of the fullest device at its worst moment, as forecast: parameters, optimizer, temporaries and all.
        seconds: the median step; 0 if nothing was timed.
        plain: the median plain step.
        ratio: seconds / plain, the median of the rounds' ratios.
        spread: the quartiles of those.
    """

    model: str
    compute: str
    way: str
    kept: int
    keepable: int
    peak: int
    seconds: float
    plain: float
    ratio: float
    spread: tuple[float, float]


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model, type and way.
    """

    config: Config
    rows: tuple[Row, ...]


def run(config: Config) -> Result:
    """Count and time every model, type and way.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, or a model that cannot be cut into so many stages.
    """
    check_writable("--json", config.json)
    schedule = jaxpp.schedule.make(config.schedule, num_ranks=config.stages, num_microbatches=config.microbatches)
    ensure_devices(config.stages)
    rows: list[Row] = []
    pairs = [(model, compute) for model in config.models for compute in config.computes]
    with progress(total=len(pairs) * max(1, config.rounds), unit="round") as bar:
        for model, compute in pairs:
            bar.set_description(f"{model} {compute}")
            with noted(f"This was the model {model} in {compute}."):
                rows += measure(model, compute, schedule, config, bar)
    return Result(config, tuple(rows))


def measure(model: str, compute: str, schedule: jaxpp.schedule.Schedule, config: Config, bar: Any) -> list[Row]:
    """All ways to keep the residuals of one model.

    Args:
        model: its name.
        compute: the type to compute in.
        schedule: the order of the actions.
        config: sizes and rounds.
        bar: counts the rounds.
    """
    problem, key, optimizer = PROBLEMS[model](config, compute), jax.random.key(0), optax.adamw(1e-3)
    batch = jax.tree.map(jnp.asarray, problem.batch)
    counts = {"num_stages": schedule.num_stages, "num_microbatches": config.microbatches, "schedule": schedule}
    pipes = {way: jaxpp.Pipeline(problem.loss_fn, optimizer, remat=way, **counts) for way in config.ways}
    shapes = jax.eval_shape(problem.init, key)
    peaks = {way: max(pipe.forecast(shapes, batch, key).peaks.values()) for way, pipe in pipes.items()}
    times = _times(problem, pipes, batch, config, bar) if config.rounds else {}
    rows = []
    for way, pipe in pipes.items():
        kept, keepable = sum(stage.kept for stage in pipe.stages), sum(stage.keepable for stage in pipe.stages)
        taken, plain = np.array(times.get(way, [0.0])), np.array(times.get("plain", [1.0]))
        low, middle, high = np.quantile(taken / plain, (0.25, 0.5, 0.75))
        seconds, single = float(np.median(taken)), float(np.median(plain)) if times else 0.0
        sizes = kept, keepable, peaks[way]
        rows.append(Row(model, compute, way, *sizes, seconds, single, float(middle), (float(low), float(high))))
    return rows


def _times(
    problem: Problem, pipes: Mapping[str, jaxpp.Pipeline], batch: Any, config: Config, bar: Any
) -> Mapping[str, list[float]]:
    """Seconds of a step in each round, of each pipeline and of the plain step."""
    key, optimizer = jax.random.key(0), optax.adamw(1e-3)
    step = plain_step(problem.loss_fn, optimizer, config.microbatches, scan=config.scan)
    params = jax.jit(problem.init)(key)
    runners = {"plain": Runner(lambda state: step(state, batch, key), (params, optimizer.init(params)))}
    for way, pipe in pipes.items():
        runners[way] = Runner(lambda state, pipe=pipe: pipe.step(state, batch, key), pipe.init(problem.init, key, batch))
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(config.rounds):
        for name, runner in runners.items():
            times[name].append(runner.time(config.steps, warm_up=1)[0] / 1e6)
        bar.update()
    return times


def table(result: Result) -> str:
    """The result as text: a row a model, type and way."""
    cells = [["model", "compute", "remat", "kept", "of keep", "peak", "step, ms", "/ plain", "quartiles"]]
    for row in result.rows:
        sizes = [f"{row.kept / MIB:.2f}", f"{row.kept / row.keepable:.0%}", f"{row.peak / MIB:.1f}"]
        timed = [f"{1e3 * row.seconds:.1f}", f"{row.ratio:.3f}", f"{row.spread[0]:.3f} to {row.spread[1]:.3f}"]
        cells.append([row.model, row.compute, row.way, *sizes, *(timed if row.seconds else ["-"] * 3)])
    notes = [
        "kept: MiB that a microbatch holds between forward and backward, all stages together; of keep: as part of what "
        'remat="keep" holds',
        "peak: MiB of the fullest device as forecast, parameters, optimizer and temporaries included",
        "/ plain: over a plain jit step on one device, which keeps what XLA likes; the median of the rounds, and their quartiles",
    ]
    return "\n".join([*columns(cells, left=()), "", *notes])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("remat", Config, DESCRIPTION, run, table)
