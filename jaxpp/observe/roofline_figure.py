"""The roofline of a step's programs as a figure: what the GPU allows, and how far below it each program's bound lies.

Both axes are logarithmic: FLOPs for each byte, and FLOP/s. The names of dots are put where they have room, the largest dots first:
beside the dot, or farther away with a line to it. Dots of the same program of several stages, if they lie on one another, share a
name.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpp.runtime.roofline import peak_of
from jaxpp.schedule.action import Kind
from jaxpp.schedule.draw.canvas import INK, WORDS, Axes, Entry, Figure, Panel, colour_of, draw_key, fit_page, new_figure, shade
from jaxpp.targets import Target

__all__ = ["Dot", "roofline_figure"]

_WIDTH, _LOW, _HEIGHT = 7.5, 2.9, 0.5  # inches: of the figure, of the least height of the roof, of its height for one of width
_BOTH, _REST = "#009E73", "#8C8C8C"  # the colours of a program that is forward and backward at once, and of the rest of a step
_LARGEST, _SMALLEST = 26.0, 5.0  # points: the diameters of a dot that is all of the step, and of the smallest dot
_LEAST, _MOVES = 0.005, 1 / 64
"""Part of the step's bound, and FLOPs a byte, of a program that is drawn: the others are many, and far from the roof's corner."""
_ON_ANOTHER = 12.0  # points between the middles of dots that share a name
_AWAY = (3.0, 14.0, 26.0, 40.0, 56.0)  # points from the edge of a dot to its name, the nearest first
_AROUND = tuple(math.radians(degrees) for degrees in (0, 180, 90, 270, 45, 315, 135, 225))
_NEAR = 1  # of ``_AWAY``, the number from which a line leads to the dot


class Dot(NamedTuple):
    """A program in the figure; numbers are those of one run."""

    name: str
    stage: int
    kinds: tuple[Kind, ...]
    flops: int
    num_bytes: int
    seconds: float  # its bound
    runs: int

    @property
    def what(self) -> str:
        """What it does, whatever its stage: ``forward``; the first backward of a step, which begins sums, is a backward."""
        name = self.name.replace(f"stage_{self.stage}", "").strip("_").replace("__", "_").removesuffix("_first")
        return name.replace("forward_backward", "forward + backward").replace("_", " ") or self.name


class _Box(NamedTuple):
    """Where something is on the page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: "_Box") -> bool:
        """Whether they have more in common than an edge."""
        beside = self.left < other.right and other.left < self.right
        return beside and self.bottom < other.top and other.bottom < self.top

    def holds(self, other: "_Box") -> bool:
        """Whether the other lies in it."""
        return self.left <= other.left and other.right <= self.right and self.bottom <= other.bottom and other.top <= self.top


