"""What the first batch decides, and later ones keep: where the loss is cut, which stage owns each leaf, and how it is held."""

import bisect
import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxpp.engine.sharding_rules import check_even, fits, num_parts, over_both, over_model, specs_of
from jaxpp.engine.tracing import Tracing, avals_of, check_key, same_shapes, shapes_key
from jaxpp.errors import ArgumentError, BatchError, warn
from jaxpp.lowering.builder import CALLER, Constant, Name, waiting
from jaxpp.lowering.microbatch_weights import given_weights, weigh
from jaxpp.lowering.step import WHOLE, Leaves, StateLeaf, Step, given_names
from jaxpp.optim.owners import TracedOptimizer, untrained_leaves
from jaxpp.optim.update import Update, plan_update
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs, trace_context
from jaxpp.runtime.lru import LRU
from jaxpp.runtime.measure import clock_of, link_times, stage_times
from jaxpp.runtime.place import Placement, undivided_warnings
from jaxpp.runtime.replica_groups import ReplicaGroups
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Number, replay
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.residual_counts import counts_at_peaks, lifetimes
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.axes import DATA, MODEL, axis_names
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import Cuts, align, balance, check_giant, owners, readers, resolve, uneven
from jaxpp.stages.cuts.by_memory import StageBytes, balance_memory
from jaxpp.stages.cuts.by_step import Lengths, Links, PerStage, balance_step, step_costs
from jaxpp.stages.cuts.cut_loss import CutLoss, StateCopy, with_copies
from jaxpp.stages.estimate import rates_of
from jaxpp.stages.floating import frozen_by_type
from jaxpp.stages.jaxpr import aval_of, calls_host, describe, shapes_of, variables
from jaxpp.stages.layers import rows_between, slices_between, stacked_axes
from jaxpp.stages.loss.aux import Reducer, check_aux
from jaxpp.stages.loss.microbatch import (
    Microbatches,
    Split,
    batch_avals,
    check_batch,
    check_shared,
    first_of,
    raw_key,
    resized,
    sizes,
    split_any,
)
from jaxpp.stages.loss.traced_loss import TracedLoss, check_arrays, check_bits, check_trainable, key_implementation, path_name
from jaxpp.stages.own_params import num_own, num_shared
from jaxpp.stages.program import Pack, Program, Ref, Role
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.stacked import Slicing, slicing_of
from jaxpp.types import Aval, Batch, Home, Key, LossFn, Params, Tree


class ModelStateWarning(UserWarning):
    """Running statistics, or counts of random numbers, are among the parameters, where what the model makes of them is lost.

    Attributes:
        counts: whether there are counts of random numbers, which make the same numbers for each microbatch.
    """

    counts: bool = False


class OffloadWarning(UserWarning):
    """A ``jax.checkpoint`` in the model sends residuals to host memory, and a pipeline keeps them on the device."""


def _offloading(loss: TracedLoss) -> OffloadWarning | None:
    """Warns of residuals that a policy in the model would send to host memory, where programs of a stage do not pass them on."""
    if not loss.num_offloading:
        return None
    rule = "what a checkpoint policy in the model offloads stays on the device, where residuals go from program to program"
    got = f"{loss.num_offloading} jax.checkpoint (or loops with one inside) with an offloading policy"
    fix = 'pass remat="offload" to the pipeline, which lets residuals wait in host memory, and take the policy out of the model'
    return OffloadWarning(f"loss_fn: {rule}.\n  Got: {got}.\n  Fix: {fix}.")


_STATE = "BatchStat", "RngCount"  # NNX's variables that a model changes
_NNX = (
    "split it off, graphdef, params, rest = nnx.split(model, nnx.Param, ...); pass has_state=True and a "
    "loss_fn(params, rest, batch) that merges, model = nnx.merge(graphdef, params, rest, copy=True), and returns loss, "
    "(new_rest, aux) with new_rest = nnx.state(model, nnx.Not(nnx.Param)); call pipe.init((params, rest), batch)"
)
_LINEN = "pass has_state=True, with a loss_fn(params, model_state, batch) that returns loss, (new_model_state, aux)"


def _lost_state(loss: TracedLoss, params: Params, frozen: frozenset[int]) -> ModelStateWarning | None:
    """Warns of model state among the parameters, by Flax's names for it: trained statistics, and counts that are read."""

    def kind_of(node: Tree) -> str:
        names = type(node).__name__, getattr(getattr(node, "type", None), "__name__", "")
        return next((name for name in _STATE if name in names), "")

    used = {var for eqn in loss.graph.eqns for var in variables(eqn.invars)}
    places = {path: k for k, path in enumerate(dict.fromkeys(path for path, _, _ in loss.stacks))}
    read = {places[path] for (path, _, _), var in zip(loss.stacks, loss.params, strict=True) if var in used}
    found, leaf = dict[str, list[str]](), 0
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: bool(kind_of(node))):
        kind, leaves = kind_of(node), range(leaf, leaf + len(jax.tree.leaves(node)))
        if not kind and any(getattr(key, "key", None) == "batch_stats" for key in path):
            kind = "batch_stats"
        if kind and not (read.isdisjoint(leaves) if kind == "RngCount" else frozen.issuperset(leaves)):
            found.setdefault(kind, []).append(f"params{jax.tree_util.keystr(path)}")
        leaf = leaves.stop
    if not found:
        return None
    counts, rules = "RngCount" in found, list[str]()
    if not counts or len(found) > 1:
        rules.append("running statistics are updated by the model, and the optimizer trains them like parameters here")
    if counts:
        rules.append("a count of random numbers is updated by the model, and nobody keeps it here: each step has the same dropout")
    names = [name for each in found.values() for name in each]
    got = ", ".join([*names[:3], f"... ({len(names)})"] if len(names) > 4 else names)
    fix = _LINEN if "batch_stats" in found else _NNX
    warning = ModelStateWarning(f"params: {'; '.join(rules)}.\n  Got: {got}.\n  Fix: {fix}.")
    warning.counts = counts
    return warning


