"""How many tokens a carry has room for, read off the traced model.

A cache of 1024 places takes the 1025th token without a word, and overwrites or drops something. But the model itself says where it
writes: at a counter in its carry, to which it adds the number of tokens at every call. So the equations are followed, and a limit
is believed if it is proven that a leaf grows by ``num_tokens`` (a counter), and that another is returned with rows written from
this counter on. Whatever is written elsewhere sets no limit: a recurrent state as a whole, or a window at ``counter % 128``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages import jaxpr
from jaxpp.stages.graph import Graph
from jaxpp.stages.interpreter import Interpreter
from jaxpp.types import Leaf

_SAME = (jaxpr.LAYOUT - {"iota"}) | {"transpose", "convert_element_type"}  # results have the operand's elements, rearranged
_PARTS = frozenset({"slice", "dynamic_slice", "gather"})  # results have some of the first operand's elements


@dataclass(frozen=True)
class _Whole:
    """Whole numbers: all those from ``low`` to ``high``, added to the counter in a leaf of the carry if one is given."""

    low: int
    high: int
    counter: int | None = None

    @property
    def single(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True)
class _AtCounter:
    """True just where the place along an axis, from 0 to ``last``, is the counter plus ``offset``."""

    counter: int
    offset: int
    last: int


@dataclass(frozen=True)
class _Content:
    """A leaf of the carry, into which was written; ``limits``: a counter, and how large it may be before the call."""

    leaf: int
    limits: frozenset[tuple[int, int]] = frozenset()

    def limited(self, counter: int, most: int) -> "_Content":
        return replace(self, limits=self.limits | {(counter, most)})


_Value = _Whole | _AtCounter | _Content | tuple["_Value", ...] | None  # a tuple: indices of a scatter, a column for each axis


def capacity(graph: Graph, carry: Sequence[Leaf], *, first: int, num_tokens: int) -> int | None:
    """How many tokens can still go into a carry (counters that are 0 may be shapes) before it is full; None if it is not proven.

    The graph is of ``fn(params, carry, tokens)``, traced at ``num_tokens`` tokens, with ``first`` inputs before the carry.
    """
    follower = _Follower()
    follower.values.update((var, _constant(value)) for var, value in graph.constants.items())
    for leaf, var in enumerate(graph.inputs[first : first + len(carry)]):
        follower.values[var] = _Whole(0, 0, leaf) if _is_whole(var) else _Content(leaf)
    follower.walk(graph.eqns)
    results = list(map(follower.read, graph.outputs[: len(carry)]))
    counters = {leaf for leaf, value in enumerate(results) if value == _Whole(num_tokens, num_tokens, leaf)}
    contents = [value for leaf, value in enumerate(results) if isinstance(value, _Content) and value.leaf == leaf]
    limits = {limit for content in contents for limit in content.limits if limit[0] in counters}
    used = {leaf: 0 if isinstance(carry[leaf], jax.ShapeDtypeStruct) else int(np.max(np.asarray(carry[leaf]))) for leaf in counters}
    return min((max(most + num_tokens - used[counter], 0) for counter, most in limits), default=None)


def _is_whole(atom: jaxpr.Atom) -> bool:
    return jnp.issubdtype(jaxpr.aval_of(atom).dtype, jnp.integer)


def _constant(value: Leaf) -> _Value:
    """An array that the function closed over, if it holds one whole number, or several without a gap."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.integer) or not np.size(value):
        return None
    numbers = np.unique(np.asarray(value))
    low, high = int(numbers[0]), int(numbers[-1])
    return _Whole(low, high) if high - low + 1 == len(numbers) else None


