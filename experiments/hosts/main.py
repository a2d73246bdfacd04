"""What does a step cost when several processes run it, as several hosts would? See README.md beside this file."""

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.hosts.launch import launch
from experiments.hosts.measure import Crossing, Sizes, Told, measure, worker
from experiments.options import ConfigError, Flag, check_batch, check_numbers
from experiments.results import Findings, columns, command
from jaxpp.runtime.progress import progress
from jaxpp.schedule import SCHEDULES

__all__ = ["Config", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Run the same steps in one process and in several, compare the losses, and count what crosses between processes."
KINDS = ("activations", "cotangents", "tied", "scalars")


@dataclass(frozen=True)
class Config:
    """The pipeline, and the processes that run it.

    Attributes:
        processes: how many processes; several numbers are measured by turns. One process is always measured too.
        ranks: devices of all processes together, a multiple of each number of processes.
        schedule: order of the actions.
        microbatches: parts of the batch.
        width: features of each hidden layer, and of the input.
        depth: hidden layers.
        batch: examples of a step.
        losses: steps whose losses are compared.
        steps: steps timed in a round; the median counts.
        rounds: how often the processes are started anew, all numbers of processes by turns.
        seconds: the time limit of the processes of a round.
        no_spawn: start no process: this one has been started by Slurm, MPI or Kubernetes together with the others.
        markdown: print the tables as Markdown, for README.md.
        json: file to add the line of results to.
    """

    processes: tuple[int, ...] = (2, 4)
    ranks: int = 8
    schedule: str = "1f1b"
    microbatches: int = 8
    width: int = 128
    depth: int = 16
    batch: int = 32
    losses: int = 5
    steps: int = 60
    rounds: int = 2
    seconds: int = 300
    no_spawn: Flag = False
    markdown: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)
        check_batch(self)
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"--schedule {self.schedule}: there is no such schedule. Fix: pass one of {', '.join(SCHEDULES)}.")
        if not self.no_spawn and any(self.ranks % count for count in self.processes):
            given = " ".join(map(str, self.processes))
            fix = "pass a --ranks that is a multiple of each"
            raise ConfigError(f"--processes {given} --ranks {self.ranks}: each process has as many devices. Fix: {fix}.")

    def sizes(self, ranks: int) -> Sizes:
        """What the processes are told.

        Args:
            ranks: of the schedule.
        """
        same = {name: getattr(self, name) for name in ("width", "depth", "batch", "microbatches", "schedule", "losses", "steps")}
        return Sizes(stages=ranks * SCHEDULES[self.schedule].stages_per_rank, **same)


@dataclass(frozen=True)
class Row:
    """The steps of some processes together: medians over the rounds.

    Attributes:
        processes: how many.
        seconds: of a step.
        ratio: over the step of one process; the median of the rounds' ratios. None if one process was not measured.
        host: seconds until ``pipe.step`` returns, for each process.
        cpu: seconds of these in which the thread that called it ran.
        crossing: seconds of these for sends between processes.
        instructions: that each process dispatches in a step.
        programs: that each process has compiled for its steps.
        crossings: what processes send each other in a step.
        losses: of the first steps.
        agree: whether all processes read the same losses, in all rounds.
        equal: whether the losses have the bits of those of one process; None if that was not measured.
    """

    processes: int
    seconds: float
    ratio: float | None
    host: tuple[float, ...]
    cpu: tuple[float, ...]
    crossing: tuple[float, ...]
    instructions: tuple[int, ...]
    programs: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    losses: tuple[float, ...]
    agree: bool
    equal: bool | None

    def sent(self, kind: str) -> int:
        """Bytes of a kind that cross between processes in a step."""
        return sum(crossing.num_bytes for crossing in self.crossings if crossing.kind == kind)

    @property
    def sends(self) -> int:
        """How many sends between processes there are in a step."""
        return sum(crossing.times for crossing in self.crossings)


@dataclass(frozen=True)
class Result(Findings):
    """What was run, and what came out.

    Attributes:
        config: what was run.
        rows: one for each number of processes.
    """

    config: Config
    rows: tuple[Row, ...]


