"""What kernels reach of a GPU's peaks: tiles counted by hand, and products whose speed was published."""

import itertools

import pytest

from jaxpp import efficiency
from jaxpp.efficiency import as_linked, attention_share, moved_share, product_seconds, reached
from jaxpp.runtime.roofline import LAUNCH
from jaxpp.targets import TARGETS

GPUS = {target.name: target for target in TARGETS}
H100, A100 = GPUS["h100"], GPUS["a100-80gb"]
PEAK = H100.peaks.bfloat16


def test_a_product_takes_as_many_waves_of_tiles_as_it_has():
    def seconds(rows, columns, terms):
        return product_seconds(H100, PEAK, "bfloat16", (1, rows, columns, terms))

    rate = 0.97 * PEAK / 132  # of each of 132 cores
    assert seconds(128 * 12, 256 * 11, 256) == pytest.approx(2 * 128 * 256 * (256 + 96) / rate), "132 tiles are one wave"
    assert seconds(128 * 24, 256 * 22, 256) == pytest.approx(4 * seconds(128 * 12, 256 * 11, 256))
    assert seconds(128 * 12, 256 * 11, 256) < seconds(128 * 12 + 1, 256 * 11, 256) <= 2 * seconds(128 * 12, 256 * 11, 256)
    whole = 2 * 8192**3 / (PEAK * reached(H100, "bfloat16").share)
    assert seconds(8192, 8192, 8192) == pytest.approx(whole), "all cores work all the time, as far as the power goes"


def test_a_long_sum_with_few_tiles_is_divided_among_the_cores():
    one = 2 * 128 * 256 * (1 << 20) / (PEAK / 132)
    assert product_seconds(H100, PEAK, "bfloat16", (1, 128, 256, 1 << 20)) < one / 90, "one tile would be on one core of 132"


SIZES = (1, 2, 64, 96, 128, 1000, 1024, 4096)


@pytest.mark.parametrize("target", [H100, A100, GPUS["rtx-4090"], GPUS["v100-32gb"]], ids=lambda target: target.name)
def test_half_of_a_product_never_takes_less_than_half_of_its_time(target):
    peak = target.peaks.float16
    for batch, rows, columns, terms in itertools.product((1, 12), SIZES, SIZES, (64, 768, 8192)):
        whole = product_seconds(target, peak, "float16", (batch, 2 * rows, columns, terms))
        assert product_seconds(target, peak, "float16", (batch, rows, columns, terms)) >= 0.5 * whole * (1 - 1e-12)
        assert whole >= 2 * batch * 2 * rows * columns * terms / peak, "no product is faster than the peak"


PUBLISHED = {  # TFLOP/s of products of square matrices: zzc0721/torch-performance-test-data, issues 79, 95, 108, 78, 140, 126
    ("h100", "bfloat16"): {2048: 677, 4096: 789, 8192: 798, 10240: 720},
    ("h100", "tensorfloat32"): {2048: 335, 4096: 402, 8192: 372, 10240: 377},
    ("h100-pcie", "bfloat16"): {2048: 449, 4096: 496, 8192: 493, 10240: 472},
    ("a100-40gb", "float16"): {2048: 215, 4096: 241},  # a PCIe card, which its 250 W slow down later
    ("rtx-4090", "bfloat16"): {1024: 127, 2048: 165, 4096: 152, 8192: 160, 10240: 159},
    ("v100-32gb", "float16"): {2048: 78, 4096: 96, 8192: 97, 10240: 89},
    ("a10g", "bfloat16"): {1024: 48, 2048: 61, 4096: 62, 8192: 67, 10240: 69},
}


@pytest.mark.parametrize(("name", "kind"), PUBLISHED)
def test_products_take_what_was_published_within_a_fifth(name, kind):
    """Many of one product follow one another there, and each begins while the one before it ends."""
    target = GPUS[name]
    for size, measured in PUBLISHED[name, kind].items():
        seconds = LAUNCH + product_seconds(target, getattr(target.peaks, kind), kind, (1, size, size, size))
        assert 2 * size**3 / seconds / 1e12 == pytest.approx(measured, rel=0.2), size


def test_attention_reaches_what_the_papers_show():
    for backward, width, length, measured in (  # TFLOP/s of cuDNN on an H100, without a mask: arXiv 2407.08608, figures 5 and 6
        (False, 128, 512, 497),
        (False, 128, 2048, 617),
        (False, 128, 16384, 595),
        (False, 64, 1024, 373),
        (False, 64, 16384, 413),
        (True, 128, 512, 305),
        (True, 128, 2048, 465),
        (True, 128, 16384, 516),
        (True, 64, 1024, 348),
    ):
        share = attention_share(H100, backward, False, length, width)
        assert share * PEAK / 1e12 == pytest.approx(measured, rel=0.1), (backward, width, length)
    for length, measured in {512: 315, 2048: 484, 16384: 539}.items():  # with a causal mask
        assert attention_share(H100, False, True, length, 128) * PEAK / 1e12 == pytest.approx(measured, rel=0.1)
    assert attention_share(A100, False, False, 16384, 128) == pytest.approx(0.73, abs=0.01)
    assert attention_share(A100, True, False, 16384, 128) == pytest.approx(0.63, abs=0.015)
    for backward, length, measured in ((False, 1024, 81), (False, 8192, 82), (True, 1024, 63), (True, 8192, 77)):
        share = attention_share(
            GPUS["rtx-a6000"], backward, False, length, 64
        )  # of 111 TFLOP/s of an RTX A5000, of that generation
        assert share * 111 == pytest.approx(measured, rel=0.15), "gpu-mode/ring-attention issue 10"


def test_attention_over_shorter_sequences_and_narrower_heads_is_never_more_efficient():
    for target, backward, causal in itertools.product((H100, A100), (False, True), (False, True)):
        by_length = [attention_share(target, backward, causal, length, 128) for length in (128, 1024, 8192)]
        by_width = [attention_share(target, backward, causal, 4096, width) for width in (16, 64, 128)]
        assert by_length == sorted(by_length) and by_width == sorted(by_width)
        assert by_length[0] > 0 and by_length[-1] < 1 and by_width[0] > 0
        assert by_width[-1] == attention_share(target, backward, causal, 4096, 256)


def test_every_share_is_a_part_of_the_peak_and_has_a_source():
    shares = [each for kinds in efficiency._PRODUCTS.values() for each in kinds.values()]
    shares += [*efficiency._MOVED.values(), efficiency.LINKS]
    assert all(0 < each.share <= 1 and each.source for each in shares)
    for target in TARGETS:
        for kind in ("bfloat16", "float16", "tensorfloat32", "float32", "float64", "float8", "int8", "unheard of"):
            assert 0.5 < reached(target, kind).share < 1
    assert moved_share("unheard of") == moved_share("product")


def test_links_reach_a_part_of_their_rates():
    likely = as_linked(H100)
    assert likely.links.peer == pytest.approx(0.82 * H100.links.peer)
    assert likely.links.network < H100.links.network and likely.peaks == H100.peaks
