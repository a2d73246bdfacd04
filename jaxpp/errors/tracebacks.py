"""Tracebacks that end at the user's own line.

Public functions take the frames of jaxpp and JAX out of the traceback of an exception that leaves them, as JAX does with its own.
Frames of the user's model, notes and causes stay; of Ctrl-C, for which no library has to answer, those in the user's own files.
Hidden frames lose their local variables, which would keep arrays on the devices.
``jax_traceback_filtering`` says how: ``"off"`` shows all frames, ``"tracebackhide"`` marks those before the user's last frame, for
IPython and pytest, and takes out those behind it; ``"auto"`` is that under IPython, and takes all of them out elsewhere.
Ctrl-C may leave JAX believing that it still traces; so what leaves a public function also gives JAX back its trace.
"""

import builtins
import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from jaxpp.errors import JaxppError
from jaxpp.errors.keywords import wrong_call
from jaxpp.errors.user_mesh import set_aside

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)

_OURS = frozenset({"jaxpp", "jax", "jaxlib"})
_FAULTS = (LookupError, ValueError, AssertionError)
_WHILE_COMPARING = "Cache keys should be comparable", "Equality of global cache key"  # how JAX's texts of it begin
_BETWEEN = frozenset({"concurrent", "contextlib", "functools", "jaxtyping", "threading"})  # out where jaxpp or JAX called them


def entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A public function: the traceback of what it raises ends at the user's line, and goes on in the user's own functions."""

    @functools.wraps(function)
    def public(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        trace = current_trace()
        try:
            with set_aside():
                return function(*args, **kwargs)
        except BaseException as error:
            wrong = wrong_call(function, args, kwargs) if isinstance(error, TypeError) else None
            del args, kwargs  # of this frame, which runs and cannot be cleared
            leave(error, trace)
            if is_ctrl_c(error):
                raise KeyboardInterrupt from None
            if wrong is None:
                raise
            try:
                raise wrong from None
            except JaxppError as told:  # raised here, so that this frame can be taken out too
                fold(told)
                raise

    return public


def entries(cls: _C) -> _C:
    """A public class: its constructor, and all methods and properties without an underscore, are each an ``entry``."""
    for name, value in list(vars(cls).items()):
        if name != "__init__" and name.startswith("_"):
            continue
        if inspect.isfunction(value):
            setattr(cls, name, entry(value))
        elif isinstance(value, (classmethod, staticmethod)):
            setattr(cls, name, type(value)(entry(value.__func__)))
        elif isinstance(value, property) and value.fget is not None:
            setattr(cls, name, property(entry(value.fget), value.fset, value.fdel))
    return cls


def managed(function: Callable[_P, Iterator[_T]]) -> Callable[_P, contextlib.AbstractContextManager[_T]]:
    """``contextlib.contextmanager`` for a public method: to enter and to leave it is an ``entry`` each."""
    made = contextlib.contextmanager(function)

    @functools.wraps(function)
    def manager(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return _Managed(made(*args, **kwargs))

    return manager


class _Managed(contextlib.AbstractContextManager[_T]):
    def __init__(self, inner: contextlib.AbstractContextManager[_T]):
        self._inner = inner

    @entry
    def __enter__(self) -> _T:
        return self._inner.__enter__()

    @entry
    def __exit__(self, *raised: Any) -> bool | None:
        return self._inner.__exit__(*raised)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether JAX has made this of Ctrl-C: if that comes while a cache compares entries, it is the text of a ``ValueError``."""
    text = str(error) if isinstance(error, ValueError) else ""
    return text.startswith(_WHILE_COMPARING) and "KeyboardInterrupt" in text


def current_trace() -> object:
    """What JAX is tracing, or that it is not; None if it has not been imported, which the schedules do without."""
    find = getattr(sys.modules.get("jax.extend.core"), "find_top_trace", None)
    return None if find is None else find(())


