"""Watching a step without stopping it.

Problem: a timer that blocks on every action destroys the overlap it is to measure, and threads that wait beside the dispatching one
take Python's lock from it (with one a device, a step of small stages took 2.3 times as long). Idea: ask, do not wait. Mechanism: an
observer of the executor keeps one result of each instruction in a queue of its device (one for programs, one for arrivals), and
after each instruction looks whether the heads of the queues are there; when the host has handed all over, it goes on looking until
the queues are empty. A stamp is late by one instruction's dispatch at most (which on forced CPU devices may run a small program, or
wait for a core), or by the pause between two looks.

Nothing is sent, copied or run for it; a program without a small result that stays returns one byte more
(``Draft.finish(watched=True)``), so that nothing large is held on to.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpp.observe.profile.span import Span
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.schedule.base import Schedule

__all__ = ["Stamp", "Watch", "inferred"]

_SHORTEST_PAUSE, _LOOKS = 5e-5, 300  # seconds; about how often to look in a step: looking takes time from small machines


class Stamp(NamedTuple):
    """When one instruction was handed over and done, in seconds on the host's clock.

    Attributes:
        begun: the host began to hand it over.
        handed: the host went on.
        done: its result was there.
    """

    begun: float
    handed: float
    done: float


class Watch:
    """Observes one step of a plan; ``stamps`` tells all times."""

    def __init__(self, plan: Plan):
        self._lanes = {(line.about.device, line.about.sends): deque[tuple[int, Any]]() for line in plan.instructions}
        self._queues = tuple(self._lanes.values())
        self._times: list[tuple[float, float]] = []
        self._done: dict[int, float] = {}
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        """Called by the executor after each instruction."""
        handed = time.perf_counter()
        about = instruction.about
        self._lanes[about.device, about.sends].append((len(self._times), slots[about.watch]))
        self._times.append((self._went_on, handed))
        self._look()
        self._went_on = time.perf_counter()

    def _look(self) -> bool:
        """Note what is there; whether anything is still to come."""
        left = False
        for queue in self._queues:
            while queue and queue[0][1].is_ready():
                self._done[queue.popleft()[0]] = time.perf_counter()
            left = left or bool(queue)
        return left

    def stamps(self) -> list[Stamp]:
        """One an instruction, in the order of the plan; waits for the last."""
        begun = self._times[0][0]
        while self._look():
            time.sleep(max(_SHORTEST_PAUSE, (time.perf_counter() - begun) / _LOOKS))
        return [Stamp(begun, handed, max(handed, self._done[k])) for k, (begun, handed) in enumerate(self._times)]


def inferred(plan: Plan, stamps: Sequence[Stamp], schedule: Schedule) -> tuple[Span, ...]:
    """When each instruction ran: to its stamp, from the latest of what it had to wait for.

    That is its being handed over, its inputs, and the end of what the device ran before; a program that another overtook on its
    device begins too early here.
    """
    there: dict[int, float] = {}
    last: dict[Any, float] = {}
    spans, zero = [], stamps[0].begun
    for line, stamp in zip(plan.instructions, stamps, strict=True):
        begun, handed, done = (at - zero for at in stamp)
        action: Any = line.about.action
        start = max([begun, *(there.get(slot, 0.0) for slot in line.inputs)])
        if not line.about.sends:
            before = last.get(line.about.device, 0.0)
            start = max(start, before) if before <= done else start
            last[line.about.device] = max(before, done, start)
        end = max(start, done)
        there.update((slot, end) for slot in line.outputs)
        rank = schedule.stage_to_rank[line.about.stage]
        spans.append(Span(line.label, action, rank, line.about.sends, start, end, begun, handed))
    return tuple(spans)