@dataclass(frozen=True)
class Layout:
    """What the first batch decided."""

    given: tuple[Tree, ...]  # the tree of parameter shapes, and after it that of model state shapes, if the loss has any
    variables: tuple[Tree, ...]  # the trees as they are held
    slicing: Slicing  # which parameter leaves are held as slices
    state_slicing: Slicing  # which model state leaves are held as slices
    leaves: Leaves[StateLeaf]  # the parameters and the model state, as they are held
    optimizer: TracedOptimizer | None  # over the parameters as they are given
    spine: tuple[str, ...]  # the primitives of the spine that was cut
    cuts: Cuts  # the positions on the spine at which stages begin
    reducers: Mapping[int, Reducer]  # how the aux leaves that are not averaged are reduced
    packs: tuple[tuple[Pack, ...], ...]  # the small gradients that each stage sums as one vector
    weight: Callable[[Batch], Any] | None  # of a microbatch; None: the number of its examples
    follows: tuple[int, ...]  # the owners of another loss, in whose order equations run; empty: in the user's order
    specs: tuple[PartitionSpec, ...]  # how each parameter leaf is sharded
    warnings: tuple[Warning, ...]  # what to tell the user of these stages
    copies: tuple[StateCopy, ...] = ()  # the last model state leaves, if they are copies of others for further stages

    @property
    def params(self) -> Params:
        """The tree of parameter shapes, as it is held."""
        return self.variables[0]

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """The stage of each parameter leaf."""
        return tuple(leaf.stage for leaf in self.leaves.all_params)

    @cached_property
    def state_owner(self) -> tuple[int, ...]:
        """The stage of each model state leaf."""
        return tuple(leaf.stage for leaf in self.leaves.model_state)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """The parameter leaves that have no gradient, or whose gradient the optimizer does not read."""
        return frozenset(leaf.index for leaf in self.leaves.all_params if leaf.frozen)

    @property
    def num_shared(self) -> int:
        """How many parameter leaves all replicas share; they are the first."""
        return len(self.leaves.params)

    def divided(self, options: Options) -> "Layout":
        """The same where replicas divide what these options say."""
        packed = {ref.index for each in self.packs for pack in each for ref in pack.members}
        params = _divided(options, self.leaves.all_params, self.specs, packed)
        shared = self.num_shared
        return replace(self, leaves=self.leaves._replace(params=params[:shared], own_params=params[shared:]))


def _divided(
    options: Options, params: Sequence[StateLeaf], specs: Sequence[PartitionSpec], packed: Collection[int] = ()
) -> list[StateLeaf]:
    """The parameter leaves as devices divide them; the gradients of those that are packed are summed whole."""
    widths = [place.num_shards for place in options.placement.by_rank]  # any of these may hold a leaf
    sizes, shard, found = options.axes.sizes | {MODEL: math.lcm(*widths)}, options.shard, list[StateLeaf]()
    asked = [DATA in itertools.chain.from_iterable(map(axis_names, spec)) for spec in specs]
    divides = sizes.get(DATA, 1) > 1 and (bool(shard) or any(asked))
    for leaf, spec, by_user in zip(params, specs, asked, strict=True):
        works = over_model(spec)
        part = over_both(spec, leaf.aval.shape, sizes, divide=bool(shard) and not leaf.own) if divides else works
        split = part != over_model(part)
        held, summed = split and (by_user or "parameters" in shard), split and "gradients" in shard and leaf.index not in packed
        found.append(replace(leaf, spec=works, part=part, divided=held, scattered=summed))
    return found


def state_leaves(model_state: Tree, owner: Sequence[int]) -> list[StateLeaf]:
    """The leaves of a model state, or of a carry, on their stages."""
    shapes = jax.tree.leaves(model_state)
    return [StateLeaf(Role.STATE, k, aval, stage) for k, (aval, stage) in enumerate(zip(shapes, owner, strict=True))]


@dataclass(eq=False)
class Traces:
    """What pipelines of one loss, one optimizer and parameters of the same shapes share, wherever they are cut."""

    losses: dict[Hashable, TracedLoss] = field(default_factory=dict)  # with a loop's layers apart, by what they are traced with
    optimizers: dict[frozenset[int], TracedOptimizer] = field(default_factory=dict)  # by the leaves that they leave alone


