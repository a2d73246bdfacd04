"""The progress bar of what takes long: for people who watch, and never in a notebook that a program runs.

In a terminal it goes to standard error; in a notebook it is HTML, which needs no widgets as ``tqdm.auto`` does. It is taken away
when the work is done or has raised, so that the next line begins clean and the saved notebook shows no trace. In a pipe or a log
it is a plain line every half minute, of work that takes as long as that.
"""

import html
import importlib
import io
import math
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SELDOM = 30.0
"""Seconds between the lines of a log."""


def progress(things: Iterable[Any] | None = None, *, after: float = 0.0, **options: Any) -> tqdm:
    """A bar of ``tqdm``, shown ``after`` seconds where somebody watches, and seldom as a line of a log elsewhere.

    The end of its ``with`` block takes it away.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    if kernel is None:
        is_terminal = getattr(sys.stderr, "isatty", bool)()  # what only has ``write`` (a logger's) is none
        if is_terminal:
            return tqdm(things, delay=after, leave=False, **options)
        return _Log(things, file=io.StringIO(), leave=False, delay=max(after, 1.0), **options)
    request = getattr(kernel, "get_parent", dict)() or {}  # a program that runs a notebook cannot be asked for input
    watched = request.get("content", {}).get("allow_stdin", True)
    return _NotebookBar(things, disable=not watched, delay=after, leave=False, file=io.StringIO(), **options)


class _Log(tqdm):
    """Lines that stay, for whoever reads them later: one for all bars, in every half minute of a bar."""

    _said = -math.inf  # when the last one was written

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        del pos
        now = time.time()  # as tqdm's own
        if msg != "" and now - max(self.start_t, _Log._said) >= _SELDOM:
            _Log._said = now
            print(f"jaxpp: {str(self).strip()}", file=sys.stderr, flush=True)

    def moveto(self, n: int) -> None:
        """Nothing: no cursor moves."""


class _NotebookBar(tqdm):
    _shown: Any = None

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        del pos  # bars of nested loops are outputs of their own
        if msg == "":
            if self._shown is not None:
                self._shown.update({}, raw=True)
            return True
        data = {"text/plain": str(self), "text/html": self._html()}
        if self._shown is None:  # known before it is shown, so that Ctrl-C in between leaves no bar that nobody takes away
            self._shown = importlib.import_module("IPython.display").DisplayHandle()
            self._shown.display(data, raw=True)
        else:
            self._shown.update(data, raw=True)
        return True

    def moveto(self, n: int) -> None:
        """Nothing: no cursor moves."""

    def _html(self) -> str:
        numbers = self.format_dict
        text = self.format_meter(**{**numbers, "bar_format": "{l_bar}<bar/>{r_bar}"})
        left, right = (html.escape(part.strip("| ")) for part in text.split("<bar/>"))
        size = f'value="{numbers["n"]}" max="{numbers["total"]}"' if numbers["total"] else ""
        return f'<div style="font-family:monospace">{left} <progress {size} style="vertical-align:middle"></progress> {right}</div>'
