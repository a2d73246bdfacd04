"""How fast is a pipelined step, and where does its time go? See README.md.

Every ratio is a median over interleaved rounds against the fastest of three plain ``jax.jit`` steps, so that what else the machine
does falls on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import Flag, check_figure, check_names, check_numbers, figure_file
from experiments.plain import PLAIN, PlainKind
from experiments.results import Findings, command, noted
from experiments.speed.figure import speed_figure
from experiments.speed.host import GrowthRow, HostRow, Lowering, grow, lowering, split_host_time
from experiments.speed.one_thread import OneThread, measure_one_thread
from experiments.speed.problems import PROBLEMS, sizes_of
from experiments.speed.steps import StepRow, measure_steps, prepare
from experiments.speed.synchronous import Synchronous, measure_synchronous
from experiments.speed.tables import in_markdown, in_text
from jaxpp.runtime.progress import progress
from jaxpp.schedule import Schedule

__all__ = ["PARTS", "SCHEDULES", "Config", "Result", "main", "run", "summary"]

DESCRIPTION = "Time pipelined steps against plain ones, and say where the host's time goes."
PARTS = ("steps", "host", "growth", "lowering", "one-thread", "synchronous")
SCHEDULES = ("1f1b", "gpipe", "naive", "interleaved", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Config:
    """What is measured, and at which sizes. A size of 0 is the problem's own.

    Attributes:
        parts: steps, host, growth, lowering, one-thread, synchronous.
        problems: tiny, mlp2k, gpt-small, resnet; the first of them is also what the part host looks at.
        schedules: order of the actions; the first schedule of each problem is the one whose compile time is measured.
        microbatches: parts of the batch; several numbers are measured one after the other.
        plain: plain steps to compare with: scan, unrolled, whole. An unrolled loop takes long to compile if the model is large.
        rounds: interleaved rounds.
        seconds: how long a kind of step is timed in a round; one step at least.
        width: features of a layer.
        depth: layers or blocks.
        batch: examples of a step, rounded up to a multiple of the microbatches.
        length: tokens of a sequence, or pixels of an image's side.
        ranks: devices; fewer than there are ranks are reused round-robin.
        host_steps: steps of which host, growth take medians.
        growth: pairs of stages and microbatches, of tiny stages.
        lowering: pairs of stages and microbatches.
        thread_steps: matrix products in the forward of a one-thread-wide stage.
        thread_rounds: rounds of the part one-thread.
        thread_microbatches: microbatches of the part one-thread.
        synchronous_loops: matrix products in a layer of the part synchronous.
        synchronous_rounds: rounds of the part synchronous.
        synchronous_microbatches: microbatches of the part synchronous.
        markdown: print the tables as Markdown, for README.md.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    parts: tuple[str, ...] = PARTS
    problems: tuple[str, ...] = ("tiny", "mlp2k")
    schedules: tuple[str, ...] = SCHEDULES
    microbatches: tuple[int, ...] = (8,)
    plain: tuple[PlainKind, ...] = PLAIN
    rounds: int = 5
    seconds: float = 0.1
    width: int = 0
    depth: int = 0
    batch: int = 0
    length: int = 0
    ranks: int = 0
    host_steps: int = 30
    growth: tuple[tuple[int, int], ...] = ((2, 4), (4, 16), (8, 64), (16, 128))
    lowering: tuple[tuple[int, int], ...] = ((8, 64), (8, 256))
    thread_steps: int = 32768
    thread_rounds: int = 5
    thread_microbatches: int = 16
    synchronous_loops: int = 60
    synchronous_rounds: int = 15
    synchronous_microbatches: int = 16
    markdown: Flag = False
    figure: Path = Path("experiments/speed/out/speed.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_names("parts", self.parts, PARTS, none=False)
        check_names("problems", self.problems, PROBLEMS, none=False)
        check_names("plain", self.plain, PLAIN, none=False)
        check_names("schedules", self.schedules, jaxpp.schedule.SCHEDULES, none=False)
        check_numbers(self, zero=("width", "depth", "batch", "length", "ranks"))
        check_figure(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given."""
        return {name: getattr(self, name) for name in ("width", "depth", "batch", "length", "ranks")}

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Each problem at each number of microbatches."""
        return [(name, count) for name in self.problems for count in self.microbatches]


@dataclass(frozen=True)
class Result(Findings):
    """What a run found; a part that was not asked for is empty.

    Attributes:
        config: what was asked for.
        steps: a row for each problem, number of microbatches and schedule.
        host: where the host's time goes in the first problem's first schedule.
        growth: a row for each pair of stages and microbatches.
        lowering: a row for each pair of stages and microbatches.
        one_thread: stages that are one thread wide.
        synchronous: such stages where whoever calls a program runs it.
        figure: the file, if one was drawn.
    """

    config: Config
    steps: tuple[StepRow, ...]
    host: tuple[HostRow, ...]
    growth: tuple[GrowthRow, ...]
    lowering: tuple[Lowering, ...]
    one_thread: OneThread | None
    synchronous: Synchronous | None
    figure: Path | None


def run(config: Config) -> Result:
    """Measure the parts that were asked for, and draw the steps.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, or a model that cannot be cut into so many stages.
    """
    figure = figure_file("speed", config)
    parts, growing = set(config.parts), config.growth if "growth" in config.parts else ()
    plans = {pair: _schedules(config, *pair) for pair in config.pairs} if parts & {"steps", "host"} else {}
    ranks = [sizes_of(name, count, config.sizes).ranks for name, count in plans]
    lowered = config.lowering if "lowering" in parts else ()
    ensure_devices(max([2, *ranks, *(pair[0] for pair in (*growing, *lowered))]))
    steps = tuple(_steps(config, plans)) if "steps" in parts else ()
    result = Result(
        config=config,
        steps=steps,
        host=_host(config) if "host" in parts else (),
        growth=tuple(grow(*pair, "1f1b", config.host_steps) for pair in growing),
        lowering=tuple(lowering(*pair, "1f1b") for pair in lowered),
        one_thread=_one_thread(config) if "one-thread" in parts else None,
        synchronous=_synchronous(config) if "synchronous" in parts else None,
        figure=figure if steps else None,
    )
    if result.figure:
        speed_figure(steps).savefig(result.figure)
    return result


def _schedules(config: Config, problem: str, num_microbatches: int) -> list[Schedule]:
    """The schedules of a problem."""
    ranks = sizes_of(problem, num_microbatches, config.sizes).ranks
    return [jaxpp.schedule.make(name, num_ranks=ranks, num_microbatches=num_microbatches) for name in config.schedules]


def _steps(config: Config, plans: dict[tuple[str, int], list[Schedule]]) -> Sequence[StepRow]:
    prepare()
    rows: list[StepRow] = []
    with progress(total=len(plans) * config.rounds, unit="round") as bar:
        for (name, count), schedules in plans.items():
            bar.set_description(f"{name}, {count} microbatches")
            with noted(f"This was the problem {name}."):
                problem = PROBLEMS[name][0](sizes_of(name, count, config.sizes))
                rows += measure_steps(name, problem, schedules, config.plain, config.rounds, config.seconds, bar)
    return rows


def _host(config: Config) -> tuple[HostRow, ...]:
    name, count = config.pairs[0]
    schedule, sizes = _schedules(config, name, count)[0], sizes_of(name, count, config.sizes)
    return split_host_time(PROBLEMS[name][0](sizes), schedule, config.host_steps)


def _one_thread(config: Config) -> OneThread:
    with progress(total=config.thread_rounds, unit="round", desc="one-thread-wide stages") as bar:
        return measure_one_thread(2, config.thread_microbatches, config.thread_steps, config.thread_rounds, bar)


def _synchronous(config: Config) -> Synchronous:
    with progress(total=config.synchronous_rounds, unit="round", desc="devices that run what they are called for") as bar:
        return measure_synchronous(config.synchronous_microbatches, config.synchronous_loops, config.synchronous_rounds, bar)


def summary(result: Result) -> str:
    """The result as tables: of text, or of Markdown to paste into README.md."""
    show: Any = in_markdown if result.config.markdown else in_text
    config = result.config
    name, count = config.pairs[0]
    head = f"{name}, {config.schedules[0]}, {count} microbatches"
    return show(result.steps, (head, result.host), result.growth, result.lowering, result.one_thread, result.synchronous)


def main() -> None:
    """Read the command line, run, print the tables, and write the line of JSON."""
    command("speed", Config, DESCRIPTION, run, summary)
