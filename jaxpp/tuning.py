"""``jaxpp.tune``: the pipeline that trains a loss fastest on the devices there are, found by measuring."""

import inspect
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import optax
from jax.sharding import Mesh

from jaxpp.engine.init_arguments import check_order, refuse_containers, with_inputs
from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError, JaxppError, is_count, shown
from jaxpp.errors.checks import as_tuple, check_optimizer, check_ranks, is_real, refuse_tracers
from jaxpp.errors.keywords import unknown_keywords
from jaxpp.errors.tracebacks import entries, entry
from jaxpp.observe.memory.forecast import check_room, parse_bytes, reported_room
from jaxpp.pipeline import Pipeline
from jaxpp.runtime.place import AxisMap, axis_map, mesh_of_ranks, num_places, submeshes
from jaxpp.runtime.processes.channel import rows_of_all
from jaxpp.runtime.processes.here import processes_of
from jaxpp.runtime.progress import progress
from jaxpp.schedule.draw.canvas import Figure, has_matplotlib
from jaxpp.schedule.draw.text import figure_html
from jaxpp.schedule.registry import AUTO, SCHEDULES, make
from jaxpp.stages.loss.microbatch import check_batch
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, table_lines, time_in_words, unit_of_bytes
from jaxpp.targets import compiles_only
from jaxpp.tuner.findings import reasons, tuning_figure
from jaxpp.tuner.machine import Devices
from jaxpp.tuner.search import KNOBS, Candidate, Limits, Row, SearchResult, Space, search
from jaxpp.types import Arguments, Batch, Device, Key, LossFn, Tree

__all__ = ["Tuning", "tune"]

_DECIDED = ("num_stages", "schedule", "cuts")
_REMAT = ("least", "keep", "recompute", "offload")
_MOST_ROWS = 12  # of a table; of more candidates it shows the best of each schedule
_MOST_REMARKS = 4  # about what was left out
_PATIENCE = 1  # seconds before a progress bar shows
_BOUND = (
    "these devices only compile, and nothing ran: each time is the least that the numbers of the GPU allow, "
    "with a host that launches kernels as that of an H200 did"
)


