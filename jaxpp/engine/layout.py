"""What the first batch decides: where the loss is cut, which stage owns each leaf, and how leaves are held.

Everything later (a smaller last batch, another evaluation loss) is cut so that the owners stay.
"""

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import optax
from jax.sharding import PartitionSpec

from jaxpp.engine.sharding_rules import specs_of
from jaxpp.engine.tracing import Tracing, avals_of, check_key
from jaxpp.optim.owners import state_bytes, unread_gradients
from jaxpp.optim.rowwise import slicing_for
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import clock_of, link_times, stage_times, waiting
from jaxpp.schedule.action import Kind
from jaxpp.schedule.residual_counts import counts_at_peaks, lifetimes
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import Cuts, align, balance, check_giant, owners, resolve, uneven
from jaxpp.stages.cuts.by_memory import StageBytes, balance_memory
from jaxpp.stages.cuts.by_time import Links, balance_time
from jaxpp.stages.cuts.cut_loss import CutLoss, StateCopy
from jaxpp.stages.layers import rows_between, slices_between
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.microbatch import batch_avals, check_batch, check_shared, resized, scale_dtype, sizes, split_any
from jaxpp.stages.loss.traced_loss import TracedLoss, check_arrays, check_floating
from jaxpp.stages.own_params import num_own, num_shared
from jaxpp.stages.program import Pack
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.stacked import Slicing
from jaxpp.types import Aval, Batch, Key, Params, Tree

__all__ = ["Layout", "lay_out"]

