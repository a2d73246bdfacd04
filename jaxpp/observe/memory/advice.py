"""What to change when a step does not fit: other schedules, microbatches, stages and remat, tried on paper.

Forwards keep nothing, and their results do not depend on how many examples are run at once, so smaller batches are tried there.

Each change is lowered, and its arrays are counted. Temporaries are estimated in proportion to the microbatch and the stage, and the
time of a step on the virtual clock with equal stages. Nothing runs. Only if no change fits by these estimates, but some nearly do,
are these compiled.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.outcome import Purpose
from jaxpp.errors import JaxppError
from jaxpp.observe.memory.all_ranks import liveness_of_all
from jaxpp.observe.memory.liveness import Liveness, step_liveness
from jaxpp.options import Options
from jaxpp.runtime.progress import progress
from jaxpp.schedule.forward import forward
from jaxpp.schedule.registry import SCHEDULES, make_for_stages
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.by_hand import scope
from jaxpp.stages.loss.microbatch import batch_avals, check_batch, resized
from jaxpp.stages.remat.offload import offload_of
from jaxpp.stages.remat.policy import kept_of
from jaxpp.types import Batch, Device, Key

__all__ = ["Change", "changes"]

_PATIENCE = 2  # seconds before a progress bar shows
_MOST_MICROBATCHES = 256  # that are proposed: more would be parts too small to compute with, in a step that takes long to compile
_COMPILED = 2  # changes that are compiled, for the exact peak, where by the estimates none fits


class Change(NamedTuple):
    """A change that makes it fit.

    Attributes:
        what: the argument as the user writes it: ``num_microbatches=16``; or ``batches of 16``.
        peak: bytes on the device that then holds most; an estimate.
        slowdown: time over the time without the change, for as many examples, on the virtual clock with equal stages; faster if
            below 1.
        moved: the bytes that a stage copies to host memory and back for a microbatch, at most, while it computes. The slowdown is
            without these copies, which delay nothing if they are shorter than an action.
    """

    what: str
    peak: int
    slowdown: float
    moved: int = 0


class _Candidate(NamedTuple):
    """A change to try: of each family the first that fits is enough."""

    family: str
    what: str
    options: Options
    batch: Batch


def changes(
    engine: Engine,
    batch: Batch,
    key: Key | None,
    needs: Mapping[Device, tuple[int, int]],
    room: int,
    purpose: Purpose = "update",
) -> tuple[Change, ...]:
    """The changes that make a step fit, each kind in its mildest form, the quickest first.

    ``needs`` are for each device the bytes of temporaries at its peak, and the bytes of a microbatch's residuals, which are
    temporaries of a program that recomputes them; ``room`` is the bytes that each device has.
    """
    now = engine.options
    count, before = check_batch(batch, 1, shared=now.shared), _time(now, batch, purpose)
    fitting: dict[str, Change] = {}
    missed: list[tuple[int, _Candidate, Engine]] = []
    candidates = _candidates(now, batch) if purpose == "update" else _forward_candidates(engine, batch)
    with progress(list(candidates), desc="looking for what fits", after=_PATIENCE) as bar:
        for candidate in bar:
            family, what, options, smaller = candidate
            if family in fitting:
                continue
            try:
                other = _tried(engine, options, smaller, key)
                liveness = step_liveness(other, other.lower(purpose, smaller, key))
            except JaxppError:
                continue  # too many stages for this model, say
            share = now.schedule.num_microbatches / options.schedule.num_microbatches
            share *= now.schedule.num_stages / options.schedule.num_stages * check_batch(smaller, 1, shared=now.shared) / count
            again = options.remat != now.remat
            wants = {device: round(share * (extra + again * residuals)) for device, (extra, residuals) in needs.items()}
            peak = max(liveness.most(device) + wants.get(device, max(wants.values())) for device in liveness.devices)
            if peak <= room:
                fitting[family] = Change(what, peak, _time(options, smaller, purpose) / before, _moved(liveness))
            else:
                missed.append((peak, candidate, other))
    for peak, (_, what, options, smaller), other in [] if fitting else sorted(missed, key=lambda miss: miss[0])[:_COMPILED]:
        if peak > 2 * room:
            break
        liveness = liveness_of_all(other, smaller, key, purpose)
        exact = max(map(liveness.most, liveness.devices))
        if exact <= room:
            fitting[what] = Change(what, exact, _time(options, smaller, purpose) / before, _moved(liveness))
    return tuple(sorted(fitting.values(), key=lambda change: change.slowdown))


def _tried(engine: Engine, options: Options, batch: Batch, key: Key | None) -> Engine:
    now, new = engine.options.schedule, options.schedule
    same = (now.stage_to_rank, now.num_microbatches) == (new.stage_to_rank, new.num_microbatches)
    if same and options.remat == engine.options.remat:
        return engine.with_schedule(new, options.offload)  # no need to trace and cut again
    return open_engine(options, engine.optimizer, engine.layout.given, batch, key)


def _candidates(now: Options, batch: Batch) -> Iterator[_Candidate]:
    """Changes of a training step."""
    stages, microbatches, name = now.schedule.num_stages, now.schedule.num_microbatches, now.schedule.name
    ways = partial(_remat, platform=now.devices[0].platform)
    for other in SCHEDULES:
        for options in _made(now, other, stages, microbatches):
            if other != name and options.schedule.num_ranks == now.schedule.num_ranks:
                yield _Candidate(f"schedule {other}", f'schedule="{other}"', options, batch)
    for way in ("least", "recompute") if now.remat is None else ("recompute",):
        yield _Candidate("remat", f'remat="{way}"', dataclasses.replace(now, **ways(way, stages)), batch)
    offloading = dataclasses.replace(now, **ways("offload", stages))
    if offloading.offloaded and not now.offloaded:
        yield _Candidate("offload", 'remat="offload"', offloading, batch)
    if name not in SCHEDULES:
        return
    count = microbatches * 2
    while count <= min(check_batch(batch, 1, shared=now.shared), _MOST_MICROBATCHES):
        for options in _made(now, name, stages, count):
            yield _Candidate("microbatches", f"num_microbatches={count}", options, batch)
        for options in _made(now, name, stages, count, **ways("recompute", stages)):
            yield _Candidate("both", f'num_microbatches={count}, remat="recompute"', options, batch)
        count *= 2
    kept = ways("keep" if now.remat is None else "offload" if now.offloaded else "least", 2 * stages)
    for options in _made(now, name, 2 * stages, microbatches, cuts=None, **kept):
        if options.schedule.num_ranks <= len(now.devices):
            yield _Candidate("stages", _stages(now, 2 * stages), options, batch)


def _stages(now: Options, count: int) -> str:
    """How the user asks for so many stages."""
    if now.cuts is not None and now.cuts[:1] in ((), (scope(1),)):  # none: one stage by hand
        return f"{count} stage functions"
    return f"num_stages={count}" if now.cuts is None else f"num_stages={count}, cuts=None"


def _forward_candidates(engine: Engine, batch: Batch) -> Iterator[_Candidate]:
    """Changes of forwards: smaller batches; and for a ``Forward``, whose own they are, more microbatches and more stages."""
    now, shared = engine.options, engine.preparer.tracing.shared(batch)
    stages, microbatches = now.schedule.num_stages, now.schedule.num_microbatches
    examples = check_batch(batch, 1, shared=now.shared)
    count = examples // 2
    while count:
        smaller = resized(batch_avals(batch), count, shared)
        yield _Candidate("batch", f"batches of {count}", now, smaller)
        count //= 2
    if not now.schedule.forward_only:
        return
    count = 2 * microbatches
    while count <= min(examples, _MOST_MICROBATCHES):
        options = dataclasses.replace(now, schedule=forward(stages, count))
        yield _Candidate("microbatches", f"num_microbatches={count}", options, batch)
        count *= 2
    if 2 * stages <= len(now.devices):
        options = dataclasses.replace(now, schedule=forward(2 * stages, microbatches), cuts=None, remat=None, offload=())
        yield _Candidate("stages", _stages(now, 2 * stages), options, batch)


def _remat(way: str, stages: int, platform: str) -> dict[str, Any]:
    """The options that ``remat=`` of all stages stands for."""
    return {"remat": kept_of(way, stages, platform), "offload": offload_of(way, stages)}


def _moved(liveness: Liveness) -> int:
    """The bytes that a stage copies to host memory for a microbatch, at most."""
    moved: defaultdict[tuple[int, int], int] = defaultdict(int)
    for life in liveness.hosted:
        moved[life.name.stage, life.name.microbatch] += life.num_bytes
    return max(moved.values(), default=0)


def _made(now: Options, name: str, stages: int, microbatches: int, **more: object) -> Iterator[Options]:
    """The options with another schedule, if it exists at these sizes."""
    with contextlib.suppress(JaxppError):
        schedule = make_for_stages(name, num_stages=stages, num_microbatches=microbatches)
        yield dataclasses.replace(now, schedule=schedule, **more)


def _time(options: Options, batch: Batch, purpose: Purpose) -> float:
    """A step on the virtual clock, in parts of the forward of the whole batch: F, I and W take the same, recomputing an F more."""
    schedule = options.schedule
    if purpose != "update":
        count = min(schedule.num_microbatches, check_batch(batch, 1, shared=options.shared))
        schedule = forward(schedule.num_stages, count)
    again = [1 + (callable(kept) and purpose == "update") for kept in options.remat or (None,) * schedule.num_stages]
    makespan = simulate(schedule, forward=1, input_grad=again, weight_grad=1).makespan
    return float(makespan) / (schedule.num_stages * schedule.num_microbatches)
