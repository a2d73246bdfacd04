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
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages.graph import Atom, Graph, aval_of, live, variables

__all__ = ["Read", "first_reads", "place_rows", "rows_between"]

_ELEMENTWISE = frozenset(
    "convert_element_type copy copy_p stop_gradient reduce_precision abs neg sign exp log tanh sqrt rsqrt integer_pow square "
    "add sub mul div max min".split()
)
"""Operations on a whole leaf that are as well done on its rows, if their other operands are numbers."""


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
    finish: Callable[[Any], Any] | None = None


def first_reads(graph: Graph, params: Sequence[Var], spine: Sequence[int]) -> tuple[Read, ...]:
    """Where the rows of parameters are first needed, of each parameter of which anything is read by rows.

    A loss that reads such a parameter whole as well reads all of its rows there.
    """
    numbers = _Integers()
    views = {var: (leaf, 0, aval_of(var).shape[0]) for leaf, var in enumerate(params) if aval_of(var).shape}
    taken: list[tuple[Var, int, int, int]] = [(var, *view) for var, view in views.items()]
    passing: set[int] = set()
    for i, eqn in enumerate(graph.eqns):
        numbers.add(eqn)
        view = views.get(_operand(eqn))
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
    """The rows of each slice of each parameter; empty for one that is not sliced.

    Rows belong to the first stage that reads them, those that nothing reads to that of the row before. Neighbouring rows of a stage
    are one slice.
    """
    unread = len(cuts) + 1
    stages: dict[int, np.ndarray] = {}
    for leaf, start, stop, position in reads:
        rows = stages.setdefault(leaf, np.full(aval_of(params[leaf]).shape[0], unread))
        np.minimum(rows[start:stop], bisect.bisect_right(cuts, position), out=rows[start:stop])
    found: list[tuple[int, ...]] = [()] * len(params)
    for leaf, rows in stages.items():
        read = np.flatnonzero(rows < unread)
        first = np.flatnonzero(np.diff(rows[read])) + 1  # of those that are read, the first of another stage
        if len(first):
            found[leaf] = tuple(np.diff([0, *read[first], len(rows)]).tolist())
    return tuple(found)


def place_rows(graph: Graph, params: Sequence[Var]) -> Graph:
    """The graph with rows read of the slices that have them, where it reads them of parameters put together from slices."""
    placer = _Placer(frozenset(params))
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        placer.add(eqn, name)
    if not placer.stacks:
        return graph
    outputs = tuple(placer.resolve(atom) for atom in graph.outputs)
    return live(replace(graph, eqns=tuple(placer.eqns), names=tuple(placer.names), outputs=outputs))


def _operand(eqn: JaxprEqn) -> Any:
    """The only operand that is not a number, of an elementwise equation; of another, its first; None if there is none such."""
    if eqn.primitive.name in _ELEMENTWISE:
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


