"""The public face for training: ``Pipeline``, which is a ``Forward`` with an optimizer."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import first_leaves
from jaxpp.engine.outcome import Outcome, leaves_read
from jaxpp.engine.state import Metrics, State, left_to, num_gone, settle, states_of, steps_of, tail_of
from jaxpp.engine.tail import Tail
from jaxpp.errors import ArgumentError, CutError, StateError
from jaxpp.errors.checks import check_flags, check_function, check_optimizer, refuse_tracers
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.forward import Forward, Lend, Setup
from jaxpp.lowering.builder import Name
from jaxpp.lowering.step import Leaves
from jaxpp.observe.collectives import Collectives, collectives_of
from jaxpp.observe.dead_stages import Detector
from jaxpp.observe.memory.forecast import parse_bytes
from jaxpp.observe.profile.record import Flowing, Steps, Work
from jaxpp.observe.profile.trace import STEP
from jaxpp.optim.owners import untrained_leaves
from jaxpp.options import Asked, Loss, Memory, Order, Training, Where
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.processes.channel import agreement
from jaxpp.schedule.base import Schedule
from jaxpp.stages.by_hand import check_stages, compose, scope
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.own_params import join_losses, join_optimizers
from jaxpp.stages.remat import Remat
from jaxpp.stages.stage_table import Stages
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.runner import BankRunner, Runner, check_bank, waiting_names, with_set
from jaxpp.types import Array, Batch, Device, ForwardFn, Key, LossFn, ReduceAux, TaskNames, Tree
from jaxpp.verify import Comparisons, verify_step

__all__ = ["Metrics", "Pipeline", "State"]


@dataclass(frozen=True)
class TrainingSetup(Setup):
    """What the first shapes decide of a pipeline."""

    runner: Runner  # runs steps on the engine, with the sets of a bank or without
    detector: Detector  # looks for stages that learn nothing, and for losses that are NaN


@dataclass(eq=False)
class _Newest:
    """The newest state, of a pipeline and of those that train it with other losses; and what of its step is left to do."""

    state: State | None = None
    lock: AbstractContextManager[object] = field(default_factory=threading.RLock)  # held by whoever steps
    _in_flow: weakref.ref[Tail] | None = None  # not of the state, which the user may have deleted here

    def begin(self, state: State, tail: Tail) -> None:
        """Keep a state whose step is in flow."""
        self.state, self._in_flow = state, weakref.ref(tail)

    @contextmanager
    def given(self, state: State) -> Iterator[None]:
        """A block that checks and brings a state, which is the newest then; also if Ctrl-C comes meanwhile, unless it is gone."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and isinstance(state, State) and not num_gone(state):
                self.state = state
            raise
        self.state = state

    def end(self, but: Tail | None = None) -> None:
        """Hand over the rest of the last step, which takes over the state before it; unless it is the one that is named."""
        tail = None if self._in_flow is None else self._in_flow()
        if tail is not None and tail is not but and not tail.ended:
            tail.outcome()


