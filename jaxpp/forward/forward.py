"""``Forward``: a function over several devices, for those who never train."""

from collections.abc import Iterable, Sequence

import jax
from jax.sharding import Mesh

from jaxpp.engine.compared import opening_texts
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import Given, are_swapped, first_leaves, read_given, swapped
from jaxpp.engine.state_leaves import States, states_of
from jaxpp.engine.tracing import Tracing, check_key, same_shapes
from jaxpp.errors import StateError
from jaxpp.errors.checks import check_function, refuse_tracers
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.functions import Functions
from jaxpp.forward.generate import Generation
from jaxpp.forward.prompts import Prompts
from jaxpp.forward.request import generation, generation_forecast
from jaxpp.forward.ring import check_unstepped
from jaxpp.forward.sampling import SampleRule
from jaxpp.forward.stream import Stream
from jaxpp.observe.memory.forecast import Forecast, forecast, parse_bytes
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import Forwards, check_profile, record
from jaxpp.options import Options
from jaxpp.plan.step import Leaves
from jaxpp.runtime.interrupts import despite_ctrl_c
from jaxpp.runtime.processes.channel import agreement
from jaxpp.runtime.transfer import check_alive
from jaxpp.stages.by_hand import by_hand
from jaxpp.stages.cuts.balance import warn_of
from jaxpp.stages.stage_table import Stages, tabulate
from jaxpp.types import Array, Batch, Device, ForwardFn, Key, Params, ReduceAux, Tree

__all__ = ["Forward"]


