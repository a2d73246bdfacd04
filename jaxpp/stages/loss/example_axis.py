"""What a traced function does with the axis of the examples: whether microbatches give what the whole batch gives.

A step is a mean over microbatches of the user's loss. For a mean over the examples that is the user's loss; for a sum, a masked
mean, a batch statistic or a contrastive product it is something else, and the user should hear of it. ``follow`` compares the
function traced at two batch sizes: an axis that grew is one along which the examples lie. With that it follows the equations, one
after the other, and says of each value whether it is the same for all examples, has rows that belong to examples, is a sum over
them, or mixes them. What it does not know counts as mixing, but only where the examples get there; and so does whatever else the
two traces do not share: a number, an array that the function closed over, a parameter of an equation. Traces that are not the same
list of equations cannot be compared (``Incomparable`` says why).
"""

import enum
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph, ancestors
from jaxpp.stages.interpreter import Body, Function, Interpreter
from jaxpp.stages.jaxpr import (
    ALONG,
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    ELEMENTWISE,
    MATRIX,
    REDUCTIONS,
    Atom,
    Cond,
    Inner,
    Scan,
    While,
    aval_of,
    columns_of,
    inner_of,
    kind_of,
    length_of,
    named_axes,
    number_in,
    only_names,
    shard_map_of,
    user_line,
    variables,
)
from jaxpp.stages.loss.microbatch import raw_key
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.types import Leaf

_T = TypeVar("_T")


class Relation(enum.Enum):
    """What a value is to the examples."""

    SAME = "the same for all examples"
    ROWS = "one row for each example"
    TOTAL = "a sum over the examples"
    FUNCTION = "a function of a sum over the examples"
    LARGEST = "the largest over the examples"
    SMALLEST = "the smallest over the examples"
    MIXED = "something else"


class Mixing(NamedTuple):
    """Where and how examples are mixed."""

    what: str  # a sentence's end: "examples are compared with each other"
    module: str  # the module path; may be empty
    line: str  # the user's line, as file:number; may be empty

    def __str__(self) -> str:
        places = [place for place in (self.module and f"in {self.module}", self.line) if place]
        return self.what + (f" ({', '.join(places)})" if places else "")


class Factor(NamedTuple):
    """What a sum over the examples is multiplied or divided by: a count, or a function of it."""

    var: Var
    how: str  # "*", "/", or "where" and "where not": 0 where a condition does not hold, or does


class Count(NamedTuple):
    """Another sum over the examples, by functions of which a sum over them is multiplied or divided."""

    var: Var | None  # None where it is made inside a loop or a function with its own derivative
    degree: int | None  # it is the sum times so many powers of the number of examples
    factors: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class Value:
    """A value, as far as the examples are concerned."""

    kind: Relation = Relation.SAME
    degree: int | None = 0  # it grows with this power of the number of examples beside; None: in a way of its own
    count: Count | None = None  # beside which it is so
    plus: bool = False  # whether something that is no such sum is added to a sum with a count
    blocks: int = 1  # of rows: how often the examples follow one another along their axis
    placed: bool = False  # differs from example to example by their places alone
    index: bool = False  # counts the examples: 0, 1, 2, ...
    zero: bool = False
    drawn: bool = False  # made from the key of the microbatch or from a state, which are others in each microbatch
    total: Var | None = None  # of a sum, and of a function of it: the variable that holds the sum, without casts
    at: Var | None = None  # of a function of a sum: the variable that holds it, without casts
    mixing: Mixing | None = None  # of MIXED and of a function; of placed rows, where they meet their places


_INTO_ROWS = "what is computed of all examples goes into the row of each, as in batch normalisation"
_REDUCED = frozenset({Relation.TOTAL, Relation.FUNCTION, Relation.LARGEST, Relation.SMALLEST})

_LAID_OUT = "sharding_constraint reshard layout_constraint with_memory_space_constraint device_put name pin unpin"
_LINEAR = frozenset(f"neg real imag conj reduce_precision {_LAID_OUT}".split())
_PASSES = frozenset(
    "copy stop_gradient convert_element_type squeeze expand_dims transpose reshape broadcast_in_dim broadcast_to".split()
)
_ADDS = frozenset("add sub add_any".split())
_OF_EACH = ELEMENTWISE | frozenset(
    "bessel_i0e bessel_i1e bitcast_convert_type eq_to from_edtype igamma igamma_grad_a igammac le_to lt_to mulhi one_minus_square "
    "polygamma random_clone random_fold_in random_unwrap random_wrap regularized_incomplete_beta to_edtype zeta".split()
)  # what is computed of an example is of this example; some of these kinds have rules of their own
_RANDOM = frozenset(
    "random_bits random_seed random_split threefry2x32 threefry4x32 philox2x32 philox4x32 random_gamma rng_bit_generator "
    "rng_uniform iota_2x32_shape".split()
)
_UNIFORM = frozenset({"broadcast_in_dim", "broadcast_to", "empty", "empty2", "iota", "rng_uniform"})  # alike along what is new
_LARGEST = {
    "reduce_max": Relation.LARGEST,
    "reduce_or": Relation.LARGEST,
    "reduce_min": Relation.SMALLEST,
    "reduce_and": Relation.SMALLEST,
}
_WINDOWS = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add".split()
)
_BETWEEN_SHARDS = frozenset(
    "psum psum_invariant pmax pmin ppermute pvary pcast all_gather all_gather_invariant all_gather_reduced all_to_all "
    "reduce_scatter axis_index preduced reduced_vary_cast vary_unreduced_cast unreduced_psum unreduced_reduce_scatter".split()
)
_NESTED = frozenset("call composite custom_vmap_call call_hi_primitive remat_opt xla_metadata_call".split())
_BODIES = CALLS | CUSTOM_RULES | CHECKPOINTS | _NESTED
_EACH_ITS_OWN = _BETWEEN_SHARDS | {"optimization_barrier", "shard_map"}  # not all results are made of all operands
_OF_SHAPE = frozenset({"shape", "new_sizes", "length", "name", "sharding", "out_sharding", "dimensions_to_reduce"})
_BY_AXIS = frozenset({"start_indices", "limit_indices", "slice_sizes", "padding_config"})


class Incomparable(Exception):  # noqa: N818  (says why; whoever asks tells the user)
    """The function traced at two sizes is not the same list of equations."""


def _together(a: Sequence[_T], b: Sequence[_T], what: str) -> list[tuple[_T, _T]]:
    """What belongs together of two traces."""
    if len(a) != len(b):
        raise Incomparable(f"it has {len(a)} {what} at one size and {len(b)} at another")
    return list(zip(a, b, strict=True))


class _Operand(NamedTuple):
    """What an equation reads or makes, at both sizes."""

    value: Value
    shape: tuple[int, ...]
    other: tuple[int, ...]
    atom: Atom

    @classmethod
    def of(cls, pair: tuple[Atom, Atom], value: Value) -> "_Operand":
        return cls(value, aval_of(pair[0]).shape, aval_of(pair[1]).shape, pair[0])

    @property
    def axes(self) -> tuple[int, ...]:
        return _grown(self.shape, self.other)


@dataclass(frozen=True)
class _Equation:
    """An equation at both sizes; its variables are pairs."""

    eqn: JaxprEqn
    other: JaxprEqn  # the same at the second size
    values: Sequence[Value] = ()  # of its operands, once they are read

    @property
    def kind(self) -> str:
        return kind_of(self.eqn)

    @cached_property
    def invars(self) -> list[tuple[Atom, Atom]]:
        return _together(self.eqn.invars, self.other.invars, "operands")

    @cached_property
    def outvars(self) -> list[tuple[Var, Var]]:
        return _together(self.eqn.outvars, self.other.outvars, "results of an equation")

    @cached_property
    def operands(self) -> list[_Operand]:
        return [_Operand.of(pair, value) for pair, value in zip(self.invars, self.values, strict=True)]

    @cached_property
    def outs(self) -> list[_Operand]:
        return [_Operand.of(pair, Value()) for pair in self.outvars]

    @property
    def out(self) -> _Operand:
        """The first result."""
        return self.outs[0]


