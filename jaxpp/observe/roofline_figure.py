"""The roofline of a step's programs as a figure: what the GPU allows, and how far below it each program's bound lies.

Both axes are logarithmic: FLOPs for each byte, and FLOP/s. Dots have numbers. Below the axes stands which programs they are, with
their stages, and the peaks of the roof. Dots of the same program of several stages that lie on one another share a number.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.runtime.roofline import peak_of
from jaxpp.schedule.action import Kind
from jaxpp.schedule.draw.canvas import (
    INK,
    WORDS,
    Axes,
    Entry,
    Figure,
    Panel,
    colour_of,
    draw_key,
    fit_page,
    new_figure,
    number_points,
    shade,
)
from jaxpp.targets import Target

__all__ = ["Dot", "roofline_figure"]

_WIDTH, _LOW, _HEIGHT = 7.5, 2.9, 0.5  # inches: of the figure, of the least height of the roof, of its height for one of width
_BOTH, _REST = "#009E73", "#8C8C8C"  # the colours of a program that is forward and backward at once, and of the rest of a step
_LARGEST, _SMALLEST = 26.0, 5.0  # points: the diameters of a dot that is all of the step, and of the smallest dot
_LEAST, _MOVES = 0.005, 1 / 64
"""Part of the step's bound, and FLOPs a byte, of a program that is drawn: the others are many, and far from the roof's corner."""
_NEAR = 1.3  # how much farther along an axis a dot may lie that shares a number


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
    def place(self) -> tuple[float, float]:
        """FLOPs for each byte, and the FLOP/s that the bound allows."""
        return self.flops / self.num_bytes, self.flops / self.seconds

    @property
    def what(self) -> str:
        """What it does, whatever its stage: ``forward``; the first backward of a step, which begins sums, is a backward."""
        name = self.name.replace(f"stage_{self.stage}", "").strip("_").replace("__", "_").removesuffix("_first")
        return name.replace("forward_backward", "forward + backward").replace("_", " ") or self.name


def roofline_figure(dots: Sequence[Dot], kinds: Sequence[str], target: Target, width: float | None = None) -> Figure:
    """The roof of a target for the types of products, and a dot for each program that computes anything."""
    width = width or _WIDTH
    whole = sum(dot.runs * dot.seconds for dot in dots) or 1.0
    drawn = [dot for dot in dots if dot.flops > _MOVES * dot.num_bytes > 0 and dot.runs * dot.seconds >= _LEAST * whole]
    peaks = _peaks(kinds, target)
    panel = Panel(1, max(_LOW, _HEIGHT * width), 1)
    figure = new_figure((width, 2 + panel.height), "constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    says = "area: part of the step's bound"
    draw_key(figure, _key(drawn), f"What the programs of a step reach at most on {target.kind} ({says})")
    axes = figure.subplots()
    across, up = _extents(drawn, peaks, target)
    axes.set(xscale="log", yscale="log", xlim=across, ylim=up, facecolor="none")
    sizes = [max(_SMALLEST, _LARGEST * math.sqrt(dot.runs * dot.seconds / whole)) for dot in drawn]
    groups = _groups(drawn, sizes)
    axes.set_xlabel(_across(len(dots) - len(drawn), groups, peaks, width), size=9, color=INK)
    axes.set_ylabel("FLOP/s at most", size=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, labelcolor=INK, color=shade(0.6))
    axes.grid(color=shade(0), linewidth=0.6)
    axes.set_axisbelow(True)
    _draw_roof(axes, peaks, target, across)
    for dot, size in sorted(zip(drawn, sizes, strict=True), key=lambda pair: -pair[1]):
        place = [[part] for part in dot.place]
        axes.scatter(*place, s=size**2, color=_colour(dot), edgecolors="white", linewidths=0.8, alpha=0.9, zorder=3, label=dot.name)
    fit_page(figure, [axes], [panel])
    number_points(axes, [group[0].place for group in groups])
    return figure


def _key(drawn: Sequence[Dot]) -> list[Entry]:
    found = {_word(dot): _colour(dot) for dot in drawn}
    order = [*WORDS.values(), "F and B in one", "rest of a step"]
    return sorted(found.items(), key=lambda entry: order.index(entry[0]))


def _word(dot: Dot) -> str:
    return "rest of a step" if not dot.kinds else WORDS[dot.kinds[0]] if len(dot.kinds) == 1 else "F and B in one"


def _colour(dot: Dot) -> str:
    return _REST if not dot.kinds else colour_of(dot.kinds[0], 0, 0) if len(dot.kinds) == 1 else _BOTH


def _across(left_out: int, groups: Sequence[Sequence[Dot]], peaks: Sequence[tuple[float, str]], width: float) -> str:
    """The label of the lower axis, and what the numbers and the levels of the roof are."""
    names = [f"{k} {group[0].what} {_ranges(sorted({dot.stage for dot in group}))}" for k, group in enumerate(groups, 1)]
    said = ["; ".join(names), f"roof, from the top: {'; '.join(words for _, words in peaks)}"]
    if left_out:
        programs = f"{left_out} program{'s' * (left_out > 1)}"
        said.append(f"left out: {programs} with less than {_LEAST:.1%} of the step's bound, or that only move bytes")
    room = max(20, int(13 * (width - 0.9)))
    return "\n".join(["FLOPs for each byte", *(line for each in filter(None, said) for line in textwrap.wrap(each, room))])


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
    xs = [*(dot.place[0] for dot in drawn), min(ridges), 40 * max(ridges)]
    ys = [*(dot.place[1] for dot in drawn), peaks[-1][0] / 4, 2 * peaks[0][0]]
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


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, as ``0-2, 5``."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _groups(drawn: Sequence[Dot], sizes: Sequence[float]) -> list[list[Dot]]:
    """The dots that share a number, the largest first: of the same program, and near one another."""
    groups: list[list[Dot]] = []
    for _, dot in sorted(zip(sizes, drawn, strict=True), key=lambda pair: -pair[0]):
        same = (group for group in groups if group[0].what == dot.what)
        near = (group for group in same if all(1 / _NEAR < a / b < _NEAR for a, b in zip(group[0].place, dot.place, strict=True)))
        if (found := next(near, None)) is None:
            groups.append([dot])
        else:
            found.append(dot)
    return groups
