"""The user's loss traced as the options say, at any shapes and for any of the losses that a pipeline is given."""

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.errors import ArgumentError, JaxppError, LossError, shown
from jaxpp.options import Options
from jaxpp.runtime.compile import trace_context
from jaxpp.runtime.not_public import cudnn_of
from jaxpp.runtime.place import mesh_in
from jaxpp.stages.axes import ONE_DEVICE, RankAxes
from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.cuts.cut_loss import CutLoss, cut
from jaxpp.stages.estimate import rates_of
from jaxpp.stages.graph import ancestors
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.stages.loss.aux import Reducer, reducers_of, reducing
from jaxpp.stages.loss.example_axis import (
    WHOLE_THERE,
    Count,
    Examples,
    Incomparable,
    MicrobatchWarning,
    advice,
    changed,
    factor_of,
    follow,
    impure,
    judge,
    unexamined,
)
from jaxpp.stages.loss.microbatch import (
    Microbatches,
    batch_avals,
    inputs_in,
    is_ragged,
    listed_examples,
    num_examples,
    resized,
    scale_dtype,
    shared_leaves,
)
from jaxpp.stages.loss.rng_key import in_place_of_key, key_argument, name_of
from jaxpp.stages.loss.traced_loss import TracedLoss, in_order_of, trace_loss, unfit
from jaxpp.stages.stage import ProgramOptions
from jaxpp.types import Batch, Key, Leaf, LossFn, Tree


def avals_of(tree: Tree) -> Tree:
    """The tree of shapes and dtypes, as a traced function sees them (Python scalars and 64-bit NumPy included)."""

    def aval(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))

    return jax.tree.map(aval, tree)


def same_shapes(known: Tree, tree: Tree) -> bool:
    """Whether a tree has the structure, shapes and dtypes of a known one; never if it has a leaf that is to be refused."""
    if any(unfit(leaf) is not None for leaf in jax.tree.leaves(tree)):
        return False
    try:
        return jax.tree.structure(known) == jax.tree.structure(tree) and jax.tree.leaves(known) == jax.tree.leaves(avals_of(tree))
    except AttributeError:  # a leaf that is no array
        return False


def shapes_key(batch: Batch, key: object) -> Hashable:
    """The shapes and dtypes of a batch and a key, and the options of JAX, by which steps and cuts are kept."""
    leaves, tree = jax.tree.flatten(batch)
    of_key = None if key is None else (_shape_of(key),)  # what is no key is not as without one
    return tree, tuple(map(_shape_of, leaves)), of_key, trace_context()


