"""What a pipeline can be asked: whether it is right, what it will take, what it did. It changes nothing by that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxpp.errors import ArgumentError, StateError
from jaxpp.observe.collectives.collectives import Collectives
from jaxpp.observe.collectives.of_step import collectives_of
from jaxpp.observe.memory.forecast import Forecast, forecast, parse_bytes
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import record
from jaxpp.opened import Opened, open_engine
from jaxpp.plan.init_arguments import variables_of
from jaxpp.runtime.arguments import refuse_tracers
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.prepare import same_shapes
from jaxpp.schedule.validate import is_count
from jaxpp.stages.table import bytes_in_words
from jaxpp.state import State
from jaxpp.tasks.pipeline import Tasks
from jaxpp.tracebacks import entries
from jaxpp.types import Batch, Key
from jaxpp.verify import verify_grads, verify_update

__all__ = ["Asked", "check_no_task"]


@entries
class Asked:
    """The questions of a ``Pipeline``, which inherits them."""

    _engine: Engine
    _tasks: Tasks | None
    _functions: tuple[Callable[..., Any], ...]
    _ready: Opened | None

    def __repr__(self) -> str:
        options, ready = self._engine.settings, self._ready
        schedule, placement = options.schedule, options.placement
        devices = list(dict.fromkeys(str(device) for place in placement.by_rank for device in place.devices))
        names = ", ".join(devices if len(devices) <= 8 else [*devices[:7], f"... ({len(devices)})"])
        counts = {"replicas": placement.num_replicas, "shards": placement.num_shards}
        shared = " x ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        lines = [
            f"Pipeline of {'stages by hand' if self._functions else getattr(options.loss_fn, '__name__', 'a loss')}",
            f"  schedule: {schedule.name}, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches",
            f"  devices: {names}" + f" ({shared} a rank)" * bool(shared),
            *([] if self._tasks is None else [f"  bank: {self._tasks.bank!r}"]),
            "  init: not called yet" if ready is None else f"  init: called, {_size(ready)}; print(pipe.stages)",
        ]
        return "\n".join(lines)

    def _open(self, made: Any, batch: Any, key: Any) -> None:
        engine = self._engine
        self._ready = open_engine(engine, variables_of(engine.settings, made), batch, key, self._functions, self._tasks)

    def _opened(self, where: str) -> Opened:
        """What init has opened.

        Raises:
            StateError: before ``init``.
        """
        if self._ready is None:
            rule = "a pipeline is cut by init, when it first sees shapes"
            raise StateError(f"pipe.{where}", rule, "no call of init yet", "call state = pipe.init(...) first")
        return self._ready

    @contextmanager
    def _whole(self, where: str, state: State, batch: Any, key: Any, task: Any) -> Iterator[tuple[Engine, list[Any]]]:
        """The engine, and the leaves of a state, theta[t] among them if there is a bank; for what changes neither."""
        refuse_tracers(f"pipe.{where}(state, batch, key)", batch, key)
        leaves = self._opened(where).states.unwrap(state, where)
        if self._tasks is None:
            check_no_task(task)
            yield self._engine, leaves
        else:
            with self._tasks.whole(task, leaves) as whole:
                yield whole

    def verify(self, state: State, batch: Batch, key: Key | None = None, *, task: Any = None) -> None:
        """Check that a step equals the plain single-device step, leaf by leaf; the state is left as it is.

        Loss, aux and every gradient are compared with the oracle's; then the updated parameters and optimizer state with what
        plain optax makes of the pipeline's gradients. The whole model must fit on the first device. How closely depends on the
        floating type with the fewest digits that the loss computes with: 1e-12 in float64, 1e-5 in float32, 6% in bfloat16. A
        gradient that moves further when the parameters' last digits change (a bias before a batch normalisation) may differ by as
        much.

        Raises:
            VerifyError: naming the first leaf that differs, with both values; or what is NaN in both.
        """
        if self._engine.settings.severed:
            raise ArgumentError(
                "pipe.verify",
                "verify compares with the plain step, whose gradient crosses every boundary",
                f"cut_gradient={sorted(self._engine.settings.severed)}",
                "make a pipeline without cut_gradient",
            )
        with self._whole("verify", state, batch, key, task) as (engine, leaves):
            found = engine.run("grads", leaves, batch, key)
            verify_grads(engine, leaves, batch, key, found)
            stepped = engine.run("update", leaves, batch, key, donate=False)
            verify_update(engine, leaves, found, stepped.leaves)

    def forecast(self, params_or_shapes: Any, batch: Batch, key: Key | None = None, *, hbm: float | str | None = None) -> Forecast:
        """Memory of a step before the first one, from shapes alone; and what to change if it does not fit.

        The step is compiled, as ``init`` would, and not run; no parameter is made.

        Args:
            params_or_shapes: the parameters, or their shapes: ``jax.eval_shape(init, key)``; with ``has_state`` the pair.
            batch: as for ``step``, or its shapes.
            key: likewise; any, if the loss takes one and none is given.
            hbm: bytes that each device has: ``"80GiB"``, or a number; what the devices say themselves unless given (CPUs say
                nothing).

        Returns:
            the forecast: what each stage takes when its device holds most, in parameters, optimizer, gradients, residuals, what is
            in flight, batch, and temporaries of the compiled programs; whether it fits, and if not the changes that would make it.
            ``step(donate=False)`` takes a second state more; the caller's own arrays are not counted.

        Raises:
            JaxppError: as ``init``; and for an ``hbm`` that is no size.
        """
        engine, layout = self._engine, self._engine.preparer.layout
        room = None if hbm is None else parse_bytes(hbm)
        variables = variables_of(engine.settings, params_or_shapes)
        variables = variables if self._tasks is None else self._tasks.variables(variables)
        if key is None and engine.preparer.takes_key(variables, batch):
            key = jax.random.key(0)
        if layout is None:
            self._open(params_or_shapes, batch, key)
        elif not same_shapes(layout.given, variables):
            engine = Engine(engine.settings, engine.optimizer)
            engine.settle(variables, batch, key)
        return forecast(engine, batch, key, room, () if self._tasks is None else self._tasks.waiting(engine))

    def collectives(self, batch: Batch, key: Key | None = None, *, task: Any = None) -> Collectives:
        """What a step communicates inside its stages: the collectives of its compiled programs, read from their HLO.

        What stages send one another is not among them. The step is compiled, if it is not yet, and not run.

        Args:
            batch: as for ``step``, or its shapes.
            key: likewise.
            task: likewise.

        Returns:
            the collectives, their axes and bytes; and how much of all parameters, those of all tasks included, was reduced over
            ``data``.

        Raises:
            StateError: before ``init``.
        """
        self._opened("collectives")
        if self._tasks is None:
            check_no_task(task)
            return collectives_of(self._engine, batch, key)
        return collectives_of(self._tasks.engine(task), batch, key, self._tasks.other_bytes(task))

    def profile(
        self,
        state: State,
        batch: Batch,
        key: Key | None = None,
        *,
        num_steps: int = 3,
        clock: Clock | None = None,
        task: Any = None,
    ) -> Profile:
        """What really runs, when, and why the ranks idle: steps at full speed under JAX's profiler; the state is left as it is.

        It differs from a timer around each action in that nothing waits: the trace knows when each program ran. Some more steps
        then run one program at a time. The state is copied once, and steps are trained on the copy, so there must be room for a
        second one.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``.
            key: as for ``step``.
            task: as for ``step``.
            num_steps: how many steps to trace, at least 1, after as many that are not and three that do not count.
            clock: which times the numbers are of. ``"trace"``: the step as it ran, on devices that may share cores.
                ``"isolated"``: each program as long as it takes alone, on the virtual clock, as on devices of their own; the
                default on CPU, where devices share cores, and where there are fewer devices than ranks.

        Returns:
            the profile of the step of median length: start and end of every action and transfer, bubble, idle time by cause, live
            bytes of each device by kind. ``print`` it; ``profile.figure()`` draws it beside what the virtual clock says;
            ``jaxpp.observe.to_perfetto(profile)`` is a trace for Perfetto, ``to_json`` and ``to_html`` the rest.

        Raises:
            ArgumentError: fewer than one step, an unknown clock, or a trace of JAX's profiler is being taken already.
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        if not is_count(num_steps, least=1):
            raise ArgumentError("pipe.profile", "num_steps is a whole number of at least 1", f"num_steps={num_steps!r}", "pass 3")
        if clock not in (None, "trace", "isolated"):
            rule = 'the times are those of the trace ("trace"), or of each program alone ("isolated")'
            raise ArgumentError("pipe.profile", rule, f"clock={clock!r}", 'pass clock="trace", or leave it out')
        with self._whole("profile", state, batch, key, task) as (engine, leaves):
            return record(engine, leaves, batch, key, num_steps, clock or _clock_for(engine))


def _clock_for(engine: Engine) -> Clock:
    """The isolated clock where devices share what they compute with."""
    places = engine.placement.by_rank
    shared = len(set(places)) < len(places) or places[0].devices[0].platform == "cpu"
    return "isolated" if shared else "trace"


def check_no_task(task: Any) -> None:
    """Refuse a task where there is no bank.

    Raises:
        ArgumentError: there is one.
    """
    if task is not None:
        raise ArgumentError(f"task={task!r}", "a task is a set of the pipeline's bank", "no bank", "pass Pipeline(bank=...)")


def _size(ready: Opened) -> str:
    total, size = sum(stage.num_params for stage in ready.stages), sum(stage.num_bytes for stage in ready.stages)
    return f"{total:,} parameters in {bytes_in_words(size)}"
