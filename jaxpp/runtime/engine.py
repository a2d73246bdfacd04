"""One pipeline at work: its preparer, its placed optimizer, and a plan for each batch shape it has met.

``Pipeline`` and ``value_and_grad`` are two faces of an engine. It speaks in flat lists of leaves; the faces speak in the user's
trees.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpp.errors import ArgumentError
from jaxpp.runtime.birth import draft_params
from jaxpp.runtime.execute import Observer, execute
from jaxpp.runtime.lower import HOST, Job, Name, forward_actions, grad_name, lower, param_name
from jaxpp.runtime.optimizer import Update, draft_birth, draft_update, opt_name, plan_update
from jaxpp.runtime.placement import pool
from jaxpp.runtime.plan import Plan
from jaxpp.runtime.prepare import Preparer, Settings, check_key
from jaxpp.runtime.transfer import private
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.laws import is_count
from jaxpp.schedule.registry import make_for_stages
from jaxpp.stages.graph import Graph
from jaxpp.stages.program import Ref, Role, shapes_of
from jaxpp.types import Device, LossFn, Policy, Remat

__all__ = ["Engine", "Outcome", "settings"]

Kind = Literal["update", "grads", "forward"]


def settings(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    *,
    num_stages: int,
    num_microbatches: int | None,
    schedule: str | Schedule,
    has_aux: bool,
    weight: Callable[[Any], Any] | None,
    cuts: Sequence[str] | None,
    devices: Sequence[Device] | None,
    remat: Remat | Sequence[Remat] = None,
    cut_gradient: Sequence[int] = (),
) -> Settings:
    """Check the options and settle the schedule and the devices.

    Raises:
        ArgumentError: counts below 1, a schedule of other sizes, a wrong number of cuts or of what stages keep, or boundaries that
            are not there.
        ScheduleError: an unknown schedule.
    """
    num_microbatches = num_stages if num_microbatches is None else num_microbatches
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    low = [f"{name}={value!r}" for name, value in counts.items() if not is_count(value, least=1)]
    if low:
        raise ArgumentError(
            "jaxpp.Pipeline / jaxpp.value_and_grad", "counts are whole numbers of at least 1", low, "pass 1 or more"
        )
    num_stages, num_microbatches = int(num_stages), int(num_microbatches)
    if not callable(loss_fn):
        raise ArgumentError(
            "loss_fn", "the loss is a function of (params, batch[, key])", repr(loss_fn), "pass the function itself"
        )
    made = schedule
    if not isinstance(made, Schedule):
        made = make_for_stages(made, num_stages=num_stages, num_microbatches=num_microbatches)
    if (made.num_stages, made.num_microbatches) != (num_stages, num_microbatches):
        raise ArgumentError(
            f"schedule={made.name!r}",
            "a schedule must be made for the pipeline's numbers of stages and microbatches",
            [
                f"schedule: {made.num_stages} stages, {made.num_microbatches} microbatches",
                f"pipeline: {num_stages}, {num_microbatches}",
            ],
            f"pass num_stages={made.num_stages}, num_microbatches={made.num_microbatches}, or another schedule",
        )
    if cuts is not None and len(cuts) != num_stages - 1:
        raise ArgumentError(
            f"cuts={list(cuts)!r}",
            "n stages have n - 1 cuts between them",
            f"{len(cuts)} cuts and num_stages={num_stages}",
            f"pass num_stages={len(cuts) + 1}, or {num_stages - 1} cuts",
        )
    boundaries = tuple(cut_gradient) if isinstance(cut_gradient, Sequence) else (cut_gradient,)
    wrong = [repr(b) for b in boundaries if not is_count(b, least=0) or b > num_stages - 2]
    if wrong:
        raise ArgumentError(
            f"cut_gradient={cut_gradient!r}",
            "boundary s lies between stages s and s + 1",
            f"{', '.join(wrong)} with {num_stages} stages",
            f"pass a list of numbers from 0 to {num_stages - 2}" if num_stages > 1 else "leave it out: one stage has no boundary",
        )
    return Settings(
        loss_fn,
        made,
        pool(devices),
        has_aux,
        weight,
        None if cuts is None else tuple(cuts),
        _policies(remat, num_stages),
        frozenset(map(int, boundaries)),
    )


def _policies(remat: Any, num_stages: int) -> tuple[Policy | None, ...] | None:
    """What each stage keeps; None if all keep everything."""
    known = {"keep": None, None: None, "recompute": jax.checkpoint_policies.nothing_saveable}
    each = remat if isinstance(remat, Sequence) and not isinstance(remat, str) else (remat,) * num_stages
    wrong = [
        f"stage {k}: {item!r}"
        for k, item in enumerate(each)
        if not (callable(item) or item is None or (isinstance(item, str) and item in known))
    ]
    wrong += [f"{len(each)} for {num_stages} stages"] if len(each) != num_stages else []
    if wrong:
        raise ArgumentError(
            "remat",
            'a stage keeps everything ("keep"), its inputs only ("recompute"), or what a policy says',
            wrong,
            'pass "recompute", a policy of jax.checkpoint_policies, or a list of one a stage',
        )
    policies: Any = tuple(item if callable(item) else known[item] for item in each)
    return policies if any(policies) else None


class Outcome(NamedTuple):
    """What a plan returns, flat.

    Attributes:
        loss: float scalar, on the last stage.
        aux: the aux leaves.
        leaves: new parameters and optimizer leaves for ``update``, gradients for ``grads``, nothing for ``forward``.
        grad_norm: for ``update``.
        squares: for ``update``, the sum of squared gradients of each stage that owns parameters.
    """

    loss: Any
    aux: list[Any]
    leaves: list[Any]
    grad_norm: Any = None
    squares: Sequence[Any] = ()


class Engine:
    """Runs the steps of one pipeline."""

    def __init__(self, settings: Settings, optimizer: optax.GradientTransformation | None = None):
        self.settings = settings
        self.preparer = Preparer(settings)
        self.optimizer = optimizer
        self.update: Update | None = None
        self._plans: dict[Any, tuple[Plan, int, Any]] = {}

    def with_schedule(self, schedule: Schedule) -> "Engine":
        """An engine that runs the same cuts in another order, with the programs already compiled where a stage keeps its device."""
        other = Engine(dataclasses.replace(self.settings, schedule=schedule), self.optimizer)
        other.preparer.share(self.preparer)
        other.update = self.update
        return other

    @property
    def owner(self) -> tuple[int, ...]:
        """The stage of each parameter leaf."""
        assert self.preparer.layout is not None
        return self.preparer.layout.owner

    @property
    def devices(self) -> list[Device]:
        """The device of each parameter leaf, then of each optimizer leaf."""
        stages = [*self.owner, *(self.update.opt_owner if self.update else ())]
        return [self.settings.placement[stage] for stage in stages]

    def settle(self, params: Any, batch: Any, key: Any) -> None:
        """Decide the layout at these shapes, and place the optimizer."""
        layout = self.preparer.settle(params, batch, key)
        self._plans.clear()
        if self.optimizer is not None:
            job = self.preparer.job(batch, key)
            (loss,) = shapes_of(job.cuts[0].loss.graph.outputs[:1])
            self.update = plan_update(self.optimizer, layout.params, layout.owner, job.loss_stage, loss)

    def birth(self, graph: Graph, key: Any) -> list[Any]:
        """Make the parameters from the traced init, each on its owner."""
        draft = draft_params(graph, self.owner, self.settings.placement)
        names = [param_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        return execute(draft.finish(self.preparer.programs, [Name(HOST, Ref(Role.KEY))], names), [key])

    def opt_birth(self, params: Sequence[Any]) -> list[Any]:
        """Make the optimizer state, each leaf on its owner."""
        assert self.update is not None
        draft = draft_birth(self.update, self.settings.placement)
        inputs = [param_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        outputs = [opt_name(stage, leaf) for leaf, stage in enumerate(self.update.opt_owner)]
        return execute(draft.finish(self.preparer.programs, inputs, outputs), params)

    def plan(
        self, kind: Kind, batch: Any, key: Any, *, loss_fn: LossFn | None = None, donate: bool = True, watched: bool = False
    ) -> tuple[Plan, int, Any]:
        """The plan for a batch of these shapes, how many aux leaves it returns, and their tree; made at the first call."""
        check_key(key)
        leaves, tree = jax.tree.flatten(batch)
        shapes = tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)
        cache_key = (kind, loss_fn, donate, watched, tree, shapes, None if key is None else (key.shape, key.dtype))
        found = self._plans.get(cache_key)
        if found is None:
            found = self._plans[cache_key] = self._lower(kind, batch, key, loss_fn, donate, watched)
        return found

    def _lower(
        self, kind: Kind, batch: Any, key: Any, loss_fn: LossFn | None, donate: bool, watched: bool
    ) -> tuple[Plan, int, Any]:
        schedule, placement = self.settings.schedule, self.settings.placement
        train = kind != "forward"
        job = self.preparer.job(batch, key, loss_fn=loss_fn, train=train)
        actions = schedule.order if train else forward_actions(schedule.num_stages, schedule.num_microbatches)
        draft = lower(job, actions)
        loss = Name(job.loss_stage, Ref(Role.LOSS))
        aux = _aux_names(job)
        inputs = [param_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        results = []
        if kind == "grads":
            results = [grad_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        elif kind == "update":
            assert self.update is not None
            inputs += [opt_name(stage, leaf) for leaf, stage in enumerate(self.update.opt_owner)]
            results = draft_update(draft, self.update, placement, loss, donate=donate)
        inputs += [Name(HOST, Ref(Role.BATCH, k)) for k in range(len(job.batch))]
        inputs += [] if key is None else [Name(HOST, Ref(Role.KEY))]
        plan = draft.finish(self.preparer.programs, inputs, [loss, *aux, *results], watched=watched)
        return plan, len(aux), job.cuts[0].loss.aux_tree

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
    ) -> Outcome:
        """Run one step.

        Args:
            kind: ``update``, ``grads`` or ``forward``.
            leaves: parameter leaves on their owners, then (for ``update``) optimizer leaves.
            batch: the whole batch.
            key: or None.
            loss_fn: another loss, for ``forward``.
            donate: whether ``update`` takes over the buffers of ``leaves``.
            observer: sees every instruction.
            watched: whether the observer asks them whether they are done.
        """
        plan, num_aux, aux_tree = self.plan(kind, batch, key, loss_fn=loss_fn, donate=donate, watched=watched)
        typed = key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        keys = [] if key is None else [jax.random.key_data(key) if typed else private(key)]
        arguments = [*leaves, *map(private, jax.tree.leaves(batch)), *keys]
        loss, *rest = execute(plan, arguments, observer)
        aux, results = aux_tree.unflatten(rest[:num_aux]), rest[num_aux:]
        if kind != "update":
            return Outcome(loss, aux, results)
        assert self.update is not None
        count = len(self.update.owner) + len(self.update.opt_owner)
        return Outcome(loss, aux, results[:count], results[count], results[count + 1 :])


def _aux_names(job: Job) -> list[Name]:
    found: dict[int, Name] = {}
    for stage in range(job.num_stages):
        for ref in job.codes(stage)[0].forward.outputs:
            if ref.role in (Role.AUX, Role.ROWS):
                found[ref.index] = Name(stage, Ref(Role.AUX, ref.index))
    return [found[k] for k in sorted(found)]
