"""What can go wrong, and the one template of all messages.

It says where (as the user wrote it), the rule, what was got, and what to do::

    ScheduleError: make('1f1b', num_ranks=0): a schedule needs at least one rank.
      Got: num_ranks=0.
      Fix: pass num_ranks=1 or more.

Every class is a ``ValueError``. An exception raised inside the user's own model comes out unchanged, with a note (``add_note``).
"""

import numbers
import pathlib
import sys
import warnings
from collections.abc import Sequence

__all__ = [
    "ArgumentError",
    "BankError",
    "BatchError",
    "CutError",
    "FitError",
    "InitError",
    "JaxppError",
    "LossError",
    "NonFiniteError",
    "OptimizerError",
    "OutputError",
    "ParamsError",
    "ProcessError",
    "PullbackError",
    "ScheduleError",
    "StateError",
    "VerifyError",
    "is_count",
    "shown",
    "warn",
]

_PACKAGE = pathlib.Path(__file__).parents[1]
_MOST_LINES = 10  # violations that a message names; of the others it says how many there are
_MOST_LETTERS = 80  # of a value that a message shows


class JaxppError(ValueError):
    """Base of all jaxpp errors; formats the template from its parts.

    Args:
        where: the place, as the user wrote it.
        rule: the rule that was broken, one sentence without its full stop.
        got: names and numbers; several violations are several lines, at most ten of which are shown. A full stop at the end, as
            what others say has, is not doubled.
        fix: what to do, imperative.
        picture: a table or listing with the bad cell marked; shown last.

    Attributes:
        parts: the arguments, so that another process can raise the same.
    """

    def __init__(self, where: str, rule: str, got: str | Sequence[str], fix: str, picture: str = ""):
        self.parts = (where, rule, got if isinstance(got, str) else tuple(got), fix, picture)
        lines = [got] if isinstance(got, str) else list(got)
        more = len(lines) - _MOST_LINES
        if more > 0:
            lines = [*lines[:_MOST_LINES], f"and {more} more"]
        body = "\n       ".join(lines).removesuffix(".")
        text = f"{where}: {rule}.\n  Got: {body}.\n  Fix: {fix}."
        if picture:
            text += "\n\n" + "\n".join("  " + line for line in picture.splitlines())
        super().__init__(text)


def shown(value: object) -> str:
    """A value as a message shows it: its printed form on one line, not longer than can be read.

    Example:
        >>> shown(3), len(shown("a" * 1000))
        ('3', 80)
    """
    try:
        text = " ".join(repr(value).split())
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply to be printed"
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


class ScheduleError(JaxppError):
    """An unknown, incomplete, misplaced or deadlocked schedule."""


class ArgumentError(JaxppError):
    """A count or option outside what the function accepts."""


class CutError(JaxppError):
    """The loss cannot be cut as asked: too many stages, or an unknown or misplaced cut.

    Attributes:
        unknown: the names of cuts that the model does not have.
    """

    unknown: tuple[str, ...] = ()


class FitError(JaxppError):
    """A step, or the parameters alone, do not fit into the memory that the devices have (``Pipeline(hbm=...)``)."""


class LossError(JaxppError):
    """The loss function is not one: its result is no scalar float, or it ignores its parameters."""


class BatchError(JaxppError):
    """The batch cannot be split into the microbatches asked for; there is no batch in a stream; a prompt cannot be continued."""


class ParamsError(JaxppError):
    """The parameters cannot be differentiated, or are not the tree the pipeline was made for."""


class InitError(JaxppError):
    """The init function cannot be traced, or takes inputs beside the key that are not certain to be in the batch."""


class OptimizerError(JaxppError):
    """The optimizer cannot run where the parameters live."""


class OutputError(JaxppError):
    """What a function returns cannot be put together: outputs that cannot be merged, or a carry that changes its shape."""


class StateError(JaxppError):
    """A state that was consumed by an earlier step, or belongs to another pipeline."""


class ProcessError(JaxppError):
    """The processes of a run do not do the same: they differ in code, settings or shapes, or one of them failed or is missing."""


class PullbackError(JaxppError):
    """A pullback was called a second time."""


class VerifyError(JaxppError):
    """The pipelined step differs from the single-device step."""


class NonFiniteError(JaxppError, FloatingPointError):
    """With ``jax_debug_nans`` on, a program returned NaN (or an infinity, with ``jax_debug_infs``); a FloatingPointError too."""


class BankError(JaxppError):
    """A parameter set that a bank does not have, cannot take, or cannot bring to the device."""


def is_count(value: object, least: int = 0) -> bool:
    """Whether a value is a whole number, NumPy's included, of at least ``least``."""
    if type(value) is int:  # asked for every action, and many times as fast
        return value >= least
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def warn(warning: Warning) -> None:
    """Warn at the user's own line: the innermost one that is no part of jaxpp."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _PACKAGE in pathlib.Path(frame.f_code.co_filename).parents:
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