def _grown(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The axes along which the examples lie."""
    if len(shape) != len(other):
        raise Incomparable(f"an array has {len(shape)} axes at one size and {len(other)} at another")
    return tuple(k for k, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b)


class Examples(NamedTuple):
    """What ``follow`` found of the outputs of a traced function."""

    loss: Value
    aux: tuple[Value, ...]
    axes: tuple[tuple[int, ...], ...]  # of each aux leaf, along which the examples lie
    impure: str | None = None  # what was seen to be another at the same size

    @classmethod
    def by_shape(cls, loss: TracedLoss, size: int) -> "Examples":
        """What shapes alone say, for a model that takes one batch size only: arrays as long as the batch are rows, others means."""
        rows = [aval_of(atom).shape[:1] == (size,) for atom in loss.aux]
        kinds = tuple(Value(Relation.ROWS) if row else Value(Relation.TOTAL, degree=-1) for row in rows)
        return cls(Value(Relation.TOTAL, degree=-1), kinds, tuple((0,) if row else () for row in rows))


def follow(loss: TracedLoss, other: TracedLoss, sizes: tuple[int, int], again: Callable[[], TracedLoss]) -> Examples:
    """What a function does with the examples, from its traces at batches of two sizes; ``again`` traces it at the first again.

    Raises:
        Incomparable: the traces are not the same list of equations.
    """
    found, odd = _followed(loss, other, _Sizes(*sizes))
    if odd:  # numbers that changed in a way of their own: with the size, or from trace to trace, as a random number does?
        _, impure = _followed(loss, again(), _Sizes(sizes[0], sizes[0]))
        if impure:
            found, _ = _followed(loss, other, _Sizes(*sizes, impure=tuple(impure)))
            return found._replace(impure=_where(loss, impure))
    return found


def changed(loss: TracedLoss, again: TracedLoss) -> str | None:
    """What is another in a second trace of a function at the same shapes; None if nothing is, as where all it reads is given."""
    try:
        return _where(loss, _followed(loss, again, _Sizes(1, 1))[1])
    except Incomparable:
        return "it is another list of equations each time"


def _where(loss: TracedLoss, numbers: Sequence[Atom]) -> str | None:
    """Where a function reads numbers that are others in a second trace; None if there are none."""
    odd = set(map(id, numbers))
    for eqn in loss.graph.eqns:
        if not odd.isdisjoint(map(id, eqn.invars)):
            line = user_line(eqn)
            return f"what `{kind_of(eqn)}` reads is another each time" + f" ({line})" * bool(line)
    return "a number in it is another each time" if odd else None


def _followed(loss: TracedLoss, other: TracedLoss, sizes: "_Sizes") -> tuple[Examples, list[Atom]]:
    """What a function does with the examples, and the numbers that changed in a way of their own."""
    graph, second = loss.graph, other.graph
    drawn = {*loss.state, *(() if loss.key is None else (loss.key,)), *(loss.batch[k] for k in loss.shared)}
    follower = _Follower(sizes, first_alike(graph), (graph.constants, second.constants))
    for a, b in _together(graph.inputs, second.inputs, "arguments"):
        rows = bool(_grown(aval_of(a).shape, aval_of(b).shape)) and a in loss.batch
        follower.values[a, b] = Value(Relation.ROWS) if rows else Value(drawn=a in drawn)
    for name, (a, b) in zip(graph.names, _together(graph.eqns, second.eqns, "equations"), strict=True):
        follower.module = name
        follower.step(_Equation(a, b))
    outputs = [_Operand.of(pair, follower.read(pair)) for pair in _together(graph.outputs, second.outputs, "results")]
    axes, count = tuple(operand.axes for operand in outputs), len(loss.aux)
    return Examples(outputs[0].value, tuple(o.value for o in outputs[1 : 1 + count]), axes[1 : 1 + count]), sizes.odd


@dataclass(frozen=True)
class _Sizes:
    """The two sizes, and what is known of the numbers in the traces."""

    first: int
    second: int
    odd: list[Atom] = field(default_factory=list)  # numbers that changed in a way of their own
    impure: tuple[Atom, ...] = ()  # numbers that change from trace to trace, whatever the size

    def degree(self, a: np.ndarray, b: np.ndarray) -> int | None:
        """With which power of the number of examples an array grows."""
        dtype = np.result_type(a) if jnp.issubdtype(a.dtype, jnp.inexact) else np.dtype(float)
        ratio, near = self.second / self.first, 4 * float(jnp.finfo(dtype).eps)
        wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
        x, y = a.astype(wide), b.astype(wide)
        return next((k for k in (1, -1, 2, -2) if x.any() and np.allclose(y, x * ratio**k, rtol=near, atol=0)), None)


class _Foreign(Exception):  # noqa: N818  (never leaves this file)
    """An equation has not the parameters that it has in the versions of JAX that are known here."""


def _param(eqn: JaxprEqn, name: str) -> Any:
    if name not in eqn.params:
        raise _Foreign
    return eqn.params[name]


def _values(array: Leaf) -> np.ndarray | None:
    """The values of an array that a function closed over; None where they are not here."""
    if isinstance(array, Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    with jax.ensure_compile_time_eval():  # whoever asks may be traced, as the weights of microbatches are
        return np.asarray(raw_key(array))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  (what is not a number)


def _alike(eqn: JaxprEqn, other: JaxprEqn, axes: Sequence[int]) -> bool:
    """Whether two equations do the same, but for how long the examples are, which lie along these ``axes`` of what they read."""
    for name, value in eqn.params.items():
        second: object = other.params.get(name)
        if name in _BY_AXIS and isinstance(value, tuple) and isinstance(second, tuple):
            fixed = [k for k in range(len(value)) if k not in axes]
            value, second = [value[k] for k in fixed], [second[k] for k in fixed]  # noqa: PLW2901  (without what examples decide)
        along = name == "sizes" and eqn.params.get("axis") in axes
        if not (name in _OF_SHAPE or along or _plainly_equal(value, second)):
            return False
    return True


def _is_plain(value: object) -> bool:
    """Whether a parameter is made of numbers, names and tuples of such alone."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, np.generic, np.dtype, enum.Enum))


def _plainly_equal(a: object, b: object) -> bool:
    """Whether two parameters are equal, as far as they are numbers, names or tuples of such."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_plainly_equal, a, b))
    return not (_is_plain(a) and _is_plain(b)) or a == b or (a != a and b != b)  # noqa: PLR0124  (what is not a number)


def _first_mixed(values: Sequence[Value]) -> Value | None:
    return next((value for value in values if value.kind == Relation.MIXED), None)


class _Follower(Interpreter[Value]):
    """Follows a list of equations at two sizes at once."""

    enters = _BODIES | {"scan", "while", "cond", "custom_linear_solve"}
    rounds = 4

    def __init__(self, sizes: _Sizes, known: Mapping[Var, Var], constants: tuple[Mapping[Var, Leaf], Mapping[Var, Leaf]]):
        super().__init__()
        self.sizes, self._known = sizes, known  # the first of the variables that are computed alike, in the whole function
        self.module = ""  # of the equation of the whole function
        self._constants = dict(constants[0]), dict(constants[1])  # arrays that functions closed over, at each size
        self._twins: dict[Atom, Atom] = {}  # of those of the first size
        self._made: dict[Var, _Equation] = {}
        self._eqn: JaxprEqn | None = None
        self._turns: tuple[int, int] | None = None  # of the innermost loop around it that has others at the second size
        self._shards = frozenset[str]()  # axes over which a shard_map around it divides anything but the examples

    def _constant(self, atom: Atom, a: Leaf, b: Leaf) -> Value:
        """What is known of a number or an array that the function closed over, ``a`` at one size and ``b`` at the other."""
        if a is b and np.ndim(a):
            return Value()
        x, y = _values(a), _values(b)
        if x is None or y is None:  # in other processes, or of a trace around this one
            return Value(placed=True) if np.shape(a) != np.shape(b) else Value(degree=0 if a is b else None)
        if x.shape == y.shape:
            if any(atom is each for each in self.sizes.impure) or _same(x, y):
                return Value(zero=not x.ndim and not x.any())
            degree = self.sizes.degree(x, y)
            if degree is None:
                self.sizes.odd.append(atom)
            return Value(degree=degree)
        if not (x.size and y.size):
            return Value()
        axes = _grown(x.shape, y.shape)
        rows = [each[tuple(slice(1) if k in axes else slice(None) for k in range(each.ndim))] for each in (x, y)]
        if all(_same(each, np.broadcast_to(row, each.shape)) for each, row in zip((x, y), rows, strict=True)):
            return self._constant(atom, *rows)
        index = all(each.ndim == 1 and np.array_equal(each, np.arange(len(each))) for each in (x, y))
        return Value(placed=True, index=index)

    def read(self, atom: tuple[Atom, Atom]) -> Value:
        """What is known of an atom."""
        a, b = atom
        if isinstance(a, Literal) or isinstance(b, Literal):
            if not (isinstance(a, Literal) and isinstance(b, Literal)):
                raise Incomparable("an equation reads a number at one size and an array at another")
            return self._constant(a, a.val, b.val)
        first, second = self._constants
        if atom not in self.values and a in first and b in second and self._twins.setdefault(a, b) is b:
            self.values[atom] = self._constant(a, first[a], second[b])
        if atom not in self.values:
            raise Incomparable("an equation reads one value at one size and another at another")
        return self.values[atom]

    def step(self, eqn: _Equation) -> None:
        """Follow an equation, the same at both sizes."""
        if eqn.eqn.primitive is not eqn.other.primitive:
            kind = kind_of(eqn.other)
            raise Incomparable(f"it has the equation {eqn.kind} at one size and {kind} in its place at another")
        around, self._eqn = self._eqn, eqn.eqn
        super().step(eqn)
        self._eqn = around

    def results(self, eqn: _Equation, values: list[Value]) -> list[Value]:
        """What is known of the results."""
        at = replace(eqn, values=values)
        try:
            found = super().results(at, values)
        except _Foreign:
            found = [self._unknown(at, out) for out in at.outs]
        alike = _alike(at.eqn, at.other, at.operands[0].axes if at.operands else ())
        self._made.update((out, at) for out in at.eqn.outvars)
        return [self._tidied(at, out, value, alike=alike) for out, value in zip(at.outs, found, strict=True)]

    def _tidied(self, at: _Equation, out: _Operand, value: Value, *, alike: bool) -> Value:
        first = self._known.get(out.atom)  # type: ignore[arg-type]
        drawn = any(operand.value.drawn for operand in at.operands)
        if not alike and value.kind != Relation.MIXED:
            own = value.kind == Relation.SAME
            value = Value(degree=None) if own else self._mixed("what is computed of an example depends on the number of examples")
        if value.kind == Relation.ROWS and len(out.axes) > 1:
            return self._mixed("examples are compared with each other")
        new = bool(out.axes) and not any(operand.axes for operand in at.operands)  # and made of nothing that has examples
        if value.kind == Relation.SAME and new and at.kind not in _UNIFORM | _BODIES | {"cond", "shard_map"}:
            value = replace(value, placed=value.placed or not (drawn and at.kind in _RANDOM))
        if value.kind == Relation.TOTAL and value.count is None and (value.total is None or at.kind not in _PASSES):
            value = replace(value, total=first)
        if value.kind == Relation.FUNCTION and value.at is None:
            value = replace(value, at=first)
        return replace(value, drawn=True) if drawn and value.kind in (Relation.SAME, Relation.ROWS) else value

    def _mixed(self, what: str) -> Value:
        return Value(Relation.MIXED, mixing=self._mixing(what))

    def _mixing(self, what: str) -> Mixing:
        return Mixing(what, self.module, user_line(self._eqn) if self._eqn else "")

    # ------------------------------------------------------------------------------------------------ how values are combined

    def _joined(self, values: Sequence[Value], *, sums: bool) -> Value:  # noqa: PLR0911  (a case a line)
        """Values added (``sums``), or put side by side."""
        values = [value for value in values if not value.zero] or list(values[:1])
        if len(values) == 1:
            return replace(values[0], index=values[0].index and not sums, zero=values[0].zero and sums)
        kinds = {value.kind for value in values}
        scales = {(value.degree, value.count) for value in values}
        if kinds == {Relation.SAME}:
            scale = (*scales,)[0] if len(scales) == 1 else (None, None)
            return Value(degree=scale[0], count=scale[1], placed=any(value.placed for value in values))
        if Relation.ROWS in kinds:
            if kinds - {Relation.ROWS, Relation.SAME}:
                return self._mixed(_INTO_ROWS)
            if len(scales) > 1:
                return self._mixed("what depends on the number of examples is added to what does not")
            return self._rows(values, *(*scales,)[0])
        if kinds - {Relation.TOTAL, Relation.SAME}:
            what = "the largest or the smallest of the examples is combined with something else"
            return self._function("add", values) or self._mixed(what)
        totals = [value for value in values if value.kind == Relation.TOTAL]
        scales = {(value.degree, value.count) for value in totals}
        if len(scales) > 1:
            return self._mixed("means over different counts are added")
        degree, count = (*scales,)[0]
        rest = [value for value in values if value.kind == Relation.SAME]
        wanted = -1 if count is None else count.degree
        if any((value.degree, value.count) != (0, None) for value in rest) or (rest and degree != wanted):
            if count is not None or any(value.degree != 0 for value in rest):
                return self._mixed("what depends on the number of examples is added to a sum over them")
            term = "a sum over the examples is added to a term that is none"
            return self._function("add", values, term) or self._mixed(term)
        placed = next((value for value in values if value.placed), Value())
        plus = count is not None and (bool(rest) or any(value.plus for value in totals))
        return Value(Relation.TOTAL, degree, count, plus, placed=placed.placed, mixing=placed.mixing)

    def _rows(self, values: Sequence[Value], degree: int | None, count: Count | None) -> Value:
        rows = [value for value in values if value.kind == Relation.ROWS]
        if len({value.blocks for value in rows}) > 1:
            return self._mixed("rows of different examples are combined")
        placed = next((value for value in values if value.placed), None)
        mixing = None
        if placed is not None:
            mixing = placed.mixing or self._mixing("what is computed of an example depends on its place in the batch")
        return Value(Relation.ROWS, degree, count, blocks=rows[0].blocks, placed=placed is not None, mixing=mixing)

    def _function(self, kind: str, values: Sequence[Value], what: str = "") -> Value | None:
        """A function of one sum over the examples, and of numbers; None if it is one of more."""
        sums = [value for value in values if value.kind in (Relation.TOTAL, Relation.FUNCTION)]
        rest = [value for value in values if value.kind == Relation.SAME]
        if len(sums) + len(rest) < len(values) or any(v.degree != 0 or v.placed for v in rest):
            return None
        first = sums[0]
        if any(value.count is not None or value.placed for value in values):
            return None
        if len(sums) > 1 and (first.total is None or any(value.total is not first.total for value in sums)):
            return None
        known = next((value.mixing for value in sums if value.kind == Relation.FUNCTION), None)
        mixing = known or self._mixing(what or f"a function ({kind}) of a sum over the examples is used further")
        return Value(Relation.FUNCTION, first.degree, total=first.total, mixing=mixing)

    def _scaled(self, value: Value, by: Value, how: str) -> Value:
        """A value multiplied or divided by a sum over the examples, or by a function of it."""
        var = by.at if by.kind == Relation.FUNCTION else by.total
        if by.count is not None or by.placed:
            return self._mixed("a value is multiplied or divided by a mean over the examples")
        if value.count is not None and (by.total is None or value.count.var is not by.total):
            return self._mixed("means over counts are multiplied")
        if value.kind not in (Relation.SAME, Relation.ROWS, Relation.TOTAL):
            return self._mixed(f"a function of {value.kind.value} is used further")
        before = () if value.count is None else value.count.factors
        factors = (*before, Factor(var, how)) if var is not None else before
        return replace(value, count=Count(by.total, by.degree, factors), total=None, index=False, zero=False)

    def _multiplied(self, values: Sequence[Value], *, divided: bool = False) -> Value:  # noqa: PLR0911, PLR0912, C901  (cases)
        a, b = values
        if a.zero:
            return a
        if b.zero and not divided:
            return b
        sums = Relation.TOTAL, Relation.FUNCTION
        if b.kind in sums and (divided or b.kind == Relation.FUNCTION or a.kind in sums):
            found = self._function("div" if divided else "mul", values)
            if found is not None:
                return found
            if divided or b.kind == Relation.FUNCTION or (a.count is not None and a.count.var is b.total is not None):
                return self._scaled(a, b, "/" if divided else "*")
        if a.kind in sums and not divided and (a.kind == Relation.FUNCTION or (b.count and b.count.var is a.total is not None)):
            return self._function("mul", values) or self._scaled(b, a, "*")
        if divided:
            if b.count is not None:
                return self._mixed("a value is divided by a mean over the examples")
            found = self._function("div", values) if a.kind == Relation.FUNCTION else None
            if found is not None:
                return found
            b = replace(b, degree=None if b.degree is None else -b.degree)
        reduced = [value for value in values if value.kind in _REDUCED]
        if reduced and (reduced[0].kind != Relation.TOTAL or (divided and b.kind in _REDUCED)):
            return self._mixed(f"a function of {reduced[0].kind.value} is used further")
        if len(reduced) == 2:
            return self._mixed("two sums over the examples are multiplied")
        if a.count is not None and b.count is not None:
            return self._mixed("means over counts are multiplied")
        degree = None if a.degree is None or b.degree is None else a.degree + b.degree
        count = a.count or b.count
        kinds = {a.kind, b.kind}
        if Relation.ROWS in kinds:
            if reduced:
                return self._mixed(_INTO_ROWS)
            return self._rows((a, b), degree, count)
        if reduced:
            return Value(Relation.TOTAL, degree, count, reduced[0].plus, placed=reduced[0].placed, mixing=reduced[0].mixing)
        return Value(degree=degree, count=count, placed=a.placed or b.placed)

    def _applied(self, kind: str, values: Sequence[Value]) -> Value:
        """A function of values that is not linear."""
        if (mixed := _first_mixed(values)) is not None:
            return mixed
        kinds = {value.kind for value in values}
        reduced = kinds & _REDUCED
        if Relation.ROWS in kinds:
            if reduced:
                return self._mixed(_INTO_ROWS)
            if any(value.degree or value.count for value in values) or any(v.degree is None for v in values):
                if any(value.count for value in values):
                    return self._mixed(_INTO_ROWS)
                return self._mixed("what is computed of an example depends on the number of examples")
            return self._rows(values, 0, None)
        if reduced:
            what = f"a function ({kind}) of {next(v for v in values if v.kind in _REDUCED).kind.value} is used further"
            return self._function(kind, values, what) or self._mixed(what)
        same = all(value.degree == 0 and value.count is None for value in values)
        return Value(degree=0 if same else None, placed=any(value.placed for value in values))

    def _selected(self, at: _Equation) -> Value:  # noqa: PLR0911  (a case a line)
        """``select_n``: a condition, and what it chooses from."""
        condition, *cases = at.values
        if condition.kind == Relation.FUNCTION:
            counted = [k for k, value in enumerate(cases) if value.count is not None and not value.zero]
            if len(counted) == 1 and len(cases) == 2 and all(value.zero for k, value in enumerate(cases) if k not in counted):
                return self._scaled(cases[counted[0]], condition, "where" if counted[0] else "where not")
            what = "a condition on a sum over the examples decides"
            return self._function("select_n", (condition, *cases), what) or self._mixed(what)
        if condition.kind in _REDUCED:
            return self._mixed(f"a condition on {condition.kind.value} decides")
        indices = [value for value in cases if value.index]
        if condition.kind == Relation.SAME and indices and all(value.kind == Relation.SAME for value in cases):
            return indices[0]
        found = self._joined(cases, sums=False)
        if condition.kind == Relation.SAME and (condition.degree != 0 or condition.count is not None):
            return self._depending(condition, found)
        if condition.kind == Relation.SAME and not condition.placed:
            return found
        if found.kind in _REDUCED:
            return self._mixed(_INTO_ROWS)
        if found.kind == Relation.MIXED:
            return found
        if Relation.ROWS in (condition.kind, found.kind):
            return self._rows((condition, found), found.degree, found.count)
        return replace(found, placed=found.placed or condition.placed)

    def _depending(self, condition: Value, value: Value) -> Value:
        """What is one or another, as a condition says that is not a matter of each example alone."""
        if condition.kind == Relation.SAME and condition.degree == 0 and condition.count is None:
            return value
        if Relation.MIXED in (condition.kind, value.kind):
            return condition if condition.kind == Relation.MIXED else value
        if condition.kind == Relation.SAME and value.kind == Relation.SAME:
            return Value(degree=None, placed=value.placed)
        if condition.kind == Relation.ROWS:
            return self._applied("cond", [condition, value])
        what = "the number of examples" if condition.kind == Relation.SAME else condition.kind.value
        return self._mixed(f"a condition on {what} decides")

    # ------------------------------------------------------------------------------------------------------- the kinds of equations

    def plain(self, eqn: _Equation, values: list[Value]) -> list[Value]:
        """What the rule of an equation says of all its results, or of each."""
        if only_names(eqn.eqn):
            return values
        if eqn.kind not in _EACH_ITS_OWN and (mixed := _first_mixed(values)) is not None:
            return [mixed] * len(eqn.outs)
        rule = _RULES.get(eqn.kind, _APPLIED if eqn.kind.startswith("random_") else None)
        found = [self._unknown(eqn, out) for out in eqn.outs] if rule is None else rule(self, eqn) if eqn.outs else []
        return found if isinstance(found, list) else [found] * len(eqn.outs)

    def _unknown(self, at: _Equation, out: _Operand) -> Value:
        if all(value.kind == Relation.SAME for value in at.values):
            placed = any(value.placed for value in at.values) or (bool(out.axes) and not any(o.axes for o in at.operands))
            return Value(degree=0 if all(value.degree == 0 for value in at.values) else None, placed=placed)
        if at.kind.startswith("dot_product_attention"):  # the kernels of cuDNN: examples lie along the first axis
            return self._unless(any(axis for o in at.operands for axis in o.axes), at.values, "examples attend to each other")
        return self._mixed(f"jaxpp does not know what {at.kind} does with the examples, and it may mix them")

    def _random(self, at: _Equation) -> Value:
        drawn = any(value.drawn for value in at.values)
        return self._applied(at.kind, [replace(value, placed=value.placed and not drawn) for value in at.values])

    def _product(self, at: _Equation) -> Value:
        if at.kind == "div" and _whole(at.out.atom) and any(value.kind in _REDUCED for value in at.values):
            return self._unknown(at, at.out)
        return self._multiplied(at.values, divided=at.kind == "div")

    def _matrix(self, at: _Equation) -> Value:
        rank = len(at.out.shape)
        free = rank - (1 if _param(at.eqn, "left_side") else 2) if at.kind == "triangular_solve" else None  # right-hand sides
        inside = any(axis >= len(o.shape) - 2 and (o is at.operands[0] or axis != free) for o in at.operands for axis in o.axes)
        return self._unless(inside, at.values, "the examples are rows or columns of one matrix")

    def _window(self, at: _Equation) -> Value:
        window = _param(at.eqn, "window_dimensions")
        return self._unless(any(window[axis] != 1 for axis in at.operands[0].axes), at.values, "a window moves along the examples")

    def _unless(self, mixes: bool, values: Sequence[Value], what: str) -> Value:
        if mixes and any(value.kind == Relation.ROWS for value in values):
            return self._mixed(what)
        return self._applied("", values)

    def _passed(self, at: _Equation) -> Value:
        if not at.operands:
            return self._unknown(at, at.out)
        kind, operand, out, value = at.kind, at.operands[0], at.out, at.values[0]
        if kind == "convert_element_type" and value.kind == Relation.TOTAL and _whole(out.atom) and not _whole(operand.atom):
            return self._applied(kind, [value])
        if kind == "neg":
            turned = {Relation.LARGEST: Relation.SMALLEST, Relation.SMALLEST: Relation.LARGEST}
            if value.kind == Relation.FUNCTION:
                return self._function(kind, [value])  # type: ignore[return-value]
            return replace(value, kind=turned.get(value.kind, value.kind), total=None, index=False)
        if value.kind == Relation.ROWS and kind in ("broadcast_in_dim", "reshape"):
            if kind == "broadcast_in_dim" and len(out.axes) > len(operand.axes):
                return self._mixed("examples are compared with each other")
            return self._reshaped(operand, out) if kind == "reshape" else value
        if value.kind == Relation.SAME and kind == "broadcast_in_dim" and len(out.axes) > len(operand.axes):
            return replace(value, index=False)
        return replace(value, index=value.index and kind not in ("real", "imag", "conj"))

    def _reshaped(self, operand: _Operand, out: _Operand) -> Value:
        value = operand.value
        if not operand.axes or math.prod(operand.shape) == 0:
            return value
        if len(out.axes) != 1:
            return self._mixed("a reshape puts rows of different examples together")
        before, after = operand.axes[0], out.axes[0]
        blocks = Fraction(math.prod(operand.shape[:before]) * value.blocks, math.prod(out.shape[:after]))
        if blocks.denominator != 1 or blocks < 1 or out.shape[after] % int(blocks):
            return self._mixed("a reshape puts rows of different examples together")
        return replace(value, blocks=int(blocks))

    def _reduced(self, at: _Equation) -> Value:  # noqa: PLR0911  (a case a line)
        kind, operand, value = at.kind, at.operands[0], at.values[0]
        axes = at.eqn.params.get("axes", ())
        over = [axis for axis in operand.axes if axis in axes]
        if not over:
            if value.kind in _REDUCED and kind != "reduce_sum":
                return value if _LARGEST.get(kind) == value.kind else self._applied(kind, [value])
            if kind == "reduce_sum":
                known = value.kind in (Relation.SAME, Relation.ROWS, Relation.TOTAL)
                return replace(value, total=None, index=False) if known else self._mixed(f"the sum of {value.kind.value} is used")
            return self._applied(kind, [value])
        if value.kind == Relation.SAME:
            if value.placed or kind != "reduce_sum":
                same = not value.placed and kind in _LARGEST
                return replace(value, index=False) if same else Value(degree=None)
            return replace(value, degree=None if value.degree is None else value.degree + len(over), zero=value.zero)
        if value.kind == Relation.TOTAL and kind == "reduce_sum":
            return replace(value, degree=None if value.degree is None else value.degree + len(over), total=None)
        if value.kind != Relation.ROWS:
            return self._applied(kind, [value])
        if kind == "reduce_sum":
            return Value(Relation.TOTAL, value.degree, value.count, placed=value.placed, mixing=value.mixing)
        if kind in _LARGEST and value.degree == 0 and value.count is None and not value.placed:
            return Value(_LARGEST[kind])
        return self._mixed(f"the examples are searched or multiplied ({kind})")

    def _along(self, at: _Equation) -> Value:
        kind, eqn, params, rank = at.kind, at.eqn, at.eqn.params, len(at.operands[0].shape)
        if kind == "rev":
            axes = set(_param(eqn, "dimensions"))
        elif kind == "fft":
            axes = set(range(rank - len(_param(eqn, "fft_lengths")), rank))
        elif kind in ALONG:
            axes = {_param(eqn, ALONG[kind])}
        else:
            axes = {params.get("axis", params.get("reduction_dimension", rank - 1)) % rank}
        along = any(axes.intersection(operand.axes) for operand in at.operands)
        if along and all(value.kind == Relation.SAME for value in at.values):
            return Value(degree=None if kind.startswith("cum") else 0, placed=True)
        return self._unless(along, at.values, f"the examples are put in another order, or added up one after the other ({kind})")

    def _iota(self, at: _Equation) -> Value:
        placed = _param(at.eqn, "dimension") in at.out.axes
        axes, shape = at.out.axes, at.out.shape
        return Value(placed=placed, index=placed and len(axes) == 1 and math.prod(shape) == shape[axes[0]])

    def _concatenate(self, at: _Equation) -> Value:
        axis, values = _param(at.eqn, "dimension"), at.values
        if all(value.kind == Relation.SAME for value in values):
            return replace(self._joined(values, sums=False), zero=all(value.zero for value in values))
        along = [operand for operand in at.operands if axis in operand.axes]
        if not along:
            return self._joined(values, sums=False)
        inner = {Fraction(o.shape[axis], o.value.blocks) for o in along}
        rows = [value for value in values if value.kind == Relation.ROWS]
        if (
            len(along) < len(at.operands)
            or len(inner) > 1
            or len(rows) < len(values)
            or len({(v.degree, v.count) for v in rows}) > 1
        ):
            return self._mixed("rows of examples are put beside other rows")
        placed = next((value for value in rows if value.placed), rows[0])
        return replace(placed, blocks=sum(o.value.blocks for o in along))

    def _split(self, at: _Equation) -> Value | list[Value]:
        operand, outs = at.operands[0], at.outs
        if not operand.axes:
            return self._joined(at.values, sums=False)
        axis, value = _param(at.eqn, "axis"), operand.value
        if value.kind != Relation.ROWS or axis not in operand.axes:
            return [replace(value, placed=value.placed, index=False)] * len(outs)
        inner = Fraction(operand.shape[axis], value.blocks)
        parts = [Fraction(out.shape[axis]) / inner if len(out.shape) > axis else Fraction(0) for out in outs]
        if all(part.denominator == 1 and part for part in parts):
            return [replace(value, blocks=int(part)) for part in parts]
        return [self._mixed("some of the examples are taken by their places")] * len(outs)

    def _slice(self, at: _Equation) -> Value:
        operand, value = at.operands[0], at.operands[0].value
        if value.kind == Relation.SAME:
            placed = value.placed or (bool(at.out.axes) and not operand.axes)
            return replace(value, placed=placed, index=value.index and at.out.shape == operand.shape)
        if value.kind != Relation.ROWS or not operand.axes:
            return value
        axis = operand.axes[0]
        inner = Fraction(operand.shape[axis], value.blocks)
        start, size, strides = _param(at.eqn, "start_indices")[axis], at.out.shape[axis], _param(at.eqn, "strides")
        if size == operand.shape[axis] and operand.axes == at.out.axes:
            return value
        whole = (start / inner).denominator == 1 and (size / inner).denominator == 1 and size and at.out.axes
        proportional = whole and _param(at.other, "start_indices")[axis] * self.sizes.first == start * self.sizes.second
        if not proportional or (strides and strides[axis] != 1):
            return self._mixed("some of the examples are taken by their places")
        return replace(value, blocks=int(size / inner))

    def _dynamic_slice(self, at: _Equation) -> Value:
        operand, indices = at.operands[0], [o.value for o in at.operands[1:]]
        if operand.value.kind == Relation.ROWS and len(operand.axes) == operand.value.blocks == 1 and not at.out.axes:
            axis, others = operand.axes[0], [index for k, index in enumerate(indices) if k not in operand.axes]
            turns = operand.shape[axis], operand.other[axis]
            if indices[axis].index and turns == self._turns and all((i.kind, i.degree) == (Relation.SAME, 0) for i in others):
                return operand.value  # the example of a turn of the loop
        if operand.value.kind == Relation.ROWS and at.out.axes != operand.axes:
            return self._mixed("some of the examples are taken by their places")
        if any(value.kind == Relation.SAME and (value.degree != 0 or value.count is not None) for value in indices):
            return self._depending(Value(degree=None), operand.value)
        if all(value.kind == Relation.SAME for value in (operand.value, *indices)):
            return replace(operand.value, placed=operand.value.placed or (bool(at.out.axes) and not operand.axes), index=False)
        if operand.value.kind in _REDUCED:
            same = all(value.kind == Relation.SAME for value in indices)
            return operand.value if same else self._applied("dynamic_slice", indices)
        return self._rows_of(operand.value, indices)

    def _rows_of(self, value: Value, indices: Sequence[Value]) -> Value:
        bad = [index for index in indices if index.kind not in (Relation.SAME, Relation.ROWS)]
        if bad:
            return self._applied("index", bad)
        if value.kind == Relation.SAME and any(index.kind == Relation.ROWS for index in indices):
            return replace(self._applied("index", [replace(value, placed=False), *indices]), blocks=max(i.blocks for i in indices))
        return replace(value, index=False)

    def _dynamic_update_slice(self, at: _Equation) -> Value:
        operand, update = at.operands[:2]
        if operand.axes and update.axes != operand.axes and Relation.ROWS in (operand.value.kind, update.value.kind):
            return self._mixed("some of the examples are replaced by their places")
        indices = [o.value for o in at.operands[2:]]
        return self._rows_of(self._joined([operand.value, update.value], sums=False), indices)

    def _gather(self, at: _Equation) -> Value:
        (operand, indices), named = at.operands[:2], _param(at.eqn, "dimension_numbers")
        value, index = operand.value, indices.value
        if index.kind == Relation.SAME and index.degree != 0 and not index.index:
            return self._depending(index, value)
        if value.kind == Relation.SAME and index.kind == Relation.SAME:
            return replace(value, placed=bool(at.out.axes) and (value.placed or index.placed or not indices.axes), index=False)
        if value.kind == Relation.SAME or index.kind in _REDUCED:
            return self._rows_of(value, [index])
        if value.kind in _REDUCED:
            return value if index.kind == Relation.SAME else self._mixed(_INTO_ROWS)
        if not operand.axes:
            return self._rows_of(value, [index])
        axis = operand.axes[0]
        if axis in named.operand_batching_dims:
            return value if indices.axes else self._mixed("some of the examples are taken by an index")
        if axis in named.start_index_map and _param(at.eqn, "slice_sizes")[axis] != operand.shape[axis]:
            taken = self._numbers(indices, named.start_index_map.index(axis))
            return value if taken else self._mixed("examples are taken by an index")
        return value if not indices.axes else self._mixed("examples are compared with each other")

    def _numbers(self, indices: _Operand, column: int) -> bool:
        """Whether a column of the indices counts the examples."""
        if not isinstance(indices.atom, Var):
            return False
        made = self._made.get(indices.atom)
        if made is not None and (parts := columns_of(made.eqn)):
            return self.read((parts[column], columns_of(made.other)[column])).index
        return indices.value.index

    def _scattered(self, at: _Equation) -> Value:
        (operand, indices, update), named = at.operands[:3], _param(at.eqn, "dimension_numbers")
        values = [operand.value, indices.value, update.value]
        if indices.value.kind in _REDUCED:
            return self._mixed("an index is computed of all examples")
        in_place = False  # whether each example writes at its own place
        if operand.axes:
            axis, columns = operand.axes[0], named.scatter_dims_to_operand_dims
            numbered = axis in columns and self._numbers(indices, columns.index(axis))
            window = axis not in named.inserted_window_dims and axis not in columns and not indices.axes and bool(update.axes)
            in_place = axis in named.operand_batching_dims or numbered or window
        if all(value.kind == Relation.SAME for value in values):
            placed = bool(operand.axes) and (operand.value.placed or update.value.placed or not in_place)
            return Value(degree=0 if all(value.degree == 0 for value in values) else None, placed=placed)
        if operand.axes:
            if in_place:
                return self._rows_of(self._joined([operand.value, update.value], sums=True), [replace(indices.value, placed=False)])
            return self._mixed("rows of examples are put at other places")
        if not (update.axes or indices.axes):
            return self._rows_of(self._joined([operand.value, update.value], sums=True), [indices.value])
        if kind_of(at.eqn) != "scatter-add" or update.value.kind in _REDUCED:
            return self._mixed("examples are written over one another")
        total = Value(Relation.TOTAL, update.value.degree, update.value.count)
        return self._joined([operand.value, total], sums=True)

    def _dot_general(self, at: _Equation) -> Value:
        (left, right), (contracted, batched) = at.operands[:2], _param(at.eqn, "dimension_numbers")
        values = left.value, right.value
        over = [(a, b) for a, b in zip(*contracted, strict=True) if a in left.axes or b in right.axes]
        together = any(a in left.axes for a in batched[0])
        if over:
            if all(value.kind == Relation.SAME for value in values):
                product = self._multiplied(values)
                placed = product.placed or product.degree is None
                return Value(degree=None if placed else product.degree + 1, count=product.count)  # type: ignore[operator]
            product = self._multiplied(values)
            if product.kind == Relation.TOTAL:
                return replace(product, degree=None if product.degree is None else product.degree + 1)
            if product.kind != Relation.ROWS:
                return product
            return Value(Relation.TOTAL, product.degree, product.count, placed=product.placed, mixing=product.mixing)
        if left.axes and right.axes and not together and any(value.kind == Relation.ROWS for value in values):
            return self._mixed("examples are compared with each other")
        return self._multiplied(values)

    def _conv_general_dilated(self, at: _Equation) -> Value:
        image, kernel = at.operands[:2]
        along = _param(at.eqn, "dimension_numbers").lhs_spec[0]
        if image.axes not in ((), (along,)) or kernel.axes or at.eqn.params.get("batch_group_count", 1) != 1:
            return self._mixed("a convolution may mix examples")
        return self._multiplied([image.value, kernel.value])

    def _pad(self, at: _Equation) -> Value:
        operand, added = at.operands[0], (_param(at.eqn, "padding_config"), _param(at.other, "padding_config"))
        if operand.value.kind == Relation.ROWS and any(each[axis] != (0, 0, 0) for each in added for axis in operand.axes):
            return self._mixed("rows are added to those of the examples")
        return self._joined([operand.value, at.operands[1].value], sums=False)

    # ------------------------------------------------------------------------------------------------------- loops and branches

    def inner(self, eqn: _Equation) -> Inner | None:
        """The functions inside an equation: of each a pair, as it is at both sizes."""
        first, second = (inner_of(each, self.enters) for each in (eqn.eqn, eqn.other))
        if first is None or second is None:
            return None
        if isinstance(first, Cond) and isinstance(second, Cond):
            return first._replace(branches=_together(first.branches, second.branches, "branches"))
        pairs = zip(first._fields, first, second, strict=True)
        return first._replace(**{name: (a, b) for name, a, b in pairs if isinstance(a, (Jaxpr, ClosedJaxpr))})

    def opened(self, body: tuple[ClosedJaxpr, ClosedJaxpr]) -> Body:
        """What a function consists of; the arrays that it closed over are looked at where they are read."""
        for closed, constants in zip(body, self._constants, strict=True):
            constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        first, second = (closed.jaxpr for closed in body)
        inputs, outputs = _together(first.invars, second.invars, "arguments"), _together(first.outvars, second.outvars, "results")
        return Body(inputs, outputs, [_Equation(a, b) for a, b in _together(first.eqns, second.eqns, "equations")])

    def call(
        self,
        body: tuple[ClosedJaxpr, ClosedJaxpr],
        values: Sequence[Value],
        *,
        shards: frozenset[str] | None = None,
        turns: tuple[int, int] | None = None,
    ) -> list[Value]:
        """What a function that is called returns; ``shards`` are the axes of a ``shard_map``, ``turns`` those of a loop."""
        around = self._turns, self._shards
        self._turns, self._shards = turns or self._turns, self._shards if shards is None else shards
        results = super().call(body, [replace(value, total=None, at=None) for value in values])
        self._turns, self._shards = around
        return results

    def _map(self, at: _Equation) -> list[Value]:
        """A ``jax.shard_map``: what it does to the examples of each shard, it does to all."""
        mapped, second = shard_map_of(at.eqn), shard_map_of(at.other)
        if mapped is None or second is None:
            raise _Foreign
        pairs = zip(mapped.specs, (*at.operands, *at.outs), strict=True)
        entries = [spec[axis] for spec, each in pairs for axis in each.axes if axis < len(spec)]
        divided = {name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))}
        shards = self._shards | mapped.manual.difference(divided)
        return self.call((ClosedJaxpr(mapped.body, []), ClosedJaxpr(second.body, [])), at.values, shards=shards)

    def _between_shards(self, at: _Equation) -> Value | list[Value]:
        """A collective that leaves each example where it is."""
        eqn, operands = at.eqn, at.operands
        if not self._shards.issuperset(named_axes(eqn)):
            return self._unknown(at, at.out)
        if at.kind in ("pmax", "pmin"):
            return [self._applied(at.kind, [value]) for value in at.values]
        if not operands:  # the number of a shard
            return [Value()]
        names = "all_gather_dimension", "split_axis", "concat_axis", "scatter_dimension"
        moved = {eqn.params[name] for name in names if name in eqn.params}
        return [
            self._mixed("a collective moves examples from shard to shard")
            if o.value.kind == Relation.ROWS and not moved.isdisjoint(o.axes)
            else replace(o.value, index=False, zero=False)
            for o in operands
        ]

    def either(self, a: Value, b: Value) -> Value:
        """What is one or the other."""
        if a == b or (b.zero and a.kind != Relation.SAME):
            return a
        if Relation.MIXED in (a.kind, b.kind):
            return a if a.kind == Relation.MIXED else b
        return self._joined([a, b], sums=False) if not a.zero else replace(b, zero=False)

    def unsettled(self, value: Value) -> Value:
        """What a loop carries that is something else in each iteration."""
        return value if value.kind == Relation.SAME else self._mixed("a loop carries examples in a way of its own")

    def decided(self, eqn: _Equation, condition: Value, values: list[Value]) -> list[Value]:
        """What a branch returns, or a loop carries."""
        loop = inner_of(eqn.eqn, {"while"})
        if isinstance(loop, While) and condition.kind in (Relation.LARGEST, Relation.SMALLEST) and _stops_each(loop):
            return values  # as of jax.vmap: an example for which the loop is over stays as it is
        return [self._depending(condition, value) for value in values]

    def scanned(self, eqn: _Equation, loop: Scan, values: list[Value]) -> Sequence[Value]:
        """What a loop carries and makes: over examples, where it has other turns at the second size."""
        turns = loop.length, length_of(eqn.other) or 0
        if turns[0] == turns[1]:
            return super().scanned(eqn, loop, values)
        bodies: Function = loop.body
        fixed, carry, rest = loop.split(values)
        body = bodies[0].jaxpr
        sums = {k for k in _sums(body, loop.num_fixed) if k < loop.num_carry}
        kept = {k for k in range(loop.num_carry) if body.outvars[k] is body.invars[loop.num_fixed + k]}
        fixed = [replace(value, index=False) for value in fixed]  # of the turns of a loop around this one
        varying = Value(degree=None, placed=True)  # from iteration to iteration
        inside = [Value(zero=True) if k in sums and old.kind == Relation.SAME else old for k, old in enumerate(carry)]
        after = self.call(bodies, [*fixed, *inside, *rest])
        pairs = list(zip(inside, after[: loop.num_carry], strict=True))
        changing = [k not in kept | sums and old.kind == new.kind == Relation.SAME for k, (old, new) in enumerate(pairs)]
        if any(changing):
            numbers = _counters(body, loop.num_fixed)
            varied = [replace(varying, index=old.zero and k in numbers) for k, old in enumerate(inside)]
            inside = [new if each else old for each, old, new in zip(changing, inside, varied, strict=True)]
            after = self.call(bodies, [*fixed, *inside, *rest], turns=turns)
        final = []
        for k, (old, new) in enumerate(zip(carry, after[: loop.num_carry], strict=True)):
            if k in kept or new.kind == Relation.MIXED:
                final.append(old if k in kept else new)
            elif k in sums and new.kind in (Relation.ROWS, Relation.SAME) and old.kind in (Relation.SAME, Relation.TOTAL):
                one = new.kind == Relation.SAME
                degree = None if new.degree is None or (one and new.placed) else new.degree + one
                total = Value(Relation.SAME if one else Relation.TOTAL, degree, new.count, placed=new.placed and not one)
                final.append(self._joined([old, replace(total, mixing=new.mixing)], sums=True))
            elif new.kind == Relation.SAME and old.kind == Relation.SAME:
                final.append(Value(degree=None))
            else:
                final.append(self._mixed("a loop over the examples carries something from one to the next"))
        inside = [
            old if k in kept or k in sums or old.index else varying if value.kind == Relation.SAME else value
            for k, (old, value) in enumerate(zip(inside, final, strict=True))
        ]
        return [*final, *self.call(bodies, [*fixed, *inside, *rest], turns=turns)[loop.num_carry :]]


_Rule = Callable[[_Follower, _Equation], Value | list[Value]]
_APPLIED: _Rule = lambda self, at: self._applied(at.kind, at.values)  # noqa: E731
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_OF_EACH, _APPLIED),
    **dict.fromkeys(("stack", "tile"), lambda self, at: self._joined(at.values, sums=False)),
    **dict.fromkeys(_WINDOWS, _Follower._window),
    **dict.fromkeys(MATRIX, _Follower._matrix),
    **dict.fromkeys((*ALONG, "top_k", "approx_top_k", "rev", "fft", "argsort"), _Follower._along),
    **dict.fromkeys(REDUCTIONS, _Follower._reduced),
    **dict.fromkeys(_LINEAR | _PASSES, _Follower._passed),
    **dict.fromkeys(_ADDS, lambda self, at: self._joined(at.values, sums=True)),
    **dict.fromkeys(("mul", "div"), _Follower._product),
    **dict.fromkeys(_RANDOM, _Follower._random),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"), _Follower._scattered),
    **dict.fromkeys(("split", "unstack"), _Follower._split),
    **dict.fromkeys(_BETWEEN_SHARDS, _Follower._between_shards),
    "select_n": _Follower._selected,
    "iota": _Follower._iota,
    "concatenate": _Follower._concatenate,
    "slice": _Follower._slice,
    "dynamic_slice": _Follower._dynamic_slice,
    "dynamic_update_slice": _Follower._dynamic_update_slice,
    "gather": _Follower._gather,
    "dot_general": _Follower._dot_general,
    "conv_general_dilated": _Follower._conv_general_dilated,
    "pad": _Follower._pad,
    "optimization_barrier": lambda _, at: list(at.values),
    "scan": _APPLIED,  # one that closes over arrays
    "shard_map": _Follower._map,
}


def _carried(body: Jaxpr, first: int) -> list[tuple[Var, Atom, JaxprEqn | None]]:
    """Of each value that a loop carries, from the argument ``first`` on: what it was, what it becomes, and what makes it so."""
    made = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    pairs = zip(body.invars[first:], body.outvars, strict=False)
    return [(old, new, made.get(new) if isinstance(new, Var) else None) for old, new in pairs]


def _stops_each(loop: While) -> bool:
    """Whether a loop's body leaves each value that it carries as it is where a condition says so."""
    chosen = [(old, eqn) for old, new, eqn in _carried(loop.body.jaxpr, loop.num_fixed) if new is not old]
    return all(eqn is not None and kind_of(eqn) == "select_n" and old in eqn.invars[1:] for old, eqn in chosen)


def _counters(body: Jaxpr, first: int) -> set[int]:
    """Which of the values that a loop carries grow by one in each turn."""
    return {
        k
        for k, (old, _, eqn) in enumerate(_carried(body, first))
        if eqn is not None and kind_of(eqn) == "add" and eqn.invars[0] is old and number_in(eqn.invars[1]) == 1
    }


def _sums(body: Jaxpr, first: int) -> set[int]:
    """Which of the values that a loop carries are only added to."""
    sums = set[int]()
    for k, (old, new, eqn) in enumerate(_carried(body, first)):
        readers = [each for each in body.eqns if old in each.invars]
        while len(readers) == 1 and kind_of(readers[0]) == "convert_element_type":
            readers = [each for each in body.eqns if readers[0].outvars[0] in each.invars]
        read = body.outvars.count(old) > 0 or body.outvars.count(new) > 1 or any(new in each.invars for each in body.eqns)
        if eqn is not None and kind_of(eqn) in ("add", "add_any") and readers == [eqn] and not read:
            sums.add(k)
    return sums


KNOWN = _Follower.enters.union(_RULES, _UNIFORM)
"""The primitives whose equations are followed."""


def _whole(atom: Atom) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.integer) or aval_of(atom).dtype == bool