def lay_out(
    options: Options,
    optimizer: optax.GradientTransformation | None,
    variables: tuple[Tree, ...],
    batch: Batch,
    key: Key | None,
    programs: Programs,
    like: Layout | None = None,
    traces: Traces | None = None,
) -> tuple[Layout, Batch, CutLoss]:
    """The layout at the shapes given, the shapes of the first microbatch, and the loss cut at these.

    The optimizer decides which gradients are wanted and which leaves may be slices. With ``balance="memory"``, the better of that
    cut and of the cut for the shortest step is taken. Where a loop over layers is cut, there are more parameter leaves than given.
    What is in ``traces`` is not traced again.
    """
    traces = Traces() if traces is None else traces
    check_key(key, options.loss_fn, 2 + options.has_state)
    if options.is_loss:
        check_trainable(jax.tree_util.tree_leaves_with_path(variables[0]), allow_int=options.allow_int)
    else:
        check_arrays(variables[:1], "parameters")
    check_bits(jax.tree_util.tree_leaves_with_path(variables[0]))
    check_arrays(variables[1:])
    given, traced, frozen = tuple(map(avals_of, variables)), None, frozen_by_type(variables[0])
    if optimizer is not None:
        untrained = untrained_leaves(given[0], options.trains)
        traced = traces.optimizers.setdefault(untrained, TracedOptimizer(optimizer, given[0], untrained))
        frozen |= traced.unread
    tracing, schedule = Tracing(options, frozen), options.schedule
    tracing.check_key_taken(options.loss_fn, key)
    check_shared(first_of(batch), options.broadcast)
    size, first_part = split_of(options, batch, train=options.is_loss).sizes[0], first_of(batch)
    microbatch = resized(batch_avals(first_part), size, tracing.shared(first_part))
    name = shapes_key(microbatch, key), frozen, options.axes
    if name not in traces.losses:
        traces.losses[name] = tracing.trace(options.loss_fn, given, microbatch, key, per_layer=True)
    layered = traces.losses[name]
    stacked = {rows.leaf for each in layered.layers for rows in each.rows}
    rows = Slicing(tuple((1,) * aval_of(var).shape[0] if var in stacked else () for var in layered.state))
    if rows.any:  # each row is a leaf, so that cuts may lie between two layers
        layered = tracing.trace(options.loss_fn, (given[0], rows.of(given[1])), microbatch, key, per_layer=True)
    if options.cuts is None and like is None:
        check_giant(layered, schedule.num_stages)
    specs = specs_of(options.shardings, variables[0], options.axes, evenly=options.placement.is_even)
    microbatches = batch if isinstance(batch, Microbatches) else None
    found = _Layouts(options, traced, given, microbatches, microbatch, key, frozen, like, specs, rows)
    layout, first = found.at(layered)
    if options.cuts is not None or schedule.num_stages == 1 or like is not None:
        return layout, microbatch, first
    if options.balance == "memory":
        plain = replace(found, options=replace(options, balance="cost")).at(layered)
        layout, first = min((layout, first), plain, key=lambda cut: found.fullest(*cut))
    if options.balance == "time":
        layout, first = found.measured(layered, layout, first, programs)
    return layout, microbatch, first


