"""A traced loss cut into stages: which equations each stage runs, what crosses between them, and their programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from jaxpp.stages.graph import Piece, carve, variables
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
    homes = _homes(loss, colors, len(cuts))
    pieces = carve(graph, colors, homes)
    made = {var: stage for stage, piece in pieces.items() for var in piece.outputs}
    crossing = sorted(made, key=lambda var: (made[var], pieces[made[var]].outputs.index(var)))
    consumers = tuple(tuple(sorted(t for t, piece in pieces.items() if t != made[v] and v in piece.inputs)) for v in crossing)
    builder = StageBuilder(loss, len(cuts), tuple(owner), homes, crossing, consumers, made, rows, packs, train)
    stages = tuple(builder.build(stage, pieces.get(stage, Piece((), (), ()))) for stage in range(len(ends)))
    return CutLoss(loss, cuts, stages, shapes_of(crossing), tuple(made[var] for var in crossing), consumers)


def _homes(loss: TracedLoss, colors: list[int | None], last: int) -> dict[Var, int]:
    """The stage that returns the loss: where it is made; and that returns aux: the last, at every batch shape."""
    (result,) = variables(loss.graph.outputs[:1]) or (None,)
    made = None if result is None else loss.graph.producers().get(result)
    color = None if made is None else colors[made]
    homes = dict.fromkeys(variables(loss.graph.outputs[1:]), last)
    return homes | dict.fromkeys(variables(loss.graph.outputs[:1]), last if color is None else color)
