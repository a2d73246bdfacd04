"""Rows of a stacked parameter read one by one: ``w[3]``, ``w[2:4]``, ``for row in w``, ``jax.tree.map(lambda a: a[i], params)``.

A model that runs its layers in a Python loop may keep their parameters in one array all the same. Each layer then reads static
rows of it, and the stage that runs the layer owns these rows, as it would if the loop were a ``scan``. First it is found out which
rows are read where (``first_reads``), and the cuts say which stage that is (``rows_between``). From then on the parameter comes as
slices, and what is read of the whole is read of the slice that has it (``place_rows``).
"""

import bisect
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph, Rewriter
from jaxpp.stages.jaxpr import (
    ELEMENTWISE,
    Atom,
    aval_of,
    concatenated_rows,
    kind_of,
    new_variable,
    sliced_like,
    split_rows,
    variables,
    window_of,
)

__all__ = ["Read", "first_reads", "place_rows", "rows_between"]


class Read(NamedTuple):
    """Rows of a parameter, and the first use of them.

    Attributes:
        leaf: the number of the parameter.
        start: the first row.
        stop: the row after the last.
        position: where on the spine they are first needed.
    """

    leaf: int
    start: int
    stop: int
    position: int


class _Taken(NamedTuple):
    """Rows that an equation takes of its first operand, and what it makes of them; None if these rows are its result."""

    start: int
    stop: int
    finish: Callable[[jax.Array], jax.Array] | None = None


def first_reads(graph: Graph, params: Sequence[Var], spine: Sequence[int]) -> tuple[Read, ...]:
    """Where the rows are first needed of each parameter that the loss reads by rows anywhere.

    A loss that reads such a parameter whole as well reads all of its rows there.
    """
    numbers = _Integers()
    views = {var: (leaf, 0, aval_of(var).shape[0]) for leaf, var in enumerate(params) if aval_of(var).shape}
    taken: list[tuple[Var, int, int, int]] = [(var, *view) for var, view in views.items()]
    passing: set[int] = set()
    for i, eqn in enumerate(graph.eqns):
        numbers.add(eqn)
        operand = _operand(eqn)
        view = None if operand is None else views.get(operand)
        results = None if view is None else _follow(eqn, numbers)
        if view is not None and results is not None:
            passing.add(i)
            for var, (start, stop, finish) in zip(eqn.outvars, results, strict=True):
                found = (view[0], view[1] + start, view[1] + stop)
                taken.append((var, *found))
                if finish is None:
                    views[var] = found
    needed = _first_needs(graph, spine, passing)
    divided = {leaf for _, leaf, start, stop in taken if stop - start < aval_of(params[leaf]).shape[0]}
    read = ((var, leaf, start, stop) for var, leaf, start, stop in taken if leaf in divided and var in needed)
    return tuple(Read(leaf, start, stop, needed[var]) for var, leaf, start, stop in read)


