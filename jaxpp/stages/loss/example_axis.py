"""What a traced function does with the axis of the examples: whether microbatches give what the whole batch gives.

A step is a mean over microbatches of the user's loss. For a mean over the examples that is the user's loss; for a sum, a masked
mean, a batch statistic or a contrastive product it is something else, and the user should hear of it. ``follow`` compares the
function traced at two batch sizes: an axis that grew is one along which the examples lie. With that it follows the equations, one
after the other, and says of each value whether it is the same for all examples, has rows that belong to examples, is a sum over
them, or mixes them. What it does not know counts as mixing, but only where the examples get there.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph, ancestors
from jaxpp.stages.jaxpr import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    Atom,
    aval_of,
    called,
    columns_of,
    kind_of,
    named_axes,
    number_in,
    scan_of,
    shard_map_of,
    user_line,
)
from jaxpp.stages.loss.traced_loss import TracedLoss


class Relation(enum.Enum):
    """What a value is to the examples."""

    SAME = "the same for all examples"
    ROWS = "one row for each example"
    TOTAL = "a sum over the examples"
    GUARDED = "a sum over the examples that is kept away from 0"
    TEST = "a comparison of a sum over the examples"
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


class Count(NamedTuple):
    """What a sum over the examples is divided by, another sum over them."""

    var: Var | None  # None where it is made inside a loop or a function with its own derivative
    degree: int | None  # it is the sum times so many powers of the number of examples


@dataclass(frozen=True)
class Value:
    """A value, as far as the examples are concerned."""

    kind: Relation = Relation.SAME
    degree: int | None = 0  # it grows with this power of the number of examples beside; None: in a way of its own
    count: Count | None = None
    blocks: int = 1  # of rows: how often the examples follow one another along their axis
    placed: bool = False  # differs from example to example by their places alone
    index: bool = False  # counts the examples: 0, 1, 2, ...
    zero: bool = False
    total: Var | None = None  # of a sum: the variable that holds it, without casts and guards
    mixing: Mixing | None = None  # of MIXED; of placed rows, where they meet their places


_REDUCED = frozenset({Relation.TOTAL, Relation.GUARDED, Relation.TEST, Relation.LARGEST, Relation.SMALLEST})

_LINEAR = frozenset("neg copy real imag conj reduce_precision stop_gradient sharding_constraint convert_element_type".split())
_PASSES = frozenset(
    "copy stop_gradient sharding_constraint convert_element_type squeeze expand_dims transpose reshape broadcast_in_dim".split()
)
_ADDS = frozenset("add sub add_any".split())
_COMPARES = frozenset("eq ne lt le gt ge".split())
_ELEMENTWISE = _COMPARES | frozenset(
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz complex "
    "cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor igamma igammac imag integer_pow is_finite lgamma log log1p "
    "logistic max min nextafter not or polygamma population_count pow random_clone random_fold_in random_unwrap "
    "random_wrap regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square tan tanh xor zeta".split()
)
_RANDOM = frozenset("random_bits random_seed random_split threefry2x32 random_gamma rng_bit_generator".split())
_ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis", "sort": "dimension"}
_REDUCES = frozenset("reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor argmax argmin".split())
_LARGEST = {
    "reduce_max": Relation.LARGEST,
    "reduce_or": Relation.LARGEST,
    "reduce_min": Relation.SMALLEST,
    "reduce_and": Relation.SMALLEST,
}
_MATRIX = frozenset(
    "cholesky triangular_solve lu qr eigh eig svd schur householder_product lu_pivots_to_permutation tridiagonal_solve".split()
)
_WINDOWS = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add".split()
)
_BETWEEN_SHARDS = frozenset(
    "psum psum_invariant ppermute pvary pcast all_gather all_gather_invariant all_to_all reduce_scatter".split()
)
_GUARD = 1e-3  # a number so small that added to a count it only keeps it away from 0


class _Different(Exception):  # noqa: N818  (never leaves this file)
    """The function traced at two sizes is not the same list of equations."""


class _Operand(NamedTuple):
    """What an equation reads or makes, at both sizes."""

    value: Value
    shape: tuple[int, ...]
    other: tuple[int, ...]
    atom: Atom

    @property
    def axes(self) -> tuple[int, ...]:
        return _grown(self.shape, self.other)


class _Equation(NamedTuple):
    """An equation with one result."""

    eqn: JaxprEqn
    other: JaxprEqn  # the same at the second size
    operands: list[_Operand]
    out: _Operand


def _grown(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The axes along which the examples lie."""
    if len(shape) != len(other):
        raise _Different
    return tuple(k for k, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b)


class Examples(NamedTuple):
    """What ``follow`` found of the outputs of a traced function."""

    loss: Value
    aux: tuple[Value, ...]
    axes: tuple[tuple[int, ...], ...]  # of each aux leaf, along which the examples lie

    @classmethod
    def by_shape(cls, loss: TracedLoss, size: int) -> "Examples":
        """What shapes alone say, for a model that takes one batch size only: arrays as long as the batch are rows, others means."""
        rows = [aval_of(atom).shape[:1] == (size,) for atom in loss.aux]
        kinds = tuple(Value(Relation.ROWS) if row else Value(Relation.TOTAL, degree=-1) for row in rows)
        return cls(Value(Relation.TOTAL, degree=-1), kinds, tuple((0,) if row else () for row in rows))


