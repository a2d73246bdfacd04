"""Is the forecast right, and which schedule holds what? Each pair forecast from shapes, then run and looked at. See README.md.

Bytes are counted, nothing is timed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.memory.figure import Bars, bars_figure
from experiments.memory.measure import PARTS, Holding, arrays_now, measure
from experiments.memory.pairs import PAIRS, Pair, gpt, mlp
from experiments.options import ConfigError, Flag, check_figure, check_multiple, check_names, check_numbers, figure_file
from experiments.problems import Problem
from experiments.results import Findings, columns, command, noted
from jaxpp.runtime.progress import progress
from jaxpp.schedule import Schedule

__all__ = ["Config", "ConfigError", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Forecast the memory of a step, then measure it, for pairs of model and schedule."
SHOWN = ("parameters", "optimizer", "gradients", "residuals", "temporaries")
MIB = 2**20


@dataclass(frozen=True)
class Config:
    """The pairs and their sizes.

    Attributes:
        pairs: names, such as mlp-gpipe; all unless given.
        ranks: devices. Schedules with two stages a rank get twice as many stages.
        microbatches: parts of a batch.
        mlp_width: features of each hidden layer of the MLP.
        mlp_depth: its hidden layers; there is one layer more, the head.
        mlp_batch: its examples a step.
        gpt_width: features of the GPT's residual stream.
        gpt_depth: its blocks.
        gpt_heads: attention heads a block.
        gpt_length: tokens of a sequence.
        gpt_batch: sequences a step.
        dropout: rate, of the GPT; above 0 it takes twice as long to compile.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    pairs: tuple[str, ...] = ()
    ranks: int = 4
    microbatches: int = 8
    mlp_width: int = 256
    mlp_depth: int = 14
    mlp_batch: int = 2048
    gpt_width: int = 128
    gpt_depth: int = 3
    gpt_heads: int = 4
    gpt_length: int = 64
    gpt_batch: int = 64
    dropout: float = 0.0
    figure: Path = Path("experiments/memory/out/memory.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_names("pairs", self.pairs, PAIRS)
        check_numbers(self)
        check_multiple(self, "gpt_width", "gpt_heads", "heads share the width equally")
        check_figure(self)


@dataclass(frozen=True)
class Row:
    """What one pair holds.

    Attributes:
        pair: which.
        stages: of its pipeline.
        holdings: of each device, in the order of the ranks.
    """

    pair: Pair
    stages: int
    holdings: tuple[Holding, ...]

    @property
    def worst(self) -> Holding:
        """The device that holds most, as measured."""
        return max(self.holdings, key=lambda holding: holding.measured)

    @property
    def foreseen(self) -> str:
        """The device of which the forecast says that."""
        return max(self.holdings, key=lambda holding: sum(holding.forecast)).device


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        parts: what the numbers of a holding are for.
        rows: one a pair.
        figure: the file, if one was drawn.
    """

    config: Config
    parts: tuple[str, ...]
    rows: tuple[Row, ...]
    figure: Path | None


def run(config: Config) -> Result:
    """Forecast and measure every pair, then draw them.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, a model that cannot be cut into so many stages, or a batch
            that cannot be split.
    """
    figure = figure_file("memory", config)
    sizes = {"num_ranks": config.ranks, "num_microbatches": config.microbatches}
    pairs = [PAIRS[name] for name in config.pairs or PAIRS]
    schedules = [jaxpp.schedule.make(pair.schedule, **sizes) for pair in pairs]  # so that a wrong one is not found at the end
    ensure_devices(config.ranks)
    rows: list[Row] = []
    with progress(list(zip(pairs, schedules, strict=True)), unit="pair") as bar:
        for pair, schedule in bar:
            bar.set_description(pair.name)
            rows.append(Row(pair, schedule.num_stages, holdings(pair, schedule, config)))
    if figure:
        bars_figure([_bars(row) for row in rows], _heading(config)).savefig(figure)
    return Result(config, PARTS, tuple(rows), figure)


def holdings(pair: Pair, schedule: Schedule, config: Config) -> tuple[Holding, ...]:
    """What each device holds: the forecast, made before there is any parameter; then ``init``, a step, and the measurement."""
    problem, before = _problem(pair, config), arrays_now()
    pipe = jaxpp.Pipeline(
        problem.loss_fn,
        optax.adamw(1e-3),
        num_stages=schedule.num_stages,
        num_microbatches=config.microbatches,
        schedule=schedule,
        remat=pair.policy,
    )
    with noted(f"This was the pair {pair.name}."):
        key = jax.random.key(0)
        forecast = pipe.forecast(jax.eval_shape(problem.init, key), _shapes(problem.batch), key)
        state = pipe.init(problem.init, key, problem.batch)
        state, _ = pipe.step(state, problem.batch, key)
        return measure(pipe, forecast, state, problem.batch, key, before)


def table(result: Result) -> str:
    """The result as text: what the device that holds most holds, how far off the forecasts were, the peak of each device."""
    parts = [["pair", "stages", "device", "forecast", "measured", "ratio", *SHOWN, "other"]]
    names = [holding.device for holding in result.rows[0].holdings]
    peaks = [["pair", *names]]
    for row in result.rows:
        name, worst = row.pair.name, row.worst
        found = dict(zip(PARTS, worst.found, strict=True))
        wrong = f" (forecast {row.foreseen})" if row.foreseen != worst.device else ""
        sizes = [_mib(found[part]) + f" ({worst.microbatches:g})" * (part == "residuals") for part in SHOWN]
        both = [_mib(sum(worst.forecast)), _mib(worst.measured), f"{worst.ratio:.4f}"]
        other = worst.measured - sum(found[part] for part in SHOWN)
        parts.append([name, str(row.stages), worst.device + wrong, *both, *sizes, _mib(other)])
        peaks.append([name, *(_mib(holding.measured) for holding in row.holdings)])
    every = [holding for row in result.rows for holding in row.holdings]
    ratios = [holding.ratio for holding in every]
    apart = max(abs(holding.measured - sum(holding.forecast)) for holding in every)
    notes = [
        "MiB, on the device that holds most, when it does; in brackets: microbatches whose backward is not done",
        f"forecast / measured, all devices: from {min(ratios):.4f} to {max(ratios):.4f}, at most {apart:,} bytes apart",
    ]
    return "\n".join([*columns(parts), "", *notes, "", "MiB measured on each device:", *columns(peaks)])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("memory", Config, DESCRIPTION, run, table)


def _problem(pair: Pair, config: Config) -> Problem:
    if pair.model == "mlp":
        return mlp(config.mlp_width, config.mlp_depth, config.mlp_batch, pair.compute)
    sizes = config.gpt_width, config.gpt_depth, config.gpt_heads, config.gpt_length, config.gpt_batch
    return gpt(*sizes, config.dropout, pair.compute)


def _shapes(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)


def _bars(row: Row) -> Bars:
    worst = row.worst
    return Bars(row.pair.name, worst.device, worst.forecast, worst.found, worst.measured, worst.microbatches)


def _heading(config: Config) -> str:
    return f"peak of the device that holds most; {config.ranks} ranks, {config.microbatches} microbatches"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.2f}"
