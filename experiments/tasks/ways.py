"""The ways to train Theta and theta[t]: all of it on the device, with a bank, with a bank and a pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

import jaxpp
from experiments.tasks.problem import Problem

__all__ = ["Banked", "Pipelined", "Resident", "Stages", "Step", "Way", "make_step"]

Step = Callable[..., tuple[Any, Any, Any, Any]]
"""``step(params, opt_state, task_params, task_opt_state, batch)``: the four trees anew, given up the old ones."""


class Stages(NamedTuple):
    """How a pipeline is cut.

    Attributes:
        stages: how many.
        microbatches: parts of a batch.
        schedule: order of the actions.
    """

    stages: int
    microbatches: int
    schedule: str


def make_step(problem: Problem, optimizer: optax.GradientTransformation) -> Step:
    """A plain step of Theta and the active theta[t], as one would write it without jaxpp."""

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(params: Any, opt_state: Any, task_params: Any, task_opt_state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        grads, task_grads = jax.grad(problem.loss_fn, argnums=(0, 1))(params, task_params, batch)
        return *update(grads, opt_state, params), *update(task_grads, task_opt_state, task_params)

    return jax.jit(step, donate_argnums=(0, 1, 2, 3))


class Way(Protocol):
    """Something that trains, one step one task. Nothing waits but ``wait`` and what reads."""

    def step(self, task: int, batch: Any, then: int) -> None:
        """A step of ``task``; the next one is ``then``."""
        ...

    def wait(self) -> None:
        """Return once the last step is done."""
        ...

    def shared(self) -> tuple[Any, Any]:
        """Theta and its optimizer state."""
        ...

    def own(self, task: int) -> tuple[Any, Any]:
        """theta[t] and its optimizer state."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of the sets that are kept on the host."""
        ...


class Resident:
    """Every theta[t], with its moments, on the device.

    Args:
        problem: what is trained.
        optimizer: of Theta and of every theta[t].
        step: from ``make_step``.
        device: all is there.
    """

    host_bytes = 0

    def __init__(self, problem: Problem, optimizer: Any, step: Step, device: Any):
        own = jax.jit(problem.own)
        self._step, self._shared = step, _placed(jax.jit(problem.shared)(problem.key), optimizer, device)
        self._sets = {t: _placed(own(key), optimizer, device) for t, key in problem.keys.items()}

    def step(self, task: int, batch: Any, then: int) -> None:  # noqa: ARG002
        """See ``Way``."""
        *shared, params, opt_state = self._step(*self._shared, *self._sets.pop(task), batch)
        self._shared, self._sets[task] = tuple(shared), (params, opt_state)

    def wait(self) -> None:
        """See ``Way``."""
        jax.block_until_ready(self._shared)

    def shared(self) -> tuple[Any, Any]:
        """See ``Way``."""
        return self._shared

    def own(self, task: int) -> tuple[Any, Any]:
        """See ``Way``."""
        return self._sets[task]


class Banked:
    """The same step; every theta[t] in a bank.

    Args:
        problem: as for ``Resident``.
        optimizer: as for ``Resident``.
        step: as for ``Resident``.
        device: as for ``Resident``.
        prefetch: whether the next task's set is brought while a step computes.
    """

    def __init__(self, problem: Problem, optimizer: Any, step: Step, device: Any, *, prefetch: bool):
        self.bank = jaxpp.Bank.make(problem.own, problem.keys, optimizer, device=device)
        self._step, self._shared = step, _placed(jax.jit(problem.shared)(problem.key), optimizer, device)
        self._prefetch = prefetch

    def step(self, task: int, batch: Any, then: int) -> None:
        """See ``Way``."""
        with self.bank.use(task) as used:
            *shared, used.params, used.opt_state = self._step(*self._shared, used.params, used.opt_state, batch)
            self._shared = tuple(shared)
            if self._prefetch:
                self.bank.prefetch(then)

    def wait(self) -> None:
        """See ``Way``."""
        jax.block_until_ready(self._shared)

    def shared(self) -> tuple[Any, Any]:
        """See ``Way``."""
        return self._shared

    def own(self, task: int) -> tuple[Any, Any]:
        """See ``Way``."""
        return self.bank.params(task), self.bank.opt_state(task)

    @property
    def host_bytes(self) -> int:
        """See ``Way``."""
        return self.bank.nbytes


class Pipelined:
    """A pipeline, every theta[t] in its bank.

    Args:
        problem: as for ``Resident``.
        optimizer: as for ``Resident``.
        device: of what is read.
        stages: how the pipeline is cut.
    """

    def __init__(self, problem: Problem, optimizer: Any, device: Any, stages: Stages):
        self.bank = jaxpp.Bank.make(problem.own, problem.keys, optimizer, device=device)
        self.pipe = jaxpp.Pipeline(
            problem.loss_fn,
            optimizer,
            num_stages=stages.stages,
            num_microbatches=stages.microbatches,
            schedule=stages.schedule,
            bank=self.bank,
        )
        self._device, self._state = device, self.pipe.init(problem.shared, problem.key, problem.batch(0))
        self._metrics: Any = None

    def step(self, task: int, batch: Any, then: int) -> None:
        """See ``Way``."""
        self._state, self._metrics = self.pipe.step(self._state, batch, task=task)
        self.pipe.prefetch(then)

    def wait(self) -> None:
        """See ``Way``."""
        jax.block_until_ready((self._state.params, self._state.opt_state, self._metrics))
        self._metrics = None

    def shared(self) -> tuple[Any, Any]:
        """See ``Way``."""
        return jaxpp.gather((self._state.params, self._state.opt_state), self._device)

    def own(self, task: int) -> tuple[Any, Any]:
        """See ``Way``."""
        return self.bank.params(task), self.bank.opt_state(task)

    @property
    def host_bytes(self) -> int:
        """See ``Way``."""
        return self.bank.nbytes


def _placed(params: Any, optimizer: Any, device: Any) -> tuple[Any, Any]:
    """Parameters with their moments, on a device; so that the first step is compiled for what the others have."""
    return jaxpp.gather((params, jax.jit(optimizer.init)(params)), device)
