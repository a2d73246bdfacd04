"""The clocks of several processes, aligned by a hand-shake.

Problem: each process has a clock of its own (``time.perf_counter``), with a beginning of its own. Idea (Cristian's): process k asks
process 0 what time it is. It notes when it asked and when the answer came, and takes the answer for the time in the middle. That is
wrong by half the round trip at most, however the trip divides into there and back. So it asks many times, and believes the answer
that came quickest.

References:
    F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989).
"""

import time
from typing import NamedTuple

import jax
import numpy as np

from jaxpp.runtime.processes.exchange import sent

__all__ = ["Alignment", "align_clocks"]

_ROUNDS = 20


class Alignment(NamedTuple):
    """How the clock of this process stands to that of process 0.

    Attributes:
        offset: seconds to add to ``time.perf_counter()``.
        error: seconds by which the sum may be wrong: half the shortest round trip; 0 in process 0.
    """

    offset: float = 0.0
    error: float = 0.0


def align_clocks() -> Alignment:
    """Align the clock of this process with that of process 0; every process calls it, and nothing is asked in a run of one."""
    me, found = jax.process_index(), list[Alignment]()
    for process in range(1, jax.process_count()):
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            sent(np.zeros(2, np.uint32), process, 0)
            answer = sent(_as_words(time.perf_counter()), 0, process)
            if answer is not None:
                came = time.perf_counter()
                found.append(Alignment(_as_seconds(answer) - (asked + came) / 2, (came - asked) / 2))
    return min(found, key=lambda each: each.error) if me else Alignment()


def _as_words(seconds: float) -> np.ndarray:
    """A time as numbers that JAX sends as they are, with or without 64 bits."""
    return np.array([seconds], np.float64).view(np.uint32)


def _as_seconds(words: np.ndarray) -> float:
    return float(np.ascontiguousarray(words).view(np.float64)[0])
