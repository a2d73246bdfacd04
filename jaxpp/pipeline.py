"""The public face for training: check, split, execute, merge."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpp.errors import StateError
from jaxpp.observe.asked import Asked, check_no_task
from jaxpp.observe.profile.trace import STEP
from jaxpp.opened import Opened, first_leaves
from jaxpp.options import settings
from jaxpp.plan.init_arguments import are_swapped, read_given, swapped
from jaxpp.runtime.arguments import check_function, check_optimizer, refuse_tracers
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.transfer import check_alive
from jaxpp.schedule.base import Schedule
from jaxpp.stages.by_hand import check_stages, compose, scope
from jaxpp.stages.joint import join_losses, join_optimizers
from jaxpp.stages.loss.key import positional_key
from jaxpp.stages.table import Stages
from jaxpp.state import Metrics, State
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.pipeline import Tasks, check_scaling
from jaxpp.tracebacks import entries
from jaxpp.types import Batch, Device, Key, LossFn, ReduceAux, Remat

__all__ = ["Metrics", "Pipeline", "State"]


@entries
class Pipeline(Asked):
    """Trains a loss over several devices, the model unedited.

    ``init`` traces the loss once, cuts it into stages, and makes every parameter on the device of the stage that uses it; ``step``
    runs the schedule and the optimizer. A step means exactly what the single-device loop over microbatches means, whatever the
    number of stages, the schedule or the cuts (``verify`` checks that).

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``; with ``has_state``
            ``loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))``. The key may be an argument by keyword
            alone, called ``key``, ``rng``, ``rngs`` or like these (``*, dropout_rng``); it is one key, which Flax's
            ``module.apply(..., rngs=rngs)`` takes as well as a dictionary of keys.
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
            a mean over them); the number of examples unless given. Weights that add up to 0 have no mean: such a batch is refused
            if it is the first of its shape, and later makes the loss NaN, as to look at each would mean to wait for it.
        cuts: module paths or parameter prefixes at which stages 1, 2, ... begin; found automatically unless given.
        devices: one a rank, cycled if fewer; ``jax.devices()`` unless given.
        remat: what a stage's forward keeps for its backward. ``"least"``: as few bytes as its backward can do with if it computes
            again what is cheap (elementwise arithmetic; never a matrix product, a convolution, a loop or a random number).
            ``"keep"``: everything. ``"recompute"``: the stage's inputs only; the forward is run twice. Or what a policy of
            ``jax.checkpoint_policies`` says. One for all stages, or a list of one a stage. Where a backward is split, I keeps for
            W in the same way. A loop (``scan``) is one operation.
        cut_gradient: boundaries that carry no gradient, for teaching: s is the one between stages s and s + 1. The stages up to s
            then learn nothing, but for parameters that a later stage uses too.
        has_state: whether the loss has a model state (BatchNorm's running statistics, counters): a tree of arrays that each
            microbatch hands to the next, in order, without a gradient.
        balance: what stages have equally much of: ``"flops"``, counted, or ``"time"``: the stages are measured once, on zeros, and
            the loss is cut again.
        loss_scale: Flax's ``DynamicScale``, for losses computed in float16: backwards start from its scale, and a gradient that is
            not finite, on any stage, skips the step on all of them and lowers it. ``state.loss_scale`` holds it from then on.
        mesh: devices along ``"pipe"`` (one a rank), ``"data"`` (replicas) and ``"model"`` (shards of the parameters), instead of
            ``devices``; each rank is then a sub-mesh.
        data_parallel: replicas, without a mesh. Each takes its part of the batch and splits that into the microbatches, so a step
            is that of as many times more microbatches (where they are equally large; otherwise each replica's first are the larger
            ones): those of replica r are numbered from r times theirs. Gradients are summed over the replicas once a step.
        shardings: how parameters are sharded over ``"model"`` inside their stage: by path, ``{"*/fc": "column", "*/proj": "row",
            "*/attn": "heads", "embed": "embedding"}`` or ``PartitionSpec``s; a tree of these; or Flax's logical axis rules, for
            parameters that carry axis names.
        bank: parameter sets of tasks, theta[t]: the loss is then ``loss_fn(params, task_params, batch[, key])``, each step is told
            its ``task`` (or one a replica), and the state holds Theta alone. Theta has ``optimizer``, each theta[t] the bank's.
        shared: batch leaves that every microbatch (and replica) gets whole rather than split, by path or pattern of paths:
            ``("graph/*", "positions")``. Numbers (leaves without an axis) always are.
        max_shapes: of how many batch shapes the compiled step is kept: the last that were used. One that comes back later is traced
            and compiled again. A shape that is evaluated with another loss counts once more.

    Raises:
        JaxppError: a ``ValueError`` for every option that cannot be run. Tracebacks end at the caller's own line;
            ``jax.config.update("jax_traceback_filtering", "off")`` shows every frame.

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
        remat: Remat | Sequence[Remat] = "least",
        cut_gradient: Iterable[int] = (),
        has_state: bool = False,
        reduce_aux: ReduceAux = None,
        loss_scale: Any = None,
        balance: str = "flops",
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Any = None,
        bank: Bank | None = None,
        shared: str | Sequence[str] = (),
        max_shapes: int = 8,
    ):
        check_optimizer(loss_fn, optimizer)
        self._tasks = None if bank is None else Tasks(bank)
        if self._tasks is not None:
            loss_fn = join_losses(positional_key(loss_fn, 3 + has_state))
            optimizer = join_optimizers(optimizer, self._tasks.bank.optimizer)
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
            shared=shared,
            max_shapes=max_shapes,
        )
        if self._tasks is not None:
            check_scaling(options)
        self._engine = Engine(options, optimizer)
        self._functions: tuple[Callable[..., Any], ...] = ()
        self._ready: Opened | None = None
        self._kept: State | None = None

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
        remat: Remat | Sequence[Remat] = "least",
        shared: str | Sequence[str] = (),
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
            shared: as for ``Pipeline``; the inputs are called ``"0"``, the targets ``"1"``.

        Returns:
            a pipeline whose parameters are a sequence of one tree a stage, and whose batch is a pair ``(inputs, targets)``.
        """
        functions = check_stages(stages, loss)
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
            shared=shared,
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

    @property
    def state(self) -> State:
        """The newest state: what ``init`` made or the last step returned, also where the caller never got it.

        After a step that was interrupted (Ctrl-C) or raised, it is the new state if the update had begun, else the state that the
        step was given; never half of each. The pipeline holds this state alone and lets go of it at the next step; ``del
        pipe.state`` lets go of it at once, to make room for a checkpoint.

        Raises:
            StateError: there is none; or it is gone: consumed by an update that failed in part (the device had no room for it,
                say), or by another pipeline's step.
        """
        self._opened("state")
        if self._kept is None:
            raise StateError(
                "pipe.state",
                "a pipeline keeps the newest state that init or step made",
                "none: init did not finish, or the state was deleted",
                "call state = pipe.init(...) again",
            )
        leaves = jax.tree.leaves(self._kept)
        if gone := sum(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
            raise StateError(
                "pipe.state",
                "a state that was consumed cannot be used again",
                f"{gone} of {len(leaves)} leaves are gone: by an update that failed in part, or by the step of another pipeline",
                "go on from a checkpoint, pipe.step(restored, ...), or with the state that the other pipeline returned",
            )
        return self._kept

    @state.deleter
    def state(self) -> None:
        self._kept = None

    def init(self, init_or_params: Any, *args: Any) -> State:
        """Cut the loss, place the stages, compile the step, and make the first state.

        Programs are compiled side by side, under a progress bar if that takes long, so the first step takes hardly longer than the
        others. They are for this batch's shapes and this kind of key: ``jax.random.key``'s, where the loss takes one and none is
        given. A step with another kind of key, or with none, is compiled when it first comes.
        ``init(init_fn, key, batch)`` makes the parameters: every leaf is born on its owner, with the bits of
        ``jax.jit(init_fn)(key)``, and the whole model is never in one place. ``init(params, batch)`` copies parameters one has (a
        checkpoint, a pretrained model) to their owners. With ``has_state`` both stand for a pair ``(params, model_state)``.
        The number of arguments decides which is meant, so parameters may be callable (the arrays of an Equinox module).

        The pipeline keeps what it returns, and later what each step returned, as ``pipe.state``.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters; with ``has_state`` the pair.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used.

        Raises:
            ArgumentError: other arguments, or in another order.
            CutError: too many stages, or cuts that the model does not have.
            InitError: ``init_fn`` cannot be traced.
            JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
        """
        refuse_tracers("pipe.init(...)", init_or_params, args)
        given = read_given(init_or_params, args)
        check_alive("pipe.init", (init_or_params, args))
        try:
            self._open(given.shapes, given.batch, given.key if given.makes else jax.random.key(0))
        except Exception as error:
            joined = (lambda variables: variables) if self._tasks is None else self._tasks.variables
            if not given.makes and are_swapped(self._engine.settings, given, joined):
                raise swapped(given) from error
            raise
        self._kept = None  # there may be no room for two
        self._kept = state = self._opened("init").states.wrap(first_leaves(self._engine, given, self._tasks))
        return state

    def step(
        self, state: State, batch: Batch, key: Key | None = None, *, task: Any = None, donate: bool = True
    ) -> tuple[State, Metrics]:
        """One training step.

        Args:
            state: from ``init`` or the step before, a checkpoint, or another pipeline's of the same shapes. Its buffers are reused,
                so it is consumed, but only if the step succeeds up to the optimizer; if some of its arrays live elsewhere than
                this pipeline's, all are copied and nothing of it is consumed.
            batch: tree of arrays with one leading axis, the examples; of any size that gives each microbatch one. Leaves without
                an axis (``{"x": ..., "beta": 0.5}``) go to every microbatch as they are; other values of them compile nothing.
            key: for the loss; one that takes a key needs it, unless it says ``key=None``. Microbatch i gets
                ``jax.random.fold_in(key, i)``.
            task: with a bank, the set that the step uses and changes, or a list of one a replica. The bank has the changed set,
                whatever ``donate``. Replicas that share a task for the first time compile the mean over them, a small program.
            donate: False keeps the old state alive, at the price of a second copy.

        Returns:
            the new state, which is ``pipe.state`` from now on, and the metrics. Nothing is waited for: reading a metric does that.
            (Only a loss or an optimizer with host callbacks is waited for, the loss before the update: a callback that raises
            then changes nothing.)

        Raises:
            StateError: the state was consumed before, or has other trees or shapes than this pipeline's.
            BatchError: the batch cannot be split.
            Exception: what the user's loss raises at a new batch shape, or a host callback in it, unchanged, with a note.
            FloatingPointError: with ``jax_debug_nans`` on, naming the action, the stage, the microbatch and the line of the model
                that made the first NaN; each program is then waited for, and no buffer is reused.
            KeyboardInterrupt: on Ctrl-C, once the step has changed nothing or all: ``pipe.state`` is the state to go on with.

        Warns:
            DeadStageWarning: the gradients of a stage were zero in several steps before; the boundary that carries none is named.
        """
        ready = self._opened("step")
        refuse_tracers("pipe.step(state, batch, key)", batch, key)
        leaves = ready.states.unwrap(state, consumed=donate)
        ready.detector.look()  # before anything is consumed: a warning may be an error
        self._kept = state
        with Hold() as hold, jax.profiler.TraceAnnotation(STEP):
            try:
                if self._tasks is None:
                    check_no_task(task)
                    outcome = self._engine.run("update", leaves, batch, key, donate=donate, hold=hold.begin)
                else:
                    outcome = self._tasks.step(task, leaves, batch, key, donate=donate, hold=hold.begin)
            except BaseException as error:
                if any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(state)):  # not the copies of one elsewhere
                    error.add_note("jaxpp: the update had begun, so part of the state is consumed: go on from a checkpoint")
                raise
            self._kept = new = ready.states.wrap(outcome.leaves)
        ready.detector.add(outcome.squares)
        return new, Metrics(outcome.loss, outcome.aux, outcome.grad_norm, outcome.finite)

    def evaluate(
        self, state: State, batch: Batch, key: Key | None = None, loss_fn: LossFn | None = None, *, task: Any = None
    ) -> Metrics:
        """The loss and aux of a batch, forward only; the state is left as it is.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``, of any number of examples: with fewer than microbatches these hold one each, and those that
                cannot be divided evenly among replicas count as evenly.
            key: as for ``step``.
            loss_fn: another loss over the same parameters (one without dropout, say); it may return ``(loss, aux)`` or a loss
                alone, whatever the pipeline's does. Keep one function and pass it again: each new function object is traced and
                compiled.
            task: as for ``step``; the set is left as it is.

        Raises:
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        if loss_fn is not None:
            check_function("pipe.evaluate(..., loss_fn=...)", "the loss is a function of (params, batch[, key])", loss_fn)
        with self._whole("evaluate", state, batch, key, task) as (engine, leaves):
            chosen = self._tasks.joined(loss_fn) if self._tasks else positional_key(loss_fn, 2 + engine.settings.has_state)
            outcome = engine.run("forward", leaves, batch, key, loss_fn=chosen)
        return Metrics(loss=outcome.loss, aux=outcome.aux)

    def prefetch(self, task: Any) -> None:
        """Begin to bring what the next step will use of the bank, while this one computes; waits for nothing.

        Args:
            task: as for ``step``.

        Raises:
            BankError: there is no such set, or no slot for it (``Bank(slots=1)``).
            StateError: before ``init``, which decides where the sets go.
        """
        self._opened("prefetch")
        if self._tasks is None:
            check_no_task(task)
        else:
            self._tasks.prefetch(task)