class Verdict(NamedTuple):
    """What the mean over microbatches of a loss is to the loss of the whole batch."""

    what: str  # "mean": the same; "sum": the loss is a sum; "count": the same with the weight ``divisor``; "mixed": something else
    mixing: Mixing | None = None
    divisor: Count | None = None
    degree: int = 0  # of a sum with a count: it is the sum times so many powers of the number of examples
    shared: bool = False  # whether the weights must add up to 1, because something that is no such sum is added


def judge(loss: TracedLoss, value: Value) -> Verdict:
    """What the value of a loss says of its mean over microbatches."""
    if value.kind in (Relation.MIXED, Relation.FUNCTION) or value.placed:
        return Verdict("mixed", value.mixing)
    if value.kind == Relation.SAME and value.degree == 0 and value.count is None:
        return Verdict("mean")
    if value.kind == Relation.TOTAL:
        if value.count is None and value.degree in (-1, 0):
            return Verdict("mean" if value.degree == -1 else "sum")
        if value.count is not None and value.degree is not None:
            return _by_count(loss, value, value.count, value.degree)
    what = value.kind.value if value.kind in (Relation.LARGEST, Relation.SMALLEST) else "it depends on the number of examples"
    return Verdict("mixed", Mixing(what, "", ""))


def _by_count(loss: TracedLoss, value: Value, count: Count, degree: int) -> Verdict:
    """What is said of a sum over the examples that is multiplied or divided by functions of another."""
    read = [] if count.var is None else [count.var, *(factor.var for factor in count.factors)]
    outside = {*loss.params, *loss.state, *(() if loss.key is None else (loss.key,))}
    if count.degree is None or not read or not ancestors(loss.graph, read).isdisjoint(outside):
        what = "a sum over the examples is divided by another one, which depends on more than the batch"
    elif any(math.prod(aval_of(var).shape) != 1 for var in read):
        what = "sums over the examples are divided by several others"
    elif not _from_count(loss.graph, count)[2].isdisjoint(loss.graph.inputs):
        what = "a sum over the examples is divided by what depends on more than a count of them"
    elif value.plus and not (degree == count.degree and is_reciprocal(loss.graph, count)):
        what = "a term is added to a sum over the examples that is divided by a count with a guard, which changes it"
    else:
        return Verdict("count", divisor=count, degree=degree, shared=value.plus)
    return Verdict("mixed", Mixing(what, "", ""))


