"""What really ran, when, and why the ranks idled: a ``Profile`` describes one step, or forwards, on two timelines.

One is the trace: when every program and transfer ran. The other is isolated: every program takes as long as it takes alone, on the
virtual clock. Where devices share cores, as forced CPU devices do, the trace shows how they slow each other down, and the isolated
timeline what the pipeline would do on devices of its own. All numbers describe one of the two (``clock``).
"""

import dataclasses
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness
from jaxpp.observe.profile.spans import Span, covered
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Awaited, Bar, Timing, bars, bubble_fraction, idle_causes, replay
from jaxpp.schedule.draw.canvas import INK, Axes, Figure, Panel, draw_key, fit_page, page, page_width, write_numbers
from jaxpp.schedule.draw.pebbles import pebble_pair
from jaxpp.schedule.draw.text import Drawing, Drawn
from jaxpp.schedule.draw.timeline import Copied, Timeline, draw_timeline, extents, room, scaled, timeline_key
from jaxpp.schedule.offload import Offloaded
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, table_lines, three_digits
from jaxpp.types import Device

Clock = Literal["trace", "isolated"]  # which times the numbers are of
_SLOWED = 1.25  # times as long as others from which on a step that was traced is said to be slowed


class Causes(NamedTuple):
    """Where a rank's idle time in a step comes from, in seconds; the parts sum to it."""

    fill_drain: float  # what the schedule costs even with equal stages
    imbalance: float  # what stages that differ add
    transfer: float  # what transfers add that nothing hides
    dispatch: float  # what waiting for the host adds
    optimizer: float  # what no rank computes beside: summing tied gradients, the optimizer, its scalars that cross
    other: float  # what none of these explains: splitting the batch before, an action that began late on this machine


class ForwardCauses(NamedTuple):
    """Where a rank's idle time in forwards comes from: as ``Causes``, but for the optimizer."""

    fill_drain: float
    imbalance: float
    transfer: float
    dispatch: float
    other: float  # splitting the batch before, putting outputs together after


class RingCauses(NamedTuple):
    """Where a rank's idle time in a generation comes from: as ``ForwardCauses``, transfers of tokens included."""

    fill_drain: float
    token: float  # what waiting for tokens adds, even with equal stages: too few groups
    imbalance: float
    transfer: float
    dispatch: float
    other: float  # what is not a pass


class RingPass(NamedTuple):
    """One pass of a generation through the stages."""

    group: int
    turn: int  # which pass of its group it is
    num_tokens: int  # that it takes of each sequence
    num_made: int  # tokens that it makes and somebody wants
    is_prompt: bool  # whether it is a chunk of a prompt, run for one sequence alone
    awaits: int  # the number of the pass whose token it takes; -1 if it takes none
    beside: int = 0  # how many passes before it run side by side with it, as each stage's parameters come for all of them at once
    num_prompts: int = 0  # how many prompts are prefilled at once, each on a carry of its own; 0 if it is of none


class Curve(NamedTuple):
    """Live bytes of one device over a step, by kind."""

    label: str  # the device and its ranks, ``cuda:0 (ranks 0, 4)``
    times: tuple[float, ...]  # milliseconds from the start of the step, in ascending order
    levels: tuple[tuple[int, ...], ...]  # the bytes of each of ``MEMORY_KINDS`` from each time on, the last to the end of the step


