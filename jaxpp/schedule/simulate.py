"""The virtual clock: what a schedule would do under given costs, without a device or a model.

Every rank runs its row in order; an action starts as soon as the rank is free, its inputs have arrived, and the host has handed it
over. The *bubble* is idle time over ranks x makespan. A rank's *own span* is from its first action to the end of its last; the idle
time inside it is what is lost when steps follow one another without a barrier.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeGuard

from jaxpp.errors import ScheduleError, is_count
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import (
    Bar,
    Copies,
    Idles,
    Number,
    Times,
    Timing,
    bars,
    bubble_fraction,
    idle_causes,
    replay,
)
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.draw.text import Drawing, Drawn
from jaxpp.schedule.draw.timeline import Copied
from jaxpp.schedule.residual_counts import lifetimes, peaks
from jaxpp.tables import html_table, table_lines

_MOST = 1e100  # of a cost
_Span = tuple[Number, Number]


@dataclass(frozen=True)
class Simulation(Drawn):
    """A schedule on the virtual clock, under ``costs``. ``print`` it for a summary; in a notebook it draws itself."""

    schedule: Schedule
    costs: StepCosts
    offload: tuple[int | None, ...] = ()
    rank_to_process: tuple[int, ...] = ()
    overlap: bool = True
    queued: bool = False

    @cached_property
    def timing(self) -> Timing:
        """What the clock is told: how long actions, transfers and copies take, and when the host hands each action over."""
        return self.costs.timing(self.schedule, self.offload, self.rank_to_process, overlap=self.overlap, queued=self.queued)

    @cached_property
    def times(self) -> Times:
        """``times.starts[rank][k]`` and ``times.ends[rank][k]`` of the rank's k-th action."""
        return replay(self.schedule.rows, self.schedule.stage_to_rank, self.timing, self.schedule.num_groups)

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """Every action with its rank, start and end."""
        return tuple(bars(self.schedule.rows, self.times))

    @cached_property
    def starts(self) -> Mapping[Action, Number]:
        """When each action starts."""
        return MappingProxyType({bar.action: bar.start for bar in self.bars})

    @cached_property
    def ends(self) -> Mapping[Action, Number]:
        """When each action ends."""
        return MappingProxyType({bar.action: bar.end for bar in self.bars})

    @property
    def copies(self) -> tuple[Copies, ...]:
        """When offloaded residuals are copied to the host, and when back."""
        return self.times.copies

    def drawing(self) -> Drawing:
        """The actions on the virtual clock."""
        schedule = self.schedule
        links = [(schedule.stage_to_rank[each.offloaded.forward.stage], each) for each in self.copies]
        copies = [Copied(rank, *each.out, back=False) for rank, each in links]
        copies += [Copied(rank, *each.back, back=True) for rank, each in links]
        return Drawing(self.heading, schedule.num_ranks, schedule.stage_to_rank, self.bars, schedule.num_groups, copies)

    @cached_property
    def makespan(self) -> Number:
        """From the start to the end of the last action."""
        return max(bar.end for bar in self.bars)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Time in which each rank computes, at full speed."""
        return tuple(sum(self.timing.durations[action] for action in row) for row in self.schedule.rows)

    @property
    def idle(self) -> tuple[Number, ...]:
        """Time in which each rank does not compute, up to the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over ranks x makespan."""
        return bubble_fraction(self.busy, self.makespan)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Busy time over makespan, of each rank."""
        return tuple(float(busy / self.makespan) if self.makespan else 0.0 for busy in self.busy)

    @property
    def own_span(self) -> tuple[Number, ...]:
        """From each rank's first action to the end of its last."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.times.starts, self.times.ends, strict=True))

    @property
    def own_bubble(self) -> tuple[Number, ...]:
        """Idle time inside each rank's own span."""
        return tuple(span - busy for span, busy in zip(self.own_span, self.busy, strict=True))

    @cached_property
    def peak_residuals(self) -> tuple[int, ...]:
        """Most residuals alive at once on each rank, over all its stages; those that wait in host memory do not count."""
        if self.copies:
            return peaks(lifetimes(self.bars, self.copies), self.schedule.stage_to_rank)
        return peaks(lifetimes(bars(self.schedule.rows, self.schedule.times)), self.schedule.stage_to_rank)

    @cached_property
    def causes(self) -> Idles:
        """Where each rank's idle time comes from; of a ring also what waiting for tokens costs."""
        schedule, groups = self.schedule, self.schedule.num_groups
        means = {kind: (_mean(own),) * len(own) for kind, own in self.costs.actions.items()}
        level = dataclasses.replace(self.costs, actions=means)
        equal = {action: level.of(action) for action in self.timing.durations}
        return idle_causes(schedule.rows, schedule.stage_to_rank, self.timing, equal, self.busy, self.makespan, groups)

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        return f"{self.schedule.heading}; makespan {float(self.makespan):.6g}, bubble {self.bubble_fraction:.1%}"

    def _cells(self) -> list[list[str]]:
        keeps = not self.schedule.forward_only
        names = [name.replace("_", ", ") for name in self.causes[0]._fields]
        rows = [["rank", "busy", "idle", *names, "own bubble", *["peak residuals"] * keeps]]
        columns = zip(self.busy, self.idle, self.causes, self.own_bubble, self.peak_residuals, strict=True)
        for rank, (busy, idle, causes, own, peak) in enumerate(columns):
            rows.append([str(rank), *(_short(x, self.makespan) for x in (busy, idle, *causes, own)), *[str(peak)] * keeps])
        return rows

    def __str__(self) -> str:
        return "\n".join([self.overview(), "", *table_lines(self._cells())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}{html_table(self._cells())}"


def _short(time: Number, makespan: Number) -> str:
    """A time with six digits; rounding noise is no time."""
    return f"{float(time) if abs(time) > 1e-9 * makespan else 0:.6g}"


@entry
def simulate(  # noqa: PLR0913  (the costs of everything)
    schedule: Schedule,
    *,
    forward: Number | Sequence[Number] = 1,
    input_grad: Number | Sequence[Number] = 1,
    weight_grad: Number | Sequence[Number] = 1,
    transfer: Number | Sequence[Number] = 0,
    dispatch: Number = 0,
    overlap: bool = True,
    queued: bool = False,
    rank_to_process: Sequence[int] | None = None,
    offload: int | Sequence[int | None] | None = None,
    copy: Number | Sequence[Number] = 0,
    capacity: Number | None = None,
    visit: Number | Sequence[Number] = 0,
    visit_state: Number | Sequence[Number] = 0,
) -> Simulation:
    """Run a schedule on the virtual clock. Costs are in any unit of time, the same for all: one number, or one for each stage.

    Args:
        schedule: what to run.
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W; B takes I and W together.
        transfer: time between the ranks ``schedule.stage_to_rank[s]`` and ``[s + 1]``, in either direction: ``transfer[s]`` is for
            the boundary between stages s and s + 1, so the last stage's may be left out. Of a ring, the last is the time of a token
            back to the first stage. Links are not shared; nothing is sent between stages on the same rank.
        dispatch: time a process takes to hand over one action, in ``schedule.order``; one number.
        overlap: whether a rank goes on computing while it sends, or copies residuals.
        queued: whether a transfer begins only when its receiver has done all that was handed over to it before, in
            ``schedule.order``: GPUs wait so, as the memory for what arrives is given behind these programs.
        rank_to_process: the process that hands over the actions of each rank, side by side with the other processes; one process
            hands over all of them unless given.
        offload: lets residuals wait in host memory between F and B, unless B follows soon: at least three other actions of the
            rank lie between. The number is that of microbatches a stage whose residuals stay on the device because their
            backwards are the next to come; one number, or one for each stage, None of a stage whose residuals all stay.
        copy: time of the residuals of one microbatch to the host, and the same back. A copy out begins when F ends; a copy back
            begins with the last action before B. A rank makes one copy in each direction at a time, while it computes.
        capacity: how many ranks compute at full speed at once, if ranks share cores; if k ranks compute, each has the speed
            min(1, capacity / k). Every rank has a core of its own unless given.
        visit: time of the parameters of a stage from host memory, where they wait (``Pipeline(host="params")``). They come each
            time that the rank turns to the stage, while its turn before runs. What goes back is on the other half of the link.
        visit_state: time of the optimizer's state of a stage, which comes behind the parameters in the last turn of the stage.

    Raises:
        ScheduleError: a cost that is negative or not finite (1e100 is the most), not one cost for each stage, not one process
            for each rank, an ``offload`` that is no number of microbatches, a ``capacity`` that is not positive, or an ``overlap``
            or ``queued`` that is neither True nor False.

    Example:
        >>> from jaxpp.schedule import make
        >>> r = simulate(make("naive", num_ranks=4, num_microbatches=1))
        >>> r.bubble_fraction
        0.75
        >>> simulate(make("1f1b", num_ranks=4, num_microbatches=8)).peak_residuals
        (4, 3, 2, 1)
        >>> gpipe = make("gpipe", num_ranks=4, num_microbatches=8)
        >>> simulate(gpipe).peak_residuals, simulate(gpipe, offload=1, copy=0.5).peak_residuals
        ((8, 8, 8, 8), (3, 3, 3, 3))
        >>> looped = make("looped-bfs", num_ranks=2, num_microbatches=8, stages_per_rank=4)
        >>> [float(simulate(looped, visit=time).makespan) for time in (0, 4, 16)]  # hidden, but for the first; and not
        [99.0, 103.0, 139.0]
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError("simulate(schedule, ...)", "it takes a Schedule", repr(schedule), "pass make(name, num_ranks=...)")
    given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "transfer": transfer, "copy": copy}
    given |= {"visit": visit, "visit_state": visit_state}
    open_end = schedule.num_groups is None  # nothing is sent beyond the last stage
    staged = {name: per_stage(value, schedule.num_stages, open_end and name == "transfer") for name, value in given.items()}
    host = _plain(dispatch)
    wrong = [f"{name}={given[name]!r}" for name, costs in staged.items() if costs is None]
    if wrong or not is_cost(host):
        wrong += [] if is_cost(host) else [f"dispatch={dispatch!r}"]
        rule = "a cost is a finite number of at least 0, or a sequence of one a stage; dispatch is one number"
        of_transfer = f"{schedule.num_stages - 1} will do" if open_end else "the last is that of a token back to stage 0"
        fix = f"pass one number, or {schedule.num_stages} of them (transfer: {of_transfer})"
        raise ScheduleError("simulate(...)", rule, wrong, fix)
    processes = _plain((0,) * schedule.num_ranks if rank_to_process is None else rank_to_process)
    if not isinstance(processes, Sequence) or len(processes) != schedule.num_ranks or not all(map(is_count, processes)):
        got, fix = f"rank_to_process={rank_to_process!r}", f"pass {schedule.num_ranks} of them, such as [rank // 8 for each rank]"
        raise ScheduleError("simulate(...)", "each rank has the number of one process, at least 0", got, fix)
    forward, input_grad, weight_grad, transfer, copy, *visits = (found or () for found in staged.values())
    kept, cores = _offload(offload, schedule.num_stages), _capacity(capacity)
    overlaps, waits = _flags(overlap=overlap, queued=queued)
    actions = {Kind.F: forward, Kind.I: input_grad, Kind.W: weight_grad}
    handing = dict.fromkeys(Kind, (host,) * schedule.num_stages) if host else {}
    costs = StepCosts(actions, handing, transfer, copy, visit=visits[0], visit_state=visits[1], capacity=cores)
    return Simulation(schedule, costs, kept, tuple(processes), overlaps, waits)


def items_of(value: Any, length: int) -> tuple[Any, ...]:
    """The items of a sequence, or so many of one value; arrays as Python's numbers."""
    value = _plain(value)
    return tuple(map(_plain, value)) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * length


def _offload(value: object, num_stages: int) -> tuple[int | None, ...]:
    given = items_of(value, num_stages)
    kept = tuple(each if each is None else int(each) for each in given if each is None or is_count(each))
    if not len(kept) == len(given) == num_stages:
        rule = "offload is the number of microbatches whose residuals stay, at least 0, or None; or a sequence of one a stage"
        raise ScheduleError("simulate(...)", rule, f"offload={value!r}", f"pass offload=1, or {num_stages} of them")
    return kept


def _capacity(value: object) -> Number:
    number = _plain(value)
    if number is None:
        return math.inf
    if is_cost(number) and number > 0:
        return number
    rule = "capacity is the number of ranks that compute at full speed at once, more than 0"
    raise ScheduleError("simulate(...)", rule, f"capacity={value!r}", "pass capacity=2 for two cores, or None")


def _flags(**given: object) -> list[bool]:
    flags = {name: _plain(value) for name, value in given.items()}
    if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        rule, got = f"{' and '.join(given)} are either True or False", [f"{name}={given[name]!r}" for name in wrong]
        raise ScheduleError("simulate(...)", rule, got, "; ".join(f"pass {name}=True or {name}=False" for name in wrong))
    return [flag for flag in flags.values() if isinstance(flag, bool)]


def _plain(value: object) -> object:
    """An array as Python's numbers: its own numbers would overflow or round when they are added up."""
    return value.tolist() if hasattr(value, "tolist") else value  # pyright: ignore[reportAttributeAccessIssue]


def is_cost(value: object) -> TypeGuard[Number]:
    """Whether a value is a finite number of at least 0."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 <= value <= _MOST  # pyright: ignore[reportOperatorIssue]


def per_stage(value: object, num_stages: int, boundaries: bool) -> tuple[Number, ...] | None:
    """A cost for each stage, or for each boundary between two; None if the value is no cost, or not as many."""
    given = items_of(value, num_stages)
    fits = len(given) == num_stages or (boundaries and len(given) == num_stages - 1)
    costs = tuple(cost for cost in given if is_cost(cost))
    return costs[: num_stages - boundaries] if fits and len(costs) == len(given) else None


def _mean(costs: Sequence[Number]) -> Number:
    """Exact if the costs are."""
    total = sum(costs)
    return total / len(costs) if isinstance(total, float) else Fraction(total, len(costs))  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class PrefetchSimulation:
    """Steps on the virtual clock, each with a parameter set of its own: start and end of each load, step and store.

    A set is on the host before and after its step. One copy engine loads sets and another stores them, while the device computes::

        load        L0  L1      L2  L3
        compute         C0  C1      C2  C3
        store               S0  S1      S2  S3        two slots: L2 waits until S0 has freed a slot

    With ``slots`` sets on the device a step takes, in the long run, the longest of ``compute``, ``load``, ``store`` and
    ``(load + compute + store) / slots``.
    """

    loads: tuple[_Span, ...]
    steps: tuple[_Span, ...]
    stores: tuple[_Span, ...]

    @property
    def makespan(self) -> Number:
        """From the start of the first load to the end of the last step; the last stores may end later."""
        return self.steps[-1][1]

    @property
    def busy(self) -> Number:
        """Time in which the device computes: the makespan if all sets were on the device."""
        return sum(end - start for start, end in self.steps)

    @property
    def idle(self) -> Number:
        """Time in which the device waits for a set."""
        return self.makespan - self.busy


def simulate_prefetch(
    num_steps: int,
    compute: Number | Sequence[Number],
    load: Number | Sequence[Number],
    store: Number | Sequence[Number] = 0,
    slots: int = 2,
) -> PrefetchSimulation:
    """Run steps, each with another parameter set, on the virtual clock; the next sets are loaded as soon as a slot is free.

    Args:
        num_steps: how many steps.
        compute: time of a step; like all times here in any unit, one number, or one number for each step.
        load: time to load the set of a step.
        store: time to store the set of a step.
        slots: how many sets the device has room for; with 1 nothing is prefetched.

    Raises:
        ScheduleError: fewer than one step or slot, a negative time, or not one time for each step.

    Example:
        >>> simulate_prefetch(1000, compute=10, load=9).makespan
        10009
        >>> simulate_prefetch(1000, compute=10, load=9, slots=1).makespan
        19000
        >>> simulate_prefetch(1000, compute=10, load=12).idle
        2010
    """
    given = {"load": load, "compute": compute, "store": store}
    lists = {name: list(value) if isinstance(value, Sequence) else [value] * max(num_steps, 0) for name, value in given.items()}
    wrong = [f"{name}={count!r}" for name, count in {"num_steps": num_steps, "slots": slots}.items() if count < 1]
    wrong += [f"{name}={given[name]!r}" for name, listed in lists.items() if len(listed) != num_steps or min(listed, default=0) < 0]
    if wrong:
        rule = "there are steps and slots, and a time is a number of at least 0, or a sequence of one a step"
        fix = f"pass one number, or {num_steps} of them; slots=2 prefetches one"
        raise ScheduleError("simulate_prefetch(...)", rule, wrong, fix)
    # A ring of three stages: a load waits for the store of the set that had its slot.
    rows = [tuple(Action(stage, Kind.F, k) for k in range(num_steps)) for stage in range(3)]
    taken = {
        action: time for row, listed in zip(rows, lists.values(), strict=True) for action, time in zip(row, listed, strict=True)
    }
    times = replay(rows, range(3), Timing(taken), num_groups=slots)
    return PrefetchSimulation(*(tuple(zip(*spans, strict=True)) for spans in zip(times.starts, times.ends, strict=True)))