@entries
@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """What ``jaxpp.tune`` found. ``print`` it for a table and the reasons; in a notebook it draws itself.

    Attributes:
        given: options of ``Pipeline`` that all candidates share.
        hbm: bytes that each device has; None if that is not known.
        processes: the process of each rank's device, by the number of replicas; one process if there are none.
        remark: what should be known of how it was measured; empty if nothing.
        planned: whether the devices only compile: nothing ran, and predictions are from the numbers of the GPU and what kernels of
            their size were measured to reach of them.
        width: how many devices a replica of a rank has: all of a rank of a mesh; of lists of devices, of the first.
    """

    found: SearchResult
    given: Arguments
    hbm: int | None
    processes: Mapping[int, tuple[int, ...]]
    ask: Callable[[Candidate], tuple[int, ...]]
    remark: str
    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    planned: bool = False
    width: int = 1

    def pipeline(self) -> Pipeline:
        """The best pipeline: ``jaxpp.Pipeline(loss_fn, optimizer, **tuning.best)``."""
        return Pipeline(self.loss_fn, self.optimizer, **self.best)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All candidates that were simulated, the fastest by prediction first."""
        return self.found.rows

    @property
    def best(self) -> Arguments:
        """The options of the best pipeline: ``jaxpp.Pipeline(loss_fn, optimizer, **tuning.best)``."""
        candidate, mesh = self.found.best.candidate, self.given.get("mesh")
        if mesh is None:
            return {**self.given, **candidate.options}
        part = mesh_of_ranks(mesh, candidate.schedule.num_ranks, axis_map(self.given.get("axes"), mesh))
        return {**self.given, **candidate.options, "mesh": part}

    @cached_property
    def why(self) -> tuple[str, ...]:
        """Why these options: one sentence for each choice."""
        return reasons(self.found, self.hbm, self.processes, planned=self.planned, width=self.width)

    @cached_property
    def measured(self) -> tuple[Row, ...]:
        """The candidates that ran, the fastest first."""
        ran = [row for row in self.rows if row.measured is not None]
        return tuple(sorted(ran, key=lambda row: row.measured or 0.0))

    @cached_property
    def with_memory(self) -> tuple[Row, ...]:
        """All candidates with their peaks, as far as they are known; asks for those that the search did not need."""
        rows = list(self.rows)
        with progress(self.rows, after=_PATIENCE, desc="memory of all candidates") as bar:
            for k, row in enumerate(bar):
                if row.peaks is None and row.candidate not in self.found.left_out:
                    with suppress(JaxppError):
                        rows[k] = row._replace(peaks=self.ask(row.candidate))
        return tuple(rows)

    def figure(self, width: float | None = None) -> Figure:
        """Predicted time of a step against the memory of the fullest device, a mark for each candidate, as a matplotlib ``Figure``.

        The *frontier* is drawn as a line: candidates of which none other is both faster and smaller. Candidates that ran have a
        second mark at the time that they took. As the last line of a notebook's cell the figure shows itself. ``width`` is in
        inches, of which a page shows 96 pixels each; 9.4 unless given. Needs matplotlib.
        """
        return tuning_figure(self.with_memory, self.found.best, self.hbm, width)

    @property
    def heading(self) -> str:
        """One line that says what was looked at."""
        families = len(self.found.costs)
        return f"{len(self.rows)} candidates of {families} families, {len(self.measured)} of them run"

    def _shown(self) -> list[Row]:
        if len(self.rows) <= _MOST_ROWS:
            return list(self.rows)
        firsts = {(row.candidate.schedule.name, row.candidate.replicas): row for row in reversed(self.rows)}
        kept = {self.found.best.candidate, *(row.candidate for row in (*self.measured, *firsts.values()))}
        return [row for row in self.rows if row.candidate in kept]

    def _cells(self) -> list[list[str]]:
        ranks, replicas = ({knob.value(row.candidate) for row in self.rows} for knob in KNOBS if knob.name in ("ranks", "replicas"))
        hidden = {"ranks"} if len(ranks) == 1 else set()
        hidden |= {"replicas"} if replicas == {1} else set()
        knobs = [knob for knob in KNOBS if knob.name not in hidden]
        table = [
            [
                "",
                *(knob.name for knob in knobs),
                "predicted",
                *["measured"] * (not self.planned),
                "peak of each device",
            ]
        ]
        for row in self._shown():
            choice = ">" * (row.candidate == self.found.best.candidate)
            times = time_in_words(row.predicted), *[_measured(row)] * (not self.planned)
            table.append([choice, *(str(knob.value(row.candidate)) for knob in knobs), *times, self._memory(row)])
        return table

    def _memory(self, row: Row) -> str:
        if row.peaks is None:
            return "not asked"
        return _sizes(row.peaks) + " (too much)" * (self.hbm is not None and max(row.peaks) > self.hbm)

    def remarks(self) -> list[str]:
        """What the table leaves out, and why the choice was made."""
        shown, found = len(self._shown()), self.found
        room = "" if self.hbm is None else f", of {bytes_in_words(self.hbm)}"
        ran = "; measured: the median of its steps, ± the middle half" * bool(self.measured)
        lines = [f"> the choice{ran}; peak: the most bytes at once{room}"]
        if shown < len(self.rows):
            lines.append(f"{self.heading}: the table has {shown}, with the best of each schedule, and tuning.rows has all")
        if found.unseen:
            some = "; ".join(family.words for family in found.unseen[:_MOST_REMARKS])
            more = f"; and {len(found.unseen) - _MOST_REMARKS} more" * (len(found.unseen) > _MOST_REMARKS)
            lines.append(f"not looked at, because the budget was spent: {some}{more}")
        told: dict[str, list[str]] = {}
        for what, error in found.left_out.items():
            told.setdefault(str(error).splitlines()[0], []).append(what.words)
        for message, names in list(told.items())[:_MOST_REMARKS]:
            lines.append(f"left out: {'; '.join(names[:_MOST_REMARKS])}{'; ...' * (len(names) > _MOST_REMARKS)}: {message}")
        return [*lines, *[self.remark] * bool(self.remark), "", *self.why]

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._cells(), keep=2), "", *fold_lines(self.remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        picture = figure_html(self.figure(), self.heading) if has_matplotlib() else ""
        return f"{picture}{html_table(self._cells())}{html_remarks(self.remarks())}"


def _measured(row: Row) -> str:
    if row.measured is None or row.middle is None:
        return ""
    low, high = row.middle
    return f"{time_in_words(row.measured)} ±{50 * (high - low) / row.measured:.0f}%"


def _sizes(peaks: Sequence[int]) -> str:
    """Bytes of several devices, in the unit of the largest: ``12.3 11.8 MiB``."""
    unit, scale = unit_of_bytes(max(peaks))
    return f"{' '.join(f'{peak / scale:.3g}' if peak / scale < 100 else f'{peak / scale:.0f}' for peak in peaks)} {unit}"


@entry
def tune(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    init_or_params: Tree,
    batch: Batch,
    key: Key | None = None,
    *,
    devices: Sequence[Device | Sequence[Device]] | None = None,
    mesh: Mesh | None = None,
    data_parallel: int | Sequence[int] = 1,
    hbm: float | str | None = None,
    seconds: float | None = None,
    schedules: str | Sequence[str] | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    num_ranks: int | Sequence[int] | None = None,
    stages_per_rank: int | Sequence[int] = (1, 2),
    remat: str | Sequence[str] | None = None,
    balance: str | Sequence[str] | None = None,
    num_measured: int = 3,
    keep: bool | str | os.PathLike[str] = True,
    **options: object,
) -> Tuning:
    """Find the schedule, number of microbatches, stages a rank and remat with which a training step takes the least time.

    Candidates that run the same programs (equal cuts, equal microbatches) are measured together, and all are simulated with these
    costs. Of those that fit into ``hbm``, the best few are run, and the fastest is the choice. Every candidate trains like
    single-device gradient accumulation. Ctrl-C stops the search and leaves nothing behind.

    Args:
        loss_fn: as for ``Pipeline``.
        optimizer: as for ``Pipeline``.
        init_or_params: ``init_fn(key) -> params``, or the parameters; with ``has_state`` the pair.
        batch: a whole batch, as a step takes it.
        key: for the loss, if it takes one, and for ``init_fn``; ``jax.random.key(0)`` unless given.
        devices: what the pipeline may use, one device for each rank and replica; or, as for ``Pipeline``, lists of devices that are
            a rank each, and may be of unequal length. Default: ``jax.devices()``. On devices that only compile (``jaxpp.target``)
            nothing is run: candidates are compared by the least time that the GPU's numbers allow, with a host that launches
            kernels as one did that was measured.
        mesh: as for ``Pipeline``, in place of devices: each rank is one place along its axis of ranks.
        data_parallel: the number of replicas of each stage, or several numbers: how the devices are divided into ranks and
            replicas is then looked at, too. A replica has its part of the batch, and ``num_microbatches`` counts those of each.
        hbm: bytes that each device has: ``"24GiB"``, or a number. Default: what the devices report (CPUs report nothing).
        seconds: a budget for measuring: those that promise most come first, and ``print(tuning)`` tells what was not looked at. The
            best few are run after that, in any case. Default: no budget.
        schedules: a name, or several. Default: all of ``jaxpp.schedule.SCHEDULES``, and ``"auto"``: schedules made to measure, for
            what the stages of the best few candidates were measured to take, in as much memory as there is (``hbm``), or as these
            candidates take if that is not known.
        num_microbatches: a number, or several. Default: about half, one, two, four and eight times the ranks, or what near these
            divides the batch; and 1 for ``naive``.
        num_ranks: a number, or several. Default: as many as the devices have room for.
        stages_per_rank: a number, or several. Schedules in a V have two stages a rank, and interleaved ones two or more.
        remat: ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``, or several of these. Default: ``"least"``; and, if the
            fastest candidate does not fit into ``hbm``, ``"offload"`` and ``"recompute"`` as well.
        balance: by what the loss is cut, as for ``Pipeline``; or several of these. Default: ``"flops"``, one cut for all schedules,
            which share their measurements; and then ``"cost"`` for the best few, each cut for its own schedule.
        num_measured: how many candidates are run, by turns in several rounds. With 0, the best by prediction is chosen.
        keep: whether measurements are kept for later calls, in the user's cache folder or in a folder of this name.
        **options: of ``Pipeline``, for all candidates: ``has_aux``, ``weight``, ``has_state``, ``shardings``, ``axes``, ... With a
            ``bank``, steps run on a copy of its first set, which is on the devices when a step begins, as with ``pipe.prefetch``.

    Returns:
        a ``Tuning``: its options (``best``), ``pipeline()``, all candidates (``rows``), the reasons (``why``) and ``figure()``.

    Raises:
        ArgumentError: options that cannot be what they stand for; nothing fits into ``hbm``; too few ``seconds`` to measure.
        ScheduleError: an unknown schedule.
        BatchError: a batch that cannot be split, or that replicas cannot share evenly.
        JaxppError: for a loss, parameters or optimizer that cannot be run; candidates with too many stages are only left out.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jnp.tanh(batch @ params["w1"]) @ params["w2"]) ** 2)
        >>> params, batch = {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((8, 4))
        >>> two = jax.devices()[:2]
        >>> tuning = jaxpp.tune(
        ...     loss_fn, optax.adam(1e-2), params, batch, devices=two, schedules=("gpipe", "1f1b"), num_microbatches=4, keep=False
        ... )
        >>> tuning.best["num_microbatches"], tuning.best["schedule"] in ("gpipe", "1f1b")
        (4, True)
        >>> pipe = tuning.pipeline()
    """
    refuse_tracers("jaxpp.tune(loss_fn, optimizer, ...)", init_or_params, batch, key)
    check_optimizer(loss_fn, optimizer)
    refuse_containers("jaxpp.tune", init_or_params, batch)
    check_order("jaxpp.tune", init_or_params, batch, key)
    check_key(key, loss_fn, 2 + bool(options.get("has_state")) + (options.get("bank") is not None))
    if not isinstance(keep, (bool, str, os.PathLike)):
        rule, fix = "keep is True or False, or the name of a folder", "pass keep=True, keep=False or a folder, or leave it out"
        raise ArgumentError("jaxpp.tune(..., keep=...)", rule, shown(keep), fix)
    check_options("jaxpp.tune", tune, options)
    replicas = counts_of("jaxpp.tune", "data_parallel", data_parallel)
    room = _room_of(devices, mesh, replicas, axis_map(options.get("axes"), mesh))
    limits = _limits_of(hbm, seconds, num_measured)
    counts = counts_of("jaxpp.tune", "num_microbatches", num_microbatches) if num_microbatches is not None else ()
    shared = as_tuple(options.get("broadcast", ()))
    examples = [check_batch(batch, min(counts, default=1), count * room.replicas, shared) * count for count in replicas]
    splits = [(count, several) for several in replicas for count in _ranks_of(num_ranks, room.ranks, several)]
    space = Space(
        num_examples=examples[0],
        num_ranks=tuple(count for count, several in splits if several == 1),
        splits=tuple(split for split in splits if split[1] > 1),
        schedules=(*SCHEDULES, AUTO) if schedules is None else schedules_of("jaxpp.tune", schedules),
        stages_per_rank=counts_of("jaxpp.tune", "stages_per_rank", stages_per_rank),
        num_microbatches=counts,
        remat=("least",) if remat is None else _remat_of(remat),
        balance=("flops",) if balance is None else as_tuple(balance),
        own_cuts=balance is None,
        in_order=bool(options.get("has_state")),
        widths=room.widths,
    )
    given: Arguments = {
        **options,
        **({} if devices is None else {"devices": room.places}),
        **({} if mesh is None else {"mesh": mesh}),
    }
    for value in space.balance:  # what cannot be an option is refused before any work
        Pipeline(loss_fn, optimizer, num_stages=1 if mesh is None else room.ranks[1], balance=value, **given)
    limits = _agreed(limits, room, in_threads=options.get("threads", "ranks") != "one")
    places = room.places if mesh is not None or room.widths else room.places[: max(count * several for count, several in splits)]
    init_or_params, _ = with_inputs("jaxpp.tune", init_or_params, batch)
    paper = compiles_only(room.devices[0])
    limits = limits._replace(num_measured=0) if paper else limits  # nothing runs there
    machine = Devices(loss_fn, optimizer, init_or_params, batch, key, devices=places, mesh=mesh, options=dict(options), keep=keep)
    _check_params(machine.param_bytes, limits.hbm, max(count for count, _ in splits) * room.shards)
    found = search(machine, space, limits, saves=remat is None)
    remark = "; ".join(filter(None, [machine.remark, _BOUND * paper]))
    width = room.width(found.best.candidate.replicas)
    return Tuning(found, given, limits.hbm, limits.processes, machine.peaks, remark, loss_fn, optimizer, paper, width)


class _Room(NamedTuple):
    """What candidates may run on."""

    devices: tuple[Device, ...]
    firsts: Mapping[int, tuple[Device, ...]]  # the first device of each rank, by the number of replicas (of ``data_parallel``)
    ranks: Mapping[int, int]  # the most ranks, likewise
    replicas: int = 1  # of a rank of a mesh
    shards: int = 1
    lists: tuple[tuple[Device, ...], ...] = ()  # the devices of each rank, where they are given so

    def width(self, replicas: int) -> int:
        """How many devices of a rank each of so many replicas has: of a rank of a mesh, or of the first of the lists."""
        return len(self.lists[0]) // replicas if self.lists else self.replicas * self.shards

    @property
    def widths(self) -> tuple[int, ...]:
        """How many devices each of the lists has."""
        return tuple(map(len, self.lists))

    @property
    def places(self) -> tuple[Device | tuple[Device, ...], ...]:
        """The devices as ``Pipeline`` takes them."""
        return self.lists or self.devices


def _room_of(
    devices: Sequence[Device | Sequence[Device]] | None, mesh: Mesh | None, replicas: Sequence[int], axes: AxisMap
) -> _Room:
    ranks = {count: num_places(devices, mesh, count, axes) for count in replicas}
    if mesh is None:
        by_rank = check_ranks(devices)
        widest = max(map(len, by_rank))
        places = {count: submeshes(devices, None, count, max(1, ranks[count]), axes) for count in replicas}
        firsts = {count: tuple(place.devices[0] for place in each) for count, each in places.items()}
        lists = by_rank if widest > 1 else ()
        return _Room(tuple(itertools.chain(*by_rank)), firsts, ranks, shards=max(1, widest // min(replicas)), lists=lists)
    places = submeshes(devices, mesh, 1 if tuple(replicas) == (1,) else max(replicas), num_places(None, mesh, 1, axes), axes)
    firsts = tuple(place.devices[0] for place in places)
    return _Room(tuple(mesh.devices.flat), {1: firsts}, ranks, places[0].num_replicas, places[0].num_shards)


def _agreed(limits: Limits, room: _Room, *, in_threads: bool) -> Limits:
    """The limits with what the devices report of their memory, and with a clock that all processes agree on.

    Of GPUs that only compile, each rank has a thread of its own that hands over its actions, as on GPUs that run.
    """
    if limits.hbm is not None:
        check_room(room.devices, limits.hbm)
    hbm = reported_room(room.devices) if limits.hbm is None else limits.hbm
    if compiles_only(room.devices[0]):
        threads = {count: tuple(range(len(each))) for count, each in room.firsts.items()}
        return limits._replace(hbm=hbm, processes=threads if in_threads else {})
    if len(processes_of(room.devices)) == 1:
        return limits._replace(hbm=hbm)
    everywhere = float(rows_of_all(np.array(math.inf if hbm is None else hbm, np.float32)).min())
    hbm = limits.hbm or (int(everywhere) if everywhere < math.inf else None)
    began = time.perf_counter()
    processes = {count: tuple(device.process_index for device in each) for count, each in room.firsts.items()}

    def clock() -> float:  # of the process for which most time has passed
        return float(rows_of_all(np.array(time.perf_counter() - began, np.float32)).max())

    return limits._replace(hbm=hbm, processes=processes, clock=clock)


def check_options(where: str, front: Callable[..., object], options: Arguments, decided: Sequence[str] = _DECIDED) -> None:
    """Refuse options that are none of ``Pipeline``, or that a search finds itself."""
    known = [p.name for f in (front, Pipeline) for p in inspect.signature(f).parameters.values() if p.kind == p.KEYWORD_ONLY]
    if unknown := {name: value for name, value in options.items() if name not in known}:
        raise unknown_keywords(f"{where}(...)", unknown, [name for name in dict.fromkeys(known) if name not in decided])
    if found := [f"{name}={shown(options[name])}" for name in decided if name in options]:
        fix = "leave it out; schedules=, num_ranks=, stages_per_rank= and balance= say what is looked at"
        if front is not tune:
            fix = "leave it out; gpus=, counts=, model=, schedules= and num_microbatches= say what is looked at"
        what = "the schedule, the number of stages and the cuts" if front is tune else "these"
        rule = f"{where.rpartition('.')[2]} finds {what} itself"
        raise ArgumentError(f"{where}(...)", rule, found, fix)


def _check_params(num_bytes: int, hbm: int | None, num_devices: int) -> None:
    if hbm is not None and num_bytes > hbm * num_devices:
        need, room = bytes_in_words(num_bytes), bytes_in_words(hbm)
        got = f"parameters of {need}, and {num_devices} device{'s' * (num_devices != 1)} of {room}"
        fix = "use more devices or a smaller model, or pass a larger hbm if the devices have it"
        raise ArgumentError(f"jaxpp.tune(..., hbm={room!r})", "the devices together have room for the parameters", got, fix)


def _several(where: str, name: str, value: object, good: Callable[[Tree], object], rule: str, fix: str) -> tuple[Tree, ...]:
    """One value or several, at least one, all of them good; each once."""
    values = as_tuple(value)
    if not values or not all(map(good, values)):
        raise ArgumentError(f"{where}(..., {name}=...)", rule, shown(value), fix)
    return tuple(dict.fromkeys(values))


def counts_of(where: str, name: str, value: object) -> tuple[int, ...]:
    """Whole numbers of at least 1, from one or several."""
    rule = "it is a whole number of at least 1, or several of them"
    counts = _several(where, name, value, partial(is_count, least=1), rule, f"pass for example {name}=(4, 8)")
    return tuple(map(int, counts))


def _ranks_of(value: object, most: Mapping[int, int], replicas: int) -> tuple[int, ...]:
    """The numbers of ranks that are looked at with so many replicas; ``most`` has how many there are devices for."""
    counts = (max(1, most[replicas]),) if value is None else counts_of("jaxpp.tune", "num_ranks", value)
    fewer = tuple(count for count in counts if count <= most[replicas])
    if len(fewer) < len(counts) and (len(most) == 1 or not fewer):
        rule = "there is a device for each rank" + " and replica" * (replicas > 1)
        too_many = [f"num_ranks={count} with devices for {most[replicas]}" for count in counts if count > most[replicas]]
        fix = f"pass {most[replicas]} or fewer, or more devices"
        raise ArgumentError("jaxpp.tune(..., num_ranks=...)", rule, too_many, fix)
    return fewer


def schedules_of(where: str, value: object) -> tuple[str, ...]:
    fix = 'pass schedules="1f1b", or leave it out to look at all'
    good = partial(make, num_ranks=1, num_microbatches=2)
    return _several(where, "schedules", value, lambda name: name == AUTO or good(name), "there is at least one name", fix)


def _remat_of(value: object) -> tuple[str, ...]:
    rule = 'candidates keep the least ("least"), everything ("keep"), their inputs ("recompute"), or offload ("offload")'
    return _several("jaxpp.tune", "remat", value, _REMAT.__contains__, rule, 'pass remat=("least", "recompute"), for example')


def _limits_of(hbm: float | str | None, seconds: float | None, num_measured: int) -> Limits:
    room = None if hbm is None else parse_bytes(hbm)
    if seconds is not None and not (is_real(seconds) and 0 < float(seconds) < math.inf):
        rule, fix = "the budget is a number of seconds above 0, or None", "pass seconds=60, or leave it out to measure all"
        raise ArgumentError("jaxpp.tune(..., seconds=...)", rule, shown(seconds), fix)
    if not is_count(num_measured):
        rule = "the number of candidates that are run is a whole number of at least 0"
        raise ArgumentError("jaxpp.tune(..., num_measured=...)", rule, shown(num_measured), "pass num_measured=3")
    return Limits(room, None if seconds is None else float(seconds), int(num_measured))
