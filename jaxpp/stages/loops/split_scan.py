"""Loops over layers, taken apart: one ``lax.scan`` becomes several shorter ones, so that a stage can begin between two layers.

First every layer becomes a loop of its own, and the loss is cut as any other. The cuts say which layers each stage runs, and so
which rows of the stacked parameters it owns (``slices_between``). From then on the parameters come as slices, and a loop over them
is split where the slices end (``split_scans``).

A cast of a layer's weights inside a loop would be computed by every microbatch and kept for its backward: a copy of the weights.
So a loop that is rebuilt casts the weights of all its layers before it begins. The casts depend on parameters alone, and so they
are computed once a step.
"""

import itertools
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.stages.graph import Graph, Rewriter
from jaxpp.stages.jaxpr import (
    CHEAP,
    Atom,
    Scan,
    aval_of,
    concatenated_rows,
    equations_of,
    function_of,
    is_cast,
    kind_of,
    length_of,
    module_path,
    new_variable,
    scan_of,
    variables,
    window_of,
)
from jaxpp.types import Tree

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
    stacked: tuple[Atom, ...]
    start: int
    stop: int


def split_scans(
    graph: Graph, params: Sequence[Var], state: Sequence[Var] = (), *, per_layer: bool = False
) -> tuple[Graph, tuple[Layers, ...]]:
    """Split the loops over stacked parameters, and over stacked leaves of a model state.

    Returns:
        the graph, and what the loops were split into; casts of stacked parameters are taken out of their loops.
    """
    splitter = _Splitter(frozenset(params), frozenset(state), per_layer)
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        splitter.add(splitter.resolved(eqn), name)
    return splitter.graph(graph), tuple(splitter.layers)


