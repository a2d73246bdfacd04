"""Outputs of functions over the parameters of a pipeline: of one batch, of many, and of sequences token by token."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import jax

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import Outcome
from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError
from jaxpp.errors.checks import check_function, refuse_tracers
from jaxpp.errors.tracebacks import entries
from jaxpp.forward.functions import Functions, unchanged
from jaxpp.forward.generate import Generation
from jaxpp.forward.prompts import Prompts
from jaxpp.forward.request import generation
from jaxpp.forward.ring import check_unstepped
from jaxpp.forward.sampling import SampleRule
from jaxpp.forward.stream import Stream
from jaxpp.plan.step import Leaves
from jaxpp.types import Array, Batch, ForwardFn, Key, ReduceAux, TaskNames, Tree

__all__ = ["Lend", "Predicting"]

Lend = Callable[[], AbstractContextManager[tuple[Engine, Leaves[Array]]]]
"""Gives an engine and the leaves that its forwards read, for as long as they are used."""

_RULE = "fn is a function of (params, batch[, key]) that returns outputs"


@entries
class Predicting:
    """What a pipeline can be asked beside its loss; ``Pipeline`` says how parameters are lent to it."""

    _functions_applied: Functions

    def _lend(self, where: str, state_or_params: Tree, task: TaskNames) -> Lend:
        """The engine and the leaves of a state, or of parameters; called by the method ``where``."""
        raise NotImplementedError

    def _as_called(self, fn: ForwardFn, where: str, *, with_carry: bool = False) -> ForwardFn:
        """A function of the user's parameters as the engine calls it."""
        raise NotImplementedError

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
        """The outputs of a function of the pipeline's parameters for a batch, forward only.

        The function is cut so that every parameter stays with its owner, and the microbatches of the batch run through the stages
        one after another. Nothing is kept for a backward.

        Args:
            state_or_params: a state from ``init`` or ``step``; or parameters, which are copied to their owners at each call unless
                they are there (``state.params`` is), with ``has_state`` a pair with the model state.
            batch: as for ``evaluate``: of any number of examples.
            fn: ``fn(params, batch[, key]) -> outputs``, any tree of arrays; with ``has_state``
                ``fn(params, model_state, batch[, key])``, with a bank ``fn(params, task_params, batch[, key])``. Keep one function
                and pass it again: each new function object is traced and compiled.
            key: for the function; microbatch i gets ``jax.random.fold_in(key, i)``.
            reduce_aux: how the outputs of the microbatches become one, as for ``Pipeline``. Default: outputs with one row for each
                example are put together in order, all others averaged.
            task: as for ``evaluate``.

        Returns:
            the outputs, on the device of the last stage. The call does not wait for the devices.

        Raises:
            OutputError: outputs that cannot be put together.
            BatchError: the batch cannot be split.
            StateError: the state was consumed.
            ParamsError: parameters of another model.
            Exception: what ``fn`` raises, unchanged, with a note.
        """
        refuse_tracers("pipe.apply(state, batch, fn)", batch, key)
        chosen, lend = self._chosen("apply", fn), self._lend("apply", state_or_params, task)
        with lend() as (engine, leaves):
            return self._run(engine, leaves, chosen, batch, key, reduce_aux).aux

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
        refuse_tracers("pipe.stream(state, batches, fn)", key)
        check_key(key)
        chosen, lend = self._chosen("stream", fn), self._lend("stream", state_or_params, task)

        def run(number: int, batch: Batch) -> Tree:
            refuse_tracers("pipe.stream(state, batches, fn)", batch)
            with lend() as (engine, leaves):
                check_unstepped("pipe.stream", "stream", leaves)
                folded = None if key is None else jax.random.fold_in(key, number)
                return self._run(engine, leaves, chosen, batch, folded, reduce_aux).aux

        return Stream(batches, run, max_in_flight)

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
        stop: int | Iterable[int] = (),
        num_groups: int | None = None,
        group_size: int = 1,
        chunk: int = 64,
        max_length: int | None = None,
        progress: bool = True,
        task: TaskNames = None,
    ) -> Generation:
        """Tokens of a language model for many prompts, as they are made.

        ``num_groups`` groups of sequences go round through the stages, so that the stages compute while tokens travel. Each stage
        keeps the parts of the carry that it reads and writes; they change in place and are never sent. When a sequence ends, the
        next prompt takes its place.

        Args:
            state_or_params: as for ``apply``; it is read until the generation ends, so no step may consume it meanwhile.
            fn: ``fn(params, carry, tokens) -> (new_carry, logits)``; tokens are int32 ``[1, length]``, logits
                ``[1, length, vocab]``, or ``[1, vocab]`` of the last position. With a bank
                ``fn(params, task_params, carry, tokens)``.
            carry: of one sequence that has had no token, such as the empty cache that a Flax model makes for a batch of one.
            prompts: any iterable of token sequences, of any lengths of at least 1; read no further ahead than there are places.
            num_tokens: how many tokens to make for each prompt; or a sequence with a number for each.
            sample: None or ``"greedy"`` for the most likely token; ``jaxpp.Sampling(temperature, top_k, top_p)``; or a function
                ``(logits [vocab], key) -> token``.
            key: for sampling; token q of sequence i, its prompt included, is drawn with
                ``jax.random.fold_in(jax.random.fold_in(key, i), q)``. Default: ``jax.random.key(0)``.
            stop: a token, or several, that end a sequence; the stop token is given too.
            num_groups: how many groups are in flight. Default: as many as there are stages, which keeps equal stages busy.
            group_size: how many sequences a group has; they are computed together, each with a carry of its own.
            chunk: the most tokens of a prompt that one pass takes. Passes take ``chunk`` tokens, an eighth of it, and so on down to
                1, so a few programs serve prompts of all lengths. A model that takes one token a call is given one at a time.
            max_length: the most tokens that a sequence may have, its prompt included. Default: what the carry has room for, read
                off the traced function where it writes into the carry; if that does not tell (a recurrent network), no limit.
            progress: whether to show a progress bar where somebody watches.
            task: as for ``apply``.

        Returns:
            an iterator of ``Token``: the number of the prompt, the number of the token, the token, its log-probability, and whether
            it is the prompt's last. ``.collect()`` gives an array for each prompt.

        Raises:
            OutputError: ``fn`` does not return a pair of a like carry and logits.
            ArgumentError: counts below 1, a rule of sampling or stop tokens that cannot be what they stand for.
            BatchError: when it is reached: a prompt that is no sequence of tokens, or that is too long for the carry.
            JaxppError: as ``apply``.
        """
        given = {"sample": sample, "key": key, "stop": stop, "num_groups": num_groups, "group_size": group_size, "chunk": chunk}
        given |= {"max_length": max_length, "progress": progress}
        lend, where = self._lend("generate", state_or_params, task), "pipe.generate"
        with lend() as (engine, leaves):
            function = self._as_called(fn, "generate", with_carry=True)
            return generation(where, engine, leaves, self._functions_applied, function, carry, prompts, num_tokens, **given)

    def _chosen(self, where: str, fn: ForwardFn | None) -> ForwardFn:
        if fn is None:
            loss = "; pipe.evaluate(state, batch) runs the loss" * (where == "apply")
            fix = f"pass for example lambda params, batch: model.apply(params, batch){loss}"
            raise ArgumentError(f"pipe.{where}(..., fn)", _RULE, "no fn", fix)
        check_function(f"pipe.{where}(..., fn)", _RULE, fn)
        return self._as_called(fn, where)

    def _run(
        self, engine: Engine, leaves: Leaves[Array], fn: ForwardFn, batch: Batch, key: Key | None, reduce_aux: ReduceAux
    ) -> Outcome[Array]:
        """One batch through the stages."""
        found = self._engine_of(engine, fn, batch, key, reduce_aux)
        return found.run("forward", leaves._replace(opt=(), own_opt=(), loss_scale=()), batch, key)

    def _engine_of(self, engine: Engine, fn: ForwardFn, batch: Batch, key: Key | None, reduce_aux: ReduceAux = None) -> Engine:
        """The engine that runs a function over the parameters of the pipeline's."""
        fn = unchanged(fn) if engine.options.has_state else fn
        return self._functions_applied.engine(engine, fn, batch, key, reduce_aux=reduce_aux)
