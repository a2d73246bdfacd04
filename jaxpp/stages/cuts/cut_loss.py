"""A traced loss cut into stages: which equations each stage runs, what crosses between them, and their programs."""

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import Var

from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.cuts.boundary import partition_stages
from jaxpp.stages.graph import Piece
from jaxpp.stages.jaxpr import shapes_of, variables
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.packing import SMALL, Pack
from jaxpp.stages.remat.policy import Kept
from jaxpp.stages.stage import StageBuilder, StageCode
from jaxpp.stages.stage_programs import StagePrograms

__all__ = ["CutLoss", "cut", "uncut"]


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
        state_home: the stage that makes the new value of each model state leaf.
        reducers: of the aux leaves that are not averaged.
    """

    loss: TracedLoss
    cuts: Cuts
    stages: tuple[StageCode, ...]
    activations: tuple[jax.ShapeDtypeStruct, ...]
    producer: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    state_home: tuple[int, ...]
    reducers: Mapping[int, Reducer]


def cut(  # noqa: PLR0913  (what the user, or an earlier trace, has decided)
    loss: TracedLoss,
    cuts: Cuts,
    owner: Sequence[int],
    *,
    reducers: Mapping[int, Reducer] | None = None,
    packs: Sequence[tuple[Pack, ...]] | None = None,
    train: bool = True,
    remat: Sequence[Kept] | None = None,
    cut_gradient: Collection[int] = (),
    state_owner: Sequence[int] | None = None,
    scaled_by: int | None = None,
    pack: bool = True,
) -> CutLoss:
    """Cut a traced loss at ``cuts`` and build the programs of every stage.

    Args:
        loss: the traced loss.
        cuts: the spine positions at which stages 1, 2, ... begin.
        owner: the stage that owns each parameter leaf.
        reducers: of the aux leaves that are held and reduced at the end of a step, rather than averaged.
        packs: the gradients each stage packs, if another trace has decided that; decided here otherwise.
        train: whether to build backwards.
        remat: what the forward of each stage keeps; None, for a stage or for all: everything.
        cut_gradient: the boundaries that carry no gradient; boundary s lies between stages s and s + 1.
        state_owner: the stage of each model state leaf that nothing on the spine makes, if another trace has decided that.
        scaled_by: the number of the loss scale's leaf that the backward starts from; it starts from 1 unless given.
        pack: whether small arrays become one; not where they are sharded in different ways.
    """
    graph = loss.graph
    ends = [*cuts, len(loss.spine)]
    colors: list[int | None] = [None] * len(graph.eqns)
    for stage, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        for k in range(start, end):
            colors[loss.spine[k]] = stage
    state_home = _state_home(loss, cuts, state_owner)
    homes = _homes(loss, len(cuts), state_home)
    pieces = partition_stages(graph, colors, homes)
    made = {var: stage for stage, piece in pieces.items() for var in piece.outputs}
    crossing = sorted(made, key=lambda var: (made[var], pieces[made[var]].outputs.index(var)))
    consumers = tuple(tuple(sorted(t for t, piece in pieces.items() if t != made[v] and v in piece.inputs)) for v in crossing)
    carried = tuple(
        tuple(reader for reader in readers if not any(made[var] <= boundary < reader for boundary in cut_gradient))
        for var, readers in zip(crossing, consumers, strict=True)
    )
    rows = frozenset(reducers or ())
    builder = StageBuilder(
        loss, len(cuts), tuple(owner), homes, crossing, carried, made, rows, packs, train, scaled_by, SMALL * pack
    )
    policies = remat or (None,) * len(ends)
    stages = tuple(builder.build(k, pieces.get(k, Piece()), policies[k]) for k in range(len(ends)))
    return CutLoss(
        loss, cuts, stages, shapes_of(crossing), tuple(made[var] for var in crossing), consumers, state_home, reducers or {}
    )


def uncut(loss: TracedLoss, kept: Kept) -> StagePrograms:
    """The whole loss as one stage whose forward keeps what ``kept`` says: its equations, not yet made into programs."""
    colors: list[int | None] = [None] * len(loss.graph.eqns)
    for i in loss.spine:
        colors[i] = 0
    homes = _homes(loss, 0, (0,) * len(loss.state))
    piece = partition_stages(loss.graph, colors, homes).get(0, Piece())
    builder = StageBuilder(loss, 0, (0,) * len(loss.params), homes, [], (), {}, frozenset(), None, True, None, 0)
    return builder.colored(0, piece, kept)


def _state_home(loss: TracedLoss, cuts: Cuts, owner: Sequence[int] | None) -> tuple[int, ...]:
    """The stage that makes the new value of each model state leaf; if no stage makes it, the first stage that reads the leaf."""
    spine = {var for i in loss.spine for var in loss.graph.eqns[i].outvars}
    homes = []
    for leaf, (place, source) in enumerate(zip(loss.state_spans, loss.sources, strict=True)):
        made = isinstance(source, Var) and source in spine
        known = 0 if owner is None else owner[leaf]
        homes.append(bisect.bisect_right(cuts, place[1]) if place and (made or owner is None) else known)
    return tuple(homes)


def _homes(loss: TracedLoss, last: int, state_home: Sequence[int]) -> dict[Var, int]:
    """The stage that returns the loss and aux: the last, at every batch shape; and new model state: its home."""
    homes = dict.fromkeys(variables((*loss.graph.outputs[:1], *loss.aux)), last)
    return homes | {
        atom: state_home[k] for k, atom in enumerate(loss.new_state) if isinstance(atom, Var) and k not in loss.unchanged
    }