def first_alike(graph: Graph) -> dict[Var, Var]:
    """Of each variable that an equation makes, the first that is computed in the same way."""
    known, first = dict[Var, Var](), dict[Hashable, Var]()
    for eqn in graph.eqns:
        plain = not eqn.effects and all(map(_is_plain, eqn.params.values()))
        reads = [(repr(a.val), str(a.aval)) if isinstance(a, Literal) else known.get(a, a) for a in eqn.invars] if plain else []
        for k, var in enumerate(eqn.outvars):
            known[var] = first.setdefault((eqn.primitive, *reads, repr(eqn.params), k), var) if plain else var
    return known


def _from_count(graph: Graph, count: Count) -> tuple[list[int], list[Var], set[Var]]:
    """The equations that make of a count what a sum is multiplied by, the variables that hold it, and what else they read."""
    known, outputs = first_alike(graph), {factor.var for factor in count.factors}
    counts = [var for var, first in known.items() if first is count.var]
    needed, eqns = outputs.difference(counts), list[int]()
    for i in reversed(range(len(graph.eqns))):
        if not needed.isdisjoint(graph.eqns[i].outvars):
            eqns.append(i)
            needed.update(set(variables(graph.eqns[i].invars)).difference(counts))
    return eqns[::-1], counts, needed


