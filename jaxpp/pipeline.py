"""The public face for training: check, split, execute, merge."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpp.bank import Bank
from jaxpp.by_hand import compose, scope
from jaxpp.errors import ArgumentError, StateError
from jaxpp.observe.forecast import Forecast, forecast, parse_bytes
from jaxpp.observe.profile import Profile
from jaxpp.observe.record import record
from jaxpp.opened import Opened, first_leaves, open_engine, variables_of, wrong_init
from jaxpp.runtime.birth import trace_init
from jaxpp.runtime.engine import Engine, Kind, Outcome
from jaxpp.runtime.prepare import same_shapes
from jaxpp.runtime.settings import settings
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.laws import is_count
from jaxpp.stages.joint import join_losses, join_optimizers
from jaxpp.stages.table import Stages
from jaxpp.state import Metrics, State
from jaxpp.tasks import Tasks
from jaxpp.types import Batch, Device, Key, LossFn, ReduceAux, Remat
from jaxpp.verify import verify_grads, verify_update

__all__ = ["Metrics", "Pipeline", "State"]


class Pipeline:
    """Trains a loss over several devices, the model unedited.

    ``init`` traces the loss once, cuts it into stages, and makes every parameter on the device of the stage that uses it; ``step``
    runs the schedule and the optimizer. A step means exactly what the single-device loop over microbatches means, whatever the
    number of stages, the schedule or the cuts (``verify`` checks that).

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``; with ``has_state``
            ``loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))``.
        optimizer: any optax transformation that treats parameters one by one, or through norms and other scalars.
        num_stages: stages to cut the loss into: ranks x stages a rank.
        num_microbatches: parts the batch is split into along axis 0; ``num_stages`` unless given.
        schedule: a name for ``jaxpp.schedule.make``, or a ``Schedule``. Schedules with two stages a rank (interleaved, looped-bfs
            and those in a V) run on half as many devices as stages.
        has_aux: whether the loss returns ``(loss, aux)``.
        reduce_aux: how the microbatches' aux becomes the step's: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"last"``,
            ``"join"``, ``"stack"``, a function of ``(values, weights)`` with the microbatches along their first axis, or a
            dictionary of these by path, ``{"errors": "sum"}``. Unless given, leaves with one row an example are joined, others
            averaged like the loss.
        weight: weight of a microbatch in the mean, from its part of the batch (the number of real tokens, say, for a loss that is
            a mean over them); the number of examples unless given.
        cuts: module paths or parameter prefixes at which stages 1, 2, ... begin; found automatically unless given.
        devices: one a rank, cycled if fewer; ``jax.devices()`` unless given.
        remat: what a stage's forward keeps for its backward: everything (``"keep"``), the stage's inputs only
            (``"recompute"``, which runs the forward twice), or what a policy of ``jax.checkpoint_policies`` says; one for all,
            or a list of one a stage. Where a backward is split, I recomputes for W, which holds what it needs until then. A loop
            (``scan``) is one operation to a policy.
        cut_gradient: boundaries that carry no gradient, for teaching: s is the one between stages s and s + 1. The stages up to s
            then learn nothing, but for parameters that a later stage uses too.
        has_state: whether the loss has a model state (BatchNorm's running statistics, counters): a tree of arrays that each
            microbatch hands to the next, in order, without a gradient.
        balance: what stages have equally much of: ``"flops"``, counted, or ``"time"``: the stages are measured once, on zeros, and
            the loss is cut again.
        loss_scale: Flax's ``DynamicScale``, for losses computed in float16: backwards start from its scale, and a gradient that is
            not finite, on any stage, skips the step on all of them and lowers it. ``state.loss_scale`` holds it from then on.

    Raises:
        JaxppError: a ``ValueError`` for every option that cannot be run.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jnp.tanh(batch @ params["w1"]) @ params["w2"]) ** 2)
        >>> def init(key):
        ...     return {"w1": jax.random.normal(key, (4, 8)), "w2": jax.random.normal(key, (8, 2))}
        >>> pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=2, num_microbatches=4)
        >>> batch = jnp.ones((8, 4))
        >>> state = pipe.init(init, jax.random.key(0), batch)
        >>> state, metrics = pipe.step(state, batch)
        >>> later, metrics_later = pipe.step(state, batch)
        >>> bool(metrics_later.loss < metrics.loss)
        True
    """

    def __init__(  # noqa: PLR0913  (the options of the front door)
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        *,
        num_stages: int,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        has_aux: bool = False,
        weight: Callable[[Batch], Any] | None = None,
        cuts: Sequence[str] | None = None,
        devices: Sequence[Device] | None = None,
        remat: Remat | Sequence[Remat] = None,
        cut_gradient: Iterable[int] = (),
        has_state: bool = False,
        reduce_aux: ReduceAux = None,
        loss_scale: Any = None,
        balance: str = "flops",
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Any = None,
        bank: Bank | None = None,
    ):
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ArgumentError(
                "Pipeline(loss_fn, optimizer, ...)",
                "the optimizer is an optax transformation, with init and update",
                repr(optimizer),
                "pass for example optax.adamw(3e-4)",
            )
        self._tasks = None if bank is None else Tasks(bank)
        if self._tasks is not None:
            loss_fn, optimizer = join_losses(loss_fn), join_optimizers(optimizer, self._tasks.bank.optimizer)
        options = settings(
            loss_fn,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            has_aux=has_aux,
            weight=weight,
            cuts=cuts,
            devices=devices,
            remat=remat,
            cut_gradient=cut_gradient,
            has_state=has_state,
            reduce_aux=reduce_aux,
            loss_scale=loss_scale,
            balance=balance,
            mesh=mesh,
            data_parallel=data_parallel,
            shardings=shardings,
        )
        self._engine = Engine(options, optimizer)
        self._functions: tuple[Callable[..., Any], ...] = ()
        self._ready: Opened | None = None

    @classmethod
    def from_stages(
        cls,
        stages: Sequence[Callable[[Any, Any], Any]],
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        weight: Callable[[Batch], Any] | None = None,
        devices: Sequence[Device] | None = None,
        remat: Remat | Sequence[Remat] = None,
    ) -> "Pipeline":
        """A pipeline from explicit stage functions, for teaching and debugging.

        Args:
            stages: ``stage_k(params_k, x) -> x``, one a stage; their widths may differ.
            loss: ``loss(output, targets) -> scalar``; runs on the last stage.
            optimizer: any optax transformation.
            num_microbatches: as for ``Pipeline``.
            schedule: as for ``Pipeline``.
            weight: as for ``Pipeline``.
            devices: as for ``Pipeline``.
            remat: as for ``Pipeline``.

        Returns:
            a pipeline whose parameters are a sequence of one tree a stage, and whose batch is a pair ``(inputs, targets)``.
        """
        functions = tuple(stages)
        pipe = cls(
            compose(functions, loss),
            optimizer,
            num_stages=len(functions),
            num_microbatches=num_microbatches,
            schedule=schedule,
            weight=weight,
            cuts=[scope(k) for k in range(1, len(functions))],
            devices=devices,
            remat=remat,
        )
        pipe._functions = functions
        return pipe

    @property
    def schedule(self) -> Schedule:
        """The table of actions."""
        return self._engine.settings.schedule

    @property
    def stages(self) -> Stages:
        """The table of stages; after ``init``.

        Raises:
            StateError: before ``init``, when nothing is cut yet.
        """
        return self._opened("stages").stages

    def init(self, init_or_params: Any, *args: Any) -> State:
        """Cut the loss, place the stages, compile the step, and make the first state.

        Programs are compiled side by side, under a progress bar if that takes long, so the first step takes hardly longer than the
        others. They are for this batch's shapes and this kind of key: ``jax.random.key``'s, where the loss takes one and none is
        given. A step with another kind of key, or with none, is compiled when it first comes.
        ``init(init_fn, key, batch)`` makes the parameters: every leaf is born on its owner, with the bits of
        ``jax.jit(init_fn)(key)``, and the whole model is never in one place. ``init(params, batch)`` copies parameters one has (a
        checkpoint, a pretrained model) to their owners. With ``has_state`` both stand for a pair ``(params, model_state)``.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters; with ``has_state`` the pair.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used.

        Raises:
            CutError: too many stages, or cuts that the model does not have.
            InitError: ``init_fn`` cannot be traced.
            JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
        """
        made = init_or_params
        if len(args) != 1 + callable(made):
            raise wrong_init(f"{'a function' if callable(made) else 'parameters'} and {len(args)} more arguments")
        shapes, key = (trace_init(made, args[0])[1], args[0]) if callable(made) else (made, jax.random.key(0))
        self._open(shapes, args[-1], key)
        return self._opened("init").states.wrap(first_leaves(self._engine, made, args, self._tasks))

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

    def _run(self, kind: Kind, leaves: list[Any], batch: Batch, key: Key | None, task: Any, **options: Any) -> Outcome:
        """A step of the engine; of Theta and theta[t], with a bank."""
        if self._tasks is not None:
            return self._tasks.run(kind, task, leaves, batch, key, **options)
        if task is not None:
            raise ArgumentError(f"task={task!r}", "a task is a set of the pipeline's bank", "no bank", "pass Pipeline(bank=...)")
        return self._engine.run(kind, leaves, batch, key, **options)

    def step(
        self, state: State, batch: Batch, key: Key | None = None, *, task: Any = None, donate: bool = True
    ) -> tuple[State, Metrics]:
        """One training step.

        Args:
            state: from ``init`` or the step before. Its buffers are reused; it is consumed, but only if the step succeeds up to
                the optimizer.
            batch: tree of arrays with one leading axis, the examples; of any size that gives each microbatch one.
            key: for the loss, if it takes one; microbatch i gets ``jax.random.fold_in(key, i)``.
            task: with a bank, the set that the step uses and changes, or a list of one a replica.
            donate: False keeps the old state alive, at the price of a second copy.

        Returns:
            the new state and the metrics. Nothing is waited for: reading a metric does that.

        Raises:
            StateError: the state was consumed before, or is another pipeline's.
            BatchError: the batch cannot be split.
            Exception: what the user's loss raises at a new batch shape, unchanged, with a note.

        Warns:
            DeadStageWarning: the gradients of a stage were zero in several steps before; the boundary that carries none is named.
        """
        ready = self._opened("step")
        leaves = ready.states.unwrap(state)
        ready.detector.look()  # before anything is consumed: a warning may be an error
        outcome = self._run("update", leaves, batch, key, task, donate=donate)
        ready.detector.add(outcome.squares)
        return ready.states.wrap(outcome.leaves), Metrics(outcome.loss, outcome.aux, outcome.grad_norm, outcome.finite)

    def evaluate(
        self, state: State, batch: Batch, key: Key | None = None, loss_fn: LossFn | None = None, *, task: Any = None
    ) -> Metrics:
        """The loss and aux of a batch, forward only; the state is left as it is.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``.
            key: as for ``step``.
            loss_fn: another loss over the same parameters (one without dropout, say). Keep one function and pass it again: each
                new function object is traced and compiled.
            task: as for ``step``; the set is left as it is.

        Raises:
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        leaves = self._opened("evaluate").states.unwrap(state)
        outcome = self._run("forward", leaves, batch, key, task, loss_fn=loss_fn)
        return Metrics(loss=outcome.loss, aux=outcome.aux)

    def verify(self, state: State, batch: Batch, key: Key | None = None) -> None:
        """Check that a step equals the plain single-device step, leaf by leaf; the state is left as it is.

        Loss, aux and every gradient are compared with the oracle's; then the updated parameters and optimizer state with what
        plain optax makes of the pipeline's gradients. The whole model must fit on the first device. How closely depends on the
        floating type with the fewest digits that the loss computes with: 1e-12 in float64, 1e-5 in float32, 6% in bfloat16. A
        gradient that moves further when the parameters' last digits change (a bias before a batch normalisation) may differ by as
        much.

        Raises:
            VerifyError: naming the first leaf that differs, with both values.
        """
        if self._engine.settings.severed:
            raise ArgumentError(
                "pipe.verify",
                "verify compares with the plain step, whose gradient crosses every boundary",
                f"cut_gradient={sorted(self._engine.settings.severed)}",
                "make a pipeline without cut_gradient",
            )
        states = self._opened("verify").states
        leaves = states.unwrap(state)
        found = self._engine.run("grads", leaves, batch, key)
        verify_grads(self._engine, state, batch, key, found)
        stepped = self._engine.run("update", leaves, batch, key, donate=False)
        verify_update(self._engine, state, found, states.wrap(stepped.leaves))

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
        if engine.preparer.takes_key():
            key = jax.random.key(0) if key is None else key
        if layout is None:
            self._open(params_or_shapes, batch, key)
        elif not same_shapes(layout.given, variables_of(engine.settings, params_or_shapes)):
            engine = Engine(engine.settings, engine.optimizer)
            engine.settle(variables_of(engine.settings, params_or_shapes), batch, key)
        return forecast(engine, batch, key, room)

    def profile(self, state: State, batch: Batch, key: Key | None = None, *, num_steps: int = 3) -> Profile:
        """What really runs, when, and why the ranks idle: some steps watched at full speed; the state is left as it is.

        It differs from a timer around each action in that nothing waits: after each dispatch the host asks which results are
        there. The state is copied once, and steps are trained on the copy, so there must be room for a second one.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``.
            key: as for ``step``.
            num_steps: how many steps to watch, at least 1; by turns with as many that are not, after three pairs that do not count.

        Returns:
            the profile of the step of median length: start and end of every action and transfer, bubble, idle time by cause, live
            bytes of each device by kind. ``print`` it; ``profile.figure()`` draws it beside what the virtual clock says;
            ``jaxpp.observe.to_perfetto(profile)`` is a trace for Perfetto, ``to_json`` and ``to_html`` the rest.

        Raises:
            ArgumentError: fewer than one step.
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        if not is_count(num_steps, least=1):
            raise ArgumentError("pipe.profile", "num_steps is a whole number of at least 1", f"num_steps={num_steps!r}", "pass 3")
        return record(self._engine, self._opened("profile").states.unwrap(state), batch, key, num_steps)
