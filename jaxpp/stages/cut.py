"""A traced loss cut into stages: which equations each stage runs, what crosses between them, and their programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jaxpp.stages.graph import carve, variables
from jaxpp.stages.loss import TracedLoss
from jaxpp.stages.packing import Pack
from jaxpp.stages.partition import Cuts
from jaxpp.stages.program import shapes_of
from jaxpp.stages.stage import StageBuilder, StageCode

__all__ = ["CutLoss", "cut"]


@dataclass(frozen=True)
class CutLoss:
    """A loss cut into stages.

    Attributes:
        loss: what was cut.
        cuts: where.
        stages: the programs of each stage.
        activations: shape of each value that crosses between stages.
        producer: the stage that makes each.
        consumers: the stages that read each.
    """

    loss: TracedLoss
    cuts: Cuts
    stages: tuple[StageCode, ...]
    activations: tuple[Any, ...]
    producer: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]


def cut(
    loss: TracedLoss,
    cuts: Cuts,
    owner: Sequence[int],
    *,
    rows: frozenset[int] = frozenset(),
    packs: Sequence[tuple[Pack, ...]] | None = None,
    train: bool = True,
) -> CutLoss:
    """Cut a traced loss at ``cuts`` and build the programs of every stage.

    Args:
        loss: the traced loss.
        cuts: the spine positions at which stages 1, 2, ... begin.
        owner: the stage that owns each parameter leaf.
        rows: the aux leaves that hold one row an example, to be joined rather than averaged.
        packs: the gradients each stage packs, if another trace has decided that; decided here otherwise.
        train: whether to build backwards.
    """
    graph = loss.graph
    ends = [*cuts, len(loss.spine)]
    colors: list[int | None] = [None] * len(graph.eqns)
    for stage, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        for k in range(start, end):
            colors[loss.spine[k]] = stage
    homes = _homes(loss, colors)
    pieces = carve(graph, colors, homes)
    made = {var: stage for stage, piece in pieces.items() for var in piece.outputs}
    crossing = sorted(made, key=lambda var: (made[var], pieces[made[var]].outputs.index(var)))
    consumers = tuple(tuple(sorted(t for t, piece in pieces.items() if t != made[v] and v in piece.inputs)) for v in crossing)
    builder = StageBuilder(loss, tuple(owner), homes, crossing, consumers, made, rows, packs, train)
    stages = tuple(builder.build(stage, pieces[stage]) for stage in range(len(ends)))
    return CutLoss(loss, cuts, stages, shapes_of(crossing), tuple(made[var] for var in crossing), consumers)


def _homes(loss: TracedLoss, colors: list[int | None]) -> dict[Var, int]:
    """The stage that returns the loss, and each aux leaf: where it is made, or else the last."""
    producers = loss.graph.producers()
    last = max((color for color in colors if color is not None), default=0)
    homes: dict[Var, int] = {}
    for var in variables(loss.graph.outputs):
        found, color = producers.get(var), None
        if found is not None and colors[found] is None:
            sources = [producers.get(v) for v in variables(loss.graph.eqns[found].invars)]
            color = next((colors[i] for i in sources if i is not None), None)
        elif found is not None:
            color = colors[found]
        homes[var] = last if color is None else color
    return homes
