"""What a compiled program takes at least on a GPU whose numbers are known (``jaxpp.targets``): the roofline of each of its kernels.

A kernel takes at least as long as its arithmetic at the peak of its types, as its bytes at the bandwidth of the memory that they
are in, and as a launch; a program, as the sum over its kernels, which a stream runs one after the other. Real kernels reach a part
of these peaks, so a bound is never a prediction: what is measured may be twice as long, and is not shorter. A prediction takes the
share of each peak that kernels of their kind and size were measured to reach (``jaxpp.efficiency``), and has a range.

A collective takes at least as long as the bytes that each device must send. Of n devices that end with N bytes each, a ring sends
from each (n - 1) / n N for an all-gather or a reduce-scatter, and twice that for an all-reduce, which is one after the other. Where
they are on h hosts, d on each, devices of a host share what leaves it: each sends the same with h for n of N / d over its network
card, beside a ring on each host. Switches that sum on the way (NVLink SHARP) send less in an all-reduce, and are not counted.

Reference: Williams et al., Roofline: An Insightful Visual Performance Model, CACM 52(4), 2009.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.efficiency import (
    CACHE,
    CACHED,
    COLLECTIVE,
    KERNEL,
    VECTOR,
    as_linked,
    attention_share,
    moved_share,
    product_seconds,
    reached,
)
from jaxpp.runtime.hlo import Kernel, Product
from jaxpp.targets import GPU, Peaks
from jaxpp.types import Device

LAUNCH = 1e-6
"""Seconds from the beginning of a kernel that does nothing to the beginning of the next: about 1 where launches are queued."""


SPREAD = 0.8, 1.45
"""What a measured step takes over its prediction, from the least to the most, by the errors of 30 steps on 1 to 64 GPUs. XLA's own
on an H200 take 1.02 and 1.05 of it (experiments/gpu/h200-jax-0.11). Of published steps of such models on A100, A800 and H100, by
programs that others wrote, those of hand-written kernels take 0.82, and those of PyTorch 0.83 to 1.40, a tenth off in the median.
The numbers of ``jaxpp.efficiency`` were settled with these steps in view, so that other steps may be further off."""


class Prediction(NamedTuple):
    """What a step likely takes: ``forecast.bound.predicted``, and the prediction of a row of ``jaxpp.plan``.

    Attributes:
        seconds: the likely time.
        low: where the range begins in which a measurement is expected, in seconds.
        high: where it ends. ``experiments/published`` says how many steps that others have measured lie in their ranges.
    """

    seconds: float
    low: float
    high: float


class Roofline(NamedTuple):
    """What a kernel, or all kernels of a program, take at least, in seconds, by what limits them."""

    compute: float  # of arithmetic, at the peaks
    memory: float  # of bytes, at the bandwidth
    launch: float  # of launches, where neither arithmetic nor bytes take as long

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def kernel_roofline(kernel: Kernel, target: GPU, devices: Sequence[Device] = ()) -> Roofline:
    """What all runs of a kernel take at least, on these devices of a mesh; it counts where its limit is."""
    arithmetic = peaks_of(kernel.products, target) + kernel.flops / target.peaks.vector
    together = collective_seconds(kernel, target, [device.process_index for device in devices])
    moved = max((kernel.bytes_read + kernel.bytes_written) / target.bandwidth, kernel.host_bytes / target.links.host, together)
    most = max(arithmetic, moved, LAUNCH)
    times = [
        kernel.runs * most * limit for limit in (most == arithmetic, most == moved != arithmetic, most not in (arithmetic, moved))
    ]
    return Roofline(*times)


def collective_seconds(kernel: Kernel, target: GPU, hosts: Sequence[int] = ()) -> float:
    """What a run of a collective takes at least over links and network; ``hosts`` of the devices of the mesh, one unless given."""
    whole, seconds = max(kernel.bytes_read, kernel.bytes_written), 0.0  # a gather writes the whole, a scatter reads it
    for group in kernel.groups:
        counts = Counter(hosts[position] if hosts else 0 for position in group)
        inside, outside = _sent(kernel.collective, len(set(group)), list(counts.values()))
        seconds = max(seconds, whole * inside / target.links.peer, whole * outside / target.links.network)
    return seconds


def _sent(collective: str, devices: int, counts: Sequence[int]) -> tuple[float, float]:
    """What each device sends to its own host and to others, as parts of the whole, with so many devices on each host."""
    hosts, most, least = len(counts), max(counts), min(counts)
    if collective == "collective-permute":
        return (float(devices > 1), 0.0) if hosts == 1 else (0.0, 1.0)
    if collective == "collective-broadcast":
        return float(most > 1), (hosts > 1) / least
    if collective.endswith("all-to-all"):
        return (most - 1) / devices, (devices - least) / devices
    times = 2 if collective == "all-reduce" else 1
    return times * (most - 1) / most, times * (hosts - 1) / hosts / least


def program_roofline(kernels: Sequence[Kernel], target: GPU, devices: Sequence[Device] = ()) -> Roofline:
    """What a program takes at least, on these devices of a mesh."""
    parts = [kernel_roofline(kernel, target, devices) for kernel in kernels] or [Roofline(0, 0, 0)]
    return Roofline(*map(sum, zip(*parts, strict=True)))


def likely_seconds(kernels: Sequence[Kernel], target: GPU, devices: Sequence[Device] = ()) -> float:
    """What a program likely takes on these devices of a mesh: no kernel less than its roofline."""
    return sum(kernel_seconds(kernel, target, devices) for kernel in kernels)


def kernel_seconds(kernel: Kernel, target: GPU, devices: Sequence[Device] = ()) -> float:
    """What all runs of a kernel likely take, on these devices of a mesh."""
    linked = as_linked(target)
    together = collective_seconds(kernel, linked, [device.process_index for device in devices])
    cached = sum(num_bytes for num_bytes, since in kernel.again if num_bytes + since <= CACHE * target.chip.l2)
    num_bytes = kernel.bytes_read + kernel.bytes_written - (1 - 1 / CACHED) * cached
    moved = num_bytes / target.bandwidth / moved_share(kernel.kind)
    arithmetic = products_seconds(kernel, target) + kernel.flops / target.peaks.vector / VECTOR
    beside = COLLECTIVE if together else KERNEL
    return kernel.runs * (beside + max(arithmetic, moved, kernel.host_bytes / linked.links.host, together))


def products_seconds(kernel: Kernel, target: GPU) -> float:
    """What the matrix products of a kernel likely take, by their sizes; those whose sizes are not known as large ones."""
    known = sum(_product_seconds(product, target) for product in kernel.sizes)
    if kernel.sizes:
        return known
    return sum(flops / peak_of(target.peaks, kind) / reached(target, kind).share for kind, flops in kernel.products.items())


def _product_seconds(product: Product, target: GPU) -> float:
    peak = peak_of(target.peaks, product.type)
    if product.attends:
        share = attention_share(target, product.attends == "backward", product.causal, product.n, product.k)
        return product.flops / peak / share
    return product_seconds(target, peak, product.type, (product.batch, product.m, product.n, product.k))


def peaks_of(products: Mapping[str, float], target: GPU) -> float:
    """Seconds of matrix products, FLOPs by the type of their operands, at the peaks of a target."""
    return sum(flops / peak_of(target.peaks, kind) for kind, flops in products.items())


def peak_of(peaks: Peaks, kind: str) -> float:
    """FLOP/s of products of a type; of a type without a peak of its own those of float32, elementwise."""
    return getattr(peaks, kind, None) or peaks.vector


def send_seconds(num_bytes: float, source: Device, target: Device, numbers: GPU) -> float:
    """What a send takes at least: over the link of a host, or, between hosts, over the network."""
    same = source.process_index == target.process_index
    return num_bytes / (numbers.links.peer if same else numbers.links.network)


def copy_seconds(num_bytes: float, numbers: GPU) -> float:
    """What a copy between a device and the memory of its host takes at least."""
    return num_bytes / numbers.links.host
