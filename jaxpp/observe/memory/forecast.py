"""Memory before the first step: what each device will hold when it holds most, from shapes alone; and what to change if need be.

A step, or the forwards of a batch, are lowered and compiled, not run. A device's peak is the highest sum of the arrays that are
alive (``liveness``) and what the program that runs needs besides. If that is more than the devices have, other schedules,
microbatches, stages and remat are lowered; of forwards, smaller batches. Their arrays are counted, and their temporaries estimated
in proportion to the microbatch and the stage. Only changes that nearly fit, where none does, are compiled.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.outcome import Purpose
from jaxpp.errors import ArgumentError, JaxppError
from jaxpp.errors.checks import is_real
from jaxpp.lowering.builder import Name
from jaxpp.observe.bound import StepBound, bound_of
from jaxpp.observe.evaluate import CandidateSearch, step_seconds
from jaxpp.observe.memory.liveness import (
    MEMORY_KINDS,
    Liveness,
    Visiting,
    lasting_lives,
    liveness_in_flow,
    liveness_of_all,
    step_liveness,
)
from jaxpp.options import Options
from jaxpp.runtime.place import Placement, devices_of
from jaxpp.runtime.processes.here import is_here
from jaxpp.runtime.progress import progress
from jaxpp.schedule.action import Kind
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.draw.canvas import INK, Axes, Figure, Panel, chart, fit_page, group_colour
from jaxpp.schedule.forward import forward
from jaxpp.schedule.offload import offloads
from jaxpp.schedule.registry import SCHEDULES, make, make_for_stages
from jaxpp.stages.by_hand import scope
from jaxpp.stages.cost import coarsest_dtype
from jaxpp.stages.loss.microbatch import Microbatches, batch_avals, check_batch, first_of, resized
from jaxpp.stages.remat import Offload, Remat, offload_of, policies_of
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, in_bytes, table_lines, unit_of_bytes
from jaxpp.targets import compiles_only, device_name, target_of
from jaxpp.types import Batch, Device, Key

_MOST = 6  # changes that are shown
_TRIED: Mapping[Purpose, str] = {
    "update": "microbatches, schedules, remat, twice the stages, host=",
    "forward": "smaller batches, microbatches, twice the stages",
}
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_SHARE, _MORE = 0.75, 0.9  # of a GPU's memory that JAX takes unless this variable says otherwise, and that it may say
_FRAGMENTED = 0.02  # of it is between arrays: an H200 counted 1 and 1.4% more than was forecast (experiments/gpu/h200-jax-0.11)
_MARGINS: Mapping[str, int] = {"CUDA's context": 600 << 20, "NCCL": 1 << 30, "the workspace of libraries": 256 << 20}
"""Bytes of a GPU that JAX cannot give to arrays, by what holds them: assumed. What cuBLAS and cuDNN need for a product counts as a
temporary of its program, and this is what they hold besides."""
_PATIENCE = 2  # seconds before a progress bar shows
_MOST_MICROBATCHES = 256  # that are proposed: more would be parts too small to compute with, in a step that takes long to compile
_FEWEST: Mapping[str, Remat] = {'"recompute"': "recompute", "jaxpp.Offload(recompute=True)": Offload(recompute=True)}
_HOST = "host"  # the family of changes that let more of the state wait in host memory
_STAGES_PER_RANK = (4, 16)  # that are tried for a state in host memory
_COMPILED = 2  # changes that are compiled, for the exact peak, where by the estimates none fits


class Way(NamedTuple):
    """A way to keep residuals, the same for all stages."""

    remat: str | float  # as it is passed
    peak: int  # bytes of the arrays on the fullest device when it holds most
    slowdown: float  # the estimated time of a step over that with ``"least"``, if copies to host memory delay nothing
    repeated: float  # FLOPs of the matrix products and convolutions that a step runs again
    hosted: int  # bytes that wait in host memory beside a device, at most


@dataclass(frozen=True)
class Frontier:
    """What each way to keep residuals costs. ``print`` it for a table; ``figure()`` draws bytes against time.

    Attributes:
        ways: all, the most bytes first.
        products: FLOPs of the matrix products and convolutions of a step that repeats nothing.
    """

    ways: tuple[Way, ...]
    products: float

    def __str__(self) -> str:
        rows = [["remat", "peak", "time", "products repeated", "in host memory"]]
        for way in self.ways:
            again, hosted = f"{way.repeated / (self.products or 1.0):.1%}", in_bytes(way.hosted)
            rows.append([repr(way.remat), bytes_in_words(way.peak), f"x {way.slowdown:.2f}", again, hosted])
        remark = "peak: of the arrays on the fullest device, without temporaries; time: over that of the least, on the virtual "
        remark += "clock, by the FLOPs and bytes of all operations, with copies to the host that delay nothing"
        return "\n".join([*table_lines(rows), "", *fold_lines([remark])])

    __repr__ = __str__

    def figure(self, width: float | None = None) -> Figure:
        """Bytes of the fullest device against the time of a step, a dot for each way; ``width`` in inches. Needs matplotlib."""
        width = width or _WIDTH
        unit, scale = unit_of_bytes(max(way.peak for way in self.ways))
        heading = "Memory of the fullest device and time of a step, by what stages keep (remat=)"
        across, up = f"arrays of the fullest device at its peak, {unit}", 'time of a step / "least"'
        figure, axes = chart((width, 2 + _HEIGHT), heading, [], across, up)
        _draw(axes, self.ways, scale)
        fit_page(figure, [axes], [Panel(1, _HEIGHT, 1)])
        return figure


class Change(NamedTuple):
    """A change that makes it fit."""

    what: str  # as the user writes it: ``num_microbatches=16``; or ``batches of 16``
    peak: int  # bytes on the device that then holds most; an estimate
    slowdown: float  # time with it over time without, on the virtual clock with equal stages; without copies of ``moved`` bytes
    moved: int = 0  # that a stage copies to host memory and back for a microbatch, at most
    visiting: Visiting | None = None  # what a step copies to the device with most of it, and back, where the state waits


class StageMemory(NamedTuple):
    """What one stage takes when its device holds most, in bytes."""

    stage: int
    device: Device
    kinds: tuple[int, ...]  # of arrays, one number for each of ``MEMORY_KINDS``
    num_residuals: int  # how many microbatches have residuals there
    temporaries: int  # that the program running then needs besides, or the whole of a leaf that a wide rank gathers to send it

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays and temporaries."""
        return sum(self.kinds) + self.temporaries

    @property
    def residuals(self) -> int:
        """Bytes of the residuals of one microbatch."""
        return self.kinds[MEMORY_KINDS.index("residuals")] // max(1, self.num_residuals)


