"""What a search found: why a candidate was chosen, in sentences, and the time of a step against memory, as a figure.

Each sentence tells of one choice, from its neighbours that differ in this choice alone: how long they took where both ran, and else
how long they would take by prediction. In the figure, the frontier is the line
through the candidates to which no other is superior in both. A candidate that ran has a cross at the time it took; the line from
its mark to the cross is what the prediction missed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpp.observe.evaluate import Parts, alone, parts
from jaxpp.runtime.roofline import SPREAD
from jaxpp.schedule.draw.canvas import INK, Axes, Entry, Figure, chart, group_colour, matplotlib_module, number_points
from jaxpp.schedule.registry import AUTO, SCHEDULES
from jaxpp.tables import bytes_in_words, time_in_words, unit_of_bytes
from jaxpp.tuner.search import KNOBS, Candidate, Knob, Row, SearchResult

_PARTS = {
    "compute": "computing",
    "bubble": "the bubble",
    "sharing": "sharing cores",
    "transfer": "transfers that nothing hides",
    "copies": "copies to the host that nothing hides",
    "dispatch": "waiting for dispatch",
    "rest": "the beginning and the update",
}
_ALWAYS = ("schedule", "microbatches", "stages a rank", "remat")  # told first, even of a search in which they had one value
_SAME = 5e-4  # of a step: a difference that is none
_WIDTH, _TALL, _MOST_LISTED = 9.375, 4.9, 19  # inches: 900 pixels of a page; lines of the list
_DOT = 30.0  # square points of a mark
_SHAPES = {"least": ("o", "circle"), "keep": ("D", "diamond"), "offload": ("^", "triangle"), "recompute": ("s", "square")}


def reasons(
    found: SearchResult, hbm: int | None, processes: Mapping[int, Sequence[int]], *, planned: bool = False, width: int = 1
) -> tuple[str, ...]:
    """The sentences: first how the choice ran, then one for each choice that there was.

    ``planned``: the devices only compile; ``width``: how many devices each rank of a mesh has.
    """
    why = _Reasons(found, hbm, processes, planned, width)
    order = (*_ALWAYS, "balance", "replicas", "ranks")  # then any other
    knobs = sorted(KNOBS, key=lambda knob: order.index(knob.name) if knob.name in order else len(order))
    return (why.ran(), *filter(None, map(why.about, knobs)), *why.one_device())


class _Reasons(NamedTuple):
    found: SearchResult
    hbm: int | None
    processes: Mapping[int, Sequence[int]]
    planned: bool = False
    width: int = 1

    def ran(self) -> str:
        best = self.found.best
        if self.planned:
            low, high = (time_in_words(share * best.predicted) for share in SPREAD)
            likely = f"a step likely takes {time_in_words(best.predicted)} ({low} to {high})"
            why = (
                "by what kernels of their size reach of the peaks of this GPU, and a host that launches them as that of an H200 did"
            )
            return f"{best.candidate.words}: {likely}, {why}; nothing ran."
        step = f"{best.candidate.words}: a step takes {time_in_words(best.predicted)} by prediction"
        if best.measured is None:
            return f"{step}; it did not run."
        others = [row for row in self.found.rows if row.measured is not None and row is not best]
        off = _percent(abs(best.predicted / best.measured - 1))
        fastest = f", the fastest of {len(others) + 1} candidates that ran" * bool(others)
        alike = " and ".join(_short(row.candidate, best.candidate) for row in others if not row.told_apart(best))
        unsure = f", too near to {alike} to tell them apart" * bool(alike)
        return f"{step}, {time_in_words(best.measured)} when it ran (the prediction is {off} off){fastest}{unsure}."

    def about(self, knob: Knob) -> str:
        """One sentence about a choice: what the neighbours would take instead; empty if there is nothing to say."""
        best = self.found.best.candidate
        others = [row for row in self.found.rows if knob.value(row.candidate) != knob.value(best)]
        fixed = [other for other in KNOBS if other.name not in (knob.name, *knob.turns)]
        near = [row for row in others if all(other.value(row.candidate) == other.value(best) for other in fixed)]
        chosen = f"{knob.name.capitalize()}: {knob.words(knob.value(best))}"
        if not others:
            return f"{chosen}, {self._only(knob)}." if knob.name in _ALWAYS else ""
        told = [
            f"with {knob.words(knob.value(row.candidate))}{_beside(knob, row.candidate, best)} {self._compared(row)}"
            for row in self._worth_telling(knob, near or others)  # where nothing differs in it alone, others as they are
        ]
        return f"{chosen}; {'; '.join(told)}."

    def _only(self, knob: Knob) -> str:
        best = self.found.best
        if knob.name != "remat" or best.candidate.remat != "least":
            return "the only choice that was looked at"
        if self.hbm is None or best.peak is None:
            return "since no hbm is given or reported that it would have to fit into"
        room = f"the fullest device holds {bytes_in_words(best.peak)} of {bytes_in_words(self.hbm)}"
        return f"since {room}, so nothing needs to be saved"

    def _worth_telling(self, knob: Knob, near: Sequence[Row]) -> list[Row]:
        """Of numbers of microbatches the next below and above; else the best neighbour, and the best that was not slower."""
        best = self.found.best
        if knob.name == "microbatches":
            own = best.candidate.schedule.num_microbatches
            counts = {row.candidate.schedule.num_microbatches: row for row in reversed(near)}
            next_to = [max((n for n in counts if n < own), default=None), min((n for n in counts if n > own), default=None)]
            return [counts[n] for n in next_to if n is not None]
        faster = [row for row in near if row.predicted < best.predicted * (1 - _SAME)]
        slower = [row for row in near if row not in faster]
        return [*faster[:1], *slower[: 1 if knob.name != "remat" else None]]

    def _compared(self, row: Row) -> str:
        best = self.found.best
        ratio = row.predicted / best.predicted
        if row.measured is not None and best.measured is not None:
            times = f"{time_in_words(row.measured)} instead of {time_in_words(best.measured)}"
            if not row.told_apart(best):
                return f"a step took {times} when it ran, which is too near to tell them apart"
            wrong = ", though by prediction it would take less" * (ratio < 1 - _SAME)
            return f"a step took {_longer(row.measured / best.measured)} when it ran ({times}){wrong}"
        too_much = self.hbm is not None and row.peak is not None and row.peak > self.hbm
        holds = f"a device would hold {bytes_in_words(row.peak or 0)} of {bytes_in_words(self.hbm or 0)}"
        if ratio < 1 - _SAME:
            return f"a step would take {_percent(1 - ratio)} less, but {holds if too_much else 'it could not be run'}"
        if ratio <= 1 + _SAME:
            return f"a step would take as long{f', but {holds}' * too_much}"
        name, a, b = max(zip(Parts._fields, self._parts(best), self._parts(row), strict=True), key=lambda part: part[2] - part[1])
        return f"a step would take {_longer(ratio)} ({_PARTS[name]}: {time_in_words(b)} instead of {time_in_words(a)})"

    def _parts(self, row: Row) -> Parts:
        candidate = row.candidate
        return parts(
            candidate.schedule, self.found.costs[candidate.family], candidate.offload, self.processes.get(candidate.replicas, ())
        )

    def one_device(self) -> tuple[str, ...]:
        best = self.found.best.candidate
        if any(row.candidate.schedule.num_ranks == 1 for row in self.found.rows):
            return ()
        seconds = alone(best.schedule, self.found.costs[best.family])
        ratio, width = seconds / self.found.best.predicted, best.replicas * self.width
        one = "One device alone" if width == 1 else f"One rank of {width} devices alone"
        if ratio >= 1:
            return (f"{one} would take {_longer(ratio)}, by the same costs.",)
        faster = f"{one} would be faster by the same costs ({time_in_words(seconds)} a step)"
        return (f"{faster}: pass num_ranks=(1, {best.schedule.num_ranks}) to have it looked at.",)


def _beside(knob: Knob, one: Candidate, other: Candidate) -> str:
    knobs = [beside for beside in KNOBS if beside.name in ("schedule", "microbatches", "remat") and beside.name != knob.name]
    differ = [beside.phrase(beside.value(one)) for beside in knobs if beside.value(one) != beside.value(other)]
    return f" ({', '.join(differ)})" * bool(differ)


def _short(one: Candidate, other: Candidate) -> str:
    """What a candidate is, as far as it differs from another one."""
    differ = [knob.phrase(knob.value(one)) for knob in KNOBS if knob.value(one) != knob.value(other)]
    return f"the one with {', '.join(differ)}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%" if part >= 0.095 else f"{100 * part:.2g}%" if part >= 1e-3 else "less than 0.1%"


def _longer(ratio: float) -> str:
    if ratio <= 1 + _SAME:
        return "as long"
    return f"{_percent(ratio - 1)} more" if ratio < 2 else f"{ratio:.2g} times as long"


class _Point(NamedTuple):
    """A candidate in the figure: bytes and predicted time in the units of the axes, and its row."""

    x: float
    y: float
    row: Row

    @property
    def ran(self) -> float:
        """Where it lies by the time that it took; where it is if it did not run."""
        return self.y if self.row.measured is None else self.y * self.row.measured / self.row.predicted


def frontier(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of which none other is both faster and smaller, the smallest first; only those whose memory is known."""
    corners: list[Row] = []
    for row in sorted((row for row in rows if row.peaks is not None), key=lambda row: (row.peak or 0, row.predicted)):
        if not corners or row.predicted < corners[-1].predicted:
            corners.append(row)
    return tuple(corners)


