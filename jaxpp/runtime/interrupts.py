"""Signals held back while an update takes over the buffers of the state, so that Ctrl-C never leaves half of one behind.

A ``KeyboardInterrupt`` may come between any two bytecodes, so also after a program has taken over old parameters and before its
results have a name. Until the new state can be found a signal only leaves a note; then its handler is called. A second Ctrl-C after
a second gets through, as a device may never answer. Signals wait too while a token is generated or a program is lowered.
"""

import _thread
import importlib
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import jax

_plain: Any = importlib.import_module("_signal")
"""What ``signal`` wraps; the wrapper raises and catches an exception, which a KeyboardInterrupt would have as its context."""

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
"""Those whose handlers raise exceptions in practice: Ctrl-C, time limits, the notices of batch systems."""

_SOON = 0.01  # seconds after which a finalizer is over
_PATIENCE = 1.0  # seconds after which a second Ctrl-C is no longer a slip of the same finger
_WAITED = "jaxpp: the step was completed first: go on with state = pipe.state"
_BROKE_OFF = "jaxpp: Ctrl-C, pressed again, broke off the update: the state may be lost, so go on from a checkpoint"

_Handler = Callable[[int, FrameType | None], object]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Hold:
    """Holds signals back from ``begin`` to the end of the ``with`` block; in other threads than the main one there are none.

    What a signal raises has the note ``waited`` if it was held back, or ``broke_off`` if it is a second Ctrl-C.
    """

    __slots__ = ("_broke_off", "_came", "_handlers", "_signals", "_waited", "begun")

    def __init__(self, waited: str = _WAITED, broke_off: str = _BROKE_OFF, signals: Sequence[int] | None = None) -> None:
        self._waited, self._broke_off, self.begun = waited, broke_off, False
        self._signals = _SIGNALS if signals is None else signals
        self._handlers: dict[int, _Handler] = {}
        self._came: dict[int, float] = {}

    def __enter__(self) -> "Hold":
        return self

    def begin(self) -> None:
        """From now on signals wait; a second call changes nothing. Within another hold of the same signals that one decides."""
        if self.begun or threading.current_thread() is not threading.main_thread():
            self.begun = True
            return
        for number in self._signals:
            handler = _plain.getsignal(number)
            if callable(handler) and getattr(handler, "__func__", None) is not Hold._note:
                self._handlers[number] = handler  # known before it is replaced
                _plain.signal(number, self._note)
        self.begun = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._came.get(number, now) > _PATIENCE:
            del self._came[number]
            for each, handler in self._handlers.items():  # none is held back any more: ``__exit__`` may be what this breaks off
                _plain.signal(each, handler)
            for _ in range(2):  # a handler may raise at the second only
                _call(self._handlers[number], number, frame, self._broke_off)
        self._came.setdefault(number, now)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                _plain.signal(number, handler)
                del self._handlers[number]
            while self._came:
                number = self._came.popitem()[0]
                handler = _plain.getsignal(number)  # one that was called before may have set another
                if callable(handler):
                    _call(handler, number, inspect.currentframe(), "" if kind else self._waited)
        finally:
            if self._handlers or self._came:  # a handler has raised while others wait
                self.__exit__(kind)


@contextmanager
def held() -> Iterator[None]:
    """A block in which signals wait from its beginning to its end, with ``Hold``."""
    with Hold("", "") as hold:
        hold.begin()
        yield


@contextmanager
def never_lost() -> Iterator[None]:
    """A block in which no Ctrl-C is lost.

    Python ignores what is raised in a finalizer or in a callback of its garbage collector, and JAX has such a callback: a signal
    that comes while garbage is collected is handled there. Such a Ctrl-C comes once more, as soon as that is over, or at the end of
    the block.
    """
    before, ignored = sys.unraisablehook, list["threading.Lock"]()  # for each the right to raise it again, which one takes

    def again(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        ignored.append(threading.Lock())
        timer = threading.Timer(_SOON, lambda: ignored[-1].acquire(blocking=False) and _thread.interrupt_main())
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        if sys.unraisablehook is again:
            sys.unraisablehook = before
    if ignored and ignored[-1].acquire(blocking=False):
        raise KeyboardInterrupt


def _call(handler: _Handler, number: int, frame: FrameType | None, note: str) -> None:
    try:
        handler(number, frame)
    except BaseException as error:
        if note:
            error.add_note(note)
        raise


def despite_ctrl_c(trace: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What ``trace`` returns, tried again if an earlier Ctrl-C has left a cache of JAX's that believes to be computing an entry."""
    with never_lost():
        try:
            return trace(*args, **kwargs)
        except RecursionError as error:
            if not str(error).startswith("Recursively calling"):
                raise
        jax.clear_caches()
        return trace(*args, **kwargs)
