"""What the first batch decides: where the loss is cut, which stage owns each leaf, and how leaves are held.

Everything later (a smaller last batch, another evaluation loss) is cut so that the owners stay.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import optax
from jax.sharding import PartitionSpec

from jaxpp.engine.sharding_rules import specs_of
from jaxpp.engine.slicing import slicing_at
from jaxpp.engine.tracing import Tracing, avals_of, check_key
from jaxpp.optim.place import unread_gradients
from jaxpp.optim.rowwise import slicing_for
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import clock_of, stage_times
from jaxpp.schedule.action import Kind
from jaxpp.stages.cuts.balance import Cuts, align, balance, owners
from jaxpp.stages.cuts.by_name import resolve
from jaxpp.stages.cuts.cut import CutLoss
from jaxpp.stages.cuts.uneven import check_giant, uneven
from jaxpp.stages.loops.stacked import Slicing
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.microbatch import batch_avals, check_batch, check_shared, resized, scale_dtype, sizes
from jaxpp.stages.loss.trace import check_arrays, check_floating
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.own_params import num_own, num_shared
from jaxpp.stages.packing import Pack
from jaxpp.types import Aval, Batch, Key, Params, Tree

__all__ = ["Layout", "lay_out"]


@dataclass(frozen=True)
class Layout:
    """What the first batch decided.

    Attributes:
        given: the tree of parameter shapes, and after it that of model state shapes, if the loss has any.
        slicing: which parameter leaves are held as slices.
        variables: the trees as they are held.
        frozen: the parameter leaves whose gradient the optimizer does not read.
        owner: the stage of each parameter leaf.
        spine: the primitives of the spine that was cut.
        cuts: the positions on the spine at which stages begin.
        reducers: how the aux leaves that are not averaged are reduced.
        packs: the small gradients that each stage sums as one vector.
        state_owner: the stage of each model state leaf.
        specs: how each parameter leaf is sharded inside its stage; empty if none is.
        unevenness: what to warn of, where the cut that was found is uneven.
    """

    given: tuple[Tree, ...]
    slicing: Slicing
    variables: tuple[Tree, ...]
    frozen: frozenset[int]
    owner: tuple[int, ...]
    spine: tuple[str, ...]
    cuts: Cuts
    reducers: Mapping[int, Reducer]
    packs: tuple[tuple[Pack, ...], ...]
    state_owner: tuple[int, ...]
    specs: tuple[PartitionSpec, ...]
    unevenness: str | None

    @property
    def params(self) -> Params:
        """The tree of parameter shapes, as it is held."""
        return self.variables[0]

    @property
    def num_shared(self) -> int:
        """How many parameter leaves all replicas share; they are the first."""
        return num_shared(self.params)

    @property
    def num_own(self) -> int:
        """How many parameter leaves each replica has of its own; they are the last."""
        return num_own(self.params)

    @property
    def state_shapes(self) -> list[Aval]:
        """The shape of each model state leaf."""
        return jax.tree.leaves(self.variables[1:])


def lay_out(
    options: Options,
    optimizer: optax.GradientTransformation | None,
    variables: tuple[Tree, ...],
    batch: Batch,
    key: Key | None,
    programs: Programs,
    like: Layout | None = None,
) -> tuple[Layout, Batch, CutLoss]:
    """Trace and cut the loss at the shapes given, and decide what follows from that.

    Args:
        options: of the pipeline.
        optimizer: or None; decides which gradients are wanted, and which leaves may be held as slices.
        variables: the parameters, and the model state if the loss has any; arrays or shapes.
        batch: the whole batch, or its shapes.
        key: or None.
        programs: compiles what ``balance="time"`` measures.
        like: a layout to cut at the same places as.

    Returns:
        the layout, the shapes of the first microbatch, and the loss cut at these. Where a loop over layers is cut, there are more
        parameter leaves than were given.

    Raises:
        CutError: too many stages for this loss, or cuts that do not exist.
        JaxppError: for a loss, parameters, a key, a batch or an optimizer that cannot be run.
    """
    check_key(key)
    check_floating(jax.tree_util.tree_leaves_with_path(variables[0]))
    check_arrays(variables[1:])
    frozen = frozenset[int]()
    if optimizer is not None:
        frozen = unread_gradients(optimizer, avals_of(variables[0]), jax.ShapeDtypeStruct((), scale_dtype()))
    Tracing(options).check_key_taken(options.loss_fn, key)
    check_shared(batch, options.shared)
    found = _Layouts(options, optimizer, tuple(map(avals_of, variables)), batch, key, frozen, like)
    schedule = options.schedule
    layout, first = found.at(found.layered)
    if options.balance == "time" and options.cuts is None and schedule.num_stages > 1 and like is None:
        kinds = {action.kind for action in schedule.order} - {Kind.F}
        seconds = stage_times(first, kinds, options.placement.places, programs)
        clock = clock_of([code.flops for code in first.stages], seconds)
        layout, first = found.at(replace(found.layered, clock=clock))
    return layout, found.microbatch, first


class _Layouts:
    """The layouts of a loss at the shapes of its first microbatch."""

    def __init__(
        self,
        options: Options,
        optimizer: optax.GradientTransformation | None,
        given: tuple[Tree, ...],
        batch: Batch,
        key: Key | None,
        frozen: frozenset[int],
        like: Layout | None,
    ):
        self.options, self.optimizer, self.given, self.key, self.frozen, self.like = options, optimizer, given, key, frozen, like
        counts = options.schedule.num_microbatches, options.placement.num_replicas
        size = sizes(check_batch(batch, *counts, options.shared), counts[0])[0]
        tracing = Tracing(options, frozen)
        self.microbatch = resized(batch_avals(batch), size, tracing.shared(batch))
        self.layered = tracing.trace(options.loss_fn, given, self.microbatch, key, per_layer=True)

    def at(self, loss: TracedLoss) -> tuple[Layout, CutLoss]:
        """Cut the loss, every layer of whose loops is an equation of its own, and say what that decides."""
        options, given, like = self.options, self.given, self.like
        clock, spine = loss.clock, loss.primitives
        cuts = () if like else self._choose(loss)
        permit = functools.partial(slicing_for, self.optimizer)
        specs = specs_of(options.shardings, given[0], options.placement.num_shards)
        slicing = slicing_at(loss, cuts, given[0], specs, permit, like and like.slicing)
        tracing, variables = Tracing(options, self.frozen), given
        if loss.layers or slicing.any:
            variables = (slicing.of(given[0]), *given[1:])
            tracing = Tracing(options, frozenset(slicing.leaves(self.frozen)))
            loss = replace(tracing.trace(options.loss_fn, variables, self.microbatch, self.key), clock=clock)
        if like or loss.primitives != spine:
            cuts = self._choose(loss)
        reducers = tracing.reducers(loss, options.loss_fn, variables, self.microbatch, self.key)
        owner = owners(loss, cuts)
        first = tracing.cut(loss, cuts, owner, reducers)
        layout = Layout(
            given=given,
            slicing=slicing,
            variables=variables,
            frozen=tracing.frozen,
            owner=owner,
            spine=loss.primitives,
            cuts=cuts,
            reducers=reducers,
            packs=tuple(code.packs for code in first.stages),
            state_owner=first.state_home,
            specs=tuple(spec for k, spec in enumerate(specs) for _ in slicing.leaves([k])),
            unevenness=uneven(loss, cuts) if options.cuts is None and like is None else None,
        )
        return layout, first

    def _choose(self, loss: TracedLoss) -> Cuts:
        """Where to cut: where the user says, or for balance."""
        names, count, like = self.options.cuts, self.options.schedule.num_stages, self.like
        if like is not None:
            return like.cuts if loss.primitives == like.spine else align(loss, count, like.owner, like.state_owner, train=True)
        if names is not None:
            return resolve(loss, names)
        check_giant(loss, count)
        return balance(loss, count)