def rows_between(params: Sequence[Var], reads: Sequence[Read], cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slice of each parameter; empty for a parameter that is not sliced.

    Rows belong to the first stage that reads them, and rows that nothing reads belong to the stage of the row before. Neighbouring
    rows of a stage are one slice.
    """
    unread = len(cuts) + 1
    stages: dict[int, np.ndarray] = {}
    for leaf, start, stop, position in reads:
        rows = stages.setdefault(leaf, np.full(aval_of(params[leaf]).shape[0], unread))
        np.minimum(rows[start:stop], bisect.bisect_right(cuts, position), out=rows[start:stop])
    found: list[tuple[int, ...]] = [()] * len(params)
    for leaf, rows in stages.items():
        read = np.flatnonzero(rows < unread)
        first = np.flatnonzero(np.diff(rows[read])) + 1  # the first row of another stage, among the rows that are read
        if len(first):
            found[leaf] = tuple(np.diff([0, *read[first], len(rows)]).tolist())
    return tuple(found)


def place_rows(graph: Graph, params: Sequence[Var]) -> Graph:
    """The graph with rows read of the slices that have them, where it reads them of parameters put together from slices."""
    placer = _Placer(frozenset(params))
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        placer.add(placer.resolved(eqn), name)
    return placer.graph(graph) if placer.stacks else graph


def _operand(eqn: JaxprEqn) -> Var | None:
    """The operand whose rows an equation may take: the only array of an elementwise equation, the first operand of any other."""
    if kind_of(eqn) in ELEMENTWISE:
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) or aval_of(atom).shape]
        return operands[0] if len(operands) == 1 and not isinstance(operands[0], Literal) else None
    return eqn.invars[0] if eqn.invars and not isinstance(eqn.invars[0], Literal) else None


def _first_needs(graph: Graph, spine: Sequence[int], passing: set[int]) -> dict[Var, int]:
    """The spine position at which each value is first needed, directly or through what parameters alone decide.

    Equations that only pass rows on need nothing themselves.
    """
    position = {i: k for k, i in enumerate(spine)}
    needed: dict[Var, int] = {}
    for i in reversed(range(len(graph.eqns))):
        eqn = graph.eqns[i]
        at = position.get(i, min((needed[var] for var in eqn.outvars if var in needed), default=None))
        if at is not None and i not in passing:
            for var in variables(eqn.invars):
                needed[var] = min(needed.get(var, at), at)
    return needed


class _Placer(Rewriter):
    """Copies the equations of a graph; rows of what is put together from slices are taken of these."""

    def __init__(self, params: frozenset[Var]):
        super().__init__()
        self.stacks: dict[Atom | None, tuple[Atom, ...]] = {}
        self._params = params
        self._numbers = _Integers()

    def add(self, eqn: JaxprEqn, name: str) -> None:
        self._numbers.add(eqn)
        joined = concatenated_rows(eqn)
        if joined and self._params.issuperset(joined):
            self.stacks[eqn.outvars[0]] = joined
        operand = _operand(eqn)
        results = _follow(eqn, self._numbers) if operand in self.stacks else None
        if results is None:
            self.emit(eqn, name)
        elif kind_of(eqn) in ELEMENTWISE:
            (out,), parts = eqn.outvars, self.stacks[operand]
            self.stacks[out] = (out,) if len(parts) == 1 else tuple(self._elementwise(eqn, operand, part, name) for part in parts)
            self.emit(eqn, name)
        else:
            for var, (start, stop, finish) in zip(eqn.outvars, results, strict=True):
                found = self._rows(self.stacks[operand], start, stop, eqn, name)
                result = found[0] if len(found) == 1 else self.call(lambda *parts: jax.lax.concatenate(parts, 0), found, name)[0]
                if finish is None:
                    self.stacks[result] = tuple(found)
                self.replaced[var] = result if finish is None else self.call(finish, [result], name)[0]

    def _elementwise(self, eqn: JaxprEqn, whole: Atom | None, part: Atom, name: str) -> Var:
        out = new_variable(eqn.outvars[0], aval_of(part).shape)
        self.emit(eqn.replace(invars=[part if atom is whole else atom for atom in eqn.invars], outvars=[out]), name)
        return out

    def _rows(self, parts: Sequence[Atom], start: int, stop: int, like: JaxprEqn, name: str) -> list[Atom]:
        """The parts that hold these rows, each cut down to them; ``like`` reads them of the whole."""
        found, first = [], 0
        for part in parts:
            size = aval_of(part).shape[0]
            low, high = max(start - first, 0), min(stop - first, size)
            if (low, high) == (0, size):
                found.append(part)
            elif low < high:
                found.append(self._slice(part, low, high, like, name))
            first += size
        return found

    def _slice(self, part: Atom, low: int, high: int, like: JaxprEqn, name: str) -> Atom:
        sliced = sliced_like(like, part, low, high)
        if sliced is None:
            return self.call(lambda part: jax.lax.slice_in_dim(part, low, high), [part], name)[0]
        self.emit(sliced, name)
        return sliced.outvars[0]


def _follow(eqn: JaxprEqn, numbers: "_Integers") -> list[_Taken] | None:
    """The rows that each result of an equation takes of its operand; None if it does anything else with it."""
    shape = tuple(aval_of(eqn.invars[0]).shape)
    if kind_of(eqn) in ELEMENTWISE:
        return [_Taken(0, aval_of(eqn.outvars[0]).shape[0])]
    split = split_rows(eqn)
    if split is not None:
        sizes, squeezed = split
        return [_Taken(a, b, _first if squeezed else None) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    window = window_of(eqn, numbers.get)
    if window is None or window.start[0] >= window.stop[0]:
        return None
    (low, *start), (high, *stop), strides, squeezed = window
    if (tuple(start), tuple(stop), set(strides)) == ((0,) * len(start), shape[1:], {1}):
        return [_Taken(low, high, _first if squeezed else None)]
    limits = (high - low, *stop)
    return [_Taken(low, high, lambda rows: jax.lax.slice(rows, (0, *start), limits, strides))]


def _first(rows: jax.Array) -> jax.Array:
    return jax.lax.squeeze(rows, (0,))


class _Integers:
    """The integers that equations compute from numbers alone: an index such as ``i - 1``, where ``jax.jit`` has traced ``i``."""

    def __init__(self) -> None:
        self._known: dict[Var, int] = {}

    def get(self, atom: Atom) -> int | None:
        """The integer that an atom is, if that is known."""
        if not isinstance(atom, Literal):
            return self._known.get(atom)
        value = np.asarray(atom.val)
        return int(value.item()) if value.size == 1 and value.dtype.kind in "iub" else None

    def add(self, eqn: JaxprEqn) -> None:
        """Look at one more equation."""
        compute = _COMPUTED.get(kind_of(eqn))
        if compute is None or not eqn.invars or aval_of(eqn.outvars[0]).size != 1:
            return
        dtype = aval_of(eqn.outvars[0]).dtype
        values = [self.get(atom) for atom in eqn.invars]
        if None not in values and dtype.kind in "iub":
            result = int(compute(*values))
            result = int(bool(result)) if dtype.kind == "b" else result  # what is not 0 is True, and True is 1
            if dtype.kind == "b" or jnp.iinfo(dtype).min <= result <= jnp.iinfo(dtype).max:
                self._known[eqn.outvars[0]] = result


_COMPUTED: Mapping[str, Callable[..., int]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "neg")},
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"), lambda value: value),
    "max": max,
    "min": min,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "select_n": lambda which, *cases: cases[which],
}
