"""What the user asked for, checked before anything is traced."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpp.errors import ArgumentError, ScheduleError, shown
from jaxpp.optim.loss_scale import Scaling, check_loss_scale
from jaxpp.runtime.arguments import check_function, check_shardings, cuts_of
from jaxpp.runtime.place import Place
from jaxpp.runtime.placement import Placement, place, submeshes
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.registry import make_for_stages
from jaxpp.schedule.validate import is_count
from jaxpp.stages.loss.aux import check_reducers
from jaxpp.stages.loss.key import positional_key
from jaxpp.stages.remat.policy import Kept, kept_of
from jaxpp.types import Device, LossFn, Remat

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        loss_fn: ``loss_fn(params[, model_state], batch[, key])``, the key positional.
        schedule: the order of the actions.
        places: one a rank, cycled if fewer: devices, or sub-meshes.
        has_aux: whether the loss returns ``(loss, aux)``.
        weight: weight of a microbatch; its size unless given.
        cuts: names at which stages begin; found unless given.
        remat: for each stage, what its forward keeps; None: every stage keeps everything.
        severed: boundaries that carry no gradient.
        has_state: whether the loss takes a model state and returns ``(loss, (new_model_state, aux))``.
        reducers: of aux leaves, by path.
        scaling: of the loss, or None.
        balance: what stages have equally much of, ``flops`` or ``time``.
        shardings: of the parameters inside a stage, as the user wrote them.
        shared: names of the batch leaves that every microbatch gets as they are, besides numbers.
        max_shapes: of how many batch shapes the plans are kept.
    """

    loss_fn: LossFn
    schedule: Schedule
    places: tuple[Place, ...]
    has_aux: bool = False
    weight: Callable[[Any], Any] | None = None
    cuts: tuple[str, ...] | None = None
    remat: tuple[Kept, ...] | None = None
    severed: frozenset[int] = frozenset()
    has_state: bool = False
    reducers: Mapping[str, Any] = field(default_factory=dict)
    scaling: Scaling | None = None
    balance: str = "flops"
    shardings: Any = None
    shared: tuple[str, ...] = ()
    max_shapes: int = 8

    @cached_property
    def placement(self) -> Placement:
        """Where each stage lives: the ranks get the places in order."""
        return place(self.schedule, self.places)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return tuple(device for place in self.places for device in place.devices)


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
    remat: Remat | Sequence[Remat] = "least",
    cut_gradient: Iterable[int] = (),
    has_state: bool = False,
    reduce_aux: Any = None,
    loss_scale: Any = None,
    balance: str = "flops",
    mesh: Any = None,
    data_parallel: int = 1,
    shardings: Any = None,
    shared: str | Sequence[str] = (),
    max_shapes: int = 8,
) -> Settings:
    """Check the options and settle the schedule and the devices.

    Raises:
        ArgumentError: counts below 1, a schedule of other sizes, a wrong number of cuts or of what stages keep, or boundaries that
            are not there.
        ScheduleError: an unknown schedule, or with model state one that changes the order of a stage's forwards.
    """
    num_microbatches = num_stages if num_microbatches is None else num_microbatches
    _check_counts(num_stages=num_stages, num_microbatches=num_microbatches, max_shapes=max_shapes)
    check_function("loss_fn", "the loss is a function of (params, batch[, key])", loss_fn)
    if weight is not None:
        fix = 'pass a function such as lambda batch: batch["mask"].sum(), or leave weight out'
        check_function("weight", "the weight is a function that makes one number of a microbatch", weight, fix)
    if reduce_aux is not None and not (has_aux or has_state):
        rule = "it says how the aux values of the microbatches become those of the step, so the loss must return some"
        fix = "pass has_aux=True and return (loss, aux), or leave reduce_aux out"
        raise ArgumentError(f"reduce_aux={shown(reduce_aux)}", rule, "a loss without aux (has_aux=False)", fix)
    made = _schedule_of(schedule, int(num_stages), int(num_microbatches))
    if has_state:
        _check_order(made)
    names = cuts_of(cuts, num_stages)
    severed = _boundaries_of(cut_gradient, num_stages)
    if balance not in ("flops", "time"):
        rule = 'stages are balanced by "flops", counted, or by "time", measured'
        raise ArgumentError("balance", rule, repr(balance), 'pass balance="time", or leave it out')
    reducers, scaling = check_reducers(reduce_aux), check_loss_scale(loss_scale)
    places = submeshes(devices, mesh, data_parallel, made.num_ranks)
    kept = kept_of(remat, num_stages, places[0].devices[0].platform)
    check_shardings(shardings, mesh)
    loss_fn = positional_key(loss_fn, 2 + has_state)
    options = (has_aux, weight, names, kept, severed, has_state, reducers, scaling, balance, shardings, _shared_of(shared))
    found = Settings(loss_fn, made, places, *options, int(max_shapes))
    if has_state and found.placement.num_replicas > 1:
        raise ArgumentError(
            "has_state=True with data parallelism",
            "model state passes from each microbatch to the next, and replicas run theirs side by side",
            f"{found.placement.num_replicas} replicas",
            "pass one replica, or keep the statistics out of the loss (a normalisation without running averages)",
        )
    return found


def _check_counts(**counts: Any) -> None:
    low = [f"{name}={value!r}" for name, value in counts.items() if not is_count(value, least=1)]
    if low:
        raise ArgumentError(
            "jaxpp.Pipeline / jaxpp.value_and_grad", "counts are whole numbers of at least 1", low, "pass 1 or more"
        )


def _schedule_of(schedule: str | Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule by that name, or the one given if it is of these sizes."""
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
    return made


def _check_order(schedule: Schedule) -> None:
    """Model state passes from microbatch to microbatch, so every stage must run its forwards in their order."""
    forwards: dict[int, list[int]] = {}
    for stage, kind, microbatch in schedule.order:
        if kind == Kind.F:
            forwards.setdefault(stage, []).append(microbatch)
    wrong = [f"stage {s} runs F of {', '.join(map(str, found))}" for s, found in sorted(forwards.items()) if found != sorted(found)]
    if wrong:
        raise ScheduleError(
            f"schedule={schedule.name!r}, has_state=True",
            "model state is updated microbatch by microbatch, so each stage runs its forwards in order",
            wrong,
            "use a schedule whose forwards are in order, as those of jaxpp.schedule.make are",
        )


def _shared_of(shared: Any) -> tuple[str, ...]:
    names = (shared,) if isinstance(shared, str) or not isinstance(shared, Iterable) else tuple(shared)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            "shared",
            "batch leaves for all microbatches are named by their paths, or patterns of paths",
            repr(shared),
            'pass for example shared=("beta", "graph/*")',
        )
    return names


def _boundaries_of(cut_gradient: Any, num_stages: int) -> frozenset[int]:
    boundaries = tuple(cut_gradient) if isinstance(cut_gradient, Iterable) else (cut_gradient,)
    wrong = [repr(b) for b in boundaries if not is_count(b, least=0) or b > num_stages - 2]
    if wrong:
        raise ArgumentError(
            f"cut_gradient={cut_gradient!r}",
            "boundary s lies between stages s and s + 1",
            f"{', '.join(wrong)} with {num_stages} stages",
            f"pass a list of numbers from 0 to {num_stages - 2}" if num_stages > 1 else "leave it out: one stage has no boundary",
        )
    return frozenset(map(int, boundaries))