def follow(loss: TracedLoss, other: TracedLoss, sizes: tuple[int, int]) -> Examples | None:
    """What a function does with the examples, from its traces at batches of two sizes; None if these cannot be compared."""
    pairs = loss.graph, other.graph
    follower = _Follower(sizes, top=True)
    try:
        for a, b in zip(*(graph.inputs for graph in pairs), strict=True):
            rows = bool(_grown(aval_of(a).shape, aval_of(b).shape))
            follower.values[a] = Value(Relation.ROWS) if rows and a in loss.batch else Value()
        follower.constants({var: (value, found) for (var, value), found in zip(*(g.constants.items() for g in pairs), strict=True)})
        follower.run(*(graph.eqns for graph in pairs), names=loss.graph.names)
        outputs = [follower.read(a, b) for a, b in zip(*(graph.outputs for graph in pairs), strict=True)]
        axes = tuple(operand.axes for operand in outputs)
    except (_Different, ValueError):  # lists of different lengths
        return None
    count = len(loss.aux)
    return Examples(outputs[0].value, tuple(o.value for o in outputs[1 : 1 + count]), axes[1 : 1 + count])


class _Follower:
    """Follows a list of equations, at two sizes at once."""

    def __init__(self, sizes: tuple[int, int], top: bool = False):
        self.sizes, self._top = sizes, top
        self.values: dict[Var, Value] = {}
        self._made: dict[Var, tuple[JaxprEqn, JaxprEqn]] = {}
        self._name = ""
        self._eqn: JaxprEqn | None = None
        self._shards = frozenset[str]()  # axes over which a shard_map around it divides anything but the examples

    def constants(self, found: Mapping[Var, tuple[Any, Any]]) -> None:
        """Take the values of arrays that the function closed over."""
        for var, (a, b) in found.items():
            self.values[var] = self._constant(a, b)

    def _constant(self, a: Any, b: Any) -> Value:
        if np.shape(a) != np.shape(b):
            array = np.asarray(a)
            index = array.ndim == 1 and np.array_equal(array, np.arange(len(array)))
            return Value(placed=bool(array.size and (array != array.flat[0]).any()), index=index)
        if np.ndim(a) or jnp.issubdtype(jax.dtypes.result_type(a), jax.dtypes.extended):
            return Value()
        x, y = float(np.real(a)), float(np.real(b))
        if x == y or (math.isnan(x) and math.isnan(y)):
            return Value(zero=x == 0)
        ratio = self.sizes[1] / self.sizes[0]
        powers = [k for k in (1, -1, 2, -2) if x and math.isclose(y / x, ratio**k, rel_tol=1e-4)]
        return Value(degree=powers[0] if powers else None)

    def read(self, a: Atom, b: Atom) -> _Operand:
        """What is known of an atom."""
        if isinstance(a, Literal) != isinstance(b, Literal):
            raise _Different
        value = self._constant(a.val, b.val) if isinstance(a, Literal) else self.values.get(a, Value())  # type: ignore[union-attr]
        return _Operand(value, aval_of(a).shape, aval_of(b).shape, a)

    def run(self, eqns: Sequence[JaxprEqn], others: Sequence[JaxprEqn], names: Sequence[str] = ()) -> None:
        """Follow all equations."""
        for k, (eqn, other) in enumerate(zip(eqns, others, strict=True)):
            if eqn.primitive is not other.primitive:
                raise _Different
            self._name = names[k] if names else self._name
            self._eqn = eqn
            operands = [self.read(a, b) for a, b in zip(eqn.invars, other.invars, strict=True)]
            outs = [
                _Operand(Value(), aval_of(a).shape, aval_of(b).shape, a) for a, b in zip(eqn.outvars, other.outvars, strict=True)
            ]
            try:
                results = self._results(eqn, other, operands, outs)
            except (AttributeError, IndexError, KeyError, TypeError):  # another JAX's parameters: a warning stops no training
                results = [self._unknown(kind_of(eqn), operands, out) for out in outs]
            for out, value in zip(outs, results, strict=True):
                self.values[out.atom] = self._tidied(eqn, out, value)  # type: ignore[index]
                self._made[out.atom] = eqn, other  # type: ignore[index]

    def _tidied(self, eqn: JaxprEqn, out: _Operand, value: Value) -> Value:
        if value.kind == Relation.ROWS and len(out.axes) > 1:
            return self._mixed("examples are compared with each other")
        if value.kind == Relation.TOTAL and value.total is None and value.count is None and self._top:
            return replace(value, total=eqn.outvars[0])
        return value

    def _mixed(self, what: str) -> Value:
        return Value(Relation.MIXED, mixing=Mixing(what, self._name, user_line(self._eqn) if self._eqn else ""))

    # ------------------------------------------------------------------------------------------------ how values are combined

    def _joined(self, values: Sequence[Value], *, sums: bool) -> Value:  # noqa: PLR0911  (a case a line)
        """Values added (``sums``), or put side by side."""
        mixed = [value for value in values if value.kind == Relation.MIXED]
        if mixed:
            return mixed[0]
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
                return self._mixed("what is computed of all examples goes into the row of each")
            if len(scales) > 1:
                return self._mixed("what depends on the number of examples is added to what does not")
            return self._rows(values, *(*scales,)[0])
        if kinds - {Relation.TOTAL, Relation.SAME}:
            return self._mixed("the largest or the smallest of the examples is combined with something else")
        scales = {(value.degree, value.count) for value in values if value.kind == Relation.TOTAL}
        if len(scales) > 1:
            return self._mixed("means over different counts are added")
        degree, count = (*scales,)[0]
        rest = [value for value in values if value.kind == Relation.SAME]
        if any((value.degree, value.count) != (0, None) for value in rest) or (rest and degree != (-1 if count is None else 0)):
            small = [v for v in rest if v.degree == 0]
            if len(small) != len(rest) or count is not None:
                return self._mixed("what depends on the number of examples is added to a sum over them")
            return self._mixed("a sum over the examples is added to a term that is none")
        placed = next((value for value in values if value.placed), Value())
        return Value(Relation.TOTAL, degree, count, placed=placed.placed, mixing=placed.mixing)

    def _rows(self, values: Sequence[Value], degree: int | None, count: Count | None) -> Value:
        rows = [value for value in values if value.kind == Relation.ROWS]
        if len({value.blocks for value in rows}) > 1:
            return self._mixed("rows of different examples are combined")
        placed = next((value for value in values if value.placed), None)
        mixing = None
        if placed is not None:
            mixing = placed.mixing or self._mixed("what is computed of an example depends on its place in the batch").mixing
        return Value(Relation.ROWS, degree, count, rows[0].blocks, placed=placed is not None, mixing=mixing)

    def _multiplied(self, values: Sequence[Value], *, divided: bool = False) -> Value:  # noqa: PLR0911, C901  (a case a line)
        mixed = [value for value in values if value.kind == Relation.MIXED]
        if mixed:
            return mixed[0]
        a, b = values
        if a.zero:
            return a
        if divided:
            if (
                b.kind in (Relation.TOTAL, Relation.GUARDED)
                and b.count is None
                and a.count is None
                and a.kind in (Relation.SAME, Relation.ROWS, Relation.TOTAL)
            ):
                degree = None if a.degree is None or b.degree is None else a.degree - b.degree
                return replace(a, degree=degree, count=Count(b.total, b.degree), total=None, index=False, zero=False)
            if b.count is not None:
                return self._mixed("a value is divided by a mean over the examples")
            b = replace(b, degree=None if b.degree is None else -b.degree)
        elif b.zero:
            return b
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
                return self._mixed("what is computed of all examples goes into the row of each")
            return self._rows((a, b), degree, count)
        if reduced:
            return Value(Relation.TOTAL, degree, count, placed=reduced[0].placed, mixing=reduced[0].mixing)
        return Value(degree=degree, count=count, placed=a.placed or b.placed)

    def _applied(self, kind: str, values: Sequence[Value]) -> Value:
        """A function of values that is not linear."""
        mixed = [value for value in values if value.kind == Relation.MIXED]
        if mixed:
            return mixed[0]
        kinds = {value.kind for value in values}
        reduced = kinds & _REDUCED
        if Relation.ROWS in kinds:
            if reduced:
                return self._mixed("what is computed of all examples goes into the row of each")
            if any(value.kind == Relation.ROWS and (value.degree or value.count) for value in values) or any(
                v.degree is None for v in values
            ):
                if any(value.count for value in values):
                    return self._mixed("what is computed of all examples goes into the row of each")
                return self._mixed("what is computed of an example depends on the number of examples")
            return self._rows(values, 0, None)
        if reduced:
            if kind in _COMPARES | {"and", "or", "not", "is_finite"}:
                return Value(Relation.TEST)
            return self._mixed(f"a function ({kind}) of {next(v for v in values if v.kind in _REDUCED).kind.value} is used further")
        same = all(value.degree == 0 and value.count is None for value in values)
        return Value(degree=0 if same else None, placed=any(value.placed for value in values))

    def _guarded(self, values: Sequence[Value], operands: Sequence[_Operand]) -> Value | None:
        """A count that is kept away from 0, if these are a count and numbers."""
        totals = [value for value in values if value.kind in (Relation.TOTAL, Relation.GUARDED)]
        others = [o for o in operands if o.value.kind == Relation.SAME and o.value.degree == 0]
        if len(totals) == 1 and len(totals) + len(others) == len(operands) and totals[0].count is None and not totals[0].placed:
            return replace(totals[0], kind=Relation.GUARDED)
        return None

    def _chosen(self, operands: Sequence[_Operand]) -> Value:  # noqa: PLR0911  (a case a line)
        """``select_n``: a condition, and what it chooses from."""
        condition, *cases = (operand.value for operand in operands)
        if condition.kind == Relation.MIXED:
            return condition
        if condition.kind == Relation.TEST:
            totals = [value for value in cases if value.kind == Relation.TOTAL and value.count is not None]
            if len(totals) == 1 and all(value.zero or value is totals[0] for value in cases):
                return totals[0]
            return self._guarded(cases, operands[1:]) or self._mixed("a condition on a sum over the examples decides")
        if condition.kind in _REDUCED:
            return self._mixed(f"a condition on {condition.kind.value} decides")
        indices = [value for value in cases if value.index]
        if condition.kind == Relation.SAME and indices and all(value.kind == Relation.SAME for value in cases):
            return indices[0]
        if condition.kind == Relation.SAME and not condition.placed:
            return self._joined(cases, sums=False)
        found = self._joined(cases, sums=False)
        if found.kind in _REDUCED:
            return self._mixed("what is computed of all examples goes into the row of each")
        if found.kind == Relation.MIXED:
            return found
        return self._rows((condition, found), found.degree, found.count) if Relation.ROWS in (condition.kind, found.kind) else found

    # ------------------------------------------------------------------------------------------------------- the kinds of equations

    def _results(self, eqn: JaxprEqn, other: JaxprEqn, operands: list[_Operand], outs: list[_Operand]) -> list[Value]:  # noqa: PLR0911  (a case a line)
        kind, values = kind_of(eqn), [operand.value for operand in operands]
        inner = called(eqn, CALLS | CUSTOM_RULES | CHECKPOINTS), called(other, CALLS | CUSTOM_RULES | CHECKPOINTS)
        if inner[0] is not None and inner[1] is not None:
            return self._body((inner[0], inner[1]), values)
        if not outs:
            return []
        if kind == "optimization_barrier":
            return values
        if kind == "scan":
            return self._scan(eqn, other, operands, outs)
        if kind == "shard_map":
            return self._map(eqn, other, operands, outs)
        if kind in _BETWEEN_SHARDS and self._shards.issuperset(named_axes(eqn)):
            return self._between_shards(eqn, operands)
        if kind == "while":
            return self._while(eqn, other, values)
        if kind == "cond":
            return self._cond(eqn, other, values)
        if kind == "custom_linear_solve":
            lengths, solvers = eqn.params["const_lengths"], (eqn.params["jaxprs"].solve, other.params["jaxprs"].solve)
            before = lengths.matvec + lengths.vecmat
            return self._body(solvers, [*values[before : before + lengths.solve], *values[sum(lengths) :]])
        if kind in ("split", "unstack") and operands[0].axes:
            return self._split(eqn, operands[0], outs)
        if kind in _RULES:
            return [_RULES[kind](self, _Equation(eqn, other, operands, outs[0]))]
        value = self._plain(kind, eqn, operands, outs[0])
        return [value] * len(outs)

    def _plain(self, kind: str, eqn: JaxprEqn, operands: list[_Operand], out: _Operand) -> Value:  # noqa: PLR0911, C901  (a case a line)
        values = [operand.value for operand in operands]
        if kind in _RANDOM:
            return self._applied(kind, [replace(value, placed=False) for value in values])
        if kind in ("mul", "div") and not (kind == "div" and _whole(out.atom) and any(v.kind in _REDUCED for v in values)):
            return self._multiplied(values, divided=kind == "div")
        if kind in _ADDS:
            tiny = any((number_in(o.atom) is not None and abs(number_in(o.atom)) <= _GUARD) for o in operands)  # type: ignore[arg-type]
            guarded = (
                self._guarded(values, operands)
                if tiny and any(v.kind == Relation.TOTAL and v.degree == 0 for v in values)
                else None
            )
            return guarded or self._joined(values, sums=True)
        if kind == "max" and (guarded := self._guarded(values, operands)):
            return guarded
        if kind == "select_n":
            return self._chosen(operands)
        if kind in _LINEAR | _PASSES and len(operands) >= 1:
            return self._passed(kind, operands[0], out)
        if kind in _REDUCES:
            return self._reduced(kind, eqn, operands[0])
        if kind in _ALONG or kind in ("top_k", "approx_top_k", "rev", "fft", "argsort"):
            return self._along(kind, eqn, operands)
        if kind in _MATRIX:
            free = (
                len(out.shape) - (1 if eqn.params["left_side"] else 2) if kind == "triangular_solve" else None
            )  # right-hand sides
            inside = any(axis >= len(o.shape) - 2 and (o is operands[0] or axis != free) for o in operands for axis in o.axes)
            return self._unless(inside, values, "the examples are rows or columns of one matrix")
        if kind in _WINDOWS:
            window = eqn.params["window_dimensions"]
            inside = any(window[axis] != 1 for axis in operands[0].axes)
            return self._unless(inside, values, "a window moves along the examples")
        if kind in ("concatenate", "pad", "split", "unstack", "stack", "tile"):
            return self._joined(values, sums=False)
        if kind in _ELEMENTWISE or kind.startswith("random_"):
            return self._applied(kind, values)
        return self._unknown(kind, operands, out)

    def _unknown(self, kind: str, operands: Sequence[_Operand], out: _Operand) -> Value:
        values = [operand.value for operand in operands]
        if all(value.kind == Relation.SAME for value in values):
            placed = any(value.placed for value in values) or (bool(out.axes) and not any(operand.axes for operand in operands))
            return Value(degree=0 if all(value.degree == 0 for value in values) else None, placed=placed)
        mixed = [value for value in values if value.kind == Relation.MIXED]
        if kind.startswith("dot_product_attention") and not mixed:  # the kernels of cuDNN: examples lie along the first axis
            return self._unless(any(axis for o in operands for axis in o.axes), values, "examples attend to each other")
        return mixed[0] if mixed else self._mixed(f"jaxpp does not know what {kind} does with the examples, and it may mix them")

    def _unless(self, mixes: bool, values: Sequence[Value], what: str) -> Value:
        if mixes and any(value.kind == Relation.ROWS for value in values):
            return self._mixed(what)
        return self._applied("", values)

    def _passed(self, kind: str, operand: _Operand, out: _Operand) -> Value:
        value = operand.value
        if kind == "convert_element_type" and value.kind == Relation.TOTAL and _whole(out.atom) and not _whole(operand.atom):
            return self._applied(kind, [value])
        if kind == "neg":
            turned = {Relation.LARGEST: Relation.SMALLEST, Relation.SMALLEST: Relation.LARGEST}
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

    def _reduced(self, kind: str, eqn: JaxprEqn, operand: _Operand) -> Value:  # noqa: PLR0911  (a case a line)
        value = operand.value
        axes = eqn.params.get("axes", ())
        over = [axis for axis in operand.axes if axis in axes]
        if value.kind == Relation.MIXED or not over:
            if value.kind in _REDUCED and kind != "reduce_sum":
                return value if _LARGEST.get(kind) == value.kind else self._applied(kind, [value])
            if kind == "reduce_sum":
                known = value.kind in (Relation.SAME, Relation.ROWS, Relation.TOTAL, Relation.MIXED)
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

    def _along(self, kind: str, eqn: JaxprEqn, operands: list[_Operand]) -> Value:
        params, rank = eqn.params, len(operands[0].shape)
        if kind == "rev":
            axes = set(params["dimensions"])
        elif kind == "fft":
            axes = set(range(rank - len(params["fft_lengths"]), rank))
        elif kind in _ALONG:
            axes = {params[_ALONG[kind]]}
        else:
            axes = {params.get("axis", params.get("reduction_dimension", rank - 1)) % rank}
        along = any(axes.intersection(operand.axes) for operand in operands)
        values = [operand.value for operand in operands]
        if along and all(value.kind == Relation.SAME for value in values):
            return Value(degree=None if kind.startswith("cum") else 0, placed=True)
        return self._unless(along, values, f"the examples are put in another order, or added up one after the other ({kind})")

    def _iota(self, at: _Equation) -> Value:
        placed = at.eqn.params["dimension"] in at.out.axes
        return Value(
            placed=placed, index=placed and len(at.out.axes) == 1 and math.prod(at.out.shape) == at.out.shape[at.out.axes[0]]
        )

    def _concatenate(self, at: _Equation) -> Value:
        axis, values = at.eqn.params["dimension"], [operand.value for operand in at.operands]
        if Relation.MIXED in {value.kind for value in values} or all(value.kind == Relation.SAME for value in values):
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

    def _split(self, eqn: JaxprEqn, operand: _Operand, outs: list[_Operand]) -> list[Value]:
        axis, value = eqn.params["axis"], operand.value
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
            return replace(
                value,
                placed=value.placed or (bool(at.out.axes) and not operand.axes),
                index=value.index and at.out.shape == operand.shape,
            )
        if value.kind != Relation.ROWS or not operand.axes:
            return value
        axis = operand.axes[0]
        inner = Fraction(operand.shape[axis], value.blocks)
        start, size, strides = at.eqn.params["start_indices"][axis], at.out.shape[axis], at.eqn.params["strides"]
        if size == operand.shape[axis] and operand.axes == at.out.axes:
            return value
        whole = (start / inner).denominator == 1 and (size / inner).denominator == 1 and size and at.out.axes
        proportional = whole and at.other.params["start_indices"][axis] * self.sizes[0] == start * self.sizes[1]
        if not proportional or (strides and strides[axis] != 1):
            return self._mixed("some of the examples are taken by their places")
        return replace(value, blocks=int(size / inner))

    def _dynamic_slice(self, at: _Equation) -> Value:
        operand, indices = at.operands[0], [o.value for o in at.operands[1:]]
        if operand.value.kind == Relation.ROWS and at.out.axes != operand.axes:
            return self._mixed("some of the examples are taken by their places")
        if all(value.kind == Relation.SAME for value in (operand.value, *indices)):
            return replace(operand.value, placed=operand.value.placed or (bool(at.out.axes) and not operand.axes), index=False)
        if operand.value.kind in _REDUCED:
            return (
                operand.value if all(value.kind == Relation.SAME for value in indices) else self._applied("dynamic_slice", indices)
            )
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
        (operand, indices), named = at.operands[:2], at.eqn.params["dimension_numbers"]
        value, index = operand.value, indices.value
        for known in (value, index):
            if known.kind == Relation.MIXED:
                return known
        if value.kind == Relation.SAME and index.kind == Relation.SAME:
            return replace(value, placed=bool(at.out.axes) and (value.placed or index.placed or not indices.axes), index=False)
        if value.kind == Relation.SAME or index.kind in _REDUCED:
            return self._rows_of(value, [index])
        if value.kind in _REDUCED:
            return (
                value if index.kind == Relation.SAME else self._mixed("what is computed of all examples goes into the row of each")
            )
        if not operand.axes:
            return self._rows_of(value, [index])
        axis = operand.axes[0]
        if axis in named.operand_batching_dims:
            return value if indices.axes else self._mixed("some of the examples are taken by an index")
        if axis in named.start_index_map and at.eqn.params["slice_sizes"][axis] != operand.shape[axis]:
            return (
                value
                if self._numbers(indices, named.start_index_map.index(axis))
                else self._mixed("examples are taken by an index")
            )
        return value if not indices.axes else self._mixed("examples are compared with each other")

    def _numbers(self, indices: _Operand, column: int) -> bool:
        """Whether a column of the indices counts the examples."""
        if not isinstance(indices.atom, Var):
            return False
        made = self._made.get(indices.atom)
        if made is not None and (parts := columns_of(made[0])):
            return self.read(parts[column], columns_of(made[1])[column]).value.index
        return indices.value.index

    def _scattered(self, at: _Equation) -> Value:
        (operand, indices, update), named = at.operands[:3], at.eqn.params["dimension_numbers"]
        values = [operand.value, indices.value, update.value]
        mixed = [value for value in values if value.kind == Relation.MIXED]
        if mixed:
            return mixed[0]
        if indices.value.kind in _REDUCED:
            return self._mixed("an index is computed of all examples")
        own = False  # whether each example writes at its own place
        if operand.axes:
            axis, columns = operand.axes[0], named.scatter_dims_to_operand_dims
            numbered = axis in columns and self._numbers(indices, columns.index(axis))
            window = axis not in named.inserted_window_dims and axis not in columns and not indices.axes and bool(update.axes)
            own = axis in named.operand_batching_dims or numbered or window
        if all(value.kind == Relation.SAME for value in values):
            placed = bool(operand.axes) and (operand.value.placed or update.value.placed or not own)
            return Value(degree=0 if all(value.degree == 0 for value in values) else None, placed=placed)
        if operand.axes:
            if own:
                return self._rows_of(self._joined([operand.value, update.value], sums=True), [replace(indices.value, placed=False)])
            return self._mixed("rows of examples are put at other places")
        if not (update.axes or indices.axes):
            return self._rows_of(self._joined([operand.value, update.value], sums=True), [indices.value])
        if kind_of(at.eqn) != "scatter-add" or update.value.kind in _REDUCED:
            return self._mixed("examples are written over one another")
        total = Value(Relation.TOTAL, update.value.degree, update.value.count)
        return self._joined([operand.value, total], sums=True)

    def _dot_general(self, at: _Equation) -> Value:
        (left, right), (contracted, batched) = at.operands[:2], at.eqn.params["dimension_numbers"]
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
        along = at.eqn.params["dimension_numbers"].lhs_spec[0]
        if image.axes not in ((), (along,)) or kernel.axes or at.eqn.params.get("batch_group_count", 1) != 1:
            return self._mixed("a convolution may mix examples")
        return self._multiplied([image.value, kernel.value])

    def _pad(self, at: _Equation) -> Value:
        operand = at.operands[0]
        if operand.value.kind == Relation.ROWS and any(at.eqn.params["padding_config"][axis] != (0, 0, 0) for axis in operand.axes):
            return self._mixed("rows are added to those of the examples")
        return self._joined([operand.value, at.operands[1].value], sums=False)

    # ------------------------------------------------------------------------------------------------------- loops and branches

    def _body(
        self, bodies: tuple[ClosedJaxpr, ClosedJaxpr], values: Sequence[Value], shards: frozenset[str] | None = None
    ) -> list[Value]:
        """What a function that is called returns; ``shards`` are the axes of a ``shard_map``."""
        inner, (first, second) = _Follower(self.sizes), bodies
        inner._name, inner._eqn, inner._shards = self._name, self._eqn, self._shards if shards is None else shards
        inner.values.update(zip(first.jaxpr.invars, (replace(value, total=None) for value in values), strict=True))
        pairs = zip(first.consts, second.consts, strict=True)
        inner.constants(dict(zip(first.jaxpr.constvars, pairs, strict=True)))
        inner.run(first.jaxpr.eqns, second.jaxpr.eqns)
        return [inner.read(a, b).value for a, b in zip(first.jaxpr.outvars, second.jaxpr.outvars, strict=True)]

    def _map(self, eqn: JaxprEqn, other: JaxprEqn, operands: list[_Operand], outs: list[_Operand]) -> list[Value]:
        """A ``jax.shard_map``: what it does to the examples of each shard, it does to all."""
        mapped, second = shard_map_of(eqn), shard_map_of(other)
        if mapped is None or second is None:
            raise _Different
        entries = [
            spec[axis]
            for spec, each in zip(mapped.specs, (*operands, *outs), strict=True)
            for axis in each.axes
            if axis < len(spec)
        ]
        divided = {name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))}
        shards = self._shards | mapped.manual.difference(divided)
        return self._body((ClosedJaxpr(mapped.body, []), ClosedJaxpr(second.body, [])), [o.value for o in operands], shards)

    def _between_shards(self, eqn: JaxprEqn, operands: Sequence[_Operand]) -> list[Value]:
        """A collective that leaves each example where it is."""
        names = "all_gather_dimension", "split_axis", "concat_axis", "scatter_dimension"
        moved = {eqn.params[name] for name in names if name in eqn.params}
        return [
            self._mixed("a collective moves examples from shard to shard")
            if o.value.kind == Relation.ROWS and not moved.isdisjoint(o.axes)
            else replace(o.value, index=False, zero=False)
            for o in operands
        ]

    def _widened(self, old: Value, new: Value) -> Value:
        """What is one or the other."""
        if old == new or (new.zero and old.kind != Relation.SAME):
            return old
        if Relation.MIXED in (old.kind, new.kind):
            return old if old.kind == Relation.MIXED else new
        return self._joined([old, new], sums=False) if not old.zero else replace(new, zero=False)

    def _settled(self, run: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        """The values that a loop carries, whatever the iteration."""
        for _ in range(4):
            after = [self._widened(a, b) for a, b in zip(carry, run(carry), strict=True)]
            if after == carry:
                return carry
            carry = after
        return [
            value if value.kind == Relation.SAME else self._mixed("a loop carries examples in a way of its own") for value in carry
        ]

    def _scan(self, eqn: JaxprEqn, other: JaxprEqn, operands: list[_Operand], outs: list[_Operand]) -> list[Value]:
        scans = scan_of(eqn), scan_of(other)
        values = [operand.value for operand in operands]
        if scans[0] is None or scans[1] is None:
            return [self._applied("scan", values)] * len(outs)
        scan, bodies = scans[0], (scans[0].body, scans[1].body)
        fixed, carry, rest = values[: scan.num_fixed], values[scan.num_fixed : scan.num_before], values[scan.num_before :]
        one_by_one = scan.length != scans[1].length
        if not one_by_one:
            carry = self._settled(lambda carried: self._body(bodies, [*fixed, *carried, *rest])[: scan.num_carry], carry)
            return [*carry, *self._body(bodies, [*fixed, *carry, *rest])[scan.num_carry :]]
        after = self._body(bodies, [*fixed, *carry, *rest])
        sums = _sums(bodies[0], range(scan.num_fixed, scan.num_before))
        final = []
        for k, (old, new) in enumerate(zip(carry, after[: scan.num_carry], strict=True)):
            if new.kind == Relation.SAME and old.kind == Relation.SAME and old == new:
                final.append(old)
            elif k in sums and new.kind == Relation.ROWS and (old.kind == Relation.TOTAL or old.zero):
                final.append(Value(Relation.TOTAL, new.degree, new.count))
            else:
                final.append(
                    new
                    if new.kind == Relation.MIXED
                    else self._mixed("a loop over the examples carries something from one to the next")
                )
        inside = [
            old if k in sums or value.kind == Relation.SAME else value
            for k, (old, value) in enumerate(zip(carry, final, strict=True))
        ]
        return [*final, *self._body(bodies, [*fixed, *inside, *rest])[scan.num_carry :]]

    def _while(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        tests, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        bodies = eqn.params["body_jaxpr"], other.params["body_jaxpr"]
        constants = values[tests : tests + fixed]
        return self._settled(lambda carried: self._body(bodies, [*constants, *carried]), values[tests + fixed :])

    def _cond(self, eqn: JaxprEqn, other: JaxprEqn, values: list[Value]) -> list[Value]:
        branches = list(zip(eqn.params["branches"], other.params["branches"], strict=True))
        results = [self._body(branch, values[1:]) for branch in branches]
        found = []
        for column in zip(*results, strict=True):
            value = column[0]
            for more in column[1:]:
                value = self._widened(value, more)
            found.append(value if values[0].kind == Relation.SAME else self._applied("cond", [values[0], value]))
        return found


_RULES: dict[str, Callable[[_Follower, _Equation], Value]] = {
    "iota": _Follower._iota,
    "concatenate": _Follower._concatenate,
    "slice": _Follower._slice,
    "dynamic_slice": _Follower._dynamic_slice,
    "dynamic_update_slice": _Follower._dynamic_update_slice,
    "gather": _Follower._gather,
    "dot_general": _Follower._dot_general,
    "conv_general_dilated": _Follower._conv_general_dilated,
    "pad": _Follower._pad,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"), _Follower._scattered),
}


def _whole(atom: Atom) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.integer) or aval_of(atom).dtype == bool


def _sums(body: ClosedJaxpr, carried: range) -> set[int]:
    """Which of the values that a loop carries are only added to."""
    jaxpr, sums = body.jaxpr, set()
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for k, index in enumerate(carried):
        var, out = jaxpr.invars[index], jaxpr.outvars[k]
        eqn = made.get(out) if isinstance(out, Var) else None
        readers = [eqn for eqn in jaxpr.eqns if var in eqn.invars]
        while len(readers) == 1 and kind_of(readers[0]) == "convert_element_type":
            readers = [eqn for eqn in jaxpr.eqns if readers[0].outvars[0] in eqn.invars]
        if eqn is not None and kind_of(eqn) in ("add", "add_any") and readers == [eqn] and jaxpr.outvars.count(var) == 0:
            sums.add(k)
    return sums


class Verdict(NamedTuple):
    """What the mean over microbatches of a loss is to the loss of the whole batch."""

    what: str  # "mean": the same; "sum": the loss is a sum; "count": the same with the weight ``divisor``; "mixed": something else
    mixing: Mixing | None = None
    divisor: Count | None = None


def judge(loss: TracedLoss, value: Value) -> Verdict:
    """What the value of a loss says of its mean over microbatches."""
    if value.kind == Relation.MIXED or value.placed:
        return Verdict("mixed", value.mixing)
    if value.kind == Relation.SAME and value.degree == 0 and value.count is None:
        return Verdict("mean")
    if value.kind == Relation.TOTAL:
        if value.count is None and value.degree in (-1, 0):
            return Verdict("mean" if value.degree == -1 else "sum")
        if value.count is not None and value.degree == 0:
            var, degree = value.count
            inputs = set() if var is None else ancestors(loss.graph, [var])
            outside = {*loss.params, *loss.state, *(() if loss.key is None else (loss.key,))}
            if var is not None and degree is not None and inputs.isdisjoint(outside):
                return Verdict("count", divisor=value.count)
            return Verdict(
                "mixed", Mixing("a sum over the examples is divided by another one, which depends on more than the batch", "", "")
            )
    what = value.kind.value if value.kind in (Relation.LARGEST, Relation.SMALLEST) else "it depends on the number of examples"
    return Verdict("mixed", Mixing(what, "", ""))


def place_of(graph: Graph, var: Var) -> tuple[int, int]:
    """Which result of which equation a variable is."""
    i = graph.producers()[var]
    return i, list(graph.eqns[i].outvars).index(var)


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
        return (
            parts[0]
            if kind in ("convert_element_type", "broadcast_in_dim", "squeeze", "copy", "stop_gradient", "reshape")
            else None
        )

    return text(var)


_DEPTH = 8
_SIGNS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "and": "&",
    "or": "|",
}


