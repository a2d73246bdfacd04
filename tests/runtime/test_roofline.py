"""The least time of a kernel by the numbers of a GPU, counted by hand."""

import dataclasses
import pathlib
from types import SimpleNamespace

import pytest

from jaxpp.efficiency import CACHED, COLLECTIVE, KERNEL, LINKS, moved_share, product_seconds, reached
from jaxpp.runtime.hlo import Kernel, Product, read_kernels
from jaxpp.runtime.roofline import (
    LAUNCH,
    SPREAD,
    Roofline,
    collective_seconds,
    copy_seconds,
    likely_seconds,
    peaks_of,
    program_roofline,
    send_seconds,
)
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


# --- collectives ---

WHOLE = 840  # bytes that each device has before a reduction, or after a gather: a multiple of 2 to 8
SENT = {  # by each of so many devices of one host
    "all-reduce": {2: 840, 3: 1120, 4: 1260, 5: 1344, 6: 1400, 7: 1440, 8: 1470},
    "all-gather": {2: 420, 3: 560, 4: 630, 5: 672, 6: 700, 7: 720, 8: 735},
    "reduce-scatter": {2: 420, 3: 560, 4: 630, 5: 672, 6: 700, 7: 720, 8: 735},
    "all-to-all": {2: 420, 3: 560, 4: 630, 5: 672, 6: 700, 7: 720, 8: 735},
    "collective-permute": dict.fromkeys(range(2, 9), 840),
}
APART = {  # by so many devices of each of two hosts: over links of their host, and each over the network
    "all-reduce": {(1, 1): (0, 840), (2, 2): (840, 420), (3, 3): (1120, 280), (4, 4): (1260, 210), (3, 1): (1120, 840)},
    "all-gather": {(1, 1): (0, 420), (2, 2): (420, 210), (3, 3): (560, 140), (4, 4): (630, 105), (3, 1): (560, 420)},
    "reduce-scatter": {(1, 1): (0, 420), (2, 2): (420, 210), (3, 3): (560, 140), (4, 4): (630, 105), (3, 1): (560, 420)},
    "all-to-all": {(1, 1): (0, 420), (2, 2): (210, 420), (3, 3): (280, 420), (4, 4): (315, 420), (3, 1): (420, 630)},
    "collective-permute": dict.fromkeys(((1, 1), (2, 2), (3, 3), (4, 4), (3, 1)), (840, 840)),
}
SLOW = dataclasses.replace(H100, links=dataclasses.replace(H100.links, peer=1.0, network=1.0))  # a second for each byte


def together(kind, devices):
    """A collective of so many devices, each of which ends with, or begins with, the whole."""
    part = WHOLE // devices
    read, written = {"all-gather": (part, WHOLE), "reduce-scatter": (WHOLE, part)}.get(kind, (WHOLE, WHOLE))
    ring = tuple((k, (k + 1) % devices) for k in range(devices))
    groups = ring if kind == "collective-permute" else (tuple(range(devices)),)
    return dataclasses.replace(kernel("collective", read=read, written=written), collective=kind, groups=groups)


@pytest.mark.parametrize("kind", SENT)
def test_devices_of_a_host_send_what_a_ring_sends(kind):
    for devices, num_bytes in SENT[kind].items():
        assert collective_seconds(together(kind, devices), SLOW) == pytest.approx(num_bytes), devices
        assert collective_seconds(together(kind, devices), SLOW, [3] * devices) == pytest.approx(num_bytes)
        program = program_roofline([together(kind, devices)] * 2, SLOW, [SimpleNamespace(process_index=0)] * devices)
        assert program == pytest.approx((0, 2 * num_bytes, 0))


@pytest.mark.parametrize("kind", APART)
def test_devices_of_two_hosts_share_what_crosses_the_network(kind):
    for counts, (inside, outside) in APART[kind].items():
        hosts = [0] * counts[0] + [1] * counts[1]
        times = {
            each: collective_seconds(together(kind, sum(counts)), dataclasses.replace(SLOW, links=links), hosts)
            for each, links in (
                ("network", dataclasses.replace(SLOW.links, peer=1e9)),
                ("peer", dataclasses.replace(SLOW.links, network=1e9)),
            )
        }
        assert times["network"] == pytest.approx(outside, rel=1e-5), counts
        if kind != "collective-permute" or counts != (1, 1):
            assert times["peer"] == pytest.approx(inside, abs=1e-5), counts


