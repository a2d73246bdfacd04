"""A stage's slice of the loss, traced as one graph: its forward, and under ``jax.vjp`` its pullback."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxpp.stages.graph import Graph, Piece, trace
from jaxpp.stages.jaxpr import Atom, shapes_of
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.program import Ref, Role
from jaxpp.types import Tree

__all__ = ["StageSlice", "TracedStage"]


@dataclass(frozen=True)
class TracedStage:
    """A stage's forward and pullback as one graph: names of the inputs, and names of the results in order."""

    graph: Graph
    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]
    returned: tuple[Ref, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class StageSlice:
    """A slice of the loss, ready to be traced.

    Attributes:
        loss: the whole.
        piece: the slice.
        inputs: the name of each input of the slice.
        outputs: what it returns, by name.
    """

    loss: TracedLoss
    piece: Piece
    inputs: list[Ref]
    outputs: list[tuple[Ref, Atom]]

    def trace(self, stage: int, carried: Sequence[tuple[int, ...]], train: bool, whole: Graph) -> TracedStage:
        """Trace the slice, under ``jax.vjp`` if it is to be trained."""
        loss = self.loss
        run = whole.function(self.piece.eqns, self.piece.inputs, [atom for _, atom in self.outputs])
        avals = shapes_of(self.piece.inputs)
        results = tuple(ref for ref, _ in self.outputs)
        if not train:
            graph, _ = trace(run, *avals)
            return TracedStage(graph, tuple(self.inputs), results, (), ())
        wants = [
            self._differentiable(ref, var) and (ref.role == Role.PARAM or stage in carried[ref.index])
            for ref, var in zip(self.inputs, self.piece.inputs, strict=True)
        ]
        gives = [
            self._differentiable(ref, atom) and (ref.role == Role.LOSS or bool(carried[ref.index])) for ref, atom in self.outputs
        ]
        cotangents: list[Ref] = []
        shapes: list[jax.ShapeDtypeStruct] = []
        for (ref, atom), give in zip(self.outputs, gives, strict=True):
            peers = (-1,) if ref.role == Role.LOSS else carried[ref.index] if give else ()
            cotangents += [Ref(Role.COTANGENT, ref.index, peer) for peer in peers]
            shapes += shapes_of([atom]) * len(peers)

        def both(args: Sequence[jax.Array], received: Sequence[jax.Array]) -> tuple[Tree, Tree]:
            free = [arg for arg, want in zip(args, wants, strict=True) if want]

            def forward(free: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                supply = iter(free)
                outs = run(*(next(supply) if want else arg for arg, want in zip(args, wants, strict=True)))
                return _where(outs, gives, True), _where(outs, gives, False)

            outs, pullback, rest = jax.vjp(loss.remat(forward) if loss.remat else forward, free, has_aux=True)
            summed = _sum_by([ref.index if ref.peer >= 0 else -1 for ref in cotangents], received)
            return (outs, rest), pullback(summed)

        graph, _ = trace(both, avals, shapes, opened=True)
        order = [ref for ref, give in zip(results, gives, strict=True) if give]
        order += [ref for ref, give in zip(results, gives, strict=True) if not give]
        returned = [ref for ref, want in zip(self.inputs, wants, strict=True) if want]
        seeds = tuple(len(self.inputs) + k for k, ref in enumerate(cotangents) if ref.peer < 0)
        return TracedStage(graph, (*self.inputs, *cotangents), tuple(order), tuple(returned), seeds)

    def _differentiable(self, ref: Ref, atom: Atom) -> bool:
        return ref.role == Role.LOSS or (ref.role in (Role.PARAM, Role.ACTIVATION) and atom in self.loss.carries)


def _where(values: Sequence[jax.Array], flags: Sequence[bool], wanted: bool) -> list[jax.Array]:
    return [value for value, flag in zip(values, flags, strict=True) if flag == wanted]


def _sum_by(keys: Sequence[int], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Sum the values that share a key, in the order the keys first appear: one activation, several readers."""
    sums: dict[int, jax.Array] = {}
    for key, value in zip(keys, values, strict=True):
        sums[key] = sums[key] + value if key in sums else value
    return list(sums.values())
