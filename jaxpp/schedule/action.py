"""An action: one stage doing one kind of work on one microbatch, printed and read as ``2F0``.

The printed form is PyTorch's: stage, kind, microbatch. ``str`` and ``parse`` are inverses.
"""

import enum
import re
from typing import NamedTuple

from jaxpp.errors import ScheduleError

__all__ = ["Action", "Kind", "parse"]

_GRAMMAR = re.compile(r"(\d+)([FBIW])(\d+)")


class Kind(enum.StrEnum):
    """The kinds of work. B, the full backward, is I then W, always."""

    F = "F"
    """Forward: activation in, activation out, residuals kept."""
    B = "B"
    """Full backward: the input's cotangent and the parameters' gradients."""
    I = "I"  # noqa: E741  (the field's own letter)
    """Input part of the backward: the input's cotangent only."""
    W = "W"
    """Weight part of the backward: the parameters' gradients only."""


class Action(NamedTuple):
    """One cell of a schedule.

    Example:
        >>> str(Action(2, Kind.F, 0))
        '2F0'
        >>> parse("2F0") == Action(2, Kind.F, 0)
        True
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse(text: str) -> Action:
    """Read an action from its printed form.

    Raises:
        ScheduleError: the text is not digits, one of F B I W, digits.
    """
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"action {text!r}",
            "an action is written <stage><kind><microbatch>, the kind one of F, B, I, W",
            repr(text),
            "write it like 2F0",
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))
