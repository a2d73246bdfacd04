"""The single-device oracle, and the comparison with it, leaf by leaf.

The oracle is the definition of a step: the loop over microbatches with ``jax.value_and_grad`` on one device, microbatch i with
``jax.random.fold_in(key, i)``, loss and gradient averaged with the microbatches' weights.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.typing import ArrayLike
from jaxtyping import Float

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import Outcome
from jaxpp.engine.state import State, states_of
from jaxpp.errors import BatchError, VerifyError
from jaxpp.lowering.microbatch_weights import Sharing
from jaxpp.lowering.step import Leaves
from jaxpp.optim.owners import part_of, updated
from jaxpp.runtime.edges import check_alive, put
from jaxpp.runtime.processes.channel import agreement, raise_alike
from jaxpp.runtime.processes.trees import gather
from jaxpp.stages.cost import coarsest_dtype
from jaxpp.stages.floating import filled, floating, has_gradient, masked, with_others
from jaxpp.stages.graph import trace
from jaxpp.stages.jaxpr import Atom, aval_of, has_kink, kind_of
from jaxpp.stages.loss.aux import Reducer, average_of_examples
from jaxpp.stages.loss.example_axis import IMPURE, PURE
from jaxpp.stages.loss.microbatch import (
    Microbatches,
    batch_avals,
    first_of,
    num_examples,
    resized,
    scale_dtype,
    shared_leaves,
    sizes,
    slice_batch,
)
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.loss.traced_loss import TracedLoss, path_name
from jaxpp.stages.own_params import Joint
from jaxpp.stages.stacked import assembled, on_host
from jaxpp.types import Arguments, Array, Batch, DType, Grads, Key, Leaf, LossFn, Params, Tree

_UPDATED = "the update equals plain optax's of these gradients, leaf by leaf"
GRAD_FLOOR = 0.01  # a gradient smaller than this part of the largest one is compared as if it had that size
COARSE_FLOOR = 0.1  # the same for losses with fewer digits than float32's: their noise is larger beside what is allowed
_REPORT = "look at the stage that owns this leaf (print(pipe.stages)); if nothing was changed there, please report it"
_FIXES = {
    False: _REPORT,
    True: "verify in float64 (jax_enable_x64, parameters and batch too), since a relu or another comparison of numbers that "
    f"are nearly equal may fall to its other side where a program rounds otherwise; if it differs there too, {_REPORT}",
}
"""What to do about a leaf that differs, by whether the loss compares floating numbers."""

_NOISE = 8  # how many times what a change of the parameters' last digits does to a gradient is still rounding


@dataclass(frozen=True)
class Accumulation:
    """How a step is made of its microbatches, as far as the user decides that."""

    has_aux: bool = False
    has_state: bool = False
    weight: Callable[[Batch], ArrayLike] | Sharing | None = None  # of a microbatch; None: the number of its examples
    reduction: str = "mean"
    reducers: Mapping[int, Reducer] | None = None  # of the aux leaves that are not averaged, by number
    loss_scale: ArrayLike = 1.0
    num_replicas: int = 1
    groups: Sequence[Sequence[int]] = ()  # the replicas of each task; the loss is then over a ``Joint``
    broadcast: Sequence[str] = ()
    together: Sequence[tuple[str, int]] = ()  # axes of which the loss has collectives between replicas: their names and sizes

    def differentiated(self, loss_fn: LossFn) -> Callable[..., tuple[Array, Tree, Grads]]:
        """``(loss, aux, grads)`` of a microbatch, by the floating leaves; the aux of a loss with a state has the new one first."""

        @jax.jit
        def step(params: Params, *rest: Tree) -> tuple[Array, Tree, Grads]:
            def pair(seen: Params) -> tuple[Array, Tree]:
                own = jax.tree.map(lambda leaf: leaf, rest)  # of this trace, in which NNX lets a model change its variables
                result = loss_fn(with_others(seen, params), *own)
                return result if self.has_aux or self.has_state else (result, ())

            loss, pullback, aux = jax.vjp(pair, floating(params), has_aux=True)
            return loss, aux, pullback(jnp.asarray(self.loss_scale, loss.dtype))[0]

        return step

    def microbatches(self, batch: Batch, count: int) -> tuple[list[Batch], Sequence[int]]:
        """The microbatches, those of the first replica first, and how many examples each has."""
        replicas = range(self.num_replicas)
        if isinstance(batch, Microbatches):
            pieces = [piece for r in replicas for piece in (_part(part, self.broadcast, self.num_replicas, r) for part in batch)]
            return pieces, [num_examples(jax.tree.leaves(piece), shared_leaves(piece, self.broadcast)) for piece in pieces]
        leaves, tree = jax.tree.flatten(batch)
        whole = shared_leaves(batch, self.broadcast)
        parts = sizes(num_examples(leaves, whole) // self.num_replicas, count) * self.num_replicas
        return [tree.unflatten(piece) for piece in slice_batch(leaves, parts, whole)], parts

    def shares(self, batch: Batch, pieces: Sequence[Batch], parts: Sequence[int]) -> Float[Array, " microbatches"]:
        """The share that each microbatch has in the mean."""
        if isinstance(batch, Microbatches) and batch.weights is not None:
            weights = jnp.tile(jnp.asarray(batch.weights, scale_dtype()), self.num_replicas)
        elif isinstance(self.weight, Sharing):
            return self.weight.shares(pieces, [True] * len(pieces))
        else:
            weights = jnp.asarray(parts if self.weight is None else [self.weight(piece) for piece in pieces], scale_dtype())
        return weights / weights.sum()


def oracle(
    loss_fn: LossFn, params: Params, batch: Batch, key: Key | None, num_microbatches: int, *, model_state: Tree = None, **rules: Any
) -> tuple[Tree, ...]:
    """``(loss, aux, grads)`` of a step, and the new model state if there is one, computed on the devices where ``params`` live.

    As for ``jaxpp.value_and_grad``, but leaves without a gradient have ``optax.MaskedNode`` for it. Microbatches of replica r are
    numbered from ``r * num_microbatches``; each replica has its own model state, and after the step all have the mean. With groups
    among the ``rules`` (``Accumulation``), ``params`` and the gradients are lists with a tree for each replica.
    """
    rule = Accumulation(has_state=model_state is not None, **rules)
    count = len(batch) if isinstance(batch, Microbatches) else num_microbatches
    pieces, parts = rule.microbatches(batch, count)
    shares = rule.shares(batch, pieces, parts)
    scales, skips = shares if rule.reduction == "mean" else jnp.ones_like(shares), rule.weight is not None
    step = rule.differentiated(positional_key(loss_fn, 2 + rule.has_state))
    each = params if rule.groups else [params] * rule.num_replicas
    states = [model_state] * rule.num_replicas
    found: dict[int, tuple[Array, Tree, Grads]] = {}
    for m in range(count):
        numbers = range(m, len(pieces), count)  # of the microbatch of each replica
        keys = [[] if key is None else [jax.random.fold_in(key, i)] for i in numbers]
        before = [[state] if rule.has_state else [] for state in states]
        rows = [(*state, pieces[i], *own) for state, i, own in zip(before, numbers, keys, strict=True)]
        if rule.together:
            done = _side_by_side(functools.partial(step, params), rows, rule.together)
        else:
            done = [step(own, *row) for own, row in zip(each, rows, strict=True)]
        done = jax.block_until_ready(done)  # CPU devices lack the threads for several programs, each of which runs on all of them
        for replica, (i, (value, extra, grad)) in enumerate(zip(numbers, done, strict=True)):
            states[replica], aux = extra if rule.has_state else (None, extra)
            share, own = jax.tree.map(lambda leaf, scale=scales[i]: _scaled(scale, leaf, skips=skips), (value, grad))
            found[i] = share, aux, own
    losses, auxes, grads = zip(*(found[i] for i in range(len(pieces))), strict=True)
    sized = jnp.asarray(parts, scale_dtype()) / sum(parts)
    order = sorted(range(len(pieces)), key=lambda i: i % count if isinstance(batch, Microbatches) else i)  # that of the batch
    ordered = shares[jnp.asarray(order)], sized[jnp.asarray(order)]
    aux = _merge_aux([auxes[i] for i in order], *ordered, rule.reducers or {}, skips=skips)
    total = _by_task(grads, None if rule.reduction == "sum" else scales, rule.groups, count) if rule.groups else _sum(grads)
    return _sum(losses), aux, total, *([jax.tree.map(_mean_or_first, *states)] if rule.has_state else [])


def _value_and_grad(loss_fn: LossFn, *, has_aux: bool) -> Callable[[Params, Batch], tuple[Tree, Grads]]:
    """``jax.value_and_grad`` by the floating leaves."""

    def differentiated(params: Params, batch: Batch) -> tuple[Tree, Grads]:
        run = jax.value_and_grad(lambda seen: loss_fn(with_others(seen, params), batch), has_aux=has_aux)
        return run(floating(params))

    return differentiated


def _part(batch: Batch, shared: Sequence[str], num_replicas: int, replica: int) -> Batch:
    """The rows of a microbatch that a replica has."""
    if num_replicas == 1:
        return batch
    leaves, tree = jax.tree.flatten(batch)
    whole = shared_leaves(batch, shared)
    parts = (num_examples(leaves, whole) // num_replicas,) * num_replicas
    return tree.unflatten(slice_batch(leaves, parts, whole)[replica])


def _mean_or_first(first: Array, *others: Array) -> Array:
    """A model state leaf after a step, from those of the replicas: the mean; of what is no floating number the first."""
    return jnp.stack([first, *others]).mean(0).astype(first.dtype) if _inexact(first.dtype) and others else first


def _side_by_side(step: Callable[..., Tree], rows: Sequence[Tree], axes: Sequence[tuple[str, int]]) -> list[Tree]:
    """A function of each row, which communicates along axes of these names and sizes."""
    counts = tuple(size for _, size in axes)
    for name, _ in reversed(axes):
        step = jax.vmap(step, axis_name=name)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    results = step(*jax.tree.map(lambda leaf: leaf.reshape(*counts, *leaf.shape[1:]), stacked))
    return [jax.tree.map(lambda leaf, r=r: leaf[np.unravel_index(r, counts)], results) for r in range(len(rows))]


def _sum(trees: Sequence[Tree]) -> Tree:
    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def _by_task(grads: Sequence[Grads], scales: Array | None, groups: Sequence[Sequence[int]], count: int) -> list[Grads]:
    """For each replica the gradient of Theta, over all, and that of its task, the mean over the replicas that ran it, or sum."""
    shared, found = _sum([grad.shared for grad in grads]), {}
    for group in groups:
        mine = [i for r in group for i in range(r * count, (r + 1) * count)]
        share = 1.0 if scales is None else sum(scales[i] for i in mine)
        total = _sum([grads[i].task for i in mine])
        mean = jax.tree.map(lambda leaf, share=share: (leaf / share).astype(leaf.dtype), total)
        found |= dict.fromkeys(group, mean)
    return [Joint(shared, found[r]) for r in sorted(found)]


def _scaled(scale: Array, leaf: Array, dtype: DType | None = None, *, skips: bool) -> Array:
    """A value times a scale; nothing of a microbatch of weight 0, if these are left out (``skips``)."""
    dtype = leaf.dtype if dtype is None else dtype
    return scale.astype(dtype) * (jnp.where(scale == 0, jnp.zeros_like(leaf), leaf) if skips else leaf)


def _merge_aux(
    auxes: Sequence[Tree],
    scales: Float[Array, " microbatches"],
    sized: Float[Array, " microbatches"],
    reducers: Mapping[int, Reducer],
    *,
    skips: bool,
) -> Tree:
    merged = []
    for k, column in enumerate(zip(*map(jax.tree.leaves, auxes), strict=True)):
        if k in reducers:
            merged.append(reducers[k](column, sized if reducers[k] is average_of_examples else scales))
        else:
            dtype = column[0].dtype if _inexact(column[0].dtype) else scale_dtype()
            merged.append(sum(_scaled(scale, leaf, dtype, skips=skips) for scale, leaf in zip(scales, column, strict=True)))
    return jax.tree.structure(auxes[0]).unflatten(merged)


def tolerance(dtype: DType) -> float:
    """The relative error allowed: 1e-12 in float64, 1e-5 in float32, 8 units of rounding in smaller types."""
    name = np.dtype(dtype).name
    return {"float64": 1e-12, "float32": 1e-5}.get(name) or 8 * float(jnp.finfo(dtype).eps)


def compare(
    what: str,
    got: Tree,
    want: Tree,
    *,
    floor: float = 0.0,
    coarsest: DType = None,
    noise: Tree = None,
    summed: float = 0.0,
    kinks: bool = False,
) -> None:
    """Raise a VerifyError that names the first leaf of the pipeline's tree ``got`` that differs from the oracle's tree ``want``.

    Equal means ``max|a - b| <= tolerance * max(max|leaf|, floor * largest leaf)``: a gradient that is pure rounding noise (of an
    attention key's bias) has no size of its own to be relative to. ``coarsest`` is the floating type with the fewest digits that
    the leaves were computed with: a float32 gradient of a bfloat16 model has bfloat16's digits. ``noise`` is how far rounding may
    move each leaf (``noise_of``). ``summed`` is the size of the terms whose sum a leaf is, which it is relative to if they cancel.
    ``kinks`` says that what was computed compares floating numbers, as a ``relu`` does: then the message says how to tell an error
    from a number so near to zero that its sign hangs on rounding.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    wide = [(path, _wide(a), _wide(b), getattr(b, "dtype", None)) for (path, a), b in pairs]
    largest = max((_size(b) for _, _, b, dtype in wide if _inexact(dtype)), default=0.0)
    moved = [0.0] * len(wide) if noise is None else jax.tree.leaves(noise)
    for (path, a, b, dtype), moves in zip(wide, moved, strict=True):
        allowed = max(tolerance(kind) for kind in (dtype, coarsest) if kind is not None) if _inexact(dtype) else 0.0
        bound = max(allowed * max(_size(b), floor * largest, summed), moves)
        with np.errstate(invalid="ignore"):
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        error = np.where(np.isnan(error), np.inf, error)
        if error.max(initial=0.0) > bound:
            at = np.unravel_index(int(error.argmax()), a.shape)
            place = f"{what}{jax.tree_util.keystr(path)}"
            rule = f"the pipelined step must equal the single-device step, and {place} does not"
            values = f"pipelined {a[at].item()!r}, single device {b[at].item()!r}, at index {tuple(map(int, at))}"
            fix = _FIXES[kinks]
            raise VerifyError("verify", rule, [values, f"difference {error.max():.3g}, allowed {bound:.3g}"], fix)


@dataclass(frozen=True)
class Comparisons:
    """What a step was compared with, a line each, and found equal to."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


def verify_step(engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None) -> Comparisons:
    """Compare a step with the plain step on each process's first device, and leave the state as it is; all raise what one finds."""
    where, rule = "pipe.verify", "every process computes the plain step, and needs the whole batch for it"
    if engine.alone:
        read = engine.before_last(leaves)
        found = engine.run("grads", read, batch, key)
        compared = verify_grads(engine, read, batch, key, found)
        verify_update(engine, leaves, found, engine.run("update", leaves, batch, key, donate=False).state)
        return Comparisons((*compared, _UPDATED))
    with agreement(where, engine.options.devices) as agree:
        parts = jax.tree_util.tree_leaves_with_path(batch)
        shapes = [path_name(path) for path, leaf in parts if isinstance(leaf, jax.ShapeDtypeStruct)]
        if shapes:
            raise BatchError(where, rule, f"only the shape of {', '.join(shapes)}", "pass the arrays in every process")
        agree(dict)
    read = engine.before_last(leaves)
    found = engine.run("grads", read, batch, key)._replace(squares=())
    after = engine.run("update", leaves, batch, key, donate=False).state
    found, after, leaves, read, batch, key = gather((found, after, leaves, read, batch, key))
    compared = []

    def check() -> None:
        compared.extend(verify_grads(engine, read, batch, key, found))
        verify_update(engine, leaves, found, after)

    raise_alike(where, check, VerifyError)
    return Comparisons((*compared, _UPDATED))


def _anywhere(tree: Tree) -> Tree:
    """Arrays that go to the devices on which a function wants them."""
    check_alive("pipe.verify", state=tree)
    return jax.tree.map(on_host, tree)


def _on_one_device(tree: Tree) -> Tree:
    check_alive("pipe.verify", state=tree)
    device = jax.local_devices()[0]
    return jax.tree.map(lambda leaf: put(leaf, device), tree)


def verify_grads(engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, found: Outcome[Array]) -> list[str]:
    """Compare the loss, aux, gradients and model state that a pipeline found with the oracle's; return what was compared."""
    sharded = engine.preparer.step(batch, key).cuts[0].loss.graph.sharded
    with engine.options.axes.plain() if sharded else contextlib.nullcontext():
        plain = _Plain.of(engine, leaves, batch, key, found)
        try:
            return _compare_with(plain, engine, found, batch)
        except VerifyError as error:
            if (what := plain.changed()) is None:
                raise
            _, _, got, _, _ = error.parts
            raise VerifyError("verify", IMPURE, [what, *got], PURE) from error


def _compare_with(plain: "_Plain", engine: Engine, found: Outcome[Array], batch: Batch) -> list[str]:
    """Compare with the plain step; where the loss is known to be that of the whole batch, with that of the whole batch too."""
    loss, aux, grads, *new = plain.accumulated(plain.loss_fn, plain.params)
    plain.compare_loss(loss, lambda loss_fn: plain.accumulated(loss_fn, plain.params)[0])
    compare("aux", found.aux, aux, coarsest=plain.coarsest)
    plain.compare_grads(grads, lambda params: plain.accumulated(plain.loss_fn, params)[2])
    compare("model_state", _model_state_of(engine, found), *(new or [()]), coarsest=plain.coarsest)
    count = len(batch) if isinstance(batch, Microbatches) else engine.options.schedule.num_microbatches
    compared = [f"equals gradient accumulation on one device, {count} microbatch{'es' * (count != 1)}, leaf by leaf"]
    if reason := plain.no_whole():
        compared.append(f"not compared with the loss of the whole batch: {reason}")
    else:
        differentiated = jax.jit(_value_and_grad(plain.loss_fn, has_aux=engine.options.has_aux))
        value, grads = differentiated(plain.params, plain.batch)
        of_pair = operator.itemgetter(0) if engine.options.has_aux else lambda value: value
        plain.compare_loss(of_pair(value), lambda sizes: of_pair(jax.jit(sizes)(plain.params, plain.batch)))
        try:
            plain.compare_grads(grads, lambda params: differentiated(params, plain.batch)[1])
            compared.append("equals jax.value_and_grad of the whole batch on one device, leaf by leaf")
        except VerifyError as error:
            if plain.is_fine or plain.apart(grads) > tolerance(plain.coarsest):
                raise
            (_, rule, (values, _), *_), kind = error.parts, np.dtype(plain.coarsest).name
            differs = f"{rule.split(' and ')[-1].removesuffix(' does not')} {values.replace('single device', 'whole batch')}"
            because = f"its gradients are rounded otherwise, as sums over all examples are in {kind} here: of {differs}"
            compared.append(f"equals the loss of the whole batch on one device; {because}")
    # The gradients of a scaled loss may overflow; the step is then skipped, which is what is to be seen.
    _check_numbers({"loss": found.loss} | ({} if engine.options.loss_scale else {"grads": plain.spread}))
    return compared


@dataclass(frozen=True)
class _Plain:
    """The plain step of an engine's state, and the loss and gradients that the pipeline found for the same."""

    engine: Engine
    traced: TracedLoss
    loss_fn: LossFn
    params: Params  # with sets of a bank a tree for each replica
    batch: Batch
    key: Key | None
    rules: Arguments  # as ``oracle`` takes them
    loss: Array
    spread: Grads  # what the pipeline found, whole

    @classmethod
    def of(cls, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, found: Outcome[Array]) -> "_Plain":
        config, layout, state = engine.options, engine.layout, _state_of(engine, leaves)
        traced, spread = engine.preparer.step(batch, key).cuts[0].loss, _grads_of(engine, found)
        rules = {name: getattr(config, name) for name in ("has_aux", "reduction", "broadcast")}
        rules |= {"weight": layout.weight, "reducers": layout.reducers, "num_replicas": engine.placement.num_replicas}
        rules |= {"groups": engine.preparer.groups.current if engine.placed.per_replica else ()}
        rules |= {"together": traced.graph.communicates}
        place = _anywhere if traced.graph.sharded else _on_one_device
        params, old, batch, key = place((state.params, state.model_state, batch, key))
        rules |= {"model_state": old} if config.has_state else {}
        if config.loss_scale is not None:
            rules |= {"loss_scale": jax.device_get(jax.tree.leaves(state.loss_scale)[config.loss_scale.scale])}
        loss_fn = config.axes.untyped(config.loss_fn) if traced.graph.sharded else config.loss_fn
        params = _apart(params, engine) if rules["groups"] else params
        return cls(engine, traced, loss_fn, params, batch, key, rules, found.loss, spread)

    @cached_property
    def coarsest(self) -> DType:
        """Of the types that the loss computes with, the one with the fewest digits."""
        return coarsest_dtype(self._eqns())

    @property
    def is_fine(self) -> bool:
        """Whether the loss computes in float32 or better."""
        return jnp.finfo(self.coarsest).bits >= 32

    def apart(self, grads: Grads) -> float:
        """The norm of the difference of gradients over the norm of these.

        Only of leaves with two axes or more, if there are any: products add up in float32. Sums make the others, and lose digits.
        """
        pairs = zip(*map(jax.tree.leaves, (self.spread, self._whole(grads))), strict=True)
        wide = [(_wide(a), _wide(b)) for a, b in pairs]
        wide = [pair for pair in wide if pair[1].ndim > 1] or wide
        apart = sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in wide)
        size = sum(float(np.sum(np.abs(b) ** 2)) for _, b in wide)
        return float(np.sqrt(apart / size)) if size else float(apart > 0)

    def accumulated(self, loss_fn: LossFn, params: Params) -> tuple[Tree, ...]:
        return oracle(loss_fn, params, self.batch, self.key, self.engine.options.schedule.num_microbatches, **self.rules)

    def changed(self) -> str | None:
        """What is another each time the loss is traced, if it reads something that changes."""
        preparer, first = self.engine.preparer, first_of(self.batch)
        size, shared = preparer.step(self.batch, self.key).sizes[0], shared_leaves(first, self.engine.options.broadcast)
        microbatch = resized(batch_avals(first), size, shared)
        return preparer.tracing.changed(self.engine.options.loss_fn, self.engine.layout.variables, microbatch, self.key)

    def compare_loss(self, loss: Array, size: Callable[[LossFn], Array]) -> None:
        """Compare the loss; ``size`` computes that of another loss in the same way."""
        try:
            compare("loss", self.loss, loss, coarsest=self.coarsest)
        except VerifyError:  # do its terms cancel? Advantages that add up to 0 leave a loss of nothing but rounding
            summed = abs(float(size(_size_of_terms(self.loss_fn, has_state=self.engine.options.has_state))))
            compare("loss", self.loss, loss, coarsest=self.coarsest, summed=summed)

    def compare_grads(self, grads: Grads, again: Callable[[Params], Grads]) -> None:
        """Compare the gradients; ``again`` computes those at other parameters in the same way."""
        floor = GRAD_FLOOR if self.is_fine else COARSE_FLOOR
        alike = functools.partial(compare, "grads", self.spread, self._whole(grads), floor=floor, coarsest=self.coarsest)
        try:
            alike()
        except VerifyError:  # is it rounding? A bias before a batch normalisation has a gradient of nothing else
            noise = noise_of(lambda params: self._whole(again(params)), self.params, self._whole(grads))
            alike(noise=noise, kinks=any(map(has_kink, self._eqns())))

    def _eqns(self) -> Iterator[JaxprEqn]:
        """The equations that depend on parameters."""
        return (eqn for eqn in self.traced.graph.eqns if not self.traced.of_params.isdisjoint(eqn.outvars))

    def _whole(self, grads: Grads) -> Grads:
        """The gradients as the pipeline has them: those of replicas with rows, and zeros of frozen leaves."""
        leaves, tree = jax.tree.flatten(_together(grads) if self.rules["groups"] else grads)
        layout, frozen = self.engine.layout, set(self.traced.frozen)
        numbers = [k for k, shape in enumerate(jax.tree.leaves(layout.given[0])) if has_gradient(shape)]
        kept = [not frozen.issuperset(layout.slicing.leaves([k])) for k in numbers]
        return tree.unflatten(leaf if keep else jnp.zeros_like(leaf) for leaf, keep in zip(leaves, kept, strict=True))

    def no_whole(self) -> str:
        """Why the loss is not compared with that of the whole batch; empty if it is."""
        config = self.engine.options
        if self.traced.graph.communicates:
            return "it has collectives between replicas"
        if isinstance(self.batch, Microbatches):
            return "its microbatches were given one by one"
        if self.key is not None:
            return "its microbatches have random keys of their own"
        if not self.engine.preparer.is_whole(self.batch, self.key):
            return "its loss is not known to be a mean over the examples"
        special = config.has_state or config.loss_scale or self.rules["groups"]
        return "it has a model state, a loss scale or sets of a bank" if special else ""