@dataclass(frozen=True)
class Forecast:
    """Memory of a step, or of forwards. ``print`` it for a table and, if it does not fit, for what to change.

    Attributes:
        liveness: when each array is alive, and where.
        stages: what each stage takes at the peak of its device.
        moments: the line that runs at the peak of each device.
        hbm: bytes that each device has; None if that is not known.
        share: of the memory of GPUs that only compile, what JAX takes and ``hbm`` is; None where that is not how it came about.
        remarked: what else is to be said of the numbers.
        changes: what would make it fit, the least slowdown first; empty if it fits, or if nothing that was tried fits.
        tried: what was looked at, in words.
        bound: the least time of a step on these devices; None where their numbers are not known (``jaxpp.targets``).
        source: what makes the ``frontier()``; None for forwards.
    """

    liveness: Liveness
    stages: tuple[StageMemory, ...]
    moments: Mapping[Device, str]
    hbm: int | None
    changes: tuple[Change, ...] = ()
    tried: str = _TRIED["update"]
    bound: StepBound | None = None
    source: Callable[[], Frontier] | None = field(default=None, repr=False, compare=False)
    share: float | None = None
    remarked: tuple[str, ...] = ()

    def frontier(self) -> Frontier:
        """What each way to keep residuals costs: ``remat="keep"``, ``"least"``, shares of it, ``"recompute"`` and ``"offload"``.

        The stages are built with each way, and nothing is compiled; the second call returns the same.

        Raises:
            ArgumentError: this is no forecast of a step: forwards keep nothing.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp, optax
            >>> def loss_fn(params, x):
            ...     for w in params:
            ...         x = jnp.tanh(x @ w) @ w
            ...     return (x**2).mean()
            >>> pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=4)
            >>> frontier = pipe.forecast([jnp.ones((16, 16))] * 4, jnp.ones((32, 16))).frontier()
            >>> frontier.ways[0].remat, frontier.ways[0].repeated, frontier.ways[-1].repeated > 0
            ('keep', 0.0, True)
        """
        if self.source is None:
            rule, fix = "a step has a frontier: it keeps residuals, and forwards keep none", "call pipe.forecast(...).frontier()"
            raise ArgumentError("forecast.frontier()", rule, "a forecast of forwards", fix)
        return self.source()

    @property
    def peaks(self) -> dict[Device, int]:
        """Bytes of each device at its peak, temporaries included."""
        return {device: sum(row.num_bytes for row in self.stages if row.device == device) for device in self.liveness.devices}

    @property
    def hosted(self) -> dict[Device, int]:
        """Bytes that wait in host memory beside each device, at most; they are not among its ``peaks``."""
        return {device: self.liveness.most_hosted(device) for device in self.liveness.devices}

    @property
    def fits(self) -> bool:
        """Whether every device has room; True if it is not known how much there is."""
        return self.hbm is None or max(self.peaks.values()) <= self.hbm

    def __str__(self) -> str:
        changes = self._changes()
        lines = [*table_lines(self._cells(), keep=2), "", *fold_lines(self._remarks()), *(table_lines(changes) if changes else [])]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        changes = self._changes()
        return f"{html_table(self._cells())}{html_remarks(self._remarks())}{html_table(changes) if changes else ''}"

    def _cells(self) -> list[list[str]]:
        shown = [k for k in range(len(MEMORY_KINDS)) if any(row.kinds[k] for row in self.stages)]
        rows = [["stage", "device", *(MEMORY_KINDS[k] for k in shown), "temporaries", "sum", "at"]]
        for row in self.stages:
            sizes = [in_bytes(row.kinds[k]) + f" ({row.num_residuals})" * (MEMORY_KINDS[k] == "residuals") for k in shown]
            sizes += [in_bytes(row.temporaries), in_bytes(row.num_bytes)]
            rows.append([str(row.stage), device_name(row.device), *sizes, self.moments[row.device]])
        return rows

    def _remarks(self) -> list[str]:
        brackets = "in brackets: microbatches whose residuals are held; " * any(row.num_residuals for row in self.stages)
        lines = [f"{brackets}at: what runs when the device holds most"]
        if len(self.stages) > len(self.peaks):
            lines.append("peak: " + ", ".join(f"{device_name(device)} {in_bytes(peak)}" for device, peak in self.peaks.items()))
        if any(self.hosted.values()):
            beside = ", ".join(f"{in_bytes(size)} beside {device_name(device)}" for device, size in self.hosted.items() if size)
            kinds = {life.kind for life in self.liveness.hosted}
            what = ", ".join(kind for kind in MEMORY_KINDS if kind in kinds)
            lines.append(f"in host memory, at most: {what} of {beside}")
        turn = "a pass through the stages" if self.liveness.passes else "a step"
        for device, visiting in self.liveness.visiting.items():
            if any(visiting):
                lines.append(f"{turn} copies {_copied(visiting)} {device_name(device)}")
        if self.liveness.unknown:
            where, few = ", ".join(map(device_name, self.liveness.unknown)), "this process has fewer devices than a rank there"
            lines.append(f"temporaries of {where} are not known here and not counted: {few}")
        lines += [*self.remarked, *([] if self.bound is None else self.bound.lines())]
        return lines if self.hbm is None else [*lines, *self._whether_it_fits(self.hbm)]

    def _whether_it_fits(self, room: int) -> list[str]:
        worst = max(self.peaks, key=self.peaks.__getitem__)
        need = f"{device_name(worst)} needs {in_bytes(self.peaks[worst])} of {in_bytes(room)}"
        if self.fits:
            return [f"it fits: {need}{self._of_all(worst)}"]
        kinds = list(map(sum, zip(*((*row.kinds, row.temporaries) for row in self.stages if row.device == worst), strict=True)))
        most = max(range(len(kinds)), key=kinds.__getitem__)
        lines = [f"it does not fit: {need}, most of that {(*MEMORY_KINDS, 'temporaries')[most]} ({in_bytes(kinds[most])})"]
        numbers = target_of(devices_of(worst)[0])
        larger = 0 if self.share is None or numbers is None else _room_at(_MORE, numbers.memory)
        enough = self.peaks[worst] <= larger
        if self.share is not None:
            lines.append(f"the room is {self._of_all(worst).removeprefix(', ')}")
        if enough:
            lines.append(f"{_FRACTION}={_MORE} alone makes it fit: the room is then {in_bytes(larger)}")
        for change in (change for change in self.changes[:_MOST] if change.moved):
            copies = f"the copies to the host and back, of {in_bytes(change.moved)} for each microbatch of a stage"
            lines.append(f"{change.what}: that time is without {copies}; they delay nothing if each is shorter than an action")
        for change in (change for change in self.changes[:_MOST] if change.visiting):
            left = (
                f"leaves {in_bytes(change.peak)} on the device that then holds most; that time is without the copies of its state"
            )
            lines.append(f"{change.what}: {left}, {_copied(change.visiting)} a device in a step, which other work may hide")
        if not self.changes:
            els, fix = (" else", "") if enough else ("", ": use more devices")
            lines.append(f"nothing{els} that was looked at fits ({self.tried}){fix}")
        return lines

    def _of_all(self, device: Device) -> str:
        """Why there is no more room than there is, on GPUs whose memory is known and of which nobody said how much there is."""
        numbers = target_of(devices_of(device)[0])
        if self.share is None or numbers is None:
            return ""
        why = f"that {_FRACTION} says" if _FRACTION in os.environ else f"that JAX takes unless {_FRACTION} says otherwise"
        beside = ", ".join(f"{in_bytes(size)} for {name}" for name, size in _MARGINS.items())
        small = f", but for {_FRAGMENTED:.0%} that fragments"
        short = f", and for what it must leave ({beside})" * (_room_at(1.0, numbers.memory) <= _room_at(self.share, numbers.memory))
        return f", the {self.share:.0%} of {in_bytes(numbers.memory)} {why}{small}{short}"

    def _changes(self) -> list[list[str]]:
        head = ["what should fit (estimates), the quickest first", "peak", "time"]
        rows = [[change.what, in_bytes(change.peak), f"x {change.slowdown:.2f}"] for change in self.changes[:_MOST]]
        return [head, *rows] if rows else []


