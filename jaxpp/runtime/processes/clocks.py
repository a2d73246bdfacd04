"""The clocks of several processes, aligned by a hand-shake.

Problem: each process has a clock of its own (``time.perf_counter``), with a beginning of its own. Idea (Cristian's): process k asks
process 0 what time it is, and notes when it asked and when the answer came. Process 0 looked at its clock somewhere in between. So
each answer says that the offset of the two clocks lies within the round trip. It asks many times: the quickest way there bounds the
offset from one side, the quickest way back from the other, and the middle is wrong by half of both ways at most, however a single
trip divides into there and back.

References:
    F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989).
"""

import math
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
        error: seconds by which the sum may be wrong: half of the quickest way there and back; 0 in process 0.
    """

    offset: float = 0.0
    error: float = 0.0


def align_clocks() -> Alignment:
    """Align the clock of this process with that of process 0; every process calls it, and nothing is asked in a run of one."""
    least, most = -math.inf, math.inf
    for process in range(1, jax.process_count()):
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            sent(np.zeros(2, np.uint32), process, 0)
            answer = sent(_as_words(time.perf_counter()), 0, process)
            if answer is not None:
                least = max(least, _as_seconds(answer) - time.perf_counter())
                most = min(most, _as_seconds(answer) - asked)
    return Alignment((least + most) / 2, (most - least) / 2) if jax.process_index() else Alignment()


def _as_words(seconds: float) -> np.ndarray:
    """A time as numbers that JAX sends as they are, with or without 64 bits."""
    return np.array([seconds], np.float64).view(np.uint32)


def _as_seconds(words: np.ndarray) -> float:
    return float(np.ascontiguousarray(words).view(np.float64)[0])
