"""The user's loss traced as the options say, at any shapes and for any of the losses that a pipeline is given."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.errors import ArgumentError, LossError, shown
from jaxpp.options import Options
from jaxpp.runtime.compile import trace_context
from jaxpp.runtime.place import axes_in
from jaxpp.stages.axes import ONE_DEVICE, RankAxes
from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.cuts.cut_loss import CutLoss, cut
from jaxpp.stages.estimate import rates_of
from jaxpp.stages.graph import ancestors
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.stages.loss.aux import Reducer, reducers_of
from jaxpp.stages.loss.example_axis import Examples, MicrobatchWarning, advice, follow, judge, place_of
from jaxpp.stages.loss.microbatch import Microbatches, batch_avals, num_examples, resized, shared_leaves
from jaxpp.stages.loss.rng_key import KeyArgument, key_argument, name_of
from jaxpp.stages.loss.traced_loss import TracedLoss, in_order_of, trace_loss
from jaxpp.types import Batch, Key, Leaf, LossFn, Tree


def avals_of(tree: Tree) -> Tree:
    """The tree of shapes and dtypes, as a traced function sees them (Python scalars and 64-bit NumPy included)."""

    def aval(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))

    return jax.tree.map(aval, tree)


def same_shapes(known: Tree, tree: Tree) -> bool:
    """Whether a tree has the structure, shapes and dtypes of a known one."""
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
    """Shape and dtype as a traced function sees them; a leaf that has none is refused later."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
        return None
    aval = batch_avals(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def check_key(key: Any) -> None:
    """Refuse what is no PRNG key, or several: one key, typed or raw, or its shape, or None."""
    if key is None:
        return
    rule, fix = "a key is an array made by jax.random.key", "pass jax.random.key(seed)"
    if not (hasattr(key, "dtype") and hasattr(key, "shape")):
        raise ArgumentError("key", rule, f"{type(key).__name__} {shown(key)}", fix)
    found = key
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:  # a raw key has the shape and the type of JAX's default
            found = jax.eval_shape(jax.random.wrap_key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))
        except TypeError:
            raise ArgumentError("key", rule, describe(key), fix) from None
    if found.shape:
        rule = "a key is one key, from which those of microbatches, batches and sequences are folded"
        raise ArgumentError("key", rule, describe(key), fix)


