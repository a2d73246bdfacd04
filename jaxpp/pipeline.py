"""The public face for training: ``Pipeline``."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpp.engine.engine import open_engine
from jaxpp.engine.init_arguments import variables_of
from jaxpp.engine.state import Metrics, State
from jaxpp.engine.tracing import Tracing, same_shapes
from jaxpp.errors import ArgumentError
from jaxpp.errors.checks import check_optimizer
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.request import generation_forecast
from jaxpp.forward.sampling import SampleRule
from jaxpp.observe.collectives import Collectives, collectives_of
from jaxpp.observe.memory.fit import fit
from jaxpp.observe.memory.forecast import Forecast, forecast, parse_bytes
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import Forwards, Steps, check_profile, record
from jaxpp.options import Options
from jaxpp.schedule.base import Schedule
from jaxpp.stages.by_hand import check_stages, compose, scope
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.own_params import join_losses, join_optimizers
from jaxpp.stages.remat.offload import Remat
from jaxpp.stages.stage_table import Stages, bytes_in_words
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.pipeline import check_bank, check_scaling, waiting_names, with_set
from jaxpp.training import Training
from jaxpp.types import Batch, Device, ForwardFn, Key, LossFn, ReduceAux, TaskNames, Tree
from jaxpp.verify import check_comparable, verify_step

__all__ = ["Metrics", "Pipeline", "State"]

_NOT_OPTIONS = frozenset({"self", "cls", "__class__", "loss_fn", "optimizer", "bank", "stages", "loss"})
"""Arguments that ``Options`` has nothing to do with."""


@entries
class Pipeline(Training):
    """Trains a loss over several devices, without changes to the model.

    ``init`` traces the loss once, cuts it into stages, and makes every parameter on the device of the stage that uses it; ``step``
    runs the schedule and the optimizer. Results match single-device gradient accumulation for any number of stages, any schedule
    and any cut points; ``verify`` checks that.

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``; with ``has_state``
            ``loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))``. The key may be a keyword-only argument
            whose name contains ``key``, ``rng`` or ``rngs`` (``*, dropout_rng``).
        optimizer: any optax transformation that treats parameters one by one, or combines them through norms and other scalars.
        num_stages: how many stages to cut the loss into: the number of ranks times the stages on each rank.
        num_microbatches: how many parts the batch is split into along axis 0. Default: ``num_stages``.
        schedule: a name for ``jaxpp.schedule.make``, or a ``Schedule``. Schedules with two stages on each rank (interleaved,
            looped-bfs and the V-shaped ones) run on half as many devices as there are stages.
        has_aux: whether the loss returns ``(loss, aux)``.
        reduce_aux: how the aux values of the microbatches become the aux of the step: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
            ``"last"``, ``"join"``, ``"stack"``, a function of ``(values, weights)`` with the microbatches along their first axis,
            or a dictionary of these by path, ``{"errors": "sum"}``. Default: leaves with one row for each example are joined, all
            others averaged like the loss.
        weight: a function from a microbatch to its weight in the mean (the number of real tokens, say). Default: the number of
            examples. If the weights of a batch sum to 0, there is no mean: the first batch of a shape is refused, later ones have
            a loss of NaN, because looking at each would stall the pipeline.
        cuts: module paths or parameter prefixes at which stages 1, 2, ... begin. Default: jaxpp balances the stages.
        devices: one for each rank. If there are fewer devices than ranks, they are reused round-robin. Default: ``jax.devices()``.
        remat: what a stage's forward keeps for its backward. ``"least"``: as few bytes as possible without repeating a matrix
            product, a convolution, a loop or a random number; cheap elementwise arithmetic is recomputed. ``"keep"``: everything.
            ``"recompute"``: only the stage's inputs; the forward runs twice. A policy of ``jax.checkpoint_policies``: what the
            policy says. ``"offload"``: as ``"least"``, and what is kept waits in host memory until its backward is near; see
            ``jaxpp.Offload``, which may be passed too. One value for all stages, or a list with one for each stage. The same rule
            decides what I keeps for W.
        cut_gradient: boundaries that carry no gradient, for teaching; boundary s lies between stages s and s + 1. The stages before
            such a boundary learn nothing, except parameters that a later stage uses too.
        has_state: whether the loss has a model state (BatchNorm's running statistics, counters): a tree of arrays that each
            microbatch passes to the next, in order, without a gradient.
        balance: what stages have equal amounts of: ``"flops"``, which are counted; ``"time"``, which is measured on zeros, after
            which the loss is cut again; or ``"memory"``, where the peaks of the devices are equal, as far as shapes tell.
        loss_scale: Flax's ``DynamicScale``, for losses computed in float16. Backwards start from its scale; if any gradient on any
            stage is not finite, all stages skip the step and the scale is lowered. ``state.loss_scale`` holds the current scale.
        mesh: a mesh with the axes ``"pipe"`` (ranks), ``"data"`` (replicas) and ``"model"`` (shards of the parameters), instead of
            ``devices``; each rank is then a sub-mesh.
        data_parallel: the number of replicas, if there is no mesh. Each replica splits its part of the batch into
            ``num_microbatches``, so a step equals one with ``data_parallel`` times as many microbatches; microbatch i of replica r
            has number ``r * num_microbatches + i``. Gradients are all-reduced once a step.
        shardings: how parameters are sharded over ``"model"`` inside their stage: by path, ``{"*/fc": "column", "*/proj": "row",
            "*/attn": "heads", "embed": "embedding"}`` or with ``PartitionSpec``s; a tree of these; or Flax's logical axis rules,
            for parameters that carry axis names.
        bank: parameter sets of tasks, theta[t]. The loss is then ``loss_fn(params, task_params, batch[, key])``, every step names
            its ``task`` (or one task for each replica), and the state holds Theta alone. ``optimizer`` updates Theta, the bank's
            optimizer updates each theta[t].
        shared: batch leaves that every microbatch (and replica) gets whole instead of split, by path or pattern of paths:
            ``("graph/*", "positions")``. Leaves without an axis (numbers) are never split.
        max_shapes: for how many batch shapes the compiled steps are kept; the least recently used shape is dropped, and compiled
            again if it returns. A shape evaluated with another loss counts once more.
        hbm: bytes that each device has: ``"24GiB"``, or a number. If the step does not fit when ``init`` first sees shapes, stages
            offload or recompute residuals, where that costs least by measurement and on the virtual clock. A printed line says what
            was chosen and what it costs, and so do ``pipe.stages`` and the ``FitError`` that is raised if nothing fits. With a
            ``remat`` other than the default, or parameters sharded over ``"model"``, the step is checked and nothing is chosen.

    Raises:
        JaxppError: a ``ValueError``, for every option that cannot be run. Tracebacks end at the caller's own line;
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
        loss_scale: Tree = None,
        balance: str = "flops",
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Tree = None,
        bank: Bank | None = None,
        shared: str | Sequence[str] = (),
        max_shapes: int = 8,
        hbm: float | str | None = None,
    ):
        hbm = None if hbm is None else parse_bytes(hbm)
        given = {name: value for name, value in locals().items() if name not in _NOT_OPTIONS}
        check_optimizer(loss_fn, optimizer)
        if bank is not None:
            check_bank(bank)
            loss_fn = join_losses(positional_key(loss_fn, 3 + has_state))
            optimizer = join_optimizers(optimizer, bank.optimizer)
        options = Options.of(loss_fn, **given)
        if bank is not None:
            check_scaling(options)
        super().__init__(options, optimizer, bank)

    @classmethod
    def from_stages(  # noqa: PLR0913  (each is an option of the pipeline)
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
        hbm: float | str | None = None,
    ) -> "Pipeline":
        """A pipeline from explicit stage functions, for teaching and debugging.

        Args:
            stages: one function ``stage_k(params_k, x) -> x`` for each stage; their widths may differ.
            loss: ``loss(output, targets) -> scalar``; runs on the last stage.
            optimizer: any optax transformation.
            num_microbatches: as for ``Pipeline``.
            schedule: as for ``Pipeline``.
            weight: as for ``Pipeline``.
            devices: as for ``Pipeline``.
            remat: as for ``Pipeline``.
            shared: as for ``Pipeline``; the inputs are called ``"0"``, the targets ``"1"``.
            hbm: as for ``Pipeline``.

        Returns:
            a pipeline whose parameters are a sequence with one tree for each stage, and whose batch is ``(inputs, targets)``.
        """
        given = {name: value for name, value in locals().items() if name not in _NOT_OPTIONS}
        functions = check_stages(stages, loss)
        cuts = [scope(k) for k in range(1, len(functions))]
        pipe = cls(compose(functions, loss), optimizer, num_stages=len(functions), cuts=cuts, **given)
        pipe._functions = functions
        return pipe

    def __repr__(self) -> str:
        found = self._compiled
        lines = [
            f"Pipeline of {'stages by hand' if self._functions else getattr(self._options.loss_fn, '__name__', 'a loss')}",
            *self._options.described,
            *([] if self._bank is None else [f"  bank: {self._bank!r}"]),
            *(["  init: not done yet"] if found is None else [f"  stages: {_size(found.stages)}; print(pipe.stages)"]),
            *([] if found is None else [f"  memory: {remark}" for remark in found.stages.remarks]),
            *([] if found is None else [f"  state: {_kept(self._kept)}"]),
        ]
        return "\n".join(lines)

    def verify(self, state: State, batch: Batch, key: Key | None = None, *, task: TaskNames = None) -> None:
        """Check that a step equals the plain single-device step, leaf by leaf; the state is left as it is.

        The loss, aux and every gradient are compared with those of single-device gradient accumulation; then the updated parameters
        and optimizer state with what plain optax makes of the pipeline's gradients. The whole model must fit on the first device.
        The tolerance depends on the floating type with the fewest digits that the loss computes with: 1e-12 in float64, 1e-5 in
        float32, 6% in bfloat16. A gradient that moves further when the parameters' last digits change (a bias before a batch
        normalisation) may differ by as much.

        Of several processes all call it, each with the whole batch. Each is sent the whole model, computes the plain step on its
        own first device, and raises what any of them finds.

        Raises:
            VerifyError: naming the first leaf that differs, with both values; or what is NaN in both.
        """
        check_comparable(self._options)
        with self._whole("verify", state, batch, key, task) as (engine, leaves):
            verify_step(engine, leaves, batch, key)

    def forecast(
        self,
        params_or_shapes: Any,
        batch: Batch,
        key: Key | None = None,
        *,
        fn: ForwardFn | None = None,
        hbm: float | str | None = None,
    ) -> Forecast:
        """Memory of a step before the first one, from shapes alone; and what to change if it does not fit.

        The step is compiled, as ``init`` would, and not run; no parameter is made.

        Args:
            params_or_shapes: the parameters, or their shapes: ``jax.eval_shape(init, key)``; with ``has_state`` the pair.
            batch: as for ``step``, or its shapes.
            key: as for ``step``, or its shape; may be left out even if the loss takes a key.
            fn: a function that ``apply`` is to run, whose batch and key the others are then; the forecast is of its forwards, with
                the optimizer's state beside them. The loss must have been cut before: by ``init``, ``abstract_state``, or the
                forecast of a step.
            hbm: bytes that each device has: ``"80GiB"``, or a number. Default: the pipeline's ``hbm``, or else what the devices
                report (CPUs report nothing).

        Returns:
            the forecast: what each stage holds when its device holds most, in parameters, optimizer, gradients, residuals, values
            in flight, batch, and temporaries of the compiled programs; whether that fits, and if not the changes that would make it
            fit. ``step(donate=False)`` needs room for a second state; the caller's own arrays are not counted.

        Raises:
            JaxppError: as ``init``, with ``fn`` as ``apply``; and for an ``hbm`` that is no size.
        """
        room = self._options.hbm if hbm is None else parse_bytes(hbm)
        options, variables = self._options, with_set(self._bank, variables_of(self._options, params_or_shapes))
        if fn is not None:
            opened, chosen = self._opened("forecast"), self._chosen("forecast", fn)
            opened.states.check_params(*variables_of(options, params_or_shapes))
            base, engine = opened.engine, self._engine_of(opened.engine, chosen, batch, key)
            return forecast(engine, batch, key, room, waiting_names(self._bank, base), purpose="forward", base=base)
        if key is None and Tracing(options).takes_key(variables, batch):
            key = jax.random.key(0)
        found = self._compiled or self._open(params_or_shapes, batch, key)
        engine = found.engine
        if not same_shapes(engine.layout.given, variables):
            engine = open_engine(options, self._optimizer, variables, batch, key)
            engine = fit(engine, batch, key, waiting_names(self._bank, engine)).engine
        return forecast(engine, batch, key, room, waiting_names(self._bank, engine))

    def forecast_generate(
        self,
        fn: ForwardFn,
        carry: Tree,
        *,
        sample: SampleRule = None,
        num_groups: int | None = None,
        group_size: int = 1,
        chunk: int = 64,
        hbm: float | str | None = None,
    ) -> Forecast:
        """Memory of ``generate`` before it runs, from shapes alone.

        The passes are compiled and not run. The parameters are those for which the pipeline was cut, by ``init``,
        ``abstract_state`` or ``forecast``.

        Args:
            fn: as for ``generate``, like all that follow.
            carry: or its shapes, ``jax.eval_shape`` of what makes it.
            sample: how tokens are drawn.
            num_groups: how many groups are in flight.
            group_size: how many sequences a group has.
            chunk: the most tokens of a prompt that one pass takes.
            hbm: bytes that each device has, as for ``forecast``.

        Returns:
            the forecast: what each stage holds when its device holds most: parameters, what is computed from them alone, the
            carries of all groups, that of the prompt being prefilled and the empty one, values in flight, tokens, temporaries of
            the compiled programs, and the optimizer's state, which stays where it is.

        Raises:
            StateError: nothing is cut yet.
            JaxppError: as ``generate``; and for an ``hbm`` that is no size.
        """
        engine = self._opened("forecast_generate").engine
        function = self._as_called(fn, "forecast_generate", with_carry=True)
        given = {"sample": sample, "num_groups": num_groups, "group_size": group_size, "chunk": chunk, "hbm": hbm}
        return generation_forecast("pipe.forecast_generate", engine, self._functions_applied, function, carry, **given)

    def collectives(self, batch: Batch, key: Key | None = None, *, task: TaskNames = None) -> Collectives:
        """What a step communicates inside its stages: the collectives of its compiled programs, read from their HLO.

        What stages send to one another is not included. The step is compiled, if it is not yet, and not run.

        Args:
            batch: as for ``step``, or its shapes.
            key: as for ``step``, or its shape.
            task: as for ``step``.

        Returns:
            the collectives, their axes and bytes; and which share of all parameters, including the sets of all tasks, was reduced
            over ``data``.

        Raises:
            StateError: before ``init``.
        """
        runner = self._opened("collectives").runner
        return collectives_of(runner.engine(task), batch, key, runner.other_bytes(task))

    def profile(
        self,
        state: State,
        batch: Batch,
        key: Key | None = None,
        *,
        fn: ForwardFn | None = None,
        num_batches: int = 1,
        num_steps: int = 3,
        clock: Clock | None = None,
        task: TaskNames = None,
    ) -> Profile:
        """What really ran, when, and why ranks idled: steps at full speed under JAX's profiler; the state is left as it is.

        Nothing waits, unlike with a timer around each action: the trace knows when each program ran. Some further steps run one
        program at a time. Steps are trained on a copy of the state, so there must be room for a second state.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``.
            key: as for ``step``.
            fn: a function that ``apply`` is to run, whose batch and key the others are then; its forwards are profiled, not a step.
                (``pipe.generate(...).profile()`` is the profile of a generation.)
            num_batches: with ``fn``, how many times the batch is handed over without waiting, as in a ``stream``.
            task: as for ``step``.
            num_steps: how many steps to trace, at least 1, after as many that are not traced and three to warm up.
            clock: ``"trace"``: the times of the step as it ran, on devices that may share cores. ``"isolated"``: each program takes
                as long as it takes alone, laid out on the virtual clock as if every rank had a device of its own; this is the
                default on CPU, where devices share cores, and where there are fewer devices than ranks.

        Returns:
            the profile of the step of median length: start and end of every action and transfer, bubble, idle time by cause, live
            bytes of each device by kind. ``print`` it; ``profile.figure()`` draws it beside the virtual clock's timeline;
            ``jaxpp.observe.to_perfetto(profile)`` writes a trace for Perfetto, ``to_json`` and ``to_html`` write the rest.

        Raises:
            ArgumentError: fewer than one step, an unknown clock, or another trace of JAX's profiler is running.
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        check_profile(clock, num_steps=num_steps, num_batches=num_batches)
        if fn is None and num_batches != 1:
            rule, fix = "steps follow one another one by one", "pass fn=... for the forwards of a function, or num_batches=1"
            raise ArgumentError("pipe.profile", rule, f"num_batches={num_batches!r} without fn", fix)
        with self._whole("profile", state, batch, key, task) as (engine, leaves):
            if fn is None:
                return record(Steps(engine, leaves, batch, key), num_steps, clock)
            found = self._engine_of(engine, self._chosen("profile", fn), batch, key)
            return record(Forwards(found, leaves, batch, key, num_batches), num_steps, clock)


def _size(stages: Stages) -> str:
    total, size = sum(stage.num_params for stage in stages), sum(stage.num_bytes for stage in stages)
    return f"{total:,} parameters in {bytes_in_words(size)}"


def _kept(state: State | None) -> str:
    if state is None:
        return "none yet; pipe.init makes one, a checkpoint is restored to pipe.abstract_state(...)"
    return f"after {state.step} step{'s' if state.step != 1 else ''}; print(pipe.state)"