@entries
class Pipeline(Forward):
    """Trains a loss over several devices, without changes to the model.

    ``init`` traces the loss once, cuts it into stages, and makes every parameter on the device of the stage that uses it; ``step``
    runs the schedule and the optimizer. Results match single-device gradient accumulation for any number of stages, any schedule
    and any cut points; ``verify`` checks that.

    Most pipelines need the first six parameters. The others stand in groups:

    - the loss and its batch: ``has_state``, ``reduce_aux``, ``weight``, ``reduction``, ``broadcast``;
    - where it is cut: ``cuts``, ``balance``;
    - devices and meshes: ``devices``, ``mesh``, ``data_parallel``, ``shardings``, ``shard``, ``axes``;
    - memory: ``remat``, ``hbm``, ``host``;
    - how it is trained: ``trains``, ``loss_scale``, ``bank``, ``delay``;
    - rarely needed: ``fuse``, ``threads``, ``max_shapes``, ``cut_gradient``.

    Args:
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``, or ``(loss, aux)`` with ``has_aux``; with ``has_state``
            ``loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))``. The key may be a keyword-only argument
            whose name contains ``key``, ``rng`` or ``rngs`` (``*, dropout_rng``). Inputs and labels are one batch, ``(x, y)``.
        optimizer: any optax transformation that treats parameters one by one, or combines them through norms and other scalars.
        num_stages: how many stages to cut the loss into: the number of ranks times the stages on each rank.
        num_microbatches: how many parts the batch is split into along axis 0. Default: ``num_stages``, with which any
            batch of that many examples can be split; ``init`` then prints for how long devices idle, and for how much less with two
            and four times as many.
        schedule: a name for ``jaxpp.schedule.make``, or a ``Schedule``. Schedules with two stages on each rank (interleaved,
            looped-bfs and the V-shaped ones) run on half as many devices as there are stages. ``"auto"`` makes one for the stages
            of this pipeline when they are known: as many ranks as there are devices for (a divisor of ``num_stages``), and on no
            rank more residuals than the fullest rank of 1f1b might hold. What stages and transfers take is estimated,
            or, with ``balance="time"``, measured. Backwards may be split, so the last bits of gradients may differ.
        has_aux: whether the loss returns ``(loss, aux)``.
        has_state: whether the loss has a model state (BatchNorm's running statistics, counters): a tree of arrays that each
            microbatch passes to the next, in order, without a gradient. Replicas have their own, and their mean after a step.
        reduce_aux: how the aux values of the microbatches become the aux of the step: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
            ``"last"``, ``"join"``, ``"stack"``, a function of ``(values, weights)`` with the microbatches along their first axis,
            or a dictionary of these by path, ``{"errors": "sum"}``. Default: what they are of the whole batch; rows of examples are
            joined, sums added, means averaged like the loss, and what mixes examples otherwise is averaged with a warning.
        weight: a function from a microbatch to its weight in the mean (the number of real tokens, say), or ``"auto"``: the count
            that the loss itself divides by. Default: the number of examples. If the weights of a batch sum to 0, there is no mean:
            the first batch of a shape is refused, later ones have a loss of NaN, because looking at each would stall the pipeline.
        reduction: what the loss of a step is of the losses of its microbatches: their ``"mean"``, or their ``"sum"``, for a loss
            that is a sum over its examples.
        broadcast: batch leaves that every microbatch (and replica) gets whole instead of split, by path or pattern of paths:
            ``("graph/*", "positions")``. Leaves without an axis (numbers) are never split.
        cuts: module paths or parameter prefixes at which stages 1, 2, ... begin. Default: jaxpp balances the stages.
        balance: by what the loss is cut: ``"cost"``, for the shortest step of this schedule, where forward and backward of each
            equation take what its FLOPs and bytes take at the rates of the devices; ``"flops"``, for equal FLOPs of the forward;
            ``"time"``, as ``"cost"``, but with times measured on zeros, after which the loss is cut again; or ``"memory"``, where
            the peaks of the devices are equal, as far as shapes tell.
        devices: one for each rank. If there are fewer than ranks, they are reused round-robin. Default: ``jax.devices()``. A list
            in place of a device is a rank of all its devices, which share the parameters of its stages as ``shardings`` says; with
            ``devices=[d0, d1, [d2, d3]]`` the last rank is twice as wide as the others, and gets about twice the work.
        mesh: a mesh with the axes ``"pipe"`` (ranks), ``"data"`` (replicas) and ``"model"`` (shards of the parameters), instead of
            ``devices``; each rank is then a sub-mesh.
        data_parallel: the number of replicas, if there is no mesh. Each replica splits its part of the batch into
            ``num_microbatches``, so a step equals one with ``data_parallel`` times as many microbatches; microbatch i of replica r
            has number ``r * num_microbatches + i``. Gradients are all-reduced once a step. Where ``devices`` has lists, each has
            the devices of one replica after another, as many for each.
        shardings: how parameters are sharded over ``"model"`` inside their stage: by path, ``{"*/fc": "column", "*/proj": "row",
            "*/attn": "heads", "embed": "embedding"}``, or with ``PartitionSpec``s or ``NamedSharding``s; a tree of these; a
            function of a path and a shape that returns one; pairs of a regular expression and a ``PartitionSpec``; or Flax's
            logical axis rules, for parameters that carry axis names. Without it, as parameters say themselves (Flax's metadata), or
            as arrays are sharded already.
        shard: what the replicas of a stage divide between them, so that each of ``d`` holds 1/d of it and not the whole:
            ``"optimizer"`` (its state; gradients are then reduce-scattered once a step, and new parameters gathered),
            ``"parameters"`` (these between steps, and the optimizer's state; they are gathered once a step), ``"gradients"`` (their
            sum, and the optimizer's state; each microbatch's are reduce-scattered), or a list of these. Others call it ZeRO 1, 2
            and 3, or FSDP. A leaf is divided along its first axis that can be; one that has none stays whole, and so do moments
            that have not their parameter's shape, such as adafactor's. A ``PartitionSpec`` in ``shardings`` that names ``"data"``
            or ``"fsdp"`` divides that parameter so. Results are the same.
        axes: what other axes of your mesh, or names in your functions, are to the pipeline: ``{"pipe": "stage", "data": ("replica",
            "fsdp"), "model": "tensor"}``. It knows ``stage``, ``fsdp``, ``replica``, ``batch``, ``tensor``, ``pp``, ``dp``, ``tp``.
            With ``{"data": "batch"}`` a model whose ``nn.BatchNorm`` has ``axis_name="batch"`` normalises over the examples of all
            replicas.
        remat: what a stage's forward keeps for its backward. ``"least"``: as few bytes as possible without repeating a matrix
            product, a convolution, a loop or a random number; cheap elementwise arithmetic is recomputed, but not, on accelerators,
            what a matrix product of the backward reads: it would be written to memory once more. ``"keep"``: everything.
            ``"recompute"``: only the stage's inputs; the forward runs twice. A number above 0.0 and at most 1.0: a share of
            what ``"least"`` keeps beyond the fewest bytes that can be reached by repeating products and convolutions; those are
            repeated that free the most bytes for a FLOP. A policy of ``jax.checkpoint_policies``: what the
            policy says. ``"offload"``: as ``"least"``, and what is kept waits in host memory until its backward is near; see
            ``jaxpp.Offload``, which may be passed too. One value, or a list of one for each stage. I keeps for W by this rule too.
        hbm: bytes that each device has: ``"24GiB"``, or a number. If the step does not fit when ``init`` first sees shapes, stages
            offload residuals, keep a share of them or recompute them, where that costs least by measurement and on the virtual
            clock. If that is not enough, the optimizer's state and then the parameters wait in host memory (``host``). A printed
            line says what was chosen and what it costs, and so do ``pipe.stages`` and the ``FitError`` that is raised if nothing
            fits. With a ``remat`` other than the default, or parameters sharded over ``"model"``, ``host`` alone is chosen.
        host: what waits in pinned host memory while no stage works with it: ``"optimizer"``, its state, which visits the device for
            the update; or ``"params"``, parameters, gradients and the optimizer's state, of which a device then holds those of the
            stage that works, and the next one's parameters. A rank needs many stages for that, as
            ``jaxpp.schedule.make("looped-bfs", stages_per_rank=8, ...)`` gives it. Results are the same bit by bit; on a GPU with
            ``"params"`` up to rounding, as the gradients of the first microbatch are of a program of their own there.
            With ``delay=1`` and ``"params"`` the parameters before the last step wait too, and a step ends before the next begins.
        trains: the parameters that a step changes, by path or pattern of paths: ``"generator"``, ``("*/lora_a", "*/lora_b")``.
            The others keep their values, and what the optimizer holds for them stays as it is; nothing is computed for their
            gradients. ``other`` makes the pipeline that trains them. The optimizer holds what it does for each apart, as that of
            ``optax.multi_transform`` does. With a bank, ``"task/*"`` are the parameters of a set. Default: all.
        loss_scale: Flax's ``DynamicScale``, for losses computed in float16. Backwards start from its scale; if any gradient on any
            stage is not finite, all stages skip the step and the scale is lowered. ``state.loss_scale`` holds the current scale.
            With a bank, a gradient that is not finite in the set of one replica skips the step of all replicas and their sets.
            With ``delay=1``, backwards start from ``state.previous_scale``, the scale before the last step, as their parameters are
            those before it, and gradients are divided by that; each step that is not finite lowers the newest scale once, so of two
            in a row the second may have begun with the scale of the first.
        bank: parameter sets of tasks, theta[t]. The loss is then ``loss_fn(params, task_params, batch[, key])``, every step names
            its ``task`` (or one for each replica), and the state holds Theta alone. The bank's optimizer updates each theta[t].
        delay: with 1, no stage waits for the optimizer: the gradients of a step are of the parameters before the last step, which
            ``state.previous`` holds too, and the next step's forwards run between the last backwards of a step. It computes
            what this loop does, on one device: ``grads = jax.grad(loss_fn)(before, batch); updates, opt_state =
            optimizer.update(grads, opt_state, params); before, params = params, optax.apply_updates(params, updates)``. Training
            differs from that with 0, so compare the losses. See ``flush``, and ``jaxpp.schedule.flow`` for the order. With a bank,
            the parameters of the set are its newest, so a step begins while one of another task ends, and after one of its own.
        fuse: whether the last stage's forward and backward are compiled as one program, if the schedule runs the backward of each
            microbatch right behind its forward there (``"naive"``, ``"1f1b"``, ``"eager-1f1b"`` and ``"interleaved"`` do). That
            program writes no residual of the size of the logits, and it rounds in its own way: with the same cuts, schedules that
            fuse have the same bits as one another, and ``"gpipe"``, which cannot, has those of ``fuse=False``. Default: on
            accelerators, not on CPUs.
        threads: which threads of the host hand programs to the devices: ``"one"``; a thread for each of the ``"ranks"``, so that no
            device waits while the host serves another; or ``"auto"``, which is a thread for each rank on GPUs, and one on CPU
            devices, which work through what they are handed by themselves. The results have the same bits. One thread does it where
            a loss or an optimizer calls Python, with ``jax_debug_nans``, where several processes share a pipeline, and in a
            generation with ``host="params"``.
        max_shapes: for how many batch shapes the compiled steps are kept; the least recently used shape is dropped, and compiled
            again if it returns. A shape evaluated with another loss counts once more.
        cut_gradient: boundaries that carry no gradient, for teaching; boundary s lies between stages s and s + 1. The stages before
            such a boundary learn nothing, except parameters that a later stage uses too.

    Raises:
        MicrobatchWarning: when ``init`` sees a loss that is no mean over the examples, with what to pass so that it is exact.
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

    _name, _arguments = "pipe", "state, {}, fn"
    _uncut = (
        "a pipeline is cut by init or abstract_state, when it first sees shapes",
        "call state = pipe.init(params, batch) first, or pipe.init(init_fn, key, batch); for a checkpoint, "
        "target = pipe.abstract_state(...), and restore to target",
    )

    def __init__(  # noqa: PLR0913  (the options of the front door)
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        *,
        num_stages: int,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        has_aux: bool = False,
        has_state: bool = False,
        reduce_aux: ReduceAux = None,
        weight: Callable[[Batch], ArrayLike] | str | None = None,
        reduction: str = "mean",
        broadcast: str | Sequence[str] = (),
        cuts: Sequence[str] | None = None,
        balance: str = "cost",
        devices: Sequence[Device] | None = None,
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Tree = None,
        shard: str | Sequence[str] | None = None,
        axes: Mapping[str, str | Sequence[str]] | None = None,
        remat: Remat | Sequence[Remat] = "least",
        hbm: float | str | None = None,
        host: str | None = None,
        trains: str | Sequence[str] | None = None,
        loss_scale: Tree = None,
        bank: Bank | None = None,
        delay: int = 0,
        fuse: bool | None = None,
        threads: str = "auto",
        max_shapes: int = 8,
        cut_gradient: Iterable[int] = (),
    ):
        asked = Asked(
            Order(num_stages, num_microbatches, schedule=schedule, cuts=cuts, balance=balance, threads=threads),
            Loss(has_aux, has_state, reduce_aux=reduce_aux, weight=weight, reduction=reduction, broadcast=broadcast),
            Training(trains=trains, cut_gradient=cut_gradient, loss_scale=loss_scale, delay=delay),
            Where(devices, mesh, data_parallel=data_parallel, axes=axes, shardings=shardings, shard=shard),
            Memory(remat, hbm=None if hbm is None else parse_bytes(hbm), host=host, fuse=fuse, max_shapes=max_shapes),
        )
        self._begin_as(loss_fn, optimizer, asked, bank)

    def _begin_as(
        self, loss_fn: LossFn, optimizer: optax.GradientTransformation, asked: Asked, bank: Bank | None = None
    ) -> "Pipeline":
        """Begin as the pipeline of this loss."""
        self._written, self._trained_by, has_state = asked, optimizer, asked.loss.has_state
        check_optimizer(loss_fn, optimizer)
        check_flags("jaxpp.Pipeline / jaxpp.value_and_grad", has_aux=asked.loss.has_aux, has_state=has_state)
        if bank is not None:
            check_bank(bank)
            loss_fn = join_losses(positional_key(loss_fn, 3 + has_state))
            optimizer = join_optimizers(optimizer, bank.optimizer)
        options = asked.settled(loss_fn)
        self._begin(options, optimizer)
        self._bank, self._stages, self._newest = bank, tuple[Callable[..., Tree], ...](), _Newest()
        self._first: Pipeline | None = None
        return self

    @classmethod
    def from_stages(  # noqa: PLR0913  (each is an option of the pipeline)
        cls,
        stages: Sequence[Callable[[Any, Any], Any]],
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
        num_microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        weight: Callable[[Batch], ArrayLike] | str | None = None,
        reduction: str = "mean",
        devices: Sequence[Device] | None = None,
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Tree = None,
        shard: str | Sequence[str] | None = None,
        axes: Mapping[str, str | Sequence[str]] | None = None,
        remat: Remat | Sequence[Remat] = "least",
        broadcast: str | Sequence[str] = (),
        hbm: float | str | None = None,
        fuse: bool | None = None,
        host: str | None = None,
        delay: int = 0,
        threads: str = "auto",
    ) -> "Pipeline":
        """A pipeline from explicit stage functions, for teaching and debugging.

        ``stages`` has one function ``stage_k(params_k, x) -> x`` for each stage; their widths may differ. ``loss(output, targets)``
        runs on the last stage. All else is as for ``Pipeline``; ``broadcast`` calls the inputs ``"0"`` and the targets ``"1"``.

        Returns:
            a pipeline whose parameters are a sequence with one tree for each stage, and whose batch is ``(inputs, targets)``.
        """
        functions = check_stages(stages, loss)
        cuts = [scope(k) for k in range(1, len(functions))]
        pipe = cls(
            compose(functions, loss),
            optimizer,
            num_stages=len(functions),
            num_microbatches=num_microbatches,
            schedule=schedule,
            cuts=cuts,
            weight=weight,
            reduction=reduction,
            broadcast=broadcast,
            delay=delay,
            devices=devices,
            mesh=mesh,
            data_parallel=data_parallel,
            axes=axes,
            shardings=shardings,
            shard=shard,
            remat=remat,
            hbm=hbm,
            host=host,
            fuse=fuse,
            threads=threads,
        )
        pipe._stages = functions
        return pipe

    def other(  # noqa: PLR0913  (each is an option of the pipeline)
        self,
        loss_fn: LossFn,
        *,
        trains: str | Sequence[str] | None = None,
        has_aux: bool = False,
        reduce_aux: ReduceAux = None,
        weight: Callable[[Batch], ArrayLike] | str | None = None,
        reduction: str = "mean",
        broadcast: str | Sequence[str] = (),
        num_microbatches: int | None = None,
        schedule: str | Schedule | None = None,
        remat: Remat | Sequence[Remat] | None = None,
    ) -> "Pipeline":
        """A pipeline that trains the same state with another loss, in turn with this one.

        Both have one state and one optimizer. Each step changes the parameters that it ``trains`` and what the optimizer holds for
        them, where this pipeline keeps them, and copies no parameter. So the two players of a GAN take turns::

            optimizer = optax.multi_transform({"generator": optax.adam(1e-4), "critic": optax.adam(4e-4)}, labels)
            generator = jaxpp.Pipeline(generator_loss, optimizer, trains="generator", num_stages=4)
            critic = generator.other(critic_loss, trains="critic")
            state = generator.init(params, batch)
            state = critic.init(state, batch)
            for batch in batches:
                state, metrics = critic.step(state, batch)
                state, metrics = generator.step(state, batch)

        ``init`` of the other pipeline takes the state in place of parameters, cuts the loss so that every parameter stays with its
        owner, compiles the step, and returns the state as it is. ``abstract_state`` takes the shapes of a state, for a checkpoint.
        ``pipe.state`` is the newest state of both, and ``state.step`` counts the steps of both. Where the loss needs a parameter on
        a stage before its owner's, a step sends it there. With a bank, both train its sets, and each step names its ``task``.

        With ``delay=1``, the gradients of each step are of the parameters before the last step, whichever pipeline made that step.
        Where all losses train the same parameters, steps of one pipeline flow into one another, and a step of another ends them
        first. What another loss trains and this one leaves alone is copied to ``state.previous`` at the end of a step, which
        therefore ends before the next begins.

        The arguments are those of ``Pipeline`` with the same names. The loss is one over the same parameters, and over the same
        model state or sets of a bank if there are any. ``num_microbatches``, ``schedule`` and ``remat`` are those of this pipeline
        unless given, and so are all other options.

        Raises:
            ArgumentError: the pipeline has stages by hand; or, with ``delay=1``, this loss trains what no other does, and ``init``
                has been called.
        """
        if self._stages:
            rule, got = "other losses train the state of a pipeline of a loss", "a pipeline from stages by hand"
            raise ArgumentError("pipe.other", rule, got, "make a jaxpp.Pipeline")
        first, asked = self._first or self, self._written
        count = self._options.schedule.num_microbatches if num_microbatches is None else num_microbatches
        order = asked.order.schedule if schedule is None else schedule
        own = Asked(
            replace(asked.order, num_microbatches=count, schedule=order, cuts=None),
            Loss(has_aux, asked.loss.has_state, reduce_aux=reduce_aux, weight=weight, reduction=reduction, broadcast=broadcast),
            replace(asked.training, trains=trains, cut_gradient=()),
            asked.where,
            replace(asked.memory, remat=asked.memory.remat if remat is None else remat),
        )
        pipe = Pipeline.__new__(Pipeline)._begin_as(loss_fn, self._trained_by, own, self._bank)
        pipe._first, pipe._newest = first, first._newest
        first._also_late(pipe._options.trains)
        return pipe

    def _also_late(self, trains: tuple[str, ...] | None) -> None:
        """With ``delay``, have the state hold what another loss trains as it was before the last step too."""
        known, setup = self._options.late, self._setup
        if not self._options.delay or known is None:
            return
        if setup is not None:
            alone, still = (untrained_leaves(setup.engine.layout.given[0], each, strict=False) for each in (known, trains))
            if not alone <= still:
                rule = "with delay=1 a state holds what any of its losses trains as it was before the last step"
                wants = "all" if trains is None else ", ".join(trains)
                got = f"a loss that trains {wants}, after the init of a pipeline that trains {', '.join(known)}"
                raise ArgumentError("pipe.other", rule, got, "call pipe.other before pipe.init")
            return
        self._options = replace(self._options, late=None if trains is None else tuple(dict.fromkeys((*known, *trains))))

    def __repr__(self) -> str:
        if self._setup is None:
            return super().__repr__()
        state = "none yet; pipe.init makes one, a checkpoint is restored to pipe.abstract_state(...)"
        if (newest := self._newest.state) is not None:
            state = f"after {newest.step} step{'s' if newest.step != 1 else ''}; print(pipe.state)"
        return f"{super().__repr__()}\n  state: {state}"

    def _described(self) -> list[str]:
        what = "stages by hand" if self._stages else getattr(self._options.loss_fn, "__name__", "a loss")
        bank = [] if self._bank is None else [f"  bank: {self._bank!r}"]
        return [f"Pipeline of {what}", *self._options.described, *bank]

    @property
    def schedule(self) -> Schedule:
        """Which rank does which action, in which order; of ``schedule="auto"``, after ``init``.

        Raises:
            StateError: with ``schedule="auto"``, before ``init``.
        """
        return self._opened("schedule").engine.options.schedule if self._options.made_to_measure else self._options.schedule

    @property
    def state(self) -> State:
        """The newest state: what ``init`` made or the last step returned, also if the caller never received it.

        After a step that was interrupted (Ctrl-C) or raised, this is the new state if the update had begun, and otherwise the state
        that the step was given; never half of each. The pipeline alone holds this state and drops it at the next step; ``del
        pipe.state`` drops it at once, to make room for a checkpoint.

        Raises:
            StateError: there is none; or it is gone, consumed by an update that failed in part or by another pipeline's step.
        """
        self._opened("state")
        state, where = self._newest.state, "pipe.state"
        if state is None:
            rule = "a pipeline keeps the newest state that init or step made"
            got = "none: init did not finish, or the state was deleted, or it is to come from a checkpoint"
            raise StateError(where, rule, got, "call state = pipe.init(...), or step with the state that was restored")
        if gone := num_gone(state):
            count = len(jax.tree.leaves(state.held))
            got = (
                f"{gone} of {count} leaves are gone: by an update that failed in part, or by the step of another pipeline or thread"
            )
            fix = (
                "go on from a checkpoint, pipe.step(restored, ...), or with the state that the other step returned; "
                "a thread that looks while another steps reads the metrics, or a state that step(..., donate=False) returned"
            )
            raise StateError(where, "a state that was consumed cannot be used again", got, fix)
        return state

    @state.deleter
    def state(self) -> None:
        self._newest.state = None

    def init(self, init_or_params: Tree, *args: Tree) -> State:
        """Cut the loss, place the stages, compile the step, and make the first state.

        ``init(init_fn, key, batch)`` makes the parameters: every leaf is made on its owner, with the bits of
        ``jax.jit(init_fn)(key)``, and the whole model is never in one place. ``init(params, batch)`` copies existing parameters to
        their owners. The number of arguments decides which is meant, so parameters may be callable (arrays of an Equinox module).

        Programs are compiled for this batch's shapes and, if the loss takes a key, for keys of the kind given or of
        ``jax.random.key``'s, other kinds at their first step. The pipeline keeps the newest state as ``pipe.state``.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters; with ``has_state`` the pair. A function that needs inputs
                too, as a Flax model's ``init`` does, gets the items of the batch that have the names of these arguments
                (``batch["x"]`` for ``__call__(self, x)``), or the batch if it is one array.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used, unless ``init_fn`` needs inputs. The loss
                takes it as one argument, inputs and labels together: ``init(params, (x, y))``, not ``init(params, x, y)``.

        Raises:
            ArgumentError: other arguments, or in another order.
            CutError: too many stages, or cuts that the model does not have.
            InitError: ``init_fn`` cannot be traced, or needs inputs that are not certain; the message has the line to write.
            JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
        """
        if self._first is not None:
            self._join(self._first, "init", init_or_params, args)
            return init_or_params
        given, setup = self._open_given("init", init_or_params, args)
        engine, runner = setup.engine, self._opened("init").runner
        self._newest.state = None  # there may be no room for two
        leaves = first_leaves(engine, given, runner.held(engine.placed.names), runner.held(engine.placed.homes))
        leaves = engine.first_state(runner.with_opt_state(leaves))
        self._newest.state = state = setup.states.wrap(leaves)
        return state

    def abstract_state(self, init_or_shapes: Tree, *args: Tree) -> State:
        """The shapes of the state, each with the sharding of its owner: what a checkpoint is restored to. No array is made.

        It does what ``init`` does up to the first array. ``pipe.state`` stays; ``del pipe.state`` makes room for the checkpoint.
        Then Orbax restores every leaf straight to its owner, at any number of stages and with any schedule::

            target = pipe.abstract_state(init_fn, key, batch)
            state = orbax.checkpoint.StandardCheckpointer().restore(path, target)
            state, metrics = pipe.step(state, batch, key)

        Leaves that the pipeline holds as slices of unequal size, or as several on one device, come to pinned host memory; the
        first step brings the slices to their owners. The arguments are those of ``init``; instead of parameters their shapes will
        do, ``jax.eval_shape(init_fn, key)``.

        Returns:
            a ``State`` whose leaves are ``jax.ShapeDtypeStruct``s with shardings; ``step`` is 0.

        Raises:
            JaxppError: as ``init``.
        """
        if self._first is not None:
            return self._join(self._first, "abstract_state", init_or_shapes, args).states.abstract
        return self._open_given("abstract_state", init_or_shapes, args)[1].states.abstract

    def step(
        self, state: State, batch: Batch, key: Key | None = None, *, task: TaskNames = None, donate: bool = True
    ) -> tuple[State, Metrics]:
        """One training step.

        Args:
            state: from ``init`` or the previous step, from a checkpoint, or from another pipeline of the same shapes. Its buffers
                are reused, so it is consumed, but only if the step succeeds up to the optimizer. If some of its arrays live
                elsewhere than this pipeline's do, all are copied and none is consumed.
            batch: a tree of arrays with one leading axis, the examples, of any size that gives each microbatch one example. Leaves
                without an axis (``{"x": ..., "beta": 0.5}``) go to every microbatch; changing their values compiles nothing. Or
                ``jaxpp.Microbatches``, a list of batches of any shapes, each of which is a microbatch.
            key: required if the loss takes one without ``key=None``. Microbatch i gets ``jax.random.fold_in(key, i)``.
            task: with a bank, the set that the step uses and changes (whatever ``donate`` is), or a list with one for each replica.
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
            NanLossWarning: the loss of an earlier step was NaN; names the first. Nothing waits for it, so it comes steps later.
        """
        setup = self._opened("step")
        refuse_tracers("pipe.step(state, batch, key)", batch, key)
        check_flags("pipe.step", donate=donate)
        with self._newest.lock:  # of several threads that step one state, one does, and the others are told that it is consumed
            tail = tail_of(state, setup.engine) if donate else None
            with self._newest.given(state):
                self._newest.end(but=tail)  # which may consume what this step is given
                given, num_steps = tail or setup.states.unwrap(state, consumed=donate), steps_of(state)
            setup.detector.look()  # before anything is consumed: a warning may be an error
            with Hold() as hold, jax.profiler.TraceAnnotation(STEP):
                try:
                    outcome = setup.runner.step(task, given, batch, key, donate=donate, hold=hold.begin)
                    if isinstance(outcome, Tail):
                        return self._in_flow(setup, outcome, num_steps + 1)
                except BaseException as error:
                    if tail is not None and tail.failed:  # there is no state, and the error says so
                        raise
                    if num_gone(state):  # not the copies of one elsewhere
                        error.add_note("jaxpp: the update had begun, so part of the state is consumed: go on from a checkpoint")
                    elif not isinstance(error, Exception) and not hold.begun:
                        error.add_note("jaxpp: the step changed nothing: go on with state = pipe.state")
                    raise
                new_leaves = outcome.state if donate else setup.engine.distinct(outcome.state)
                self._newest.state = new = setup.states.wrap(new_leaves, num_steps + 1)
            setup.detector.add(num_steps + 1, outcome.loss, outcome.squares)
        squares = dict(zip(setup.engine.watched, outcome.squares, strict=True))
        return new, Metrics(outcome.loss, outcome.aux, outcome.grad_norm, outcome.finite, num_steps + 1, squares)

    def _in_flow(self, setup: TrainingSetup, tail: Tail, num_steps: int) -> tuple[State, Metrics]:
        """The state after a step whose rest is handed over beside the next one, and the metrics."""
        watched = setup.engine.watched

        def read(outcome: Outcome[Array]) -> dict[str, Tree]:
            squares = dict(zip(watched, outcome.squares, strict=True))
            return {"grad_norm": outcome.grad_norm, "finite": outcome.finite, "squares": squares}

        metrics = left_to(tail, read, Metrics(tail.first.loss, tail.first.aux, step=num_steps), at_once=True)
        tail.then.append(lambda outcome: setup.detector.add(num_steps, outcome.loss, outcome.squares))
        new = setup.states.after(tail, num_steps)
        self._newest.begin(new, tail)
        return new, metrics

    def flush(self, state: State) -> State:
        """End the flow of steps: with ``delay=1``, hand over the rest of the step that made this state.

        Nobody needs to call it: whoever looks at a state does the same, so ``evaluate``, a checkpoint or
        ``jax.block_until_ready(state)`` find the state after its step. The results are the same with it and without. It returns the
        state that it was given; one that is not from ``step`` is left as it is.

        Raises:
            StateError: what is given is no state, or its step failed in part.
        """
        self._opened("flush")
        if not isinstance(state, State):
            rule, fix = "a state is a jaxpp.State", "pass the state that step returned"
            raise StateError("pipe.flush(state)", rule, type(state).__name__, fix)
        settle(state)
        return state

    def evaluate(
        self, state: State, batch: Batch, key: Key | None = None, loss_fn: LossFn | None = None, *, task: TaskNames = None
    ) -> Metrics:
        """The loss and aux of a batch, forward only; the state is left as it is.

        Args:
            state: from ``init`` or ``step``.
            batch: as for ``step``, but of any number of examples: if there are fewer examples than microbatches, each microbatch
                holds one example, and examples that cannot be divided evenly among replicas count evenly.
            key: as for ``step``.
            loss_fn: another loss over the same parameters (one without dropout, say), which returns ``(loss, aux)`` or a loss
                alone. Keep one function and pass it again: each new function object is traced and compiled.
            task: as for ``step``; the set is left as it is.

        Raises:
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        with self._whole("evaluate", state, batch, key, task) as (engine, leaves):
            other = self._other_loss("evaluate", loss_fn)
            outcome = engine.run("forward", leaves, batch, key, loss_fn=other)
        return Metrics(loss=outcome.loss, aux=outcome.aux, step=steps_of(state))

    def verify(self, state: State, batch: Batch, key: Key | None = None, *, task: TaskNames = None) -> Comparisons:
        """Check that a step equals the plain single-device step, leaf by leaf; the state is left as it is.

        The loss, aux and every gradient are compared with those of single-device gradient accumulation; then the updated parameters
        and optimizer state with what plain optax makes of the pipeline's gradients. The whole model must fit on the first device.
        The tolerance depends on the floating type with the fewest digits that the loss computes with: 1e-12 in float64, 1e-5 in
        float32, 6% in bfloat16. A gradient that moves further when the parameters' last digits change (a bias before a batch
        normalisation) may differ by as much. Where a ``relu`` or another comparison meets numbers that are equal but for rounding,
        two correct programs may differ by one example's part; float64 tells that from an error.

        Where the loss is known to be a mean over the examples (or a sum, with ``reduction="sum"``, or a mean over a count, with
        ``weight="auto"``) and takes no key, ``jax.value_and_grad`` of the whole batch is compared too.

        Of several processes all call it with the whole batch. Each is sent the whole model, and raises what any of them finds.

        Returns:
            what the step was compared with, which prints itself.

        Raises:
            VerifyError: naming the first leaf that differs, with both values; or what is NaN in both.
        """
        if boundaries := sorted(self._options.cut_gradient):
            rule = "verify compares with the plain step, whose gradient crosses every boundary"
            raise ArgumentError("pipe.verify", rule, f"cut_gradient={boundaries}", "make a pipeline without cut_gradient")
        with self._whole("verify", state, batch, key, task) as (engine, leaves):
            return verify_step(engine, leaves, batch, key)

    def collectives(self, batch: Batch, key: Key | None = None, *, task: TaskNames = None) -> Collectives:
        """What a step communicates inside its stages: the collectives of its compiled programs, read from their HLO.

        What stages send to one another is not included. The step is compiled and not run, so shapes of the batch will do.

        Returns:
            the collectives, their axes and bytes; and the share of all parameters, with all tasks' sets, reduced over ``data``.

        Raises:
            StateError: before ``init``.
        """
        runner = self._opened("collectives").runner
        return collectives_of(runner.engine(task), batch, key, runner.other_bytes(task))

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
        setup = self._opened("reads")
        other = self._other_loss("reads", loss_fn)
        if key is None and other is None:
            key = setup.engine.preparer.tracing.key_for(setup.engine.layout.given, batch)
        lowered = setup.engine.lower("update" if other is None else "forward", batch, key, loss_fn=other)
        read, tree = leaves_read(lowered), jax.tree.structure(batch)
        return tree.unflatten([leaf in read for leaf in range(tree.num_leaves)])

    def prefetch(self, task: TaskNames) -> None:
        """Begin to bring what the next step will use of the bank, while this step computes; waits for nothing.

        Raises:
            BankError: there is no such set, or no slot for it (``Bank(slots=1)``).
            StateError: before ``init``, which decides where the sets go.
        """
        self._opened("prefetch").runner.prefetch(task)

    def _other_loss(self, where: str, loss_fn: LossFn | None) -> LossFn | None:
        if loss_fn is not None:
            check_function(f"pipe.{where}(..., loss_fn=...)", "the loss is a function of (params, batch[, key])", loss_fn)
        return self._opened(where).runner.loss(loss_fn)

    def _opened(self, where: str) -> TrainingSetup:
        setup = super()._opened(where)
        assert isinstance(setup, TrainingSetup), "equipped below"
        return setup

    def _join(self, first: "Pipeline", where: str, state: Tree, args: Sequence[Tree]) -> Setup:
        """Cut the loss at the owners of the first pipeline's parameters."""
        where = f"pipe.{where}"
        if not isinstance(state, State) or len(args) != 1:
            rule = "a pipeline made by other trains the state of the first pipeline"
            got = f"{type(state).__name__} and {len(args)} more argument{'s' * (len(args) != 1)}"
            raise ArgumentError(where, rule, got, f"call {where}(state, batch) with the state of the first pipeline's {where[5:]}")
        setup, (batch,) = first._opened(where[5:]), args
        self._refuse_compile_only(where[5:])
        refuse_tracers(f"{where}(state, batch)", state, batch)
        setup.states.check(state)
        params, *model_state = setup.engine.layout.given
        params = params if self._bank is None else params.shared
        with agreement(where, self._options.devices) as agree:
            return self._open((params, *model_state) if self._options.has_state else params, batch, None, agree)

    def _equip(self, engine: Engine, stages: Stages, variables: tuple[Tree, ...], batch: Batch, key: Key | None) -> Setup:
        bank, states, first = self._bank, states_of(engine, own=self._bank is None), None
        if self._first is not None:
            first = self._first._opened("init")
            first.states.check_alike(states)
            states = first.states
        leads = None if first is None else first.runner
        runner = Runner(engine) if bank is None else BankRunner(bank, engine, variables, batch, key, leads)
        return TrainingSetup(engine, states, stages, runner, Detector(engine.update.watched))

    def _cut(self, variables: tuple[Tree, ...], batch: Batch, key: Key | None, known: Engine | None) -> Engine:
        try:
            if self._first is not None:
                first = self._first._opened("init").runner.first_engine
                there = {"like": first.layout, "places": first.options.placement.places}
                options = replace(self._options, late=first.options.late)
                engine = open_engine(options, self._optimizer, variables, batch, key, **there)
                return engine.with_host(first.options.host)  # which hbm= may have chosen
            return super()._cut(variables, batch, key, known)
        except CutError as error:
            idle = [f"stage {k} does not" for k in range(len(self._stages)) if scope(k) in error.unknown]
            if not self._stages:
                raise
            rule, got = "each stage computes something that the next one reads", idle or "one that returns what it is given"
            raise CutError("Pipeline.from_stages", rule, got, "leave it out") from error

    def _by_hand(self, engine: Engine) -> Sequence[Callable[..., Tree]]:
        return self._stages or super()._by_hand(engine)

    def _joined(self, variables: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return with_set(self._bank, variables)

    def _waiting(self, engine: Engine) -> Sequence[Name]:
        return waiting_names(self._bank, engine)

    def _as_called(self, fn: ForwardFn, where: str, *, with_carry: bool = False) -> ForwardFn:
        runner = self._opened(where).runner
        return runner.joined(fn) if with_carry else runner.loss(fn, "fn") or fn

    def _function(self, where: str, fn: ForwardFn | None) -> ForwardFn | None:
        if fn is None:
            loss = "; pipe.evaluate(state, batch) runs the loss" * (where == "apply")
            rule = "fn is a function of (params, batch[, key]) that returns outputs"
            fix = f"pass for example lambda params, batch: model.apply(params, batch){loss}"
            raise ArgumentError(f"pipe.{where}(..., fn)", rule, "no fn", fix)
        return super()._function(where, fn)

    def _lend(self, where: str, state_or_params: Tree, task: TaskNames) -> Lend:
        setup = self._opened(where)
        if isinstance(state_or_params, State):
            self._newest.end()
            leaves = setup.states.unwrap(state_or_params, where)
        else:
            leaves = self._bring(where, state_or_params)
        return lambda: setup.runner.whole(task, leaves)

    @contextmanager
    def _whole(
        self, where: str, state: State, batch: Batch, key: Key | None, task: TaskNames
    ) -> Iterator[tuple[Engine, Leaves[Array]]]:
        """The engine, and the leaves of a state and of the task's set; for what changes neither, and no step may take meanwhile."""
        refuse_tracers(f"pipe.{where}(state, batch, key)", batch, key)
        setup = self._opened(where)
        with self._newest.lock:
            self._newest.end()
            with setup.runner.whole(task, setup.states.unwrap(state, where)) as found:
                yield found

    @contextmanager
    def _work(
        self, state_or_params: Tree, batch: Batch, key: Key | None, fn: ForwardFn | None, num_batches: int, task: TaskNames
    ) -> Iterator[Work]:
        if fn is not None:
            with super()._work(state_or_params, batch, key, fn, num_batches, task) as work:
                yield work
            return
        where, got = "pipe.profile", f"num_batches={num_batches!r} without fn"
        if num_batches != 1 and not self._options.delay:
            rule, fix = "steps follow one another one by one", "make the pipeline with delay=1, or pass fn=..., or num_batches=1"
            raise ArgumentError(where, rule, got, fix)
        with self._whole("profile", state_or_params, batch, key, task) as (engine, leaves):
            if num_batches == 1:
                yield Steps(engine, leaves, batch, key)
                return
            if self._bank is not None or engine.at(batch).lower("update", batch, key).bound.flow is None:
                rule, fix = "each of these steps ends before the next begins (docs/limits.md says when)", "pass num_batches=1"
                raise ArgumentError(where, rule, got, fix)
            yield Flowing(engine, leaves, batch, key, num_batches)