def factor_of(graph: Graph, count: Count) -> Callable[[jax.Array], jax.Array]:
    """What a sum over the examples is multiplied by, as a function of the count."""
    assert count.var is not None
    eqns, counts, _ = _from_count(graph, count)
    run = graph.function(eqns, [*counts, *graph.constants], [factor.var for factor in count.factors])
    shape, dtype = aval_of(count.var).shape, aval_of(count.var).dtype

    def factor(value: jax.Array) -> jax.Array:
        value = jnp.round(value) if jnp.issubdtype(dtype, jnp.integer) else value
        result = jnp.ones((), value.dtype)
        given = value.astype(dtype).reshape(shape)
        for found, each in zip(run(*[given] * len(counts), *graph.constants.values()), count.factors, strict=True):
            scalar = found.reshape(())
            kept = {"where": scalar, "where not": ~scalar}.get(each.how) if scalar.dtype == bool else None
            scaled = result / scalar if each.how == "/" else result * scalar
            result = scaled if kept is None else jnp.where(kept, result, 0)
        return result

    return factor


def is_reciprocal(graph: Graph, count: Count) -> bool:
    """Whether what a sum is multiplied by is 1 over the count, for whole counts from 1 on: no guard changes these."""
    if count.factors == (Factor(count.var, "/"),) or count.degree != 0:  # type: ignore[arg-type]
        return count.factors == (Factor(count.var, "/"),)  # type: ignore[arg-type]  (a share of the examples is no whole number)
    values = jnp.asarray([1.0, 2, 3, 5, 8, 100, 1000], float)
    factor, near = factor_of(graph, count), 4 * float(jnp.finfo(values.dtype).eps)
    return all(abs(float(factor(value)) * float(value) - 1) <= near for value in values)


