"""What crosses a stage boundary: the cheapest values from which the next stage can compute what it reads.

A stage may read a value and its square, or a float32 copy of a bfloat16 value. Cheap equations between what is sent and what is
read are run again by the reader where fewer bytes cross then. The choice is a minimum cut, as that of the residuals (``least.py``).
An equation that reads a parameter, the model state, the batch or a key is not run again.
"""

from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Graph, Piece, descendants, partition
from jaxpp.stages.jaxpr import aval_of, variables
from jaxpp.stages.remat.min_cut import SINK, SOURCE, Network
from jaxpp.stages.remat.repeatable import price_of, repeatable

__all__ = ["partition_stages"]


def partition_stages(graph: Graph, colors: Sequence[int | None], homes: Mapping[Var, int]) -> dict[int, Piece]:
    """Split a loss into stages so that the fewest bytes cross.

    Returns:
        a piece for each stage.
    """
    plain = partition(graph, colors, homes)
    again = _again(graph, colors, plain)
    if not again:
        return plain
    leaner = partition(graph, [None if i in again else color for i, color in enumerate(colors)], homes)
    return leaner if _sent(leaner) < _sent(plain) else plain


def _sent(pieces: Mapping[int, Piece]) -> int:
    """Bytes that the stages read from others, once for each reader."""
    made = {var for piece in pieces.values() for var in piece.outputs}
    return sum(count_bytes(aval_of(var)) for piece in pieces.values() for var in piece.inputs if var in made)


def _again(graph: Graph, colors: Sequence[int | None], pieces: Mapping[int, Piece]) -> set[int]:
    """The equations that stages do better to run again than to receive the results of."""
    may, producers = repeatable(graph), graph.producers()
    given = descendants(graph, (*graph.inputs, *graph.constants))
    for i, eqn in enumerate(graph.eqns):
        stays = any(var in given and colors[producers[var]] is None for var in variables(eqn.invars) if var in producers)
        may[i] &= not stays and all(var in producers or var not in given for var in variables(eqn.invars))
    found: set[int] = set()
    for piece in pieces.values():
        reads = [var for var in piece.inputs if var in producers]
        network, pending, seen = Network(), [producers[var] for var in reads], set[int]()
        while pending:
            i = pending.pop()
            if i in seen:
                continue
            seen.add(i)
            eqn = graph.eqns[i]
            network.edge(SOURCE, i, *([price_of(eqn, 0.0)] if may[i] else []))
            for var in eqn.outvars:
                network.edge(i, var, count_bytes(aval_of(var)))
            for var in variables(eqn.invars) if may[i] else ():
                if var in given:
                    network.edge(var, i)
                    pending.append(producers[var])
        for var in reads:
            network.edge(var, SINK)
        if any(may[i] for i in seen):
            found |= seen & network.sink_side()
    return found
