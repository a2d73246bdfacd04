"""The progress bar of what takes long: for people who watch, never in a pipe or a log.

It is drawn on the standard error stream of a terminal or notebook, and taken away when the work is done, so that what is printed
next begins on a clean line.
"""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

__all__ = ["progress"]


def progress(things: Iterable[Any] | None = None, *, after: float = 0.0, **options: Any) -> tqdm:
    """A progress bar, or nothing where nobody watches; use it in a ``with`` block, whose end takes it away.

    Args:
        things: what to iterate over, if anything.
        after: seconds of work before it shows.
        **options: of ``tqdm``.
    """
    return tqdm(things, disable=not _is_watched(), delay=after, leave=False, **options)


def _is_watched() -> bool:
    """Whether standard error is a terminal or the output of a notebook's cell."""
    stream = sys.stderr
    is_terminal = getattr(stream, "isatty", bool)  # what only has ``write`` (a logger's) is none
    return bool(is_terminal()) or type(stream).__module__.startswith("ipykernel")
