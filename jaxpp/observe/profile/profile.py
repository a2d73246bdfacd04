"""What really ran, when, and why the ranks idled.

``record`` runs steps under JAX's profiler; a ``Profile`` describes the step of median length. It has two timelines. One is the
trace: the start and end of every program on its device, the transfers between programs, and how long they waited for each other
and for the host. The other is isolated: every program takes as long as it takes alone, on the virtual clock. Where devices share
cores, as forced CPU devices do, the trace shows how they slow each other down, and the isolated timeline shows what the pipeline
would do on devices of its own.

All numbers describe one of the two (``clock``): bubble, idle time by cause (``causes``), latencies. ``ledger`` tells of memory.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.profile.figure import profile_figure
from jaxpp.observe.profile.memory_curves import Curve, curves
from jaxpp.observe.profile.spans import Span, covered
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Bar, Timing, bars, replay
from jaxpp.schedule.draw.panel import Figure
from jaxpp.schedule.draw.pebbles import pebble_pair
from jaxpp.schedule.draw.text import Drawing, Drawn
from jaxpp.schedule.draw.timeline import Timeline
from jaxpp.schedule.idle import bubble_fraction, idle_causes
from jaxpp.tables.html import html_remarks, html_table
from jaxpp.tables.text import fold_lines, table_lines
from jaxpp.types import Device

__all__ = ["Causes", "Clock", "Profile"]

Clock = Literal["trace", "isolated"]
"""Which times the numbers are of."""


class Causes(NamedTuple):
    """Where a rank's idle time comes from, in seconds; the parts sum to it.

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
        devices: of each rank.
        spans: every instruction as it was traced, in the order the host handed them over.
        isolated: every instruction on devices of their own, as long as it takes alone.
        clock: which of the two the numbers are of: ``"trace"`` or ``"isolated"``.
        step_seconds: the length of each step that was traced.
        trace_cost: a traced step over one that is not: the ratio of the medians.
        ledger: what memory held.
        missing: what the trace of this backend lacks, so that the results were asked for instead and starts are inferred; or empty.
        num_processes: how many processes ran the step and tell of it.
        clock_error: seconds by which times of different processes may be wrong beside each other.
    """

    schedule: Schedule
    devices: tuple[Device, ...]
    spans: tuple[Span, ...]
    isolated: tuple[Span, ...]
    clock: Clock
    step_seconds: tuple[float, ...]
    trace_cost: float
    ledger: Ledger
    missing: str = ""
    num_processes: int = 1
    clock_error: float = 0.0

    @property
    def shown(self) -> tuple[Span, ...]:
        """The spans that the numbers are of."""
        return self.isolated if self.clock == "isolated" else self.spans

    @cached_property
    def actions(self) -> Mapping[Action, Span]:
        """The actions that ran; I of a stage whose input wants no cotangent has nothing to do and is not among them."""
        return _actions(self.shown)

    @cached_property
    def transfers(self) -> tuple[Span, ...]:
        """What went from rank to rank for an action."""
        return tuple(span for span in self.shown if span.sends and span.action is not None)

    @cached_property
    def seconds(self) -> float:
        """The length of the step."""
        return max(span.end for span in self.shown)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank ran an action."""
        return tuple(covered([s for s in self.actions.values() if s.rank == rank]) for rank in range(self.schedule.num_ranks))

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
        return bubble_fraction(self.busy, self.seconds)

    @cached_property
    def beside(self) -> int:
        """How many programs began in the trace before one had ended that their rank was given earlier: they ran side by side."""
        ends, found = [0.0] * self.schedule.num_ranks, 0
        for span in self.spans:
            if not span.sends:
                found += span.start < ends[span.rank]
                ends[span.rank] = max(ends[span.rank], span.end)
        return found

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
    def measured(self) -> Timing:
        """What the virtual clock is told. Time in which two actions of a rank ran side by side counts for the first only."""
        durations, until = {}, [0.0] * self.schedule.num_ranks
        for action, span in sorted(self.actions.items(), key=lambda item: item[1].start):
            durations[action] = max(0.0, span.end - max(span.start, until[span.rank]))
            until[span.rank] = max(until[span.rank], span.end)
        found: list[list[float]] = [[] for _ in range(self.schedule.num_stages)]
        for span in self.transfers:
            if span.action is not None:
                found[span.action.stage - (span.action.kind != Kind.F)].append(span.end - span.start)
        hops = tuple(statistics.median(times) if times else 0.0 for times in found[:-1])
        handed = {action: self.actions[action].begun if action in self.actions else 0.0 for action in self.schedule.order}
        return Timing(durations, hops, handed)

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The actions of the timeline that the numbers are of, in seconds."""
        return _bars(self.shown)

    @cached_property
    def simulated(self) -> tuple[Bar, ...]:
        """The actions on the virtual clock, with these durations of actions and transfers, in seconds; nothing else of a step."""
        schedule, timing = self.schedule, self.measured._replace(dispatched=None)
        return tuple(bars(schedule.rows, replay(schedule.rows, schedule.stage_to_rank, timing)))

    @property
    def simulated_seconds(self) -> float:
        """The makespan of the simulated actions."""
        return float(max(bar.end for bar in self.simulated))

    @property
    def simulated_bubble_fraction(self) -> float:
        """The bubble of the simulated actions, without the optimizer's part of the step."""
        durations = self.measured.durations
        busy = [sum(durations.get(action, 0) for action in row) for row in self.schedule.rows]
        return bubble_fraction(busy, self.simulated_seconds)

    @cached_property
    def causes(self) -> tuple[Causes, ...]:
        """Where each rank's idle time comes from."""
        durations, busy = self.measured.durations, self.busy
        mean = {kind: _mean([float(time) for action, time in durations.items() if action.kind == kind]) for kind in Kind}
        equal = {action: mean[action.kind] for action in durations}
        found = idle_causes(self.schedule.rows, self.schedule.stage_to_rank, self.measured, equal, busy, self.seconds)
        rests = (self.seconds - time - sum(idle) for idle, time in zip(found, busy, strict=True))
        return tuple(Causes._make(map(float, (*idle, rest))) for idle, rest in zip(found, rests, strict=True))

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Live bytes of each device over the step."""
        return curves(self.ledger.liveness, self.spans, self.devices)

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        return f"{self.schedule.heading}; {self.titles[self.clock]}: {_milli(self.seconds)} ms, bubble {self.bubble_fraction:.1%}"

    @property
    def titles(self) -> Mapping[Clock, str]:
        """What the two timelines are called."""
        how = "watched, starts inferred" if self.missing else "traced"
        return {"trace": how, "isolated": "each program alone, on devices of its own"}

    def drawing(self) -> Drawing:
        """The actions of the timeline that the numbers are of, in milliseconds."""
        return Drawing(self.heading, self.schedule.num_ranks, self.schedule.stage_to_rank, _in_milliseconds(self.bars))

    def figure(self, width: float | None = None) -> Figure:
        """The timeline as it was traced, that of each program alone, and the memory of each device, as one figure.

        The timelines have one scale of time. If one is far shorter than the other, each
        has a scale of its own, and a title says so.

        Args:
            width: of the figure in inches; as many as the bars need, up to 9.4, unless given.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        return profile_figure(self.heading, self._timelines(), self.memory, self.schedule.stage_to_rank, width)

    def pebble_figure(self, width: float | None = None) -> Figure:
        """The pebble graph of the step as it was traced, above that of each program alone.

        Args:
            width: of the figure in inches; as many as the bars need, up to 9.4, unless given.

        Raises:
            ImportError: without matplotlib, saying how to install it.
        """
        return pebble_pair(self.heading, self._timelines(), self.schedule.stage_to_rank, width)

    def _timelines(self) -> list[Timeline]:
        """Both timelines, in milliseconds, with their titles."""
        found = []
        for title, spans in zip(self.titles.values(), (self.spans, self.isolated), strict=True):
            parts = [s for s in spans if s.action is None and not s.sends], [s for s in spans if s.sends]
            others = ([(span.rank, 1e3 * span.start, 1e3 * span.end) for span in part] for part in parts)
            found.append(Timeline(title, _in_milliseconds(_bars(spans)), *others))
        return found

    def causes_table(self) -> list[list[str]]:
        """Busy and idle time of each rank and the causes of it, as text, in milliseconds; the first row says what is what."""
        rows = [["rank", "busy", "idle", "fill, drain", "imbalance", "transfer", "dispatch", "optimizer"]]
        for rank, (busy, idle, parts) in enumerate(zip(self.busy, self.idle, self.causes, strict=True)):
            rows.append([str(rank), *map(_milli, (busy, idle, *parts))])
        return rows

    @property
    def shares(self) -> tuple[float, float, float]:
        """Parts of ranks x step: computing, waiting for transfers, idle for other reasons. They sum to 1."""
        whole = self.schedule.num_ranks * self.seconds
        compute, transfer = sum(self.busy) / whole, sum(parts.transfer for parts in self.causes) / whole
        return compute, transfer, 1 - compute - transfer

    def remarks(self) -> list[str]:
        """What else there is to say, a line each."""
        compute, transfer, rest = self.shares
        other = dataclasses.replace(self, clock="trace" if self.clock == "isolated" else "isolated")
        lines = [
            f"milliseconds; compute {compute:.1%}, waiting for transfers {transfer:.1%}, the rest of the bubble {rest:.1%}",
            f"the actions alone, on the virtual clock: {_milli(self.simulated_seconds)} ms, "
            f"bubble {self.simulated_bubble_fraction:.1%}",
            f"{other.titles[other.clock]}: {_milli(other.seconds)} ms, bubble {other.bubble_fraction:.1%}",
            f"host: {1e6 * self.host_seconds:.0f} us an action, its sends included; a step that is traced takes "
            f"{self.trace_cost:.2f} of one that is not",
            f"microbatches were on their way for {_milli(sum(self.latencies))} ms together, in a step of {_milli(self.seconds)} ms",
        ]
        if self.num_processes > 1:
            what = f"{self.num_processes} processes, whose clocks are aligned to within {1e6 * self.clock_error:.0f} us"
            half = "half of the quickest way there and back"
            lines.append(f"{what} ({half}): when something happened in two of them can be compared no better")
        slow = []
        for boundary, hop in enumerate(map(float, self.measured.hops)):
            hidden = _mean([float(t) for a, t in self.measured.durations.items() if a[:2] == (boundary + 1, Kind.F)])
            where = f"boundary {boundary} (between stages {boundary} and {boundary + 1})"
            takes = f"{_milli(hop)} ms, longer than the forward that could hide it ({_milli(hidden)} ms)"
            slow += [f"warning: a transfer over {where} takes {takes}"] * (hop > hidden)
        if slow:
            slow.append(f"warning: waiting for transfers costs {_milli(transfer * self.seconds)} ms a rank")
        if self.missing:
            slow.append(f"warning: the trace of this backend lacks what is needed ({self.missing}): starts are inferred")
        return lines + slow

    def __str__(self) -> str:
        return "\n".join(
            [self.overview(), "", *table_lines(self.causes_table()), "", *fold_lines(self.remarks()), "", str(self.ledger)]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = f"{html_table(self.causes_table())}{html_remarks(self.remarks())}"
        picture = self._picture_html() or html_remarks([self.heading])
        return f"{picture}{tables}<details><summary>memory</summary>{self.ledger._repr_html_()}</details>"


def _actions(spans: Sequence[Span]) -> Mapping[Action, Span]:
    return {span.action: span for span in spans if span.action is not None and not span.sends}


def _bars(spans: Sequence[Span]) -> tuple[Bar, ...]:
    return tuple(Bar(span.rank, action, span.start, span.end) for action, span in _actions(spans).items())


def _in_milliseconds(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    return tuple(Bar(rank, action, 1e3 * start, 1e3 * end) for rank, action, start, end in bars)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