_Permit = Callable[[Params, Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], Slicing]
"""The slices that a pipeline may hold: of parameters, the slices that cut loops need, and those of leaves read row by row."""


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
        copies: the last model state leaves, if they are copies of others for further stages that read them.
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
    copies: tuple[StateCopy, ...] = ()

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

    The optimizer decides which gradients are wanted, and which leaves may be held as slices; ``programs`` compiles what
    ``balance="time"`` measures. With ``balance="memory"``, the cut for equal FLOPs is made too, and the better of both is taken.

    Returns:
        the layout, the shapes of the first microbatch, and the loss cut at these. Where a loop over layers is cut, there are more
        parameter leaves than were given.

    Raises:
        CutError: too many stages for this loss, or cuts that do not exist.
        JaxppError: for a loss, parameters, a key, a batch or an optimizer that cannot be run.
    """
    check_key(key)
    if options.is_loss:
        check_floating(jax.tree_util.tree_leaves_with_path(variables[0]))
    else:
        check_arrays(variables[:1], "parameters")
    check_arrays(variables[1:])
    frozen = frozenset[int]()
    if optimizer is not None:
        frozen = unread_gradients(optimizer, avals_of(variables[0]), jax.ShapeDtypeStruct((), scale_dtype()))
    tracing, schedule = Tracing(options, frozen), options.schedule
    tracing.check_key_taken(options.loss_fn, key)
    check_shared(batch, options.shared)
    counts = schedule.num_microbatches, options.placement.num_replicas
    if options.is_loss:
        size = sizes(check_batch(batch, *counts, options.shared), counts[0])[0]
    else:
        size = split_any(check_batch(batch, 1, shared=options.shared), *counts).sizes[0]
    given, microbatch = tuple(map(avals_of, variables)), resized(batch_avals(batch), size, tracing.shared(batch))
    layered = tracing.trace(options.loss_fn, given, microbatch, key, per_layer=True)
    found = _Layouts(options, optimizer, given, microbatch, key, frozen, like)
    layout, first = found.at(layered)
    if options.cuts is not None or schedule.num_stages == 1 or like is not None:
        return layout, microbatch, first
    if options.balance == "memory":
        plain = replace(found, options=replace(options, balance="flops")).at(layered)
        layout, first = min((layout, first), plain, key=lambda cut: found.fullest(*cut))
    if options.balance == "time":
        kinds = {action.kind for action in schedule.order} - {Kind.F}
        seconds = stage_times(first, kinds, options.placement.places, programs)
        clock = clock_of([code.flops for code in first.stages], seconds)
        turns = schedule.num_microbatches * schedule.num_stages // schedule.num_ranks
        links = Links(*link_times(options.placement.places), waiting(schedule), turns)
        timed = replace(found, links=links.scaled(sum(layered.flops) / max(sum(seconds), 1e-12)))
        layout, first = timed.at(replace(layered, clock=clock))
    return layout, microbatch, first


@dataclass(frozen=True)
class _Layouts:
    """The layouts of a loss at the shapes of its first microbatch."""

    options: Options
    optimizer: optax.GradientTransformation | None
    given: tuple[Tree, ...]
    microbatch: Batch
    key: Key | None
    frozen: frozenset[int]
    like: Layout | None
    links: Links | None = None

    def at(self, loss: TracedLoss) -> tuple[Layout, CutLoss]:
        """Cut the loss, every layer of whose loops is an equation of its own, and say what that decides."""
        options, given, like = self.options, self.given, self.like
        clock, spine = loss.clock, loss.primitives
        specs = specs_of(options.shardings, given[0], options.placement.num_shards)
        cuts = () if like else self._choose(loss, given[0], specs, self.frozen)
        permit = functools.partial(slicing_for, self.optimizer)
        slicing = _slicing_at(loss, cuts, given[0], specs, permit, like and like.slicing)
        tracing, variables = Tracing(options, self.frozen), given
        if loss.layers or slicing.any:
            variables = (slicing.of(given[0]), *given[1:])
            tracing = Tracing(options, frozenset(slicing.leaves(self.frozen)))
            loss = replace(tracing.trace(options.loss_fn, variables, self.microbatch, self.key), clock=clock)
        specs = tuple(spec for k, spec in enumerate(specs) for _ in slicing.leaves([k]))
        if like or loss.primitives != spine:
            cuts = self._choose(loss, variables[0], specs, tracing.frozen)
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
            specs=specs,
            unevenness=uneven(loss, cuts) if options.cuts is None and like is None and options.balance != "memory" else None,
        )
        return layout, first

    def fullest(self, layout: Layout, first: CutLoss) -> float:
        """The bytes of the device that holds most, by what the stages keep."""
        return self._held(layout.params, layout.specs, layout.frozen).fullest(first.stages, layout.owner)

    def _held(self, params: Params, specs: Sequence[PartitionSpec], frozen: frozenset[int]) -> StageBytes:
        """What stages hold of these parameters, and of how many microbatches they keep residuals."""
        options = self.options
        schedule, placement, num_stages = options.schedule, options.placement, options.schedule.num_stages
        numbers = {place.devices: k for k, place in enumerate(placement.by_rank)}
        devices = tuple(numbers[place.devices] for place in placement.places)
        clock = simulate(schedule, forward=1, input_grad=1, weight_grad=1, offload=options.offload or None)
        kept = counts_at_peaks(lifetimes(clock.bars, clock.times.copies), devices)
        shards = [placement.num_shards if any(spec) else 1 for spec in specs] or [1] * len(jax.tree.leaves(params))
        sizes = [count_bytes(leaf) / parts for leaf, parts in zip(jax.tree.leaves(params), shards, strict=True)]
        state = zip(state_bytes(self.optimizer, params), shards, strict=True)
        return StageBytes(
            of_user=tuple(size * (1 + (options.is_loss and leaf not in frozen)) for leaf, size in enumerate(sizes)),
            of_owner=tuple(size / parts for size, parts in state),
            num_kept=kept,
            policies=options.remat or (RematPolicy(),) * num_stages,
            devices=devices,
        )

    def _choose(self, loss: TracedLoss, params: Params, specs: Sequence[PartitionSpec], frozen: frozenset[int]) -> Cuts:
        """Where to cut: where the user says, or for balance."""
        names, count, like = self.options.cuts, self.options.schedule.num_stages, self.like
        if like is not None:
            return (
                like.cuts
                if loss.primitives == like.spine
                else align(loss, count, like.owner, like.state_owner, train=self.options.is_loss)
            )
        if names is not None:
            return resolve(loss, names)
        check_giant(loss, count)
        if self.options.balance == "memory":
            return balance_memory(loss, self._held(params, specs, frozen))
        return balance(loss, count) if self.links is None else balance_time(loss, self.links)


def _slicing_at(
    loss: TracedLoss,
    cuts: Cuts,
    params: Params,
    specs: Sequence[PartitionSpec],
    permit: _Permit,
    known: Slicing | None = None,
) -> Slicing:
    """The leaves that a cut loop runs over, and the leaves that several stages read row by row.

    A leaf that is read row by row stays whole if its rows are sharded already, or if each replica has a leaf of its own. ``permit``
    takes back what the optimizer cannot run on; ``known`` are the slices that another engine has of the shared parameters.
    """
    shared = num_shared(params)
    if known is not None:
        return Slicing((*known.sizes[:shared], *[()] * num_own(params)))
    sharded = {leaf for leaf, spec in enumerate(specs) if next(iter(spec), None) is not None}
    single = rows_between(loss.params, loss.reads, cuts)
    single = [() if leaf in sharded or leaf >= shared else sizes for leaf, sizes in enumerate(single)]
    return permit(params, slices_between(loss.params, loss.layers, _stages_of(loss, cuts)), single)


def _stages_of(loss: TracedLoss, cuts: Cuts) -> list[int | None]:
    """The stage of each part of a loop over layers; None for a part that no cut divides, as it depends on parameters alone."""
    position = {var: k for k, i in enumerate(loss.spine) for var in loss.graph.eqns[i].outvars}
    places = [position.get(layer.result) for layer in loss.layers]
    return [None if place is None else bisect.bisect_right(cuts, place) for place in places]