class _Placer:
    """Copies the equations of a graph; rows of what is put together from slices are taken of these."""

    def __init__(self, params: frozenset[Var]):
        self.eqns: list[JaxprEqn] = []
        self.names: list[str] = []
        self.stacks: dict[Any, tuple[Any, ...]] = {}
        self._params = params
        self._numbers = _Integers()
        self._renamed: dict[Var, Atom] = {}

    def resolve(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self._renamed.get(atom, atom)

    def add(self, eqn: JaxprEqn, name: str) -> None:
        eqn = eqn.replace(invars=[self.resolve(atom) for atom in eqn.invars])
        self._numbers.add(eqn)
        if eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0 and self._params.issuperset(eqn.invars):
            self.stacks[eqn.outvars[0]] = tuple(eqn.invars)
        operand = _operand(eqn)
        results = _follow(eqn, self._numbers) if operand in self.stacks else None
        if results is None:
            self._emit(eqn, name)
        elif eqn.primitive.name in _ELEMENTWISE:
            (out,), parts = eqn.outvars, self.stacks[operand]
            self.stacks[out] = (out,) if len(parts) == 1 else tuple(self._elementwise(eqn, operand, part, name) for part in parts)
            self._emit(eqn, name)
        else:
            for var, (start, stop, finish) in zip(eqn.outvars, results, strict=True):
                found = self._rows(self.stacks[operand], start, stop, eqn, name)
                result = self._call(lambda *parts: jax.lax.concatenate(parts, 0), found, name) if len(found) > 1 else found[0]
                if finish is None:
                    self.stacks[result] = tuple(found)
                self._renamed[var] = result if finish is None else self._call(finish, [result], name)

    def _emit(self, eqn: JaxprEqn, name: str) -> None:
        self.eqns.append(eqn)
        self.names.append(name)

    def _elementwise(self, eqn: JaxprEqn, whole: Any, part: Var, name: str) -> Var:
        out = Var(aval_of(eqn.outvars[0]).update(shape=aval_of(part).shape))
        self._emit(eqn.replace(invars=[part if atom is whole else atom for atom in eqn.invars], outvars=[out]), name)
        return out

    def _rows(self, parts: Sequence[Var], start: int, stop: int, like: JaxprEqn, name: str) -> list[Var]:
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

    def _slice(self, part: Var, low: int, high: int, like: JaxprEqn, name: str) -> Var:
        aval = aval_of(part)
        if like.primitive.name != "slice":
            return self._call(lambda part: jax.lax.slice_in_dim(part, low, high), [part], name)
        starts, limits = (low, *[0] * (len(aval.shape) - 1)), (high, *aval.shape[1:])  # most are: no need to trace another
        params = like.params | {"start_indices": starts, "limit_indices": limits, "strides": None}
        self._emit(
            like.replace(invars=[part], outvars=[out := Var(aval.update(shape=(high - low, *limits[1:])))], params=params), name
        )
        return out

    def _call(self, function: Callable[..., Any], args: Sequence[Var], name: str) -> Any:
        """The result of equations that compute ``function``."""
        shapes = [jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in args]
        jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
        renamed: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            renamed |= {var: Var(var.aval) for var in eqn.outvars}
            invars = [atom if isinstance(atom, Literal) else renamed[atom] for atom in eqn.invars]
            self._emit(eqn.replace(invars=invars, outvars=[renamed[var] for var in eqn.outvars]), name)
        return renamed[jaxpr.outvars[0]]


def _follow(eqn: JaxprEqn, numbers: "_Integers") -> list[_Taken] | None:
    """The rows that each result of an equation takes of its operand; None if it does anything else with it."""
    kind, whole = eqn.primitive.name, _operand(eqn)
    shape = aval_of(whole).shape
    if kind in _ELEMENTWISE:
        return [_Taken(0, shape[0])]
    if kind == "split" and eqn.params["axis"] == 0 and all(eqn.params["sizes"]):
        ends = list(itertools.accumulate(map(int, eqn.params["sizes"]), initial=0))
        return [_Taken(a, b) for a, b in itertools.pairwise(ends)]
    if kind == "unstack" and eqn.params["axis"] == 0:
        return [_Taken(row, row + 1, _first) for row in range(shape[0])]
    if kind == "slice":
        start, stop, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
        return _sliced(shape, start, stop, strides or (1,) * len(shape))
    if kind == "dynamic_slice":
        sizes = eqn.params["slice_sizes"]
        starts = [numbers.get(atom) for atom in eqn.invars[1:]]
        if None in starts or len(starts) != len(shape):
            return None
        start = [min(max(a, 0), full - size) for a, size, full in zip(starts, sizes, shape, strict=True)]
        return _sliced(shape, start, [a + size for a, size in zip(start, sizes, strict=True)], (1,) * len(shape))
    return _gathered(eqn, shape, numbers) if kind == "gather" else None


def _sliced(shape: Sequence[int], start: Sequence[int], stop: Sequence[int], strides: Sequence[int]) -> list[_Taken] | None:
    """A slice: of the first axis alone, or of its rows another slice."""
    if start[0] >= stop[0]:
        return None
    if (tuple(start[1:]), tuple(stop[1:]), set(strides)) == ((0,) * len(start[1:]), tuple(shape[1:]), {1}):
        return [_Taken(start[0], stop[0])]
    limits = (stop[0] - start[0], *stop[1:])
    return [_Taken(start[0], stop[0], lambda rows: jax.lax.slice(rows, (0, *start[1:]), limits, tuple(strides)))]


def _gathered(eqn: JaxprEqn, shape: Sequence[int], numbers: "_Integers") -> list[_Taken] | None:
    """A gather of one row whose number is known (``jnp.take(w, 3, axis=0)``)."""
    named, row = eqn.params["dimension_numbers"], numbers.get(eqn.invars[1])
    plain = (named.collapsed_slice_dims, named.start_index_map, named.operand_batching_dims) == ((0,), (0,), ())
    whole_rows = tuple(eqn.params["slice_sizes"]) == (1, *shape[1:]) and aval_of(eqn.outvars[0]).shape == tuple(shape[1:])
    return [_Taken(row, row + 1, _first)] if plain and whole_rows and row is not None and 0 <= row < shape[0] else None


def _first(rows: Any) -> Any:
    return jax.lax.squeeze(rows, (0,))


class _Integers:
    """The integers that a graph computes from numbers alone: an index such as ``i - 1``, where ``jax.jit`` has traced ``i``."""

    def __init__(self):
        self._known: dict[Var, int] = {}

    def get(self, atom: Atom) -> Any:
        """The integer, or None."""
        if not isinstance(atom, Literal):
            return self._known.get(atom)
        value = np.asarray(atom.val)
        return int(value.item()) if value.size == 1 and value.dtype.kind in "iub" else None

    def add(self, eqn: JaxprEqn) -> None:
        """Look at one more equation."""
        compute = _COMPUTED.get(eqn.primitive.name)
        if compute is None or not eqn.invars or aval_of(eqn.outvars[0]).size != 1:
            return
        dtype = aval_of(eqn.outvars[0]).dtype
        values = [self.get(atom) for atom in eqn.invars]
        if None not in values and dtype.kind in "iub":
            result = int(compute(*values))
            result = int(bool(result)) if dtype.kind == "b" else result  # what is not 0 is True, and True is 1
            if dtype.kind == "b" or jnp.iinfo(dtype).min <= result <= jnp.iinfo(dtype).max:
                self._known[eqn.outvars[0]] = result


_COMPUTED: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "neg")},
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"), lambda value: value),
    "max": max,
    "min": min,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "select_n": lambda which, *cases: cases[which],
}