@dataclass(frozen=True)
class _Layouts:
    options: Options
    optimizer: TracedOptimizer | None
    given: tuple[Tree, ...]
    microbatches: Microbatches | None  # that were given, rather than a batch
    microbatch: Batch
    key: Key | None
    frozen: frozenset[int]
    like: Layout | None
    specs: tuple[PartitionSpec, ...]  # of the parameter leaves given
    rows: Slicing  # the model state leaves of which the loss that is to be cut has each row as a leaf
    links: Links | None = None

    def at(self, loss: TracedLoss) -> tuple[Layout, CutLoss]:
        """Cut the loss, every layer of whose loops is an equation of its own, and say what that decides."""
        options, like, clock, spine = self.options, self.like, loss.clock, loss.primitives
        loss = self._estimated(loss)
        cuts, step = () if like else self._choose(loss, Slicing()), loss.step
        slicing, state_slicing = self._slicing(loss, cuts), self._state_slicing(loss, cuts)
        tracing, variables = Tracing(options, self.frozen), self.given
        follows = like.owner if like is not None and same_shapes(like.given, self.given) else ()  # of a task that has others
        if loss.layers or slicing.any or follows:
            variables = (slicing.of(self.given[0]), *map(state_slicing.of, self.given[1:]))
            tracing = Tracing(options, frozenset(slicing.leaves(self.frozen)), follows)
            loss = replace(tracing.trace(options.loss_fn, variables, self.microbatch, self.key), clock=clock)
        params = self._params(slicing)
        same = loss.primitives == spine
        loss = replace(loss, step=step) if same else self._estimated(loss)
        if like or not same:
            cuts = self._choose(loss, slicing)
        merge = tracing.merge(loss, options.loss_fn, variables, self.microbatch, self.key, self.microbatches)
        _check_collectives(loss, options.placement, merge.weight, num_own(variables[0]))
        owner = follows or owners(loss, cuts)
        warnings = list(self._warnings(loss, cuts, owner, params, slicing))
        if not any(isinstance(each, ModelStateWarning) and each.counts for each in warnings):  # it is told what is mended first
            warnings.append(merge.warning)
        first = tracing.cut(loss, cuts, owner, merge.reducers, state_owner=None if like is None else like.state_owner)
        packs = tuple(code.packs for code in first.stages)
        params = [replace(leaf, stage=stage) for leaf, stage in zip(params, owner, strict=True)]
        shared, state_owner = num_shared(variables[0]), first.state_home if like is None else like.state_owner
        return Layout(
            given=self.given,
            variables=variables,
            slicing=slicing,
            state_slicing=state_slicing,
            leaves=Leaves(params[:shared], params[shared:], model_state=state_leaves(variables[1:], state_owner)),
            optimizer=self.optimizer,
            spine=loss.primitives,
            cuts=cuts,
            reducers=merge.reducers,
            packs=packs,
            weight=merge.weight,
            follows=follows,
            specs=tuple(self._specs(slicing, shared)),
            warnings=tuple(filter(None, warnings)),
        ).divided(options), first

    def _specs(self, slicing: Slicing, shared: int) -> list[PartitionSpec]:
        """How each parameter leaf is sharded, if they are sliced so."""
        given = self.specs or [WHOLE] * len(jax.tree.leaves(self.given[0]))
        specs = [spec for k, spec in enumerate(given) for _ in slicing.leaves([k])]
        return [*specs[:shared], *map(over_model, specs[shared:])]  # each replica has its own

    def _params(self, slicing: Slicing) -> list[StateLeaf]:
        """The parameter leaves as they are held, if they are sliced so; they have no stage yet."""
        options, sizes = self.options, self.options.axes.sizes
        params = slicing.of(self.given[0])
        leaves, shared = jax.tree.leaves(params), num_shared(params)
        specs = self._specs(slicing, shared)
        pairs = list(zip(specs, leaves, strict=True))
        even = options.placement.is_even  # else ``check_even`` refuses what a rank cannot share
        rough = [f"{describe(leaf)}: {spec}" for spec, leaf in pairs if not fits(over_model(spec), leaf.shape, sizes)]
        if even and rough:
            rule = "where a loop over layers is cut, a stage holds the rows of its layers, and devices share these evenly"
            fix = "shard another axis, or pass cuts=[...] or stages whose rows are divisible"
            raise ArgumentError("shardings", rule, rough, fix)
        untrained = () if self.optimizer is None else self.optimizer.untrained
        still = untrained_leaves(self.given[0], options.late, strict=False)  # which no loss of a state trains
        frozen, kept, still = (set(slicing.leaves(which)) for which in (self.frozen, untrained, still))
        late = set(range(shared if options.delay and self.optimizer is not None else 0)).difference(still)
        found = [
            StateLeaf(Role.PARAM, k, aval, -1, frozen=k in frozen, own=k >= shared, changes=k not in kept, late=k in late)
            for k, (_, aval) in enumerate(pairs)
        ]
        return _divided(options, found, specs)

    def _warnings(
        self, loss: TracedLoss, cuts: Cuts, owner: Sequence[int], params: Sequence[StateLeaf], slicing: Slicing
    ) -> Iterator[Warning | None]:
        """What to tell the user of these stages; what ranks of unequal width cannot share is refused."""
        options, placement, specs = self.options, self.options.placement, [leaf.spec for leaf in params]
        held_on = [{home, *stages} for home, stages in zip(owner, readers(loss.param_uses, len(owner), cuts), strict=True)]
        if not placement.is_even:
            widths = [{placement[stage].num_shards for stage in stages} for stages in held_on]
            fix = "change the sharding, the number of devices of that rank, or where stages begin: cuts=[...]"
            check_even(specs, loss, widths, fix)
        yield options.devices_warning
        eqns = loss.graph.eqns if self.optimizer is None else (*loss.graph.eqns, *self.optimizer.eqns)
        opt = () if self.optimizer is None else self.optimizer.shapes
        yield from options.idle(
            calls_host=calls_host(eqns),
            waits=not all(map(_stays, opt)),
            divides=loss.graph.sharded,
            shares=self._shares(params, slicing),
            copies=any(leaf.late and not leaf.changes for leaf in params),
        )
        if not loss.graph.sharded:
            divided_on = {stage for spec, stages in zip(specs, held_on, strict=True) if any(spec) for stage in stages}
            yield from undivided_warnings(placement, divided_on, by_list=options.by_list)
        yield None if self.optimizer is None else _lost_state(loss, self.given[0], self.frozen)
        chosen = options.cuts is None and self.like is None and options.balance != "memory"
        yield uneven(loss, cuts, placement.speeds) if chosen else None
        yield _offloading(loss)

    def _shares(self, params: Sequence[StateLeaf], slicing: Slicing) -> bool:
        """Whether replicas hold parts of anything that they are asked to divide."""
        split = {leaf.index for leaf in params if leaf.part != over_model(leaf.part)}
        optimizer, leaves = self.optimizer, jax.tree.leaves(self.given[0])
        if optimizer is None or self.options.shard != {"optimizer"}:
            return bool(split)
        homes = {(home, aval.shape) for home, aval in zip(optimizer.homes, optimizer.shapes, strict=True)}
        return not split.isdisjoint(slicing.leaves(k for k, leaf in enumerate(leaves) if (k, leaf.shape) in homes))

    def measured(self, loss: TracedLoss, layout: Layout, first: CutLoss, programs: Programs) -> tuple[Layout, CutLoss]:
        """As ``at``, by what the stages of a first cut took, each on its rank; of ranks of unequal width as on the narrowest."""
        schedule, places = self.options.schedule, self.options.placement.holding(layout.leaves)
        taken = stage_times(first, {action.kind for action in schedule.order} - {Kind.F}, places.places, programs)
        seconds = [each * speed for each, speed in zip(taken, places.speeds, strict=True)]
        ends = [0, *first.cuts, len(first.loss.spine)]
        estimated = [sum(first.loss.costs[start:end]) for start, end in itertools.pairwise(ends)]
        links = Links(*link_times(places.places)).scaled(sum(estimated) / max(sum(seconds), 1e-12))
        return replace(self, links=links).at(replace(loss, clock=clock_of(estimated, seconds)))

    def _slicing(self, loss: TracedLoss, cuts: Cuts) -> Slicing:
        """The leaves that a cut loop runs over, and the leaves that several stages read row by row.

        These stay whole if their rows are sharded. Slices that the optimizer cannot run on are taken back. The shared parameters of
        ``like`` are held as there, and so are those of which each replica has its own, if they have as many rows.
        """
        params = self.given[0]
        shared = num_shared(params)
        if self.like is not None:
            (known, axes), own = self.like.slicing, jax.tree.leaves(params)[shared:]
            rows = [leaf.shape[axis : axis + 1] for leaf, axis in zip(own, axes[shared:] or [0] * len(own), strict=True)]
            same = len(known) == shared + len(own) and all(
                not sizes or count == (sum(sizes),) for sizes, count in zip(known[shared:], rows, strict=True)
            )
            return Slicing(known, axes) if same else Slicing((*known[:shared], *[()] * len(own)), (*axes[:shared], *[0] * len(own)))
        places = [loss.position.get(layer.result) for layer in loss.layers]  # None: no cut divides what depends on parameters alone
        stages = [None if place is None else bisect.bisect_right(cuts, place) for place in places]
        sharded = {leaf for leaf, spec in enumerate(self.specs) if next(iter(spec), None) is not None}
        single = rows_between(loss.params, loss.reads, cuts)
        axes = stacked_axes(loss.params, loss.layers)
        single = [() if leaf in sharded or axes[leaf] else sizes for leaf, sizes in enumerate(single)]
        loops = slices_between(loss.params, loss.layers, stages)
        return slicing_of(loops, single, axes=axes) if self.optimizer is None else self.optimizer.slicing(loops, single, axes)

    def _state_slicing(self, loss: TracedLoss, cuts: Cuts) -> Slicing:
        """The model state leaves of which layers of several stages make a row each; ``loss`` has each row as a leaf."""
        if self.like is not None or len(self.given) == 1:
            return Slicing() if self.like is None else self.like.state_slicing
        spans, sizes = iter(loss.state_spans), list[tuple[int, ...]]()
        for rows in self.rows.sizes:
            stages = [
                None if span is None else bisect.bisect_right(cuts, span[1]) for span in itertools.islice(spans, len(rows) or 1)
            ]
            counts = tuple(len(list(same)) for _, same in itertools.groupby(stages))
            sizes.append(counts if len(counts) > 1 else ())
        return Slicing(tuple(sizes))

    def fullest(self, layout: Layout, first: CutLoss) -> float:
        """The bytes of the device that holds most, by what the stages keep."""
        return self._bytes(layout.slicing).fullest(first.stages, layout.owner)

    def _bytes(self, slicing: Slicing) -> StageBytes:
        options = self.options
        schedule, placement, num_stages = options.schedule, options.placement, options.schedule.num_stages
        numbers = {place.devices: k for k, place in enumerate(placement.by_rank)}
        devices = tuple(numbers[place.devices] for place in placement.places)
        clock = simulate(schedule, forward=1, input_grad=1, weight_grad=1, offload=options.offload or None)
        kept = counts_at_peaks(lifetimes(clock.bars, clock.times.copies), devices)
        params = self._params(slicing)
        state = [0] * len(params) if self.optimizer is None else self.optimizer.bytes_beside(slicing)
        sizes = [count_bytes(leaf.aval) * (1 + (options.is_loss and not leaf.frozen)) for leaf in params]

        def parts(sizes: Sequence[int], specs: Sequence[PartitionSpec]) -> tuple[tuple[float, ...], ...]:
            """What of each leaf a device of each stage has."""
            axes = [place.axis_sizes for place in placement.places]
            return tuple(tuple(size / num_parts(spec, own) for size, spec in zip(sizes, specs, strict=True)) for own in axes)

        return StageBytes(
            of_user=parts(sizes, [leaf.spec for leaf in params]),
            of_owner=parts(state, [leaf.part for leaf in params]),
            num_kept=kept,
            policies=options.remat or (RematPolicy(),) * num_stages,
            devices=devices,
        )

    def _choose(self, loss: TracedLoss, slicing: Slicing) -> Cuts:
        names, count, like = self.options.cuts, self.options.schedule.num_stages, self.like
        if like is not None:
            if loss.primitives == like.spine:
                return like.cuts
            shared = like.num_shared  # where a task's leaves are others, they go where they are used
            others = len(loss.params) - shared
            owner = like.owner if len(loss.params) == len(like.owner) else (*like.owner[:shared], *[None] * others)
            return align(loss, count, owner, like.state_owner, train=self.options.is_loss)
        if names is not None:
            return resolve(loss, names)
        if self.options.balance == "memory":
            return balance_memory(loss, self._bytes(slicing))
        if loss.step is None or not self.options.placement.is_even:
            return balance(loss, count, speeds=self.options.placement.speeds)
        return balance_step(loss, count, self.links or links_of(self.options.placement), lengths_of(self.options.schedule))

    def _estimated(self, loss: TracedLoss) -> TracedLoss:
        """The loss with what its equations take in a step, if that decides where it is cut."""
        options = self.options
        if options.cuts is not None or self.like is not None or options.schedule.num_stages == 1 or options.balance == "flops":
            return loss
        if options.cut_gradient:  # stages before such a boundary have no backward, and there may be none to trace
            return loss
        if options.placement.num_shards > 1 and options.balance != "time":
            return loss  # nobody estimates collectives, of which a cut inside a pair of layers makes more
        kept = Counter(options.remat or [RematPolicy()]).most_common(1)[0][0]  # of most stages
        return replace(loss, step=step_costs(loss, kept, rates_of(options.devices[0])))