def tuning_figure(rows: Sequence[Row], best: Row, hbm: int | None, width: float | None = None) -> Figure:
    """Draw the candidates whose memory is known; ``width`` is in inches."""
    known = [row for row in rows if row.peaks is not None]
    slow = min(row.predicted for row in known) >= 1
    unit, scale = unit_of_bytes(max(row.peak or 0 for row in known))
    points = {row.candidate: _Point((row.peak or 0) / scale, (1 if slow else 1e3) * row.predicted, row) for row in known}
    line = [points[row.candidate] for row in frontier(known)]
    ran = [point for point in points.values() if point.row.measured is not None and point not in line]
    across = [point.x for point in points.values()]
    near = hbm is not None and min(across) / 2 < hbm / scale < 2 * max(across)  # else hbm is not drawn
    heading = f"{len(known)} candidates: the time of a step against the memory of the fullest device"
    words = f"peak of the fullest device, {unit}", f"a step, {'s' if slow else 'ms'}"
    figure, axes = chart((width or _WIDTH, _TALL), heading, _key(known, hbm, inside=near), *words)
    figure.get_layout_engine().set(w_pad=0.2)
    axes.set(xscale="log", yscale="log")
    _scale(axes.xaxis, across + [hbm / scale] * near if hbm else across)
    _scale(axes.yaxis, [place for point in points.values() for place in (point.y, point.ran)])
    if hbm is not None and near:
        axes.axvline(hbm / scale, color=INK, linewidth=0.9, linestyle="dashed", label="hbm")
    _draw(axes, list(points.values()), line)
    chosen = points.get(best.candidate)
    if chosen is not None:
        axes.scatter([chosen.x], [chosen.y], s=4 * _DOT, facecolors="none", edgecolors=INK, linewidths=1.2, label="the choice")
    listed = [*_listing("frontier: schedule, microbatches", line, best, 1), *_listing("ran as well", ran, best, 1 + len(line))]
    axes.text(1.02, 1, "\n".join(listed[:_MOST_LISTED]), transform=axes.transAxes, va="top", size=8, color=INK, linespacing=1.6)
    for _ in range(2):  # the list beside the axes takes of their width
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    number_points(axes, [(point.x, point.y) for point in (*line, *ran)])
    return figure


