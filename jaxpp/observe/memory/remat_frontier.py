"""The frontier of memory and time: for each way to keep residuals, the bytes of the fullest device and the time of a step.

The stages are cut once and built with every way: all kept, the least, shares of the least, inputs only, and the least in host
memory. Arrays are counted as in a forecast; temporaries are not, because nothing is compiled. Time is that of the virtual clock, on
which the programs of each way take what their equations are estimated to take, FLOPs or bytes (``estimate.py``): what a forward
keeps is written and read, and what a backward repeats is computed, from bytes that it reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpp.engine.engine import Engine
from jaxpp.observe.evaluate import step_seconds
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.runtime.progress import progress
from jaxpp.schedule.action import Kind
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.draw.canvas import INK, Axes, Figure, Panel, draw_key, fit_page, group_colour, new_figure, shade
from jaxpp.schedule.offload import offloads
from jaxpp.stages.remat import offload_of, policies_of
from jaxpp.tables import bytes_in_words, fold_lines, in_bytes, table_lines, unit_of_bytes
from jaxpp.types import Batch, Key

_WAYS = ("keep", "least", 0.8, 0.6, 0.4, 0.2, 0.05, "recompute", "offload")
_PATIENCE = 2  # seconds before a progress bar shows
_WIDTH, _HEIGHT = 6.5, 3.2  # inches of a figure, and of its axes


class Way(NamedTuple):
    """A way to keep residuals, the same for all stages."""

    remat: str | float  # as it is passed
    peak: int  # bytes of the arrays on the fullest device when it holds most
    slowdown: float  # the estimated time of a step over that with ``"least"``, if copies to host memory delay nothing
    repeated: float  # FLOPs of the matrix products and convolutions that a step runs again
    hosted: int  # bytes that wait in host memory beside a device, at most


@dataclass(frozen=True)
class Frontier:
    """What each way to keep residuals costs. ``print`` it for a table; ``figure()`` draws bytes against time.

    Attributes:
        ways: all, the most bytes first.
        products: FLOPs of the matrix products and convolutions of a step that repeats nothing.
    """

    ways: tuple[Way, ...]
    products: float

    def __str__(self) -> str:
        rows = [["remat", "peak", "time", "products repeated", "in host memory"]]
        for way in self.ways:
            again, hosted = f"{way.repeated / (self.products or 1.0):.1%}", in_bytes(way.hosted)
            rows.append([repr(way.remat), bytes_in_words(way.peak), f"x {way.slowdown:.2f}", again, hosted])
        remark = "peak: of the arrays on the fullest device, without temporaries; time: over that of the least, on the virtual "
        remark += "clock, by the FLOPs and bytes of all operations, with copies to the host that delay nothing"
        return "\n".join([*table_lines(rows), "", *fold_lines([remark])])

    __repr__ = __str__

    def figure(self, width: float | None = None) -> Figure:
        """Bytes of the fullest device against the time of a step, a dot for each way; ``width`` in inches. Needs matplotlib."""
        width = width or _WIDTH
        figure = new_figure((width, 2 + _HEIGHT), "constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
        draw_key(figure, [], "Memory of the fullest device and time of a step, by what stages keep (remat=)")
        axes = figure.subplots()
        unit, scale = unit_of_bytes(max(way.peak for way in self.ways))
        _draw(axes, self.ways, scale)
        axes.set_xlabel(f"arrays of the fullest device at its peak, {unit}", size=9, color=INK)
        axes.set_ylabel('time of a step / "least"', size=9, color=INK)
        fit_page(figure, [axes], [Panel(1, _HEIGHT, 1)])
        return figure


def _draw(axes: Axes, ways: Sequence[Way], scale: float) -> None:
    highest = max(way.slowdown for way in ways)
    axes.set(xlim=(0, 1.12 * max(way.peak for way in ways) / scale), facecolor="none")
    axes.set_ylim(1 - 0.12 * max(highest - 1, 0.1), 1 + 1.2 * max(highest - 1, 0.1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK, color=shade(0.6))
    axes.grid(color=shade(0), linewidth=0.6)
    axes.set_axisbelow(True)
    line = [way for way in ways if isinstance(way.remat, float) or way.remat == "least"]
    axes.plot([way.peak / scale for way in line], [way.slowdown for way in line], color=group_colour(0), linewidth=1.2, zorder=2)
    named: dict[tuple[float, float], list[str]] = {}
    for way in ways:
        place = way.peak / scale, way.slowdown
        look = {"color": group_colour(0)} if not way.hosted else {"facecolors": "white", "edgecolors": group_colour(1)}
        axes.scatter([place[0]], [place[1]], s=36, zorder=3, label=str(way.remat), **look)
        named.setdefault(place, []).append(str(way.remat))
    for place, names in named.items():
        axes.annotate(", ".join(names), place, (5, 5), textcoords="offset points", size=8, color=INK, zorder=4)


def frontier_of(engine: Engine, batch: Batch, key: Key | None) -> Frontier:
    """Every way for the stages of an engine, which stay where they are cut; nothing is compiled. Batch and key may be shapes."""
    schedule, platform = engine.options.schedule, engine.options.devices[0].platform
    num_stages, count = schedule.num_stages, schedule.num_microbatches * engine.placement.num_replicas
    ways, products, whole = list[Way](), 0.0, ()
    with progress(list(_WAYS), desc="looking at what stages keep", after=_PATIENCE) as bar:
        for remat in bar:
            offload = offload_of(remat, num_stages)
            if remat == "offload" and not offloads(schedule.rows, offload):
                continue  # no microbatch has the time to leave and to come back
            other = engine.with_remat(policies_of(remat, num_stages, platform), offload)
            lowered = other.lower("update", batch, key)
            liveness = step_liveness(other, lowered)
            peak, hosted = (max(map(most, liveness.devices)) for most in (liveness.most, liveness.most_hosted))
            stages, fused = other.preparer.step(batch, key).cuts[0].stages, _fused(other, batch, key)
            whole = whole or stages  # of the first way, which keeps everything and repeats nothing
            each = [(known if code.index in fused else code).costs for known, code in zip(whole, stages, strict=True)]
            costs = StepCosts({kind: tuple(own[kind.value] for own in each) for kind in (Kind.F, Kind.I, Kind.W)})
            products = 3.0 * count * sum(code.products for code in stages)
            repeated = count * sum(code.repeated for code in stages if code.index not in fused)
            ways.append(Way(remat, peak, step_seconds(schedule, costs), repeated, hosted))
    base = next(way.slowdown for way in ways if way.remat == "least") or 1.0
    ways = [way._replace(slowdown=way.slowdown / base) for way in ways]
    return Frontier(tuple(sorted(ways, key=lambda way: (-way.peak, way.slowdown))), products)


def again_of(engine: Engine, least: Engine, batch: Batch, key: Key | None) -> list[float]:
    """How much longer the backward of each stage takes than with ``least``, in parts of its forward, by estimates.

    Nothing where both are one program.
    """
    fused = _fused(engine, batch, key)
    codes, before = (each.preparer.step(batch, key).cuts[0].stages for each in (engine, least))
    more = [code.costs["B"] - known.costs["B"] for code, known in zip(codes, before, strict=True)]
    parts = [extra / (known.costs["F"] or math.inf) for extra, known in zip(more, before, strict=True)]
    return [0.0 if code.index in fused else max(0.0, part) for code, part in zip(codes, parts, strict=True)]


def _fused(engine: Engine, batch: Batch, key: Key | None) -> frozenset[int]:
    """The stages whose forward and backward are one program, which repeats nothing."""
    lines = engine.lower("update", batch, key).bound.lines
    return frozenset(line.action.stage for line in lines if line.action is not None and line.fused is not None)