def run(config: Config) -> Result:
    """Start the processes by turns, or join those that somebody else has started.

    Raises:
        ProcessesError: a process failed, or took too long.
        SystemExit: this process has joined others and is not process 0, which alone says what was found.
    """
    if config.no_spawn:
        jax.distributed.initialize()
        found = [measure(config.sizes(jax.device_count()))]
        if jax.process_index() > 0:
            sys.exit()
        return Result(config=config, rows=(_row(jax.process_count(), found, None),))
    counts = sorted({1, *config.processes})
    rounds: dict[int, list[Told]] = {count: [] for count in counts}
    order = [count for k in range(config.rounds) for count in counts[:: 1 - 2 * (k % 2)]]
    with progress(order, desc="processes") as bar:
        for count in bar:
            rounds[count].append(_told(config, count))
    kinds = tuple(f"{config.ranks} forced CPU devices, shared by the processes".splitlines())
    return Result(config=config, rows=tuple(_row(count, rounds[count], rounds[1]) for count in counts), devices=kinds)


def _told(config: Config, count: int) -> Told:
    """What so many processes find."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "told.json"
        arguments = {"sizes": dataclasses.asdict(config.sizes(config.ranks)), "file": str(file)}
        target = f"{worker.__module__}:{worker.__name__}"
        launch(target, count, arguments, devices=config.ranks // count, seconds=config.seconds)
        told = json.loads(file.read_text())
    losses = tuple(map(tuple, told.pop("losses")))
    return Told(losses=losses, crossings=tuple(Crossing(*each) for each in told.pop("crossings")), **told)


def _row(count: int, rounds: Sequence[Told], alone: Sequence[Told] | None) -> Row:
    seconds = [max(told.seconds) for told in rounds]
    one = {told.losses[0] for told in rounds}
    ratio = equal = None
    if alone is not None:
        ratio = statistics.median(own / max(told.seconds) for own, told in zip(seconds, alone, strict=True))
        equal = one == {told.losses[0] for told in alone} and len(one) == 1
    return Row(
        processes=count,
        seconds=statistics.median(seconds),
        ratio=ratio,
        host=tuple(map(statistics.median, zip(*(told.host for told in rounds), strict=True))),
        cpu=tuple(map(statistics.median, zip(*(told.cpu for told in rounds), strict=True))),
        crossing=tuple(map(statistics.median, zip(*(told.crossing for told in rounds), strict=True))),
        instructions=rounds[0].instructions,
        programs=rounds[0].programs,
        crossings=rounds[0].crossings,
        losses=rounds[0].losses[0],
        agree=all(len({*told.losses}) == 1 for told in rounds),
        equal=equal,
    )


def table(result: Result) -> str:
    """The rows as tables: of text, or of Markdown."""
    step = [
        [
            "processes",
            "devices each",
            "step, ms",
            "over one",
            "host, us",
            "of it CPU",
            "for crossings",
            "instructions",
            "programs",
            "losses",
        ]
    ]
    sent = [["processes", "sends", *KINDS, "bytes between processes"]]
    for row in result.rows:
        count = row.processes
        times = [f"{1e3 * row.seconds:.1f}", "" if row.ratio is None else f"{row.ratio:.2f}"]
        host = [_most([1e6 * value for value in values]) for values in (row.host, row.cpu, row.crossing)]
        own = [_most(row.instructions), _most(row.programs)]
        devices = jax.device_count() if result.config.no_spawn else result.config.ranks
        step.append([str(count), str(devices // count), *times, *host, *own, _said(row)])
        sizes = [row.sent(kind) for kind in KINDS]
        sent.append([str(count), str(row.sends), *(f"{size:,}" for size in sizes), f"{sum(sizes):,}"])
    losses = ", ".join(f"{loss:.6f}" for loss in result.rows[0].losses)
    parts = [("A step; where processes differ, of the process with the most", step), ("Bytes between processes in a step", sent)]
    show = _in_markdown if result.config.markdown else columns
    return "\n\n".join([*("\n".join([f"{title}:", *show(cells)]) for title, cells in parts), f"Losses: {losses}"])


def _most(values: Sequence[float]) -> str:
    return f"{max(values):.0f}"


def _said(row: Row) -> str:
    if not row.agree:
        return "differ between processes"
    return "" if row.equal is None else ("the same bits" if row.equal else "others than one process")


def _in_markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = (f"| {' | '.join(row)} |" for row in cells)
    return ["", head, "|" + "---|" * len(cells[0]), *rows]


def main() -> None:
    """Read the command line, run, print the tables, and write the line of JSON."""
    found = command("hosts", Config, DESCRIPTION, run, table)
    if not all(row.agree and row.equal is not False for row in found.rows):
        sys.exit("hosts: the losses differ")