def written(loss: TracedLoss, var: Var, leaves: Sequence[str]) -> str | None:
    """A count as a line of Python over the batch, whose leaves are written as ``leaves``; None where that would be long."""
    producers, names = loss.graph.producers(), dict(zip(loss.batch, leaves, strict=True))

    def text(atom: Atom, depth: int = 0) -> str | None:  # noqa: PLR0911  (a case a line)
        if isinstance(atom, Literal):
            number = number_in(atom)
            return None if number is None else f"{np.asarray(number).item()!r}"
        if atom in names:
            return names[atom]
        if depth > _DEPTH or atom not in producers:
            return None
        eqn = loss.graph.eqns[producers[atom]]
        kind, parts = kind_of(eqn), [text(operand, depth + 1) for operand in eqn.invars]
        if None in parts:
            return None
        if kind in _SIGNS:
            return f"({parts[0]} {_SIGNS[kind]} {parts[1]})"
        if kind == "reduce_sum":
            axes = eqn.params["axes"]
            whole = len(axes) == len(aval_of(eqn.invars[0]).shape)
            return f"{parts[0]}.sum({'' if whole else axes})"
        if kind == "not":
            return f"~{parts[0]}"
        if kind == "slice" and not eqn.params["strides"]:
            bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], aval_of(eqn.invars[0]).shape, strict=True)
            windows = [f"{start or ''}:" + ("" if stop == size else f"{stop - size}") for start, stop, size in bounds]
            return f"{parts[0]}[{', '.join(windows)}]"
        moves = ("convert_element_type", "broadcast_in_dim", "squeeze", "copy", "stop_gradient", "reshape")
        return parts[0] if kind in moves else None

    return text(var)