@dataclass(frozen=True)
class Profile(Drawn):
    """One step as it ran; or forwards: of a batch, of a stream of batches, of the passes of a generation.

    ``print`` it for a summary; in a notebook it draws itself.

    Attributes:
        schedule: the order that was asked for; of forwards, in which they ran.
        devices: of each rank.
        spans: every instruction as it was traced, in the order the host handed them over.
        isolated: every instruction on devices of their own, as long as it takes alone.
        clock: which of the two the numbers are of: ``"trace"`` or ``"isolated"``.
        step_seconds: the length of each step that was traced.
        trace_cost: a traced step over one that is not: the ratio of the medians. The profiler notes each operation, and so slows
            programs of many small ones, such as loops, on some devices more than on others; above 1.25 the title says so.
        ledger: what memory held.
        missing: what the trace of this backend lacks, so that the results were asked for instead and starts are inferred; or empty.
        num_processes: how many processes ran the step and tell of it.
        clock_error: seconds by which times of different processes may be wrong beside each other.
        passes: of a generation, what each pass was; their numbers stand in the actions in place of microbatches.
        offloaded: the residuals that waited in host memory, if residuals did.
        lanes: where a thread for each rank hands over what nobody looks at, the seconds of the host in the step that was traced,
            and that one thread handed over, by the thread whose they would have been.
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
    passes: tuple[RingPass, ...] = ()
    offloaded: tuple[Offloaded, ...] = ()
    lanes: tuple[float, ...] = ()

    @property
    def num_groups(self) -> int | None:
        """How many groups of sequences a generation had in flight; None for what is none."""
        return 1 + max(each.group for each in self.passes) if self.passes else None

    @property
    def awaited(self) -> Awaited:
        """For the passes of a generation that take a token, the pass that made it."""
        return {k: each.awaits for k, each in enumerate(self.passes) if each.awaits >= 0} if self.passes else None

    @property
    def noun(self) -> str:
        """What was run."""
        return "run" if self.schedule.forward_only else "step"

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
    def copies(self) -> tuple[Span, ...]:
        """The copies to host memory, and back: of residuals, or of what else waits there."""
        return tuple(span for span in self.shown if span.copies)

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
            if not span.sends and not span.copies:
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
        sent = [(span.action.stage - (span.action.kind != Kind.F), span) for span in self.transfers if span.action is not None]
        hops = _medians(sent, self.schedule.num_stages)
        hops = hops if self.passes else hops[:-1]
        handed = {action: self.actions[action].begun if action in self.actions else 0.0 for action in self.schedule.order}
        away = {span.action for span in self.copies}
        offloaded = tuple(each for each in self.offloaded if each.forward in away)
        return Timing(durations, hops, handed, offloaded=offloaded, copies=self.copy_seconds)

    @cached_property
    def copy_seconds(self) -> tuple[float, ...]:
        """How long the residuals of each stage and one microbatch take to host memory, or back: the median."""
        copied = [(span.action.stage, span) for span in self.copies if span.action is not None]
        return _medians(copied, self.schedule.num_stages)

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The actions of the timeline that the numbers are of, in seconds."""
        return tuple(Bar(span.rank, action, span.start, span.end) for action, span in _actions(self.shown).items())

    @cached_property
    def simulated(self) -> tuple[Bar, ...]:
        """The actions on the virtual clock, with these durations of actions and transfers, in seconds; nothing else of a step."""
        schedule, timing = self.schedule, self.measured._replace(dispatched=None)
        return tuple(bars(schedule.rows, replay(schedule.rows, schedule.stage_to_rank, timing, self.awaited)))

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
    def causes(self) -> tuple[Causes | ForwardCauses | RingCauses, ...]:
        """Where each rank's idle time comes from."""
        durations, busy, rows = self.measured.durations, self.busy, self.schedule.rows
        # What takes the same time if stages are equal; batches may differ in size, and so do passes.
        alike = {action: (action.kind, action.microbatch * self.schedule.forward_only) for action in durations}
        times: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
        for action, time in durations.items():
            times[alike[action]].append(float(time))
        equal = {action: statistics.fmean(times[alike[action]]) for action in durations}
        found = idle_causes(rows, self.schedule.stage_to_rank, self.measured, equal, busy, self.seconds, self.awaited)
        rests = (self.seconds - time - sum(idle) for idle, time in zip(found, busy, strict=True))
        if self.schedule.forward_only:
            made = RingCauses if self.passes else ForwardCauses
            return tuple(made._make(map(float, (*idle, rest))) for idle, rest in zip(found, rests, strict=True))
        updating = self._updating
        pairs = ((idle, rest, min(max(0.0, rest), updating)) for idle, rest in zip(found, rests, strict=True))
        return tuple(Causes._make(map(float, (*idle, own, rest - own))) for idle, rest, own in pairs)

    @property
    def _updating(self) -> float:
        """Seconds in which no rank ran an action, and the optimizer ran, or what it needs: what follows an action of its rank."""
        acting, updating, acted = list(self.actions.values()), list[Span](), set[int]()
        for span in self.shown:
            if span.action is not None and not span.sends:
                acted.add(span.rank)
            elif span.action is None and span.rank in acted:
                updating.append(span)
        return covered([*acting, *updating]) - covered(acting)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """Live bytes of each device over the step; of steps in flow, none: ``ledger`` has those between two of them."""
        if len(self.ledger.liveness.lines) != len(self.spans):
            return ()
        return curves(self.ledger.liveness, self.spans, self.devices)

    @property
    def heading(self) -> str:
        """One line that says what this is."""
        what, schedule = self.schedule.heading, self.schedule
        if self.passes:
            counts = f"{self.num_groups} group{'s' * (self.num_groups != 1)}, {len(self.passes)} passes"
            what = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {counts}"
        return f"{what}; {self.titles[self.clock]}: {_milli(self.seconds)} ms, bubble {self.bubble_fraction:.1%}"

    @property
    def titles(self) -> Mapping[Clock, str]:
        """What the two timelines are called; ranks on one device take turns, and each is idle while another runs."""
        how, count = "watched, starts inferred" if self.missing else "traced", len(set(self.devices))
        if count < len(self.devices):
            how += f", {len(self.devices)} ranks on {count} device{'s' * (count > 1)}"
        if self.trace_cost > _SLOWED:
            how += f" ({self.trace_cost:.2g} times as long as other {self.noun}s)"
        return {"trace": how, "isolated": "each program alone, on devices of its own"}

    def drawing(self) -> Drawing:
        """The actions of the timeline that the numbers are of, in milliseconds."""
        bars = self._drawn(self.shown)
        return Drawing(self.heading, self.schedule.num_ranks, self.schedule.stage_to_rank, bars, self.num_groups)

    def figure(self, width: float | None = None) -> Figure:
        """The timeline as it was traced, that of each program alone, and the memory of each device, as one figure.

        The timelines have one scale of time, unless one is far shorter than the other, which a title says. A generation has a
        colour for each group, paler where a prompt is taken in; lines below the rows are what arrives, tokens too. ``width`` is in
        inches; as many as the bars need, up to 9.4, unless given. Needs matplotlib.
        """
        return profile_figure(self.heading, self._timelines(), self.memory, self.schedule.stage_to_rank, width)

    def pebble_figure(self, width: float | None = None) -> Figure:
        """The pebble graph of the step as it was traced, above that of each program alone; ``width`` is as for ``figure``."""
        return pebble_pair(self.heading, self._timelines(), self.schedule.stage_to_rank, width)

    def _timelines(self) -> list[Timeline]:
        prompts = frozenset(number for number, each in zip(self._numbers, self.passes, strict=True) if each.is_prompt)
        found = []
        for title, spans in zip(self.titles.values(), (self.spans, self.isolated), strict=True):
            parts = [s for s in spans if s.action is None and not s.sends], [s for s in spans if s.sends]
            rest, sends = ([(span.rank, 1e3 * span.start, 1e3 * span.end) for span in part] for part in parts)
            copies = [Copied(s.rank, 1e3 * s.start, 1e3 * s.end, s.label.startswith("fetch")) for s in spans if s.copies]
            found.append(Timeline(title, self._drawn(spans), rest, sends, self.num_groups, prompts, copies))
        return found

    def _drawn(self, spans: Sequence[Span]) -> tuple[Bar, ...]:
        """The bars of actions in milliseconds; of a ring, with the numbers that its drawing knows groups and turns by."""
        numbers, found = self._numbers, list[Bar]()
        for action, span in _actions(spans).items():
            shown = action._replace(microbatch=numbers[action.microbatch]) if self.passes else action
            found.append(Bar(span.rank, shown, 1e3 * span.start, 1e3 * span.end))
        return tuple(found)

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(each.turn * (self.num_groups or 1) + each.group for each in self.passes)

    def causes_table(self) -> list[list[str]]:
        """Busy and idle time of each rank and the causes of it, as text, in milliseconds; the first row says what is what."""
        rows = [["rank", "busy", "idle", *(name.replace("_", ", ") for name in self.causes[0]._fields)]]
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
        """What else there is to say, a line each; warnings come last."""
        compute, transfer, rest = self.shares
        other = dataclasses.replace(self, clock="trace" if self.clock == "isolated" else "isolated")
        ideal = self.simulated_bubble_fraction
        lines = [
            f"milliseconds; compute {compute:.1%}, waiting for transfers {transfer:.1%}, the rest of the bubble {rest:.1%}",
            f"the actions alone, on the virtual clock: {_milli(self.simulated_seconds)} ms, bubble {ideal:.1%}",
            f"{other.titles[other.clock]}: {_milli(other.seconds)} ms, bubble {other.bubble_fraction:.1%}",
            f"host: {1e6 * self.host_seconds:.0f} us an action, its sends included",
        ]
        if self.lanes:
            lines[-1] += f"; one thread handed over the {self.noun} that was traced, in {_milli(sum(self.lanes))} ms"
            others = f"other {self.noun}s have a thread for each rank"
            lines.append(f"{others}, of which the longest would take {_milli(max(self.lanes))} ms at least")
        if self.trace_cost > _SLOWED:
            slows = "" if self.missing else ": JAX's profiler notes each operation, and slows small ones, as in loops"
            others = "others, which threads hand over" if self.lanes else "others"
            lines.append(f"the {self.noun} that was traced took {self.trace_cost:.2g} times as long as {others}{slows}")
        if self.passes:
            made, chunks = sum(each.num_made for each in self.passes), sum(each.is_prompt for each in self.passes)
            rate = f"{made / self.seconds:,.0f} tokens a second"
            lines.append(f"{made} tokens were made, {rate}; {chunks} of the {len(self.passes)} passes took in prompts")
        if self.num_processes > 1:
            within = f"{1e6 * self.clock_error:.0f} us (half of the quickest way there and back)"
            clocks = f"{self.num_processes} processes, whose clocks are aligned to within {within}"
            lines.append(f"{clocks}: when something happened in two of them can be compared no better")
        if self.copies:
            of = " of residuals" * all(span.action is not None for span in self.copies)
            what = f"{len(self.copies)} copies{of} to host memory or back"
            took = f"at least one was under way for {_milli(covered(self.copies))} ms"
            lines.append(f"{what}; {took}; waiting for them counts as waiting for transfers")
        slow, num_stages, times = [], self.schedule.num_stages, self.measured.durations
        found = [[float(t) for a, t in times.items() if a[:2] == (stage, Kind.F)] for stage in range(num_stages)]
        forwards = [statistics.fmean(each or [0.0]) for each in found]
        for stage, copy in enumerate(self.copy_seconds):
            takes = f"{_milli(copy)} ms, longer than a forward that could hide it ({_milli(forwards[stage])} ms)"
            if copy > forwards[stage]:
                slow.append(f"warning: to copy the residuals of stage {stage} to host memory or back takes {takes}")
        for boundary, hop in enumerate(map(float, self.measured.hops)):
            after = (boundary + 1) % num_stages
            where = f"boundary {boundary} (between stages {boundary} and {after})"
            takes = f"{_milli(hop)} ms, longer than the forward that could hide it ({_milli(forwards[after])} ms)"
            slow += [f"warning: a transfer over {where} takes {takes}"] * (hop > forwards[after])
        if slow:
            slow.append(f"warning: waiting for transfers costs {_milli(transfer * self.seconds)} ms a rank")
        if self.missing:
            slow.append(f"warning: the trace of this backend lacks what is needed ({self.missing}): starts are inferred")
        return lines + slow

    def __str__(self) -> str:
        memory = ["", str(self.ledger)] if self.ledger.samples else []
        return "\n".join([self.overview(), "", *table_lines(self.causes_table()), "", *fold_lines(self.remarks()), *memory])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = f"{html_table(self.causes_table())}{html_remarks(self.remarks())}"
        picture = self._picture_html() or html_remarks([self.heading])
        memory = f"<details><summary>memory</summary>{self.ledger._repr_html_()}</details>"
        return f"{picture}{tables}{memory if self.ledger.samples else ''}"


