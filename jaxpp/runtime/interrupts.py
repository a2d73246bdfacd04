"""Signals held back while an update takes over the buffers of the state, so that Ctrl-C never leaves half of one behind.

Problem: Python runs a signal's handler between any two bytecodes of the main thread, so a ``KeyboardInterrupt`` may come after a
program has taken over old parameters and before its results have a name. Idea: from the first such program until the new state is
where it can be found again, a signal only leaves a note; then it is raised once more.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["Hold"]

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
"""Those whose handlers raise exceptions in practice: Ctrl-C, time limits, the notices of batch systems."""


class Hold:
    """Holds signals back from ``begin`` to the end of the ``with`` block, if there are Python handlers for them.

    Only the main thread runs handlers, so in other threads there is nothing to do.
    """

    __slots__ = ("_came", "_handlers")

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: set[int] = set()

    def __enter__(self) -> "Hold":
        return self

    def begin(self) -> None:
        """From now on signals wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler  # known before it is replaced
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a handler's arguments)
        self._came.add(number)

    def __exit__(self, *_: object) -> None:
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                signal.signal(number, handler)
                del self._handlers[number]
            while self._came:
                signal.raise_signal(self._came.pop())
        finally:
            if self._handlers or self._came:  # a handler has raised while others wait
                self.__exit__()
