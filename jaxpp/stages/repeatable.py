"""Which equations a backward may run again, at what price, and the minimum cut that chooses.

Never again: loops, calls, random bits, sorts, gathers, effects; and matrix products and convolutions, unless a budget asks for it.
Nor a *decision* on a rounded number: XLA rounds differently in different programs, so a comparison of nearly equal values may come
out otherwise in the backward, and the gradient with it. Prices are in bytes; elementwise arithmetic is nearly free. Values have two
sides, choices have prices and force others: a minimum cut, by SciPy's maximum flow (Picard, Management Science 22(11), 1976).
"""

import math
from collections.abc import Collection, Hashable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import LAYOUT, Atom, aval_of, is_cast, kind_of, length_of, terms, variables
from jaxpp.types import Aval, DType

TRANSCENDENTAL = frozenset(
    "tanh exp exp2 expm1 log log1p logistic erf erfc erf_inv sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh pow "
    "cbrt lgamma digamma".split()
)  # Functions that take many operations an element
_CHOOSING = LAYOUT | frozenset(
    "transpose rev pad concatenate stack slice dynamic_slice split select_n neg abs max min clamp real imag conj complex name "
    "bitcast_convert_type reduce_max reduce_min random_wrap random_unwrap sharding_constraint".split()
)
EXTREMES = frozenset({"reduce_max", "reduce_min"})  # compared with their operands, or subtracted from them
_ADDING = frozenset("add sub add_any".split())
_ARITHMETIC = frozenset(
    "mul div sqrt rsqrt square one_minus_square integer_pow reduce_precision reduce_sum convert_element_type and or not xor "
    "shift_left shift_right_logical shift_right_arithmetic population_count clz reduce_and reduce_or".split()
)
_DECIDING = frozenset("eq ne lt le gt ge sign floor ceil round is_finite rem nextafter atan2 eq_to lt_to le_to".split())
_REPEATABLE = _CHOOSING | _ADDING | _ARITHMETIC | _DECIDING | TRANSCENDENTAL
_MOVING = frozenset(
    "gather optimization_barrier reduce_window_max reduce_window_min cummax cummin scatter dynamic_update_slice".split()
)  # Never repeated, and yet their results are as their operands are
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_WRITTEN = PRODUCTS | frozenset("sort top_k while scan fft".split())  # never repeated; written to memory
_SMOOTH = (
    (_REPEATABLE - _DECIDING)
    | PRODUCTS
    | frozenset("gather scatter-add scatter_add cumsum reduce_window_sum fft dynamic_update_slice".split())
)
_CODES = 256  # the most values of such a table: as many as a byte tells apart
ELEMENT, _REDUCED = 1 / 64, 1 / 4
SOURCE, SINK = "source", "sink"
_FINITE = 1 << 29  # SciPy counts flow in 32 bits; all prices together take this much, and an edge of no price twice as much

EXACT, _ADDED, _ROUNDED = range(3)  # the same in every program: in all bits; in whether it is above another value; not at all


def repeatable(graph: Graph, *, products: bool = False) -> list[bool]:
    """Whether each equation may be run again, whatever is kept; ``products``: matrix products and convolutions too."""
    may, levels, producers = list[bool](), rounding(graph, products=products), graph.producers()
    kinds = _REPEATABLE | PRODUCTS if products else _REPEATABLE
    for eqn in graph.eqns:
        loose = any(levels.get(var, EXACT) == _ROUNDED for var in variables(eqn.invars))
        may.append(kind_of(eqn) in kinds and not eqn.effects and not (loose and is_decision(eqn)))
    for eqn in graph.eqns:
        if kind_of(eqn) == "name":  # the user's word for what is to be kept
            for var in variables(eqn.invars):
                if var in producers:
                    may[producers[var]] = False
    return may


def rounding(graph: Graph, *, products: bool = False) -> dict[Var, int]:
    """The floating-point values that may have other last bits in another program, and how far that matters.

    Where ``products`` are run again, their results may: another program may lay out their operands otherwise.
    """
    levels: dict[Var, int] = {}
    for eqn in graph.eqns:
        worst = max((levels.get(var, EXACT) for var in variables(eqn.invars)), default=EXACT)
        for var in eqn.outvars:
            level = _level(eqn, var, worst) if _is_float([var]) else EXACT
            level = _ROUNDED if products and level == EXACT and kind_of(eqn) in PRODUCTS else level
            if level:
                levels[var] = level
    return levels


def _level(eqn: JaxprEqn, result: Var, operands: int) -> int:
    name = kind_of(eqn)
    widened = is_cast(eqn) and _digits(result) >= _digits(eqn.invars[0])
    if name in _CHOOSING or name in _MOVING or widened:
        return operands
    if _digits(result) < jnp.finfo(jnp.float32).nmant:  # computed with more digits inside a fusion
        return _ROUNDED
    if name in _ADDING:
        return _ADDED if operands == EXACT else _ROUNDED
    single = 1 in (terms(eqn), length_of(eqn))  # XLA makes elementwise arithmetic of a product or a loop with one term
    return EXACT if name in _WRITTEN and not single else _ROUNDED


