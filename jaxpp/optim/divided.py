"""A traced function, rewritten to run on slices of some of its arguments.

Where a loop over layers is cut, each stage holds the rows of its own layers, and the optimizer is written for whole stacked leaves.
So its equations are followed one by one. Of each value it is known along which axis its rows lie, and an equation that keeps rows
apart (arithmetic, a batched matrix product, a loop over these) becomes one equation for each slice. A sum over all rows, such as
the norm of a leaf, becomes the sum of the slices' sums. Whatever else combines rows is an objection, by the leaf that has the rows.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    ELEMENTWISE,
    Atom,
    aval_of,
    called,
    describe,
    equations_of,
    function_of,
    kind_of,
    new_variable,
    scan_of,
)
from jaxpp.types import Array, Tree

MOVABLE = 1024  # the most elements of a value that may move between stages in an update


class Along(NamedTuple):
    """How a value is divided: along an axis, between bounds."""

    axis: int
    bounds: tuple[tuple[int, int], ...]  # of each part
    size: int  # of the whole axis

    def on(self, axis: int) -> "Along":
        """The same rows along another axis."""
        return self._replace(axis=axis)

    def shape(self, whole: Sequence[int], k: int) -> tuple[int, ...]:
        """The shape of a part of a value."""
        begin, end = self.bounds[k]
        return (*whole[: self.axis], end - begin, *whole[self.axis + 1 :])


_Alongs = Sequence[Along | None]  # how each of some values is divided; None: it is whole


class DividedFunction(NamedTuple):
    """A function of arguments that are divided."""

    run: Callable[..., list[Array]]  # every part is an argument, and a result, of its own
    found: _Alongs  # how each result is divided of itself
    objections: dict[int, str]  # why it cannot run, by the argument whose rows are combined


def divided_function(graph: Graph, arguments: _Alongs, results: _Alongs) -> DividedFunction:
    """The function of a graph, some of whose arguments and results are divided."""
    body, objections, found, outputs = _Body(), dict[int, str](), list[Along | None](), list[Atom]()
    inputs = [body.take(var, along, 1 << k) for k, (var, along) in enumerate(zip(graph.inputs, arguments, strict=True))]
    body.values.update((var, var) for var in graph.constants)
    for eqn in graph.eqns:
        try:
            body.add(eqn)
        except _MixedError as error:
            body.values.update(dict.fromkeys(eqn.outvars))
            objections.update(dict.fromkeys(body.arguments(eqn.invars) - objections.keys(), str(error)))
    for atom, along in zip(graph.outputs, results, strict=True):
        value = body.read(atom)
        own = value.along if isinstance(value, _Divided) else None
        found.append(own)
        try:
            outputs += [] if value is None else body.parts(value, along or own)
        except _MixedError as error:
            objections.update(dict.fromkeys(body.arguments([atom]) - objections.keys(), str(error)))
    constants = graph.constants
    run = function_of(body.eqns, [*(var for parts in inputs for var in parts), *constants], outputs)
    return DividedFunction(lambda *args: run(*args, *constants.values()), found, objections)


class _MixedError(Exception):
    """Rows are combined, or may be."""


class _Divided(NamedTuple):
    along: Along
    atoms: tuple[Atom, ...]  # of each part
    arguments: int  # whose rows they are, a bit each


class _Way(NamedTuple):
    """How an equation runs on parts."""

    reads: _Alongs  # each operand
    makes: _Alongs  # each result
    join: Callable[[Array, Array], Array] | None = None  # the whole result of those of two parts; None: all parts make the same
    changes: Callable[[int], dict[str, Tree]] = lambda _: {}  # the parameters of the equation that are others for a part


class _Body:
    """Equations that are rewritten one after the other."""

    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self.values: dict[Var, Atom | _Divided | None] = {}  # what stands for each variable; None: what has no parts
        self._made: dict[Atom, JaxprEqn] = {}
        self._slices: dict[tuple[Atom, Along, int], Atom] = {}

    def take(self, var: Var, along: Along | None, argument: int = 0) -> list[Var]:
        """Make a variable an argument: the variables of its parts."""
        if along is None:
            self.values[var] = new = new_variable(var)
            return [new]
        parts = [new_variable(var, along.shape(aval_of(var).shape, k)) for k in range(len(along.bounds))]
        self.values[var] = _Divided(along, tuple(parts), argument)
        return parts

    def read(self, atom: Atom) -> Atom | _Divided | None:
        """What stands for an atom."""
        return atom if isinstance(atom, Literal) else self.values[atom]

    def arguments(self, atoms: Sequence[Atom]) -> set[int]:
        """The arguments whose rows some atoms have."""
        values = map(self.read, atoms)
        bits = functools.reduce(int.__or__, (value.arguments for value in values if isinstance(value, _Divided)), 0)
        return {k for k in range(bits.bit_length()) if bits >> k & 1}

    def parts(self, value: Atom | _Divided | None, along: Along | None) -> list[Atom]:
        """The parts of a value; the value itself where it is to be whole."""
        if along is None:
            return [self._part(value, None, 0)]
        return [self._part(value, along, k) for k in range(len(along.bounds))]

    def add(self, eqn: JaxprEqn) -> None:
        """Add what an equation becomes."""
        values = [self.read(atom) for atom in eqn.invars]
        if any(value is None for value in values):
            self.values.update(dict.fromkeys(eqn.outvars))
            return
        divided = [value.along if isinstance(value, _Divided) else None for value in values]
        if not any(divided):
            self.values.update(zip(eqn.outvars, self._emit(eqn, [self._part(value, None, 0) for value in values]), strict=True))
            return
        if (inner := called(eqn, CALLS | CUSTOM_RULES | CHECKPOINTS)) is not None:
            self.values.update(zip(inner.jaxpr.invars, values, strict=True))
            self.values.update(zip(inner.jaxpr.constvars, map(_number, inner.consts), strict=True))
            for each in inner.jaxpr.eqns:
                self.add(each)
            self.values.update(zip(eqn.outvars, map(self.read, inner.jaxpr.outvars), strict=True))
            return
        way, bits = _way(eqn, divided), functools.reduce(int.__or__, (v.arguments for v in values if isinstance(v, _Divided)))
        made = list[list[Var]]()
        for k in range(len(next(filter(None, divided)).bounds)):
            operands = self._operands(eqn, values, way.reads, k)
            shapes = [along and along.shape(aval_of(out).shape, k) for out, along in zip(eqn.outvars, way.makes, strict=True)]
            made.append(self._emit(eqn, operands, shapes, way.changes(k)))
        for out, along, parts in zip(eqn.outvars, way.makes, zip(*made, strict=True), strict=True):
            self.values[out] = _Divided(along, parts, bits) if along else self._joined(eqn, way, divided, parts)

    def _operands(self, eqn: JaxprEqn, values: Sequence[Atom | _Divided | None], reads: _Alongs, k: int) -> list[Atom]:
        try:
            return [self._part(value, along, k) for value, along in zip(values, reads, strict=True)]
        except _MixedError as error:  # of two operands, one is wanted whole, or divided otherwise
            raise _MixedError(kind_of(eqn)) from error

    def _joined(self, eqn: JaxprEqn, way: _Way, divided: _Alongs, parts: Sequence[Var]) -> Atom:
        if way.join is None:
            return parts[0]
        whole = all(along is None or sum(b - a for a, b in along.bounds) == along.size for along in divided)
        if not whole or math.prod(aval_of(parts[0]).shape) > MOVABLE:
            raise _MixedError(f"{kind_of(eqn)} over all rows, to {describe(aval_of(parts[0]))}")
        join = way.join
        return self._call(lambda *terms: functools.reduce(join, terms), parts)

    def _part(self, value: Atom | _Divided | None, along: Along | None, k: int) -> Atom:
        if value is None or (isinstance(value, _Divided) and value.along != along):
            raise _MixedError("rows of several divisions are combined")
        if isinstance(value, _Divided):
            return value.atoms[k]
        if along is None:
            return value
        if isinstance(value, Literal):  # a table of rows in the body of a loop or of a custom rule
            begin, end = along.bounds[k]
            return _number(np.asarray(value.val)[(slice(None),) * along.axis + (slice(begin, end),)])
        key = value, along, k
        if key not in self._slices:
            self._slices[key] = self._slice(value, along, k)
        return self._slices[key]

    def _slice(self, value: Atom, along: Along, k: int) -> Atom:
        """A part of a whole value: computed where that is as easy, so that it need not be taken from where the whole one is."""
        eqn = self._made.get(value)
        kind, shape = "" if eqn is None else kind_of(eqn), along.shape(aval_of(value).shape, k)
        if eqn is not None and kind in ELEMENTWISE:
            reads = _read_alike(eqn, along)
            operands = [self._part(atom, along, k) for atom, along in zip(eqn.invars, reads, strict=True)]
            return self._emit(eqn, operands, [shape])[0]
        if eqn is not None and kind == "broadcast_in_dim":
            (operand, *_), axes = eqn.invars, eqn.params["broadcast_dimensions"]
            if along.axis in axes and aval_of(operand).shape[own := axes.index(along.axis)] == along.size:
                operand = self._part(operand, along.on(own), k)
            return self._emit(eqn, [operand], [shape], {"shape": shape})[0]
        begin, end = along.bounds[k]
        return self._call(lambda whole: jax.lax.slice_in_dim(whole, begin, end, axis=along.axis), [value])

    def _call(self, function: Callable[..., Array], atoms: Sequence[Atom]) -> Atom:
        eqns, (result,) = equations_of(function, atoms)
        self.eqns += eqns
        return result

    def _emit(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        shapes: Sequence[tuple[int, ...] | None] | None = None,
        changes: Mapping[str, Tree] | None = None,
    ) -> list[Var]:
        results = [new_variable(out, shape) for out, shape in zip(eqn.outvars, shapes or [None] * len(eqn.outvars), strict=True)]
        new = eqn.replace(invars=list(operands), outvars=list(results), params={**eqn.params, **(changes or {})})
        self.eqns.append(new)
        self._made.update(dict.fromkeys(results, new))
        return results


def _number(value: Array | np.ndarray) -> Literal:
    return Literal(np.asarray(value), jax.typeof(value))


# -------------------------------------------------------------------------------------------------------- the kinds of equations

_JOINS: dict[str, Callable[[Array, Array], Array]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}
_BY_AXIS = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
}
_MATRIX = frozenset("cholesky eigh householder_product lu qr svd triangular_solve".split())  # of the last two axes


def _way(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    kind, along = kind_of(eqn), next(filter(None, divided))
    if kind in _RULES:
        return _RULES[kind](eqn, divided)
    apart = (
        kind in ELEMENTWISE
        or (kind in _BY_AXIS and eqn.params[_BY_AXIS[kind]] != along.axis)
        or (kind in _MATRIX and all(along.axis < len(aval_of(atom).shape) - 2 for atom in eqn.invars))
        or (kind == "rev" and along.axis not in eqn.params["dimensions"])
        or (kind == "pad" and eqn.params["padding_config"][along.axis] == (0, 0, 0))
    )
    if not apart:
        raise _MixedError(kind)
    return _Way(_read_alike(eqn, along), [along] * len(eqn.outvars))


def _read_alike(eqn: JaxprEqn, along: Along) -> _Alongs:
    """The operands along the same axis, but for those that are the same for all rows."""
    return [along if aval_of(atom).shape[along.axis : along.axis + 1] == (along.size,) else None for atom in eqn.invars]


def _reduce(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    (along,), axes = divided, eqn.params["axes"]
    if along is None or along.axis not in axes:
        return _Way([along], [along and along.on(along.axis - sum(axis < along.axis for axis in axes))])
    if kind_of(eqn) not in _JOINS:
        raise _MixedError(kind_of(eqn))
    return _Way([along], [None], _JOINS[kind_of(eqn)])


def _transpose(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    along = next(filter(None, divided))
    return _Way([along], [along.on(eqn.params["permutation"].index(along.axis))])


def _squeeze(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    along = next(filter(None, divided))
    return _Way([along], [along.on(along.axis - sum(axis < along.axis for axis in eqn.params["dimensions"]))])


def _broadcast_in_dim(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    along, shape = next(filter(None, divided)), eqn.params["shape"]
    to = along.on(eqn.params["broadcast_dimensions"][along.axis])
    return _Way([along, *divided[1:]], [to], changes=lambda k: {"shape": to.shape(shape, k)})


def _reshape(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    """Rows stay apart where the axes before them stay, and where each slice begins and ends between rows of the result."""
    along, old, new = next(filter(None, divided)), aval_of(eqn.invars[0]).shape, tuple(eqn.params["new_sizes"])
    before, row = math.prod(old[: along.axis]), math.prod(old[along.axis + 1 :])
    axis = next((k for k in range(len(new)) if math.prod(new[:k]) == before and new[k] != 1), None)
    if axis is None or not row or eqn.params["dimensions"] is not None:
        raise _MixedError("reshape")
    bounds = [divmod(bound * row, math.prod(new[axis + 1 :])) for pair in along.bounds for bound in pair]
    if any(rest for _, rest in bounds):
        raise _MixedError("reshape")
    ends = [end for end, _ in bounds]
    to = Along(axis, tuple(zip(ends[::2], ends[1::2], strict=True)), new[axis])
    return _Way([along], [to], changes=lambda k: {"new_sizes": to.shape(new, k)})


def _slice(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    along, params = next(filter(None, divided)), eqn.params
    limit, strides = params["limit_indices"], params["strides"]
    if limit[along.axis] - params["start_indices"][along.axis] != along.size or (strides and strides[along.axis] != 1):
        raise _MixedError("slice")
    return _Way([along], [along], changes=lambda k: {"limit_indices": along.shape(limit, k)})


def _dot_general(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    contracted, batched = eqn.params["dimension_numbers"]
    side, along = next((side, along) for side, along in enumerate(divided) if along)
    reads = list[Along | None]([None, None])
    reads[side] = along
    for pairs, join in ((contracted, jax.lax.add), (batched, None)):
        if along.axis in pairs[side]:
            at = pairs[side].index(along.axis)
            reads[1 - side] = along.on(pairs[1 - side][at])
            return _Way(reads, [None if join else along.on(at)], join)
    used = [{*contracted[k], *batched[k]} for k in range(2)]
    free = [[axis for axis in range(len(aval_of(atom).shape)) if axis not in used[k]] for k, atom in enumerate(eqn.invars)]
    return _Way(reads, [along.on(len(batched[0]) + side * len(free[0]) + free[side].index(along.axis))])


def _split(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    along = next(filter(None, divided))
    if eqn.params["axis"] == along.axis:
        raise _MixedError("split")
    return _Way([along], [along] * len(eqn.outvars))


def _scan(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    """A loop, on parts of what is carried and of what its iterations read and make, but not over the rows."""
    scan = scan_of(eqn)
    if scan is None or any(along and along.axis == 0 for along in divided[scan.num_before :]):
        raise _MixedError("scan")
    before, fixed = scan.num_before, scan.num_fixed
    reads = [*divided[:before], *(along and along.on(along.axis - 1) for along in divided[before:])]
    while True:
        found = _followed(scan.body, reads)
        carried = [old or new for old, new in zip(reads[fixed:before], found, strict=False)]
        if carried == reads[fixed:before]:
            break
        reads[fixed:before] = carried
    makes = [*carried, *(along and along.on(along.axis + 1) for along in found[scan.num_carry :])]
    outer = [*reads[:before], *divided[before:]]
    results = [*carried, *found[scan.num_carry :]]
    return _Way(outer, makes, changes=lambda k: {"jaxpr": _of_part(scan.body, reads, results, k)})


def _cond(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    """A choice that is the same for all rows, on parts."""
    which, *reads = divided
    if which is not None:
        raise _MixedError("cond")
    branches = eqn.params["branches"]
    found = zip(*(_followed(branch, reads) for branch in branches), strict=True)
    makes = [next(filter(None, alongs), None) for alongs in found]
    return _Way(divided, makes, changes=lambda k: {"branches": tuple(_of_part(each, reads, makes, k) for each in branches)})


def _rewritten(closed: ClosedJaxpr, reads: _Alongs) -> tuple[_Body, list[list[Var]]]:
    body = _Body()
    inputs = [body.take(var, along) for var, along in zip(closed.jaxpr.invars, reads, strict=True)]
    body.values.update((var, var) for var in closed.jaxpr.constvars)
    for eqn in closed.jaxpr.eqns:
        body.add(eqn)
    return body, inputs


def _followed(closed: ClosedJaxpr, reads: _Alongs) -> list[Along | None]:
    """How the results of a loop's body, or of a branch, are divided."""
    body, _ = _rewritten(closed, reads)
    results = map(body.read, closed.jaxpr.outvars)
    return [value.along if isinstance(value, _Divided) else None for value in results]


def _of_part(closed: ClosedJaxpr, reads: _Alongs, makes: _Alongs, k: int) -> ClosedJaxpr:
    """A loop's body, or a branch, for one part."""
    reads, makes = ([along and along._replace(bounds=along.bounds[k : k + 1]) for along in each] for each in (reads, makes))
    body, inputs = _rewritten(closed, reads)
    values = map(body.read, closed.jaxpr.outvars)
    outputs = [part for value, along in zip(values, makes, strict=True) for part in body.parts(value, along)]
    invars = [var for parts in inputs for var in parts]
    return ClosedJaxpr(closed.jaxpr.replace(invars=invars, outvars=outputs, eqns=body.eqns), closed.consts)


_RULES: dict[str, Callable[[JaxprEqn, _Alongs], _Way]] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "dot_general": _dot_general,
    "scan": _scan,
    "cond": _cond,
    **dict.fromkeys([*_JOINS, "argmax", "argmin"], _reduce),
}
