"""Schedules made to measure beside the best with a name, on random cost tables.

A table has uneven stages, slow links, one to four stages on each rank and so much room for residuals. The best with a name is the
shortest of those that fit. The same room may be meant in three ways, from the loosest to the strictest: what the table gives; what
the fullest rank of the best with a name holds; and on each rank what the best with a name holds there.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.results import columns
from jaxpp.runtime.progress import progress
from jaxpp.schedule import SCHEDULES, Kind, Schedule, Simulation, make, simulate, synthesise
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.synthesis.synthesise import placements
from jaxpp.schedule.synthesis.work import StepWork

__all__ = ["MEANINGS", "CostTable", "Found", "compare", "most_held", "named_that_fit", "random_table", "table", "unavoidable"]

MEANINGS = "the table's room", "its fullest rank's", "its room on each rank"
_RANKS, _PER_RANK, _ROUNDS = (2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3)
_MOST_STAGES = 12


@dataclass(frozen=True)
class CostTable:
    """What stages and transfers take, and what there is room for.

    Attributes:
        ranks: of the schedule.
        per_rank: stages on each of them.
        microbatches: of a step.
        forward: of each stage.
        input_grad: of each stage.
        weight_grad: of each stage.
        transfer: of each boundary between two stages.
        residuals: bytes of each stage and microbatch.
        room: bytes of each rank.
    """

    ranks: int
    per_rank: int
    microbatches: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...]
    residuals: tuple[float, ...]
    room: float = float("inf")

    @property
    def busy(self) -> float:
        """What all ranks compute in a step."""
        return self.microbatches * sum(map(sum, (self.forward, self.input_grad, self.weight_grad)))

    def simulated(self, schedule: Schedule) -> Simulation:
        """A schedule under these costs."""
        return simulate(
            schedule,
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            transfer=self.transfer,
        )

    def synthesised(self, room: float | Sequence[float], *, split: bool = True, effort: int = 1000) -> Schedule:
        """The schedule made for these costs and so much room."""
        return synthesise(
            self.ranks,
            self.microbatches,
            stages_per_rank=self.per_rank,
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            transfer=self.transfer,
            residuals=self.residuals,
            room=room,
            split=split,
            effort=effort,
        )

    def idle(self, schedule: Schedule) -> float:
        """Idle time of all ranks."""
        return self.ranks * self.simulated(schedule).makespan - self.busy


def most_held(schedule: Schedule, residuals: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of residuals on each rank."""
    sign = {Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.I: 0}
    rows = ((sign[action.kind] * residuals[action.stage] for action in row) for row in schedule.rows)
    return tuple(max(itertools.accumulate(row)) for row in rows)


def named(costs: CostTable, *, split: bool = True) -> Iterator[tuple[str, Schedule]]:
    """The schedules with a name that there are for these sizes, with split backwards or without."""
    for name, recipe in SCHEDULES.items():
        own = recipe.stages_per_rank == costs.per_rank or (recipe.varies and costs.per_rank > 1)
        if own and recipe.allows(costs.ranks, costs.microbatches):
            made = make(name, num_ranks=costs.ranks, num_microbatches=costs.microbatches, stages_per_rank=costs.per_rank)
            if split or not {Kind.I, Kind.W} & {action.kind for action in made.order}:
                yield name, made


def named_that_fit(costs: CostTable, *, split: bool = True) -> dict[str, Schedule]:
    """Those of them that fit into the room of the table."""
    return {name: made for name, made in named(costs, split=split) if max(most_held(made, costs.residuals)) <= costs.room}


def random_table(seed: int, *, small: bool = False, split: bool = True) -> CostTable:
    """A table by its number; its room lies between what the leanest and what the hungriest schedule with a name need."""
    choose = np.random.default_rng(seed)
    ranks = int(choose.choice(_RANKS[: 3 if small else None]))
    per_rank = int(choose.choice([v for v in _PER_RANK if v == 1 or ranks * v <= (8 if small else _MOST_STAGES)]))
    microbatches = ranks * int(choose.choice(_ROUNDS))
    stages = ranks * per_rank

    def uneven(low: float, high: float, factors: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(factor * value) for factor, value in zip(factors, choose.uniform(low, high, len(factors)), strict=True))

    forward = uneven(0.5, 1.5, [1 / per_rank] * stages)
    input_grad, weight_grad = uneven(0.7, 1.3, forward), uneven(0.5, 1.1, forward)
    links = choose.choice((0, 0.05, 0.3, 1), stages - 1) / per_rank
    costs = CostTable(
        ranks,
        per_rank,
        microbatches,
        forward,
        input_grad,
        weight_grad,
        uneven(0.5, 1, links.tolist()),
        uneven(0.5, 1.5, [1.0] * stages),
    )
    needs = [max(most_held(made, costs.residuals)) for _, made in named(costs, split=split)]
    room = float(choose.uniform(min(needs), max(needs)))
    return CostTable(**{**vars(costs), "room": room})