def _size_of_terms(loss_fn: LossFn, *, has_state: bool) -> LossFn:
    """A loss like another one, of the size of the terms that it adds up: the sum of ``|term|`` for that of ``term``.

    The terms are the numbers that the last sum runs over, and what is added to that sum or divides it is taken into account. Where
    all terms have one sign, it is the loss's own size.
    """
    named = positional_key(loss_fn, 2 + has_state)

    def sizes(*args: Tree) -> Tree:
        graph, shapes = trace(named, *args)
        made = {var: graph.eqns[i] for var, i in graph.producers().items()}
        values = dict[Atom, Array]()

        def value(atom: Atom) -> Array:
            return atom.val if isinstance(atom, Literal) else values[atom]

        def size(atom: Atom) -> Array:
            eqn = None if isinstance(atom, Literal) else made.get(atom)
            kind = "" if eqn is None else kind_of(eqn)
            if eqn is None or aval_of(atom).shape:
                return jnp.abs(value(atom))
            if kind in ("add", "sub", "add_any", "mul"):
                first, second = map(size, eqn.invars)
                return first * second if kind == "mul" else first + second
            if kind == "div":
                return size(eqn.invars[0]) / jnp.abs(value(eqn.invars[1]))
            if kind in ("neg", "convert_element_type", "reshape", "squeeze", "copy", "stop_gradient"):
                return size(eqn.invars[0]).reshape(()).astype(aval_of(atom).dtype)
            if kind in ("reduce_sum", "dot_general"):
                return eqn.primitive.bind(*(jnp.abs(value(operand)) for operand in eqn.invars), **eqn.params)
            return jnp.abs(value(atom))

        wanted = [*graph.inputs, *graph.constants, *made]
        run = graph.function(range(len(graph.eqns)), [*graph.inputs, *graph.constants], wanted)
        values.update(zip(wanted, run(*jax.tree.leaves(args), *graph.constants.values()), strict=True))
        loss, *others = graph.outputs
        return jax.tree.structure(shapes).unflatten([size(loss), *map(value, others)])

    return sizes


