"""Which schedule, and what does it cost in memory? Every schedule on the virtual clock. See README.md beside this.

No device is needed. Where a rank has v stages each costs 1 / v, so that all schedules do the same work for a microbatch.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.results import Findings, columns, command
from experiments.schedules.overview import overview
from jaxpp.errors import ScheduleError
from jaxpp.runtime.progress import progress
from jaxpp.schedule import SCHEDULES, Simulation, make, simulate

__all__ = ["Config", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Compare all schedules: bubble, memory, and the time to make and simulate them."
GIF_RANKS, GIF_MICROBATCHES = 4, 8  # at most, so that its numbers can be read


@dataclass(frozen=True)
class Config:
    """Sizes, and what things take; any unit of time, the same for all.

    Attributes:
        ranks: rows of the schedules.
        microbatches: parts of the batch.
        forward: of one microbatch on one rank, all its stages together.
        input_grad: of the input part of its backward on one rank.
        weight_grad: of the weight part of its backward on one rank.
        transfer: from one rank to another.
        dispatch: of the host, for one action.
        figures: draw them.
        out: folder for the figures; made if there is none.
        json: file to add the line of results to.
    """

    ranks: int = 8
    microbatches: int = 32
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0
    dispatch: float = 0.0
    figures: bool = True
    out: Path = Path("experiments/schedules/out")
    json: Path | None = None


@dataclass(frozen=True)
class Row:
    """What one schedule does.

    Attributes:
        name: of the schedule.
        stages_per_rank: that it was made with.
        makespan: from the first action to the end of the last.
        bubble_fraction: idle time over ranks x makespan.
        own_bubble: idle time inside the ranks' own spans, from first to last action, all ranks together.
        peak: most residuals alive at once on a rank; one is what a rank keeps of a microbatch, all its stages together.
        peak_ranks: the ranks where that is so.
        make_seconds: real time to make the schedule.
        simulate_seconds: real time to simulate it.
    """

    name: str
    stages_per_rank: int
    makespan: float
    bubble_fraction: float
    own_bubble: float
    peak: float
    peak_ranks: tuple[int, ...]
    make_seconds: float
    simulate_seconds: float


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a schedule there is for these sizes.
        refused: for the other schedules, which sizes are near.
        files: the figures.
    """

    config: Config
    rows: tuple[Row, ...]
    refused: dict[str, str]
    files: tuple[Path, ...]

    @property
    def figures(self) -> str:
        """Where the figures are; empty if none were drawn."""
        return f"{len(self.files)} in {self.config.out}" if self.files else ""


def run(config: Config) -> Result:
    """Make and simulate every schedule, then draw them.

    Raises:
        ScheduleError: a cost that is none.
    """
    rows: list[Row] = []
    refused: dict[str, str] = {}
    simulations: dict[str, Simulation] = {}
    with progress(SCHEDULES, desc="schedules") as bar:
        for name in bar:
            try:
                row, simulation = measure(name, config)
            except SizeError as error:
                refused[name] = str(error)
            else:
                rows.append(row)
                if config.figures:
                    simulations[name] = simulation
    files = ()
    if config.figures:
        config.out.mkdir(parents=True, exist_ok=True)
        drawings = list(draw(config, rows, simulations))
        with progress(drawings, desc="figures") as bar:
            for path, make_file in bar:
                make_file(path)
        files = tuple(path for path, _ in drawings)
    return Result(config, tuple(rows), refused, files, devices=())


class SizeError(ValueError):
    """There is no such schedule for these sizes; the message says for which there is."""


def measure(name: str, config: Config) -> tuple[Row, Simulation]:
    """A schedule made and simulated, with the clock running.

    Raises:
        SizeError: there is none for these sizes.
    """
    begun = time.perf_counter()
    try:
        schedule = make(name, num_ranks=config.ranks, num_microbatches=config.microbatches)
    except ScheduleError as error:
        raise SizeError(str(error).split("Fix: ")[-1].rstrip(".")) from None
    made = time.perf_counter()
    v = schedule.num_stages // schedule.num_ranks
    simulation = simulate(
        schedule,
        forward=config.forward / v,
        input_grad=config.input_grad / v,
        weight_grad=config.weight_grad / v,
        transfer=config.transfer,
        dispatch=config.dispatch,
    )
    peaks = simulation.peak_residuals
    row = Row(
        name=name,
        stages_per_rank=v,
        makespan=simulation.makespan,
        bubble_fraction=simulation.bubble_fraction,
        own_bubble=sum(simulation.own_bubble),
        peak=max(peaks) / v,
        peak_ranks=tuple(rank for rank, peak in enumerate(peaks) if peak == max(peaks)),
        make_seconds=made - begun,
        simulate_seconds=time.perf_counter() - made,
    )
    return row, simulation


def draw(config: Config, rows: Sequence[Row], simulations: dict[str, Simulation]) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Each file with the function that makes it."""
    for name, simulation in simulations.items():
        yield config.out / f"{name}_timeline.png", lambda path, it=simulation: it.figure().savefig(path)
        yield config.out / f"{name}_pebbles.png", lambda path, it=simulation: it.pebble_figure().savefig(path)
    points = {row.name: (row.peak, row.bubble_fraction) for row in rows}
    heading = f"{config.ranks} ranks, {config.microbatches} microbatches"
    yield config.out / "overview.png", lambda path: overview(points, heading).savefig(path)
    ranks, microbatches = min(config.ranks, GIF_RANKS), min(config.microbatches, GIF_MICROBATCHES)
    yield config.out / "1f1b.gif", make("1f1b", num_ranks=ranks, num_microbatches=microbatches).pebble_gif


def table(result: Result) -> str:
    """The rows as text, and below them the schedules there are none of."""
    lines = [["schedule", "stages", "makespan", "bubble", "own-span", "peak", "on ranks", "make", "simulate"]]
    for row in result.rows:
        numbers = [
            str(row.stages_per_rank),
            f"{row.makespan:.7g}",
            f"{row.bubble_fraction:.1%}",
            f"{round(row.own_bubble, 9) + 0.0:.7g}",
        ]
        timings = [f"{row.make_seconds:.3f} s", f"{row.simulate_seconds:.3f} s"]
        lines.append([row.name, *numbers, f"{row.peak:g}", _ranks(row.peak_ranks), *timings])
    width = max(len(line[0]) for line in lines)
    refused = [f"{name.ljust(width)}  not for these sizes: {fix}" for name, fix in result.refused.items()]
    return "\n".join([*columns(lines), *refused])


def _ranks(ranks: Sequence[int]) -> str:
    whole = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("schedules", Config, DESCRIPTION, run, table)
