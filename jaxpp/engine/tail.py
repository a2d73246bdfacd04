"""What is left of a step in flow: its last backwards and its update, which the next step hands over between its forwards."""

from collections.abc import Callable
from itertools import islice

from jaxpp.engine.outcome import LoweredStep, Outcome
from jaxpp.errors import StateError
from jaxpp.plan.flow import Flow
from jaxpp.plan.plan import Plan
from jaxpp.runtime.execute import Slots, dispatch
from jaxpp.runtime.interrupts import held
from jaxpp.types import Array


class Tail:
    """The rest of a step whose body has been handed over. It is handed over beside the next step, or when somebody asks for it."""

    def __init__(self, plan: Plan, lowered: LoweredStep, flow: Flow, slots: Slots):
        self.plan, self.lowered, self.flow, self._slots = plan, lowered, flow, slots
        late = [lowered.bound.resolve(name) in self.flow.late for name in lowered.outputs]
        values: Slots = [None if one else slots[slot] for one, slot in zip(late, plan.outputs, strict=True)]
        self.first = lowered.outcome(values)  # what the body has made; None for the rest
        self._left = iter(plan.instructions[self.flow.body :])
        self._outcome: Outcome[Array] | None = None
        self._failed: BaseException | None = None
        self.then = list[Callable[[Outcome[Array]], None]]()  # called once with what the step returns

    def outcome(self) -> Outcome[Array]:
        """What the step returns, handed over now unless that was done."""
        if self._outcome is None:
            with held():  # Ctrl-C waits, as in an update
                return self._finished()
        return self._outcome

    def beside(self, plan: Plan, flow: Flow, slots: Slots) -> Outcome[Array]:
        """Hand over the rest between the lines of the next step's body, which has these slots; what this step returns."""
        runs = self.flow.then(flow)
        steps = {True: (self._slots, self._left), False: (slots, iter(plan.instructions[: flow.body]))}
        parts = ((steps[mine][0], islice(steps[mine][1], count)) for mine, count in runs)
        try:
            dispatch(parts)
        except BaseException:
            slots.clear()
            self._finished()  # what has failed is the next step
            raise
        return self._finished()

    def _finished(self) -> Outcome[Array]:
        if self._failed is not None:
            rule, fix = "a step that failed in part left no state", "go on from a checkpoint, pipe.step(restored, ...)"
            raise StateError(
                "state", rule, "the rest of its step, which was handed over later, raised an error", fix
            ) from self._failed
        try:
            dispatch([(self._slots, self._left)])
        except BaseException as error:
            self._failed = error
            self._slots.clear()
            raise
        self._outcome = outcome = self.lowered.outcome([self._slots[slot] for slot in self.plan.outputs])
        self._slots.clear()
        for tell in self.then:
            tell(outcome)
        return outcome
