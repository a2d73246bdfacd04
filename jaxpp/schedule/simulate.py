"""The virtual clock: what a schedule would do under given costs, without a device or a model.

Every rank runs its row in order, each action as soon as the rank is free, what it needs has arrived, and the host has handed
it over. The answer is where everything starts and ends; from that: makespan, bubble, the residuals each rank holds, and why
ranks idle.

*Bubble*: idle time over ranks x makespan. *Own span*: from a rank's first action to its last; the idle time inside it is what
is lost when steps follow one another without a barrier.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Number, Times, bars, replay
from jaxpp.schedule.draw.text import Drawing, Drawn, align

__all__ = ["Costs", "Idle", "Simulation", "simulate"]


class Costs(NamedTuple):
    """What things take, in one unit of time.

    Attributes:
        forward: F, one a stage.
        input_grad: I, one a stage.
        weight_grad: W, one a stage; B takes I and W together.
        transfer: one a boundary: of the activation from stage s to s + 1, and of its cotangent back.
        dispatch: what the host takes to hand over one action.
        overlap: whether a rank computes on while it sends.
    """

    forward: tuple[Number, ...]
    input_grad: tuple[Number, ...]
    weight_grad: tuple[Number, ...]
    transfer: tuple[Number, ...]
    dispatch: Number
    overlap: bool


class Idle(NamedTuple):
    """Where a rank's idle time comes from; the parts sum to it.

    Attributes:
        fill_drain: what the schedule costs even if all stages take the same time and transfers none.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what the host adds.
    """

    fill_drain: Number
    imbalance: Number
    transfer: Number
    dispatch: Number


@dataclass(frozen=True)
class Simulation(Drawn):
    """A schedule on the virtual clock. ``print`` it for a summary; in a notebook it draws itself.

    Attributes:
        schedule: what ran.
        costs: under which costs.
        times: ``times.starts[rank][k]`` and ``times.ends[rank][k]`` of the rank's k-th action.
    """

    schedule: Schedule
    costs: Costs
    times: Times

    @cached_property
    def starts(self) -> Mapping[Action, Number]:
        """When each action starts."""
        return MappingProxyType({bar.action: bar.start for bar in bars(self.schedule.rows, self.times)})

    @cached_property
    def ends(self) -> Mapping[Action, Number]:
        """When each action ends."""
        return MappingProxyType({bar.action: bar.end for bar in bars(self.schedule.rows, self.times)})

    def drawing(self) -> Drawing:
        """The actions on the virtual clock."""
        schedule = self.schedule
        return Drawing(self.heading, schedule.num_ranks, schedule.stage_to_rank, tuple(bars(schedule.rows, self.times)))

    @cached_property
    def makespan(self) -> Number:
        """From the start to the end of the last action."""
        return max(ends[-1] for ends in self.times.ends if ends)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Time each rank computes."""
        duration = _durations(self.costs)
        return tuple(sum(duration(action) for action in row) for row in self.schedule.rows)

    @property
    def idle(self) -> tuple[Number, ...]:
        """Time each rank does not, up to the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over ranks x makespan."""
        return float(sum(self.idle) / (self.schedule.num_ranks * self.makespan)) if self.makespan else 0.0

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Busy time over makespan, of each rank."""
        return tuple(float(busy / self.makespan) if self.makespan else 0.0 for busy in self.busy)

    @property
    def own_span(self) -> tuple[Number, ...]:
        """From each rank's first action to the end of its last."""
        pairs = zip(self.times.starts, self.times.ends, strict=True)
        return tuple(ends[-1] - starts[0] if starts else 0 for starts, ends in pairs)

    @property
    def own_bubble(self) -> tuple[Number, ...]:
        """Idle time inside each rank's own span."""
        return tuple(span - busy for span, busy in zip(self.own_span, self.busy, strict=True))

    @cached_property
    def peak_residuals(self) -> tuple[int, ...]:
        """Most (stage, microbatch) residuals alive at once on each rank; one lives from F until the last of B, or of I and W."""
        peaks = []
        for row in self.schedule.rows:
            alive = peak = 0
            for action in row:
                alive += {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)

    @cached_property
    def causes(self) -> tuple[Idle, ...]:
        """Where each rank's idle time comes from: the clock run again with equal stages, without transfers, without dispatch.

        A rank of heavy stages idles less than with equal ones; then all its idle time counts as fill and drain.
        """
        mean = self.costs._replace(
            **{name: (_mean(costs),) * len(costs) for name, costs in self.costs._asdict().items() if name in _STAGED}
        )
        free = {"transfer": (), "dispatch": 0}
        even = Simulation(self.schedule, mean._replace(**free), _replay(self.schedule, mean._replace(**free)))
        uneven, sent = self.costs._replace(**free), self.costs._replace(dispatch=0)
        makespans = [max(ends[-1] for ends in _replay(self.schedule, costs).ends if ends) for costs in (uneven, sent)]
        found = []
        for idle, busy in zip(even.idle, self.busy, strict=True):
            fill_drain = min(idle, makespans[0] - busy)
            imbalance = makespans[0] - busy - fill_drain
            found.append(Idle(fill_drain, imbalance, makespans[1] - makespans[0], self.makespan - makespans[1]))
        return tuple(found)

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        return f"{self.schedule.heading}; makespan {float(self.makespan):.6g}, bubble {self.bubble_fraction:.1%}"

    def __str__(self) -> str:
        head = ["rank", "busy", "idle", "fill, drain", "imbalance", "transfer", "dispatch", "own bubble", "peak residuals"]
        rows = [head]
        columns = zip(self.busy, self.idle, self.causes, self.own_bubble, self.peak_residuals, strict=True)
        for rank, (busy, idle, causes, own, peak) in enumerate(columns):
            rows.append([str(rank), *(_short(x, self.makespan) for x in (busy, idle, *causes, own)), str(peak)])
        return "\n".join([self.overview(), "", *align(rows)])

    __repr__ = __str__