def unavoidable(costs: CostTable, *, split: bool = True) -> float:
    """Idle time of all ranks that no order removes, as far as is known, wherever the search lets the stages lie.

    The busiest rank has to wait for its first microbatch, and the others for that rank; and memory has room for so many
    microbatches at once.
    """
    actions = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    stages = StepCosts(actions, transfer=costs.transfer, residuals=costs.residuals)
    room, splits = (costs.room,) * costs.ranks, (split,) * len(costs.forward)
    works = [StepWork(stages, owner, costs.microbatches, room, splits) for owner in placements(stages.whole, costs.ranks)]
    least = min(work.least_span for work in works)
    return max(0.0, costs.ranks * least - costs.busy)


class Found(NamedTuple):
    """What one table gave; idle times are those of all ranks."""

    seed: int
    ranks: int
    per_rank: int
    microbatches: int
    best: str  # the best schedule with a name
    makespan: float  # its own
    idle: float  # its own
    bubble: float  # its own
    made: tuple[float, ...]  # idle time of the schedule made to measure, for each meaning of the room
    bubbles: tuple[float, ...]  # and their bubbles
    least: float  # idle time that no order removes


def best_named(costs: CostTable, *, split: bool = True) -> tuple[str, Schedule]:
    """The shortest schedule with a name that fits."""
    fitting = named_that_fit(costs, split=split)
    best = min(fitting, key=lambda name: costs.simulated(fitting[name]).makespan)
    return best, fitting[best]


def compare_one(seed: int, *, small: bool = False, split: bool = True) -> Found:
    """The best with a name, and what is made to measure in each meaning of the same room."""
    costs = random_table(seed, small=small, split=split)
    name, best = best_named(costs, split=split)
    held = most_held(best, costs.residuals)
    made = [costs.synthesised(room, split=split) for room in (costs.room, max(held), held)]
    before, after = costs.simulated(best), [costs.simulated(schedule) for schedule in made]
    return Found(
        seed,
        costs.ranks,
        costs.per_rank,
        costs.microbatches,
        name,
        float(before.makespan),
        costs.idle(best),
        before.bubble_fraction,
        tuple(map(costs.idle, made)),
        tuple(run.bubble_fraction for run in after),
        unavoidable(costs, split=split),
    )


def compare(count: int, *, small: bool = False, split: bool = True) -> tuple[Found, ...]:
    """As many tables, numbered from 0."""
    with progress(range(count), desc="cost tables") as bar:
        return tuple(compare_one(seed, small=small, split=split) for seed in bar)


def ratios(found: Sequence[Found], meaning: int) -> list[float]:
    """For each table, idle time of the schedule made to measure over that of the best with a name; 1 where neither idles."""
    return [max(each.made[meaning], 0.0) / each.idle if each.idle > 1e-9 * each.makespan else 1.0 for each in found]


def table(found: Sequence[Found]) -> str:
    """Idle time of what is made to measure over that of the best with a name: means, with a column for each meaning of room."""
    lines = [["stages on each rank", "tables", "bubble, best named", *MEANINGS]]
    groups = {str(v): [each for each in found if each.per_rank == v] for v in sorted({each.per_rank for each in found})}
    for name, own in (groups | {"all": list(found)}).items():
        means = [statistics.mean(ratios(own, meaning)) for meaning in range(len(MEANINGS))]
        bubble = statistics.mean(each.bubble for each in own)
        lines.append([name, str(len(own)), f"{bubble:.1%}", *(f"{mean:.3f}" for mean in means)])
    total = sum(each.bubble for each in found)
    sums = [sum(each.bubbles[meaning] for each in found) / total for meaning in range(len(MEANINGS))]
    lines.append(["sum of all bubbles", str(len(found)), "", *(f"{ratio:.3f}" for ratio in sums)])
    left = [
        [max(each.made[k] - each.least, 0.0) / gap for each in found if (gap := each.idle - each.least) > 1e-9] for k in range(3)
    ]
    lines.append(["beyond what no order removes", str(len(found)), "", *(f"{statistics.mean(own):.3f}" for own in left)])
    longer = [sum(ratio > 1 + 1e-9 for ratio in ratios(found, meaning)) for meaning in range(len(MEANINGS))]
    lines.append(["longer than the named", str(len(found)), "", *map(str, longer)])
    return "\n".join(columns(lines))
