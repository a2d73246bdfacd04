"""What share of a GPU's peaks real kernels reach: the numbers that a prediction is made of, beside the peaks of ``jaxpp.targets``.

A product of matrices is computed in tiles, one on each core at a time::

      columns of the result
      +----+----+----+--         tiles of 128 x 256, or smaller ones where there would be too few for all cores;
    m |tile|tile|tile|           the cores take them in waves, and the last wave may be half empty;
      +----+----+----+--         a tile sums k products, and takes some more time to begin and to end

So it takes as many waves as its tiles need, and a small product is slower for each FLOP than a large one. Where all cores work, the
GPU as a whole reaches a share of its peak that was measured, by generation and type: its power is limited, and cores that are idle
leave theirs to the others. Attention that is one kernel has shares of its own, by the features of a head and the length of the
sequence. Everything else moves bytes, at a share of the bandwidth.

``Measured.source`` says where a number is from. Sums of such times are predictions; their errors are those of
``jaxpp.runtime.roofline``.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from jaxpp.targets import GPU, LinkRates

__all__ = [
    "COLLECTIVE",
    "KERNEL",
    "LINKS",
    "VECTOR",
    "Measured",
    "as_linked",
    "attention_share",
    "moved_share",
    "product_seconds",
    "reached",
]


class Measured(NamedTuple):
    """A share of a peak, and where it is from."""

    share: float
    source: str


_TABLES = "torch-performance-test-data (zzc0721 on GitHub), issue"
_MAMF = 'ml-engineering (stas00 on GitHub), "Maximum Achievable Matmul FLOPS"'
_LIKE = "assumed: like the generation before it"

KERNEL = 5e-6
"""Seconds that a kernel likely takes beside its arithmetic and its bytes: until the one before it has ended on all cores, its own
launch, its first reads and its last writes. On an H200 two programs are 4.3 us apart (experiments/gpu/h200-jax-0.11)."""

COLLECTIVE = 20e-6
"""The same of a collective, whose devices wait for one another."""

_PRODUCTS: Mapping[str, Mapping[str, Measured]] = {
    "7": {"float16": Measured(0.80, f"V100: 97 of 125 TFLOP/s with 8192 x 8192 matrices ({_TABLES} 140)")},
    "7.5": {"float16": Measured(0.80, _LIKE)},
    "8.0": {
        "bfloat16": Measured(0.84, f"A100 SXM: 271 of 312 TFLOP/s with the best of many sizes ({_MAMF}), which few products have"),
        "tensorfloat32": Measured(0.75, f"A100 PCIe: 108 of 156 TFLOP/s ({_TABLES} 108), and the SXM is some percent faster"),
        "float32": Measured(0.90, f"A100 PCIe: 17.6 of 19.5 TFLOP/s ({_TABLES} 108)"),
    },
    "8.6": {
        "bfloat16": Measured(0.87, f"A10G: 69 of 70, A40: 122 of 150 TFLOP/s ({_TABLES} 126 and 185)"),
        "float32": Measured(0.65, f"A40: 23.7 of 37.4 TFLOP/s ({_TABLES} 185)"),
    },
    "8.9": {
        "bfloat16": Measured(0.96, f"RTX 4090: 160 of 165, L20: 114 of 120 TFLOP/s ({_TABLES} 78 and 107)"),
        "float32": Measured(0.65, f"RTX 4090: 53 of 83 TFLOP/s ({_TABLES} 78)"),
    },
    "9": {
        "bfloat16": Measured(
            0.74, f"H100 SXM: 720 of 989 TFLOP/s where power has time to limit it ({_TABLES} 79), 795 before that ({_MAMF})"
        ),
        "tensorfloat32": Measured(0.75, f"H100 SXM: 372 to 402 of 495 TFLOP/s ({_TABLES} 79)"),
        "float32": Measured(0.77, f"H100 SXM: 52 of 67 TFLOP/s ({_TABLES} 79)"),
        "float8": Measured(0.71, f"H100 SXM: 1403 of 1979 TFLOP/s ({_MAMF})"),
    },
    "h100-pcie": {
        "bfloat16": Measured(0.65, f"472 to 496 of 756 TFLOP/s, at 350 W ({_TABLES} 95)"),
        "tensorfloat32": Measured(0.62, f"226 to 240 of 378 TFLOP/s ({_TABLES} 95)"),
        "float32": Measured(0.72, f"37 of 51 TFLOP/s ({_TABLES} 95)"),
    },
    "10": {"bfloat16": Measured(0.74, _LIKE), "float32": Measured(0.77, _LIKE), "float8": Measured(0.71, _LIKE)},
    "12": {"bfloat16": Measured(0.90, _LIKE), "float32": Measured(0.65, _LIKE)},
}
"""What a large product reaches of the peak, by compute capability (or the name of a GPU) and type."""

_CORE = 0.97
"""What a core reaches of its own peak inside of a tile, where power does not limit it."""

_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
"""Rows and columns of a tile, and what it reaches of the rate of the largest: a smaller one reads more for each FLOP."""

_BEGIN = 96
"""Terms of a sum that take as long as to begin a tile, fill its pipeline, and write the tile. With this, ``_CORE`` and ``_TILES``,
products of 1,024 to 10,240 rows take what was published for six GPUs to a fifth (``tests/test_efficiency.py``)."""

_SPLIT = 512
"""The fewest terms for which a sum is divided among cores, where there are fewer tiles than cores."""

ATTENTION: Mapping[tuple[str, bool], tuple[float, int]] = {
    ("forward", False): (0.62, 120),
    ("forward", True): (0.56, 350),
    ("backward", False): (0.54, 330),
    ("backward", True): (0.50, 700),
}
"""By pass and whether a mask is causal: what attention in one kernel reaches of the peak of an H100 for heads of 128 features and
long sequences, and the length that would halve it: a sequence of n reaches n / (n + length) of it. From the curves of cuDNN in the
FlashAttention-3 paper (arXiv 2407.08608, figures 5 and 6): 497 TFLOP/s with 512, 617 with 2,048 keys forward, 305 to 518 backward,
315 to 539 forward with a causal mask. Backward with one it is assumed to need twice the length."""

_NARROW = {"forward": 0.67, "backward": 0.82}
"""Heads of 64 features over heads of 128: 413 over 600 TFLOP/s forward, 420 over 518 backward, in the same figures."""

_AMPERE, _CARDS = 1.17, 1.25
"""How many times that share other GPUs reach of their smaller peaks. An A100 forward 73%, backward 63% (FlashAttention-2, arXiv
2307.08691); an RTX A5000, whatever the width of heads, 73% and 70% with 64 features (gpu-mode/ring-attention issue 10)."""

_MOVED: Mapping[str, Measured] = {
    "elementwise": Measured(
        0.80, "a sum of two arrays: 1,727 of 1,935 GB/s (mli/transformers-benchmarks issue 4), one of many less"
    ),
    "copy": Measured(0.75, "an H100's memory: 2,500 to 2,573 of 3,352 GB/s (NVIDIA/nccl issue 1264)"),
    "reduction": Measured(0.65, "steps of a GPT on an H200 (experiments/gpu/h200-jax-0.11), with all else of this table"),
    "product": Measured(0.75, "as a copy"),
    "scatter": Measured(0.30, "assumed: sums of rows in no order"),
    "sort": Measured(0.10, "assumed: some ten passes"),
}
"""What kernels that move bytes reach of the bandwidth of the memory."""

CACHE, CACHED = 0.5, 2.5
"""The share of the cache of all cores in which an array is likely found again, and how many times as fast it is read from there:
assumed. A GPT of 124 million parameters is trained on an RTX 4090, whose cache has 72 MB, in less time than its bytes take."""

VECTOR = 0.25
"""What elementwise work reaches of its peak, which counts a multiplication and a sum at once: an exponential takes several."""

LINKS = Measured(
    0.82,
    "NCCL: 370 of 450 GB/s over NVLink (NVIDIA/nccl-tests issue 212); copies over PCIe: 26.3 of 32 and 52.8 of 64 GB/s "
    "(NVIDIA/nvbandwidth issues 15 and 24), 26.35 of 32 between two cards (issue 50)",
)
"""What copies and collectives reach of a link."""


@cache
def as_linked(target: GPU) -> GPU:
    """The same GPU with the rates that its links are likely to reach."""
    rates = {name: rate * LINKS.share for name, rate in vars(target.links).items()}
    return replace(target, links=LinkRates(**rates))


def reached(target: GPU, kind: str) -> Measured:
    """What large products of a type reach of their peak; of a type that was not measured as those of bfloat16."""
    major, minor = target.chip.capability
    known = (target.name, f"{major}.{minor}", f"{major}")
    found = next((_PRODUCTS[name] for name in known if name in _PRODUCTS), _PRODUCTS["9"])
    return found.get(kind) or next(iter(found.values()))


def moved_share(kind: str) -> float:
    """What a kernel of this kind, as ``Kernel.kind`` says, reaches of the bandwidth; of another kind as a product."""
    return _MOVED.get(kind, _MOVED["product"]).share


def product_seconds(target: GPU, peak: float, kind: str, sizes: tuple[int, int, int, int]) -> float:
    """What the arithmetic of ``batch`` products of m x k by k x n matrices likely takes: waves of tiles on all cores.

    Half of a product never takes less than half of its time.

    Args:
        target: the GPU.
        peak: FLOP/s of this type on it.
        kind: the type, as ``Peaks`` names it.
        sizes: batch, m, n, k.
    """
    batch, m, n, k = sizes
    cores = target.chip.cores
    rate, best = _CORE * peak / cores, math.inf
    for rows, columns, share in _TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        parts = 1
        while True:
            waves = -(-tiles * parts // cores)
            best = min(best, waves * 2 * rows * columns * (k / parts + _BEGIN) / (rate * share))
            parts *= 2
            if tiles * parts > 4 * cores or k / parts < _SPLIT:
                break
    return max(best, 2 * batch * m * n * k / (peak * reached(target, kind).share))


def attention_share(target: GPU, backward: bool, causal: bool, length: int, width: int) -> float:
    """What attention in one kernel reaches of the peak, by the number of keys and the features of a head."""
    turn, capability = "backward" if backward else "forward", target.chip.capability
    most, half = ATTENTION[turn, causal]
    share = most * length / (length + half)
    if capability in ((8, 6), (8, 9), (12, 0)):
        return _CARDS * share
    narrow = min(1.0, _NARROW[turn] + (1 - _NARROW[turn]) * (width - 64) / 64)
    return narrow * share * (_AMPERE if capability < (9, 0) else 1.0)