def _copied(visiting: Visiting | None) -> str:
    brought, taken = visiting or Visiting(0, 0)
    return f"{in_bytes(brought)} from host memory and {in_bytes(taken)} back for"


def forecast(
    engine: Engine,
    batch: Batch,
    key: Key | None,
    room: int | None = None,
    waiting: Sequence[Name] = (),
    *,
    purpose: Purpose = "update",
    base: Engine | None = None,
    advise: bool = True,
) -> Forecast:
    """The memory of a step that takes over the buffers of its state; leaves on the host are counted where they are sent.

    All ranks are told of, also those of other processes. Batch and key may be shapes. Of leaves that are ``waiting`` a copy more
    waits for the next step (the prefetched set of a bank), each time that they are named. ``base`` is the engine that trains the
    parameters, for forwards of another function: its optimizer's state lives there too.
    """
    room, engine = room_of(engine, room), engine.at(batch)
    liveness = liveness_of_all(engine, batch, key, purpose)
    whole = liveness if base is None else with_optimizer(base, liveness)
    whole = with_waiting(whole, waiting)
    beside = whole.lives[len(liveness.lives) :]
    found = forecast_of(whole, engine.placement, room)
    if base is None and advise:
        source = cache(partial(frontier_of, engine, batch, key)) if purpose == "update" else None
        found = dataclasses.replace(found, bound=bound_of(engine, batch, key, purpose), source=source, remarked=_remarked(engine))
    if found.fits or room is None or not advise:
        return found
    if purpose == "forward":
        room -= max(sum(life.num_bytes for life in beside if life.device == device) for device in found.peaks)
    return dataclasses.replace(found, changes=_changes(found, engine, batch, key, room, purpose), tried=_TRIED[purpose])


