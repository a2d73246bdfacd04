"""The knobs that ``tune`` turns: the choices between candidates, and which candidates there are.

A candidate is the options of one pipeline. Candidates that run the same stage programs are a *family*: they have the same cuts, the
same microbatch size, keep the same residuals, and split their backwards alike. What costs time in a search is to trace, cut and
compile, so families are measured, and candidates only simulated. Which schedule orders the programs, which rank runs them, and
whether residuals wait in host memory makes no other program.

To simulate a candidate costs milliseconds, so there may be many. To measure a family costs seconds, so by default there are few
numbers of microbatches: powers of two times the ranks, from half as many as there are ranks. Where a number near a power of two
divides the batch evenly, it stands for the power, since microbatches of one size need one set of programs.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.offload import offloads
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.types import Arguments

_POWERS = range(-1, 4)  # of two: the numbers of microbatches in parts of the number of ranks


class Family(NamedTuple):
    """What candidates with the same stage programs have in common."""

    num_stages: int
    num_microbatches: int  # of a batch; with the batch it says the size of a microbatch
    remat: str  # ``"least"``, ``"keep"`` or ``"recompute"``, the same for all stages
    balance: str  # what the stages have equal amounts of
    splits: bool  # whether backwards are split into I and W

    @property
    def words(self) -> str:
        """For people."""
        recompute = ", recomputed" * (self.remat == "recompute")
        return f"{_counted(self.num_stages, 'stage')}, {_counted(self.num_microbatches, 'microbatch', 'es')}{recompute}"


@dataclass(frozen=True)
class Candidate:
    """The options of one pipeline."""

    schedule: Schedule  # made for its ranks, stages and microbatches, under a name that ``Pipeline`` takes
    remat: str = "least"  # ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``, the same for all stages
    balance: str = "flops"  # what the stages have equal amounts of

    @cached_property
    def family(self) -> Family:
        """The family whose programs it runs; offloading keeps what ``"least"`` keeps."""
        kept, schedule = "least" if self.remat == "offload" else self.remat, self.schedule
        splits = any(action.kind == Kind.W for row in schedule.rows for action in row)
        return Family(schedule.num_stages, schedule.num_microbatches, kept, self.balance, splits)

    @property
    def offload(self) -> tuple[int | None, ...]:
        """``except_last`` of each stage, as ``schedule.offload.offloads`` takes it; None of each where nothing is offloaded."""
        return (1 if self.remat == "offload" else None,) * self.schedule.num_stages

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank runs."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def words(self) -> str:
        """For people."""
        schedule, *others = (knob.phrase(knob.value(self)) for knob in KNOBS)
        return f"{schedule} with {', '.join(others)}"

    @property
    def options(self) -> Arguments:
        """The arguments of ``Pipeline`` that differ; the schedule itself where a rank has more stages than its name stands for."""
        schedule = self.schedule
        named = schedule.name in SCHEDULES and SCHEDULES[schedule.name].stages_per_rank == self.stages_per_rank
        sizes: Arguments = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
        return {**sizes, "schedule": schedule.name if named else schedule, "remat": self.remat, "balance": self.balance}


class Knob(NamedTuple):
    """A choice between candidates."""

    name: str  # of its column in a table; a sentence about it begins with this name
    value: Callable[[Candidate], int | str]  # what a candidate chose
    phrase: Callable[[int | str], str]  # a value among the options of a candidate
    words: Callable[[int | str], str] = str  # a value in a sentence about the knob
    turns: tuple[str, ...] = ()  # the knobs that turn with it: candidates that differ in it alone may differ in these too


_OTHERS = ("schedule", "microbatches", "stages a rank", "balance", "remat")
KNOBS = (
    Knob("schedule", lambda c: c.schedule.name, str),
    Knob("ranks", lambda c: c.schedule.num_ranks, lambda n: _counted(n, "rank"), turns=_OTHERS),
    Knob("microbatches", lambda c: c.schedule.num_microbatches, lambda n: _counted(n, "microbatch", "es")),
    Knob("stages a rank", lambda c: c.stages_per_rank, lambda n: f"{_counted(n, 'stage')} a rank", turns=("schedule",)),
    Knob("balance", lambda c: c.balance, "balance={!r}".format, repr),
    Knob("remat", lambda c: c.remat, "remat={!r}".format, repr),
)


def _counted(number: int | str, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


@dataclass(frozen=True)
class Space:
    """What is looked at: every combination of these is a candidate, if there is such a schedule."""

    num_examples: int  # of the batch: each microbatch has at least one of them
    num_ranks: tuple[int, ...]
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    stages_per_rank: tuple[int, ...] = (1, 2)
    num_microbatches: tuple[int, ...] = ()  # numbers of microbatches; the usual ones if none are given, and 1 for ``naive``
    remat: tuple[str, ...] = ("least",)  # what stages keep: ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``
    balance: tuple[str, ...] = ("flops",)  # what stages have equal amounts of
    in_order: bool = False  # whether each stage must run its forwards in order, because the loss has a model state


def usual_microbatches(num_examples: int, num_ranks: int) -> tuple[int, ...]:
    """The numbers of microbatches that are looked at unless others are asked for.

    Example:
        >>> usual_microbatches(num_examples=96, num_ranks=4)
        (2, 4, 8, 16, 32)
        >>> usual_microbatches(num_examples=10, num_ranks=4)
        (2, 5, 10)
    """
    divisors = [n for n in range(1, num_examples + 1) if num_examples % n == 0]
    counts = set[int]()
    for power in _POWERS:
        wanted = max(1, math.ceil(num_ranks * 2.0**power))
        near = min(divisors, key=lambda n, wanted=wanted: abs(math.log2(n / wanted)))
        if abs(math.log2(near / wanted)) < 0.5:
            counts.add(near)
        elif wanted <= num_examples:
            counts.add(wanted)
    return tuple(sorted(counts))


def candidates(space: Space) -> tuple[Candidate, ...]:
    """All candidates, each once; residuals that would never leave their device make no candidate of their own."""
    every: dict[Candidate, None] = {}
    for schedule in _schedules(space):
        for balance in space.balance:
            for remat in space.remat:
                candidate = Candidate(schedule, remat, balance)
                if remat != "offload" or offloads(schedule.rows, candidate.offload):
                    every.setdefault(candidate)
    return tuple(every)


def _schedules(space: Space) -> Iterator[Schedule]:
    for ranks in space.num_ranks:
        usual = usual_microbatches(space.num_examples, ranks)
        for name in space.schedules:
            recipe = SCHEDULES[name]
            for v in (v for v in space.stages_per_rank if v == recipe.stages_per_rank or (recipe.varies and v > 1)):
                for count in space.num_microbatches or ((1,) if name == "naive" else usual):
                    with contextlib.suppress(ScheduleError):  # there is none of these sizes
                        schedule = make(name, ranks, count, v)
                        if count <= space.num_examples and not (space.in_order and _is_mixed(schedule)):
                            yield schedule


def _is_mixed(schedule: Schedule) -> bool:
    """Whether some stage runs its forwards in another order than that of the microbatches."""
    forwards = [action for action in schedule.order if action.kind == Kind.F]
    rows = [[action.microbatch for action in forwards if action.stage == stage] for stage in range(schedule.num_stages)]
    return any(row != sorted(row) for row in rows)
