"""A leaf of the model state that several stages read, as one leaf for each of them.

Problem: the position in a cache, which all layers share, belongs to one stage; the others are sent it at every pass. Idea: its new
value follows from the old one and the batch by a few cheap equations, so each stage that reads it can keep a leaf of its own and
make the new value itself. Mechanism: the equations between the leaf and the spine are written once more for every further stage,
reading that stage's leaf. A leaf that nobody changes has a copy on each stage for the same reason.
"""

import bisect
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.graph import Rewriter, descendants
from jaxpp.stages.jaxpr import Atom, new_variable, variables
from jaxpp.stages.loss.traced_loss import TracedLoss

__all__ = ["StateCopy", "copies_of", "with_copies"]


class StateCopy(NamedTuple):
    """A further copy of a leaf: the number of the leaf, and the stage that keeps the copy."""

    leaf: int
    stage: int


def copies_of(loss: TracedLoss, cuts: Cuts) -> tuple[StateCopy, ...]:
    """The copies that are needed so that no leaf is sent: one for each stage that reads a leaf, but for the first."""
    readers: list[set[int]] = [set() for _ in loss.state]
    for k, uses in enumerate(loss.state_uses):
        for leaf in uses:
            readers[leaf].add(bisect.bisect_right(cuts, k))
    made = {var for i in loss.spine for var in loss.graph.eqns[i].outvars}
    alone = [isinstance(source, Var) and source in made for source in loss.sources]
    copied = [leaf for leaf in range(len(loss.state)) if not alone[leaf]]
    return tuple(StateCopy(leaf, stage) for leaf in copied for stage in sorted(readers[leaf])[1:])


def with_copies(loss: TracedLoss, cuts: Cuts, copies: tuple[StateCopy, ...]) -> TracedLoss:
    """The loss whose last model state leaves are these copies: each stage reads its own.

    The loss was traced with the copies as leaves that it returns as they are. Positions on the spine stay what they were.
    """
    if not copies:
        return loss
    graph, count = loss.graph, len(loss.state) - len(copies)
    stage_of = {i: bisect.bisect_right(cuts, k) for k, i in enumerate(loss.spine)}
    replaced: dict[int, dict[Atom, Var]] = {}
    for number, (leaf, stage) in enumerate(copies):
        replaced.setdefault(stage, {})[loss.state[leaf]] = loss.state[count + number]
    moving = descendants(graph, [loss.state[leaf] for leaf, _ in copies])
    rewriter = Rewriter()
    for i, (eqn, name) in enumerate(zip(graph.eqns, graph.names, strict=True)):
        stage = stage_of.get(i)
        rewriter.emit(eqn if stage is None else _reading(eqn, replaced.get(stage, {})), name)
        if stage is None and not moving.isdisjoint(eqn.outvars):
            for known in replaced.values():
                if not known.keys().isdisjoint(variables(eqn.invars)):
                    known.update((var, new_variable(var)) for var in eqn.outvars)
                    rewriter.emit(_reading(eqn, known).replace(outvars=[known[var] for var in eqn.outvars]), name)
    outputs, first = list(graph.outputs), len(graph.outputs) - len(copies)
    for number, (leaf, stage) in enumerate(copies):
        if leaf not in loss.unchanged:
            outputs[first + number] = replaced[stage].get(loss.new_state[leaf], loss.new_state[leaf])
    return replace(loss, graph=rewriter.graph(replace(graph, outputs=tuple(outputs))))


def _reading(eqn: JaxprEqn, replaced: Mapping[Atom, Var]) -> JaxprEqn:
    """An equation that reads what stands for its operands on a stage."""
    if replaced.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[replaced.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars])
