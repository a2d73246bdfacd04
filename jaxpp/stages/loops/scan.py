"""Loops over layers, taken apart: one ``scan`` becomes several shorter ones, so that a stage can begin between two layers.

First every layer is made a loop of its own, and the loss is cut as any other. That says which layers each stage runs, so which rows
of the stacked parameters it owns (``slices_between``). From then on the parameters come as slices, and a loop over them is split
where the slices end (``split_scans``).
"""

import itertools
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages.graph import Atom, Graph, aval_of, live, variables
from jaxpp.stages.loops.loop import Loop, loop_of

__all__ = ["Layers", "same_layer", "slices_between", "split_scans"]


@dataclass(frozen=True)
class Layers:
    """Some layers of a loop, as an equation of their own.

    Attributes:
        result: what the equation makes first.
        loop: which of the loops it is from.
        stacked: the parameters whose rows it reads.
        start: the first of the layers.
        stop: the layer after the last.
    """

    result: Var
    loop: int
    stacked: tuple[Var, ...]
    start: int
    stop: int


def split_scans(graph: Graph, params: Sequence[Var], *, singly: bool = False) -> tuple[Graph, tuple[Layers, ...]]:
    """Split the loops over stacked parameters.

    Args:
        graph: a traced loss.
        params: its inputs that are parameters.
        singly: whether every layer becomes an equation; else a loop is split where the slices of its parameters end.

    Returns:
        the graph, and what the loops were split into; casts of stacked parameters are taken out of their loops.
    """
    splitter = _Splitter(frozenset(params), singly)
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        splitter.add(eqn, name)
    outputs = tuple(splitter.resolve(atom) for atom in graph.outputs)
    split = replace(graph, eqns=tuple(splitter.eqns), names=tuple(splitter.names), outputs=outputs)
    return live(split), tuple(splitter.layers)