def with_waiting(liveness: Liveness, waiting: Sequence[Name]) -> Liveness:
    """The same with a copy more of these leaves, each time that they are named, from the beginning to the end."""
    end, held = len(liveness.lines) + 1, {life.name: life for life in liveness.lives if life.begins == 0}
    return dataclasses.replace(liveness, lives=(*liveness.lives, *(held[name]._replace(ends=end) for name in waiting)))


class _Trial(NamedTuple):
    """A change to try: of each family the first that fits is enough."""

    family: str
    what: str
    options: Options
    batch: Batch


def _changes(now: Forecast, engine: Engine, batch: Batch, key: Key | None, room: int, purpose: Purpose) -> tuple[Change, ...]:
    """The changes that make a step fit, each kind in its mildest form, the quickest first."""
    options = engine.options
    rows = {device: [row for row in now.stages if row.device == device] for device in now.peaks}
    needs = {  # the temporaries of a device at its peak, and residuals, which are temporaries of a program that recomputes them
        device: (sum(row.temporaries for row in own), max(row.residuals for row in own)) for device, own in rows.items() if own
    }
    every = _step_trials(engine, batch) if purpose == "update" else _forward_trials(engine, batch)
    trials, before = {trial.what: trial for trial in every}, _seconds(options, batch, purpose)
    engines, moved, visiting = dict[str, Engine](), dict[str, int](), dict[str, Visiting | None]()

    def seconds(what: str) -> float:
        return _seconds(trials[what].options, trials[what].batch, purpose) / before

    def estimated(what: str) -> tuple[int, ...]:
        _, _, new, smaller = trials[what]
        other = engines[what] = _engine_of(engine, new, smaller, key)
        lowered = other.lower(purpose, smaller, key)
        liveness = liveness_in_flow(step_liveness(other, lowered), lowered)
        copied = Counter[tuple[int, int]]()
        for life in liveness.hosted:
            if life.name.ref.role not in new.waiting:
                copied[life.name.stage, life.name.microbatch] += life.num_bytes
        moved[what] = max(copied.values(), default=0)
        visiting[what] = max(liveness.visiting.values(), key=sum) if new.waiting else None
        share = options.schedule.num_microbatches / new.schedule.num_microbatches
        share *= options.schedule.num_stages / new.schedule.num_stages
        share *= _examples(options, smaller) / _examples(options, batch)
        again = new.remat != options.remat
        extra = {device: round(share * (own + again * residuals)) for device, (own, residuals) in needs.items()}
        return tuple(liveness.most(device) + extra.get(device, max(extra.values())) for device in liveness.devices)

    def compiled(what: str) -> tuple[int, ...]:
        liveness = liveness_of_all(engines[what], trials[what].batch, key, purpose)
        return tuple(map(liveness.most, liveness.devices))

    by_estimate, exactly = CandidateSearch(seconds, estimated, room), CandidateSearch(seconds, compiled, room)
    fitting: dict[str, Change] = {}
    with progress(list(trials), desc="looking for what fits", after=_PATIENCE) as bar:
        for what in by_estimate.fitting(what for what in bar if trials[what].family not in fitting):
            peak = max(by_estimate.peaks(what))
            fitting[trials[what].family] = Change(what, peak, by_estimate.seconds(what), moved[what], visiting[what])
    cheaper = [what for what in by_estimate.lightest() if trials[what].family != _HOST]  # than copies of the state
    nearest = [] if any(family != _HOST for family in fitting) else cheaper[:_COMPILED]
    for what in (what for what in nearest if max(by_estimate.peaks(what)) <= 2 * room):
        if exactly.fits(what):
            fitting[what] = Change(what, max(exactly.peaks(what)), exactly.seconds(what), moved[what], visiting[what])
    return tuple(sorted(fitting.values(), key=lambda change: change.slowdown))