@entries
class Forward:
    """Runs a function forward over several devices, without changes to the model and without an optimizer.

    The function is cut into stages of equal forward cost. Parameters may have any type, as they have no gradient: quantised
    weights, counters and running statistics stand beside the weights in one tree.

    Args:
        fn: ``fn(params, batch[, key]) -> outputs``, any tree of arrays.
        num_stages: how many stages to cut it into, one on each device.
        num_microbatches: how many parts a batch is split into along axis 0. Default: ``num_stages``.
        cuts: as for ``Pipeline``: names at which stages 1, 2, ... begin. Default: jaxpp balances the stages.
        devices: as for ``Pipeline``.
        reduce_aux: how the outputs of the microbatches become one, as for ``Pipeline``'s aux. Default: outputs with one row for
            each example are put together in order, all others averaged.
        balance: ``"flops"``, ``"time"`` or ``"memory"`` (parameters alone), as for ``Pipeline``.
        mesh: as for ``Pipeline``.
        data_parallel: as for ``Pipeline``; each replica takes its part of the batch.
        shardings: as for ``Pipeline``.
        shared: as for ``Pipeline``.
        max_shapes: as for ``Pipeline``.

    Raises:
        JaxppError: a ``ValueError``, for every option that cannot be run.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def fn(params, x):
        ...     return jnp.tanh(x @ params["w1"]) @ params["w2"]
        >>> forward = jaxpp.Forward(fn, num_stages=2)
        >>> params = forward.init({"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((6, 4)))
        >>> forward.apply(params, jnp.ones((5, 4))).shape
        (5, 2)
    """

    def __init__(  # noqa: PLR0913  (the options of the front door)
        self,
        fn: ForwardFn,
        *,
        num_stages: int,
        num_microbatches: int | None = None,
        cuts: Sequence[str] | None = None,
        devices: Sequence[Device] | None = None,
        reduce_aux: ReduceAux = None,
        balance: str = "flops",
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Tree = None,
        shared: str | Sequence[str] = (),
        max_shapes: int = 8,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "fn", "__class__")}
        check_function("Forward(fn, ...)", "fn is a function of (params, batch[, key]) that returns outputs", fn)
        self._options = Options.of(fn, is_loss=False, **given)
        self._engine: Engine | None = None
        self._states: States | None = None
        self._functions = Functions()

    def init(self, init_or_params: Tree, *args: Tree) -> Params:
        """Cut the function, place the stages, compile it for a batch of these shapes, and bring the parameters to their owners.

        ``init(init_fn, key, batch)`` makes the parameters: every leaf is made on its owner, with the bits of
        ``jax.jit(init_fn)(key)``. ``init(params, batch)`` copies existing parameters to their owners.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used.

        Returns:
            the parameters, the user's own tree, each leaf on the device of the stage that uses it.

        Raises:
            JaxppError: for a function, parameters or a batch that cannot be run; or other arguments.
        """
        given, engine, states = self._open("init", init_or_params, args)
        return states.wrap(first_leaves(engine, given, engine.placed.names, engine.placed.homes), None).params

    def abstract_params(self, init_or_shapes: Tree, *args: Tree) -> Params:
        """The shapes of the parameters, each with the sharding of its owner: what a checkpoint is restored to. No array is made.

        Args:
            init_or_shapes: as for ``init``; instead of parameters their shapes will do, ``jax.eval_shape(init_fn, key)``.
            *args: as for ``init``.

        Returns:
            a tree of ``jax.ShapeDtypeStruct`` with shardings. Orbax restores the parameters of a checkpoint straight to the owners.

        Raises:
            JaxppError: as ``init``.
        """
        return self._open("abstract_params", init_or_shapes, args)[2].abstract.params

    def apply(self, params: Params, batch: Batch, key: Key | None = None) -> Tree:
        """The outputs for a batch.

        Args:
            params: from ``init`` or a checkpoint; others of the same shapes are copied to their owners at each call.
            batch: a tree of arrays with one leading axis, the examples, of any number.
            key: for the function; microbatch i gets ``jax.random.fold_in(key, i)``.

        Returns:
            the outputs, on the device of the last stage. The call does not wait for the devices.

        Raises:
            OutputError: outputs that cannot be put together.
            BatchError: the batch cannot be split.
            ParamsError: parameters of another model.
            StateError: before ``init`` or ``abstract_params``.
            Exception: what the function raises at a new batch shape, unchanged, with a note.
        """
        refuse_tracers("forward.apply(params, batch, key)", batch, key)
        engine, leaves = self._bring("apply", params)
        return engine.run("forward", leaves, batch, key).aux

    def stream(self, params: Params, batches: Iterable[Batch], key: Key | None = None, *, max_in_flight: int = 2) -> Stream:
        """The outputs of many batches, one after another: an iterator that computes ahead of its reader.

        Args:
            params: as for ``apply``.
            batches: as for ``Pipeline.stream``, whose rules hold here too.
            key: for the function; batch k gets ``jax.random.fold_in(key, k)``.
            max_in_flight: how many batches are computed, or wait for the reader, at once.

        Returns:
            an iterator of outputs in the order of the batches.

        Raises:
            JaxppError: as ``Pipeline.stream``.
        """
        engine, leaves = self._bring("stream", params)
        refuse_tracers("forward.stream(params, batches, key)", key)
        check_key(key)
        engine.preparer.tracing.check_key_taken(self._options.loss_fn, key)

        def run(number: int, batch: Batch) -> Tree:
            refuse_tracers("forward.stream(params, batches, key)", batch)
            check_unstepped("forward.stream", "stream", leaves)
            return engine.run("forward", leaves, batch, None if key is None else jax.random.fold_in(key, number)).aux

        return Stream(batches, run, max_in_flight, "forward.stream")

    def forecast(
        self, params_or_shapes: Params, batch: Batch, key: Key | None = None, *, hbm: float | str | None = None
    ) -> Forecast:
        """Memory of ``apply`` before it runs, from shapes alone; and what to change if it does not fit.

        The function is cut and compiled, as ``init`` would, and not run; no parameter is made.

        Args:
            params_or_shapes: the parameters, or their shapes: ``jax.eval_shape(init, key)``.
            batch: as for ``apply``, or its shapes.
            key: as for ``apply``, or its shape; may be left out even if the function takes a key.
            hbm: bytes that each device has: ``"80GiB"``, or a number. Default: what the devices report (CPUs report nothing).

        Returns:
            the forecast: what each stage holds when its device holds most, in parameters, values in flight, batch, outputs, and
            temporaries of the compiled programs; and whether that fits. The caller's own arrays are not counted.

        Raises:
            JaxppError: as ``init``; and for an ``hbm`` that is no size.
        """
        room = None if hbm is None else parse_bytes(hbm)
        if key is None and Tracing(self._options).takes_key((params_or_shapes,), batch):
            key = jax.random.key(0)
        engine = self._engine or self._open("forecast", params_or_shapes, (batch,))[1]
        if not same_shapes(engine.layout.given, (params_or_shapes,)):
            engine = open_engine(self._options, None, (params_or_shapes,), batch, key)
        return forecast(engine, batch, key, room, purpose="forward")

    def profile(
        self,
        params: Params,
        batch: Batch,
        key: Key | None = None,
        *,
        num_batches: int = 1,
        num_steps: int = 3,
        clock: Clock | None = None,
    ) -> Profile:
        """What really ran, when, and why ranks idled: ``Pipeline.profile``, of ``apply`` or of a stream.

        Args:
            params: as for ``apply``.
            batch: as for ``apply``.
            key: as for ``apply``.
            num_batches: how many times the batch is handed over without waiting, as in a ``stream``.
            num_steps: how many such runs to trace, as for ``Pipeline.profile``.
            clock: as for ``Pipeline.profile``.

        Returns:
            the profile of the run of median length: start and end of every forward and transfer, bubble, idle time by cause, live
            bytes of each device. ``print`` it; ``profile.figure()`` draws it. ``forward.generate(...).profile()`` is that of a
            generation.

        Raises:
            ArgumentError: a count below 1, an unknown clock, or another trace of JAX's profiler is running.
            JaxppError: as ``apply``.
        """
        check_profile(clock, "forward.profile", num_steps=num_steps, num_batches=num_batches)
        refuse_tracers("forward.profile(params, batch, key)", batch, key)
        engine, leaves = self._bring("profile", params)
        return record(Forwards(engine, leaves, batch, key, num_batches), num_steps, clock)

    def generate(  # noqa: PLR0913  (what a generation is asked for)
        self,
        params: Params,
        fn: ForwardFn,
        carry: Tree,
        prompts: Prompts,
        num_tokens: int | Sequence[int],
        *,
        sample: SampleRule = None,
        key: Key | None = None,
        stop: int | Iterable[int] = (),
        num_groups: int | None = None,
        group_size: int = 1,
        chunk: int = 64,
        max_length: int | None = None,
        progress: bool = True,
    ) -> Generation:
        """Tokens of a language model for many prompts, as they are made: ``Pipeline.generate``, whose rules hold here too.

        Args:
            params: as for ``apply``; read until the generation ends.
            fn: ``fn(params, carry, tokens) -> (new_carry, logits)``, over the parameters of this forward.
            carry: as for ``Pipeline.generate``, like all that follow.
            prompts: token sequences of any lengths.
            num_tokens: to make for each prompt.
            sample: how tokens are drawn.
            key: for sampling.
            stop: tokens that end a sequence.
            num_groups: groups in flight.
            group_size: sequences in a group.
            chunk: the most tokens of a prompt that one pass takes.
            max_length: the most tokens that a sequence may have, its prompt included.
            progress: whether to show a progress bar where somebody watches.

        Returns:
            an iterator of ``Token``.

        Raises:
            JaxppError: as ``Pipeline.generate``.
        """
        given = {"sample": sample, "key": key, "stop": stop, "num_groups": num_groups, "group_size": group_size, "chunk": chunk}
        given |= {"max_length": max_length, "progress": progress}
        engine, leaves = self._bring("generate", params)
        return generation("forward.generate", engine, leaves, self._functions, fn, carry, prompts, num_tokens, **given)

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
        """Memory of ``generate`` before it runs: ``Pipeline.forecast_generate``.

        Args:
            fn: as for ``generate``, like all that follow.
            carry: or its shapes.
            sample: how tokens are drawn.
            num_groups: groups in flight.
            group_size: sequences in a group.
            chunk: the most tokens of a prompt that one pass takes.
            hbm: bytes that each device has, as for ``forecast``.

        Raises:
            StateError: before ``init``, ``abstract_params`` or ``forecast``, which cut the function.
            JaxppError: as ``generate``.
        """
        given = {"sample": sample, "num_groups": num_groups, "group_size": group_size, "chunk": chunk, "hbm": hbm}
        engine = self._opened("forecast_generate")[0]
        return generation_forecast("forward.forecast_generate", engine, self._functions, fn, carry, **given)

    @property
    def stages(self) -> Stages:
        """The table of stages; after ``init`` or ``abstract_params``."""
        self._opened("stages")
        return self._stages

    @property
    def engine(self) -> Engine:
        """What runs the function, for tools; it may change from one version of jaxpp to the next."""
        return self._opened("engine")[0]

    def __repr__(self) -> str:
        name = getattr(self._options.loss_fn, "__name__", "a function")
        last = "  init: not done yet" if self._engine is None else "  print(forward.stages) shows the stages"
        return "\n".join([f"Forward of {name}", *self._options.described, last])

    def _opened(self, where: str) -> tuple[Engine, States]:
        if self._engine is None or self._states is None:
            rule = "the function is cut by init or abstract_params, when it first sees shapes"
            raise StateError(
                f"forward.{where}", rule, "no call of either has finished yet", "call params = forward.init(...) first"
            )
        return self._engine, self._states

    def _bring(self, where: str, params: Params) -> tuple[Engine, Leaves[Array]]:
        engine, states = self._opened(where)
        refuse_tracers(f"forward.{where}(params, ...)", params)
        check_alive(f"forward.{where}", params)
        return engine, states.bring(params)

    def _open(self, where: str, init_or_params: Tree, args: Sequence[Tree]) -> tuple[Given, Engine, States]:
        """What the method ``where`` was given, and the function cut and compiled for it."""
        refuse_tracers(f"forward.{where}(...)", init_or_params, args)
        given = read_given(f"forward.{where}", init_or_params, args)
        check_alive(f"forward.{where}", (init_or_params, args))
        try:
            return self._cut(where, given)
        except Exception as error:
            if not given.makes and are_swapped(self._options, given, lambda variables: variables):
                raise swapped(given) from error
            raise

    def _cut(self, where: str, given: Given) -> tuple[Given, Engine, States]:
        with agreement(f"forward.{where}", self._options.devices) as agree:
            variables, batch = (given.shapes,), given.batch
            taken = (
                (given.key if given.makes else jax.random.key(0)) if Tracing(self._options).takes_key(variables, batch) else None
            )
            engine = despite_ctrl_c(open_engine, self._options, None, variables, batch, taken, known=self._engine)
            warn_of(engine.layout.unevenness)
            cut = engine.preparer.step(batch, taken, train=False).cuts[0]
            agree(lambda: opening_texts(self._options, engine.placed, cut, batch, taken))
            engine.plan("forward", batch, taken)
        places = [(place.shown, place.devices[0]) for place in engine.placement.places]
        self._stages = tabulate(cut, engine.owner, places, by_hand(len(places), engine.cut_at, engine.slicing, has_state=False))
        self._engine, self._states = engine, states_of(engine)
        return given, self._engine, self._states