def _state_of(engine: Engine, leaves: Leaves[Array], step: int | None = 0) -> State:
    """The state that has these leaves, whole; what each replica has of its own has a row for each."""
    states = states_of(engine)
    if not (engine.placed.per_replica and engine.layout.slicing.any):
        return states.wrap(leaves, step)
    each = [states.wrap(own, step) for own in _of_each_replica(engine, leaves)]
    return each[0].replace(**{part: _together([getattr(one, part) for one in each]) for part in ("params", "opt_state")})


def _grads_of(engine: Engine, found: Outcome[Array]) -> Grads:
    """The whole gradients of a step; those of what each replica has of its own have a row for each."""
    tree, shared = jax.tree.structure(engine.layout.params), engine.layout.num_shared
    grads = filled(found.grads, jax.tree.leaves(engine.layout.params), masked)
    if not (engine.placed.per_replica and engine.layout.slicing.any):
        return assembled(tree.unflatten(grads))
    each = _of_each_replica(engine, Leaves(grads[:shared], grads[shared:]))
    return _together([assembled(tree.unflatten(grads.all_params)) for grads in each])


def _model_state_of(engine: Engine, found: Outcome[Array]) -> Tree:
    """The whole model state after a step; ``()`` without one."""
    tree = jax.tree.structure((*engine.layout.variables, ())[1])
    return assembled(tree.unflatten(found.model_state))