def roofline_figure(dots: Sequence[Dot], kinds: Sequence[str], target: Target, width: float | None = None) -> Figure:
    """The roof of a target for the types of products, and a dot for each program that computes anything."""
    width = width or _WIDTH
    whole = sum(dot.runs * dot.seconds for dot in dots) or 1.0
    drawn = [dot for dot in dots if dot.flops > _MOVES * dot.num_bytes > 0 and dot.runs * dot.seconds >= _LEAST * whole]
    peaks = _peaks(kinds, target)
    panel = Panel(1, max(_LOW, _HEIGHT * width), 1)
    figure = new_figure((width, 2 + panel.height), "constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    says = "area: part of the step's bound; numbers: stages"
    draw_key(figure, _key(drawn), f"What the programs of a step reach at most on {target.kind} ({says})")
    axes = figure.subplots()
    across, up = _extents(drawn, peaks, target)
    axes.set(xscale="log", yscale="log", xlim=across, ylim=up, facecolor="none")
    axes.set_xlabel(_across(len(dots) - len(drawn), width), size=9, color=INK)
    axes.set_ylabel("FLOP/s at most", size=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, labelcolor=INK, color=shade(0.6))
    axes.grid(color=shade(0), linewidth=0.6)
    axes.set_axisbelow(True)
    _draw_roof(axes, peaks, target, across)
    sizes = [max(_SMALLEST, _LARGEST * math.sqrt(dot.runs * dot.seconds / whole)) for dot in drawn]
    for dot, size in sorted(zip(drawn, sizes, strict=True), key=lambda pair: -pair[1]):
        place = [dot.flops / dot.num_bytes], [dot.flops / dot.seconds]
        axes.scatter(*place, s=size**2, color=_colour(dot), edgecolors="white", linewidths=0.8, alpha=0.9, zorder=3, label=dot.name)
    fit_page(figure, [axes], [panel])
    taken = _write_peaks(axes, peaks, list(_along_roof(axes, peaks, target, across)))
    _write_names(axes, drawn, sizes, taken)
    return figure


def _key(drawn: Sequence[Dot]) -> list[Entry]:
    found = {_word(dot): _colour(dot) for dot in drawn}
    order = [*WORDS.values(), "F and B in one", "rest of a step"]
    return sorted(found.items(), key=lambda entry: order.index(entry[0]))


def _word(dot: Dot) -> str:
    return "rest of a step" if not dot.kinds else WORDS[dot.kinds[0]] if len(dot.kinds) == 1 else "F and B in one"


def _colour(dot: Dot) -> str:
    return _REST if not dot.kinds else colour_of(dot.kinds[0], 0, 0) if len(dot.kinds) == 1 else _BOTH


def _across(left_out: int, width: float) -> str:
    programs = f"{left_out} program{'s' * (left_out > 1)}"
    few = f"left out: {programs} with less than {_LEAST:.1%} of the step's bound, or that only move bytes"
    lines = textwrap.wrap(few, max(20, int(13 * (width - 0.9)))) if left_out else []
    return "\n".join(["FLOPs for each byte", *lines])


def _peaks(kinds: Sequence[str], target: Target) -> list[tuple[float, str]]:
    """The peaks of the types of products, and of elementwise work, the highest first; types that are equally fast are one."""
    named: dict[float, list[str]] = {}
    for kind in kinds:
        named.setdefault(peak_of(target.peaks, kind), []).append(kind)
    named.setdefault(target.peaks.vector, []).append("elementwise")
    return [(peak, f"{', '.join(names)}  {peak / 1e12:.4g} TFLOP/s") for peak, names in sorted(named.items(), reverse=True)]


def _extents(
    drawn: Sequence[Dot], peaks: Sequence[tuple[float, str]], target: Target
) -> tuple[tuple[float, float], tuple[float, float]]:
    """What holds all dots and the corners of the roof."""
    ridges = [peak / target.bandwidth for peak, _ in peaks]
    xs = [*(dot.flops / dot.num_bytes for dot in drawn), min(ridges), 40 * max(ridges)]
    ys = [*(dot.flops / dot.seconds for dot in drawn), peaks[-1][0] / 4, 2 * peaks[0][0]]
    return _room(xs), _room(ys)


def _room(values: Sequence[float]) -> tuple[float, float]:
    """From somewhat below the least to somewhat above the most."""
    return min(values) / 2, max(values) * 1.25


def _draw_roof(axes: Axes, peaks: Sequence[tuple[float, str]], target: Target, across: tuple[float, float]) -> None:
    left, right = across
    highest = peaks[0][0] / target.bandwidth
    axes.plot([left, highest], [left * target.bandwidth, peaks[0][0]], color=INK, linewidth=1.5, label="memory", zorder=2)
    for number, (peak, words) in enumerate(peaks):
        style = {"color": INK if number == 0 else shade(0.9), "linewidth": 1.5 if number == 0 else 0.9, "zorder": 2}
        axes.plot([peak / target.bandwidth, right], [peak, peak], label=words, **style)


def _along_roof(axes: Axes, peaks: Sequence[tuple[float, str]], target: Target, across: tuple[float, float]) -> Iterator[_Box]:
    """Small boxes along the lines of the roof, which no name is to cross."""
    (left, right), count = across, 200
    for k in range(count + 1):
        x = left * (right / left) ** (k / count)
        for peak in {min(x * target.bandwidth, peaks[0][0]), *(peak for peak, _ in peaks if x * target.bandwidth >= peak)}:
            yield _around(_place(axes, x, peak), 1.5)


def _write_peaks(axes: Axes, peaks: Sequence[tuple[float, str]], taken: Sequence[_Box]) -> list[_Box]:
    """Write the peaks at the right end of their lines, above or below them where there is room; what is taken then."""
    found, (_, right), page = list(taken), axes.get_xlim(), _box_of(axes)
    for peak, words in peaks:
        style = {"textcoords": "offset points", "size": 8, "ha": "right", "color": INK}
        for said, (offset, side) in itertools.product((words, words.split("  ", 1)[0]), ((1.5, "bottom"), (-1.5, "top"))):
            text = axes.annotate(said, (right, peak), (-2, offset), va=side, **style)
            box = _box_of(text)
            if page.holds(box) and not _meet([box], found):
                found.append(box)
                break
            text.remove()
    return found


def _write_names(axes: Axes, drawn: Sequence[Dot], sizes: Sequence[float], taken: Sequence[_Box]) -> None:
    """Write a name beside each dot that has room for it, the largest first; dots on one another that do the same have one."""
    page, written = _box_of(axes), list[_Box]()  # names, and the lines that lead to them
    middles = [_place(axes, dot.flops / dot.num_bytes, dot.flops / dot.seconds) for dot in drawn]
    taken = [*taken, *(_around(middle, size) for middle, size in zip(middles, sizes, strict=True))]
    for group in _groups(drawn, middles, sizes):
        dot, middle = drawn[group[0]], middles[group[0]]
        words = f"{dot.what} {_ranges(sorted({drawn[k].stage for k in group}))}"
        data, style = (dot.flops / dot.num_bytes, dot.flops / dot.seconds), {"textcoords": "offset points", "color": INK}
        text = axes.annotate(words, data, (0, 0), size=8, ha="center", va="center", zorder=4, **style)
        extent, free = _box_of(text), None
        for away, box in _places(middle, sizes[group[0]], extent.right - extent.left, extent.top - extent.bottom):
            line = _line(middle, box) if away >= _NEAR else []
            if page.holds(box) and not _meet([box], [*taken, *written]) and not _meet(line, written):
                free = box, line
                break
        if free is None:
            text.remove()
            continue
        box, line = free
        written += [box, *line]
        text.set_position(((box.left + box.right) / 2 - middle[0], (box.bottom + box.top) / 2 - middle[1]))
        if line:
            look = {"arrowstyle": "-", "color": shade(1), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", data, [end - at for end, at in zip(_end(middle, box), middle, strict=True)], arrowprops=look, **style)


def _end(middle: tuple[float, float], box: _Box) -> tuple[float, float]:
    """The point of a box that is the nearest to the middle of a dot."""
    return min(max(middle[0], box.left), box.right), min(max(middle[1], box.bottom), box.top)


def _line(middle: tuple[float, float], box: _Box) -> list[_Box]:
    """Small boxes along the line from a dot to its name, which they do not touch."""
    end, parts = _end(middle, box), 20
    points = ([at + k / parts * (to - at) for at, to in zip(middle, end, strict=True)] for k in range(parts - 1))
    return [_around((x, y), 1.0) for x, y in points]


def _meet(boxes: Sequence[_Box], others: Sequence[_Box]) -> bool:
    return any(box.meets(other) for box in boxes for other in others)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, as ``0-2, 5``."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _groups(drawn: Sequence[Dot], middles: Sequence[tuple[float, float]], sizes: Sequence[float]) -> list[list[int]]:
    """The numbers of dots that share a name, the largest dot first in each group, and the group with the largest dot first."""
    groups: list[list[int]] = []
    for k in sorted(range(len(drawn)), key=lambda k: -sizes[k]):
        near = (
            group
            for group in groups
            if drawn[group[0]].what == drawn[k].what and math.dist(middles[group[0]], middles[k]) <= _ON_ANOTHER
        )
        found = next(near, None)
        if found is None:
            groups.append([k])
        else:
            found.append(k)
    return groups


def _places(middle: tuple[float, float], size: float, wide: float, high: float) -> Iterator[tuple[int, _Box]]:
    """Where a name may stand, and how far away that is, the nearest first."""
    for number, away in enumerate(_AWAY):
        for angle in _AROUND:
            x = middle[0] + math.cos(angle) * (size / 2 + away + wide / 2)
            y = middle[1] + math.sin(angle) * (size / 2 + away + high / 2)
            yield number, _Box(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)


def _place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Where a value lies on the page, in points."""
    across, up = axes.transData.transform((x, y)) * 72 / axes.figure.dpi
    return float(across), float(up)


def _around(middle: tuple[float, float], size: float) -> _Box:
    return _Box(middle[0] - size / 2, middle[1] - size / 2, middle[0] + size / 2, middle[1] + size / 2)


def _box_of(drawn: Axes) -> _Box:
    """Where axes or a text are on the page."""
    return _Box(*(float(number) * 72 / drawn.figure.dpi for number in drawn.get_window_extent().extents))
