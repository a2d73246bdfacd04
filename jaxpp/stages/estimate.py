"""How long equations take on a device, estimated from shapes alone: what cuts and the stage table go by.

An equation takes as long as its arithmetic or as its bytes, whichever is longer, at what the device reaches of its peaks.
Elementwise equations are taken to be fused, as XLA fuses them: they write what others than themselves read, and read each value
once. A GPU reaches of its maker's peaks (``jaxpp.targets``) what kernels of that kind and size were measured to reach
(``jaxpp.efficiency``), and each equation that is a kernel of its own takes some microseconds besides, whatever it does: without
them, a GPT's blocks of many kernels would seem half as long beside the few large kernels of its head as they are. Of a CPU the
rates are nominal, the same on every machine: only their ratios matter, and equal programs are cut alike everywhere.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxpp.efficiency import KERNEL, as_linked, attention_share, moved_share, product_seconds
from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.jaxpr import (
    FREE,
    Atom,
    attended,
    attention_sizes,
    aval_of,
    inner_jaxprs,
    is_precise,
    kind_of,
    length_of,
    needed_of,
    terms,
    variables,
)
from jaxpp.stages.repeatable import TRANSCENDENTAL, is_written
from jaxpp.targets import GPU, TARGETS, Peaks, target_of
from jaxpp.types import Device

_OPERATIONS = dict.fromkeys(TRANSCENDENTAL, 10.0) | {"random_bits": 100.0}  # of elementwise arithmetic, for one element
_ALONE = frozenset(
    "gather scatter scatter-add scatter_add scatter-mul dynamic_update_slice random_bits cumsum cumprod cummax cummin cumlogsumexp "
    "argsort reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add".split()
)  # Kinds that are no part of a fusion with what makes their operands, beside those that are always written

_IN_PLACE = frozenset("scatter scatter-add scatter_add scatter-mul dynamic_update_slice".split())
_VIEWS = frozenset("reshape squeeze expand_dims transpose stop_gradient iota copy name random_wrap random_unwrap".split())


class Rates(NamedTuple):
    """How fast a device works: FLOP/s by type, bytes a second of its memory and of its links, seconds of an empty kernel."""

    peaks: Peaks
    bandwidth: float
    peer: float  # to another device
    network: float  # to a device of another host
    host: float  # to the memory of its host
    kernel: float = 0.0
    target: GPU | None = None  # of which kernels reach a part of these rates; None for rates that are reached


class SpineCosts(NamedTuple):
    """What F, I and W of one microbatch take in seconds, at each position of the spine."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]  # of what W needs too, I has all
    weight_grad: tuple[float, ...]
    first: int  # the position up to which cotangents go: a stage that begins there, or before, has no I, and all of B is W

    @property
    def total(self) -> tuple[float, ...]:
        """All of a position."""
        return tuple(map(sum, zip(self.forward, self.input_grad, self.weight_grad, strict=True)))


_KERNELS = 1.4
"""Kernels that XLA made of an equation that counts as one here, of a GPT of 124 million parameters on an H200 (experiments/gpu)."""

_GIGA = 1e9
CPU_RATES = Rates(
    Peaks(
        bfloat16=50 * _GIGA,
        float16=50 * _GIGA,
        tensorfloat32=100 * _GIGA,
        float32=100 * _GIGA,
        float64=50 * _GIGA,
        float8=None,
        int8=50 * _GIGA,
        vector=20 * _GIGA,
    ),
    bandwidth=20 * _GIGA,
    peer=20 * _GIGA,
    network=20 * _GIGA,  # several processes on one host cut as one process does
    host=20 * _GIGA,
)


def rates_of(device: Device) -> Rates:
    """The rates of a device; of an accelerator whose numbers are not known those of an H100."""
    if device.platform == "cpu":
        return CPU_RATES
    numbers = target_of(device) or next(each for each in TARGETS if each.name == "h100")
    links = as_linked(numbers).links
    return Rates(numbers.peaks, numbers.bandwidth, links.peer, links.network, links.host, _KERNELS * KERNEL, numbers)


class EquationWork(NamedTuple):
    """What an equation does, on whatever device: a kernel of its own, a part of a fusion, or a loop with others inside."""

    inside: tuple[tuple["EquationWork", ...], ...] = ()  # the works of each body
    times: int = 1  # that these run
    eqn: JaxprEqn | None = None  # None of loops and branches, and of what takes no time
    num_bytes: int = 0  # that it reads and writes
    alone: bool = False  # whether it is a kernel of its own

    def seconds(self, rates: Rates) -> float:
        """What it takes at these rates."""
        if self.eqn is None:
            return max((sum(work.seconds(rates) for work in body) for body in self.inside), default=0.0) * self.times
        moving = self.num_bytes / rates.bandwidth / _moving(self.eqn, rates)
        return (rates.kernel if self.alone else 0.0) + max(_arithmetic(self.eqn, rates), moving)


