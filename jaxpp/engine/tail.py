"""What is left of a step in flow: its last backwards and its update, which the next step hands over between its forwards."""

from collections.abc import Callable, Iterator
from itertools import islice

import jax

from jaxpp.engine.outcome import LoweredStep, Outcome
from jaxpp.errors import StateError
from jaxpp.errors.user_mesh import set_aside
from jaxpp.plan.flow import Flow
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.runtime.execute import Observer, Slots, dispatch
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

    @property
    def failed(self) -> bool:
        """Whether handing it over has raised an error: then there is no state after its step."""
        return self._failed is not None

    def outcome(self, observer: Observer | None = None) -> Outcome[Array]:
        """What the step returns, handed over now unless that was done."""
        self._check()
        if self._outcome is None:
            # Ctrl-C waits, as in an update; and a function that looks at a state while JAX traces it sees arrays.
            with set_aside(), jax.ensure_compile_time_eval(), held():
                return self._finished(observer)
        return self._outcome

    def beside(self, plan: Plan, flow: Flow, slots: Slots, observer: Observer | None = None) -> Outcome[Array]:
        """Hand over the rest between the lines of the next step's body, which has these slots; what this step returns."""
        self._check()
        runs = self.flow.then(flow)
        steps = {True: (self._slots, self._left), False: (slots, iter(plan.instructions[: flow.body]))}
        running = False

        def parts() -> Iterator[tuple[Slots, Iterator[Instruction]]]:
            nonlocal running
            for running, count in runs:
                yield steps[running][0], islice(steps[running][1], count)

        try:
            dispatch(parts(), observer)
        except BaseException as error:
            slots.clear()
            if running:
                self._fail(error)
            else:
                self._finished()  # what has failed is the next step
            raise
        return self._finished()

    def _finished(self, observer: Observer | None = None) -> Outcome[Array]:
        try:
            dispatch([(self._slots, self._left)], observer)
        except BaseException as error:
            self._fail(error)
            raise
        self._outcome = outcome = self.lowered.outcome([self._slots[slot] for slot in self.plan.outputs])
        self._slots.clear()
        for tell in self.then:
            tell(outcome)
        return outcome

    def _check(self) -> None:
        if self._failed is not None:
            rule, fix = "a step that failed in part left no state", "go on from a checkpoint, pipe.step(restored, ...)"
            got = "the rest of its step, which was handed over later, raised an error"
            raise StateError("state", rule, got, fix) from self._failed

    def _fail(self, error: BaseException) -> None:
        error.add_note("jaxpp: the update had begun, so part of the state is consumed: go on from a checkpoint")
        self._failed = error
        self._slots.clear()