def _check_collectives(loss: TracedLoss, placement: Placement, weight: object, num_own: int) -> None:
    """Refuse collectives between replicas whose losses weigh differently in the step's."""
    if loss.graph.communicates and placement.num_replicas > 1 and (weight or num_own):
        rule = "a collective mixes what the losses of replicas depend on, and these must weigh the same"
        got = "weights of microbatches" if weight else "replicas with parameters of their own"
        raise ArgumentError("a loss with collectives between replicas", rule, got, "leave the collectives out, or the weights")


def links_of(placement: Placement) -> Links:
    """What sends between neighbouring stages take at least, by the rates of the devices."""
    devices = [place.devices[0] for place in placement.places]
    rates = rates_of(devices[0])
    near = [one.process_index == other.process_index for one, other in itertools.pairwise(devices)]
    return Links((0.0,) * len(near), tuple(1 / (rates.peer if same else rates.network) for same in near))


def lengths_of(schedule: Schedule) -> Lengths:
    """The clock of a schedule for many cuts at once."""

    def lengths(forward: PerStage, input_grad: PerStage, weight_grad: PerStage, hops: PerStage) -> np.ndarray:
        table = {Kind.F: forward, Kind.B: input_grad + weight_grad, Kind.I: input_grad, Kind.W: weight_grad}
        costs = StepCosts({kind: cast("tuple[float, ...]", each.T) for kind, each in table.items()}, transfer=tuple(hops.T))
        larger = cast("Callable[[Number, Number], Number]", np.maximum)
        times = replay(schedule.rows, schedule.stage_to_rank, costs.timing(schedule), larger=larger)
        return np.asarray(functools.reduce(larger, (ends[-1] for ends in times.ends)))

    return lengths