def _actions(spans: Sequence[Span]) -> Mapping[Action, Span]:
    return {span.action: span for span in spans if span.action is not None and not span.sends and not span.copies}


def _medians(spans: Sequence[tuple[int, Span]], count: int) -> tuple[float, ...]:
    found: list[list[float]] = [[] for _ in range(count)]
    for number, span in spans:
        found[number].append(span.end - span.start)
    return tuple(statistics.median(times) if times else 0.0 for times in found)


def _milli(seconds: float) -> str:
    return three_digits(1e3 * seconds)


# --- the figure: what really ran above what the virtual clock says of it, and the memory that it took ---

COLOURS = (
    *("#262626", "#6A6A6A", "#ABABAB", "#00684B", "#00AB7E", "#B4E3D3", "#7AC2A8", "#8C8C8C", "#4D4D4D", "#008A65"),
    "#E4E4E4",
)
_ROW, _LINE = 0.6, 0.135  # inches: of a device, and of a line of its name
_LETTERS = 20  # in a line of a device's name


def curves(liveness: Liveness, spans: Sequence[Span], by_rank: Sequence[Device]) -> tuple[Curve, ...]:
    """One curve for each device, in milliseconds; there is one span for each line of ``liveness``.

    Results are there from a program's start, what nobody reads after it is freed at its end, and what arrives is there once the
    device has begun what it was given before. So a curve has the moments of ``liveness`` in order, and the same peak.
    """
    found, end = [], max(1e3 * span.end for span in spans)
    for device in liveness.devices:
        ranks = [str(rank) for rank, home in enumerate(by_rank) if home == device]
        label = f"{device} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
        alive = liveness.levels[device].tolist()
        after = (liveness.levels[device] - liveness.freed[device]).tolist()
        times, levels, now = [0.0], [tuple(alive[0])], 0.0
        for number, (line, span) in enumerate(zip(liveness.lines, spans, strict=True), 1):
            for time, level in ((span.start, alive[number]), (span.end, after[number])):
                now = max(now, 1e3 * time) if line.device == device and line.program is not None else now
                if tuple(level) != levels[-1]:
                    times.append(now)
                    levels.append(tuple(level))
        found.append(Curve(label, (*times, max(now, end)), (*levels, tuple(alive[-1]))))
    return tuple(found)