def _of_each_replica(engine: Engine, leaves: Leaves[Array]) -> list[Leaves[Array]]:
    """The leaves of each replica, on one device."""
    leaves = leaves.fill(_on_one_device(leaves.flat()))
    return [leaves.with_own([leaf[r] for leaf in leaves.own], leaves) for r in range(engine.placement.num_replicas)]


def _check_numbers(found: Mapping[str, Tree]) -> None:
    got = []
    for name, tree in found.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if _inexact(leaf.dtype) and (count := int(np.isnan(_wide(leaf)).sum())):
                got.append(f"{name}{jax.tree_util.keystr(path)} is NaN" + f", {count} of {leaf.size} elements" * (leaf.size > 1))
    if got:
        rule = "NaN compared with NaN proves nothing, and the pipelined and the single-device step both have it"
        debug = "jax.config.update('jax_debug_nans', True) before pipe.step says where the NaN begins"
        got = got[:8] + [f"and {len(got) - 8} more"] * (len(got) > 8)
        raise VerifyError("verify", rule, got, f"verify with a batch and a state whose loss is a number; {debug}")


def _parts(pair: Tree) -> tuple[list[Tree], Any]:
    return jax.tree.flatten(pair, is_leaf=lambda node: node is not pair)


def _apart(params: Params, engine: Engine) -> list[Params]:
    """The parameters (or optimizer states) of each replica, from a pair whose second part has a row for each replica."""
    (shared, own), pair = _parts(params)
    return [pair.unflatten([shared, jax.tree.map(lambda leaf, r=r: leaf[r], own)]) for r in range(engine.placement.num_replicas)]


