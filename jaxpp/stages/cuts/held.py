"""What a stage would hold for its backward, for every stretch of the spine that could become a stage.

Problem: cuts for equal memory compare many stretches, and what a stage keeps is known only once it has been traced under
``jax.vjp``. Idea: trace the whole loss once as a single stage, and say of each value that its forward keeps at which spine
positions the backward reads it. A stage that runs one of these positions holds the value: as a residual if the stage made it, as
an activation that arrived if not. Mechanism: every spine equation is traced under a name scope with its position, which its
pullback carries too.

This is an estimate: each stage's own minimum cut may keep other values near a boundary.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
from jax.extend.core import Literal, Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import uncut
from jaxpp.stages.graph import Graph, Piece
from jaxpp.stages.jaxpr import Atom, aval_of, function_of, variables
from jaxpp.stages.layers import Read
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.program import Role
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.stage import BACKWARD

__all__ = ["Use", "kept_uses", "param_uses"]

_SCOPE, _POSITION = "jaxpp_spine_", re.compile(r"jaxpp_spine_(\d+)")


class Use(NamedTuple):
    """Bytes that a stage holds once if it runs at least one of some spine positions.

    Attributes:
        num_bytes: how many.
        positions: where they are needed, in order.
    """

    num_bytes: float
    positions: tuple[int, ...]


def kept_uses(loss: TracedLoss, kept: RematPolicy) -> list[Use]:
    """The values that one microbatch keeps from its forward to its backward, and where the backward reads them.

    Batch leaves are left out: they are on the device for the whole step, whatever the backward reads.
    """
    on_spine = {i: k for k, i in enumerate(loss.spine)}
    numbers = tuple(on_spine.get(i, -1) for i in range(len(loss.graph.eqns)))
    parts = {field.name: getattr(loss.graph, field.name) for field in fields(Graph)}
    programs = uncut(replace(loss, graph=_Numbered(**parts, positions=numbers)), kept)
    traced = programs.traced.graph
    where = [_POSITION.findall(name) for name in traced.names]
    piece = programs.pieces.get(BACKWARD, Piece())
    passing = {var for var, ref in programs.refs.items() if ref.role in (Role.COTANGENT, Role.BATCH)} | programs.lasting
    held = [var for var in piece.inputs if var not in passing]
    sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in held}
    found: dict[Var, set[int]] = {var: set() for var in held}
    for i in piece.eqns:
        eqn = traced.eqns[i]
        needs = frozenset[Var]().union(*(sources.get(var, frozenset()) for var in variables(eqn.invars)))
        for var in needs:
            found[var].update(int(at) for at in where[i][-1:])
        if i in programs.again or i in programs.free:  # computed again: who reads the result reads what it is made of
            sources.update((var, needs) for var in eqn.outvars)
    makers = traced.producers()
    for var, at in found.items():
        if not at and var in makers:
            at.update(int(k) for k in where[makers[var]][-1:])
    return [Use(count_bytes(aval_of(var)), tuple(sorted(at))) for var, at in found.items() if at]


def param_uses(loss: TracedLoss, of_user: Sequence[float], of_owner: Sequence[float]) -> list[Use]:
    """What parameters take on the stages that use them, and besides on the first of these.

    Args:
        loss: with every layer of a loop over stacked parameters as an equation of its own, or with slices of its own.
        of_user: bytes of each leaf on every stage that uses it: the leaf, and the sum of its gradients.
        of_owner: bytes of each leaf on its owner alone: the state of the optimizer.
    """
    position = {var: k for k, i in enumerate(loss.spine) for var in loss.graph.eqns[i].outvars}
    number: dict[Atom, int] = {var: leaf for leaf, var in enumerate(loss.params)}
    rows = [
        Read(number[var], layers.start, layers.stop, position[layers.result])
        for layers in loss.layers
        for var in layers.stacked
        if layers.result in position and var in number
    ]
    rows += loss.reads
    found = []
    for leaf, start, stop, at in rows:
        part = (stop - start) / max(1, aval_of(loss.params[leaf]).shape[0])
        found.append(Use(part * (of_user[leaf] + of_owner[leaf]), (at,)))
    divided, positions = {row.leaf for row in rows}, dict[int, list[int]]()
    for k, uses in enumerate(loss.param_uses):
        for leaf in uses - divided:
            positions.setdefault(leaf, []).append(k)
    for leaf, at in positions.items():
        found += [Use(of_user[leaf], tuple(at)), Use(of_owner[leaf], tuple(at[:1]))]
    return found


@dataclass(frozen=True)
class _Numbered(Graph):
    """A graph that runs each equation under a name scope with its position on the spine, -1 where it is not on it."""

    positions: tuple[int, ...] = ()

    def function(self, eqns: Iterable[int], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Callable[..., list[jax.Array]]:
        """As that of a ``Graph``."""
        numbers = list(eqns)

        def run(*args: jax.Array) -> list[jax.Array]:
            values = dict(zip(inputs, args, strict=True))
            for i in numbers:
                eqn, position = self.eqns[i], self.positions[i]
                needs = variables(eqn.invars)
                call = function_of([eqn], needs, eqn.outvars)
                if position < 0:
                    results = call(*(values[var] for var in needs))
                else:
                    with jax.named_scope(f"{_SCOPE}{position}"):
                        results = call(*(values[var] for var in needs))
                values.update(zip(eqn.outvars, results, strict=True))
            return [
                jax.numpy.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else values[atom] for atom in outputs
            ]

        return run
