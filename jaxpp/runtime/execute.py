"""The only loop: run a plan.

It does no look-up by name, no tree flattening and no shape check, and it never waits for a device. Arrays are handed over by slot
and dropped where the plan frees them, so nothing outlives its last reader.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxpp.plan.plan import Instruction, Plan

__all__ = ["Observer", "execute"]


class Observer(Protocol):
    """Sees every instruction after it was dispatched, and the slots as they are then."""

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        """Called before the instruction's slots are freed."""
        ...


def execute(
    plan: Plan, arguments: Sequence[Any], observer: Observer | None = None, hold: Callable[[], None] | None = None
) -> list[Any]:
    """Run ``plan`` on ``arguments`` and return its results.

    Args:
        plan: what to run.
        arguments: one value a slot of ``plan.inputs``.
        observer: called after each instruction.
        hold: called before the first instruction that takes over the buffer of an argument.

    Raises:
        Exception: whatever a program raised, unchanged, with a note that names the action.
    """
    slots: list[Any] = [None] * plan.num_slots
    for slot, value in plan.constants:
        slots[slot] = value
    for slot, value in zip(plan.inputs, arguments, strict=True):
        slots[slot] = value
    instruction = None
    try:
        for consumes, part in enumerate(plan.parts):
            if consumes and hold is not None:
                hold()
            for instruction in part:
                _, call, inputs, outputs, free, _ = instruction
                for slot, value in zip(outputs, call(*[slots[i] for i in inputs])):  # noqa: B905  (checked when lowered)
                    slots[slot] = value
                if observer is not None:
                    observer(instruction, slots)
                for slot in free:
                    slots[slot] = value = None  # ``value`` is an array of an earlier line if this one has returned nothing
    except BaseException as error:
        slots.clear()  # a traceback that somebody keeps, as a notebook does, holds nothing of the step
        if instruction is not None and isinstance(error, Exception):
            error.add_note(f"jaxpp: raised while dispatching {instruction.label}")
        raise
    return [slots[slot] for slot in plan.outputs]