_DEPTH = 8
_SIGNS = dict(zip("eq ne lt le gt ge add sub mul and or".split(), "== != < <= > >= + - * & |".split(), strict=True))


class MicrobatchWarning(UserWarning):
    """What a step computes is not what the loss says of the whole batch, because the loss is no mean over the examples."""


_ALONE = "filter jaxpp.MicrobatchWarning if this is what you want"
_WHOLE = f"pass num_microbatches=1 for the loss of the whole batch, or {_ALONE}"
WHOLE_THERE = f"pass jaxpp.Microbatches([batch]), which is not split, or {_ALONE}"
"""The same of another loss than that of the pipeline."""


def advice(
    loss: TracedLoss,
    verdict: Verdict,
    num_microbatches: int,
    reduction: str,
    leaves: Sequence[str],
    *,
    automatic: bool,
    own: bool = True,
) -> str | None:
    """What to tell the user of a loss, ``leaves`` as its batch is written; None if the step is what the loss says.

    ``automatic``: it was to be weighed by its count; ``own``: it is that of the pipeline, and not another one to evaluate.
    """
    parts, gradients = f"over {num_microbatches} microbatches", "; so are the gradients" * own
    computed = f"loss_fn: {_step(own)} computes the {reduction} {parts} of the loss"
    if verdict.what == reduction:
        return None
    if verdict.what == "sum":
        got = f"a sum over the examples, of which that is 1/{num_microbatches}{gradients}"
        fix = 'pass reduction="sum", or return the mean'
        if not own:
            fix = 'return the mean, or the sum as aux, which is added over the microbatches: return loss, {"sum": sum}'
    elif verdict.what == "mean":
        got = f"a mean over the examples, of which that is {num_microbatches} times as much{gradients}"
        fix = "leave reduction out, or return the sum" if own else 'return the sum, or the mean as aux: return loss, {"mean": mean}'
    elif verdict.what == "count" and verdict.divisor is not None and verdict.divisor.var is not None:
        plain = verdict.divisor.degree == verdict.degree == 0 and is_reciprocal(loss.graph, verdict.divisor)
        line = written(loss, verdict.divisor.var, leaves) if plain else None
        got = "a sum over the examples divided by a count of them, which may be another in each microbatch"
        fix = 'pass weight="auto"' + (f", or weight=lambda batch: {line}" if line else "")
        if not own:
            both = f'{{"sum": sum, "count": {line or "count"}}}'
            fix = f"return both as aux, {both}, which are added over the microbatches, and divide "
            fix += 'metrics.aux["sum"] by metrics.aux["count"]'
    else:
        computed += ", and each microbatch knows its own examples only"
        got, fix = f"a loss that is no mean over the examples: {verdict.mixing}", _WHOLE if own else WHOLE_THERE
        if automatic:
            got += '; weight="auto" finds no count to weigh by, so microbatches weigh as many examples as they have'
    return f"{computed}.\n  Got: {got}.\n  Fix: {fix}."


def _step(own: bool) -> str:
    return "a step" if own else "an evaluation"


IMPURE = (
    "a loss is the same function each time JAX traces it: what it reads beside its arguments is a constant of the compiled programs"
)
PURE = "pass what changes (a counter, NumPy's random numbers, the time) in the batch, and draw random numbers with the key"


def impure(what: str) -> str:
    """What to tell the user of a loss that is another function each time it is traced."""
    return f"loss_fn: {IMPURE}.\n  Got: {what}.\n  Fix: {PURE}."


def unexamined(why: str, num_microbatches: int, reduction: str, *, own: bool = True) -> str:
    """What to tell the user of a loss of which nobody knows what it does with the examples."""
    rule = f"{_step(own)} computes the {reduction} over {num_microbatches} microbatches of the loss, and of its aux values"
    got = f"a loss that cannot be compared at batches of two sizes, so nobody knows whether that is the loss of the batch: {why}"
    return f"loss_fn: {rule}.\n  Got: {got}.\n  Fix: {_WHOLE if own else WHOLE_THERE}."
