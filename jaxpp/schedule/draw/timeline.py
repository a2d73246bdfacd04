"""The timeline of schedules, simulations, rings and profiles: bars in time, a row for each rank. In a ring, colours tell groups."""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw import canvas

_REST, _SENT, _OUT, _BACK = "#8C8C8C", "#D55E00", "#00684B", "#7AC2A8"  # what is no action, what arrives, copies to the host, back
_UNEQUAL = 2  # how many times as long one timeline is as the other if they have scales of their own
_MOST_NAMED = 12  # groups that a key names one by one


class Copied(NamedTuple):
    """A copy of residuals to host memory, or back, on the link between a rank's device and its host."""

    rank: int
    start: Number
    end: Number
    back: bool


class Timeline(NamedTuple):
    """A step in time, in any unit."""

    title: str
    bars: Sequence[Bar]
    rest: Sequence[tuple[int, float, float]] = ()  # rank, start and end of the begin, sums of tied gradients, and the update
    sends: Sequence[tuple[int, float, float]] = ()  # rank, start and end of each arrival
    num_groups: int | None = None
    prompts: Set[int] = frozenset()  # the numbers of the passes that take in prompts, in a ring
    copies: Sequence[Copied] = ()

    @property
    def end(self) -> Number:
        """When everything is done."""
        return max([bar.end for bar in self.bars] + [end for _, _, end in self.rest])


def timeline(line: Timeline, stage_to_rank: Sequence[int], heading: str, width: float | None = None) -> canvas.Figure:
    """The bars in time, a row for each rank, as a matplotlib ``Figure``; ``width`` is in inches."""
    panel = room(stage_to_rank, line.end or 1)
    inches, points = canvas.page_width(panel.across / shortest(line.bars), width)
    figure, (axes,) = canvas.page(heading, timeline_key([line], stage_to_rank), [panel], inches)
    bars = draw_timeline(axes, line, stage_to_rank, points / panel.across)
    canvas.fit_page(figure, [axes], [panel])
    canvas.write_numbers([(axes, bars)], "turns" if line.num_groups else "microbatches")
    return figure


def room(stage_to_rank: Sequence[int], across: Number) -> canvas.Panel:
    """The panel that a timeline needs."""
    num_ranks = max(stage_to_rank) + 1
    return canvas.Panel(num_ranks, num_ranks * (0.42 if num_ranks <= 8 else max(0.2, min(0.32, 5.2 / num_ranks))), across)


def shortest(bars: Sequence[Bar]) -> Number:
    """The length of a short bar: one in twenty is shorter, not counting those that take no time."""
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start)
    return lengths[len(lengths) // 20] if lengths else (max(bar.end for bar in bars) or 1) / 100


def extents(timelines: Sequence[Timeline], least: Sequence[Number]) -> list[Number]:
    """How far each panel's time goes, at least as far as in ``least``: as the longest, or each its own if some are far shorter."""
    own = [max(line.end, end) or 1 for line, end in zip(timelines, least, strict=True)]
    return own if max(own) > _UNEQUAL * min(own) else [max(own)] * len(own)


def scaled(title: str, across: Number, first: Number) -> str:
    """The title of a panel, and how its scale of time compares with that of the first panel."""
    ratio = first / across
    if ratio == 1:
        return title
    return f"{title} (time stretched {ratio:.2g} times)" if ratio > 1 else f"{title} (time compressed {1 / ratio:.2g} times)"


def timeline_key(timelines: Sequence[Timeline], stage_to_rank: Sequence[int]) -> list[canvas.Entry]:
    """What the colours of timelines mean."""
    kinds = [kind for kind in Kind if any(bar.action.kind == kind for line in timelines for bar in line.bars)]
    groups = timelines[0].num_groups
    if groups:
        entries = [(f"group {group}", canvas.group_colour(group)) for group in range(min(groups, _MOST_NAMED))]
        entries += [(f"and {groups - _MOST_NAMED} more", "")] * (groups > _MOST_NAMED)
        entries += [("paler: a prompt", canvas.group_colour(0, pale=True))] * any(line.prompts for line in timelines)
    else:
        entries = [(canvas.WORDS[kind], canvas.colour_of(kind, 0, 1)) for kind in kinds]
        several = len(stage_to_rank) > max(stage_to_rank) + 1
        entries += [("later stage of its rank", canvas.colour_of(Kind.F, 1, 1))] * several
    rest = "begin, outputs" if kinds == [Kind.F] else "begin, sums, update"
    entries += [(rest, _REST)] * any(line.rest for line in timelines)
    entries += [("arrives", _SENT)] * any(line.sends for line in timelines)
    entries += [("to the host", _OUT), ("back", _BACK)] * any(line.copies for line in timelines)
    return [*entries, ("idle", canvas.IDLE)]


def looks(
    line: Timeline, stage_to_rank: Sequence[int], scale: float, tops: dict[tuple[int, Kind], float] | None = None
) -> Iterator[canvas.Look]:
    """How each bar looks, in the row of its rank, or, if ``tops`` are given, of its stage and kind."""
    orders = [list(stage_to_rank[:stage]).count(rank) for stage, rank in enumerate(stage_to_rank)]
    for rank, (stage, kind, microbatch), start, end in line.bars:
        place = (rank if tops is None else tops[stage, kind]), float(start), float(end)
        if line.num_groups and tops is None:
            turn, group = divmod(microbatch, line.num_groups)
            prompt = microbatch in line.prompts
            label, colour = f"group {group}" + ", prompt" * prompt, canvas.group_colour(group, pale=prompt)
            yield canvas.Look(label, kind, colour, 0, str(turn), *place)
        else:
            colour = canvas.colour_of(kind, orders[stage], max(orders), scale * float(end - start))
            yield canvas.Look(f"{kind} {orders[stage]}", kind, colour, orders[stage], str(microbatch), *place)


def draw_timeline(axes: canvas.Axes, line: Timeline, stage_to_rank: Sequence[int], scale: float) -> list[canvas.Look]:
    """Draw a timeline, a unit of time ``scale`` points wide, with a title; returns its bars, for their numbers."""
    bars = list(looks(line, stage_to_rank, scale))
    canvas.draw_rows(axes, {str(rank): rank for rank in range(max(stage_to_rank) + 1)}, line.end or 1)
    canvas.draw_bars(axes, bars, scale)
    for back, label, colour, top in ((False, "copies to the host", _OUT, 0.74), (True, "copies back", _BACK, 0.84)):
        copies = [(copy.rank + top, 0.1, copy.start, copy.end) for copy in line.copies if copy.back == back]
        canvas.draw_boxes(axes, copies, colour, label, scale)
    canvas.draw_boxes(axes, [(*canvas.inside(rank), start, end) for rank, start, end in line.rest], _REST, "rest")
    canvas.draw_boxes(axes, [(rank + 0.94, 0.1, start, end) for rank, start, end in line.sends], _SENT, "sends")
    axes.set_ylabel("rank", size=9, color=canvas.INK)
    axes.set_title(canvas.folded(line.title, axes), loc="left", size=9, weight="bold", color=canvas.INK)
    return bars
