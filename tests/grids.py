"""Grids of cases, of which the short tier has a sample that covers them."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the values: a diagonal, on which each value of each axis lies, is short, and the others are long.

    Example:
        >>> [(case.values, bool(case.marks)) for case in covering("ab", [1, 2])]
        [(('a', 1), False), (('a', 2), True), (('b', 1), True), (('b', 2), False)]
    """
    length = max(map(len, axes))
    short = {tuple(k % len(axis) for axis in axes) for k in range(length)}
    return [
        pytest.param(*(axis[k] for axis, k in zip(axes, place, strict=True)), marks=() if place in short else pytest.mark.long)
        for place in itertools.product(*(range(len(axis)) for axis in axes))
    ]