def seconds_of(eqns: Sequence[JaxprEqn], results: Collection[Atom], rates: Rates) -> list[float]:
    """What each equation of a program that returns ``results`` takes, in seconds."""
    return [work.seconds(rates) for work in works_of(eqns, results)]


def works_of(eqns: Sequence[JaxprEqn], results: Collection[Atom]) -> list[EquationWork]:
    """What each equation of a program that returns ``results`` does.

    What several fused equations read counts at the first of them, what they write at the equation that makes it. A loop takes as
    long as all its iterations, a branch as the longest of them; a ``while`` loop counts as one iteration.
    """
    seen = _seen_through(eqns)
    written = set(seen(results)).union(*(seen(eqn.invars) for eqn in eqns if not _fuses(eqn)))
    fused = {var for eqn in eqns if _fuses(eqn) for var in eqn.outvars} - written
    read = set[Var]()
    works = []
    for eqn in eqns:
        inside = tuple(tuple(works_of(jaxpr.eqns, jaxpr.outvars)) for jaxpr in inner_jaxprs(eqn))
        if inside or _is_view(eqn):
            works.append(EquationWork(inside, length_of(eqn) or 1))
            continue
        operands, made = seen(eqn.invars), list(eqn.outvars)
        if kind_of(eqn) == "gather":  # rows of its first operand, not all of it
            operands = [*seen(eqn.invars[1:]), *made]
        elif kind_of(eqn) in _IN_PLACE:  # rows of it are read and written
            operands, made = [*seen(eqn.invars[1:]), *seen(eqn.invars[1:])], []
        elif _fuses(eqn):
            operands, made = ([var for var in atoms if var not in fused] for atoms in (operands, made))
            operands = [var for var in operands if var not in read]
            read.update(operands)
        moved = sum(count_bytes(aval_of(var)) for var in (*operands, *made))
        works.append(EquationWork((), 1, eqn, moved, bool(made) or not _fuses(eqn)))  # a fusion counts where it writes
    return works


def _fuses(eqn: JaxprEqn) -> bool:
    return not (is_written(eqn) or kind_of(eqn) in _ALONE or inner_jaxprs(eqn) or _multiplies(eqn))


def _multiplies(eqn: JaxprEqn) -> bool:
    return terms(eqn) is not None or attended(eqn) is not None


