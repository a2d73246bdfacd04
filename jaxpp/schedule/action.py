"""An action: one stage doing one kind of work on one microbatch, printed as ``2F0``, which is PyTorch's form, and parsed back."""

import enum
import re
from typing import NamedTuple

from jaxpp.errors import ScheduleError

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_GRAMMAR = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")


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
    """Read an action from its printed form, blanks around it passed over; the inverse of ``str``.

    Raises:
        ScheduleError: the text is not a number, one of F B I W, a number.
    """
    match = _GRAMMAR.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        got = repr(text) if len(repr(text)) < 80 else repr(text)[:80] + "..."
        rule = "an action is written <stage><kind><microbatch>, the kind one of F, B, I, W"
        raise ScheduleError("action", rule, got, "write it like 2F0")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))
