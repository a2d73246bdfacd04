"""A thread that sleeps until another process raises an alarm, so that a process which waits for a device still hears of it.

Problem: where one process fails or goes astray, the others usually wait in ``float(metrics.loss)``, where no Python runs. Idea: a
thread waits for a text of the store that is written only then. It costs a message a second, and no time of the step. At an alarm it
answers, tells people what has happened, and tells processes that wait in vain for this one that it will not come.

The thread must have ended when Python ends, for it waits in C++ code that does not survive that; so it never waits for long.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from jaxpp.runtime.agreement.store import Store

__all__ = ["Watcher", "alarm", "silent"]

_NAP = 1.0
"""Seconds after which the thread waits anew, unless it is to end."""

_ANSWER = 2.0
"""Seconds in which a process answers that lives."""

_LISTENING = "jaxpp/listening"


def _name(process: int) -> str:
    return f"jaxpp/alarms/{process}"


def _answers(process: int) -> str:
    return f"jaxpp/answers/{process}"


def alarm(store: Store, processes: Iterable[int]) -> None:
    """Have the threads of other processes look around."""
    for process in processes:
        if process != store.process:
            store.put(_name(process), str(store.process))


def silent(store: Store, gone: Iterable[int]) -> Sequence[int]:
    """Raise an alarm in all processes; those whose thread does not answer, though they are not ``gone``."""
    asked = {int(process) for process in store.folder(_LISTENING)} - {store.process, *gone}
    alarm(store, asked)
    limit = time.monotonic() + _ANSWER
    while time.monotonic() < limit:
        asked -= set(map(int, store.folder(_answers(store.process))))
        if not asked:
            break
        time.sleep(0.02)
    return sorted(asked)


class Watcher:
    """Calls functions at every alarm, from a thread of its own; the thread begins with the first function.

    Args:
        store: where alarms are raised.
    """

    def __init__(self, store: Store):
        self._store = store
        self._looks: list[Callable[[], None]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="jaxpp alarms", daemon=True)

    def add(self, look: Callable[[], None]) -> None:
        """Call ``look`` at every alarm."""
        self._looks.append(look)
        if len(self._looks) == 1:
            self._store.put(f"{_LISTENING}/{self._store.process}", "yes")
            self._thread.start()

    def stop(self) -> None:
        """End the thread, also if the store is no longer there."""
        self._stopped = True
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._store.drop(f"{_LISTENING}/{self._store.process}")
                self._store.put(_name(self._store.process), str(self._store.process))  # wakes it
            self._thread.join(timeout=2 * _NAP)

    def _run(self) -> None:
        name = _name(self._store.process)
        with contextlib.suppress(Exception):  # the store ends with process 0, and with ``jax.distributed.shutdown``
            while not self._stopped:
                said = self._store.wait(name, _NAP)
                if said is not None and not self._stopped:
                    self._store.drop(name)
                    self._store.put(f"{_answers(int(said))}/{self._store.process}", "here")
                    for look in list(self._looks):
                        look()