def _engine_of(engine: Engine, options: Options, batch: Batch, key: Key | None) -> Engine:
    now, new = engine.options.schedule, options.schedule
    same = (now.stage_to_rank, now.num_microbatches) == (new.stage_to_rank, new.num_microbatches)
    if same and options.remat == engine.options.remat:
        return engine.with_host(options.host).with_schedule(new, options.offload)  # no need to trace and cut again
    return open_engine(options, engine.optimizer, engine.layout.given, batch, key)


def _seconds(options: Options, batch: Batch, purpose: Purpose) -> float:
    """A step on the virtual clock, in parts of the forward of the whole batch: F, I and W take the same, recomputing an F more."""
    schedule, again = options.schedule, [kept.recomputes for kept in options.remat or ()]
    if purpose != "update":
        count = len(batch) if isinstance(batch, Microbatches) else min(schedule.num_microbatches, _examples(options, batch))
        schedule, again = forward(schedule.num_stages, count), []
    once = (1.0,) * schedule.num_stages
    costs = StepCosts({Kind.F: once, Kind.I: once, Kind.W: once})
    return step_seconds(schedule, costs.recomputed(again) if again else costs) / (schedule.num_stages * schedule.num_microbatches)


def _step_trials(engine: Engine, batch: Batch) -> Iterator[_Trial]:
    now = engine.options
    stages, microbatches, name = now.schedule.num_stages, now.schedule.num_microbatches, now.schedule.name

    ways = partial(_remat, platform=now.devices[0].platform)
    for other in SCHEDULES:
        for options in _scheduled(now, other, stages, microbatches):
            if other != name and options.schedule.num_ranks == now.schedule.num_ranks:
                yield _Trial(f"schedule {other}", f'schedule="{other}"', options, batch)
    for way in ("least", "recompute") if now.remat is None else ("recompute",):
        yield _Trial("remat", f'remat="{way}"', dataclasses.replace(now, **ways(way, stages)), batch)
    offloading = dataclasses.replace(now, **ways("offload", stages))
    if offloading.offloaded and not now.offloaded:
        yield _Trial("offload", 'remat="offload"', offloading, batch)
    yield from () if engine.layout.leaves.own_params else _host_trials(now, batch)
    if name not in SCHEDULES:
        return
    count, most = microbatches * 2, 0 if isinstance(batch, Microbatches) else min(_examples(now, batch), _MOST_MICROBATCHES)
    while count <= most:
        for options in _scheduled(now, name, stages, count):
            yield _Trial("microbatches", f"num_microbatches={count}", options, batch)
        for options in _scheduled(now, name, stages, count, **ways("recompute", stages)):
            yield _Trial("both", f'num_microbatches={count}, remat="recompute"', options, batch)
        count *= 2
    kept = ways("keep" if now.remat is None else "offload" if now.offloaded else "least", 2 * stages)
    for options in _scheduled(now, name, 2 * stages, microbatches, cuts=None, **kept):
        if options.schedule.num_ranks <= len(now.devices):
            yield _Trial("stages", _stages(now, 2 * stages), options, batch)