def slices_between(params: Sequence[Var], layers: Sequence[Layers], stages: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slice of each parameter; empty for one that is not sliced.

    Args:
        params: the parameter variables.
        layers: what the loops were split into.
        stages: the stage of each of these; None for one that does not depend on data.
    """
    ends: dict[Var, set[int]] = {}
    for before, after, stage, following in zip(layers, layers[1:], stages, stages[1:], strict=False):
        if stage != following and before.loop == after.loop:
            for var in before.stacked:
                ends.setdefault(var, set()).add(max(before.start, after.start))
    lengths = {var: aval_of(var).shape[0] for var in ends}
    cuts = {var: [0, *sorted(found), lengths[var]] for var, found in ends.items()}
    return tuple(tuple(b - a for a, b in zip(cuts[var], cuts[var][1:], strict=False)) if var in cuts else () for var in params)


class _Splitter:
    """Copies the equations of a graph, each loop over parameters as several."""

    def __init__(self, params: frozenset[Var], singly: bool):
        self.eqns: list[JaxprEqn] = []
        self.names: list[str] = []
        self.layers: list[Layers] = []
        self._params, self._singly = params, singly
        self._loops = 0
        self._renamed: dict[Var, Atom] = {}
        self._parts: dict[Var, list[tuple[int, Any]]] = {}
        self._casts: dict[Var, JaxprEqn] = {}

    def resolve(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self._renamed.get(atom, atom)

    def add(self, eqn: JaxprEqn, name: str) -> None:
        eqn = eqn.replace(invars=[self.resolve(atom) for atom in eqn.invars])
        if eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0 and self._params.issuperset(eqn.invars):
            sizes = [aval_of(atom).shape[0] for atom in eqn.invars]
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            self._parts[eqn.outvars[0]] = list(zip(starts, eqn.invars, strict=True))
        if eqn.primitive.name == "convert_element_type" and self._is_stacked(eqn.invars[0]):
            self._casts[eqn.outvars[0]] = eqn
        loop = loop_of(eqn) if eqn.primitive.name == "scan" and eqn.outvars else None
        if loop is None or not self._stacked(eqn, loop):
            self._emit(eqn, name)
        else:
            self._split(eqn, name, loop)

    def _emit(self, eqn: JaxprEqn, name: str) -> None:
        self.eqns.append(eqn)
        self.names.append(name)

    def _bounds(self, stacked: Sequence[Var], loop: Loop) -> list[int]:
        """The layers before which the loop is split, with its ends."""
        ends = {start for var in stacked for start, _ in self._parts.get(self._origin(var), [])}
        if self._singly:
            ends = set(range(loop.length))
        return sorted(ends | {0, loop.length})

    def _stacked(self, eqn: JaxprEqn, loop: Loop) -> tuple[Var, ...]:
        return tuple(var for var in variables(eqn.invars[loop.num_before :]) if self._is_stacked(var))

    def _is_stacked(self, atom: Atom) -> bool:
        """Whether a value is a parameter, or one put together from slices, or a cast of such."""
        if isinstance(atom, Literal):
            return False
        origin = self._origin(atom)
        return bool(aval_of(atom).shape) and (origin in self._params or origin in self._parts)

    def _origin(self, atom: Any) -> Any:
        """What a value is a cast of."""
        while atom in self._casts:
            atom = self._casts[atom].invars[0]
        return atom

    def _split(self, eqn: JaxprEqn, name: str, loop: Loop) -> None:
        stacked = self._stacked(eqn, loop)
        spans = list(itertools.pairwise(self._bounds(stacked, loop)))
        fixed = loop.num_before - loop.num_carry
        consts, carry = list(eqn.invars[:fixed]), list(eqn.invars[fixed : loop.num_before])
        whole = eqn.invars[loop.num_before :]
        pieces: dict[int, list[Any]] = {}
        label, *inside = (_inner_name(loop) or "scan").split("/")
        for start, stop in reversed(spans) if loop.reverse else spans:
            rows = f"{label}[{start}:{stop}]" if stop - start > 1 else f"{label}[{start}]"
            path = "/".join(filter(None, (name, rows, *inside) if len(spans) > 1 else (name,)))
            inputs = [self._rows(atom, start, stop, path) if len(spans) > 1 else atom for atom in whole]
            eqns, results = loop.over([*consts, *carry, *inputs], [self._is_stacked(atom) for atom in whole], stop - start)
            for made in eqns:
                self._emit(made, path)
            carry, pieces[start] = results[: loop.num_carry], results[loop.num_carry :]
            result = next(made.outvars[0] for made in reversed(eqns) if made.primitive.name == "scan")
            if len(spans) > 1:
                self.layers.append(Layers(result, self._loops, tuple(map(self._origin, stacked)), start, stop))
        self._loops += 1
        self._renamed.update(zip(eqn.outvars[: loop.num_carry], carry, strict=True))
        for k, var in enumerate(eqn.outvars[loop.num_carry :]):
            parts = [pieces[start][k] for start, _ in spans]
            if len(parts) > 1:
                self._call(_concatenate, [parts], var, name)
            else:
                self._renamed[var] = parts[0]

    def _rows(self, atom: Atom, start: int, stop: int, name: str) -> Atom:
        """Rows of a stacked operand: the slices that hold them, if there are such, else cut out of the whole."""
        if not isinstance(atom, Literal) and atom in self._casts:
            cast = self._casts[atom]
            self._emit(
                cast.replace(invars=[self._rows(cast.invars[0], start, stop, name)], outvars=[out := _like(atom, stop - start)]),
                name,
            )
            return out
        parts = [] if isinstance(atom, Literal) else self._parts.get(atom, [])
        inside = [var for first, var in parts if start <= first and first + aval_of(var).shape[0] <= stop]
        out = _like(atom, stop - start)
        if sum(aval_of(var).shape[0] for var in inside) < stop - start:
            self._call(lambda whole: jax.lax.slice_in_dim(whole, start, stop), [atom], out, name)
        elif len(inside) > 1:
            self._call(_concatenate, [inside], out, name)
        else:
            return inside[0]
        return out

    def _call(self, function: Callable[..., Any], args: Sequence[Any], out: Var, name: str) -> None:
        """One equation that computes ``function``."""
        atoms, tree = jax.tree.flatten(args)
        shapes = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in atoms]
        (eqn,) = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)))(*shapes).jaxpr.eqns
        self._emit(eqn.replace(invars=atoms, outvars=[out]), name)


def _concatenate(parts: Sequence[Any]) -> jax.Array:
    return jax.lax.concatenate(parts, 0)


def _like(atom: Atom, length: int | None) -> Var:
    aval = aval_of(atom)
    return Var(aval if length is None else aval.update(shape=(length, *aval.shape[1:])))


def _inner_name(loop: Loop) -> str:
    """The module path that all equations inside a loop share."""
    eqns = loop.body.jaxpr.eqns
    paths = [str(inside.source_info.name_stack) for inside in eqns if str(inside.source_info.name_stack)]
    return posixpath.commonpath(paths) if paths else ""


def same_layer(name: str) -> str:
    """A module path with the first layer instead of all: ``layers[3:6]`` as ``layers[3]``, to find it by that name."""
    return re.sub(r"\[(\d+):\d+\]", r"[\1]", name)