class MicrobatchWarning(UserWarning):
    """What a step computes is not what the loss says of the whole batch, because the loss is no mean over the examples."""


def advice(loss: TracedLoss, verdict: Verdict, num_microbatches: int, reduction: str, leaves: Sequence[str]) -> str | None:
    """What to tell the user of a loss, ``leaves`` as its batch is written; None if the step is what the loss says."""
    name, parts = "loss_fn", f"over {num_microbatches} microbatches"
    computed = f"a step computes the {reduction} {parts} of the loss"
    if verdict.what == reduction:
        return None
    if verdict.what == "sum":
        got = f"a sum over the examples, of which that is 1/{num_microbatches}; so are the gradients"
        return f'{name}: {computed}.\n  Got: {got}.\n  Fix: pass reduction="sum", or return the mean.'
    if verdict.what == "mean":
        got = f"a mean over the examples, of which that is {num_microbatches} times as much; so are the gradients"
        return f"{name}: {computed}.\n  Got: {got}.\n  Fix: leave reduction out, or return the sum."
    if verdict.what == "count" and verdict.divisor is not None and verdict.divisor.var is not None:
        line = written(loss, verdict.divisor.var, leaves)
        got = "a sum over the examples divided by a count of them, which may be another in each microbatch"
        fix = 'pass weight="auto"' + (f", or weight=lambda batch: {line}" if line and verdict.divisor.degree == 0 else "")
        return f"{name}: {computed}.\n  Got: {got}.\n  Fix: {fix}."
    got = f"a loss that is no mean over the examples: {verdict.mixing}"
    fix = "pass num_microbatches=1 for the loss of the whole batch, or filter jaxpp.MicrobatchWarning if this is what you want"
    return f"{name}: {computed}, and each microbatch knows its own examples only.\n  Got: {got}.\n  Fix: {fix}."