def speed_up(schedule: Schedule, placement: Placement, cut: CutLoss) -> float:
    """How many times as fast as one device a step is, by estimated costs of stages and sends; 0 if nothing costs anything.

    Of ranks of several devices, the narrowest stands for one device.
    """
    forward, input_grad, weight_grad = (np.asarray([[code.costs[kind] for code in cut.stages]]) for kind in "FIW")
    links = links_of(placement)
    moved = [cut.loss.boundary_bytes[at] for at in cut.cuts]
    hops = np.asarray([[num_bytes * each for num_bytes, each in zip(moved, links.per_byte, strict=True)]])
    work = schedule.num_microbatches * (forward + input_grad + weight_grad)[0]
    devices = [place.devices for place in placement.places]
    shared = {each: sum(seconds for seconds, other in zip(work, devices, strict=True) if other == each) for each in set(devices)}
    longest = max(float(lengths_of(schedule)(forward, input_grad, weight_grad, hops)[0]), *shared.values())
    return float(work @ np.asarray(placement.speeds)) / longest if longest else 0.0


def split_of(options: Options, batch: Batch, *, train: bool) -> Split:
    """How a batch is divided; for a step so that each replica's microbatches have as many examples as another's."""
    counts = options.schedule.num_microbatches, options.placement.num_replicas
    if isinstance(batch, Microbatches):
        own = {"shared": options.broadcast, "ragged": batch.weights is not None and counts[1] == 1}
        return Split(tuple(check_batch(part, 1, counts[1], called=f"microbatch {i}", **own) for i, part in enumerate(batch)))
    if not train:
        return split_any(check_batch(batch, 1, shared=options.broadcast), *counts)
    return Split(sizes(check_batch(batch, *counts, options.broadcast), counts[0]))


@dataclass(frozen=True)
class Placed:
    """Where the leaves of a state live."""

    layout: Layout
    leaves: Leaves[StateLeaf]
    base: Placement  # where each stage lives
    update: Update | None  # the optimizer, placed
    waiting: frozenset[Role] = frozenset()  # the roles of what waits in host memory between steps
    traced_under: Hashable = None  # the options of JAX under which the optimizer was traced

    @cached_property
    def placement(self) -> Placement:
        """Where each stage lives, and how values are sharded there."""
        return self.base.holding(self.leaves)

    @property
    def per_replica(self) -> bool:
        """Whether there are several replicas, each with parameters of its own."""
        return self.base.num_replicas > 1 and bool(self.leaves.own_params)

    @cached_property
    def names(self) -> Leaves[Name]:
        """What each leaf of a state is called where it is between steps."""
        there, stays = self.names_on_devices, self.numbers
        return there.map(lambda n: waiting(n) if n.ref.role in self.waiting and (n.ref.role, n.ref.index) not in stays else n)

    @cached_property
    def numbers(self) -> frozenset[tuple[Role, int]]:
        """The leaves that are single numbers, or keys, or a bank's, by role and index: in a step these are always on devices."""
        return frozenset((leaf.role, leaf.index) for leaf in self.leaves.flat() if leaf.own or _stays(leaf.aval))

    @cached_property
    def names_on_devices(self) -> Leaves[Name]:
        """What each leaf of a state is called on the devices of its stage."""
        return self.leaves.map(lambda leaf: leaf.name(self.base.num_replicas))

    @cached_property
    def shapes(self) -> Leaves[Aval]:
        """The shape of each leaf of a state."""
        return self.leaves.map(lambda leaf: leaf.aval)

    @cached_property
    def shapes_by_role(self) -> Mapping[tuple[Role, int], Aval]:
        """The shape of each leaf of a state, by what it is and its number."""
        return {(leaf.role, leaf.index): leaf.aval for leaf in self.leaves.flat()}

    @cached_property
    def homes(self) -> Leaves[Home]:
        """The device, or sharding, of each leaf of a state."""
        return self.names.map(lambda name: self.placement[name.stage].home(name.ref))


