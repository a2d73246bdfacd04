"""What a stage keeps at the least: residuals chosen by a minimum cut.

A backward can read a value that its forward kept, or compute it again from others. Each value has a price, its bytes; so has each
equation that is run again (``repeat.py``). The network: a value on the sink's side is needed in the backward, an equation on the
sink's side is run there again and needs its operands. A value that is needed, of an equation that is not run again, is kept and
paid for. The cheapest cut says which equations to run again; keeping everything is one of the cuts, so that no choice is worse.

Where the backward is split, a second cut says what I keeps for W: of all that I has (residuals, cotangents, what it computes), the
cheapest from which W can do the rest. What of W is cheap itself and makes less than it reads, such as the gradient of a bias, is
done in I where that keeps less.

References: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174. The choice by a minimum cut is known from
PyTorch's compiler.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from jax.extend.core import Literal, Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import aval_of, kind_of, number_in, variables
from jaxpp.stages.remat.min_cut import SINK, SOURCE, Network
from jaxpp.stages.remat.repeatable import EXACT, EXTREMES, is_decision, is_smooth, price_of, repeatable, rounding

__all__ = ["Least", "reuse_maximum"]

_MOVED = 1e-3  # what I does in W's place is done once all the same: a price only so that W keeps what it can
_LATER = 1 + 1 / 256  # what I computes for W is there twice while I runs: what it only holds is a little cheaper


@dataclass(frozen=True)
class Least:
    """Keep what costs least.

    Attributes:
        transcendental: the price, in bytes, of one element of ``tanh``, ``exp`` and the like, computed again.
    """

    transcendental: float = 0.0

    def again(
        self, graph: Graph, forward: Collection[int], free: Collection[int], held: Collection[Var], reads: Iterable[Var]
    ) -> set[int]:
        """The equations of a forward that its backward runs again.

        Args:
            graph: the stage's forward and pullback.
            forward: the equations of the forward.
            free: the equations that every program repeats anyway.
            held: inputs that are let go after the forward unless the backward needs them.
            reads: what the backward needs.
        """
        network, may = Network(), _settled(graph, {*forward, *free})
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        known, producers = set(held), graph.producers()
        for i, eqn in enumerate(graph.eqns):
            if i not in forward and i not in free:
                continue
            repeated = i in free or may[i]
            if i not in free:
                network.edge(SOURCE, i, price_of(eqn, self.transcendental) if may[i] else math.inf)
            for var in variables(eqn.invars) if repeated else ():
                if var in known:
                    network.edge(var, i)
                if kind_of(eqn) in EXTREMES and var in producers:  # a maximum is one of the values, bit for bit
                    network.edge(i, producers[var])
            for var in eqn.outvars:
                network.edge(i, var, math.inf if i in free else count_bytes(aval_of(var)))
            known.update(eqn.outvars)
        for var in reads:
            if var in known:
                network.edge(var, SINK)
        chosen = network.sink_side()
        again = {i for i in forward if i in chosen}
        kept = {var for var in known if var in chosen and producers.get(var) not in again}
        return again | _decided_on(graph, {*forward, *free} - again, kept)

    def between(
        self, graph: Graph, of_input: Collection[int], of_weight: Collection[int], free: Collection[int], held: Collection[Var]
    ) -> tuple[set[int], set[int]]:
        """What W computes again, and what I computes in its place.

        Args:
            graph: the stage's forward and pullback.
            of_input: the equations that I runs.
            of_weight: the equations that W would run if I kept nothing for it; some are in both.
            free: the equations that every program repeats anyway.
            held: what I is given: residuals, activations, cotangents.

        Returns:
            the equations of I that W runs as well, and the equations of W that I runs in its place.
        """
        network, may = Network(), repeatable(graph)
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        made = {var: i for i in (*of_input, *of_weight) for var in graph.eqns[i].outvars}
        for i in {*of_input, *of_weight}:
            eqn, shared = graph.eqns[i], i in of_input
            price = price_of(eqn, self.transcendental) if may[i] else math.inf
            if i not in free:  # what is only moved from W to I costs nothing, but W is the place for it
                network.edge(*((SOURCE, i, price) if shared else (i, SINK, math.inf if price == math.inf else _MOVED)))
            for var in variables(eqn.invars):
                if var in made or var in held:
                    network.edge(var, i)
                if not shared and var in made and made[var] not in of_input and made[var] not in free:
                    network.edge(i, made[var])
            for var in eqn.outvars:
                network.edge(i, var, math.inf if i in free else _LATER * count_bytes(aval_of(var)))
        chosen = network.sink_side()
        again = {i for i in of_input if i in chosen and i not in free}
        return again, {i for i in of_weight if i not in chosen and i not in of_input and i not in free}


def reuse_maximum(graph: Graph) -> Graph:
    """The graph with ``max(x, 0) > 0`` in place of ``x > 0`` where there is such a maximum: the result of a relu says it all."""
    results: dict[Var, Var] = {}
    eqns = list(graph.eqns)
    for i, eqn in enumerate(eqns):
        if kind_of(eqn) not in ("max", "gt") or isinstance(eqn.invars[0], Literal) or number_in(eqn.invars[1]) != 0:
            continue
        if kind_of(eqn) == "max":
            results[eqn.invars[0]] = eqn.outvars[0]
        elif eqn.invars[0] in results:
            eqns[i] = eqn.replace(invars=[results[eqn.invars[0]], eqn.invars[1]])
    return replace(graph, eqns=tuple(eqns))


def _decided_on(graph: Graph, forward: Collection[int], kept: Collection[Var]) -> set[int]:
    """The decisions on one value that is kept which the forward itself does not use: the backward decides, on the same bytes.

    Not a comparison of two values, such as a maximum and what it is of: one of them may be rounded otherwise where it is written.
    """
    used = {var for i in forward for var in variables(graph.eqns[i].invars)}.union(variables(graph.outputs))
    return {
        i
        for i in forward
        if is_decision(graph.eqns[i])
        and used.isdisjoint(graph.eqns[i].outvars)
        and len(operands := variables(graph.eqns[i].invars)) == 1
        and operands[0] in kept
    }


def _settled(graph: Graph, before: Collection[int]) -> list[bool]:
    """Whether each equation may be run again; not what the backward reads in a decision of its own, or in one inside a loop.

    Args:
        graph: the stage's forward and pullback.
        before: the equations that are not of the backward.
    """
    may, levels, producers = repeatable(graph), rounding(graph), graph.producers()
    for i, eqn in enumerate(graph.eqns):
        if i not in before and not is_smooth(eqn):
            for var in variables(eqn.invars):
                if var in producers and levels.get(var, EXACT) != EXACT:
                    may[producers[var]] = False
    return may