def is_written(eqn: JaxprEqn) -> bool:
    """Whether an equation's results are in memory anyway, because it is no part of a fusion."""
    return kind_of(eqn) in _WRITTEN


def may_repeat(name: str, operands: Sequence[Aval], new_dtype: DType | None = None) -> bool:
    """Whether an operation may be run again where nothing is known of its operands."""
    rounded = any(_is_inexact(aval.dtype) for aval in operands)
    decides = name in _DECIDING or (new_dtype is not None and not _is_inexact(new_dtype))
    return decodes(name, operands) or (name in _REPEATABLE - {"name"} and not (rounded and decides))


def decodes(name: str, operands: Sequence[Aval]) -> bool:
    """Whether an operation looks numbers up in a small table, as the dequantisation by a codebook does."""
    return name == "gather" and math.prod(operands[0].shape) <= _CODES


def price_of(eqn: JaxprEqn, transcendental: float, element: float = ELEMENT) -> float:
    """What it costs to run an equation again, in bytes; ``element``: of elementwise arithmetic, for each element of the result."""
    name = kind_of(eqn)
    if name in EXTREMES:
        return ELEMENT * sum(math.prod(aval_of(var).shape) for var in variables(eqn.invars))
    if name.startswith("reduce_") and name != "reduce_precision":
        return _REDUCED * sum(count_bytes(aval_of(var)) for var in variables(eqn.invars))
    size = sum(math.prod(aval_of(var).shape) for var in eqn.outvars)
    return size * (element * (name != "name") + transcendental * (name in TRANSCENDENTAL))


def is_decision(eqn: JaxprEqn) -> bool:
    """Whether a small difference of its operands can become a large one of its result."""
    if is_cast(eqn) or kind_of(eqn) == "bitcast_convert_type":
        return _is_float(eqn.invars) and not _is_float(eqn.outvars)
    return kind_of(eqn) in _DECIDING and _is_float(eqn.invars)


def decided_on(graph: Graph, forward: Collection[int], kept: Collection[Var]) -> set[int]:
    """The decisions on one kept value that the forward itself does not use; the backward decides on the same bytes.

    Not a comparison of two values, such as a maximum and what it is of: one of them may be rounded otherwise where it is written.
    """
    used = {var for i in forward for var in variables(graph.eqns[i].invars)}.union(variables(graph.outputs))
    return {
        i
        for i in forward
        if is_decision(graph.eqns[i])
        and used.isdisjoint(graph.eqns[i].outvars)
        and len(operands := variables(graph.eqns[i].invars)) == 1
        and operands[0] in kept
    }


def settled(graph: Graph, before: Collection[int], *, products: bool = False) -> list[bool]:
    """Whether each equation may be run again, but not what the backward (not ``before``) reads in a decision."""
    may, levels, producers = repeatable(graph, products=products), rounding(graph, products=products), graph.producers()
    for i, eqn in enumerate(graph.eqns):
        smooth = kind_of(eqn) in _SMOOTH and not is_decision(eqn)  # a small difference of operands makes a small one of results
        if i not in before and not smooth:
            for var in variables(eqn.invars):
                if var in producers and levels.get(var, EXACT) != EXACT:
                    may[producers[var]] = False
    return may


def _is_float(atoms: Iterable[Atom]) -> bool:
    return any(_is_inexact(aval_of(atom).dtype) for atom in atoms)


def _is_inexact(dtype: DType) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _digits(atom: Atom) -> float:
    dtype = aval_of(atom).dtype
    return jnp.finfo(dtype).nmant if _is_inexact(dtype) else math.inf


class Network:
    """A directed network whose edges have prices; a node is on the source's side or on the sink's."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
        self._prices: dict[tuple[int, int], float] = {}

    def edge(self, tail: Hashable, head: Hashable, price: float = math.inf) -> None:
        """Demand ``price`` where ``tail`` is on the source's side and ``head`` on the sink's; infinite unless given."""
        ends = self._numbers.setdefault(tail, len(self._numbers)), self._numbers.setdefault(head, len(self._numbers))
        if price > 0:
            self._prices[ends] = self._prices.get(ends, 0.0) + price

    def sink_side(self, *, most: bool = False) -> set[Hashable]:
        """The nodes on the sink's side of a cheapest cut: of several, of that with the fewest (or ``most``)."""
        if not self._prices:
            return {SINK}
        from scipy.sparse import csgraph, csr_array  # noqa: PLC0415  (takes a quarter of a second)

        ends = np.array(list(self._prices), dtype=np.int32)
        prices = np.array(list(self._prices.values()))
        finite = np.isfinite(prices)
        scale = _FINITE / max(prices[finite].sum() + finite.sum(), 1.0)
        whole = np.where(finite, np.ceil(np.where(finite, prices, 0.0) * scale), 2 * _FINITE).astype(np.int32)
        size = len(self._numbers)
        capacity = csr_array((whole, (ends[:, 0], ends[:, 1])), shape=(size, size))
        left = capacity - csgraph.maximum_flow(capacity, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        start, graph = (0, left) if most else (1, csr_array(left.T))
        reached = set(csgraph.breadth_first_order(graph, start, return_predecessors=False).tolist())
        return {node for node, number in self._numbers.items() if (number in reached) != most}
