"""Other functions over the parameters of a pipeline: each is cut so that every parameter stays with its owner."""

import bisect
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxpp.engine.engine import Engine
from jaxpp.engine.layout import Layout, Preparer, place_leaves, split_of, state_leaves
from jaxpp.engine.tracing import Tracing, avals_of
from jaxpp.errors import CutError
from jaxpp.options import Options
from jaxpp.runtime.compile import trace_context
from jaxpp.runtime.lru import LRU
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import Cuts, align
from jaxpp.stages.cuts.cut_loss import StateCopy, copies_of, with_copies
from jaxpp.stages.jaxpr import aval_of
from jaxpp.stages.layers import slices_between
from jaxpp.stages.loss.aux import check_reducers
from jaxpp.stages.loss.microbatch import batch_avals, check_shared, first_of, resized
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.stacked import Slices, Slicing, is_slices
from jaxpp.types import Batch, ForwardFn, Key, ReduceAux, Tree

_NOT_OF_A_FUNCTION: dict[str, Tree] = {  # options of a loss, as a function that is only run forward has them
    "is_loss": False,
    "has_aux": False,
    "weight": None,
    "reduction": "mean",
    "cuts": None,
    "remat": None,
    "offload": (),
    "cut_gradient": frozenset(),
    "loss_scale": None,
    "balance": "cost",
}

_T = TypeVar("_T")

_MOVED = 0.1  # the part of all parameters that may be copied away from their owners, in a function cut elsewhere than the loss


class Functions:
    """The engines that run functions forward over the parameters of other engines; the ``most`` that were used last are kept."""

    def __init__(self, most: int = 16):
        self._kept = LRU[tuple[Engine, Any]](most)

    def engine(
        self,
        base: Engine,
        fn: ForwardFn,
        batch: Batch,
        key: Key | None,
        *,
        carry: Tree = None,
        reduce_aux: ReduceAux = None,
        like: Engine | None = None,
    ) -> Engine:
        """The engine that runs ``fn`` over the parameters of ``base``, cut at the shapes of ``batch``.

        With a carry, of which shapes will do, it is ``fn(params, carry, batch) -> (carry, outputs)`` and run on the whole batch as
        one microbatch; the carry lives where that of the engine ``like`` does. ``reduce_aux`` says how outputs are put together
        that do not have one row for each example.
        """
        shapes = None if carry is None else (jax.tree.structure(carry), tuple(map(str, jax.tree.leaves(avals_of(carry)))))
        reducers = tuple(sorted(reduce_aux.items(), key=str)) if isinstance(reduce_aux, Mapping) else reduce_aux
        name = (id(base), fn, shapes, reducers)
        return self.remember(name, base, lambda: _derived(base, fn, batch, key, carry, check_reducers(reduce_aux), like))

    def remember(self, name: Hashable, base: Engine, make: Callable[[], _T]) -> _T:
        """What was made before under this name, which has the ``id`` of ``base`` in it; or what is made now."""
        return self._kept.get_or_make((name, trace_context()), lambda: (base, make()))[1]


def _derived(
    base: Engine, fn: ForwardFn, batch: Batch, key: Key | None, carry: Tree, reducers: Mapping[str, Tree], like: Engine | None
) -> Engine:
    known, layout = base.options, base.layout
    changed: dict[str, Tree] = {"reduce_aux": reducers, **_NOT_OF_A_FUNCTION}
    variables, owners = layout.variables, layout.state_owner
    if carry is not None:
        fn = _WithCopies(fn)
        changed |= {"has_state": True, "schedule": _one_microbatch(known.schedule.stage_to_rank)}
        variables, owners = (layout.params, (avals_of(carry), ())), ()
    options: Options = dataclasses.replace(known, loss_fn=fn, **changed)
    tracing, schedule = Tracing(options), options.schedule
    if carry is None:
        tracing.check_key_taken(fn, key)
    check_shared(first_of(batch), options.broadcast)
    sizes = split_of(options, batch, train=False).sizes
    microbatch = resized(batch_avals(first_of(batch)), sizes[0], tracing.shared(first_of(batch)))
    copies: tuple[StateCopy, ...] = ()
    if carry is None:
        loss = tracing.trace(fn, variables, microbatch, key)
        cuts = align(loss, schedule.num_stages, layout.owner, owners, train=False)
    else:
        loss, cuts, variables, copies = _carried(tracing, layout, variables, microbatch, like)
        owners = () if like is None else like.layout.state_owner
    found = tracing.merge(loss, fn, variables, microbatch, key).reducers
    first = tracing.cut(loss, cuts, layout.owner, found, state_owner=owners or None)
    layout = dataclasses.replace(
        layout,
        given=(layout.given[0], *variables[1:]),
        variables=variables,
        leaves=layout.leaves._replace(model_state=state_leaves(variables[1:], first.state_home)),
        optimizer=None,
        spine=loss.primitives,
        cuts=cuts,
        reducers=found,
        packs=(),
        warnings=(),
        weight=None,
        state_slicing=layout.state_slicing if carry is None else Slicing(),
        copies=copies,
    )
    placed = place_leaves(options, layout, first)
    preparer = Preparer(options, layout, placed.placement, first, microbatch, key)
    return Engine(options, None, placed, preparer, base.programs, base.opened_at)


