"""Polling the results of a step without stopping it, for backends whose trace lacks something.

Problem: a timer that blocks on every action destroys the overlap that it measures, and threads that wait beside the dispatching
thread take Python's lock from it (with one thread for each device, a step of small stages took 2.3 times as long). Idea: poll, do
not wait. Mechanism: an observer of the executor keeps one result of each instruction in a queue of its device (one queue for
programs, one for arrivals, and one for copies to host memory and one for copies back). After each instruction it looks whether the
heads of the queues are there; when the host has handed everything over, it goes on until the queues are empty. A stamp is late by
one instruction's dispatch at most (which on forced CPU devices may run a small program, or wait for a core), or by the pause
between two looks.

Nothing is sent, copied or run for this. A program without a small result that stays alive returns one byte more
(``compile_plan(watched=True)``), so that nothing large is held on to.
"""

import time
from collections import deque
from collections.abc import Sequence

from jaxpp.observe.profile.spans import Stamp
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.types import Leaf

__all__ = ["Watch"]

_SHORTEST_PAUSE, _LOOKS = 5e-5, 300  # seconds; about how often to look in a step: looking takes time from small machines


class Watch:
    """Observes one step of a plan; ``stamps`` returns all times."""

    def __init__(self, plan: Plan):
        self._lanes = {
            (line.about.device, line.about.sends, line.about.copies): deque[tuple[int, Leaf]]() for line in plan.instructions
        }
        self._queues = tuple(self._lanes.values())
        self._times: list[tuple[float, float]] = []
        self._done: dict[int, float] = {}
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        """Called by the executor after each instruction."""
        handed = time.perf_counter()
        about = instruction.about
        if about.watch < 0:  # a send to another process, say, of which nothing is here
            self._done[len(self._times)] = handed
        else:
            self._lanes[about.device, about.sends, about.copies].append((len(self._times), slots[about.watch]))
        self._times.append((self._went_on, handed))
        self._look()
        self._went_on = time.perf_counter()

    def _look(self) -> bool:
        """Note which results are there; returns whether any are still to come."""
        left = False
        for queue in self._queues:
            while queue and queue[0][1].is_ready():
                self._done[queue.popleft()[0]] = time.perf_counter()
            left = left or bool(queue)
        return left

    def stamps(self) -> list[Stamp]:
        """The stamp of each instruction, in the order of the plan; waits for the last result."""
        begun = self._times[0][0]
        while self._look():
            time.sleep(max(_SHORTEST_PAUSE, (time.perf_counter() - begun) / _LOOKS))
        return [Stamp(begun, handed, max(handed, self._done[k])) for k, (begun, handed) in enumerate(self._times)]
