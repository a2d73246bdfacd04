"""Training: what ``Pipeline`` does, apart from its options and the questions that it answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import optax

from jaxpp.compiled import Compiled, compile_step
from jaxpp.engine.batch_leaves import leaves_read
from jaxpp.engine.engine import Engine
from jaxpp.engine.init_arguments import Given, are_swapped, read_given, swapped
from jaxpp.engine.state import Metrics, State
from jaxpp.engine.state_leaves import check_kept, steps_of
from jaxpp.errors import StateError
from jaxpp.errors.checks import check_function, refuse_tracers
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.functions import Functions
from jaxpp.forward.predicting import Lend, Predicting
from jaxpp.observe.profile.trace import STEP
from jaxpp.options import Options
from jaxpp.plan.step import Leaves
from jaxpp.runtime.interrupts import Hold, despite_ctrl_c
from jaxpp.runtime.processes.channel import Agreement, agreement
from jaxpp.runtime.transfer import check_alive
from jaxpp.schedule.base import Schedule
from jaxpp.stages.stage_table import Stages
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.pipeline import with_set
from jaxpp.types import Array, Batch, Key, LossFn, TaskNames, Tree

__all__ = ["Training"]


@entries
class Training(Predicting):
    """Makes a first state and steps it; ``Pipeline`` is a training that is made from options and that can be asked about itself.

    Args:
        options: of the pipeline.
        optimizer: of all parameters.
        bank: parameter sets of tasks, or None.
        functions: the stages, if they were written by hand.
    """

    def __init__(
        self,
        options: Options,
        optimizer: optax.GradientTransformation,
        bank: Bank | None = None,
        functions: Sequence[Callable[..., Tree]] = (),
    ):
        self._options, self._optimizer, self._bank, self._functions = options, optimizer, bank, tuple(functions)
        self._compiled: Compiled | None = None
        self._kept: State | None = None
        self._functions_applied = Functions()

    @property
    def schedule(self) -> Schedule:
        """Which rank does which action, in which order."""
        return self._options.schedule

    @property
    def stages(self) -> Stages:
        """The table of stages; after ``init``.

        Raises:
            StateError: before ``init``, when nothing is cut yet.
        """
        return self._opened("stages").stages

    @property
    def engine(self) -> Engine:
        """What runs the steps, for tools: plans as lists of instructions, compiled programs, where every leaf lives.

        Its methods take the leaves of a state instead of the state, and may change from one version of jaxpp to the next.

        Raises:
            StateError: before ``init``.
        """
        return self._opened("engine").engine

    @property
    def state(self) -> State:
        """The newest state: what ``init`` made or the last step returned, also if the caller never received it.

        After a step that was interrupted (Ctrl-C) or raised, this is the new state if the update had begun, and otherwise the state
        that the step was given; never half of each. The pipeline alone holds this state and drops it at the next step; ``del
        pipe.state`` drops it at once, to make room for a checkpoint.

        Raises:
            StateError: there is none; or it is gone, consumed by an update that failed in part (because the device had no room for
                it, say) or by another pipeline's step.
        """
        self._opened("state")
        return check_kept(self._kept)

    @state.deleter
    def state(self) -> None:
        self._kept = None

    def _opened(self, where: str) -> Compiled:
        """What init has compiled.

        Raises:
            StateError: before ``init``.
        """
        if self._compiled is None:
            rule = "a pipeline is cut by init or abstract_state, when it first sees shapes"
            fix = "call state = pipe.init(...) first; for a checkpoint, target = pipe.abstract_state(...), and restore to target"
            raise StateError(f"pipe.{where}", rule, "no call of either has finished yet", fix)
        return self._compiled

    def _open(self, made: Tree, batch: Batch, key: Key | None, agree: Agreement | None = None) -> Compiled:
        given = {"functions": self._functions, "bank": self._bank, "known": self._compiled, "agree": agree}
        self._compiled = found = despite_ctrl_c(compile_step, self._options, self._optimizer, made, batch, key, **given)
        return found

    @contextmanager
    def _whole(
        self, where: str, state: State, batch: Batch, key: Key | None, task: TaskNames
    ) -> Iterator[tuple[Engine, Leaves[Array]]]:
        """The engine, and the leaves of a state and of the task's set; for what changes neither."""
        refuse_tracers(f"pipe.{where}(state, batch, key)", batch, key)
        found = self._opened(where)
        with found.runner.whole(task, found.states.unwrap(state, where)) as whole:
            yield whole

    def _lend(self, where: str, state_or_params: Tree, task: TaskNames) -> Lend:
        found = self._opened(where)
        if isinstance(state_or_params, State):
            leaves = found.states.unwrap(state_or_params, where)
        else:
            leaves = found.bring(where, self._options, state_or_params)
        return lambda: found.runner.whole(task, leaves)

    def _as_called(self, fn: Any, where: str, *, with_carry: bool = False) -> Any:
        runner = self._opened(where).runner
        return runner.joined(fn) if with_carry else runner.loss(fn, "fn")

    def init(self, init_or_params: Any, *args: Any) -> State:
        """Cut the loss, place the stages, compile the step, and make the first state.

        ``init(init_fn, key, batch)`` makes the parameters: every leaf is made on its owner, with the bits of
        ``jax.jit(init_fn)(key)``, and the whole model is never in one place. ``init(params, batch)`` copies existing parameters (a
        checkpoint, a pretrained model) to their owners. With ``has_state`` both stand for a pair ``(params, model_state)``. The
        number of arguments decides which form is meant, so parameters may be callable (the arrays of an Equinox module).

        Programs are compiled side by side, under a progress bar if that takes long. They are for this batch's shapes and, if the
        loss takes a key, for keys of the kind given or of ``jax.random.key``'s; a step with another kind of key is compiled at its
        first call. The pipeline keeps the newest state as ``pipe.state``.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters; with ``has_state`` the pair.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used.

        Raises:
            ArgumentError: other arguments, or in another order.
            CutError: too many stages, or cuts that the model does not have.
            InitError: ``init_fn`` cannot be traced.
            JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
        """
        given, found = self._open_given("init", init_or_params, args)
        self._kept = None  # there may be no room for two
        self._kept = state = found.states.wrap(found.first_leaves(given))
        return state

    def abstract_state(self, init_or_shapes: Any, *args: Any) -> State:
        """The shapes of the state, each with the sharding of its owner: what a checkpoint is restored to. No array is made.

        It does what ``init`` does up to the first array: the loss is cut, the stages are placed, the step is compiled. A state that
        the pipeline keeps stays ``pipe.state``; ``del pipe.state`` makes room for the checkpoint. Then Orbax restores every leaf
        straight to its owner, at any number of stages and with any schedule, and training goes on::

            target = pipe.abstract_state(init_fn, key, batch)
            state = orbax.checkpoint.StandardCheckpointer().restore(path, target)
            state, metrics = pipe.step(state, batch, key)

        Leaves that the pipeline holds as slices of unequal size, or as several on one device, come to pinned host memory; the
        first step brings the slices to their owners.

        Args:
            init_or_shapes: as for ``init``; instead of parameters their shapes will do, ``jax.eval_shape(init_fn, key)``.
            *args: as for ``init``.

        Returns:
            a ``State`` whose leaves are ``jax.ShapeDtypeStruct``s with shardings; ``step`` is 0.

        Raises:
            JaxppError: as ``init``.
        """
        return self._open_given("abstract_state", init_or_shapes, args)[1].states.abstract

    def _open_given(self, where: str, init_or_params: Tree, args: Sequence[Tree]) -> tuple[Given, Compiled]:
        """What the method ``where`` was given, and the pipeline cut and compiled for it."""
        refuse_tracers(f"pipe.{where}(...)", init_or_params, args)
        given = read_given(f"pipe.{where}", init_or_params, args)
        check_alive(f"pipe.{where}", (init_or_params, args))
        try:
            with agreement(f"pipe.{where}", self._options.devices) as agree:
                return given, self._open(given.shapes, given.batch, given.key if given.makes else jax.random.key(0), agree)
        except Exception as error:
            if not given.makes and are_swapped(self._options, given, lambda variables: with_set(self._bank, variables)):
                raise swapped(given) from error
            raise

    def step(
        self, state: State, batch: Batch, key: Key | None = None, *, task: TaskNames = None, donate: bool = True
    ) -> tuple[State, Metrics]:
        """One training step.

        Args:
            state: from ``init`` or the previous step, from a checkpoint, or from another pipeline of the same shapes. Its buffers
                are reused, so it is consumed, but only if the step succeeds up to the optimizer. If some of its arrays live
                elsewhere than this pipeline's do, all are copied and none is consumed.
            batch: a tree of arrays with one leading axis, the examples, of any size that gives each microbatch one example. Leaves
                without an axis (``{"x": ..., "beta": 0.5}``) go to every microbatch; changing their values compiles nothing.
            key: for the loss; required if the loss takes a key, unless it says ``key=None``. Microbatch i gets
                ``jax.random.fold_in(key, i)``.
            task: with a bank, the set that the step uses and changes, or a list with one for each replica. The bank holds the
                changed set afterwards, whatever ``donate`` is.
            donate: False keeps the old state alive, at the price of a second copy.

        Returns:
            the new state, which is ``pipe.state`` from now on, and the metrics. The call does not wait for the devices; reading a
            metric does. Only a loss or an optimizer with host callbacks is waited for, the loss before the update: a callback that
            raises then changes nothing.

        Raises:
            StateError: the state was consumed before, or has other trees or shapes than this pipeline's.
            BatchError: the batch cannot be split.
            Exception: what the user's loss raises at a new batch shape, or in a host callback, unchanged, with a note.
            FloatingPointError: with ``jax_debug_nans``, naming the action, stage, microbatch and line of the model that made the
                first NaN; each program is then waited for, and no buffer is reused.
            KeyboardInterrupt: on Ctrl-C, once the step has changed nothing or everything: continue with ``pipe.state``.

        Warns:
            DeadStageWarning: the gradients of a stage were zero in several earlier steps; names the boundary that carries none.
        """
        found = self._opened("step")
        refuse_tracers("pipe.step(state, batch, key)", batch, key)
        leaves, num_steps = found.states.unwrap(state, consumed=donate), steps_of(state)
        found.detector.look()  # before anything is consumed: a warning may be an error
        self._kept = state
        with Hold() as hold, jax.profiler.TraceAnnotation(STEP):
            try:
                outcome = found.runner.step(task, leaves, batch, key, donate=donate, hold=hold.begin)
            except BaseException as error:
                if any(
                    getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(state.held)
                ):  # not the copies of one elsewhere
                    error.add_note("jaxpp: the update had begun, so part of the state is consumed: go on from a checkpoint")
                elif not isinstance(error, Exception) and not hold.begun:
                    error.add_note("jaxpp: the step changed nothing: go on with state = pipe.state")
                raise
            self._kept = new = found.states.wrap(outcome.state, num_steps + 1)
        found.detector.add(outcome.squares)
        return new, Metrics(outcome.loss, outcome.aux, outcome.grad_norm, outcome.finite, num_steps + 1)

    def evaluate(
        self, state: State, batch: Batch, key: Key | None = None, loss_fn: LossFn | None = None, *, task: TaskNames = None
    ) -> Metrics:
        """The loss and aux of a batch, forward only; the state is left as it is.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``, but of any number of examples: if there are fewer examples than microbatches, each microbatch
                holds one example, and examples that cannot be divided evenly among replicas count evenly.
            key: as for ``step``.
            loss_fn: another loss over the same parameters (one without dropout, say); it may return ``(loss, aux)`` or a loss
                alone, whatever the pipeline's loss does. Keep one function and pass it again: each new function object is traced
                and compiled.
            task: as for ``step``; the set is left as it is.

        Raises:
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        if loss_fn is not None:
            check_function("pipe.evaluate(..., loss_fn=...)", "the loss is a function of (params, batch[, key])", loss_fn)
        with self._whole("evaluate", state, batch, key, task) as (engine, leaves):
            chosen = self._opened("evaluate").runner.loss(loss_fn)
            outcome = engine.run("forward", leaves, batch, key, loss_fn=chosen)
        return Metrics(loss=outcome.loss, aux=outcome.aux, step=steps_of(state))

    def reads(self, batch: Batch, key: Key | None = None, *, loss_fn: LossFn | None = None) -> Tree:
        """Which leaves of a batch the stages of this process read, so that it need not load the others.

        In several processes, ``step`` and ``evaluate`` take a ``jax.ShapeDtypeStruct`` for a leaf that no stage of the process
        reads: ``jax.tree.map(lambda leaf, read: load(leaf) if read else leaf, shapes, pipe.reads(shapes))``. In one process, the
        leaves that the loss uses.

        Args:
            batch: as for ``step``, or its shapes.
            key: as for ``step``; may be left out even if the loss takes a key.
            loss_fn: another loss, as for ``evaluate``; then ``key`` is what that loss takes.

        Returns:
            a tree like the batch, of booleans.

        Raises:
            StateError: before ``init`` or ``abstract_state``, where nothing is cut yet; both take shapes in place of a batch.
            BatchError: the batch cannot be split.
        """
        found = self._opened("reads")
        chosen = found.runner.loss(loss_fn)
        if key is None and chosen is None and found.engine.takes_key(batch):
            key = jax.random.key(0)
        lowered = found.engine.lower("update" if chosen is None else "forward", batch, key, loss_fn=chosen)
        read, tree = leaves_read(lowered), jax.tree.structure(batch)
        return tree.unflatten([leaf in read for leaf in range(tree.num_leaves)])

    def prefetch(self, task: TaskNames) -> None:
        """Begin to bring what the next step will use of the bank, while this step computes; waits for nothing.

        Args:
            task: as for ``step``.

        Raises:
            BankError: there is no such set, or no slot for it (``Bank(slots=1)``).
            StateError: before ``init``, which decides where the sets go.
        """
        self._opened("prefetch").runner.prefetch(task)