def slices_between(params: Sequence[Var], layers: Sequence[Layers], stages: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slice of each parameter; empty for a parameter that is not sliced."""
    ends: dict[Atom, set[int]] = {}
    for before, after, stage, following in zip(layers, layers[1:], stages, stages[1:], strict=False):
        if stage != following and before.loop == after.loop:
            for var in before.stacked:
                ends.setdefault(var, set()).add(max(before.start, after.start))
    cuts = {var: [0, *sorted(found), aval_of(var).shape[0]] for var, found in ends.items()}
    return tuple(tuple(b - a for a, b in itertools.pairwise(cuts.get(var, ()))) for var in params)


class _Splitter(Rewriter):
    """Copies the equations of a graph, each loop over parameters as several."""

    def __init__(self, params: frozenset[Var], state: frozenset[Var], per_layer: bool):
        super().__init__()
        self.layers: list[Layers] = []
        self._params, self._state, self._per_layer = params | state, set[Atom](state), per_layer
        self._loops = 0
        self._parts: dict[Atom, list[tuple[int, Atom]]] = {}
        self._casts: dict[Atom, JaxprEqn] = {}
        self._made: dict[Atom, list[tuple[int, Atom]]] = {}

    def add(self, eqn: JaxprEqn, name: str) -> None:
        joined = concatenated_rows(eqn)
        if joined and self._params.issuperset(joined):
            starts = itertools.accumulate((aval_of(atom).shape[0] for atom in joined[:-1]), initial=0)
            self._parts[eqn.outvars[0]] = list(zip(starts, joined, strict=True))
            self._state.update(eqn.outvars if self._state.issuperset(joined) else ())
        if self._is_made(eqn):
            start, stop = (eqn.params[name][0] for name in ("start_indices", "limit_indices"))
            self.replaced[eqn.outvars[0]] = self._rows(eqn.invars[0], start, stop, name)
            return
        if is_cast(eqn) and self._is_stacked(eqn.invars[0]):
            self._casts[eqn.outvars[0]] = eqn
        loop = scan_of(eqn) if eqn.outvars else None
        if loop is None or not self._stacked(eqn, loop):
            self.emit(eqn, name)
        else:
            self._split(eqn, name, loop)

    def _is_made(self, eqn: JaxprEqn) -> bool:
        """Whether an equation takes whole rows of what a loop that was split has made of each layer."""
        if kind_of(eqn) != "slice" or eqn.invars[0] not in self._made:
            return False
        window = window_of(eqn, lambda _: None)
        shape = aval_of(eqn.invars[0]).shape
        return window is not None and window[:2] == ((window.start[0], *[0] * (len(shape) - 1)), (window.stop[0], *shape[1:]))

    def _bounds(self, stacked: Sequence[Var], loop: Scan) -> list[int]:
        """The layers before which the loop is split, with its ends."""
        ends = {start for var in stacked for start, _ in self._parts.get(self._origin(var), [])}
        return sorted((set(range(loop.length)) if self._per_layer else ends) | {0, loop.length})

    def _stacked(self, eqn: JaxprEqn, loop: Scan) -> tuple[Var, ...]:
        return tuple(var for var in variables(eqn.invars[loop.num_before :]) if self._is_stacked(var))

    def _is_stacked(self, atom: Atom) -> bool:
        """Whether a value is a parameter, or a parameter put together from slices, or a cast of either."""
        if isinstance(atom, Literal):
            return False
        origin = self._origin(atom)
        return bool(aval_of(atom).shape) and (origin in self._params or origin in self._parts)

    def _origin(self, atom: Atom) -> Atom:
        """What a value is a cast of."""
        while atom in self._casts:
            atom = self._casts[atom].invars[0]
        return atom

    def _split(self, eqn: JaxprEqn, name: str, loop: Scan) -> None:
        stacked = self._stacked(eqn, loop)
        spans = list(itertools.pairwise(self._bounds(stacked, loop)))
        consts, carry = list(eqn.invars[: loop.num_fixed]), list(eqn.invars[loop.num_fixed : loop.num_before])
        whole = eqn.invars[loop.num_before :]
        pieces: dict[int, list[Atom]] = {}
        label, *inside = (_inner_name(loop) or "scan").split("/")
        for start, stop in reversed(spans) if loop.reverse else spans:
            rows = f"{label}[{start}:{stop}]" if stop - start > 1 else f"{label}[{start}]"
            path = "/".join(filter(None, (name, rows, *inside) if len(spans) > 1 else (name,)))
            inputs = [self._rows(atom, start, stop, path) if len(spans) > 1 else atom for atom in whole]
            is_param = [self._is_stacked(atom) and self._origin(atom) not in self._state for atom in whole]
            eqns, results = _over(loop, [*consts, *carry, *inputs], is_param, stop - start)
            for made in eqns:
                self.emit(made, path)
            carry, pieces[start] = results[: loop.num_carry], results[loop.num_carry :]
            result = next(made.outvars[0] for made in reversed(eqns) if length_of(made) is not None)
            if len(spans) > 1:
                self.layers.append(Layers(result, self._loops, tuple(map(self._origin, stacked)), start, stop))
        self._loops += 1
        self.replaced.update(zip(eqn.outvars[: loop.num_carry], carry, strict=True))
        for k, var in enumerate(eqn.outvars[loop.num_carry :]):
            self.replaced[var] = joined = self._joined([pieces[start][k] for start, _ in spans], name)
            self._made[joined] = [(start, pieces[start][k]) for start, _ in spans]

    def _rows(self, atom: Atom, start: int, stop: int, name: str) -> Atom:
        """Rows of a stacked operand: the slices that hold them, if there are such slices, else cut out of the whole."""
        cast = self._casts.get(atom)
        if cast is not None:
            rows = self._rows(cast.invars[0], start, stop, name)
            out = new_variable(atom, (stop - start, *aval_of(atom).shape[1:]))
            self.emit(cast.replace(invars=[rows], outvars=[out]), name)
            return out
        parts = [] if isinstance(atom, Literal) else self._parts.get(atom, self._made.get(atom, []))
        inside = [part for first, part in parts if start <= first and first + aval_of(part).shape[0] <= stop]
        if sum(aval_of(part).shape[0] for part in inside) < stop - start:
            return self.call(lambda whole: jax.lax.slice_in_dim(whole, start, stop), [atom], name)[0]
        return self._joined(inside, name)

    def _joined(self, parts: Sequence[Atom], name: str) -> Atom:
        return parts[0] if len(parts) == 1 else self.call(lambda *parts: jax.lax.concatenate(parts, 0), parts, name)[0]


def _over(loop: Scan, atoms: Sequence[Atom], is_param: Sequence[bool], length: int) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that run a loop over other rows.

    Returns:
        the equations, casts of parameters before the loop; and what they return: what is carried, then the outputs.
    """
    moved, rest = _hoisted(loop, is_param)

    def run(*args: jax.Array) -> list[jax.Array]:
        consts, carry, rows = args[: loop.num_fixed], list(args[loop.num_fixed : loop.num_before]), args[loop.num_before :]
        early = jax.vmap(moved)(*itertools.compress(rows, is_param)) if moved else []

        def step(carry: list[jax.Array], row: tuple[list[jax.Array], ...]) -> tuple[list[jax.Array], list[jax.Array]]:
            results = rest(*consts, *carry, *row[0], *row[1])
            return results[: loop.num_carry], results[loop.num_carry :]

        options = {"length": length, "reverse": loop.reverse, "unroll": loop.unroll}
        carry, outputs = jax.lax.scan(step, carry, (list(rows), list(early)), **options)
        return [*carry, *outputs]

    return equations_of(run, atoms)


def _hoisted(loop: Scan, is_param: Sequence[bool]) -> tuple[Callable[..., Tree] | None, Callable[..., list[jax.Array]]]:
    """What the body makes of rows of parameters by cheap operations, if there are casts among them; and the rest of the body.

    Cheap operations have the same bits for all layers at once.
    """
    inner = loop.body.jaxpr
    rows = list(itertools.compress(inner.invars[loop.num_before :], is_param))
    of_params, moved = set(rows), []
    for eqn in inner.eqns:
        operands = variables(eqn.invars)
        if kind_of(eqn) in CHEAP and operands and of_params.issuperset(operands) and not eqn.effects:
            moved.append(eqn)
            of_params.update(eqn.outvars)
    if not any(map(is_cast, moved)):
        return None, jaxpr_as_fun(loop.body)
    rest = [eqn for eqn in inner.eqns if not any(eqn is other for other in moved)]
    made = {var for eqn in moved for var in eqn.outvars}
    read = variables([*(atom for eqn in rest for atom in eqn.invars), *inner.outvars])
    needed = [var for var in read if var in made]
    return function_of(moved, rows, needed), function_of(rest, [*inner.invars, *needed], inner.outvars)


def _inner_name(loop: Scan) -> str:
    """The module path that all equations inside a loop share."""
    return posixpath.commonpath(list(filter(None, map(module_path, loop.body.jaxpr.eqns))) or [""])


def same_layer(name: str) -> str:
    """A module path with the first layer instead of all: ``layers[3:6]`` as ``layers[3]``, to find it by that name."""
    return re.sub(r"\[(\d+):\d+\]", r"[\1]", name)