def _is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation gives what is there another shape, or names it."""
    return kind_of(eqn) in _VIEWS


def _seen_through(eqns: Iterable[JaxprEqn]) -> Callable[[Iterable[Atom]], list[Var]]:
    """Which values some atoms are, those taken for another view of one being that one."""
    source: dict[Var, Var] = {}
    for eqn in filter(_is_view, eqns):
        for var in variables(eqn.invars):
            source.update((out, source.get(var, var)) for out in eqn.outvars)
    return lambda atoms: list(dict.fromkeys(source.get(var, var) for var in variables(atoms)))


def _moving(eqn: JaxprEqn, rates: Rates) -> float:
    """What an equation reaches of the bandwidth."""
    if rates.target is None:
        return 1.0
    kind = kind_of(eqn)
    if kind.startswith("scatter"):
        return moved_share("scatter")
    return moved_share("product" if _multiplies(eqn) else "reduction" if kind.startswith(("reduce_", "arg")) else "elementwise")


def _arithmetic(eqn: JaxprEqn, rates: Rates) -> float:
    if _multiplies(eqn):
        return _multiplying(eqn, rates)
    kind, size = kind_of(eqn), sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars)
    if kind in FREE:
        return 0.0
    if kind.startswith("reduce_"):
        size = sum(math.prod(aval_of(var).shape) for var in variables(eqn.invars))
    return size * _OPERATIONS.get(kind, 1.0) / rates.peaks.vector


def _multiplying(eqn: JaxprEqn, rates: Rates) -> float:
    """The seconds of a product, a convolution or attention."""
    (kind, times), peaks = _computed_in(eqn), rates.peaks
    peak = getattr(peaks, kind, None) or peaks.vector
    if rates.target is None:
        return times * count_flops(eqn) / peak
    operands = [aval_of(atom).shape for atom in eqn.invars[:2]]
    if (found := attention_sizes(eqn)) is not None:
        return count_flops(eqn) / peak / attention_share(rates.target, *found)
    result = aval_of(eqn.outvars[0]).shape
    if kind_of(eqn) == "dot_general":
        _, (shared, _) = eqn.params["dimension_numbers"]
        batch = math.prod(operands[0][axis] for axis in shared)
        rows, columns = (math.prod(shape) // max(1, batch * (terms(eqn) or 1)) for shape in operands)
    else:
        batch, columns = 1, result[eqn.params["dimension_numbers"].out_spec[1]]
        rows = math.prod(result) // max(1, columns)
    return times * product_seconds(rates.target, peak, kind, (batch, rows, columns, terms(eqn) or 1))


def _computed_in(eqn: JaxprEqn) -> tuple[str, int]:
    """The type that a product is computed in, and how many real ones it is; float32 is TensorFloat-32 unless more is asked for."""
    dtype = max((aval_of(atom).dtype for atom in eqn.invars[:2]), key=lambda dtype: dtype.itemsize)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "float32" if dtype.itemsize == 8 else "float64", 4
    if dtype == jnp.float32:
        return "float32" if is_precise(eqn) else "tensorfloat32", 1
    known = {1: "int8" if jnp.issubdtype(dtype, jnp.integer) else "float8", 8: "float64"}
    return known.get(dtype.itemsize, "float16" if dtype == jnp.float16 else "bfloat16"), 1


def temporary_bytes(eqns: Sequence[JaxprEqn], results: Sequence[Atom], share: Callable[[Var], int] = lambda _: 1) -> int:
    """Bytes that a program which returns ``results`` likely needs at once besides its arguments and results.

    ``share`` says into how many parts devices divide a value.

    Elementwise equations are taken to be fused into what reads them, and to take over the buffer of an operand that nobody reads
    any more; a value of which they make a result is in that result's buffer. Programs that split products over many blocks, or
    multiply matrices in their update, need more (docs/guide/plan.md says how far peaks were off).
    """
    eqns = [eqns[i] for i in needed_of(eqns, results, lambda _: False)]
    seen = _seen_through(eqns)
    kept = set(seen(results))
    working = [eqn for eqn in eqns if not _is_view(eqn)]
    homes = _made_in_place(working, kept, seen)
    written = kept.union(*(seen(eqn.invars) for eqn in working if not (_fuses(eqn) or _fuses_operands(eqn))))
    written.update(var for eqn in working if not _fuses(eqn) or _fuses_operands(eqn) for var in eqn.outvars)
    last: dict[Var, int] = {}  # of each value in memory the last equation that reads it
    behind: dict[Var, list[Var]] = {}  # the values in memory that whoever reads a fused one reads
    for k, eqn in enumerate(working):
        read = list(dict.fromkeys(var for each in seen(eqn.invars) for var in behind.get(each, [each])))
        last.update(dict.fromkeys(read, k))
        behind.update((out, read) for out in eqn.outvars if out not in written)
    alive, most = dict[Var, int](), 0
    for k, eqn in enumerate(working):
        inside = max((temporary_bytes(body.eqns, body.outvars, share) for body in inner_jaxprs(eqn)), default=0)
        gone = [var for var in alive if last[var] == k]
        for out in eqn.outvars:
            if out in written and out in last and out not in kept and out not in homes:
                size = count_bytes(aval_of(out)) // share(out)
                over = next((var for var in gone if alive.get(var) == size), None) if _fuses(eqn) else None
                if over is not None:
                    del alive[over]
                alive[out] = size
        most = max(most, sum(alive.values()) + inside)
        for var in gone:
            alive.pop(var, None)
    return most


def _made_in_place(eqns: Sequence[JaxprEqn], kept: Collection[Var], seen: Callable[[Iterable[Atom]], list[Var]]) -> set[Var]:
    """The values that are made in the buffer of the result that fused equations, their only readers, make of them.

    A product that is added to an argument (a gradient, to the sum of earlier ones) is made in the buffer of that argument.
    """
    readers: dict[Var, list[JaxprEqn]] = {}
    made = {out for eqn in eqns for out in eqn.outvars}
    for eqn in eqns:
        for var in seen(eqn.invars):
            readers.setdefault(var, []).append(eqn)

    def is_home(var: Var) -> bool:
        if len(readers.get(var, ())) != 1 or var in kept:
            return False
        (eqn,), size = readers[var], count_bytes(aval_of(var))
        large = [each for each in seen(eqn.invars) if count_bytes(aval_of(each)) == size and each in made]
        if not _fuses(eqn) or len(large) > 1 or count_bytes(aval_of(eqn.outvars[0])) != size:
            return False
        return eqn.outvars[0] in kept or is_home(eqn.outvars[0])

    return {out for eqn in eqns if not _fuses(eqn) for out in eqn.outvars if is_home(out)}


def _fuses_operands(eqn: JaxprEqn) -> bool:
    """Whether an equation writes its result, and what makes its operand is computed where it reads it."""
    return kind_of(eqn).startswith(("reduce_", "arg")) or kind_of(eqn) == "gather"