def profile_figure(
    heading: str, timelines: Sequence[Timeline], memory: Sequence[Curve], stage_to_rank: Sequence[int], width: float | None = None
) -> Figure:
    """The timelines of a step, one below the other, each with its end; and the bytes and peak of each device that has a curve."""
    step = max([timelines[0].end, *(curve.times[-1] for curve in memory)])
    across = extents(timelines, [step] + [0] * (len(timelines) - 1))
    panels = [room(stage_to_rank, end) for end in across]
    names = [_lines(curve.label) for curve in memory]
    if memory:
        row = max([_ROW] + [_LINE * (name.count("\n") + 2) for name in names])
        panels.append(Panel(len(memory), row * len(memory), across[0]))
    usual = statistics.mean(bar.end - bar.start for bar in timelines[0].bars) or step or 1  # a short bar may be as short as can be
    inches, points = page_width(max(across) / usual, width)
    figure, axes = page(heading, timeline_key(timelines, stage_to_rank), panels, inches, "ms")
    bars = []
    for part, line, end in zip(axes, timelines, across, strict=False):
        titled = line._replace(title=scaled(line.title, end, across[0]))
        bars.append(draw_timeline(part, titled, stage_to_rank, points / end))
        middle, ended = max(stage_to_rank) / 2 + 0.5, float(line.end)
        took = f"{three_digits(ended)} ms"
        part.annotate(took, (ended, middle), (4, 0), textcoords="offset points", size=8, va="center", color=INK)
    if memory:
        _draw_memory(axes[-1], memory, names, step)
        present = [k for k in range(len(MEMORY_KINDS)) if any(level[k] for curve in memory for level in curve.levels)]
        draw_key(figure, [(MEMORY_KINDS[k], COLOURS[k]) for k in present], where="lower")
    fit_page(figure, axes, panels)
    write_numbers(list(zip(axes, bars, strict=False)), "turns" if timelines[0].num_groups else "microbatches")
    return figure