def _together(pairs: Sequence[Params]) -> Params:
    (shared, _), pair = _parts(pairs[0])
    return pair.unflatten([shared, jax.tree.map(lambda *rows: jnp.stack(rows), *(_parts(each)[0][1] for each in pairs))])


def verify_update(engine: Engine, leaves: Leaves[Array], found: Outcome[Array], stepped: Leaves[Array]) -> None:
    """Compare an updated state with what plain optax makes of the pipeline's gradients."""
    assert engine.optimizer is not None, "a pipeline has an optimizer"
    optimizer, scaling = part_of(engine.optimizer, engine.options.trains), engine.options.loss_scale

    @jax.jit
    def unscaled(grads: Grads, state: State) -> tuple[Grads, Array]:
        if scaling is None:
            return grads, jnp.asarray(True)
        leaves, finite = scaling.unscale(jax.tree.leaves(grads), jax.tree.leaves((state.loss_scale, state.previous_scale)))
        return jax.tree.structure(grads).unflatten(leaves), finite

    @jax.jit
    def update(grads: Grads, finite: Array, state: State, model_state: Tree, loss: Array) -> State:
        scale, tree = jax.tree.flatten(state.loss_scale)
        late = state.previous_scale
        if scaling is not None:
            late = scale[scaling.scale] if scaling.is_late else late
            scale = scaling.adjust(scale, finite)
        seen = floating(state.params)
        new, opt_state = updated(optimizer, grads, state.opt_state, seen, loss)
        params = with_others(new, state.params)
        before = state.params, state.opt_state, state.model_state
        made = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, opt_state, model_state), before)
        parts = dict(zip(("params", "opt_state", "model_state"), made, strict=True))
        return state.replace(**parts, loss_scale=tree.unflatten(scale), previous=_newest_of(state), previous_scale=late)

    state, after = (_state_of(engine, given, None) for given in (leaves, stepped))
    grads = _grads_of(engine, found)
    model_state = _model_state_of(engine, found)
    grads, whole, model_state, loss = _on_one_device((grads, state, model_state, found.loss))
    grads, finite = unscaled(grads, whole)  # of all replicas

    def made_of(grads: Grads) -> State:
        if not engine.placed.per_replica:
            return update(grads, finite, whole, model_state, loss)
        rows = zip(*(_apart(part, engine) for part in (grads, whole.params, whole.opt_state)), strict=True)
        made = [update(grad, finite, whole.replace(params=params, opt_state=opt), model_state, loss) for grad, params, opt in rows]
        return made[0].replace(**{part: _together([getattr(one, part) for one in made]) for part in ("params", "opt_state")})

    wanted = made_of(grads)
    try:
        compare("", after, wanted)
    except VerifyError:  # is it rounding? A norm over all leaves has the digits of the coarsest
        compare("", after, wanted, noise=noise_of(lambda grads: jax.tree.leaves(made_of(grads)), grads, jax.tree.leaves(wanted)))