def _key(rows: Sequence[Row], hbm: int | None, *, inside: bool) -> list[Entry]:
    names = {row.candidate.schedule.name for row in rows}
    key: list[Entry] = [(name, colour) for name, colour in _colours().items() if name in names]
    shapes = {row.candidate.remat for row in rows}
    key += [(f"{_SHAPES[remat][1]}: {remat}", "") for remat in _SHAPES if remat in shapes and len(shapes) > 1]
    key += [("ring: the choice", "")]
    key += [("cross: when it ran", "")] * any(row.measured is not None for row in rows)
    room = "" if hbm is None else f"{'dashed: ' if inside else ''}hbm, {bytes_in_words(hbm)}{'' if inside else ' (farther right)'}"
    return key + [(room, "")] * bool(room)


def _colours() -> Mapping[str, str]:
    return {name: group_colour(k) for k, name in enumerate((*SCHEDULES, AUTO))}


def _listing(title: str, points: Sequence[_Point], best: Row, first: int) -> Iterator[str]:
    if points:
        yield title
    for number, (_, _, row) in enumerate(points, first):
        candidate = row.candidate
        remat = f", {candidate.remat}" * (candidate.remat != "least")
        ran = "" if row.measured is None else f", ran {time_in_words(row.measured)}"
        mark = " (the choice)" * (candidate == best.candidate)
        schedule = f"{candidate.schedule.name}, {candidate.schedule.num_microbatches}{remat}"
        yield f"{number}  {schedule}: {time_in_words(row.predicted)}{ran}{mark}"


def _scale(axis: Axes, values: Sequence[float]) -> None:
    ticker, low, high = matplotlib_module("ticker"), min(values), max(values)
    pad = max(1.02, (high / low) ** 0.05)
    axis.axes.set(**{f"{axis.axis_name}lim": (low / pad, high * pad)})
    several = ticker.LogLocator(subs=(1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 4, 6, 8))
    axis.set_major_locator(several if high > 3 * low else ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.8g}"))
    axis.set_minor_locator(ticker.NullLocator())


def _draw(axes: Axes, points: Sequence[_Point], line: Sequence[_Point]) -> None:
    axes.step([p.x for p in line], [p.y for p in line], where="post", color=INK, linewidth=0.9, label="frontier", zorder=1.5)
    for name, colour in _colours().items():
        for remat, (shape, _) in _SHAPES.items():
            own = [p for p in points if (p.row.candidate.schedule.name, p.row.candidate.remat) == (name, remat)]
            style = {"color": colour, "edgecolors": "white", "linewidths": 0.4, "zorder": 2}
            if own:
                label = f"{name}, {remat}"
                axes.scatter([p.x for p in own], [p.y for p in own], s=_DOT, marker=shape, label=label, **style)
    for point in points:
        if point.row.measured is not None:
            axes.plot([point.x, point.x], [point.y, point.ran], color=INK, linewidth=0.7, zorder=2.5, label="missed")
            axes.plot([point.x], [point.ran], "x", color=INK, markersize=5, zorder=3, label="ran")
