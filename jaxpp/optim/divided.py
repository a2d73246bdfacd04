"""A traced function, rewritten to run on slices of some of its arguments.

Where a loop over layers is cut, each stage holds the rows of its own layers, and the optimizer is written for whole stacked leaves.
So its equations are followed one by one. Of each value it is known along which axis its rows lie, and an equation that keeps rows
apart (arithmetic, a batched matrix product, a loop over these) becomes one equation for each slice. A sum over all rows, such as
the norm of a leaf, becomes the sum of the slices' sums. Whatever else combines rows is an objection, by the leaf that has the rows.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph
from jaxpp.stages.interpreter import Interpreter, until_settled
from jaxpp.stages.jaxpr import (
    ALONG,
    ELEMENTWISE,
    MATRIX,
    REDUCTIONS,
    Atom,
    Cond,
    Scan,
    aval_of,
    describe,
    equations_of,
    function_of,
    kind_of,
    new_variable,
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
            body.step(eqn)
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


_Value = Atom | _Divided | None  # What stands for a variable: what is whole, its parts, or nothing, for what has no parts


class _Body(Interpreter[_Value]):
    """Equations that are rewritten one after the other."""

    enters = Interpreter.enters | {"scan", "cond"}

    def __init__(self) -> None:
        super().__init__()
        self.eqns: list[JaxprEqn] = []
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

    def number(self, atom: Literal) -> _Value:
        """A number stands for itself."""
        return atom

    def constant(self, var: Var, value: Array) -> _Value:  # noqa: ARG002
        """An array that a function closed over, as a number."""
        return _number(value)

    def arguments(self, atoms: Sequence[Atom]) -> set[int]:
        """The arguments whose rows some atoms have."""
        values = map(self.read, atoms)
        bits = functools.reduce(int.__or__, (value.arguments for value in values if isinstance(value, _Divided)), 0)
        return {k for k in range(bits.bit_length()) if bits >> k & 1}

    def parts(self, value: _Value, along: Along | None) -> list[Atom]:
        """The parts of a value; the value itself where it is to be whole."""
        if along is None:
            return [self._part(value, None, 0)]
        return [self._part(value, along, k) for k in range(len(along.bounds))]

    def results(self, eqn: JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
        """What stands for the results of an equation; one of whole values stays as it is, whatever is inside it."""
        if any(value is None for value in values):
            return [None] * len(eqn.outvars)
        if not any(isinstance(value, _Divided) for value in values):
            return self._emit(eqn, [self._part(value, None, 0) for value in values])
        return super().results(eqn, values)

    def plain(self, eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
        """The parts of the results of an equation, each made of parts."""
        return self._by_parts(eqn, values, _way(eqn, _alongs(values)))

    def scanned(self, eqn: JaxprEqn, loop: Scan, values: list[_Value]) -> list[_Value]:
        """Those of a loop over all parts at once; its rows are not divided among them."""
        return self._by_parts(eqn, values, _scan(loop, _alongs(values)))

    def chosen(self, eqn: JaxprEqn, choice: Cond, values: list[_Value]) -> list[_Value]:
        """Those of a choice that is the same for all parts."""
        return self._by_parts(eqn, values, _cond(choice, _alongs(values)))

    def _by_parts(self, eqn: JaxprEqn, values: Sequence[_Value], way: _Way) -> list[_Value]:
        divided, found = _alongs(values), list[_Value]()
        bits = functools.reduce(int.__or__, (value.arguments for value in values if isinstance(value, _Divided)))
        made = list[list[Var]]()
        for k in range(len(next(filter(None, divided)).bounds)):
            try:
                operands = [self._part(value, along, k) for value, along in zip(values, way.reads, strict=True)]
            except _MixedError as error:  # of two operands, one is wanted whole, or divided otherwise
                raise _MixedError(kind_of(eqn)) from error
            shapes = [along and along.shape(aval_of(out).shape, k) for out, along in zip(eqn.outvars, way.makes, strict=True)]
            made.append(self._emit(eqn, operands, shapes, way.changes(k)))
        for along, parts in zip(way.makes, zip(*made, strict=True), strict=True):
            found.append(_Divided(along, parts, bits) if along else self._joined(eqn, way, divided, parts))
        return found

    def _joined(self, eqn: JaxprEqn, way: _Way, divided: _Alongs, parts: Sequence[Var]) -> Atom:
        if way.join is None:
            return parts[0]
        whole = all(along is None or sum(b - a for a, b in along.bounds) == along.size for along in divided)
        if not whole or math.prod(aval_of(parts[0]).shape) > MOVABLE:
            raise _MixedError(f"{kind_of(eqn)} over all rows, to {describe(aval_of(parts[0]))}")
        join = way.join
        return self._call(lambda *terms: functools.reduce(join, terms), parts)

    def _part(self, value: _Value, along: Along | None, k: int) -> Atom:
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


def _alongs(values: Iterable[_Value]) -> list[Along | None]:
    return [value.along if isinstance(value, _Divided) else None for value in values]


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


def _way(eqn: JaxprEqn, divided: _Alongs) -> _Way:
    kind, along = kind_of(eqn), next(filter(None, divided))
    if kind in _RULES:
        return _RULES[kind](eqn, divided)
    by_row = (
        kind in ELEMENTWISE
        or (kind in ALONG and eqn.params[ALONG[kind]] != along.axis)
        or (kind in MATRIX and all(along.axis < len(aval_of(atom).shape) - 2 for atom in eqn.invars))
        or (kind == "rev" and along.axis not in eqn.params["dimensions"])
        or (kind == "pad" and eqn.params["padding_config"][along.axis] == (0, 0, 0))
    )
    if not by_row:
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


def _scan(loop: Scan, divided: _Alongs) -> _Way:
    """A loop, on parts of what is carried and of what its iterations read and make, but not over the rows."""
    fixed, carry, rows = loop.split(divided)
    if any(along and along.axis == 0 for along in rows):
        raise _MixedError("scan")
    inside = [along and along.on(along.axis - 1) for along in rows]
    carry = until_settled(
        lambda carried: _followed(loop.body, [*fixed, *carried, *inside])[: loop.num_carry], carry, lambda old, new: old or new
    )
    reads = [*fixed, *carry, *inside]
    made = _followed(loop.body, reads)[loop.num_carry :]
    makes, results = [*carry, *(along and along.on(along.axis + 1) for along in made)], [*carry, *made]
    return _Way([*fixed, *carry, *rows], makes, changes=lambda k: {"jaxpr": _of_part(loop.body, reads, results, k)})


def _cond(choice: Cond, divided: _Alongs) -> _Way:
    """A choice that is the same for all rows, on parts."""
    which, *reads = divided
    if which is not None:
        raise _MixedError("cond")
    found = zip(*(_followed(branch, reads) for branch in choice.branches), strict=True)
    makes = [next(filter(None, alongs), None) for alongs in found]
    return _Way(divided, makes, changes=lambda k: {"branches": tuple(_of_part(each, reads, makes, k) for each in choice.branches)})


def _rewritten(closed: ClosedJaxpr, reads: _Alongs) -> tuple[_Body, list[list[Var]], list[_Value]]:
    """The equations of a loop's body, or of a branch, the variables of each argument, and what stands for the results."""
    body = _Body()
    inputs = [body.take(var, along) for var, along in zip(closed.jaxpr.invars, reads, strict=True)]
    body.values.update((var, var) for var in closed.jaxpr.constvars)
    body.walk(closed.jaxpr.eqns)
    return body, inputs, list(map(body.read, closed.jaxpr.outvars))


def _followed(closed: ClosedJaxpr, reads: _Alongs) -> list[Along | None]:
    """How the results of a loop's body, or of a branch, are divided."""
    return _alongs(_rewritten(closed, reads)[2])


def _of_part(closed: ClosedJaxpr, reads: _Alongs, makes: _Alongs, k: int) -> ClosedJaxpr:
    """A loop's body, or a branch, for one part."""
    reads, makes = ([along and along._replace(bounds=along.bounds[k : k + 1]) for along in each] for each in (reads, makes))
    body, inputs, values = _rewritten(closed, reads)
    outputs = [part for value, along in zip(values, makes, strict=True) for part in body.parts(value, along)]
    invars = [var for parts in inputs for var in parts]
    return ClosedJaxpr(closed.jaxpr.replace(invars=invars, outvars=outputs, eqns=body.eqns), closed.consts)


_RULES: dict[str, Callable[[JaxprEqn, _Alongs], _Way]] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "slice": _slice,
    "dot_general": _dot_general,
    **dict.fromkeys(REDUCTIONS, _reduce),
}