def _host_trials(now: Options, batch: Batch) -> Iterator[_Trial]:
    """More of the state in host memory; then more stages on each rank too, so that each visit brings less."""
    ranks, stages, microbatches = now.schedule.num_ranks, now.schedule.num_stages, now.schedule.num_microbatches
    hosted, platform = now.hosted(), now.devices[0].platform
    for options in hosted:
        yield _Trial(_HOST, f'host="{options.host}"', options, batch)
    last = hosted[-1] if hosted else now
    if last.host is None:
        return  # the state cannot wait
    for way, remat in _FEWEST.items():
        yield _Trial(_HOST, f'host="{last.host}", remat={way}', dataclasses.replace(last, **_remat(remat, stages, platform)), batch)
    for per_rank in (each for each in _STAGES_PER_RANK if each * ranks > stages):
        with contextlib.suppress(JaxppError):  # there is no such schedule
            order = make("looped-bfs", num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=per_rank)
            made = f'jaxpp.schedule.make("looped-bfs", {ranks}, {microbatches}, stages_per_rank={per_rank})'
            for way, remat in _FEWEST.items():
                words = f'{_stages(now, order.num_stages)}, schedule={made}, host="{last.host}", remat={way}'
                fewest = _remat(remat, order.num_stages, platform)
                yield _Trial(_HOST, words, dataclasses.replace(last, schedule=order, cuts=None, **fewest), batch)


def _forward_trials(engine: Engine, batch: Batch) -> Iterator[_Trial]:
    """Changes of forwards: smaller batches; and for a ``Forward``, whose own they are, more microbatches and more stages."""
    now, shared = engine.options, engine.preparer.tracing.shared(batch)
    stages, microbatches = now.schedule.num_stages, now.schedule.num_microbatches
    if isinstance(batch, Microbatches):
        return
    examples = _examples(now, batch)
    count = examples // 2
    while count:
        yield _Trial("batch", f"batches of {count}", now, resized(batch_avals(batch), count, shared))
        count //= 2
    if not now.schedule.forward_only:
        return
    count = 2 * microbatches
    while count <= min(examples, _MOST_MICROBATCHES):
        options = dataclasses.replace(now, schedule=forward(stages, count))
        yield _Trial("microbatches", f"num_microbatches={count}", options, batch)
        count *= 2
    if 2 * stages <= len(now.devices):
        options = dataclasses.replace(now, schedule=forward(2 * stages, microbatches), cuts=None, remat=None, offload=())
        yield _Trial("stages", _stages(now, 2 * stages), options, batch)


def _examples(options: Options, batch: Batch) -> int:
    """The examples of a batch, or of the first of microbatches."""
    return check_batch(first_of(batch), 1, shared=options.broadcast, ragged=isinstance(batch, Microbatches))


def _stages(now: Options, count: int) -> str:
    if now.cuts is not None and now.cuts[:1] in ((), (scope(1),)):  # none: one stage by hand
        return f"{count} stage functions"
    return f"num_stages={count}" if now.cuts is None else f"num_stages={count}, cuts=None"


def _remat(way: Remat, stages: int, platform: str) -> dict[str, Any]:
    return {"remat": policies_of(way, stages, platform), "offload": offload_of(way, stages)}


def _scheduled(now: Options, name: str, stages: int, microbatches: int, **more: object) -> Iterator[Options]:
    with contextlib.suppress(JaxppError):
        schedule = make_for_stages(name, num_stages=stages, num_microbatches=microbatches)
        yield dataclasses.replace(now, schedule=schedule, **more)


def forecast_of(liveness: Liveness, placement: Placement, room: int | None) -> Forecast:
    """What each stage holds when its device holds most, of what is alive; ``room`` is the bytes that each device has, if known."""
    peaks = {device: liveness.peak(device) for device in liveness.devices}
    stages: list[StageMemory] = []
    for stage, device in enumerate(place.shown for place in placement.places):
        alive = [life for life in liveness.alive(device, peaks[device]) if life.name.stage == stage]
        kinds = tuple(sum(life.num_bytes for life in alive if life.kind == kind) for kind in MEMORY_KINDS)
        held = {(life.name.run, life.name.microbatch) for life in alive if life.kind == "residuals"}
        runs = liveness.stage_at(peaks[device]) == stage
        stages.append(StageMemory(stage, device, kinds, len(held), liveness.temporary(device, peaks[device]) * runs))
    moments = {device: liveness.lines[moment - 1].label for device, moment in peaks.items()}
    devices = [device for place in placement.places for device in place.devices]
    is_share = room is not None and compiles_only(devices[0]) and room == reported_room(devices)
    return Forecast(liveness, tuple(stages), moments, room, share=_share() if is_share else None)


