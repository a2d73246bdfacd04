"""One pipeline at work: a placed loss and optimizer, and a plan for each batch shape that it has met.

An engine (``open_engine``, once shapes are known) speaks in ``Leaves``; its faces, ``Pipeline`` and ``value_and_grad``, in trees.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar, cast

import jax
import optax

from jaxpp.engine.compared import step_texts
from jaxpp.engine.layout import Layout, Placed, Preparer, Traces, lay_out, place_leaves
from jaxpp.engine.made_to_measure import made_for
from jaxpp.engine.outcome import LoweredStep, Outcome, Purpose, aux_names, batch_leaves, call_of, check_leaves
from jaxpp.engine.tail import Tail
from jaxpp.engine.tracing import check_key, same_shapes, shapes_key
from jaxpp.errors import StateError
from jaxpp.lowering.builder import CALLER, Builder, Flow, LineList, Name, here
from jaxpp.lowering.lower import INIT_KEY, add_gradients, add_wait, add_zero_gradients, forward_actions, lower, lower_init
from jaxpp.lowering.passes.donate import donate, let_go
from jaxpp.lowering.passes.flow import in_flow, with_previous
from jaxpp.lowering.passes.offload import offload, without_needless
from jaxpp.lowering.passes.transform import Pass, transform
from jaxpp.lowering.passes.visits import early, visit
from jaxpp.lowering.plan import Execution, Plan
from jaxpp.lowering.step import COPIES, Leaves, Step, state_name, total_name
from jaxpp.optim.update import Update, UpdateWriter, flat
from jaxpp.options import Options
from jaxpp.runtime.bind import Bound, bind_lines, compile_plan, report
from jaxpp.runtime.compile import Programs, trace_context
from jaxpp.runtime.debug_nans import NanCheck, flags
from jaxpp.runtime.edges import HOST_MEMORY, at_replica, put, put_at, split_over_replicas, to_homes, unaliased
from jaxpp.runtime.execute import Observer, execute, hand_over, limit_of
from jaxpp.runtime.interrupts import despite_ctrl_c
from jaxpp.runtime.lru import LRU
from jaxpp.runtime.not_public import cudnn_of
from jaxpp.runtime.place import Place, Placement
from jaxpp.runtime.processes.channel import Agreement, agreement, transfers
from jaxpp.runtime.processes.here import processes_of
from jaxpp.runtime.threads import Threads
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.offload import Offloaded
from jaxpp.schedule.registry import AUTO, with_microbatches
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.floating import has_gradient
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import calls_host, describe
from jaxpp.stages.loss.microbatch import Microbatches, batch_avals, raw_key
from jaxpp.stages.program import Ref, Role
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.stacked import is_slices
from jaxpp.types import Array, Batch, Key, Leaf, LossFn, Tree

_T = TypeVar("_T")


@dataclass(eq=False)
class _AtShape:
    """What is lowered for a loss at one batch shape, by whether it is differentiated and fused; and the plans made of it."""

    steps: dict[tuple[bool, bool], tuple[Step, Builder]] = field(default_factory=dict)
    plans: dict[Hashable, tuple[Plan, LoweredStep]] = field(default_factory=dict)


@dataclass(eq=False)
class Engine:
    """Runs the steps of one pipeline; without an optimizer, for gradients only."""

    options: Options
    optimizer: optax.GradientTransformation | None
    placed: Placed
    preparer: Preparer
    programs: Programs
    opened_at: Hashable  # the shapes of the batch and the key of which the layout was made

    def __post_init__(self):
        self._limit = limit_of(self.placement)
        self._shapes = LRU[_AtShape](self.options.max_shapes)
        self._by_count = LRU[Engine](self.options.max_shapes)
        self._updates = LRU[Update](self.options.max_shapes)
        if self.placed.update is not None:
            self._updates.put(self.placed.traced_under, self.placed.update)
        # What all processes have agreed on. Plans are no measure of that: a process may forecast a step that the others do not.
        self._agreed = LRU[dict[Hashable, Agreement]](self.options.max_shapes)

    def with_schedule(self, schedule: Schedule, offload: tuple[int | None, ...] | None = None) -> "Engine":
        """The same cuts in another order, programs shared where a stage keeps its device; ``offload`` is as here if None."""
        offload = self.options.offload if offload is None else offload
        return self.with_options(dataclasses.replace(self.options, schedule=schedule, offload=offload, made_to_measure=False))

    def with_options(self, options: Options) -> "Engine":
        """The same cuts and owners where options differ in the order, in what stages keep, or in where a state is."""
        placed = dataclasses.replace(self.placed, base=options.placement, waiting=options.waiting)
        if options.shard != self.options.shard:
            placed = place_leaves(options, self.layout.divided(options), self.preparer.first_cut)
        return Engine(options, self.optimizer, placed, self.preparer.for_options(options, placed), self.programs, self.opened_at)

    def at(self, batch: Batch) -> "Engine":
        """The engine whose schedule has as many microbatches as are given in place of a batch; itself for a batch."""
        schedule = self.options.schedule
        if not isinstance(batch, Microbatches) or len(batch) == schedule.num_microbatches or not self.options.is_loss:
            return self
        return self._by_count.get_or_make(len(batch), lambda: self.with_schedule(self._schedule_of(len(batch))))

    def _schedule_of(self, num_microbatches: int) -> Schedule:
        """The schedule of so many microbatches. What is made to measure is measured on the first batch, whatever comes later."""
        if self.options.schedule.name != AUTO:
            return with_microbatches(self.options.schedule, num_microbatches)
        owners = self.options.schedule.stage_to_rank  # the parameters are there
        return made_for(self.options, self.preparer.first_cut, self.programs, num_microbatches, owners)

    def with_remat(self, remat: tuple[RematPolicy, ...] | None, offload: tuple[int | None, ...]) -> "Engine":
        """The same cuts and the same schedule, with stages that keep something else."""
        return self.with_options(dataclasses.replace(self.options, remat=remat, offload=offload))

    def with_host(self, host: str | None) -> "Engine":
        """The same cuts and the same schedule, with other parts of the state in host memory."""
        return self if host == self.options.host else self.with_options(self.options.with_host(host))

    @cached_property
    def replicas(self) -> tuple["Engine", ...]:
        """An engine for each replica, which holds the same parameters and knows of no others; itself if there is one."""
        if self.placement.num_replicas == 1:
            return (self,)
        return tuple(self.with_options(self.options.alone(number)) for number in range(self.placement.num_replicas))

    def at_replica(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """The parameters of a state that is held by all replicas, as this engine of one of them holds them."""
        read = self.placed.homes
        pairs = [(leaves.params, read.params, False), (leaves.own_params, read.own_params, True)]
        params, own = ([at_replica(leaf, home, led=led) for leaf, home in zip(*pair, strict=True)] for *pair, led in pairs)
        return Leaves(params, own)

    @cached_property
    def alone(self) -> bool:
        """Whether one process has all devices."""
        return len(processes_of(self.options.devices)) < 2

    @property
    def layout(self) -> Layout:
        """What the first batch decided."""
        return self.placed.layout

    @property
    def placement(self) -> Placement:
        """Where each stage lives."""
        return self.placed.placement

    @property
    def update(self) -> Update:
        """The optimizer, placed; traced again under other options of JAX than those under which the state was laid out."""
        return self._updates.get_or_make(trace_context(), self._traced_again)

    @property
    def watched(self) -> tuple[int, ...]:
        """The stages that own parameters which are not frozen."""
        return () if self.placed.update is None else self.placed.update.watched

    def _traced_again(self) -> Update:
        optimizer, first = self.layout.optimizer, self.placed.update
        assert optimizer and first, "value_and_grad has no optimizer, and no updates"
        layout = dataclasses.replace(self.layout, optimizer=optimizer.again())
        found = place_leaves(self.options, layout, self.preparer.first_cut).update
        assert found, "an optimizer has an update"
        had, has = ([leaf.aval for leaf in update.leaves.all_opt] for update in (first, found))
        if (first.tree, first.leaves.all_opt) != (found.tree, found.leaves.all_opt):
            rule = "a state is trained under the options of JAX that decide its types as they were when init made it"
            changed = [f"{describe(a)} becomes {describe(b)}" for a, b in zip(had, has, strict=False) if a != b]
            fix = "set jax_enable_x64 and the like before init, or call init again"
            raise StateError("state", rule, changed or "an optimizer state of another structure", fix)
        return found

    def leaves(self, state: Tree) -> Leaves[Array]:
        """The leaves of a state whose arrays live where this engine's do, by what they are."""
        names = self.placed.names
        leaves = jax.tree.leaves(state)
        return (names if len(leaves) == len(names.flat()) else names.shared).fill(leaves)

    def bring(self, variables: Tree) -> Leaves[Array]:
        """Parameters as they are held, and the model state if the loss has any, brought to their owners."""
        homes = self.placed.homes.variables
        return homes.fill(to_homes(jax.tree.leaves(variables), homes.flat()))

    def copy(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """Copies of the leaves of a state, each on its owner."""
        return leaves.fill([put(leaf, home) for leaf, home in zip(leaves.flat(), self.placed.homes.flat(), strict=True)])

    def first_state(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """The leaves of a first state, of its variables and the optimizer's: with the loss scale, and copies of parameters."""
        placed, params = self.placed, leaves.params
        for group in COPIES:
            pairs = zip(getattr(placed.leaves, group), getattr(placed.homes, group), strict=True)
            leaves = leaves._replace(**{group: [put(params[leaf.index], home) for leaf, home in pairs]})
        values, names = [] if self.options.loss_scale is None else self.options.loss_scale.init(), placed.names.loss_scale
        scale = [put_at(self.placement[name.stage], name.ref, value) for value, name in zip(values, names, strict=True)]
        return leaves._replace(loss_scale=scale)

    def before_last(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """The leaves of a state with the parameters and the scale of the gradients of its next step: with ``delay`` older ones."""
        params, scale, scaling = list(leaves.params), list(leaves.loss_scale), self.options.loss_scale
        if scaling is not None:
            scale[scaling.scale] = scale[scaling.by]
        for leaf, value in zip(self.placed.leaves.previous, leaves.previous, strict=True):
            params[leaf.index] = value
        return leaves._replace(params=params, loss_scale=scale)

    def distinct(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """The leaves of a state after a step, with copies of those that are the arrays of the state before it."""
        placed, homes = self.placed.leaves, self.placed.homes
        if not leaves.own:  # those of a bank's sets are in the bank
            placed, homes = placed.shared, homes.shared
        table = zip(leaves.flat(), placed.flat(), homes.flat(), strict=True)
        return leaves.fill([value if leaf.changes else put(value, home) for value, leaf, home in table])

    def sliced(self, made: Tree) -> Tree:
        """What init was given or made, as it is held."""
        params, *state = made if self.options.has_state else (made,)
        shared = self.layout.slicing.first(len(jax.tree.leaves(params, is_leaf=is_slices)))
        sliced = shared.of(params)
        return (sliced, *map(self.layout.state_slicing.of, state)) if self.options.has_state else sliced

    def cut_at(self, microbatch: Batch, key: Key | None) -> CutLoss:
        """The loss cut at the shapes of a microbatch; a key that is missing, or not taken, is refused."""
        self.preparer.tracing.check_key_taken(self.options.loss_fn, key)
        return self.preparer.cut_for(self.options.loss_fn, batch_avals(microbatch), key, train=self.options.is_loss)

    def make_params(self, graph: Graph, key: Key, wanted: Leaves[Name]) -> Leaves[Array]:
        """Make the leaves that the traced init returns, which are called ``wanted``, each on its owner."""
        made = list(map(here, wanted.flat()))
        return wanted.fill(self._run_once("init", lower_init(graph, [INIT_KEY], made), [INIT_KEY], made, [key]))

    def make_opt_state(self, params: Sequence[Array]) -> list[Array]:
        """Make the optimizer state of all parameters, shared and own, each leaf on its owner."""
        names = self.placed.names_on_devices
        given, made = names.all_params, names.all_opt
        builder = lower_init(self.update.init_graph, given, made, "init_optimizer")
        return self._run_once("the optimizer's init", builder, given, made, params)

    def _run_once(
        self, what: str, builder: Builder, inputs: Sequence[Name], outputs: Sequence[Name], arguments: Sequence[Array]
    ) -> list[Array]:
        bound = self.bind(builder.finish(inputs, outputs))
        plan, _ = compile_plan(bound, self.programs, self.preparer.groups, leaves=self.placed.shapes_by_role, what=what)
        return execute(plan, arguments)

    def bind(
        self,
        draft: LineList,
        gives: Collection[Name] = (),
        told: Collection[Name] = (),
        *,
        offloaded: Sequence[Offloaded] = (),
        by_stage: bool = False,
        flowing: Pass | None = None,
    ) -> Bound:
        """Lines over names as lines with places: all passes, in their order.

        Args:
            draft: lines in which everything is on devices.
            gives: the values that nobody reads once there is their next version: arguments that the caller gives up, and sums.
            told: the results that every process is told.
            offloaded: the residuals that wait in host memory.
            by_stage: whether a stage is updated as soon as its gradients are complete.
            flowing: what divides them for the next step to begin before they end.
        """
        placement, waiting = self.placement, self.options.waiting
        hosts = [tuple(() if self.alone else processes_of([one]) for one in place.devices) for place in placement.places]
        passes: list[tuple[object, Pass | None]] = [
            (offloaded, partial(offload, offloaded=offloaded, order=self.options.schedule.order)),
            (told and not self.alone, partial(report, placement=placement, told=told)),
            (by_stage, early),
            (waiting, partial(visit, places=placement.places, hosts=hosts, roles=waiting, stays=self.placed.numbers)),
            (waiting, partial(let_go, gives=gives, delete=_delete)),
            (True, partial(bind_lines, placement=placement)),
            (True, without_needless),
            (not any(flags()), partial(donate, gives=gives)),  # what made a NaN runs again, on the same arguments
            (flowing, flowing),
        ]
        return cast("Bound", transform(draft, [one for wanted, one in passes if wanted and one]))

    def plan(
        self,
        purpose: Purpose,
        batch: Batch,
        key: Key | None,
        *,
        loss_fn: LossFn | None = None,
        donate: bool = True,
        watched: bool = False,
    ) -> tuple[Plan, LoweredStep]:
        """The plan for a batch of these shapes, compiled at the first call, and what it was made of."""
        if purpose != "forward" and (other := self.at(batch)) is not self:
            return other.plan(purpose, batch, key, loss_fn=loss_fn, donate=donate, watched=watched)
        shape, watched = (loss_fn, shapes_key(batch, key)), watched or self._limit is not None
        name, kept = (purpose, donate, watched, flags()), self._shapes.find(shape)
        if kept is None or name not in kept.plans:
            options = {"loss_fn": loss_fn, "donate": donate, "watched": watched}
            made = despite_ctrl_c(self._make_plan, purpose, batch, key, **options)  # no closure: hidden frames would keep the batch
            kept = self._keep(shape, lambda kept: kept.plans.update({name: made}))
        return kept.plans[name]

    def _agreed_plan(
        self, purpose: Purpose, batch: Batch, key: Key | None, loss_fn: LossFn | None, *, donate: bool, watched: bool
    ) -> tuple[Plan, LoweredStep, Agreement]:
        given = {"loss_fn": loss_fn, "donate": donate}
        what, shape = (purpose, donate, watched), (loss_fn, shapes_key(batch, key))
        calls = self._agreed.find(shape) or {}
        if known := calls.get(what):
            return *self.plan(purpose, batch, key, **given, watched=watched), known
        with agreement(call_of(purpose, is_loss=self.options.is_loss), self.options.devices) as agree:
            lowered = despite_ctrl_c(self.lower, purpose, batch, key, **given)
            check_leaves(lowered, batch, batch_leaves(batch))
            agree(lambda: step_texts(self.options, self.placed, lowered, batch, key))
            found = self.plan(purpose, batch, key, **given, watched=watched)
        self._agreed.put(shape, calls | {what: agree})
        return *found, agree

    def _make_plan(
        self, purpose: Purpose, batch: Batch, key: Key | None, *, loss_fn: LossFn | None, donate: bool, watched: bool
    ) -> tuple[Plan, LoweredStep]:
        lowered = self.lower(purpose, batch, key, loss_fn=loss_fn, donate=donate)
        what = f"for a batch of {lowered.step.split.num_examples(self.placement.num_replicas)}"
        checked = NanCheck(lowered.step, scaled=self.options.loss_scale is not None) if any(flags()) else None
        options = {"leaves": self.placed.shapes_by_role, "watched": watched, "check": checked, "what": what}
        options |= {"in_threads": self.in_threads(purpose, lowered.step)}
        plan, bound = compile_plan(lowered.bound, self.programs, self.preparer.groups, **options)
        return plan, dataclasses.replace(lowered, bound=bound)

    @property
    def kept(self) -> tuple[tuple[Plan, LoweredStep], ...]:
        """The plans that are kept, and what they were made of."""
        return tuple(plan for kept in self._shapes.values() for plan in kept.plans.values())

    def _keep(self, shape: Hashable, change: Callable[[_AtShape], object]) -> _AtShape:
        """Keep something for a shape; the least recently used shape may be forgotten for it, with the cuts that no other uses.

        Microbatches that are given one by one come in ever new orders of the same shapes, whose cuts stay.
        """
        kept = self._shapes.find(shape) or _AtShape()
        change(kept)
        full, one_by_one = self._shapes.put(shape, kept), any(step.one_by_one for step, _ in kept.steps.values())
        if full and not one_by_one:
            shapes = [at for engine in (self, *self._by_count.values()) for at in engine._shapes.values()]
            self.preparer.forget({id(cut) for at in shapes for step, _ in at.steps.values() for cut in step.cuts})
        return kept

    def lower(
        self, purpose: Purpose, batch: Batch, key: Key | None, *, loss_fn: LossFn | None = None, donate: bool = True
    ) -> LoweredStep:
        """The lines of a step for a batch of these shapes; nothing is compiled for it."""
        check_key(key, loss_fn or self.options.loss_fn, 2 + self.options.has_state)
        train = purpose != "forward"
        if train and (other := self.at(batch)) is not self:
            return other.lower(purpose, batch, key, loss_fn=loss_fn, donate=donate)
        shape = loss_fn, shapes_key(batch, key)
        kept = self._shapes.find(shape)
        schedule, fused = self.options.schedule, train and self.options.fuses and not any(flags())
        if kept is None or (train, fused) not in kept.steps:
            with cudnn_of(self.options.devices):
                step = self.preparer.step(batch, key, loss_fn=loss_fn, train=train)
                forwards = forward_actions(schedule.num_stages, len(step.sizes), visits=step.visits)
                actions = schedule.order if train else forwards
                made = step, lower(step, actions, pairs=schedule.pairs if fused else {})
            kept = self._keep(shape, lambda kept: kept.steps.update({(train, fused): made}))
        step, lines = kept.steps[train, fused]
        builder = lines.copy()
        results, tree = jax.tree.flatten(self._results(purpose, builder, step), is_leaf=lambda value: isinstance(value, Name))
        given = _read_by(purpose, self.placed.names_on_devices)
        inputs = [*given.flat(), *step.given, *([] if key is None else [Name(CALLER, Ref(Role.KEY))])]
        donate = donate and purpose == "update" and not any(flags()) and not calls_host(self.update.graph.eqns)
        gives = [*(given._replace(model_state=(), loss_scale=()).flat() if donate else ()), *step.own_sums]
        ends = step.calls_host or self.options.offloaded or step.visits or self._limit is not None or not self.alone
        flows = donate and self.options.delay and not ends
        draft = builder.finish(inputs, results)
        found: Outcome[Name] = tree.unflatten(draft.outputs)
        bound = self.bind(
            draft,
            gives,
            told=[name for name in (found.loss, found.grad_norm, found.finite, *found.aux) if name is not None],
            offloaded=self.options.offloaded if train else (),
            by_stage=step.visits,
            flowing=partial(self._in_flow, tree=tree) if flows else None,
        )
        return LoweredStep(bound, step, tree)

    def _results(self, purpose: Purpose, builder: Builder, step: Step) -> Outcome[Name]:
        """What the results of a step are called; adds the lines that make them of its gradients."""
        names = self.placed.names_on_devices
        loss = total_name(step.loss_stage, Role.LOSS) if self.options.is_loss else None
        found: Outcome[Name] = Outcome(loss, aux_names(step))
        last, held = len(step.sizes), names.model_state
        states = [state_name(name.stage, leaf, last, shared=name.ref.shared) for leaf, name in enumerate(held)]
        if purpose == "update":
            builder.lines = with_previous(builder.lines, {leaf.index for leaf in self.placed.leaves.previous})
            return self._add_update(builder, step, found, states)
        if purpose == "grads":
            add_gradients(builder, step)
            owners = zip(self.layout.owner, step.params, strict=True)
            grads = [total_name(stage, Role.GRAD, leaf) for leaf, (stage, shape) in enumerate(owners) if has_gradient(shape)]
            found = found._replace(grads=grads)
        return found._replace(model_state=states)

    def _in_flow(self, lines: LineList, tree: Tree) -> LineList:
        """The lines of a step as body and tail, if the next one can begin before it ends."""
        found: Outcome[Name] = tree.unflatten(lines.outputs)
        state = dict(zip(self.placed.names.shared.flat(), found.state.shared.flat(), strict=True))  # the next has sets of its own
        told = [found.loss, *found.aux, *found.state.model_state]
        return in_flow(lines, self.placement.places, self.options.schedule, state, told)

    def _add_update(self, builder: Builder, step: Step, found: Outcome[Name], states: Sequence[Name]) -> Outcome[Name]:
        update, names, packed = self.update, self.placed.names_on_devices, step.packed_sums
        add_zero_gradients(builder, step, [leaf for leaf in range(len(step.owner)) if leaf not in self.layout.frozen])
        if step.calls_host:
            leaves = [total_name(step.owner[leaf], Role.GRAD, leaf) for leaf in step.trained if leaf not in packed]
            grads = dict.fromkeys([*leaves, *(vector for vector, _ in packed.values())])
            add_wait(builder, "the loss", [found.loss, *found.aux, *grads, *states])
        calls = calls_host(update.graph.eqns)
        made = UpdateWriter(builder, update, found.loss, states, packed, self.placement.num_replicas, step.visits).run()
        if calls:
            add_wait(builder, "the optimizer", flat(made))
        finite = made.finite[0] if made.finite else None
        state = update.new_state(names, made, states)
        return found._replace(state=state, finite=finite, grad_norm=made.norm[0], squares=list(made.squares))

    def run(
        self,
        purpose: Purpose,
        leaves: Leaves[Array],
        batch: Batch,
        key: Key | None,
        *,
        loss_fn: LossFn | None = None,
        donate: bool = True,
        observer: Observer | None = None,
        watched: bool = False,
        hold: Callable[[], None] | None = None,
    ) -> Outcome[Array]:
        """Run one step on the leaves of a state, which ``update`` takes over with ``donate``, and on a whole batch.

        The observer sees every instruction, if ``watched`` also whether it is done; ``hold`` is called before a buffer is taken.
        """
        if self._limit is not None:
            observer = self._limit.beside(observer)
        if self.alone:
            plan, lowered = self.plan(purpose, batch, key, loss_fn=loss_fn, donate=donate, watched=watched)
            arguments = self._arguments(lowered, purpose, leaves, batch, key)
            outcome = lowered.outcome(execute(plan, arguments, observer, hold, self._threads_of(plan)))
        else:
            plan, lowered, agreed = self._agreed_plan(purpose, batch, key, loss_fn, donate=donate, watched=watched)
            names = self.preparer.groups.names
            about = f"for task {', '.join(map(repr, names if len(set(names)) > 1 else names[:1]))} " if names else ""
            arguments = agreed.again(lambda: self._arguments(lowered, purpose, leaves, batch, key), about)
            with transfers(call_of(purpose, is_loss=self.options.is_loss)):
                outcome = lowered.outcome(execute(plan, arguments, observer, hold))
        if donate and self.options.waiting:
            _let_go(leaves, outcome.state)
        return outcome

    def step(
        self,
        given: Leaves[Array] | Tail,
        batch: Batch,
        key: Key | None,
        *,
        own: Sequence[Array] = (),
        donate: bool = True,
        observer: Observer | None = None,
        watched: bool = False,
        hold: Callable[[], None] | None = None,
    ) -> Outcome[Array] | Tail:
        """A training step on the leaves of a state, or on what is left of the step before.

        With ``delay``, it is handed over up to its last forwards, beside the rest of the step before, and its own rest is returned.
        ``own`` is what each replica has of its own in this step, if a bank holds it. The other arguments are those of ``run``.
        """

        def whole(leaves: Leaves[Array]) -> Leaves[Array]:
            return leaves.with_own(own, self.placed.names) if own else leaves

        if self.options.delay and donate:
            plan, lowered = self.plan("update", batch, key, watched=watched)
            if (flow := lowered.bound.flow) is not None:
                leaves = whole(given.first.state if isinstance(given, Tail) else given)
                run = Execution(plan, self._arguments(lowered, "update", leaves, batch, key))
                return self._begin(given, leaves, run, lowered, flow, observer, hold)
        leaves = whole(given.outcome().state if isinstance(given, Tail) else given)
        return self.run("update", leaves, batch, key, donate=donate, observer=observer, watched=watched, hold=hold)

    def _begin(
        self,
        given: Leaves[Array] | Tail,
        leaves: Leaves[Array],
        run: Execution,
        lowered: LoweredStep,
        flow: Flow,
        observer: Observer | None,
        hold: Callable[[], None] | None,
    ) -> Tail:
        threads = self._threads_of(run.plan)
        if isinstance(given, Tail):
            if hold is not None:
                hold()
            before = given.beside(run, flow, observer)
            for slot, known, value in zip(run.plan.inputs, leaves.flat(), before.state.flat()):  # noqa: B905  (the batch comes behind)
                if known is None:
                    run.slots[slot] = value
        else:
            try:
                hand_over([(run, run.next(flow.body))], observer, threads)
            except BaseException:
                run.slots.clear()  # as in ``execute``
                raise
        return Tail(self, run, lowered, flow, threads, self.preparer.groups)

    @cached_property
    def threads(self) -> Threads:
        """The threads that hand over what the ranks run, one for each; they end with the engine."""
        return Threads(len(set(self.placement.places)))

    def _threads_of(self, plan: Plan) -> Threads | None:
        return self.threads if plan.turns else None

    def in_threads(self, purpose: Purpose, step: Step) -> bool:
        """Whether a thread for each rank hands over a step: not where the host looks at values, or processes count transfers."""
        looked_at = any(flags()) or step.calls_host or (purpose == "update" and calls_host(self.update.graph.eqns))
        if self.options.threads == "one" or looked_at or not self.alone:
            return False
        return self.options.threads == "ranks" or self.options.devices[0].platform == "gpu"

    def _arguments(
        self, lowered: LoweredStep, purpose: Purpose, leaves: Leaves[Array], batch: Batch, key: Key | None
    ) -> list[Leaf]:
        step, keys = lowered.step, [] if key is None else [raw_key(unaliased(key))]
        given = batch_leaves(batch)
        check_leaves(lowered, batch, given)
        if self.placement.num_replicas > 1:
            given, keys = split_over_replicas(given, keys, self.placement.num_replicas, step.whole)
        if step.weights is not None and not step.weights.looked:
            step.weights.look(given)
        return [*_read_by(purpose, leaves).flat(), *given, *keys]


def open_engine(
    options: Options,
    optimizer: optax.GradientTransformation | None,
    variables: tuple[Tree, ...],
    batch: Batch,
    key: Key | None,
    *,
    known: Engine | None = None,
    like: Layout | None = None,
    places: Sequence[Place] = (),
    traces: Traces | None = None,
) -> Engine:
    """The engine for parameters (and the model state, if any) and a batch of these shapes: the loss cut, the optimizer placed.

    ``known``, an engine of the same options, is returned if it is for these shapes, and lends its programs otherwise, itself
    unchanged whatever is refused. The loss is cut at the same places as in the layout ``like``. A schedule that is to be made to
    measure is made here; where the stages of ``places`` are, there its stages are too, if its ranks are there. ``traces`` are what
    engines share that are opened for the same loss, optimizer and parameters one after another.
    """
    shapes = shapes_key(batch, key)
    if known is not None and same_shapes(known.layout.given, variables) and known.opened_at == shapes:
        return known
    programs = Programs() if known is None else known.programs
    with cudnn_of(options.devices):
        layout, microbatch, first = lay_out(options, optimizer, variables, batch, key, programs, like, traces)
    placed = place_leaves(options, layout, first)
    preparer = Preparer(options, layout, placed.placement, first, microbatch, key)
    engine = Engine(options, optimizer, placed, preparer, programs, shapes)
    if not options.made_to_measure:
        return engine
    ranks, stages = ([place.devices for place in each] for each in (options.placement.by_rank, places))
    owners = [ranks.index(devices) for devices in stages] if set(stages) == set(ranks) else None
    return engine.with_schedule(made_for(options, first, programs, stage_to_rank=owners))


def _delete(*values: Array) -> tuple[()]:
    """Delete what waited in host memory; copies under way still end."""
    for value in values:
        value.delete()
    return ()


def _let_go(old: Leaves[Array], new: Leaves[Array]) -> None:
    """Delete what waited in host memory before a step and is there still, but for what is in the new state too."""
    kept = set(map(id, new.flat()))
    for leaf in old.flat() if new.flat() else ():
        if leaf.sharding.memory_kind == HOST_MEMORY and id(leaf) not in kept:
            leaf.delete()


def _read_by(purpose: Purpose, leaves: Leaves[_T]) -> Leaves[_T]:
    """The leaves of a state that a step reads: only an update reads the optimizer's, and only a backward the loss scale."""
    if purpose == "update":
        return leaves
    return leaves.variables._replace(loss_scale=leaves.loss_scale) if purpose == "grads" else leaves.variables