def _lines(label: str) -> str:
    device, space, ranks = label.partition(" (")
    return label if len(label) <= _LETTERS else "\n".join([device, *textwrap.wrap(space.strip() + ranks, _LETTERS)])


def _draw_memory(axes: Axes, memory: Sequence[Curve], names: Sequence[str], end: float) -> None:
    """The memory of each device as an area in steps, all on one scale: what stays below, in greys; on it what comes and goes.

    Neighbours differ in lightness, so that they part for the colour-blind and in grey.
    """
    peaks = [max(map(sum, curve.levels)) for curve in memory]
    beside = {"transform": axes.get_yaxis_transform(), "size": 8, "va": "center", "color": INK}
    for row, curve in enumerate(memory):
        times = [*curve.times, end]
        sizes = np.array([*curve.levels, curve.levels[-1]], float).T * 0.88 / (max(peaks) or 1)
        tops = row + 1 - np.cumsum(sizes, axis=0)
        for kind, (size, top) in enumerate(zip(sizes, tops, strict=True)):
            there = (size > 0) | np.append(False, size[:-1] > 0)  # up to the moment at which nothing is left
            style = {"step": "post", "color": COLOURS[kind], "linewidth": 0.3, "label": MEMORY_KINDS[kind]}
            axes.fill_between(times, top, top + size, where=there, **style)  # lines show bytes that lived for less than a pixel
        axes.text(1.01, row + 0.56, bytes_in_words(peaks[row]), **beside)
    axes.text(1.01, -0.1, "peak", **beside)
    axes.set_yticks([row + 0.56 for row in range(len(memory))], names)
    axes.set_title("memory of arrays", loc="left", size=9, weight="bold", color=INK)  # not the temporaries of programs
