"""The least time of a kernel by the numbers of a GPU, counted by hand."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxpp.runtime.hlo import Kernel
from jaxpp.runtime.roofline import LAUNCH, Roofline, copy_seconds, peaks_of, program_roofline, send_seconds
from jaxpp.targets import TARGETS

H100 = next(target for target in TARGETS if target.name == "h100")


def kernel(kind="fusion", runs=1, products=None, flops=0, read=0, written=0, host=0):
    return Kernel("k", kind, "XLA", runs, True, products or {}, flops, read, written, host)


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (kernel(products={"bfloat16": H100.peaks.bfloat16}), Roofline(1.0, 0.0, 0.0)),
        (kernel(products={"bfloat16": H100.peaks.bfloat16, "tensorfloat32": H100.peaks.tensorfloat32}), Roofline(2.0, 0.0, 0.0)),
        (kernel(flops=H100.peaks.vector), Roofline(1.0, 0.0, 0.0)),
        (kernel(products={"something new": H100.peaks.vector}), Roofline(1.0, 0.0, 0.0)),
        (kernel(read=H100.bandwidth, written=H100.bandwidth), Roofline(0.0, 2.0, 0.0)),
        (kernel(read=H100.bandwidth, products={"float64": 3 * H100.peaks.float64}), Roofline(3.0, 0.0, 0.0)),
        (kernel(read=3 * H100.bandwidth, products={"float64": H100.peaks.float64}), Roofline(0.0, 3.0, 0.0)),
        (kernel(host=H100.links.host), Roofline(0.0, 1.0, 0.0)),
        (kernel("collective", read=H100.links.peer, written=H100.links.peer), Roofline(0.0, 1.0, 0.0)),
        (kernel(read=4, written=4, flops=1), Roofline(0.0, 0.0, LAUNCH)),
        (kernel(read=4, runs=7), Roofline(0.0, 0.0, 7 * LAUNCH)),
        (kernel(), Roofline(0.0, 0.0, LAUNCH)),
    ],
)
def test_a_kernel_takes_at_least_what_limits_it(one, seconds):
    found = program_roofline([one], H100)
    assert found == pytest.approx(seconds)
    assert found.seconds == pytest.approx(sum(seconds))


def test_a_program_takes_the_sum_of_its_kernels():
    kernels = [kernel(read=H100.bandwidth), kernel(products={"int8": 2 * H100.peaks.int8}), kernel(runs=3)]
    assert program_roofline(kernels, H100) == pytest.approx((2.0, 1.0, 3 * LAUNCH))
    assert program_roofline([], H100).seconds == 0


def test_each_type_counts_at_its_own_peak():
    assert peaks_of({"bfloat16": H100.peaks.bfloat16, "float8": H100.peaks.float8}, H100) == pytest.approx(2.0)
    old = dataclasses.replace(H100, peaks=dataclasses.replace(H100.peaks, float8=None))
    assert peaks_of({"float8": old.peaks.vector}, old) == pytest.approx(1.0)


def test_sends_go_over_the_link_of_a_host_or_over_the_network():
    a, b, c = (SimpleNamespace(process_index=host) for host in (0, 0, 1))
    assert send_seconds(H100.links.peer, a, b, H100) == pytest.approx(1.0)
    assert send_seconds(H100.links.network, a, c, H100) == pytest.approx(1.0)
    assert copy_seconds(2 * H100.links.host, H100) == pytest.approx(2.0)