def room_of(engine: Engine, room: int | None) -> int | None:
    """The bytes that each device has: ``room`` if it is given, else what the devices of this process say themselves, if they do."""
    if room is None:
        return reported_room(engine.options.devices)
    check_room(engine.options.devices, room)
    return room


def _remarked(engine: Engine) -> tuple[str, ...]:
    """What is to be said of temporaries that are those of a CPU."""
    type_ = coarsest_dtype(engine.preparer.first_cut.loss.graph.eqns)
    if engine.options.devices[0].platform != "cpu" or type_ != jnp.bfloat16:
        return ()
    other = 'devices=jaxpp.target("h100", 4) plans for GPUs with their own programs'
    return (f"temporaries are those of programs for CPUs, which widen bfloat16 to float32 and may need twice as much; {other}",)


def check_room(devices: Sequence[Device], room: int) -> None:
    """Refuse more bytes than a GPU has on which programs are planned and do not run."""
    known = {device: target_of(device) for device in devices if compiles_only(device)}
    short = [(numbers, device) for device, numbers in known.items() if numbers is not None and numbers.memory < room]
    if short:
        numbers, device = min(short, key=lambda pair: pair[0].memory)
        has = bytes_in_words(numbers.memory)
        fix = f'pass at most hbm="{has}"; without hbm, it is the {_share():.0%} of that which JAX takes'
        got = f"{bytes_in_words(room)}, and {device_name(device)} has {has}"
        raise ArgumentError("hbm", "a step has no more room on a GPU than the GPU has memory", got, fix)


def reported_room(devices: Sequence[Device]) -> int | None:
    """The bytes that each of the devices has, as those of this process say themselves; None if they do not."""
    rooms = [_room_on(device) for device in devices if is_here(device)]
    return min((room for room in rooms if room is not None), default=None)


def _room_on(device: Device) -> int | None:
    """What JAX takes of a device's memory: as the device says, or, if it only compiles, its share of what the target has."""
    if not compiles_only(device):
        return (device.memory_stats() or {}).get("bytes_limit")
    target = target_of(device)
    return None if target is None else _room_at(_share(), target.memory)


def _room_at(share: float, memory: int) -> int:
    """The bytes that arrays find where JAX takes this share of a GPU's memory, as far as others leave it."""
    left = memory - sum(_MARGINS.values())
    return int((1 - _FRAGMENTED) * max(0.0, min(share * memory, left)))


def _share() -> float:
    return float(os.environ.get(_FRACTION, _SHARE))


def with_optimizer(engine: Engine, liveness: Liveness) -> Liveness:
    """What is alive with the optimizer's state (and the loss scale), which stays where it is while forwards run."""
    names, shapes = engine.placed.names, engine.placed.shapes
    pairs = zip([*names.all_opt, *names.loss_scale], [*shapes.all_opt, *shapes.loss_scale], strict=True)
    lives = lasting_lives(pairs, engine.placement, len(liveness.lines) + 1)
    here, there = ([life for life in lives if life.name.ref.waits == waits] for waits in (False, True))
    return dataclasses.replace(liveness, lives=(*liveness.lives, *here), hosted=(*liveness.hosted, *there))


_LEAST_ROOM = 4096  # bytes below which a number was meant in a larger unit, as 24 or 80 are


def parse_bytes(size: float | str) -> int:
    """The bytes of a size as people write sizes; an ArgumentError if it is none, or so small that its unit was forgotten.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("80GB"), parse_bytes(4096)
        (1536, 80000000000, 4096)
    """
    text = format(size, "f") if is_real(size) else str(size)
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kmgt]?)(i?)b)?\s*", text, re.IGNORECASE)
    base = 1024 if found and found[3] else 1000
    room = int(float(found[1]) * base ** " kmgt".index((found[2] or " ").lower())) if found else 0
    if isinstance(size, bool) or room < 1:
        rule = "a size is a number of bytes, at least 1, or a number with a unit"
        raise ArgumentError(f"hbm={size!r}", rule, repr(size), 'pass for example "80GiB"')
    if room < _LEAST_ROOM and found and found[2] is None:
        rule, got = "a size without a unit is a number of bytes, and no device has so few", f"hbm={size!r}, {room} bytes"
        raise ArgumentError(f"hbm={size!r}", rule, got, f'write the unit: hbm="{float(found[1]):g}GiB"')
    return room