def test_groups_that_lie_on_one_host_each_do_not_use_the_network():
    reduced = dataclasses.replace(together("all-reduce", 2), groups=((0, 1), (2, 3)))
    assert collective_seconds(reduced, SLOW, [0, 0, 1, 1]) == 840
    fast = dataclasses.replace(SLOW, links=dataclasses.replace(SLOW.links, peer=84.0))
    assert collective_seconds(reduced, fast, [0, 0, 1, 1]) == 10
    across = dataclasses.replace(reduced, groups=((0, 2), (1, 3)))
    assert collective_seconds(across, fast, [0, 0, 1, 1]) == 840


def test_a_device_that_keeps_what_it_has_sends_nothing():
    kept = dataclasses.replace(together("collective-permute", 2), groups=((0, 0), (1, 1)))
    assert collective_seconds(kept, SLOW) == 0
    alone = dataclasses.replace(together("all-reduce", 2), groups=((0,), (1,)))
    assert collective_seconds(alone, SLOW, [0, 1]) == 0


def test_a_broadcast_passes_the_whole_on_and_devices_of_a_host_share_the_network():
    sent = dataclasses.replace(together("all-reduce", 4), collective="collective-broadcast")
    assert collective_seconds(sent, SLOW) == 840
    slow = dataclasses.replace(SLOW, links=dataclasses.replace(SLOW.links, peer=1e9))
    assert collective_seconds(sent, slow, [0, 0, 1, 1]) == pytest.approx(420)


# --- what is likely ---


def multiplying(m, n, k, batch=1):
    flops = 2 * batch * m * n * k
    product = Product("bfloat16", flops, batch, m, n, k)
    return dataclasses.replace(kernel(products={"bfloat16": flops}), sizes=(product,))


def test_a_kernel_likely_takes_its_arithmetic_or_its_bytes_at_what_is_reached_and_some_time_besides():
    seconds = product_seconds(H100, H100.peaks.bfloat16, "bfloat16", (1, 4096, 768, 3072))
    assert likely_seconds([multiplying(4096, 768, 3072)], H100) == pytest.approx(KERNEL + seconds)
    unknown = kernel(products={"bfloat16": H100.peaks.bfloat16})
    assert likely_seconds([unknown], H100) == pytest.approx(KERNEL + 1 / reached(H100, "bfloat16").share)
    moving = dataclasses.replace(kernel(read=H100.bandwidth, runs=3), kind="reduction")
    assert likely_seconds([moving], H100) == pytest.approx(3 * (KERNEL + 1 / moved_share("reduction")))
    assert likely_seconds([kernel(host=H100.links.host)], H100) == pytest.approx(KERNEL + 1 / LINKS.share)
    reduced = dataclasses.replace(together("all-reduce", 2), kind="collective")
    assert likely_seconds([reduced], SLOW) == pytest.approx(COLLECTIVE + 840 / LINKS.share)
    assert likely_seconds([], H100) == 0


def test_what_a_cache_holds_is_read_sooner():
    size = H100.chip.l2 // 4
    cold = dataclasses.replace(kernel(read=size), kind="elementwise")
    warm, late = (dataclasses.replace(cold, again=((size, since),)) for since in (size, 2 * size))
    found = [likely_seconds([each], H100) - KERNEL for each in (cold, warm, late)]
    assert found == pytest.approx([found[0], found[0] / CACHED, found[0]])


@pytest.mark.parametrize("rows", [4, 64, 512, 4096])
def test_a_smaller_microbatch_is_never_more_efficient(rows):
    for width, terms in ((768, 768), (3072, 768), (50304, 768), (4096, 14336)):
        for one, two in (
            (multiplying(rows, width, terms), multiplying(2 * rows, width, terms)),
            (multiplying(width, terms, rows), multiplying(width, terms, 2 * rows)),  # the gradient of the weights
            (multiplying(128, 64, 128, batch=rows), multiplying(128, 64, 128, batch=2 * rows)),
        ):
            assert 2 * likely_seconds([one], H100) >= likely_seconds([two], H100)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_xla_printed_likely_takes_longer_than_its_bound(target):
    texts = [path.read_text() for path in sorted((pathlib.Path(__file__).parent / "printed").rglob("*.txt"))]
    assert len(texts) > 20
    for text in texts:
        kernels = [dataclasses.replace(each, again=()) for each in read_kernels(text)]  # a bound counts no cache
        devices = [SimpleNamespace(process_index=0)] * 4
        assert likely_seconds(kernels, target, devices) > program_roofline(kernels, target, devices).seconds
    assert SPREAD[0] < 1 < SPREAD[1]
