"""What is left of a step in flow: its last backwards and its update, which the next step hands over between its forwards.

State and metrics of the step share one ``Tail``. Whoever looks first, in whatever thread, has it handed over, once; the others wait
for that at its lock.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import jax

from jaxpp.engine.outcome import LoweredStep, Outcome
from jaxpp.errors import StateError
from jaxpp.errors.user_mesh import set_aside
from jaxpp.lowering.builder import Flow
from jaxpp.lowering.plan import Execution
from jaxpp.runtime.execute import Observer, hand_over
from jaxpp.runtime.interrupts import held
from jaxpp.runtime.replica_groups import ReplicaGroups
from jaxpp.runtime.threads import Threads, in_lane
from jaxpp.types import Array


class Tail:
    """The rest of a step whose body has been handed over. It is handed over beside the next step, or when somebody asks for it.

    ``engine`` is the one whose steps it can be handed over beside.
    """

    def __init__(
        self, engine: object, run: Execution, lowered: LoweredStep, flow: Flow, threads: Threads | None, groups: ReplicaGroups
    ):
        self.engine, self.lowered, self.flow, self._run, self._threads = engine, lowered, flow, run, threads
        self._groups, self._names = groups, groups.names
        late = [name in self.flow.late for name in lowered.bound.outputs]
        values = [None if one else value for one, value in zip(late, run.results(), strict=True)]
        self.first = lowered.outcome(cast("list[Array]", values))  # what the body has made; None for the rest
        for slot in run.plan.of_body:
            run.slots[slot] = None
        self._lock = threading.RLock()  # held while the rest is handed over, and while anybody takes what it has made
        self._outcome: Outcome[Array] | None = None
        self._failed: BaseException | None = None
        self.then = list[Callable[[Outcome[Array]], None]]()  # called once with what the step returns
        self.otherwise = list[Callable[[], None]]()  # called once if it fails

    @property
    def failed(self) -> bool:
        """Whether handing it over has raised an error: then there is no state after its step."""
        return self._failed is not None

    @property
    def ended(self) -> bool:
        """Whether it has been handed over, or has failed."""
        return self.failed or self._outcome is not None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A block in which no other thread hands the rest over or takes what it has made. Ctrl-C waits, as in an update."""
        with held():  # before the lock is taken, or it might stay taken
            waits = not in_lane()  # for whose thread somebody may wait with the lock: a user's ``__del__`` can run there
            if not self._lock.acquire(blocking=waits):
                rule, fix = "it can be looked at when its step has been handed over", "look at it outside of __del__ and weakrefs"
                raise StateError("state", rule, "a look from a thread that is handing over instructions", fix)
            try:
                yield
            finally:
                self._lock.release()

    def outcome(self, observer: Observer | None = None) -> Outcome[Array]:
        """What the step returns, handed over now unless that was done."""
        with self.looking():
            self._check()
            if self._outcome is not None:
                return self._outcome
            with set_aside(), jax.ensure_compile_time_eval():  # a function that looks at a state while JAX traces it sees arrays
                return self._finished(observer)

    def beside(self, run: Execution, flow: Flow, observer: Observer | None = None) -> Outcome[Array]:
        """Hand over the rest between the lines of the body of the next step, which ``run`` is; what this step returns.

        If somebody has looked meanwhile, the lines of the body are all that is left to do.
        """
        with self.looking():
            self._check()
            parts = (((self._run if of_tail else run), count) for of_tail, count in self.flow.then(flow))
            threads = self._threads if run.plan.turns else None  # a plan of another batch shape may have one lane
            try:
                with self._groups.of(self._names):
                    hand_over(((each, each.next(count)) for each, count in parts), observer, threads)
            except BaseException as error:
                run.slots.clear()
                if self._run.failed and self._outcome is None:
                    self._fail(error)
                else:
                    self._finished()  # what has failed is the next step
                raise
            return self._finished()

    def _finished(self, observer: Observer | None = None) -> Outcome[Array]:
        if self._outcome is not None:
            return self._outcome
        try:
            with self._groups.of(self._names):
                hand_over([(self._run, self._run.left)], observer, self._threads)
        except BaseException as error:
            self._fail(error)
            raise
        self._outcome = outcome = self.lowered.outcome(self._run.results())
        self._run.slots.clear()
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
        self._run.slots.clear()
        for tell in self.otherwise:
            tell()
