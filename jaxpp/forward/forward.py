"""``Forward``: functions over several devices. ``Pipeline`` is a ``Forward`` with an optimizer and a state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

import jax
import optax
from jax.sharding import Mesh

from jaxpp.engine.compared import opening_texts
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import InitArguments, are_swapped, first_leaves, read_given, swapped, variables_of
from jaxpp.engine.layout import speed_up
from jaxpp.engine.outcome import Purpose
from jaxpp.engine.state import State, States, states_of
from jaxpp.engine.tracing import Tracing, check_key, same_shapes
from jaxpp.errors import ArgumentError, StateError, warn
from jaxpp.errors.checks import check_flags, check_function, refuse_tracers
from jaxpp.errors.tracebacks import entries, entry
from jaxpp.forward.functions import Functions, Unchanged
from jaxpp.forward.generate import Generation, check_asked, generation, one_key
from jaxpp.forward.prompts import Prompts
from jaxpp.forward.ring import Request, check_unstepped
from jaxpp.forward.sampling import NextTokenFn, SampleRule, sampler_of
from jaxpp.forward.stream import Stream
from jaxpp.lowering.builder import Name
from jaxpp.lowering.step import Leaves
from jaxpp.observe.memory.fit import fit
from jaxpp.observe.memory.forecast import Forecast, forecast, parse_bytes
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import Forwards, Work, check_profile, record
from jaxpp.observe.programs import ProgramTable, programs_of
from jaxpp.options import Asked, Loss, Memory, Options, Order, Where
from jaxpp.runtime.edges import check_alive
from jaxpp.runtime.interrupts import despite_ctrl_c, never_lost
from jaxpp.runtime.not_public import cudnn_of
from jaxpp.runtime.processes.channel import Agreement, agreement
from jaxpp.stages.by_hand import by_hand
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.stage_table import Stages, tabulate
from jaxpp.tables import bytes_in_words
from jaxpp.targets import refuse_compile_only
from jaxpp.types import Array, Batch, Device, ForwardFn, Key, Leaf, Params, ReduceAux, TaskNames, Tree

Lend = Callable[[], AbstractContextManager[tuple[Engine, Leaves[Array]]]]  # gives what forwards read, as long as they use it

# What needs shapes alone, also on devices that only compile.
_PLANNED = frozenset("abstract_state abstract_params collectives engine forecast generate programs reads stages".split())
_RULE = "fn is a function of (params, batch[, key]) that returns outputs"


@dataclass(frozen=True)
class Setup:
    """What the first shapes decide: the function cut, placed and compiled."""

    engine: Engine
    states: States
    stages: Stages


@entries
class Forward:
    """Runs a function forward over several devices, without changes to the model and without an optimizer.

    The function is cut into stages of equal forward cost. Parameters may have any type, as they have no gradient: quantised
    weights, counters and running statistics stand beside the weights in one tree. ``cuts``, ``devices``, ``mesh``,
    ``data_parallel``, ``shardings``, ``shard`` (``"parameters"``), ``axes``, ``broadcast`` and ``max_shapes`` are as for
    ``Pipeline``.

    Args:
        fn: ``fn(params, batch[, key]) -> outputs``, any tree of arrays.
        num_stages: how many stages to cut it into, one on each device.
        num_microbatches: how many parts a batch is split into along axis 0. Default: ``num_stages``.
        reduce_aux: how the outputs of the microbatches become one, as for ``Pipeline``'s aux. Default: outputs with one row for
            each example are put together in order, all others averaged.
        balance: ``"cost"``, ``"flops"``, ``"time"`` or ``"memory"`` (parameters alone), as for ``Pipeline``.
        host: ``"params"``: parameters wait in pinned host memory, and those of a stage come to its device while the stage before
            works. With many stages on a device, a model may be larger than its devices.

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

    # What messages call it, what they say it is called with, and the rule that a call before ``init`` breaks, and what to do.
    _name, _arguments = "forward", "params, {}, key"
    _uncut = (
        "the function is cut by init or abstract_params, when it first sees shapes",
        "call params = forward.init(params, batch) first, or forward.init(init_fn, key, batch)",
    )

    def __init__(  # noqa: PLR0913  (the options of the front door)
        self,
        fn: ForwardFn,
        *,
        num_stages: int,
        num_microbatches: int | None = None,
        cuts: Sequence[str] | None = None,
        devices: Sequence[Device] | None = None,
        reduce_aux: ReduceAux = None,
        balance: str = "cost",
        mesh: Mesh | None = None,
        data_parallel: int = 1,
        shardings: Tree = None,
        shard: str | Sequence[str] | None = None,
        axes: Mapping[str, str | Sequence[str]] | None = None,
        broadcast: str | Sequence[str] = (),
        host: str | None = None,
        max_shapes: int = 8,
        threads: str = "auto",
    ):
        check_function("Forward(fn, ...)", _RULE, fn)
        asked = Asked(
            Order(num_stages, num_microbatches=num_microbatches, cuts=cuts, balance=balance, threads=threads),
            Loss(reduce_aux=reduce_aux, broadcast=broadcast, is_loss=False),
            where=Where(devices, mesh, data_parallel=data_parallel, axes=axes, shardings=shardings, shard=shard),
            memory=Memory(host=host, max_shapes=max_shapes),
        )
        self._begin(asked.settled(fn))

    def _begin(self, options: Options, optimizer: optax.GradientTransformation | None = None) -> None:
        self._options, self._optimizer = options, optimizer
        self._setup: Setup | None = None
        self._functions = Functions(2 * options.max_shapes)

    def init(self, init_or_params: Tree, *args: Tree) -> Params:
        """Cut the function, place the stages, compile it for a batch of these shapes, and bring the parameters to their owners.

        ``init(init_fn, key, batch)`` makes the parameters: every leaf is made on its owner, with the bits of
        ``jax.jit(init_fn)(key)``. ``init(params, batch)`` copies existing parameters to their owners.

        Args:
            init_or_params: ``init_fn(key) -> params``, or the parameters; with inputs too as ``Pipeline.init``.
            *args: ``key, batch`` or ``batch``; of the batch only the shapes are used, unless ``init_fn`` needs inputs.

        Returns:
            the parameters, the user's own tree, each leaf on the device of the stage that uses it.

        Raises:
            JaxppError: for a function, parameters or a batch that cannot be run; or other arguments.
        """
        given, setup = self._open_given("init", init_or_params, args)
        placed = setup.engine.placed
        return setup.states.wrap(first_leaves(setup.engine, given, placed.names, placed.homes), None).params

    def abstract_params(self, init_or_shapes: Tree, *args: Tree) -> Params:
        """The shapes of the parameters, each with the sharding of its owner: what a checkpoint is restored to. No array is made.

        The arguments are those of ``init``; instead of parameters their shapes will do, ``jax.eval_shape(init_fn, key)``.

        Returns:
            a tree of ``jax.ShapeDtypeStruct`` with shardings. Orbax restores the parameters of a checkpoint straight to the owners.

        Raises:
            JaxppError: as ``init``.
        """
        return self._open_given("abstract_params", init_or_shapes, args)[1].states.abstract.params

    def apply(
        self,
        state_or_params: Tree,
        batch: Batch,
        fn: ForwardFn | None = None,
        key: Key | None = None,
        *,
        reduce_aux: ReduceAux = None,
        task: TaskNames = None,
    ) -> Tree:
        """The outputs of a function of the parameters for a batch, forward only.

        The function is cut so that every parameter stays with its owner, and the microbatches of the batch run through the stages
        one after another. Nothing is kept for a backward.

        Args:
            state_or_params: parameters from ``init`` or a checkpoint; others of the same shapes are copied to their owners at each
                call. A ``Pipeline`` takes a state, too; and with ``has_state`` a pair of parameters and model state.
            batch: a tree of arrays with one leading axis, the examples, of any number; or ``jaxpp.Microbatches``, whose outputs are
                put together in their order.
            fn: ``fn(params, batch[, key]) -> outputs``, any tree of arrays; with ``has_state``
                ``fn(params, model_state, batch[, key])``, with a bank ``fn(params, task_params, batch[, key])``. Keep one function
                and pass it again: each new function object is traced and compiled. A ``Forward`` runs its own function by default,
                and takes the key in this place too: ``forward.apply(params, batch, key)``.
            key: for the function; microbatch i gets ``jax.random.fold_in(key, i)``.
            reduce_aux: how the outputs of the microbatches become one, as for ``Pipeline``. Default: outputs with one row for each
                example are put together in order, all others averaged; or, for a ``Forward``'s own function, as its options say.
            task: with a bank, the set that is used, as for ``evaluate``.

        Returns:
            the outputs, on the device of the last stage. The call does not wait for the devices.

        Raises:
            OutputError: outputs that cannot be put together.
            BatchError: the batch cannot be split.
            ParamsError: parameters of another model.
            StateError: before ``init``; or the state was consumed.
            Exception: what the function raises, unchanged, with a note.
        """
        fn, key = self._asked("apply", fn, key)
        refuse_tracers(f"{self._name}.apply({self._arguments.format('batch')})", batch, key)
        with self._lend("apply", state_or_params, task)() as (engine, leaves):
            return self._run(engine, leaves, fn, batch, key, reduce_aux)

    def stream(
        self,
        state_or_params: Tree,
        batches: Iterable[Batch],
        fn: ForwardFn | None = None,
        key: Key | None = None,
        *,
        max_in_flight: int = 2,
        reduce_aux: ReduceAux = None,
        task: TaskNames = None,
    ) -> Stream:
        """The outputs of many batches, one after another: an iterator that computes ahead of its reader.

        The first microbatches of a batch enter the stages while the last ones of the batch before leave them, so the stages are
        filled and drained once in all, not once for each batch.

        Args:
            state_or_params: as for ``apply``; it is read while the stream is, so no step may consume it meanwhile.
            batches: any iterable of batches, which may differ in size; read no further ahead than ``max_in_flight``.
            fn: as for ``apply``.
            key: for the function; batch k gets ``jax.random.fold_in(key, k)``, and its microbatches as with ``apply``.
            max_in_flight: how many batches are computed, or wait for the reader, at once; 1 computes nothing ahead.
            reduce_aux: as for ``apply``.
            task: as for ``apply``.

        Returns:
            an iterator of outputs in the order of the batches, each there when it is given. An exception, of ``batches`` or of
            ``fn``, comes out where the outputs of its batch would; the next ``next`` goes on with the batch after it. ``close()``,
            the end of a ``with`` block, or letting go of it drops what was computed ahead.

        Raises:
            ArgumentError: ``batches`` is one batch, or ``max_in_flight`` no number of at least 1.
            BatchError: at the first ``next``: there is no batch at all.
            JaxppError: as ``apply``, when the batch is reached.
        """
        where = f"{self._name}.stream"
        fn, key = self._asked("stream", fn, key)
        called = f"{where}({self._arguments.format('batches')})"
        refuse_tracers(called, key)
        check_key(key)
        lend = self._lend("stream", state_or_params, task)
        if fn is None:
            Tracing(self._options).check_key_taken(self._options.loss_fn, key)

        def run(number: int, batch: Batch) -> Tree:
            refuse_tracers(called, batch)
            with lend() as (engine, leaves):
                check_unstepped(where, "stream", leaves)
                folded = None if key is None else jax.random.fold_in(key, number)
                return self._run(engine, leaves, fn, batch, folded, reduce_aux)

        return Stream(batches, run, max_in_flight, where)

    def generate(  # noqa: PLR0913  (what a generation is asked for)
        self,
        state_or_params: Tree,
        fn: ForwardFn,
        carry: Tree,
        prompts: Prompts,
        num_tokens: int | Sequence[int],
        *,
        sample: SampleRule = None,
        key: Key | None = None,
        stop: int | Iterable[int | Sequence[int]] | None = (),
        num_groups: int | None = None,
        group_size: int = 1,
        chunk: int = 64,
        max_length: int | None = None,
        progress: bool = True,
        task: TaskNames = None,
    ) -> Generation:
        """Tokens of a language model for many prompts, as they are made.

        ``num_groups`` groups of sequences go round through the stages, so that the stages compute while tokens travel. The carry
        stays on its stages and changes in place. When a sequence ends, the next prompt takes its place. Replicas have groups of
        their own, and share the prompts; the tokens of a prompt do not depend on where it is continued.

        Args:
            state_or_params: as for ``apply``; it is read until the generation ends, so no step may consume it meanwhile. For a
                forecast, shapes will do: ``pipe.generate(pipe.abstract_state(...), fn, shapes, [], 100).forecast()``.
            fn: ``fn(params, carry, tokens) -> (new_carry, logits)``, with a bank ``fn(params, task_params, carry, tokens)``; tokens
                are int32 ``[1, length]``, logits ``[1, length, vocab]``, or ``[1, vocab]`` of the last position.
            carry: of one sequence that has had no token, such as a Flax model's empty cache for a batch of one; or its shapes.
            prompts: any iterable of token sequences, of any lengths of at least 1; read no further ahead than there are places. Of
                equal prompts one after another in a list, ``[prompt] * 8`` for eight samples, all but the last token is run once.
            num_tokens: how many tokens to make for each prompt; or a sequence with a number for each.
            sample: None or ``"greedy"`` for the most likely token; ``jaxpp.Sampling(temperature, top_k, top_p)``; or a function
                ``(logits [vocab], key) -> token``, or of three arguments, the third a ``jaxpp.History``.
            key: for sampling; token q of sequence i, its prompt included, is drawn with
                ``jax.random.fold_in(jax.random.fold_in(key, i), q)``. Default: ``jax.random.key(0)``.
            stop: a token, or several, that end a sequence; a list among them is tokens that end it one after another. They are
                given too. None or ``()``: nothing ends it.
            num_groups: how many groups are in flight on each replica. Default: as many as there are stages, which keeps equal
                stages busy. Where parameters wait in host memory (``host="params"``), each stage's come to its device once for the
                next tokens of all groups, and once for each chunk of the prompts that enter a group together.
            group_size: how many sequences a group has; they are computed together, each with a carry of its own.
            chunk: the most tokens of a prompt that one pass takes. Passes take ``chunk`` tokens, an eighth of it, and so on down to
                1, so a few programs serve prompts of all lengths. A model that takes one token a call is given one at a time.
            max_length: the most tokens that a sequence may have, its prompt included. Default, and at most: what the carry has
                room for, read off the traced function where it writes into the carry; if that does not tell (a recurrent network),
                no limit.
            progress: whether to show a progress bar where somebody watches.
            task: as for ``apply``.

        Returns:
            an iterator of ``Token``: the number of the prompt, the number of the token, the token, its log-probability, and whether
            it is the prompt's last. ``.collect()`` gives an array for each prompt, ``.forecast()`` says what the devices will hold.

        Raises:
            OutputError: ``fn`` does not return a pair of a like carry and logits; or, when it is reached: its logits are NaN, or
                the rule of sampling chose a token that has none. That sequence ends, and the others go on with the next call.
            ArgumentError: counts below 1, replicas with different tasks, a ``max_length`` beyond the carry's room, a rule of
                sampling or stop tokens that cannot be what they stand for.
            BatchError: when it is reached: a prompt that is no sequence of tokens, or that is too long for the carry.
            JaxppError: as ``apply``.
        """
        where = f"{self._name}.generate"
        if isinstance(task, list) and len(set(task)) > 1:
            rule = "a prompt is continued on any replica, so all replicas have the same task"
            got, fix = f"{len(set(task))} tasks", "generate with one task after another"
            raise ArgumentError(f"{where}(..., task={task!r})", rule, got, fix)
        with self._lend_or_shapes("generate", state_or_params, task)() as (engine, leaves):
            fn = self._as_called(fn, "generate", with_carry=True)
            refuse_tracers(f"{where}(...)", carry, key)
            check_flags(f"{where}(...)", progress=progress)
            key = one_key(key)
            num_groups = engine.options.schedule.num_stages if num_groups is None else num_groups
            counts = {"num_groups": num_groups, "group_size": group_size, "chunk": chunk}
            limited = {} if max_length is None else {"max_length": max_length}
            check_asked(where, engine, fn, carry, counts | limited, shapes=leaves is None)
            numbers = {name: int(count) for name, count in counts.items()}
            limit = None if max_length is None else int(max_length)
            sequence = NextTokenFn(fn, sampler_of(sample), str(jax.random.key_impl(key)))
            request = Request(where, engine, self._functions, sequence, carry, key, limit, **numbers)
            return generation(request, leaves, prompts, num_tokens, stop, shown=progress)

    def forecast(
        self,
        params_or_shapes: Tree,
        batch: Batch,
        key: Key | None = None,
        *,
        fn: ForwardFn | None = None,
        hbm: float | str | None = None,
    ) -> Forecast:
        """Memory of a step, or of ``apply``, before the first one, from shapes alone; and what to change if it does not fit.

        What a ``Pipeline`` forecasts is a training step; of a ``Forward``, or with ``fn``, it is a call of ``apply``. It is
        compiled, as ``init`` would, and not run; no parameter is made.

        Args:
            params_or_shapes: the parameters, or their shapes: ``jax.eval_shape(init, key)``; with ``has_state`` the pair. Or a
                state, whose shapes count.
            batch: as for ``step`` or ``apply``, or its shapes.
            key: as for ``step`` or ``apply``, or its shape; may be left out even if the function takes a key.
            fn: a function for ``apply``, whose batch and key the others are then; the optimizer's state counts beside its forwards.
                The loss must have been cut before: by ``init``, ``abstract_state``, or the forecast of a step.
            hbm: bytes that each device has, as for ``Pipeline``. Default: the pipeline's, or what devices report (CPUs nothing).

        Returns:
            the forecast: what each stage holds at its device's peak, by kind; whether that fits, and if not the changes that would
            make it fit. ``step(donate=False)`` needs room for a second state; the caller's own arrays are not counted.

        Raises:
            JaxppError: as ``init``, with ``fn`` as ``apply``; and for an ``hbm`` that is no size.
        """
        room = self._options.hbm if hbm is None else parse_bytes(hbm)
        engine, key, purpose, base = self._planned("forecast", params_or_shapes, batch, key, fn)
        return forecast(engine, batch, key, room, self._waiting(base or engine), purpose=purpose, base=base)

    def programs(
        self, params_or_shapes: Tree, batch: Batch, key: Key | None = None, *, fn: ForwardFn | None = None
    ) -> ProgramTable:
        """The compiled programs of a step, or of ``apply``, from shapes alone: the time of each at least, and what is wasteful.

        Of a ``Pipeline`` they are those of a training step; of a ``Forward``, or with ``fn``, those of a call of ``apply``. They
        are compiled, as ``init`` would, and not run; no parameter is made. On devices that only compile (``jaxpp.target``) they are
        what such a GPU would run: its kernels, who wrote its matrix products, and the time that each takes at least. The arguments
        are those of ``forecast``.

        Returns:
            one row for each program: kernels, matrix products by type and by who wrote them, bytes, memory, and the least seconds
            on the GPU, if jaxpp has its numbers. ``print`` it for a table; ``programs.figure()`` draws the roofline.

        Raises:
            JaxppError: as ``forecast``.

        References:
            Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures, CACM 52(4), 2009.
        """
        engine, key, purpose, _ = self._planned("programs", params_or_shapes, batch, key, fn)
        return programs_of(engine, batch, key, purpose)

    def profile(
        self,
        state_or_params: Tree,
        batch: Batch,
        key: Key | None = None,
        *,
        fn: ForwardFn | None = None,
        num_batches: int = 1,
        num_steps: int = 3,
        clock: Clock | None = None,
        task: TaskNames = None,
    ) -> Profile:
        """What really ran, when, and why ranks idled: steps, or forwards, at full speed under JAX's profiler.

        A ``Pipeline`` profiles training steps; a ``Forward``, or with ``fn``, calls of ``apply``, or a stream of them. The trace
        knows when each program ran, so nothing waits; some further steps run one program at a time, with the profiler and without
        it, as it slows programs with loops inside. They train a copy.

        Args:
            state_or_params: as for ``step``; of forwards, as for ``apply``.
            batch: as for ``step`` or ``apply``.
            key: as for ``step`` or ``apply``.
            fn: a function for ``apply``, whose batch and key the others are then. (For a generation: ``generate(...).profile()``.)
            num_batches: of forwards, how many times the batch is handed over without waiting, as in a ``stream``; of the steps of a
                pipeline with ``delay=1``, how many follow one another in flow.
            num_steps: how many steps to trace, at least 1, beside as many that are not traced and three to warm up.
            clock: ``"trace"``: the times of the step as it ran, on devices that may share cores. ``"isolated"``: the virtual clock,
                with the time that each program takes alone; the default on CPU, and where there are fewer devices than ranks.
            task: as for ``step``.

        Returns:
            the profile of the most typical of these steps: start and end of every action and transfer, bubble, idle time by cause,
            live bytes of each device by kind. ``print`` it; ``profile.figure()`` draws it beside the virtual clock's timeline;
            ``jaxpp.observe.to_perfetto(profile)`` writes a trace for Perfetto, ``to_json`` and ``to_html`` write the rest.

        Raises:
            ArgumentError: a count below 1, an unknown clock, or another trace of JAX's profiler is running.
            StateError: the state was consumed.
            BatchError: the batch cannot be split.
        """
        check_profile(clock, f"{self._name}.profile", num_steps=num_steps, num_batches=num_batches)
        refuse_tracers(f"{self._name}.profile({self._arguments.split(',')[0]}, batch, key)", batch, key)
        with never_lost(), self._work(state_or_params, batch, key, fn, num_batches, task) as work:
            return record(work, num_steps, clock)

    @property
    def stages(self) -> Stages:
        """The table of stages; after ``init``."""
        return self._opened("stages").stages

    @property
    def engine(self) -> Engine:
        """What runs it, for tools, after ``init``: plans, compiled programs, where leaves live; it may change between versions."""
        return self._opened("engine").engine

    def __repr__(self) -> str:
        setup, lines = self._setup, self._described()
        if setup is None:
            return "\n".join([*lines, "  init: not done yet"])
        count, size = sum(stage.num_params for stage in setup.stages), sum(stage.num_bytes for stage in setup.stages)
        lines.append(f"  stages: {count:,} parameters in {bytes_in_words(size)}; print({self._name}.stages)")
        return "\n".join([*lines, *(f"  memory: {remark}" for remark in setup.stages.remarks)])

    @entry
    def __call__(self, *args: Tree, **named: Tree) -> NoReturn:
        """Refuse to be called; its methods say what is to be done."""
        del args, named
        rule = f"a jaxpp.{type(self).__name__} is no function, and its methods run what it was made of"
        what = (
            "pipe.step(state, batch), or pipe.evaluate(state, batch)" if self._options.is_loss else "forward.apply(params, batch)"
        )
        raise ArgumentError(f"{self._name}(...)", rule, "a call", f"write {what}")

    @entry
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied."""
        made = "state" if self._options.is_loss else "parameters"
        where, rule = f"pickle or copy of {self._name}", "it holds devices and compiled programs, which belong to this process"
        fix = f"keep the {made}, as a checkpoint or pickle.dumps(jax.device_get({made.replace('parameters', 'params')})), and make"
        raise ArgumentError(where, rule, f"a jaxpp.{type(self).__name__}", f"{fix} the jaxpp.{type(self).__name__} anew")

    def _described(self) -> list[str]:
        return [f"Forward of {getattr(self._options.loss_fn, '__name__', 'a function')}", *self._options.described]

    def _opened(self, where: str) -> Setup:
        self._refuse_compile_only(where)
        if self._setup is None:
            rule, fix = self._uncut
            raise StateError(f"{self._name}.{where}", rule, "no call of either has finished yet", fix)
        return self._setup

    def _refuse_compile_only(self, where: str) -> None:
        """Refuse on devices that only compile whatever holds an array: all but what is planned from shapes."""
        if self._options.compile_only and where not in _PLANNED:  # each step asks
            shapes = f"{'pipe' if self._options.is_loss else 'forward'}.forecast(shapes, batch) plans for them"
            fix = f"pass devices=jax.devices(), or leave devices out; {shapes}"
            refuse_compile_only(f"{self._name}.{where}", self._options.devices, fix)

    def _planned(
        self, where: str, params_or_shapes: Tree, batch: Batch, key: Key | None, fn: ForwardFn | None
    ) -> tuple[Engine, Key | None, Purpose, Engine | None]:
        """What would run for such shapes: a step or the forwards of a batch; with ``fn``, those of this function.

        The last is the engine that trains the parameters, if another runs the function.
        """
        options = self._options
        if isinstance(params_or_shapes, State):
            held = params_or_shapes
            params_or_shapes = (held.params, held.model_state) if options.has_state else held.params
        params_or_shapes = jax.tree.map(_known, params_or_shapes)
        variables = variables_of(options, params_or_shapes)
        if fn is not None:
            setup, chosen = self._opened(where), self._function(where, fn)
            setup.states.check_params(*variables)
            return self._engine_of(setup.engine, chosen, batch, key), key, "forward", setup.engine
        variables = self._joined(variables)
        key = Tracing(options).key_for(variables, batch) if key is None else key
        try:
            engine = (self._setup or self._open(params_or_shapes, batch, key)).engine
            if not same_shapes(engine.layout.given, variables):
                engine = open_engine(options, self._optimizer, variables, batch, key)
                engine = fit(engine, batch, key, self._waiting(engine)).engine
        except Exception as error:
            given = read_given(f"{self._name}.{where}", params_or_shapes, (batch,))
            if are_swapped(options, given, self._joined):
                raise swapped(given) from error
            raise
        return engine, key, "update" if options.is_loss else "forward", None

    def _open_given(self, where: str, init_or_params: Tree, args: Sequence[Tree]) -> tuple[InitArguments, Setup]:
        self._refuse_compile_only(where)
        where = f"{self._name}.{where}"
        refuse_tracers(f"{where}(...)", init_or_params, args)
        given = read_given(where, init_or_params, args)
        check_alive(where, params=given.made, batch=given.batch, key=given.key)
        try:
            with never_lost(), agreement(where, self._options.devices) as agree:
                with cudnn_of(self._options.devices):
                    made = given.shapes(self._options.axes)
                return given, self._open(made, given.batch, given.key, agree)
        except Exception as error:
            if not given.makes and are_swapped(self._options, given, self._joined):
                raise swapped(given) from error
            if given.line:
                note = "if the model takes other inputs, pass such a function"
                error.add_note(f"jaxpp: the parameters are made by {given.line}; {note}")
            raise

    def _open(self, made: Tree, batch: Batch, key: Key | None, agree: Agreement | None = None) -> Setup:
        """Cut, place and compile; ``agree`` compares processes first. What does not fit into ``options.hbm`` keeps less."""
        self._setup = setup = despite_ctrl_c(self._make_setup, made, batch, key, agree)
        return setup

    def _make_setup(self, made: Tree, batch: Batch, key: Key | None, agree: Agreement | None) -> Setup:
        options, before = self._options, self._setup
        variables = variables_of(options, made)
        whole = self._joined(variables)
        key = Tracing(options).key_for(whole, batch, key)
        engine = self._cut(whole, batch, key, before and before.engine)
        for warning in engine.layout.warnings:
            warn(warning)
        if agree is not None:
            first = engine.preparer.step(batch, key, train=options.is_loss).cuts[0]
            agree(lambda: opening_texts(options, engine.placed, first, batch, key))
        if before is not None and engine is before.engine:
            remarks = before.stages.remarks
        else:
            fitted = fit(engine, batch, key, self._waiting(engine))
            engine, remarks = fitted.engine, (*options.remarks, *fitted.remarks)
            if jax.process_index() == 0:
                for line in (*map("jaxpp: {}".format, options.remarks), *[fitted.said] * bool(fitted.remarks)):
                    print(line, flush=True)
        engine.plan("update" if options.is_loss else "forward", batch, key)
        places = [(place.shown, place.devices[0]) for place in engine.placement.places]
        cut = engine.preparer.step(batch, key, train=options.is_loss).cuts[0]
        functions = self._by_hand(engine)
        offloading = {pair.forward.stage for pair in engine.options.offloaded}
        rows = tabulate(cut, engine.layout.owner, places, functions, offloading)
        schedule = engine.options.schedule
        stages = Stages(rows, remarks, schedule.name, speed_up(schedule, engine.placement, cut))
        return self._equip(engine, stages, variables, batch, key)

    def _cut(self, variables: tuple[Tree, ...], batch: Batch, key: Key | None, known: Engine | None) -> Engine:
        return open_engine(self._options, self._optimizer, variables, batch, key, known=known)

    def _by_hand(self, engine: Engine) -> Sequence[Callable[..., Tree]]:
        return by_hand(len(engine.placement.places), engine.cut_at, engine.layout.slicing, has_state=self._options.has_state)

    # What a pipeline does in another way.

    def _equip(self, engine: Engine, stages: Stages, variables: tuple[Tree, ...], batch: Batch, key: Key | None) -> Setup:
        del variables, batch, key
        return Setup(engine, states_of(engine), stages)

    def _joined(self, variables: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return variables

    def _waiting(self, engine: Engine) -> Sequence[Name]:
        """Leaves of which further copies wait on the devices."""
        del engine
        return ()

    def _as_called(self, fn: ForwardFn, where: str, *, with_carry: bool = False) -> ForwardFn:
        self._opened(where)
        return fn if with_carry else positional_key(fn, 2, "fn")

    def _function(self, where: str, fn: ForwardFn | None) -> ForwardFn | None:
        if fn is None:
            return None
        check_function(f"{self._name}.{where}(..., fn)", _RULE, fn)
        return self._as_called(fn, where)

    def _lend(self, where: str, state_or_params: Tree, task: TaskNames) -> Lend:
        if task is not None:
            raise ArgumentError(f"task={task!r}", "a task is a set of the pipeline's bank", "no bank", "pass Pipeline(bank=...)")
        engine, leaves = self._opened(where).engine, self._bring(where, state_or_params)
        return lambda: nullcontext((engine, leaves))

    @contextmanager
    def _work(
        self, state_or_params: Tree, batch: Batch, key: Key | None, fn: ForwardFn | None, num_batches: int, task: TaskNames
    ) -> Iterator[Work]:
        fn = self._function("profile", fn)
        with self._lend("profile", state_or_params, task)() as (engine, leaves):
            yield Forwards(self._engine_of(engine, fn, batch, key), leaves, batch, key, num_batches)

    def _asked(self, where: str, fn: ForwardFn | None, key: Key | None) -> tuple[ForwardFn | None, Key | None]:
        """The function that is to run, and its key, which may stand in the place of a ``Forward``'s own function."""
        if key is None and not (self._options.is_loss or callable(fn)):
            fn, key = None, fn
        return self._function(where, fn), key

    def _bring(self, where: str, made: Tree) -> Leaves[Array]:
        setup = self._opened(where)
        refuse_compile_only(f"{self._name}.{where}", self._options.devices)
        refuse_tracers(f"{self._name}.{where}(params, ...)", made)
        check_alive(f"{self._name}.{where}", params=made)
        return setup.states.bring(*variables_of(self._options, made))

    def _lend_or_shapes(
        self, where: str, made: Tree, task: TaskNames
    ) -> Callable[[], AbstractContextManager[tuple[Engine, Leaves[Array] | None]]]:
        """As ``_lend``; for parameters (or a state) that are only shapes the engine alone."""
        held = made.held if isinstance(made, State) else made
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(held)):
            return self._lend(where, made, task)
        setup = self._opened(where)
        shapes = (made.params, made.model_state) if isinstance(made, State) else variables_of(self._options, made)
        setup.states.check_params(*shapes)
        return lambda: nullcontext((setup.engine, None))

    def _run(
        self, engine: Engine, leaves: Leaves[Array], fn: ForwardFn | None, batch: Batch, key: Key | None, reduce_aux: ReduceAux
    ) -> Tree:
        engine = self._engine_of(engine, fn, batch, key, reduce_aux)
        return engine.run("forward", leaves.variables, batch, key).aux

    def _engine_of(
        self, engine: Engine, fn: ForwardFn | None, batch: Batch, key: Key | None, reduce_aux: ReduceAux = None
    ) -> Engine:
        if fn is None and reduce_aux is None:
            return engine
        fn = self._options.loss_fn if fn is None else fn
        fn = Unchanged(fn) if engine.options.has_state else fn
        return self._functions.engine(engine, fn, batch, key, reduce_aux=reduce_aux)


def _known(leaf: Leaf) -> Leaf:
    """An array, or its shape if a step has consumed it: that is still known."""
    gone = isinstance(leaf, jax.Array) and leaf.is_deleted()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if gone else leaf
