"""Ctrl-C, and the SIGTERM of batch systems, as a request: the run ends after the step under way, and saves what it has.

A ``KeyboardInterrupt`` comes between any two lines, and the loss of the step under way is lost then. So the first signal only
leaves a note, which the training loop reads after every step. From then on signals do what they did before: a second Ctrl-C ends
the process at once, even if the disk hangs.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "StopRequest"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The run was interrupted, and has saved what it had.

    Args:
        message: what is true now, in one line.
        number: of the signal.
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


class StopRequest:
    """Notes the first signal in a ``with`` block; only the main thread can, elsewhere there is never a request.

    Args:
        wanted: False leaves the signals as they are.

    Attributes:
        number: of the signal that came; None if none did.
    """

    def __init__(self, *, wanted: bool):
        self.number: int | None = None
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if self._wanted:
            for number in SIGNALS:
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a handler's arguments)
        self._restore()
        self.number = number
        said = "the run ends after this step, and saves it; a second Ctrl-C ends it at once"
        os.write(2, f"\nlm: {signal.Signals(number).name}: {said}\n".encode())  # print may be what was interrupted

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
