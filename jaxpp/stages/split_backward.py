"""The backward split into I and W, without doing anything twice.

Asking XLA for the gradients and dropping what is not used makes W repeat the chain of cotangents: a third more work. So the
equations are divided: I takes what the input's cotangent needs, W takes the rest, and the values that cross from I to W are kept as
I's residuals. I and W together are exactly B.

A gradient that falls out of an equation of I (a ``scan`` over layers or a ``jax.checkpoint``, whose backward is one equation) is
summed in I. A stage whose input wants no cotangent, as the first, has nothing in I.

Where a stage keeps the least, a second minimum cut decides what W computes again (``remat/least.py``). Otherwise what the backward
computes again is computed once, in I.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from jaxpp.stages.graph import Graph, Piece, partition
from jaxpp.stages.jaxpr import Atom, variables
from jaxpp.stages.remat.least import Least
from jaxpp.stages.remat.policy import Kept

__all__ = ["BACKWARD", "INPUT", "WEIGHT", "Halves", "split_backward"]

BACKWARD, INPUT, WEIGHT = "backward", "input", "weight"
"""The colours of the equations of B, and of the equations of its halves I and W."""


@dataclass(frozen=True)
class Halves:
    """A backward in two parts.

    Attributes:
        input: the equations of I.
        weight: the equations of W.
        returned_by: which half returns each result of the backward, ``INPUT`` or ``WEIGHT``.
    """

    input: Piece
    weight: Piece
    returned_by: tuple[str, ...]


def split_backward(
    graph: Graph,
    colors: Sequence[str | None],
    results: Sequence[tuple[Atom, bool]],
    *,
    again: set[int],
    free: Collection[int],
    lasting: Collection[Var],
    remat: Kept,
) -> Halves:
    """Divide the equations of a backward into I and W.

    Args:
        graph: a stage's forward and pullback.
        colors: the part of the stage that each equation belongs to; those of the backward are ``BACKWARD``.
        results: what the backward returns, and whether each result is the cotangent of an input, which I must return.
        again: the equations of the forward that the backward runs again.
        free: the equations that every program repeats anyway.
        lasting: the values that are there for all microbatches.
        remat: what the stage keeps.
    """
    cotangents = {atom for atom, of_input in results if of_input and isinstance(atom, Var)}
    backward = {i for i, color in enumerate(colors) if color == BACKWARD}
    needed = _needed(graph, backward, cotangents)
    parts = [INPUT if i in needed else WEIGHT if i in backward else color for i, color in enumerate(colors)]
    made = cotangents.union(*(graph.eqns[i].outvars for i in needed))
    if isinstance(remat, Least) and needed:  # what I and W both run has no colour
        wanted = {atom: WEIGHT for atom, _ in results if isinstance(atom, Var)}
        pieces = partition(graph, parts, wanted | dict.fromkeys(cotangents, INPUT))
        of_input, of_weight = (pieces.get(half, Piece()) for half in (INPUT, WEIGHT))
        held = {*of_input.inputs, *of_weight.inputs}.difference(lasting)
        both, early = remat.between(graph, of_input.eqns, of_weight.eqns, free, held)
        early |= again & set(of_input.eqns)
        parts = [None if i in both else INPUT if i in early else part for i, part in enumerate(parts)]
        made = cotangents.union(*(graph.eqns[i].outvars for i, part in enumerate(parts) if part == INPUT), graph.inputs)
    elif needed:  # what is recomputed is so once, in I
        parts = [INPUT if i in again else part for i, part in enumerate(parts)]
        made.update(*(graph.eqns[i].outvars for i in again))
    halves = tuple(INPUT if of_input or (isinstance(atom, Var) and atom in made) else WEIGHT for atom, of_input in results)
    homes = {atom: half for (atom, _), half in zip(results, halves, strict=True) if isinstance(atom, Var)}
    pieces = partition(graph, parts, homes)
    return Halves(pieces.get(INPUT, Piece()), pieces.get(WEIGHT, Piece()), halves)


def _needed(graph: Graph, backward: Collection[int], cotangents: Iterable[Atom]) -> set[int]:
    """The equations of the backward that the cotangents are computed by."""
    producers = graph.producers()
    found: set[int] = set()
    pending = variables(cotangents)
    while pending:
        i = producers.get(pending.pop())
        if i is not None and i in backward and i not in found:
            found.add(i)
            pending += variables(graph.eqns[i].invars)
    return found
