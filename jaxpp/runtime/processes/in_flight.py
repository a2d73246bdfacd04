"""How many programs wait at once, where XLA's runtime for CPU would wait for itself.

That runtime holds back the thread that dispatches a program as soon as 32 wait on a device. With several processes, and programs
that run on several devices at once, it then never goes on, although their arguments are there (seen with JAX 0.10 and forced
devices). GPUs are not concerned.
"""

from collections import deque
from collections.abc import Sequence

import jax

from jaxpp.plan.plan import Instruction
from jaxpp.runtime.execute import Observer
from jaxpp.runtime.placement import Placement
from jaxpp.types import Array, Leaf

__all__ = ["InFlight", "limit_of"]

_MOST = 16


class InFlight:
    """An observer that lets few programs wait; it needs a watched plan, whose programs each make something that is not donated."""

    def __init__(self, most: int):
        self._most = most
        self._waiting: deque[Array] = deque()

    def beside(self, other: Observer | None) -> Observer:
        """This observer, and another one if there is one."""

        def both(instruction: Instruction, slots: Sequence[Leaf]) -> None:
            self(instruction, slots)
            if other is not None:
                other(instruction, slots)

        return both

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        """Called after each instruction: waits for the program that was dispatched so many before."""
        if instruction.about.program and instruction.about.watch >= 0:
            self._waiting.append(slots[instruction.about.watch])
            if len(self._waiting) > self._most:
                oldest = self._waiting.popleft()
                if not oldest.is_deleted():  # a leaf of the state, which the next step has taken over: it is waited for instead
                    oldest.block_until_ready()


def limit_of(placement: Placement) -> InFlight | None:
    """What limits the programs in flight of a pipeline, where that is needed."""
    places = placement.places
    needed = jax.process_count() > 1 and places[0].devices[0].platform == "cpu" and any(len(place.devices) > 1 for place in places)
    return InFlight(_MOST) if needed else None
