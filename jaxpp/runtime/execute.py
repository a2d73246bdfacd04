"""The only loop: run a plan, without look-up by name, tree flattening, shape checks or waiting for a device.

Arrays are handed over by slot and dropped where the plan frees them, so nothing outlives its last reader.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

from jaxpp.lowering.plan import Execution, Instruction, Plan, Slots
from jaxpp.runtime.place import Placement
from jaxpp.runtime.threads import Threads
from jaxpp.types import Array, Leaf

_MOST_WAITING = 16  # programs that wait at once where ``InFlight`` limits them


class Observer(Protocol):
    """Sees every instruction after it was dispatched, and the slots as they are then."""

    def __call__(self, instruction: Instruction, slots: Slots) -> None:
        """Called before the instruction's slots are freed."""
        ...


def execute(
    plan: Plan,
    arguments: Sequence[Leaf],
    observer: Observer | None = None,
    hold: Callable[[], None] | None = None,
    threads: Threads | None = None,
) -> list[Any]:
    """Run ``plan`` on ``arguments`` and return its results; what a program raises has a note that names the action.

    ``hold`` is called before the first instruction that takes over the buffer of an argument.
    """
    run = Execution(plan, arguments)
    try:
        if threads is not None and observer is None and threads.may_begin:
            threads.dispatch([(run, run.left)], hold)
            return run.results()
        dispatch([(run, run.next(plan.consumes))], observer)
        if plan.consumes < len(plan.instructions) and hold is not None:
            hold()
        dispatch([(run, run.left)], observer)
    except BaseException:
        run.slots.clear()  # a traceback that somebody keeps, as a notebook does, holds nothing of the step
        raise
    return run.results()


def hand_over(parts: Iterable[tuple[Execution, Iterable[int]]], observer: Observer | None, threads: Threads | None) -> None:
    """Hand over instructions of runs, by number: in threads, if there are any and nobody watches."""
    if threads is not None and observer is None and threads.may_begin:
        threads.dispatch(parts)
    else:
        dispatch(parts, observer)


def dispatch(parts: Iterable[tuple[Execution, Iterable[int]]], observer: Observer | None = None) -> None:
    """Hand over instructions of runs, by number, one after another."""
    run = instruction = value = None
    try:
        for run, numbers in parts:
            slots, run.done = run.slots, []
            for instruction in map(run.plan.instructions.__getitem__, numbers):
                _, call, inputs, outputs, free, _ = instruction
                for slot, value in zip(outputs, call(*[slots[i] for i in inputs])):  # noqa: B905  (checked when lowered)
                    slots[slot] = value
                if observer is not None:
                    observer(instruction, slots)
                for slot in free:
                    slots[slot] = value = None  # ``value`` is an array of an earlier line if this one has returned nothing
    except BaseException as error:
        value = None
        if run is not None:
            run.failed = True
        if instruction is not None and isinstance(error, Exception):
            error.add_note(f"jaxpp: raised while dispatching {instruction.label}")
        raise


class InFlight:
    """Lets few programs of a watched plan wait, where XLA's runtime for CPU would wait for itself.

    It holds back the dispatching thread as soon as 32 programs wait on a device. With several processes, and programs on several
    devices at once, it then never goes on (seen with JAX 0.10 and forced devices).
    """

    def __init__(self):
        self._waiting: deque[Array] = deque()

    def beside(self, other: Observer | None) -> Observer:
        """An observer that waits for the program that was dispatched so many before, and calls ``other``."""

        def observe(instruction: Instruction, slots: Slots) -> None:
            if instruction.about.program and instruction.about.watch >= 0:
                self._waiting.append(slots[instruction.about.watch])
                if len(self._waiting) > _MOST_WAITING:
                    oldest = self._waiting.popleft()
                    if not oldest.is_deleted():  # a leaf of the state, which the next step has taken over: it is waited for instead
                        oldest.block_until_ready()
            if other is not None:
                other(instruction, slots)

        return observe


def limit_of(placement: Placement) -> InFlight | None:
    """What limits the programs in flight of a pipeline, where that is needed."""
    places = placement.places
    needed = jax.process_count() > 1 and places[0].devices[0].platform == "cpu" and any(len(place.devices) > 1 for place in places)
    return InFlight() if needed else None
