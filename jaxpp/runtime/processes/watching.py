"""A thread that sleeps until another process raises an alarm, so that a process which waits for a device still hears of it.

Problem: where one process fails or goes astray, the others usually wait in ``float(metrics.loss)``, where no Python runs. Idea: a
thread waits for a text of the store that is written only then. It costs nothing while all goes well. At an alarm it tells people
what has happened, and it tells processes that wait in vain for this one that it will not come.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable

from jaxpp.runtime.processes.store import Store

__all__ = ["Watcher", "alarm"]

_NAP = 600.0
"""Seconds after which the thread waits anew."""

_LOOK, _STOP = "look", "stop"


def _name(process: int) -> str:
    return f"jaxpp/alarms/{process}"


def alarm(store: Store, processes: Iterable[int]) -> None:
    """Have the threads of other processes look around."""
    for process in processes:
        if process != store.process:
            store.put(_name(process), _LOOK)


class Watcher:
    """Calls functions at every alarm, from a thread of its own; the thread begins with the first function.

    Args:
        store: where alarms are raised.
    """

    def __init__(self, store: Store):
        self._store = store
        self._looks: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="jaxpp alarms", daemon=True)

    def add(self, look: Callable[[], None]) -> None:
        """Call ``look`` at every alarm."""
        self._looks.append(look)
        if len(self._looks) == 1:
            self._thread.start()

    def stop(self) -> None:
        """End the thread, or leave it where it is if it does not end."""
        if self._looks:
            self._store.put(_name(self._store.process), _STOP)
            self._thread.join(timeout=2)

    def _run(self) -> None:
        name = _name(self._store.process)
        with contextlib.suppress(Exception):  # the store ends with process 0, and with ``jax.distributed.shutdown``
            while (said := self._store.wait(name, _NAP)) != _STOP:
                if said is not None:
                    self._store.drop(name)
                    for look in list(self._looks):
                        look()