# --- the frontier of memory and time ---

_WAYS = ("keep", "least", 0.8, 0.6, 0.4, 0.2, 0.05, "recompute", "offload")
_WIDTH, _HEIGHT = 6.5, 3.2  # inches of a figure, and of its axes


def _draw(axes: Axes, ways: Sequence[Way], scale: float) -> None:
    highest = max(way.slowdown for way in ways)
    axes.set(xlim=(0, 1.12 * max(way.peak for way in ways) / scale))
    axes.set_ylim(1 - 0.12 * max(highest - 1, 0.1), 1 + 1.2 * max(highest - 1, 0.1))
    line = [way for way in ways if isinstance(way.remat, float) or way.remat == "least"]
    axes.plot([way.peak / scale for way in line], [way.slowdown for way in line], color=group_colour(0), linewidth=1.2, zorder=2)
    named: dict[tuple[float, float], list[str]] = {}
    for way in ways:
        place = way.peak / scale, way.slowdown
        look = {"color": group_colour(0)} if not way.hosted else {"facecolors": "white", "edgecolors": group_colour(1)}
        axes.scatter([place[0]], [place[1]], s=36, zorder=3, label=str(way.remat), **look)
        named.setdefault(place, []).append(str(way.remat))
    for place, names in named.items():
        axes.annotate(", ".join(names), place, (5, 5), textcoords="offset points", size=8, color=INK, zorder=4)


def frontier_of(engine: Engine, batch: Batch, key: Key | None) -> Frontier:
    """Every way for the stages of an engine, which stay where they are cut; nothing is compiled. Batch and key may be shapes.

    Arrays are counted as in a forecast; temporaries are not. Time is that of the virtual clock, on which the programs of each way
    take what their equations are estimated to take, FLOPs or bytes (``estimate.py``): what a forward keeps is written and read, and
    what a backward repeats is computed, from bytes that it reads.
    """
    schedule, platform = engine.options.schedule, engine.options.devices[0].platform
    num_stages, count = schedule.num_stages, schedule.num_microbatches * engine.placement.num_replicas
    ways, products, whole = list[Way](), 0.0, ()
    with progress(list(_WAYS), desc="looking at what stages keep", after=_PATIENCE) as bar:
        for remat in bar:
            offload = offload_of(remat, num_stages)
            if remat == "offload" and not offloads(schedule.rows, offload):
                continue  # no microbatch has the time to leave and to come back
            other = engine.with_remat(policies_of(remat, num_stages, platform), offload)
            lowered = other.lower("update", batch, key)
            liveness = step_liveness(other, lowered)
            peak, hosted = (max(map(most, liveness.devices)) for most in (liveness.most, liveness.most_hosted))
            stages, fused = other.preparer.step(batch, key).cuts[0].stages, _fused(other, batch, key)
            whole = whole or stages  # of the first way, which keeps everything and repeats nothing
            each = [(known if code.index in fused else code).costs for known, code in zip(whole, stages, strict=True)]
            costs = StepCosts({kind: tuple(own[kind.value] for own in each) for kind in (Kind.F, Kind.I, Kind.W)})
            products = 3.0 * count * sum(code.products for code in stages)
            repeated = count * sum(code.repeated for code in stages if code.index not in fused)
            ways.append(Way(remat, peak, step_seconds(schedule, costs), repeated, hosted))
    base = next(way.slowdown for way in ways if way.remat == "least") or 1.0
    ways = [way._replace(slowdown=way.slowdown / base) for way in ways]
    return Frontier(tuple(sorted(ways, key=lambda way: (-way.peak, way.slowdown))), products)


def again_of(engine: Engine, least: Engine, batch: Batch, key: Key | None) -> list[float]:
    """How much longer the backward of each stage takes than with ``least``, in parts of its forward, by estimates.

    Nothing where both are one program.
    """
    fused = _fused(engine, batch, key)
    codes, before = (each.preparer.step(batch, key).cuts[0].stages for each in (engine, least))
    more = [code.costs["B"] - known.costs["B"] for code, known in zip(codes, before, strict=True)]
    parts = [extra / (known.costs["F"] or math.inf) for extra, known in zip(more, before, strict=True)]
    return [0.0 if code.index in fused else max(0.0, part) for code, part in zip(codes, parts, strict=True)]


def _fused(engine: Engine, batch: Batch, key: Key | None) -> frozenset[int]:
    """The stages whose forward and backward are one program, which repeats nothing."""
    lines = engine.lower("update", batch, key).bound.lines
    return frozenset(line.action.stage for line in lines if line.action is not None and line.fused is not None)
