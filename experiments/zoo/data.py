"""Real data that comes in packages: scikit-learn's handwritten digits, and lines of the Python standard library.

A batch is a function of the seed and the step alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_digits

from experiments.lm import text

__all__ = [
    "HELD_OUT_BATCHES",
    "LENGTH",
    "PAD",
    "START",
    "VOCABULARY",
    "Split",
    "corpus",
    "digits",
    "held_out_batches",
    "lines",
    "sampler",
]

VOCABULARY = 128  # bytes of ASCII
LENGTH = 32  # bytes of a sequence
PAD, START = 0, 1  # bytes that no source has
SHORTEST_LINE = 8
HELD_OUT_DIGITS = 360  # a fifth; the digits are in order of their writers, so these are by other people
HELD_OUT_BATCHES = 4


class Split(NamedTuple):
    """Examples in two parts, each a tree of arrays with one row an example."""

    train: Any
    held_out: Any


@cache
def digits() -> Split:
    """8x8 images ``[rows, 8, 8, 1]`` of numbers from 0 to 1, and which digit each is."""
    found: Any = load_digits()
    images, labels = (found.images[..., None] / 16).astype("float32"), found.target.astype("int32")
    cut = len(labels) - HELD_OUT_DIGITS
    return Split({"image": images[:cut], "label": labels[:cut]}, {"image": images[cut:], "label": labels[cut:]})


@cache
def corpus() -> text.Corpus:
    """The standard library's sources, as bytes of ASCII."""
    whole = text.read(None, LENGTH)
    return text.Corpus(whole.name, _ascii(whole.train), _ascii(whole.held_out))


@cache
def lines() -> Split:
    """Lines in small letters, and as they were written: ``source`` and ``target``, both ``[rows, up to LENGTH + 1]``.

    The target begins with ``START``; both are filled up with ``PAD``. Only lines with a capital letter are taken.
    """
    return Split(_pairs(corpus().train), _pairs(corpus().held_out))


def sampler(data: Any, size: int, seed: int) -> Callable[[int], Any]:
    """The batch of each step: ``size`` rows of ``data`` at random."""
    rows = len(jax.tree.leaves(data)[0])

    def batch(step: int) -> Any:
        chosen = np.random.default_rng((seed, step)).integers(0, rows, size)
        return jax.tree.map(lambda leaf: leaf[chosen], data)

    return batch


def held_out_batches(data: Any, size: int) -> tuple[Any, ...]:
    """A few batches, spread evenly over ``data``: the same ones whatever the seed."""
    rows = np.linspace(0, len(jax.tree.leaves(data)[0]) - 1, HELD_OUT_BATCHES * size).astype(int)
    return tuple(jax.tree.map(lambda leaf, part=part: leaf[part], data) for part in np.split(rows, HELD_OUT_BATCHES))


def _ascii(data: np.ndarray) -> np.ndarray:
    return np.minimum(data, np.uint8(VOCABULARY - 1))


def _pairs(data: np.ndarray) -> dict[str, np.ndarray]:
    stripped = (line.strip() for line in data.tobytes().splitlines())
    kept = [line for line in stripped if SHORTEST_LINE <= len(line) <= LENGTH and line.lower() != line]
    source, target = (np.full((len(kept), width), PAD, "int32") for width in (LENGTH, LENGTH + 1))
    target[:, 0] = START
    for row, line in enumerate(kept):
        source[row, : len(line)] = np.frombuffer(line.lower(), np.uint8)
        target[row, 1 : len(line) + 1] = np.frombuffer(line, np.uint8)
    return {"source": source, "target": target}