def _short(time: Number, makespan: Number) -> str:
    """A time with six digits; rounding noise is no time."""
    return f"{float(time) if abs(time) > 1e-9 * makespan else 0:.6g}"


_STAGED = frozenset({"forward", "input_grad", "weight_grad"})
_MOST = 1e100


@entry
def simulate(
    schedule: Schedule,
    *,
    forward: Number | Sequence[Number] = 1,
    input_grad: Number | Sequence[Number] = 1,
    weight_grad: Number | Sequence[Number] = 1,
    transfer: Number | Sequence[Number] = 0,
    dispatch: Number = 0,
    overlap: bool = True,
) -> Simulation:
    """Run a schedule on the virtual clock.

    Args:
        schedule: what to run.
        forward: time of F, a number or one a stage; any unit, the same for all.
        input_grad: time of I likewise.
        weight_grad: time of W likewise; B takes I and W together.
        transfer: time from one rank to another, a number or one a stage: ``transfer[s]`` is of what crosses between stages s and
            s + 1, either way, so the last stage's may be left out. Links are not shared; on one rank nothing is sent.
        dispatch: time the host takes to hand over one action, in ``schedule.order``.
        overlap: whether a rank computes on while it sends.

    Raises:
        ScheduleError: a cost that is negative or not finite (1e100 is the most), or costs that are not one a stage.

    Example:
        >>> from jaxpp.schedule import make
        >>> r = simulate(make("naive", num_ranks=4, num_microbatches=1))
        >>> r.bubble_fraction
        0.75
        >>> simulate(make("1f1b", num_ranks=4, num_microbatches=8)).peak_residuals
        (4, 3, 2, 1)
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError("simulate(schedule, ...)", "it takes a Schedule", repr(schedule), "pass make(name, num_ranks=...)")
    given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "transfer": transfer}
    staged = {name: _staged(value, schedule.num_stages, name == "transfer") for name, value in given.items()}
    host = _numbers(dispatch)
    wrong = [f"{name}={given[name]!r}" for name, costs in staged.items() if costs is None]
    wrong += [] if _is_cost(host) else [f"dispatch={dispatch!r}"]
    if wrong:
        raise ScheduleError(
            "simulate(...)",
            "a cost is a finite number of at least 0, or a sequence of one a stage; dispatch is one number",
            wrong,
            f"pass one number, or {schedule.num_stages} of them (transfer: {schedule.num_stages - 1} will do)",
        )
    costs = Costs(**{name: found or () for name, found in staged.items()}, dispatch=host, overlap=overlap)
    return Simulation(schedule, costs, _replay(schedule, costs))


def _numbers(value: Any) -> Any:
    """Arrays as Python's numbers: an array's own would wrap around or round when they are added up."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_cost(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 <= value <= _MOST  # pyright: ignore[reportOperatorIssue]


def _staged(value: Any, num_stages: int, boundaries: bool) -> tuple[Number, ...] | None:
    """One cost a stage, or a boundary between two; None if the value is no cost, or not as many."""
    value = _numbers(value)
    many = isinstance(value, Sequence) and not isinstance(value, str)
    costs: tuple[Any, ...] = tuple(map(_numbers, value)) if many else (value,) * num_stages
    fits = len(costs) == num_stages or (boundaries and len(costs) == num_stages - 1)
    return costs[: num_stages - boundaries] if fits and all(map(_is_cost, costs)) else None


def _mean(costs: Sequence[Number]) -> Number:
    """Exact if the costs are."""
    total: Any = sum(costs)
    return total / len(costs) if isinstance(total, float) else Fraction(total, len(costs))  # pyright: ignore[reportReturnType]


def _durations(costs: Costs) -> Callable[[Action], Number]:
    full = tuple(i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True))
    table = {Kind.F: costs.forward, Kind.B: full, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    return lambda action: table[action.kind][action.stage]


def _replay(schedule: Schedule, costs: Costs) -> Times:
    owner = schedule.stage_to_rank
    hop = [0 if owner[s] == owner[s + 1] else time for s, time in enumerate(costs.transfer)]
    dispatched = {a: (k + 1) * costs.dispatch for k, a in enumerate(schedule.order)} if costs.dispatch else None
    return replay(
        schedule.rows,
        owner,
        schedule.num_microbatches,
        _durations(costs),
        hop=hop if any(hop) else (),
        overlap=costs.overlap,
        dispatched=dispatched,
    )
