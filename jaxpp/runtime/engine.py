"""One pipeline at work: its preparer, its placed optimizer, and a plan for each batch shape it has met.

``Pipeline`` and ``value_and_grad`` are two faces of an engine. It speaks in flat lists of leaves; the faces speak in the user's
trees.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpp.optim.emit import draft_birth, draft_update
from jaxpp.optim.place import Update, opt_name, plan_update, unread_gradients
from jaxpp.optim.rowwise import slicing_for
from jaxpp.options import Settings
from jaxpp.plan.builder import HOST, Draft, Name
from jaxpp.plan.init_params import INIT_KEY, draft_params
from jaxpp.plan.lower import draft_wait, draft_zeros, forward_actions, lower
from jaxpp.plan.plan import Plan
from jaxpp.plan.step import Job, param_name, state_name, total_name
from jaxpp.runtime.debug_nans import Checked, flags
from jaxpp.runtime.execute import Observer, execute
from jaxpp.runtime.place import Place
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.prepare import Preparer, avals_of, check_key, same_shapes
from jaxpp.runtime.sharding_rules import opt_specs_of
from jaxpp.runtime.transfer import divided, private, put_at
from jaxpp.schedule.base import Schedule
from jaxpp.stages.graph import Graph, calls_host
from jaxpp.stages.joint import Joint
from jaxpp.stages.loops.stacked import Slicing, is_slices
from jaxpp.stages.loss.microbatch import batch_avals, scale_dtype
from jaxpp.stages.loss.trace import check_arrays, check_floating
from jaxpp.stages.program import Ref, Role, shapes_of
from jaxpp.types import LossFn

__all__ = ["Drafted", "Engine", "Outcome"]

Kind = Literal["update", "grads", "forward"]


class Outcome(NamedTuple):
    """What a plan returns, flat.

    Attributes:
        loss: float scalar, on the last stage.
        aux: the aux leaves.
        leaves: the leaves of the new state for ``update``, gradients for ``grads``, nothing for ``forward``.
        model_state: the new model state leaves; for ``update`` they are among ``leaves`` too.
        grad_norm: for ``update``.
        finite: for ``update`` with a scaled loss, whether all gradients were; if not, nothing has changed but the scale.
        squares: for ``update``, the sum of squared gradients of each stage that owns parameters.
    """

    loss: Any
    aux: list[Any]
    leaves: list[Any]
    model_state: list[Any]
    grad_norm: Any = None
    finite: Any = None
    squares: Sequence[Any] = ()


class Drafted(NamedTuple):
    """A step as lines.

    Attributes:
        draft: the lines.
        job: what was lowered.
        inputs: the names of its arguments: leaves of the state, batch leaves, the key.
        outputs: the names of its results: the loss, aux leaves, ``leaves`` as ``Outcome`` has them, model state (except for
            ``update``, where it is among those), whether all was finite (for a scaled loss), the gradient norm, its squares.
        num_aux: how many aux leaves there are.
    """

    draft: Draft
    job: Job
    inputs: list[Name]
    outputs: list[Name]
    num_aux: int


class Engine:
    """Runs the steps of one pipeline."""

    def __init__(self, settings: Settings, optimizer: optax.GradientTransformation | None = None):
        self.settings = settings
        self.preparer = Preparer(settings)
        self.optimizer = optimizer
        self.update: Update | None = None
        self._settled: Any = None
        self._drafts: dict[Any, tuple[Job, Draft]] = {}
        self._plans: dict[Any, tuple[Plan, Drafted]] = {}
        self._recent: dict[Any, None] = {}

    def with_schedule(self, schedule: Schedule) -> "Engine":
        """An engine that runs the same cuts in another order, with the programs already compiled where a stage keeps its device."""
        other = Engine(dataclasses.replace(self.settings, schedule=schedule), self.optimizer)
        other.preparer.share(self.preparer)
        other.update = self.update
        return other

    def like(self) -> "Engine":
        """An engine that will be cut where this one is, for parameters of other shapes."""
        other = Engine(self.settings, self.optimizer)
        other.preparer = Preparer(self.settings, like=self.preparer.layout)
        return other

    @property
    def owner(self) -> tuple[int, ...]:
        """The stage of each parameter leaf."""
        assert self.preparer.layout is not None
        return self.preparer.layout.owner

    @property
    def unevenness(self) -> str | None:
        """What to warn of, where the cut that was found is uneven."""
        assert self.preparer.layout is not None
        return self.preparer.layout.unevenness

    @property
    def params(self) -> list[Name]:
        """The name of each parameter leaf."""
        return [param_name(stage, leaf) for leaf, stage in enumerate(self.owner)]

    @property
    def opts(self) -> list[Name]:
        """The name of each optimizer leaf."""
        return [opt_name(stage, leaf) for leaf, stage in enumerate(self.update.opt_owner)] if self.update else []

    @property
    def states(self) -> list[Name]:
        """The name of each model state leaf."""
        assert self.preparer.layout is not None
        return [state_name(stage, leaf) for leaf, stage in enumerate(self.preparer.layout.state_owner)]

    @property
    def scales(self) -> list[Name]:
        """The name of each leaf of the loss scale."""
        return list(self.update.scales) if self.update else []

    @property
    def scale_shapes(self) -> list[Any]:
        """The shape of each leaf of the loss scale."""
        return [] if self.settings.scaling is None else list(shapes_of(self.settings.scaling.birth()))

    @property
    def placement(self) -> Placement:
        """Where each stage lives."""
        return self.preparer.placement

    @property
    def homes(self) -> list[Any]:
        """The device, or sharding, of each leaf of a state: parameters, optimizer, model state, loss scale."""
        names = (*self.params, *self.opts, *self.states, *self.scales)
        return [place.home(name.ref) for place, name in zip(self._places(names), names, strict=True)]

    def _places(self, names: Sequence[Name]) -> list[Place]:
        placement = self.placement
        return [placement[name.stage] for name in names]

    @property
    def slicing(self) -> Slicing:
        """Which parameter leaves are held as slices."""
        assert self.preparer.layout is not None
        return self.preparer.layout.slicing

    def sliced(self, made: Any) -> Any:
        """What init was given or made, as it is held."""
        params, *state = made if self.settings.has_state else (made,)
        sizes = self.slicing.sizes[: len(jax.tree.leaves(params, is_leaf=is_slices))]  # those of a pair's shared part
        sliced = Slicing(sizes).of(params)
        return (sliced, *state) if self.settings.has_state else sliced

    def settle(self, variables: tuple[Any, ...], batch: Any, key: Any) -> None:
        """Decide the layout at these shapes, and place the optimizer; nothing to do if they are those of the last time.

        Args:
            variables: the parameters, and after them the model state if the loss has any; arrays or shapes.
            batch: the whole batch, or its shapes.
            key: or None.
        """
        known, params = self.preparer.layout, variables[0]
        if known is not None and same_shapes(known.given, variables) and self._settled == _shapes(batch, key):
            return
        check_key(key)
        check_floating(jax.tree_util.tree_leaves_with_path(params))
        check_arrays(variables[1:])
        frozen, update = frozenset[int](), None
        if self.optimizer is not None:
            frozen = unread_gradients(self.optimizer, avals_of(params), jax.ShapeDtypeStruct((), scale_dtype()))
        preparer = Preparer(
            self.settings, self.preparer.programs, self.preparer.like
        )  # the old one stays as it is, should anything be refused
        layout = preparer.settle(variables, batch, key, frozen, functools.partial(slicing_for, self.optimizer))
        if self.optimizer is not None:
            job = preparer.job(batch, key)
            (loss,) = shapes_of(job.cuts[0].loss.graph.outputs[:1])
            states = list(zip(layout.state_owner, layout.state_shapes, strict=True))
            joint = layout.params if isinstance(layout.params, Joint) else None
            count = len(layout.owner) if joint is None else len(jax.tree.leaves(joint.shared))
            options = (preparer.frozen, self.settings.scaling, states if self.settings.scaling else (), range(count))
            update = plan_update(self.optimizer, layout.params, layout.owner, job.loss_stage, loss, *options)
            opt = jax.eval_shape(self.optimizer.init, layout.params)
            specs = opt_specs_of(opt, layout.params, layout.known["specs"])
            own = layout.known["own"]
            if own:  # the optimizer state of a pair is a pair
                first, count = len(jax.tree.leaves(opt[0])), len(jax.tree.leaves(opt))
                own |= {(Role.OPT, k) for k in range(first, count)}
            preparer.layout = dataclasses.replace(layout, known={**layout.known, "opt_specs": specs, "own": own})
        self.preparer, self.update, self._settled = preparer, update, _shapes(batch, key)
        for known in (self._drafts, self._plans, self._recent):
            known.clear()

    def birth(self, graph: Graph, key: Any) -> list[Any]:
        """Make the parameters (of a pair, the shared ones) and the model state from the traced init, each on its owner."""
        names = [*self.params[: len(graph.outputs) - len(self.states)], *self.states]
        draft = draft_params(graph, names, self.placement)
        return execute(draft.finish(self.preparer.programs, [INIT_KEY], names), [key])

    def opt_birth(self, params: Sequence[Any]) -> list[Any]:
        """Make the optimizer state, each leaf on its owner."""
        assert self.update is not None
        draft = draft_birth(self.update, self.placement)
        return execute(draft.finish(self.preparer.programs, self.params, self.opts), params)

    def scale_birth(self) -> list[Any]:
        """Make the loss scale, on its owner."""
        leaves = [] if self.settings.scaling is None else self.settings.scaling.birth()
        found = zip(leaves, self.scales, self._places(self.scales), strict=True)
        return [put_at(place, name.ref, leaf) for leaf, name, place in found]

    def plan(
        self, kind: Kind, batch: Any, key: Any, *, loss_fn: LossFn | None = None, donate: bool = True, watched: bool = False
    ) -> tuple[Plan, Drafted]:
        """The plan for a batch of these shapes, compiled at the first call, and what it was made of."""
        shape = loss_fn, _shapes(batch, key)
        cache_key = (kind, donate, watched, flags(), *shape)
        found = self._plans.get(cache_key)
        if found is None:
            drafted = self.draft(kind, batch, key, loss_fn=loss_fn, donate=donate)
            draft = drafted.draft.copy()
            what = f"for a batch of {drafted.job.split.num_examples(self.settings.placement.num_replicas)}"
            checked = Checked(drafted.job, scaled=self.settings.scaling is not None) if any(flags()) else None
            options = {"watched": watched, "checked": checked, "what": what}
            plan = draft.finish(self.preparer.programs, drafted.inputs, drafted.outputs, **options)
            drafted.draft.chosen.update(draft.chosen)
            found = self._plans[cache_key] = plan, drafted
        self._use(shape)
        return found

    def _use(self, shape: Any) -> None:
        """Note that a loss is used at a batch shape; the least recently used ones beyond ``max_shapes`` are forgotten."""
        self._recent.pop(shape, None)
        self._recent[shape] = None
        if len(self._recent) > self.settings.max_shapes:
            del self._recent[next(iter(self._recent))]
            for known in (self._drafts, self._plans):
                for name in [name for name in known if name[-2:] not in self._recent]:
                    del known[name]
            self.preparer.forget({id(cut) for job, _ in self._drafts.values() for cut in job.cuts})

    def draft(self, kind: Kind, batch: Any, key: Any, *, loss_fn: LossFn | None = None, donate: bool = True) -> Drafted:
        """The lines of a step for a batch of these shapes; nothing is compiled for it."""
        check_key(key)
        train = kind != "forward"
        shape = loss_fn, _shapes(batch, key)
        cache_key = (train, *shape)
        if cache_key not in self._drafts:
            schedule = self.settings.schedule
            job = self.preparer.job(batch, key, loss_fn=loss_fn, train=train)
            actions = schedule.order if train else forward_actions(schedule.num_stages, len(job.sizes))
            self._drafts[cache_key] = job, lower(job, actions)
        self._use(shape)
        job, lines = self._drafts[cache_key]
        draft = lines.copy()
        loss = total_name(job.loss_stage, Role.LOSS)
        aux = _aux_names(job)
        states = [state_name(stage, leaf, len(job.sizes)) for leaf, stage in enumerate(job.state_owner)]
        inputs, results = [*self.params, *self.states], states
        if kind == "grads":
            inputs += self.scales
            results = [*(total_name(stage, Role.GRAD, leaf) for leaf, stage in enumerate(self.owner)), *states]
            draft_zeros(draft, job, range(len(self.owner)))
        elif kind == "update":
            assert self.update is not None
            inputs = [*self.params, *self.opts, *self.states, *self.scales]
            draft_zeros(draft, job, [leaf for leaf in range(len(self.owner)) if leaf not in self.preparer.frozen])
            if job.calls_host:
                grads = [total_name(self.owner[leaf], Role.GRAD, leaf) for leaf in job.trained]
                draft_wait(draft, "the loss", [loss, *aux, *grads, *states])
            calls = calls_host(self.update.graph.eqns)
            made = draft_update(draft, self.update, self.placement, loss, states, donate=donate and not calls)
            if calls:
                draft_wait(draft, "the optimizer", made)
            split = len(self.owner) + len(self.opts)
            results = [*made[:split], *([] if self.settings.scaling else states), *made[split:]]
        inputs += [Name(HOST, job.batch_ref(k)) for k in range(len(job.batch))]
        inputs += [] if key is None else [Name(HOST, Ref(Role.KEY))]
        return Drafted(draft, job, inputs, [loss, *aux, *results], len(aux))

    def run(
        self,
        kind: Kind,
        leaves: Sequence[Any],
        batch: Any,
        key: Any,
        *,
        loss_fn: LossFn | None = None,
        donate: bool = True,
        observer: Observer | None = None,
        watched: bool = False,
        hold: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run one step.

        Args:
            kind: ``update``, ``grads`` or ``forward``.
            leaves: of the state, on their owners: parameters, optimizer, model state, loss scale. Only ``update`` reads the
                optimizer's.
            batch: the whole batch.
            key: or None.
            loss_fn: another loss, for ``forward``.
            donate: whether ``update`` takes over the buffers of ``leaves``.
            observer: sees every instruction.
            watched: whether the observer asks them whether they are done.
            hold: called before the first buffer of ``leaves`` is taken over.
        """
        plan, drafted = self.plan(kind, batch, key, loss_fn=loss_fn, donate=donate, watched=watched)
        typed = key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        keys = [] if key is None else [jax.random.key_data(key) if typed else private(key)]
        num_params, num_opts, num_states = len(self.owner), len(self.opts), len(self.states)
        if kind != "update":
            rest = leaves[num_params + num_opts :]
            leaves = [*leaves[:num_params], *(rest if kind == "grads" else rest[:num_states])]
        given = [*map(private, jax.tree.leaves(batch))]
        if self.settings.placement.num_replicas > 1:
            given, keys = divided(given, keys, self.settings.placement.num_replicas, drafted.job.shared)
        if drafted.job.weights is not None and not drafted.job.weights.looked:
            drafted.job.weights.look(given)
        arguments = [*leaves, *given, *keys]
        loss, *found = execute(plan, arguments, observer, hold)
        aux = drafted.job.cuts[0].loss.aux_tree.unflatten(found[: drafted.num_aux])
        results = found[drafted.num_aux :]
        if kind != "update":
            split = len(results) - num_states
            return Outcome(loss, aux, results[:split], results[split:])
        count = len(leaves)
        states = results[num_params + num_opts :][:num_states]
        *finite, norm = results[count : count + 1 + bool(self.scales)]
        squares = results[count + 1 + len(finite) :]
        return Outcome(loss, aux, results[:count], states, norm, finite[0] if finite else None, squares)


def _shapes(batch: Any, key: Any) -> Any:
    """What a step is lowered for."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple(map(_shape, leaves)), None if key is None else _shape(key)


def _shape(leaf: Any) -> Any:
    """Shape and dtype as a traced function sees them; a leaf that has none is refused later."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
        return None
    aval = batch_avals(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def _aux_names(job: Job) -> list[Name]:
    found: dict[int, Name] = {}
    for stage in range(job.num_stages):
        for ref in job.codes(stage)[0].forward.outputs:
            if ref.role in (Role.AUX, Role.ROWS):
                found[ref.index] = total_name(stage, Role.AUX, ref.index)
    return [found[k] for k in sorted(found)]