def leave(error: BaseException, trace: object) -> None:
    """Give JAX back the trace with which a public function was called, and fold the traceback of what leaves it."""
    if _is_fault(error):
        error.add_note(
            'jaxpp: raised in jaxpp itself; to report it, jax.config.update("jax_traceback_filtering", "off") shows where'
        )
    if trace is not None and current_trace() is not trace:
        sys.modules["jax.extend.core"].set_current_trace(trace).__enter__()
    fold(error)


def _is_fault(error: BaseException) -> bool:
    """Whether Python has raised an error in a line of jaxpp, for a missing key, say: not for a call of what the user gave."""
    *_, last = [None, *_steps(error.__traceback__)]
    if last is None or isinstance(error, JaxppError) or not isinstance(error, _FAULTS) or _mode() == "off":
        return False
    told = any(note.startswith("jaxpp: ") for note in getattr(error, "__notes__", ()))  # what of the user's has raised it
    ours = not told and last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "jaxpp"
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def fold(error: BaseException) -> None:
    """Take the frames of jaxpp and JAX out of the traceback of an exception, and out of those of its causes."""
    mode = _mode()
    if mode == "off":
        return
    if isinstance(error, JaxppError) and hasattr(error, "__notes__"):  # JAX's, of frames that are nobody's business here
        error.__notes__ = [note for note in error.__notes__ if "JAX has removed its internal frames" not in note]
    if isinstance(error, KeyboardInterrupt) and type(error.__cause__).__name__ == "JaxStackTraceBeforeTransformation":
        error.__cause__ = None  # where in the model the operation stands that was being traced
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        steps = list(_steps(found.__traceback__))
        hidden = _hidden([step.tb_frame for step in steps], only_own=isinstance(error, KeyboardInterrupt))
        if found is not error and not any(hidden):
            continue  # raised elsewhere
        for step, hide in zip(steps, hidden, strict=True):
            if hide:
                _clear(step.tb_frame)
        last = max((k for k, hide in enumerate(hidden) if not hide), default=-1)
        left: types.TracebackType | None = None
        for k, step in reversed(list(enumerate(steps))):
            if hidden[k] and (mode != "tracebackhide" or k > last):
                continue
            if hidden[k]:
                step.tb_frame.f_locals["__tracebackhide__"] = True
            left = types.TracebackType(left, step.tb_frame, step.tb_lasti, _line(step))
        found.__traceback__ = left
        waiting += [found.__cause__, found.__context__] if mode != "remove_frames" else []  # there JAX's cause has all frames


def _line(step: types.TracebackType) -> int:
    """The line of a step of a traceback; Ctrl-C may come between two lines, in a bytecode that has none."""
    line: int | None = step.tb_lineno
    return step.tb_frame.f_code.co_firstlineno if line is None else line


def _clear(frame: types.FrameType) -> None:
    """Let go of the local variables of a frame that has ended, unless its mark that hides it is among them."""
    if "__tracebackhide__" not in frame.f_code.co_varnames:
        with contextlib.suppress(RuntimeError):  # it runs
            frame.clear()


def _mode() -> str:
    config = getattr(sys.modules.get("jax"), "config", None)  # not imported: the schedules do without
    mode = getattr(config, "jax_traceback_filtering", None) or "auto"
    return mode if mode != "auto" else "tracebackhide" if hasattr(builtins, "__IPYTHON__") else "quiet_remove_frames"


def _steps(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _hidden(frames: list[types.FrameType], *, only_own: bool) -> list[bool]:
    """Which frames are taken out; with ``only_own`` also those of other libraries that ours have called."""
    found: list[bool] = []
    for frame in frames:
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        between = root in _BETWEEN and found[-1:] == [True]
        found.append(root in _OURS or between or (only_own and True in found and _is_installed(frame.f_code.co_filename)))
    return found


def _is_installed(file: str) -> bool:
    return "-packages" in file or file.startswith(("<frozen", sys.prefix, sys.base_prefix))