def _shape_of(leaf: Any) -> Hashable:
    """Shape and dtype as a traced function sees them; a leaf that JAX does not take has none, and is refused later."""
    if unfit(leaf) is not None:
        return None
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    aval = batch_avals(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def check_key(key: Any, loss_fn: LossFn | None = None, before: int = 2) -> None:
    """Refuse what is no PRNG key, or several: one key, typed or raw, or its shape, or None; for a loss that takes it as given."""
    if key is None:
        return
    fix = "pass jax.random.key(seed)"
    if (wrong := _why_no_key(key)) is not None:
        fix += "; if it belongs to the batch, pass both as one tree, (x, y)" * (loss_fn is not None and hasattr(key, "shape"))
        fix = "pass a function by its name, loss_fn=... for example" if callable(key) else fix
        rule = "a key is an array made by jax.random.key"
        in_place = None if loss_fn is None else in_place_of_key(loss_fn, before)
        raise ArgumentError("key", *([rule, wrong, fix] if in_place is None else [in_place[0], wrong, in_place[1]]))
    is_raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if len(key.shape) > is_raw:
        rule = "a key is one key, from which those of microbatches, batches and sequences are folded"
        raise ArgumentError("key", rule, describe(key), fix)


def _why_no_key(key: Key) -> str | None:
    """What is given in place of a key or of several, raw or typed; None if that is what it is."""
    if not (hasattr(key, "dtype") and hasattr(key, "shape")):
        return f"{type(key).__name__} {shown(key)}"
    if (why := unfit(key)) is not None:
        return why.what
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:  # a raw key has the shape and the type of JAX's default
            jax.eval_shape(jax.random.wrap_key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
        except TypeError:
            return describe(key)
    return None


class Tracing:
    """Traces losses, and cuts them, as the options say; nobody wants the gradient of the ``frozen`` parameter leaves.

    With the ``owner`` of each parameter leaf, equations run in the order of these stages, as far as they can.
    """

    def __init__(self, options: Options, frozen: frozenset[int] = frozenset(), owner: tuple[int, ...] = ()):
        self.options, self.frozen, self.owner = options, frozen, owner

    def key_for(self, variables: Sequence[Tree], batch: Batch, key: Key | None = None) -> Key | None:
        """The key that the loss is traced with: ``key``, ``jax.random.key(0)`` unless given; None if the loss takes none.

        A loss with ``*args`` is tried.
        """
        found = key_argument(self.options.loss_fn, 2 + self.options.has_state)
        key = jax.random.key(0) if key is None else key
        if found.sure or found.name:
            return key if found.sure and found.name is not None else None
        try:
            with cudnn_of(self.options.devices):
                self.options.axes.shapes(self.options.loss_fn, *variables, batch, jax.random.key(0))
        except Exception as error:  # noqa: BLE001  (whatever else is wrong is said when it is traced)
            return None if isinstance(error, TypeError) else key
        return key

    def check_key_taken(self, loss_fn: LossFn, key: Key | None) -> None:
        """Refuse what is no key, a key for a loss, or another function, that takes none, and no key for one that needs it."""
        before, noun = 2 + self.options.has_state, "loss" if self.options.is_loss else "function"
        found = key_argument(loss_fn, before)
        check_key(key, loss_fn, before)
        if key is not None and found.sure and found.name is None:
            rule, fix = f"a key is for a {noun} that takes one", f"leave it out, or give the {noun} one more parameter"
            raise ArgumentError("key", rule, f"a key, and {name_of(loss_fn)}", fix)
        if key is None and found.needed:
            fix = f"pass one, such as jax.random.key(0); or write {found.name}=None in the {noun}, where it can do without"
            rule = f"a {noun} that takes a key is given one at each call"
            raise ArgumentError("key", rule, f"no key, and {name_of(loss_fn)}", fix)

    def shared(self, batch: Batch) -> frozenset[int]:
        """The batch leaves that every microbatch gets whole."""
        return shared_leaves(batch, self.options.broadcast)

    def trace(
        self,
        loss_fn: LossFn,
        variables: Sequence[Tree],
        microbatch: Batch,
        key: Key | None,
        *,
        train: bool | None = None,
        per_layer: bool = False,
        axes: RankAxes | None = None,
        raised: list[Exception] | None = None,
    ) -> TracedLoss:
        """A loss over the pipeline's parameters traced at a microbatch's shapes; ``train``: to be differentiated, the default.

        ``axes``: of where it is to run, a rank unless given. ``raised``: a list for what the loss itself raises.
        """
        params, *state = variables
        train = self.options.is_loss if train is None else train
        has_aux = self.options.has_aux if loss_fn == self.options.loss_fn else None
        called = loss_fn if raised is None else _noting(loss_fn, raised)
        options = {"has_aux": has_aux, "differentiable": train, "frozen": self.frozen, "per_layer": per_layer}
        options |= {"shared": self.shared(microbatch), "is_loss": self.options.is_loss, "axes": axes or self.options.axes}
        try:
            with cudnn_of(self.options.devices):
                traced = trace_loss(called, params, microbatch, key, model_state=state[0] if state else None, **options)
        except Exception as error:
            for note in () if isinstance(error, JaxppError) else self._remedies(error, loss_fn, microbatch, key):
                error.add_note(f"jaxpp: {note}")
            raise
        return in_order_of(traced, self.owner) if self.owner and not per_layer else traced

    def _remedies(self, error: Exception, loss_fn: LossFn, microbatch: Batch, key: Key | None) -> Iterator[str]:
        """What may mend what a function has raised; the errors of Flax are known by their names."""
        before = 2 + self.options.has_state
        if key is not None and (told := in_place_of_key(loss_fn, before)) is not None:
            yield "; ".join(told)
        yield from listed_examples(microbatch)
        kind, quoted = type(error).__name__, re.findall(r'"([^"]*)"', str(error))
        if kind == "InvalidRngError" and quoted and (self.options.is_loss or key is not None):
            argument = (
                "" if key is not None else "give the loss one more argument, key, after the batch, pass a key to each step, and "
            )
            yield f'{argument}call the model with rngs={{"{quoted[-1]}": key}}'
        if kind == "ModifyScopeVariableError" and quoted:
            call = f'model.apply({{"params": params, **model_state}}, ..., mutable=["{quoted[-1]}"])'
            returns = "and returns loss, (new_model_state, aux)"
            yield f"pass has_state=True, with a loss_fn(params, model_state, batch) that calls {call}, {returns}"
        method = getattr(loss_fn, "function", loss_fn)
        of_model = getattr(method, "__name__", "") == "apply" and hasattr(getattr(method, "__self__", None), "init")
        if of_model and (inputs := inputs_in(microbatch)) != "batch":
            yield f"model.apply is given the whole batch; pass lambda params, batch: model.apply(params, {inputs})"

    def cut(self, loss: TracedLoss, cuts: Cuts, owner: Sequence[int], reducers: Mapping[int, Reducer], **known: Any) -> CutLoss:
        """A traced loss as the programs of its stages."""
        options, placement = self.options, self.options.placement
        axes = [RankAxes(mesh_in(place)) for place in placement.places]  # programs name those of the widest
        made = ProgramOptions(
            remat=options.remat,
            train=options.is_loss,
            cut_gradient=options.cut_gradient,
            scaled_by=None if options.loss_scale is None else options.loss_scale.by,
            skips=options.weight is not None,
            reducers=reducers,
            pack=placement.num_shards == 1,
            rates=rates_of(options.devices[0]),
            speeds=placement.speeds,
            # those that differ from the widest rank's, which the shapes in the loss name too
            axes=axes if any(own.devices != options.axes.devices for own in axes) else None,
        )
        return cut(loss, cuts, owner, replace(made, **known))

    def merge(
        self,
        loss: TracedLoss,
        loss_fn: LossFn,
        variables: Sequence[Tree],
        microbatch: Batch,
        key: Key | None,
        given: Microbatches | None = None,
    ) -> "Merge":
        """How the losses and aux values of the microbatches, if not split off a batch those ``given``, become those of the step."""
        options, own = self.options, loss_fn == self.options.loss_fn
        count = (options.schedule.num_microbatches if given is None else len(given)) * options.placement.num_replicas
        summed, automatic = options.reduction == "sum", options.weight == "auto"
        size = num_examples(jax.tree.leaves(microbatch), loss.shared)
        many = count > 1 and options.examined
        alone = not many and not automatic  # a weight is asked again of later steps of more microbatches
        weight, remarks = options.weight if callable(options.weight) else None, list[str]()
        trial = None if alone else self._trial(loss, loss_fn, variables, microbatch, key, max(count, 2))
        verdict = judge(trial.loss, trial.examples.loss) if isinstance(trial, _Trial) and loss.is_loss else None
        divisor = verdict.divisor if automatic and verdict is not None and verdict.what == "count" else None
        examples = trial.examples if isinstance(trial, _Trial) else Examples.by_shape(loss, size)
        given_weights = given is not None and given.weights is not None
        unknown = trial if isinstance(trial, str) and count > 1 and not given_weights else ""
        if unknown and automatic and loss.is_loss:
            rule = "the count that the loss divides by is found by comparing the loss at batches of two sizes"
            raise LossError('weight="auto"', rule, unknown, "pass weight=lambda batch: ..., what a microbatch counts")
        reducers, mixing = reducers_of(loss, options.reduce_aux, examples, strict=own, summed=summed, divisor=divisor, why=unknown)
        if trial is None or not loss.is_loss:
            return Merge(reducers, None, weight, whole=count == 1)
        whole = isinstance(trial, _Trial) and trial.whole and divisor is not None
        if divisor is not None:
            weight = _Counted(self, loss_fn, tuple(variables), key)
        elif isinstance(trial, _Trial) and verdict is not None:
            whole = trial.whole and verdict.what == options.reduction and weight is None
            one_by_one = trial.sizes == (1, 1)  # there is no function of more examples from which the step could differ
            if count > 1 and not one_by_one and not given_weights and (weight is None or verdict.what == "mixed"):
                told = advice(trial.loss, verdict, count, options.reduction, loss.batch_leaves, automatic=automatic, own=own)
                remarks += [told] if told else []
        elif unknown:
            remarks.append(unexamined(unknown, count, options.reduction, own=own))
        what = examples.impure or (self.changed(loss_fn, variables, microbatch, key) if remarks else None)
        remarks = remarks if what is None else [impure(what)]
        if mixing and count > 1 and not callable(options.weight):
            shown = [f"{each.leaf}: {each.what}; the step has {_HAS[each.joined]}" for each in mixing[:4]]
            got = "\n       ".join(shown + [f"and {len(mixing) - 4} more"] * (len(mixing) > 4))
            rule = f"what these values are of the whole batch cannot be told from those of its {count} microbatches"
            same, first = "join" if mixing[0].joined else "mean", mixing[0]
            fix = f"pass {reducing(first.path, same)} if that is what you want, {reducing(first.path, 'stack')} for the value of "
            fix += "each microbatch" + ", and so on for the others" * (len(mixing) > 1) + "; or num_microbatches=1"
            remarks.append(f"aux: {rule}.\n  Got: {got}.\n  Fix: {fix if own else WHOLE_THERE}.")
        return Merge(reducers, MicrobatchWarning("\n".join(remarks)) if remarks else None, weight, whole)

    def changed(self, loss_fn: LossFn, variables: Sequence[Tree], microbatch: Batch, key: Key | None) -> str | None:
        """What is another each time a loss is traced, at the shapes of a microbatch; None if nothing is, as should be."""
        return changed(*(self.trace(loss_fn, variables, microbatch, key, train=False) for _ in range(2)))

    def _trial(
        self,
        loss: TracedLoss,
        loss_fn: LossFn,
        variables: Sequence[Tree],
        microbatch: Batch,
        key: Key | None,
        count: int,
        axes: RankAxes | None = None,
    ) -> "_Trial | str":
        """What the loss does with the examples, from its traces at two batch sizes; or why that cannot be known.

        The first sizes are those of a microbatch and of a whole batch. A loss that cannot be traced at one of these, such as a
        model for one size, is compared at other sizes. Of a loss that can, but is another list of equations at each, nobody knows
        what microbatches make, unless it is seen at other sizes that they change it. One that takes a single example at a time, as
        a decoder with a cache of one sequence does, cannot mix examples, and there is no other function of the whole batch.
        """
        size = num_examples(jax.tree.leaves(microbatch), loss.shared)
        if is_ragged(jax.tree.leaves(microbatch), loss.shared):
            return "the arrays of a microbatch have different numbers of rows"
        traces = _Traces(
            lambda avals, raised: self.trace(loss_fn, variables, avals, key, train=False, axes=axes, raised=raised),
            lambda other: resized(microbatch, other, loss.shared),
            {size: loss} if size > 1 else {},  # with one example, axes of length one would be taken for others
            {},
        )
        ends, reason = (max(size, 2), max(count * size, 3)), ""
        sizes = [each * size for each in range(1, 5) if each * size > 1]
        for pair in dict.fromkeys((ends, *itertools.combinations(sizes, 2))):
            try:
                examples = traces.compared(*pair)
            except Incomparable as error:
                reason = reason or str(error)
                continue
            trial = _Trial(traces.known[pair[0]], examples, pair, whole=pair == ends)
            changes = loss.is_loss and judge(trial.loss, examples.loss).what == "mixed"  # known to be what microbatches change
            if trial.whole or not traces.failed.keys().isdisjoint(ends) or changes:
                return trial
            break  # it may be another function at the sizes that are needed
        if size == 1 and not traces.known and all(aval_of(atom).shape[:1] == (1,) for atom in loss.aux):
            return _Trial(loss, Examples.by_shape(loss, 1), (1, 1), whole=False)
        return reason


_HAS = {True: "the rows of all microbatches", False: "the mean over the microbatches"}  # by whether they are joined


class _Traces(NamedTuple):
    """A loss traced at batches of several sizes."""

    trace: Callable[[Batch, list[Exception]], TracedLoss]  # of these shapes; the list is for what the loss raises
    avals: Callable[[int], Batch]  # of a batch of so many examples
    known: dict[int, TracedLoss]
    failed: dict[int, str]  # what it raises at which size

    def at(self, size: int) -> TracedLoss:
        """A new trace; Incomparable if the loss cannot be traced at that size."""
        raised: list[Exception] = []
        try:
            return self.trace(self.avals(size), raised)
        except Exception as error:
            if not isinstance(error, JaxppError) and not any(error is each for each in raised):
                raise  # which is no word of the user's function about the size, nor ours about its result
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failed[size] = f"with {size} examples in a batch it raises {said}"
            raise Incomparable(self.failed[size]) from error

    def compared(self, first: int, second: int) -> Examples:
        """What the loss does with the examples, by its traces at two sizes."""
        for size in (first, second):
            if size in self.failed:
                raise Incomparable(self.failed[size])
            if size not in self.known:
                self.known[size] = self.at(size)
        return follow(self.known[first], self.known[second], (first, second), lambda: self.at(first))


def _noting(loss_fn: LossFn, raised: list[Exception]) -> LossFn:
    """The loss, of which what it raises is added to a list."""

    def noting(*args: Tree) -> Tree:
        try:
            return loss_fn(*args)
        except Exception as error:
            raised.append(error)
            raise

    return noting


class _Trial(NamedTuple):
    """What a loss does with the examples, and its trace at the first of two sizes."""

    loss: TracedLoss
    examples: Examples
    sizes: tuple[int, int]
    whole: bool  # whether the sizes were those of a microbatch and of the whole batch


class Merge(NamedTuple):
    """How the losses and aux values of the microbatches become those of the step."""

    reducers: Mapping[int, Reducer]  # of the aux leaves that are not averaged
    warning: MicrobatchWarning | None  # where that is not what the loss says of the whole batch
    weight: Callable[[Batch], Any] | None  # of a microbatch; None: the number of its examples
    whole: bool  # whether the loss of the step is known to be that of the whole batch


class _Found(NamedTuple):
    """The count that a loss divides by, at microbatches of one shape."""

    loss: TracedLoss
    repeated: int  # how often a microbatch is in the batch of the trace
    divisor: Count
    degree: int  # of the sum that is divided
    shared: bool  # whether the weights must add up to 1


@dataclass(frozen=True)
class _Counted:
    """``weight="auto"``: the count that a loss divides by, as a function of a microbatch; and the shares of all microbatches.

    The loss of the whole batch is the sum S of what the examples have, times a function h of the count C. Of a microbatch it is
    S_i h(C_i), so its share is h(C) / h(C_i), whatever the guards in h; and none where h(C_i) is not finite, since nothing counts.
    """

    tracing: Tracing
    loss_fn: LossFn
    variables: tuple[Tree, ...]
    key: Key | None
    known: "dict[Hashable, _Found]" = field(default_factory=dict)  # by the shapes of a microbatch

    def _find(self, batch: Batch) -> _Found:
        name = shapes_key(batch, None)
        if name not in self.known:
            tracing, given = self.tracing, (self.loss_fn, self.variables, batch, self.key)
            loss = tracing.trace(*given, train=False, axes=ONE_DEVICE)
            trial = tracing._trial(loss, *given, 2, ONE_DEVICE)
            verdict = None if isinstance(trial, str) else judge(trial.loss, trial.examples.loss)
            if isinstance(trial, str) or verdict is None or verdict.what != "count" or verdict.divisor is None:
                rule = "the count that the loss divides by is found in microbatches of every shape, or it weighs none"
                got = f"none in microbatches of {', '.join(describe(leaf) for leaf in jax.tree.leaves(batch))}"
                raise LossError('weight="auto"', rule, got, "pass weight=lambda batch: ..., what a microbatch counts")
            repeated = trial.sizes[0] // num_examples(jax.tree.leaves(batch), loss.shared)
            self.known[name] = _Found(trial.loss, repeated, verdict.divisor, verdict.degree, verdict.shared)
        return self.known[name]

    def __call__(self, batch: Batch) -> jax.Array:
        """What a microbatch counts, as if the loss were not divided by the number of examples."""
        found = self._find(batch_avals(batch))
        loss, var = found.loss, found.divisor.var
        assert var, "a divisor is looked for where it has a variable"
        graph, needed = loss.graph, ancestors(loss.graph, [var])
        eqns = [i for i, eqn in enumerate(graph.eqns) if not needed.isdisjoint(eqn.outvars)]
        constants = [constant for constant in graph.constants if constant in needed]
        run = graph.function(eqns, [*loss.batch, *constants], [var])
        leaves = [jnp.asarray(leaf, aval_of(var).dtype) for leaf, var in zip(jax.tree.leaves(batch), loss.batch, strict=True)]
        size = num_examples(leaves, loss.shared) * found.repeated
        leaves = [leaf if k in loss.shared else jnp.concatenate([leaf] * found.repeated) for k, leaf in enumerate(leaves)]
        (count,) = run(*leaves, *(graph.constants[constant] for constant in constants))
        return count.reshape(()).astype(scale_dtype()) * float(size) ** -(found.divisor.degree or 0) / found.repeated

    def shares(self, pieces: Sequence[Batch], counted: Sequence[bool]) -> jax.Array:
        """The share that each microbatch's loss has in that of the whole batch; none where it is not ``counted``."""
        found = [self._find(batch_avals(piece)) for piece in pieces]
        counts = jnp.where(jnp.asarray(counted), jnp.stack([self(piece) for piece in pieces]), 0)
        if found[0].shared:
            return counts / counts.sum()
        sizes = [float(num_examples(jax.tree.leaves(piece), each.loss.shared)) for piece, each in zip(pieces, found, strict=True)]

        def scale(each: _Found, count: jax.Array, size: float) -> jax.Array:
            return factor_of(each.loss.graph, each.divisor)(count * size ** (each.divisor.degree or 0)) * size**each.degree

        whole = scale(found[0], counts.sum(), sum(size for size, counts in zip(sizes, counted, strict=True) if counts))
        parts = jnp.stack([scale(*each) for each in zip(found, counts, sizes, strict=True)])
        return jnp.where(jnp.asarray(counted) & (parts != 0) & jnp.isfinite(parts), whole / parts, 0)
