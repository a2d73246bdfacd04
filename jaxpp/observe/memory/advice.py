"""What to change when a step does not fit: other schedules, microbatches, stages and remat, tried on paper.

Each change is lowered, and its arrays are counted. Temporaries are estimated in proportion to the microbatch and the stage, and the
time of a step on the virtual clock with equal stages. Nothing runs. Only if no change fits by these estimates, but some nearly do,
are these compiled.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.errors import JaxppError
from jaxpp.observe.memory.all_ranks import liveness_of_all
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.options import Options
from jaxpp.runtime.progress import progress
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.registry import SCHEDULES, make_for_stages
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.loss.microbatch import check_batch
from jaxpp.stages.remat.policy import kept_of
from jaxpp.types import Batch, Device, Key

__all__ = ["Change", "changes"]

_PATIENCE = 2  # seconds before a progress bar shows
_COMPILED = 2  # changes that are compiled, for the exact peak, where by the estimates none fits


class Change(NamedTuple):
    """A change that makes it fit.

    Attributes:
        what: the argument as the user writes it: ``num_microbatches=16``.
        peak: bytes on the device that then holds most; an estimate.
        slowdown: time of a step over the time without the change, on the virtual clock with equal stages; faster if below 1.
    """

    what: str
    peak: int
    slowdown: float


def changes(
    engine: Engine, batch: Batch, key: Key | None, needs: Mapping[Device, tuple[int, int]], room: int
) -> tuple[Change, ...]:
    """The changes that make a step fit, each kind in its mildest form, the quickest first.

    ``needs`` are for each device the bytes of temporaries at its peak, and the bytes of a microbatch's residuals, which are
    temporaries of a program that recomputes them; ``room`` is the bytes that each device has.
    """
    now = engine.options
    fitting: dict[str, Change] = {}
    missed: list[tuple[int, str, Engine]] = []
    with progress(list(_candidates(now, batch)), desc="looking for what fits", after=_PATIENCE) as bar:
        for family, what, options in bar:
            if family in fitting:
                continue
            try:
                other = _tried(engine, options, batch, key)
                liveness = step_liveness(other, other.lower("update", batch, key))
            except JaxppError:
                continue  # too many stages for this model, say
            share = now.schedule.num_microbatches / options.schedule.num_microbatches
            share *= now.schedule.num_stages / options.schedule.num_stages
            again = options.remat != now.remat
            wants = {device: round(share * (extra + again * residuals)) for device, (extra, residuals) in needs.items()}
            peak = max(liveness.most(device) + wants.get(device, max(wants.values())) for device in liveness.devices)
            if peak <= room:
                fitting[family] = Change(what, peak, _time(options) / _time(now))
            else:
                missed.append((peak, what, other))
    for peak, what, other in [] if fitting else sorted(missed, key=lambda miss: miss[0])[:_COMPILED]:
        if peak > 2 * room:
            break
        liveness = liveness_of_all(other, batch, key)
        exact = max(map(liveness.most, liveness.devices))
        if exact <= room:
            fitting[what] = Change(what, exact, _time(other.options) / _time(now))
    return tuple(sorted(fitting.values(), key=lambda change: change.slowdown))


def _tried(engine: Engine, options: Options, batch: Batch, key: Key | None) -> Engine:
    now, new = engine.options.schedule, options.schedule
    same = (now.stage_to_rank, now.num_microbatches) == (new.stage_to_rank, new.num_microbatches)
    if same and options.remat == engine.options.remat:
        return engine.with_schedule(new)  # no need to trace and cut again
    return open_engine(options, engine.optimizer, engine.layout.given, batch, key)


def _candidates(now: Options, batch: Batch) -> Iterator[tuple[str, str, Options]]:
    """Changes to try: the family, the change as the user writes it, the options. Of each family the first that fits is enough."""
    stages, microbatches, name = now.schedule.num_stages, now.schedule.num_microbatches, now.schedule.name
    platform = now.devices[0].platform
    for other in SCHEDULES:
        for options in _made(now, other, stages, microbatches):
            if other != name and options.schedule.num_ranks == now.schedule.num_ranks:
                yield f"schedule {other}", f'schedule="{other}"', options
    for way in ("least", "recompute") if now.remat is None else ("recompute",):
        yield "remat", f'remat="{way}"', dataclasses.replace(now, remat=kept_of(way, stages, platform))
    if name not in SCHEDULES:
        return
    count = microbatches * 2
    while count <= check_batch(batch, 1, shared=now.shared):
        for options in _made(now, name, stages, count):
            yield "microbatches", f"num_microbatches={count}", options
        for options in _made(now, name, stages, count, remat=kept_of("recompute", stages, platform)):
            yield "both", f'num_microbatches={count}, remat="recompute"', options
        count *= 2
    kept = kept_of("keep" if now.remat is None else "least", 2 * stages, platform)
    for options in _made(now, name, 2 * stages, microbatches, cuts=None, remat=kept):
        if options.schedule.num_ranks <= len(now.devices):
            yield "stages", f"num_stages={2 * stages}", options


def _made(now: Options, name: str, stages: int, microbatches: int, **more: object) -> Iterator[Options]:
    """The options with another schedule, if it exists at these sizes."""
    with contextlib.suppress(JaxppError):
        schedule = make_for_stages(name, num_stages=stages, num_microbatches=microbatches)
        yield dataclasses.replace(now, schedule=schedule, **more)


def _time(options: Options) -> float:
    """A step on the virtual clock, in parts of the forward of the whole batch: F, I and W take the same, recomputing an F more."""
    schedule: Schedule = options.schedule
    again = [1 + callable(kept) for kept in options.remat or (None,) * schedule.num_stages]
    makespan = simulate(schedule, forward=1, input_grad=again, weight_grad=1).makespan
    return float(makespan) / (schedule.num_stages * schedule.num_microbatches)
