"""How long equations take on a device, estimated from shapes alone: what cuts and the stage table go by.

An equation takes as long as its arithmetic at the peak of the device or as its bytes at the bandwidth of its memory, whichever is
longer. Elementwise equations are taken to be fused, as XLA fuses them: they write what others than themselves read, and read each
value once. The rates are the maker's peaks of a GPU (``jaxpp.targets``), and each equation that is a kernel of its own takes some
microseconds besides, whatever it does: without them, a GPT's blocks of many kernels would seem half as long beside the few large
kernels of its head as they are. Of a CPU the rates are nominal, the same on every machine: only their ratios matter, and equal
programs are cut alike everywhere.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.jaxpr import FREE, Atom, aval_of, inner_jaxprs, is_precise, kind_of, length_of, terms, variables
from jaxpp.stages.repeatable import TRANSCENDENTAL, is_written
from jaxpp.targets import TARGETS, Peaks, target_of
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


_KERNEL = 8e-6
"""What a kernel of a GPU takes beside its arithmetic and its bytes. Measured with a GPT of 124 million parameters on an H200
(experiments/gpu): 5.8 us for each kernel that XLA made, of which there are 1.4 for an equation that is counted as one here."""

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
    return Rates(numbers.peaks, numbers.bandwidth, numbers.links.peer, numbers.links.network, numbers.links.host, _KERNEL)


def seconds_of(eqns: Sequence[JaxprEqn], results: Collection[Atom], rates: Rates) -> list[float]:
    """What each equation of a program that returns ``results`` takes, in seconds.

    What several fused equations read counts at the first of them, what they write at the equation that makes it. A loop takes as
    long as all its iterations, a branch as the longest of them; a ``while`` loop counts as one iteration.
    """
    source: dict[Var, Var] = {}  # what a value is another view of
    for eqn in eqns:
        for var in variables(eqn.invars) if _is_view(eqn) else ():
            source.update((out, source.get(var, var)) for out in eqn.outvars)

    def seen(atoms: Iterable[Atom]) -> list[Var]:
        return list(dict.fromkeys(source.get(var, var) for var in variables(atoms)))

    written = set(seen(results)).union(*(seen(eqn.invars) for eqn in eqns if not _fuses(eqn)))
    fused = {var for eqn in eqns if _fuses(eqn) for var in eqn.outvars} - written
    read = set[Var]()
    seconds = []
    for eqn in eqns:
        inner = [sum(seconds_of(jaxpr.eqns, jaxpr.outvars, rates)) for jaxpr in inner_jaxprs(eqn)]
        if inner or _is_view(eqn):
            seconds.append(max(inner, default=0.0) * (length_of(eqn) or 1))
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
        alone = rates.kernel if made or not _fuses(eqn) else 0.0  # a fusion counts where it writes
        seconds.append(alone + max(_arithmetic(eqn, rates.peaks), moved / rates.bandwidth))
    return seconds


def _fuses(eqn: JaxprEqn) -> bool:
    return not (is_written(eqn) or kind_of(eqn) in _ALONE or inner_jaxprs(eqn) or terms(eqn) is not None)


def _is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation gives what is there another shape, or names it."""
    return kind_of(eqn) in _VIEWS


def _arithmetic(eqn: JaxprEqn, peaks: Peaks) -> float:
    if terms(eqn) is not None:
        return count_flops(eqn) / _peak(eqn, peaks)
    kind, size = kind_of(eqn), sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars)
    if kind in FREE:
        return 0.0
    if kind.startswith("reduce_"):
        size = sum(math.prod(aval_of(var).shape) for var in variables(eqn.invars))
    return size * _OPERATIONS.get(kind, 1.0) / peaks.vector


def _peak(eqn: JaxprEqn, peaks: Peaks) -> float:
    """FLOP/s of a product with operands of these types; a float32 product is in TensorFloat-32 unless more is asked for."""
    dtype = max((aval_of(atom).dtype for atom in eqn.invars[:2]), key=lambda dtype: dtype.itemsize)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return peaks.float32 / 4 if dtype.itemsize == 8 else peaks.float64 / 4
    if dtype == jnp.float32:
        return peaks.float32 if is_precise(eqn) else peaks.tensorfloat32
    known = {1: peaks.int8 if jnp.issubdtype(dtype, jnp.integer) else peaks.float8, 8: peaks.float64}
    return known.get(dtype.itemsize, peaks.bfloat16) or peaks.vector