def _newest_of(state: State) -> Params:
    """The parameters of a state, as far as it holds those before the last step too."""
    previous = state.held[-1]  # without those that it holds once
    if not jax.tree.leaves(previous):
        return previous
    return jax.tree.map(lambda old, new: None if old is None else new, previous, state.params, is_leaf=lambda n: n is None)


def noise_of(run: Callable[[Tree], Tree], given: Tree, made: Tree) -> Tree:
    """How far rounding may move each leaf of ``made``, which is what ``run`` makes of ``given``, the parameters or gradients.

    Measured: several times what a change of their last digits does. A gradient that is no larger is nothing but rounding.
    """
    return jax.tree.map(lambda a, b: _NOISE * _size(_wide(a) - _wide(b)), run(jax.tree.map(_shaken, given)), made)


def _shaken(leaf: Array) -> Array:
    if not has_gradient(leaf):
        return leaf
    turns = jnp.where(jnp.arange(leaf.size) % 2, 1, -1).reshape(leaf.shape)
    return (leaf * (1 + turns * jnp.finfo(leaf.dtype).eps)).astype(leaf.dtype)


def _inexact(dtype: DType) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _size(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


def _wide(leaf: Leaf) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key else leaf))
    return array if jnp.issubdtype(array.dtype, jnp.complexfloating) else array.astype(np.float64)
