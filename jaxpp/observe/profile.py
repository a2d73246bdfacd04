"""What really ran, when, and why the ranks idled.

``record`` runs steps under watch (``watch``); a ``Profile`` is that of median length. Every action and transfer has a start and
an end on the host's clock. The end is when its result was there. The start is the latest of what it had to wait for: its being
handed over, its inputs, and the end of what the device ran before. Stamps can be late, never early, so no action starts before
what it depends on has ended.

Idle time is told apart by the virtual clock, run on the *measured* durations: once with those of all stages made equal, once as
they were, once with transfers, once with the times at which the host handed actions over; the rest of a step (splitting the batch,
the optimizer) is what is left. The parts sum to the idle time.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jaxpp.observe.watch import Stamp, Watch
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.plan import Plan
from jaxpp.runtime.transfer import put
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Bar, replay
from jaxpp.schedule.draw import Drawing, Drawn, align

__all__ = ["Causes", "Profile", "Span", "record"]


class Span(NamedTuple):
    """One instruction of a step in time, in seconds from the start of the step.

    Attributes:
        label: ``2F0``, ``send 2F0 to stage 3``, ``update stage 1 level 0``, ...
        action: the action that it runs, or whose result it sends; None for the rest of a step.
        rank: where it ran, or arrived.
        sends: whether it is a transfer.
        start: its beginning.
        end: when its result was there.
        begun: when the host began to hand it over.
        handed: when the host went on.
    """

    label: str
    action: Action | None
    rank: int
    sends: bool
    start: float
    end: float
    begun: float
    handed: float


class Causes(NamedTuple):
    """Where a rank's idle time comes from, in seconds.

    Attributes:
        fill_drain: what the schedule costs even with equal stages.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what waiting for the host adds.
        optimizer: the rest of the step: splitting the batch before, summing tied gradients and the optimizer after.
    """

    fill_drain: float
    imbalance: float
    transfer: float
    dispatch: float
    optimizer: float


@dataclass(frozen=True)
class Profile(Drawn):
    """One step as it ran. ``print`` it for a summary; in a notebook it draws itself.

    Attributes:
        schedule: the order that was asked for.
        spans: every instruction, in the order the host handed them over.
        step_seconds: the length of each step that was watched.
        beside: how many programs ended before one that their device was given earlier: the backend ran them side by side.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    step_seconds: tuple[float, ...]
    beside: int

    @cached_property
    def actions(self) -> Mapping[Action, Span]:
        """The actions that ran; I of a stage whose input wants no cotangent has nothing to do and is not among them."""
        return {span.action: span for span in self.spans if span.action is not None and not span.sends}

    @cached_property
    def transfers(self) -> tuple[Span, ...]:
        """What went from rank to rank for an action."""
        return tuple(span for span in self.spans if span.sends and span.action is not None)

    @cached_property
    def seconds(self) -> float:
        """The length of this step."""
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank ran an action."""
        return tuple(_covered([s for s in self.actions.values() if s.rank == rank]) for rank in range(self.schedule.num_ranks))

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank did not."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Busy time over the step, of each rank."""
        return tuple(busy / self.seconds for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over ranks x step."""
        return sum(self.idle) / (self.schedule.num_ranks * self.seconds)

    @property
    def host_seconds(self) -> float:
        """Host time an action, its sends included: the mean over the step."""
        return sum(span.handed - span.begun for span in self.spans if span.action is not None) / max(1, len(self.actions))

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """How long each microbatch was on its way, from its first action to its last."""
        mine = [[s for a, s in self.actions.items() if a.microbatch == i] for i in range(self.schedule.num_microbatches)]
        return tuple(max(s.end for s in spans) - min(s.start for s in spans) for spans in mine)

    @cached_property
    def simulated_seconds(self) -> float:
        """The makespan of the schedule on the virtual clock, with the measured durations of actions and transfers."""
        return self._makespan(self._durations, self._hops)

    @cached_property
    def _durations(self) -> dict[Action, float]:
        return {action: span.end - span.start for action, span in self.actions.items()}

    @cached_property
    def _hops(self) -> tuple[float, ...]:
        """The median time of a transfer over each boundary, either way."""
        found: list[list[float]] = [[] for _ in range(self.schedule.num_stages)]
        for span in self.transfers:
            assert span.action is not None
            found[span.action.stage - (span.action.kind != Kind.F)].append(span.end - span.start)
        return tuple(statistics.median(times) if times else 0.0 for times in found[:-1])

    def _makespan(self, durations: Mapping[Action, float], hops: Sequence[float] = (), dispatched: Any = None) -> float:
        schedule = self.schedule
        times = replay(
            schedule.rows,
            schedule.stage_to_rank,
            schedule.num_microbatches,
            lambda action: durations.get(action, 0.0),
            hop=hops,
            dispatched=dispatched,
        )
        return float(max(ends[-1] for ends in times.ends))

    @cached_property
    def causes(self) -> tuple[Causes, ...]:
        """Where each rank's idle time comes from."""
        mean = {kind: _mean([t for a, t in self._durations.items() if a.kind == kind]) for kind in Kind}
        equal = {action: mean[action.kind] for action in self._durations}
        handed = {action: self.actions[action].begun if action in self.actions else 0.0 for action in self.schedule.order}
        even = self._makespan(equal)
        runs = (self._makespan(self._durations), self.simulated_seconds, self._makespan(self._durations, self._hops, handed))
        uneven, sent, dispatched = (min(run, self.seconds) for run in runs)
        found = []
        for rank, busy in enumerate(self.busy):
            same = sum(equal.get(action, 0.0) for action in self.schedule.rows[rank])
            idle = max(0.0, uneven - busy)
            fill_drain = min(max(0.0, even - same), idle)
            rest = self.seconds - busy - idle - (sent - uneven) - (dispatched - sent)
            found.append(Causes(fill_drain, idle - fill_drain, sent - uneven, dispatched - sent, rest))
        return tuple(found)

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        return f"{self.schedule.heading}; measured: {_milli(self.seconds)} ms, bubble {self.bubble_fraction:.1%}"

    def drawing(self) -> Drawing:
        """The actions as they ran, in milliseconds."""
        bars = tuple(Bar(s.rank, action, 1e3 * s.start, 1e3 * s.end) for action, s in self.actions.items())
        return Drawing(self.heading, self.schedule.num_ranks, self.schedule.stage_to_rank, bars)

    def __str__(self) -> str:
        rows = [["rank", "busy", "idle", "fill, drain", "imbalance", "transfer", "dispatch", "optimizer"]]
        for rank, (busy, idle, causes) in enumerate(zip(self.busy, self.idle, self.causes, strict=True)):
            rows.append([str(rank), *map(_milli, (busy, idle, *causes))])
        return "\n".join([self.overview(), "", *align(rows), "", *self._remarks()])

    __repr__ = __str__

    def _remarks(self) -> list[str]:
        whole = self.schedule.num_ranks * self.seconds
        transfer = sum(causes.transfer for causes in self.causes) / whole
        compute = sum(self.busy) / whole
        lines = [
            "milliseconds; "
            f"compute {compute:.1%}, waiting for transfers {transfer:.1%}, the rest of the bubble {1 - compute - transfer:.1%}",
            f"the virtual clock, with these durations: {_milli(self.simulated_seconds)} ms",
            f"host: {1e6 * self.host_seconds:.0f} us an action, its sends included",
            f"microbatches were on their way for {_milli(sum(self.latencies))} ms together, in a step of {_milli(self.seconds)} ms",
        ]
        for boundary, hop in enumerate(self._hops):
            hidden = [t for a, t in self._durations.items() if a.kind == Kind.F and a.stage == boundary + 1]
            if hop > _mean(hidden):
                lines.append(
                    f"warning: a transfer over boundary {boundary + 1} takes {_milli(hop)} ms, longer than the forward that "
                    f"could hide it ({_milli(_mean(hidden))} ms)"
                )
        if self.beside:
            lines.append(f"{self.beside} programs ran beside another on their device; they are shown as they ran")
        return lines


def record(engine: Engine, leaves: Sequence[Any], batch: Any, key: Any, num_steps: int) -> Profile:
    """Run steps under watch.

    Args:
        engine: whose steps.
        leaves: of the state; they are copied, and stay as they are.
        batch: for every step.
        key: likewise.
        num_steps: how many to watch, after one that is not.

    Returns:
        the profile of the step of median length.
    """
    plan, _ = engine.plan("update", batch, key, watched=True)
    own = [put(leaf, device) for leaf, device in zip(leaves, engine.devices, strict=True)]
    steps: list[list[Stamp]] = []
    for _ in range(num_steps + 1):
        watch = Watch(plan)
        own = engine.run("update", own, batch, key, observer=watch, watched=True).leaves
        steps.append(watch.stamps())
    lengths = [max(s.done for s in stamps) - stamps[0].begun for stamps in steps[1:]]
    median = sorted(range(num_steps), key=lengths.__getitem__)[num_steps // 2]
    spans, beside = _spans(plan, steps[1 + median], engine)
    return Profile(engine.settings.schedule, spans, tuple(lengths), beside)


def _spans(plan: Plan, stamps: Sequence[Stamp], engine: Engine) -> tuple[tuple[Span, ...], int]:
    schedule, placement = engine.settings.schedule, engine.settings.placement
    home: dict[Any, int] = {}
    for stage, rank in enumerate(schedule.stage_to_rank):
        home.setdefault(placement[stage], rank)
    there: dict[int, float] = {}
    last: dict[Any, float] = {}
    spans, beside, zero = [], 0, stamps[0].begun
    for line, stamp in zip(plan.instructions, stamps, strict=True):
        begun, handed, done = (time - zero for time in stamp)
        action: Any = line.about.action
        start = max([begun, *(there.get(slot, 0.0) for slot in line.inputs)])
        if not line.about.sends:
            before = last.get(line.about.device, 0.0)
            beside += before > done
            start = max(start, before) if before <= done else start
            last[line.about.device] = max(before, done, start)
        end = max(start, done)
        there.update((slot, end) for slot in line.outputs)
        device = line.about.device
        rank = home[device] if action is None or line.about.sends else schedule.stage_to_rank[action.stage]
        spans.append(Span(line.label, action, rank, line.about.sends, start, end, begun, handed))
    return tuple(spans), beside


def _covered(spans: Sequence[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total = until = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