def raw_key(key: Key) -> jax.Array:
    """A key as the array of integers that programs take."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


class Tracing:
    """Traces losses, and cuts them, as the options say; nobody wants the gradient of the ``frozen`` parameter leaves.

    With the ``owner`` of each parameter leaf, equations run in the order of these stages, as far as they can.
    """

    def __init__(self, options: Options, frozen: frozenset[int] = frozenset(), owner: tuple[int, ...] = ()):
        self.options, self.frozen, self.owner = options, frozen, owner

    def _key_argument(self, loss_fn: LossFn) -> KeyArgument:
        return key_argument(loss_fn, 2 + self.options.has_state)

    def takes_key(self, variables: Sequence[Tree], batch: Batch) -> bool:
        """Whether the loss takes a key. A loss with ``*args`` is tried."""
        found = self._key_argument(self.options.loss_fn)
        if found.sure or found.name:
            return found.sure and found.name is not None
        try:
            self.options.axes.shapes(self.options.loss_fn, *variables, batch, jax.random.key(0))
        except Exception as error:  # noqa: BLE001  (whatever else is wrong is said when it is traced)
            return not isinstance(error, TypeError)
        return True

    def key_for(self, variables: Sequence[Tree], batch: Batch, key: Key | None = None) -> Key | None:
        """The key that the loss is traced with: ``key``, ``jax.random.key(0)`` unless given; None if the loss takes none."""
        return (jax.random.key(0) if key is None else key) if self.takes_key(variables, batch) else None

    def check_key_taken(self, loss_fn: LossFn, key: Key | None) -> None:
        """Refuse what is no key, a key for a loss, or another function, that takes none, and no key for one that needs it."""
        check_key(key)
        found, noun = self._key_argument(loss_fn), "loss" if self.options.is_loss else "function"
        if key is not None and found.sure and found.name is None:
            rule, fix = f"a key is for a {noun} that takes one", f"leave it out, or give the {noun} one more parameter"
            raise ArgumentError("key", rule, f"a key, and {name_of(loss_fn)}", fix)
        if key is None and found.needed:
            fix = f"pass one, such as jax.random.key(0); or write {found.name}=None in the {noun}, where it can do without"
            rule = f"a {noun} that takes a key is given one at each call"
            raise ArgumentError("key", rule, f"no key, and {name_of(loss_fn)}", fix)

    def shared(self, batch: Batch) -> frozenset[int]:
        """The batch leaves that every microbatch gets whole."""
        return shared_leaves(batch, self.options.shared)

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
    ) -> TracedLoss:
        """A loss over the pipeline's parameters traced at a microbatch's shapes; ``train``: to be differentiated, the default.

        ``axes``: of where it is to run, a rank unless given.
        """
        params, *state = variables
        train = self.options.is_loss if train is None else train
        has_aux = self.options.has_aux if loss_fn == self.options.loss_fn else None
        options = {"has_aux": has_aux, "differentiable": train, "frozen": self.frozen, "per_layer": per_layer}
        options |= {"shared": self.shared(microbatch), "is_loss": self.options.is_loss, "axes": axes or self.options.axes}
        traced = trace_loss(loss_fn, params, microbatch, key, model_state=state[0] if state else None, **options)
        return in_order_of(traced, self.owner) if self.owner and not per_layer else traced

    def cut(self, loss: TracedLoss, cuts: Cuts, owner: Sequence[int], reducers: Mapping[int, Reducer], **known: Any) -> CutLoss:
        """A traced loss as the programs of its stages."""
        options = self.options
        scaled_by = None if options.loss_scale is None else options.loss_scale.scale
        placement = options.placement
        given: dict[str, Any] = {"remat": options.remat, "cut_gradient": options.cut_gradient, "scaled_by": scaled_by}
        given |= {
            "pack": placement.num_shards == 1,
            "train": options.is_loss,
            "rates": rates_of(options.devices[0]),
            "speeds": placement.speeds,
        }
        axes = [axes_in(place) for place in placement.places]
        if any(own.devices != options.axes.devices for own in axes):  # which the shapes in the loss name too
            given["axes"] = axes
        return cut(loss, cuts, owner, reducers=reducers, **(given | known))

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
        alone = count == 1 and not automatic  # a weight is asked again of later steps of more microbatches
        trial = None if alone else self._trial(loss, loss_fn, variables, microbatch, key, max(count, 2))
        examples = Examples.by_shape(loss, size) if trial is None else trial.examples
        reducers, mixing = reducers_of(loss, options.reduce_aux, lambda: examples, strict=own, summed=summed)
        weight = options.weight if callable(options.weight) else None
        if trial is None or not loss.is_loss:
            return Merge(reducers, None, weight, whole=count == 1)
        verdict, remarks = judge(trial.loss, examples.loss), list[str]()
        whole = trial.whole and verdict.what == options.reduction and weight is None
        if automatic and verdict.what == "count" and verdict.divisor is not None and verdict.divisor.var is not None:
            whole, weight = trial.whole, _Counted(self, loss_fn, tuple(variables), key)
        elif count > 1 and (given is None or given.weights is None) and (not callable(options.weight) or verdict.what == "mixed"):
            paths = jax.tree_util.tree_leaves_with_path(microbatch)
            leaves = [f"batch{jax.tree_util.keystr(path)}" for path, _ in paths]
            told = advice(trial.loss, verdict, count, options.reduction, leaves)
            remarks = [told] if told else []
        if mixing and count > 1 and not callable(options.weight):
            got = "\n       ".join(mixing[:4])
            fix = 'say what becomes of it, for example reduce_aux={"<path>": "stack"}, or pass num_microbatches=1'
            remarks.append(
                f"aux: the step has the rows of {count} microbatches, or the mean over them.\n  Got: {got}.\n  Fix: {fix}."
            )
        return Merge(reducers, MicrobatchWarning("\n".join(remarks)) if remarks else None, weight, whole)

    def _trial(
        self, loss: TracedLoss, loss_fn: LossFn, variables: Sequence[Tree], microbatch: Batch, key: Key | None, count: int
    ) -> "_Trial | None":
        """What the loss does with the examples, from its traces at two batch sizes; None for a model that takes one size only.

        The first sizes are those of a microbatch and of a whole batch. Equations that depend on the size are compared at others.
        """
        size = num_examples(jax.tree.leaves(microbatch), loss.shared)
        known = {size: loss} if size > 1 else {}  # with one example, axes of length one would be taken for others
        pairs = (max(size, 2), max(count * size, 3)), (size, 2 * size), (2 * size, 3 * size)
        for first, second in (pair for pair in dict.fromkeys(pairs) if pair[0] > 1):
            try:
                for other in {first, second} - known.keys():
                    known[other] = self.trace(loss_fn, variables, resized(microbatch, other, loss.shared), key, train=False)
            except Exception:  # noqa: BLE001  (what the model says of other sizes is nothing that the user did)
                return None
            if (examples := follow(known[first], known[second], (first, second))) is not None:
                return _Trial(known[first], examples, whole=(first, second) == pairs[0])
        return None


class _Trial(NamedTuple):
    """What a loss does with the examples, and its trace at the first of two sizes."""

    loss: TracedLoss
    examples: Examples
    whole: bool  # whether the sizes were those of a microbatch and of the whole batch


class Merge(NamedTuple):
    """How the losses and aux values of the microbatches become those of the step."""

    reducers: Mapping[int, Reducer]  # of the aux leaves that are not averaged
    warning: MicrobatchWarning | None  # where that is not what the loss says of the whole batch
    weight: Callable[[Batch], Any] | None  # of a microbatch; None: the number of its examples
    whole: bool  # whether the loss of the step is known to be that of the whole batch


@dataclass(frozen=True)
class _Counted:
    """``weight="auto"``: the count that a loss divides by, as a function of a microbatch."""

    tracing: Tracing
    loss_fn: LossFn
    variables: tuple[Tree, ...]
    key: Key | None
    known: "dict[Hashable, tuple[int, int, int]]" = field(default_factory=dict)  # where it is, by the shapes of a microbatch

    def _find(self, batch: Batch) -> tuple[int, int, int]:
        """Which result of which equation it is, and of how many powers of the number of examples the loss has it as a multiple."""
        loss = self.tracing.trace(self.loss_fn, self.variables, batch, self.key, train=False)
        trial = self.tracing._trial(loss, self.loss_fn, self.variables, batch, self.key, 2)
        verdict = None if trial is None else judge(trial.loss, trial.examples.loss)
        if trial is None or verdict is None or verdict.what != "count" or verdict.divisor is None or verdict.divisor.var is None:
            rule = "the count that the loss divides by is found in microbatches of every shape, or it weighs none"
            got = f"none in microbatches of {', '.join(describe(leaf) for leaf in jax.tree.leaves(batch))}"
            raise LossError('weight="auto"', rule, got, "pass weight=lambda batch: ..., what a microbatch counts")
        return *place_of(trial.loss.graph, verdict.divisor.var), verdict.divisor.degree or 0

    def __call__(self, batch: Batch) -> jax.Array:
        shapes = batch_avals(batch)
        name = shapes_key(shapes, None)
        if name not in self.known:
            self.known[name] = self._find(shapes)
        i, k, degree = self.known[name]
        loss = self.tracing.trace(self.loss_fn, self.variables, shapes, self.key, train=False, axes=ONE_DEVICE)
        graph = loss.graph
        var = graph.eqns[i].outvars[k]
        needed = ancestors(graph, [var])
        eqns = [i for i, eqn in enumerate(graph.eqns) if not needed.isdisjoint(eqn.outvars)]
        constants = [constant for constant in graph.constants if constant in needed]
        run = graph.function(eqns, [*loss.batch, *constants], [var])
        leaves = [jnp.asarray(leaf, aval_of(var).dtype) for leaf, var in zip(jax.tree.leaves(batch), loss.batch, strict=True)]
        (count,) = run(*leaves, *(graph.constants[constant] for constant in constants))
        return count * float(num_examples(leaves, loss.shared)) ** -degree