def _carried(
    tracing: Tracing, layout: Layout, variables: tuple[Tree, Tree], microbatch: Batch, like: Engine | None
) -> tuple[TracedLoss, Cuts, tuple[Tree, Tree], tuple[StateCopy, ...]]:
    """A function with a carry, traced and cut, and the carry as held: sliced as the parameters are, shared leaves once a stage."""
    fn, count = tracing.options.loss_fn, tracing.options.schedule.num_stages
    params, (carry, _) = variables
    loss = tracing.trace(fn, variables, microbatch, None)
    if like is None:
        sizes = slices_between(loss.state, loss.layers, range(len(loss.layers)))
    else:
        nodes = jax.tree.leaves(like.layout.variables[1][0], is_leaf=is_slices)
        sizes = tuple(node.sizes if isinstance(node, Slices) else () for node in nodes)
    if any(sizes):
        carry = Slicing(sizes).of(carry)
        loss = tracing.trace(fn, (params, (carry, ())), microbatch, None)
    owners = () if like is None else like.layout.state_owner[: len(loss.state)]
    cuts = align(loss, count, layout.owner, owners, train=False)
    _check_owners(loss, cuts, layout.owner)
    copies = copies_of(loss, cuts) if like is None else like.layout.copies
    leaves = jax.tree.leaves(carry)
    variables = params, (carry, tuple(leaves[leaf] for leaf, _ in copies))
    if copies:
        loss = with_copies(tracing.trace(fn, variables, microbatch, None), cuts, copies)
    return loss, cuts, variables, copies


def _check_owners(loss: TracedLoss, cuts: Cuts, owner: Sequence[int]) -> None:
    """Refuse a carry that keeps most of a function on one stage, where the parameters of others would be copied to."""
    read = {(leaf, bisect.bisect_right(cuts, k)) for k, uses in enumerate(loss.param_uses) for leaf in uses}
    at_home = {leaf for leaf, stage in read if stage == owner[leaf]}
    sizes = [count_bytes(aval_of(var)) for var in loss.params]
    moved = sum(sizes[leaf] for leaf in {leaf for leaf, _ in read} - at_home)
    if moved <= _MOVED * sum(sizes) or not loss.barred:
        return
    path, _ = Counter(loss.barred.values()).most_common(1)[0]
    rule = (
        "each leaf of a carry is kept by one stage, which has all layers from the first that reads it to the last that changes it"
    )
    fix = "give each layer a leaf of its own, a list of caches; run the layers with jax.lax.scan over a stacked cache; "
    fix += "or, if a layer was divided, begin the stages between layers with cuts=[...], or pass fewer stages"
    path = path.removeprefix("0/model/").removeprefix("0/")
    raise CutError("carry", rule, f"{path}, which layers of several stages read and change", fix)


def _one_microbatch(stage_to_rank: Sequence[int]) -> Schedule:
    order = [Action(stage, Kind.F, 0) for stage in range(len(stage_to_rank))]
    rows = [[action for action in order if stage_to_rank[action.stage] == rank] for rank in range(max(stage_to_rank) + 1)]
    return Schedule("forward", tuple(map(tuple, rows)), tuple(stage_to_rank))


@dataclass(frozen=True)
class Wrapped:
    """What calls a user's function, under its name; equal for equal functions, so that what was compiled is found again."""

    function: ForwardFn

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "fn")


class Unchanged(Wrapped):
    """``fn(params, model_state, ...) -> outputs`` as a function that returns the model state too, as it was."""

    def __call__(self, params: Tree, model_state: Tree, *rest: Tree) -> tuple[Tree, Tree]:
        """The model state, and the outputs."""
        return model_state, self.function(params, model_state, *rest)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


class _WithCopies(Wrapped):
    """A function whose carry has copies of some leaves beside it, which it leaves to the stages that keep them."""

    def __call__(self, params: Tree, carry: tuple[Tree, Tree], batch: Batch) -> tuple[Tree, Tree]:
        result = self.function(params, carry[0], batch)
        if not isinstance(result, tuple) or len(result) != 2:
            return result
        return (result[0], carry[1]), result[1]