def _stays(aval: Aval) -> bool:
    """Whether a leaf is too small to wait in host memory, or a key."""
    return math.prod(aval.shape) <= 1 or jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def place_leaves(options: Options, layout: Layout, first: CutLoss) -> Placed:
    """Say where every leaf of a state lives, and give each of the equations of the optimizer to a stage."""
    scaling, loss_stage, leaves = options.loss_scale, len(first.stages) - 1, layout.leaves
    scales = () if scaling is None else shapes_of(scaling.init())
    scale = [
        StateLeaf(Role.LOSS_SCALE, k, aval, loss_stage, changes=scaling is not None and not (scaling.is_late and k == scaling.by))
        for k, aval in enumerate(scales)
    ]
    leaves = leaves._replace(loss_scale=scale)
    if layout.optimizer is None:
        return Placed(layout, leaves, options.placement, None, options.waiting)
    (loss,) = shapes_of(first.loss.graph.outputs[:1])
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout.params)]
    optimizer = layout.optimizer.reading(loss).held(layout.slicing)
    replicas = options.placement.num_replicas
    update = plan_update(optimizer, leaves, paths, loss, loss_stage, scaling, num_replicas=replicas)
    leaves = update.leaves._replace(model_state=leaves.model_state)
    return Placed(layout, leaves, options.placement, update, options.waiting, trace_context())


