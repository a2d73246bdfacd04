"""What was compiled in this process, for pipelines that are built again: a notebook cell that is run twice compiles once.

JAX keeps its own compiled programs in this way, by the Python function; the functions of a pipeline are made anew with it. So
programs are known here by what they do: by the text that they are lowered to, and, before they are lowered, by their equations
(``stages.fingerprint``); and by their names, which a trace shows. The least recently used are forgotten, and all of them whenever
``jax.clear_caches`` is called.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
from jax.stages import Compiled

__all__ = ["BEFORE", "CompiledBefore", "Executable", "settings"]


@dataclass(frozen=True, eq=False)
class Executable:
    """What was compiled; shared by the programs that are the same.

    Attributes:
        call: the compiled program.
        name: what it is called in a trace: by the name of the first program that is the same.
    """

    call: Compiled
    name: str


class CompiledBefore:
    """Executables by what they do, the most recently used last. Threads may share it.

    Args:
        limit: how many names are remembered; most executables have two.
    """

    def __init__(self, limit: int):
        self._limit, self._lock = limit, Lock()
        self._known: OrderedDict[Hashable, Executable] = OrderedDict()
        self._traces = 0
        self._probe = jax.jit(self._traced)
        self._seen = 0

    def get(self, name: Hashable) -> Executable | None:
        """The executable of this name, if there is one."""
        with self._lock:
            found = self._known.get(name)
            if found is not None:
                self._known.move_to_end(name)
            return found

    def add(self, name: Hashable, executable: Executable) -> None:
        """Remember an executable."""
        with self._lock:
            self._known[name] = executable
            self._known.move_to_end(name)
            if len(self._known) > self._limit:
                self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)

    def follow_jax(self) -> None:
        """Forget everything if ``jax.clear_caches`` was called: JAX then traces again what it has traced before."""
        self._probe.lower()
        with self._lock:
            if self._traces != self._seen:
                self._seen = self._traces
                self._known.clear()

    def _traced(self) -> None:
        self._traces += 1


BEFORE = CompiledBefore(1024)
"""Of this process."""


def settings() -> Hashable:
    """All settings of JAX as they are now: any of them may decide what a program is compiled to.

    A version of JAX that does not list its settings has a value of its own each time, so that nothing is taken for the same.
    """
    config: Any = jax.config  # whose flags checkers of types do not know
    names = getattr(config, "values", None)
    return object() if names is None else tuple(repr(getattr(config, name, None)) for name in sorted(names))
