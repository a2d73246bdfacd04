"""One stage of a cut loss: the programs that run its forward and its backward, and what they keep.

The stage's slice of the loss is run under ``jax.vjp`` and traced once, forward and pullback together (``stage_trace.py``). What
goes into which program is decided in ``stage_programs.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend.core import Var

from jaxpp.stages.graph import Piece
from jaxpp.stages.jaxpr import calls_host, shapes_of
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.packing import Pack, packs_of
from jaxpp.stages.program import Backward, Program, Ref, Role
from jaxpp.stages.remat.checkpoint_loops import checkpoint_loops
from jaxpp.stages.remat.least import Least, reuse_maximum
from jaxpp.stages.remat.policy import Kept
from jaxpp.stages.stage_programs import StagePrograms
from jaxpp.stages.stage_trace import StageSlice

__all__ = ["StageBuilder", "StageCode"]


@dataclass(frozen=True)
class StageCode:
    """The programs of one stage at one microbatch shape.

    Attributes:
        index: which stage.
        statics: computes, once per step, what depends on parameters alone.
        forward: one microbatch's forward; returns what is sent on, and the residuals.
        backward: one microbatch's backward by kind, B, I and W; sums gradients, returns cotangents. A kind with nothing to do is
            not there, and none is when only forwards are run.
        packs: the small gradients that are summed as one vector.
        residuals: shape of each value the forward keeps for the backward, besides the stage's own inputs and outputs.
        kept: bytes that one microbatch holds from its forward to its backward, inputs and outputs included.
        keepable: what they would be if all were kept that the pullback reads.
        constants: arrays the loss closed over that this stage reads.
        params: the parameter leaves this stage reads.
        flops: of one forward.
        modules: module paths, in order.
        calls_host: whether any of its programs calls a Python function on the host.
    """

    index: int
    statics: Program
    forward: Program
    backward: Mapping[str, Backward]
    packs: tuple[Pack, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    kept: int
    keepable: int
    constants: tuple[jax.Array, ...]
    params: tuple[int, ...]
    flops: float
    modules: tuple[str, ...]
    calls_host: bool


@dataclass(frozen=True)
class StageBuilder:
    """What is the same for every stage of a cut; ``build`` makes one stage's programs."""

    loss: TracedLoss
    last: int
    owner: tuple[int, ...]
    homes: dict[Var, int]
    crossing: list[Var]
    carried: tuple[tuple[int, ...], ...]
    made: dict[Var, int]
    rows: frozenset[int]
    packs: Sequence[tuple[Pack, ...]] | None
    train: bool
    scaled_by: int | None
    pack_below: int

    def build(self, stage: int, piece: Piece, remat: Kept = None) -> StageCode:
        """The programs of the stage that runs ``piece``; ``remat`` says what its forward keeps, None: everything."""
        loss = self.loss
        body, constants = self._body(stage, piece)
        programs, keepable = self._programs(body, stage, len(constants), remat)
        packs: tuple[Pack, ...] = ()
        if self.train:
            packs = self._packs(stage, programs) if self.packs is None else self.packs[stage]
        backward = {kind: programs.backward(kind, packs) for kind in "BIW"} if self.train else {}
        values = [loss.graph.constants[var] for var in constants]
        mine = set(piece.eqns)
        return StageCode(
            index=stage,
            statics=programs.statics(),
            forward=programs.forward(programs.small if self.train else ()),
            backward={kind: found for kind, found in backward.items() if found is not None},
            packs=packs,
            residuals=shapes_of(programs.residuals),
            kept=programs.kept_bytes,
            keepable=keepable,
            constants=(*values, *programs.new_constants),
            params=tuple(sorted(ref.index for ref in body.inputs if ref.role == Role.PARAM)),
            flops=sum(cost for cost, i in zip(loss.flops, loss.spine, strict=True) if i in mine),
            modules=tuple(dict.fromkeys(name for i, name in zip(loss.spine, loss.modules, strict=True) if name and i in mine)),
            calls_host=calls_host(programs.traced.graph.eqns),
        )

    def colored(self, stage: int, piece: Piece, remat: Kept = None) -> StagePrograms:
        """The equations of a stage as its programs run them, of which ``build`` makes the programs themselves."""
        body, constants = self._body(stage, piece)
        return self._programs(body, stage, len(constants), remat)[0]

    def _body(self, stage: int, piece: Piece) -> tuple[StageSlice, list[Var]]:
        """What a stage runs, with the names of what goes in and comes out; and the constants among its inputs."""
        loss = self.loss
        numbers = {var: k for k, var in enumerate(self.crossing)}
        refs = {var: Ref(Role.PARAM, k) for k, var in enumerate(loss.params)}
        refs |= {var: Ref(Role.STATE, k) for k, var in enumerate(loss.state)}
        refs |= {var: Ref(Role.BATCH, k, shared=k in loss.shared) for k, var in enumerate(loss.batch)}
        refs |= {var: Ref(Role.ACTIVATION, k) for var, k in numbers.items()}
        if loss.key is not None:
            refs[loss.key] = Ref(Role.KEY)
        constants = [var for var in piece.inputs if var in loss.graph.constants]
        refs |= {var: Ref(Role.CONSTANT, k) for k, var in enumerate(constants)}
        sent = [(Ref(Role.ACTIVATION, numbers[var]), var) for var in self.crossing if self.made[var] == stage]
        named = [(Ref(Role.LOSS), loss.graph.outputs[0])] * loss.is_loss
        named += [(Ref(Role.AUX, k), atom) for k, atom in enumerate(loss.aux)]
        named += [(Ref(Role.STATE, k), atom) for k, atom in enumerate(loss.new_state) if k not in loss.unchanged]
        results = [(ref, atom) for ref, atom in named if (self.homes[atom] if isinstance(atom, Var) else self.last) == stage]
        return StageSlice(loss, piece, [refs[var] for var in piece.inputs], [*sent, *results]), constants

    def _programs(self, body: StageSlice, stage: int, num_constants: int, remat: Kept) -> tuple[StagePrograms, int]:
        """The programs of a stage, with checkpoints in its loops where that keeps less, and the bytes that it could keep."""
        graphs, loops = [self.loss.graph], isinstance(remat, Least) and self.train and self.loss.remat is None
        graphs += checkpoint_loops(self.loss.graph, body.piece.eqns) if loops else []
        given = stage, self.rows, num_constants, remat, self.scaled_by, self.pack_below
        traces = [body.trace(stage, self.carried, self.train, graph) for graph in graphs]
        if isinstance(remat, Least):
            traces = [replace(traced, graph=reuse_maximum(traced.graph)) for traced in traces]
        found = [StagePrograms(traced, *given) for traced in traces]
        return min(found, key=lambda programs: programs.kept_bytes), found[0].keepable_bytes

    def _packs(self, stage: int, programs: StagePrograms) -> tuple[Pack, ...]:
        """The packs of the stage's own small gradients; gradients that go home to another stage are not packed."""
        own = [ref.index for ref in programs.traced.returned if ref.role == Role.PARAM and self.owner[ref.index] == stage]
        avals = shapes_of(self.loss.params[leaf] for leaf in own)
        return packs_of([Ref(Role.GRAD, leaf) for leaf in own], avals, Ref(Role.GRAD), self.pack_below)