class Preparer:
    """What is lowered for the shapes of a batch: the loss traced and cut once for each microbatch's shapes, owners unchanged."""

    def __init__(self, options: Options, layout: Layout, placement: Placement, first: CutLoss, microbatch: Batch, key: Key | None):
        self.options, self.layout, self.placement = options, layout, placement
        self.groups = ReplicaGroups()
        self._is_unjudged = options.schedule.num_microbatches * placement.num_replicas == 1  # as one microbatch is the whole batch
        self.tracing = Tracing(options, layout.frozen, layout.follows)
        self._cuts = LRU[CutLoss](4 * options.max_shapes)  # a shape has microbatches of two sizes, to train and to evaluate
        self._cuts.put((options.loss_fn, shapes_key(microbatch, key), options.is_loss, False), first)
        self._first_shapes = microbatch, None if key is None else avals_of(key)
        self._known_programs: WeakValueDictionary[Hashable, Program] = WeakValueDictionary()
        self._known_constants: WeakValueDictionary[int, Constant] = WeakValueDictionary()

    def for_options(self, options: Options, placed: "Placed") -> "Preparer":
        """The same owners, groups and cuts, with stages that keep what these options say.

        For one of several replicas, whose devices have no others beside them, nothing is cut yet.
        """
        other, placement = copy.copy(self), placed.placement
        other.options, other.layout, other.placement = options, placed.layout, placement
        other.tracing = Tracing(options, self.layout.frozen, self.layout.follows)
        if placed.layout is not self.layout:
            other._known_programs = WeakValueDictionary()
        if placement.num_replicas != self.placement.num_replicas:
            other._cuts, other._known_programs = LRU[CutLoss](4 * options.max_shapes), WeakValueDictionary()
            return other
        if options.remat == self.options.remat:
            return other
        other._cuts = LRU[CutLoss](4 * options.max_shapes)
        known = {"packs": self.layout.packs, "state_owner": self.layout.state_owner}
        for name, cut in self._cuts.items():
            train = any(code.backward for code in cut.stages)
            again = other.tracing.cut(cut.loss, cut.cuts, self.layout.owner, cut.reducers, train=train, **known)
            other._cuts.put(name, replace(again, weight=cut.weight))
        return other

    def cut_for(self, loss_fn: LossFn, microbatch: Batch, key: Key | None, *, train: bool, alone: bool = False) -> CutLoss:
        """The loss cut at one microbatch's shapes, with every parameter where its owner is.

        ``alone``: another loss than the pipeline's, whose microbatch is the whole batch, of which there is nothing to tell.
        """
        name = loss_fn, shapes_key(microbatch, key), train, alone
        return self._cuts.get_or_make(name, lambda: self._cut(loss_fn, microbatch, key, train=train, alone=alone))

    @property
    def first_cut(self) -> CutLoss:
        """The loss cut at the shapes of the batch that decided the layout, which is made again if it was forgotten."""
        microbatch, key = self._first_shapes
        return self.cut_for(self.options.loss_fn, microbatch, key, train=self.options.is_loss)

    def _cut(self, loss_fn: LossFn, microbatch: Batch, key: Key | None, *, train: bool, alone: bool) -> CutLoss:
        layout, options = self.layout, self.options
        loss = self.tracing.trace(loss_fn, layout.variables, microbatch, key, train=train)
        cuts = self._cuts_of(loss_fn, loss, train=train)
        loss, reducers, weight = with_copies(loss, cuts, layout.copies), layout.reducers, layout.weight
        if loss_fn != options.loss_fn:
            merge = self.tracing.merge(loss, loss_fn, layout.variables, microbatch, key)
            reducers, weight = merge.reducers, merge.weight
            if merge.warning is not None and not alone:
                warn(merge.warning)
        known = {"packs": layout.packs, "state_owner": layout.state_owner}
        return replace(self.tracing.cut(loss, cuts, layout.owner, reducers, train=train, **known), weight=weight)

    def _cuts_of(self, loss_fn: LossFn, loss: TracedLoss, *, train: bool) -> Cuts:
        """Where a trace is cut: as one of the same equations at other shapes is, or so that owners stay.

        A model state passes from microbatches of one size to those of another, so its new value is made on the same stage in both.
        """
        layout = self.layout
        if loss.primitives == layout.spine:
            return layout.cuts
        for name, cut in list(self._cuts.items()):  # another thread may add some
            other, _, trained, _ = cast("tuple[LossFn, Hashable, bool, bool]", name)
            same = other == loss_fn and trained == train
            if same and with_copies(loss, cut.cuts, layout.copies).primitives == cut.loss.primitives:
                return cut.cuts
        return align(loss, self.options.schedule.num_stages, layout.owner, layout.state_owner, train=train)

    def is_whole(self, batch: Batch, key: Key | None) -> bool:
        """Whether the loss of a step is known to be that of the whole batch of these shapes."""
        options, shared = self.options, self.tracing.shared(batch)
        if isinstance(batch, Microbatches):
            return False
        parts = [resized(batch_avals(batch), size, shared) for size in dict.fromkeys(split_of(options, batch, train=True).sizes)]
        losses = [(self.cut_for(options.loss_fn, part, key, train=True).loss, part) for part in parts]
        return all(self.tracing.merge(loss, options.loss_fn, self.layout.variables, part, key).whole for loss, part in losses)

    @property
    def num_cuts(self) -> int:
        """How many cut losses are kept."""
        return len(self._cuts)

    def forget(self, used: Collection[int]) -> None:
        """Let go of the cuts that are not among those used, by ``id``."""
        for name in [name for name, cut in self._cuts.items() if id(cut) not in used]:
            del self._cuts[name]

    def step(self, batch: Batch, key: Key | None, *, loss_fn: LossFn | None = None, train: bool = True) -> Step:
        """What to lower for a batch of these shapes."""
        options, layout, replicas = self.options, self.layout, self.placement.num_replicas
        chosen = loss_fn or options.loss_fn
        self.tracing.check_key_taken(chosen, key)
        split, shared = split_of(options, batch, train=train), self.tracing.shared(first_of(batch))
        batch, one_by_one = batch_avals(batch), isinstance(batch, Microbatches)
        whole = batch if isinstance(batch, Microbatches) else [resized(batch, sum(split.sizes), shared)] * len(split.sizes)
        parts = [resized(part, size, shared) for part, size in zip(whole, split.sizes, strict=True)]
        batch = Microbatches(parts, batch.weights) if isinstance(batch, Microbatches) else whole[0]
        shapes = [shapes_key(part, None) for part in parts]
        different = dict(zip(shapes, parts, strict=True))
        alone = chosen != options.loss_fn and len(parts) * replicas == 1
        cuts = tuple(self.cut_for(chosen, part, key, train=train, alone=alone) for part in different.values())
        self._check(cuts, split, chosen, parts, key, batch if isinstance(batch, Microbatches) and train else None)
        leaves, num_leaves = jax.tree.leaves(batch), len(jax.tree.leaves(parts[0]))
        given = list(given_names(num_leaves, shared, len(parts) if one_by_one else None))
        if len(given) < len(leaves):  # their weights are the last
            if options.reduction == "sum":
                rule = "the losses of all microbatches are added, so none has a weight"
                raise BatchError("Microbatches(weights=...)", rule, 'reduction="sum"', "leave the weights or the reduction out")
            given.append(Name(CALLER, Ref(Role.BATCH, num_leaves, shared=True)))
            weights = given_weights(leaves[-1], given[-1], len(leaves) - 1, replicas)
        else:
            weight = layout.weight if chosen == options.loss_fn else cuts[0].weight
            weights = None if weight is None else weigh(weight, batch, given, shared, split, replicas)
        return Step(
            cuts=cuts,
            variants=tuple(list(different).index(shape) for shape in shapes),
            split=split,
            leaves=layout.leaves,
            num_replicas=replicas,
            num_shards=self.placement.num_shards,
            batch=tuple(leaves),
            given=tuple(given),
            shared=shared,
            one_by_one=one_by_one,
            key=None if key is None else jax.eval_shape(raw_key, key),
            implementation=key_implementation(key),
            summed=options.reduction == "sum",
            programs=self._known_programs,
            constants=self._known_constants,
            weights=weights,
            visits=Role.GRAD in options.waiting,
        )

    def _check(
        self,
        cuts: Sequence[CutLoss],
        split: Split,
        loss_fn: LossFn,
        parts: Sequence[Batch],
        key: Key | None,
        microbatches: Microbatches | None,
    ) -> None:
        """Refuse what the microbatches of a step cannot be put together of, and tell of the first that are given one by one."""
        count = self.placement.num_replicas
        check_aux([cut.loss for cut in cuts], cuts[0].reducers, len(parts) * count)
        if microbatches is not None and self._is_unjudged and len(parts) > 1:
            self._is_unjudged = False
            warning = self.tracing.merge(cuts[0].loss, loss_fn, self.layout.variables, parts[0], key, microbatches).warning
            if warning is not None:
                warn(warning)
        if split.num_idle and any(cut.loss.graph.communicates for cut in cuts):
            rule, fix = "collectives between replicas need as many examples on each", f"pass a multiple of {count} examples"
            raise BatchError("batch", rule, f"{split.num_examples(count)} examples for {count} replicas", fix)
