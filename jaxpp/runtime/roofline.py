"""What a compiled program takes at least on a GPU whose numbers are known (``jaxpp.targets``): the roofline of each of its kernels.

A kernel takes at least as long as its arithmetic at the peak of its types, as its bytes at the bandwidth of the memory that they
are in, and as a launch; a program, as the sum over its kernels, which a stream runs one after the other. Real kernels reach a part
of these peaks, so a bound is never a prediction: what is measured may be twice as long, and is not shorter.

Reference: Williams et al., Roofline: An Insightful Visual Performance Model, CACM 52(4), 2009.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpp.runtime.hlo import Kernel
from jaxpp.targets import Peaks, Target
from jaxpp.types import Device

LAUNCH = 1e-6
"""Seconds from the beginning of a kernel that does nothing to the beginning of the next: about 1 where launches are queued."""


class Roofline(NamedTuple):
    """What a kernel, or all kernels of a program, take at least, in seconds, by what limits them."""

    compute: float  # of arithmetic, at the peaks
    memory: float  # of bytes, at the bandwidth
    launch: float  # of launches, where neither arithmetic nor bytes take as long

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def kernel_roofline(kernel: Kernel, target: Target) -> Roofline:
    """What all runs of a kernel take at least; it counts where its limit is."""
    products = sum(flops / peak_of(target.peaks, kind) for kind, flops in kernel.products.items())
    arithmetic = products + kernel.flops / target.peaks.vector
    link = target.links.peer if kernel.kind == "collective" else target.links.host
    on_link = kernel.bytes_read if kernel.kind == "collective" else kernel.host_bytes
    moved = max((kernel.bytes_read + kernel.bytes_written) / target.bandwidth, on_link / link)
    most = max(arithmetic, moved, LAUNCH)
    times = [
        kernel.runs * most * limit for limit in (most == arithmetic, most == moved != arithmetic, most not in (arithmetic, moved))
    ]
    return Roofline(*times)


def program_roofline(kernels: Sequence[Kernel], target: Target) -> Roofline:
    """What a program takes at least."""
    return (
        Roofline(*map(sum, zip(*(kernel_roofline(kernel, target) for kernel in kernels), strict=True)))
        if kernels
        else Roofline(0, 0, 0)
    )


def peaks_of(products: Mapping[str, float], target: Target) -> float:
    """Seconds of matrix products, FLOPs by the type of their operands, at the peaks of a target."""
    return sum(flops / peak_of(target.peaks, kind) for kind, flops in products.items())


def peak_of(peaks: Peaks, kind: str) -> float:
    """FLOP/s of products of a type; of a type without a peak of its own those of float32, elementwise."""
    return getattr(peaks, kind, None) or peaks.vector


def send_seconds(num_bytes: float, source: Device, target: Device, numbers: Target) -> float:
    """What a send takes at least: over the link of a host, or, between hosts, over the network."""
    same = source.process_index == target.process_index
    return num_bytes / (numbers.links.peer if same else numbers.links.network)


def copy_seconds(num_bytes: float, numbers: Target) -> float:
    """What a copy between a device and the memory of its host takes at least."""
    return num_bytes / numbers.links.host