class _Follower(Interpreter[_Value]):
    """What is known of each value; None for what is not."""

    enters = Interpreter.enters | {"scan"}  # a loop over layers: rows of a leaf are a leaf

    def read(self, atom: jaxpr.Atom) -> _Value:
        return self.number(atom) if isinstance(atom, Literal) else self.values.get(atom)

    def number(self, atom: Literal) -> _Value:
        number, is_whole = jaxpr.number_in(atom), _is_whole(atom) or jaxpr.aval_of(atom).dtype == bool
        return _Whole(int(number), int(number)) if number is not None and is_whole else None

    def constant(self, var: Var, value: Leaf) -> _Value:  # noqa: ARG002
        return _constant(value)

    def plain(self, eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
        rule = _RULES.get(jaxpr.kind_of(eqn))
        return [rule(eqn, values)] if rule is not None and len(eqn.outvars) == 1 else [None] * len(eqn.outvars)

    def either(self, a: _Value, b: _Value) -> _Value:
        return _joined([a, b])

    def row(self, value: _Value) -> _Value:
        return _part(value)


def _same(eqn: JaxprEqn, values: Sequence[_Value]) -> _Value:
    return values[0] if not isinstance(values[0], _Whole) or _is_whole(eqn.outvars[0]) else None


def _iota(eqn: JaxprEqn, _: Sequence[_Value]) -> _Value:
    shape = jaxpr.aval_of(eqn.outvars[0]).shape
    return _Whole(0, shape[0] - 1) if len(shape) == 1 and _is_whole(eqn.outvars[0]) else None


def _concatenate(eqn: JaxprEqn, values: Sequence[_Value]) -> _Value:
    return tuple(values) if jaxpr.columns_of(eqn) else _joined(values)


def _written(eqn: JaxprEqn, values: Sequence[_Value]) -> _Value:
    writes, content = jaxpr.writes_of(eqn), _content(values[0])
    if not writes or content is None:
        return None
    for axis, operand, column, rows in writes:
        value = values[operand]
        value = value[column] if isinstance(value, tuple) else value
        if not isinstance(value, _Whole):
            return None
        if value.counter is not None:
            size = jaxpr.aval_of(eqn.invars[0]).shape[axis]
            content = content.limited(value.counter, size - value.high - rows)
    return next((whole for update in values[1:] if (whole := _joined([content, update])) is not None), content)


def _content(value: _Value) -> _Content | None:
    if isinstance(value, _Whole) and value.counter is not None and value.low == value.high == 0:
        return _Content(value.counter)
    return value if isinstance(value, _Content) else None


def _part(value: _Value) -> _Value:
    return value if isinstance(value, _Content) or (isinstance(value, _Whole) and value.single) else None


def _joined(values: Sequence[_Value]) -> _Value:
    """What is known of values put together, or of one that may be any of these: parts of one leaf, or the same number."""
    contents = [content for value in values if (content := _content(value)) is not None]
    alike = len(contents) == len(values) and len({content.leaf for content in contents}) == 1
    if alike and any(isinstance(value, _Content) for value in values):
        return replace(contents[0], limits=frozenset().union(*(content.limits for content in contents)))
    return _part(values[0]) if len(set(values)) == 1 else None


def _add(_: JaxprEqn, values: Sequence[_Value]) -> _Value:
    a, b = values
    if not isinstance(a, _Whole) or not isinstance(b, _Whole) or not (a.single or b.single):
        return None
    if a.counter is not None and b.counter is not None:
        return None
    return _Whole(a.low + b.low, a.high + b.high, b.counter if a.counter is None else a.counter)


def _sub(eqn: JaxprEqn, values: Sequence[_Value]) -> _Value:
    a, b = values
    return _add(eqn, (a, _Whole(-b.high, -b.low))) if isinstance(b, _Whole) and b.counter is None else None


def _less(_: JaxprEqn, values: Sequence[_Value]) -> _Value:
    """False where it is certain: counters are not negative."""
    a, b = values
    if not isinstance(a, _Whole) or not isinstance(b, _Whole) or b.counter is not None:
        return None
    if a.low >= b.high:
        return _Whole(0, 0)
    return _Whole(1, 1) if a.counter is None and a.high < b.low else None


def _equal(_: JaxprEqn, values: Sequence[_Value]) -> _Value:
    for places, counter in (values, values[::-1]):
        if isinstance(places, _Whole) and isinstance(counter, _Whole) and counter.counter is not None and counter.single:
            of_axis = places.counter is None and places.low == 0 < places.high
            return _AtCounter(counter.counter, counter.low, places.high) if of_axis else None
    return None


def _select(_: JaxprEqn, values: Sequence[_Value]) -> _Value:
    which, *cases = values
    if isinstance(which, _Whole):
        return cases[which.low] if which.single and which.counter is None else None
    content = _content(cases[0])
    if not isinstance(which, _AtCounter) or content is None or len(cases) != 2:
        return None
    return content.limited(which.counter, which.last - which.offset)


_RULES: dict[str, Callable[[JaxprEqn, Sequence[_Value]], _Value]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_PARTS, lambda _, values: _part(values[0])),
    **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add"), _written),
    "iota": _iota,
    "concatenate": _concatenate,
    "add": _add,
    "sub": _sub,
    "lt": _less,
    "eq": _equal,
    "select_n": _select,
}
