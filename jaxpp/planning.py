"""``jaxpp.plan``: which GPUs, how many, in which mesh: what fits, how long a step takes, and what a run costs.

A row is a kind of GPU, a number of them, and the mesh that they are. For each, ``tune``'s search finds the schedule, the number
of microbatches and what stages keep, by costs and bytes that are estimated from shapes alone. Where nothing fits, replicas divide
more of their state, and then the state waits in host memory. The few rows that are best by estimate are compiled for their GPU, and
have the bound, the prediction and the bytes of their own programs.
"""

import dataclasses
import gc
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpp.engine.init_arguments import check_order, refuse_containers, variables_of, with_inputs
from jaxpp.engine.layout import Traces
from jaxpp.engine.sharding_rules import specs_of
from jaxpp.engine.tracing import Tracing, check_key
from jaxpp.errors import ArgumentError, JaxppError, is_count, shown
from jaxpp.errors.checks import as_tuple, check_optimizer, is_real, refuse_tracers
from jaxpp.errors.tracebacks import entries, entry
from jaxpp.observe.bound import StepBound
from jaxpp.observe.evaluate import Parts, parts
from jaxpp.observe.memory.forecast import parse_bytes, reported_room
from jaxpp.options import Options
from jaxpp.pipeline import Pipeline
from jaxpp.runtime.not_public import cudnn_of, questions_noted
from jaxpp.runtime.progress import progress
from jaxpp.runtime.roofline import SPREAD, Prediction
from jaxpp.schedule.draw.canvas import INK, Figure, draw_key, group_colour, has_matplotlib, new_figure, number_points
from jaxpp.schedule.draw.text import figure_html
from jaxpp.schedule.simulate import Simulation
from jaxpp.shardings import propose_shardings
from jaxpp.stages.axes import axis_names
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.loss.microbatch import check_batch
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.own_params import join_losses
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, table_lines, three_digits, time_in_words
from jaxpp.targets import GPU, gpu_named, target
from jaxpp.tasks.runner import check_bank, with_set
from jaxpp.tuner.machine import Devices
from jaxpp.tuner.search import Candidate, Limits, SearchResult, Space, is_of_loss, search
from jaxpp.tuning import check_options, counts_of, schedules_of
from jaxpp.types import Arguments, Batch, Device, Key, LossFn, Tree

__all__ = ["GPUMesh", "PlanRow", "Planning", "plan"]

_DECIDED = ("num_stages", "schedule", "cuts", "devices", "mesh", "data_parallel", "remat")
_SCHEDULES = ("1f1b", "interleaved", "zb-h1")
_VISITED = ("looped-bfs",)  # in which a rank turns to each stage seldom, for parameters that wait in host memory
_VISITS = (((4,), (2,)), ((8,), (8,)))  # stages a rank and microbatches, in ranks, of stages that visit
_ALONE = (1, 2, 4, 8, 16)  # microbatches of a single rank that holds its state
_FAMILIES = 2  # of each layout, and each way to save memory, that are traced
_SHOWN = 10  # rows of a table
_PER_HOST = 8
_OBJECTS = 20_000  # that Python makes before it looks for cycles, all the more seldom through all that it has
_PATIENCE = 1  # seconds before a progress bar shows
_OF_LOSS = "has_state", "has_aux", "broadcast"  # options that say what a loss is
_DAY, _HOUR = 86_400.0, 3_600.0
_LIMITS = ("computing", "the bubble", "sharing", "links", "copies to the host", "the host", "update and replicas")


@dataclass(frozen=True)
class GPUMesh:
    """Some GPUs of a kind, and the mesh that they are."""

    gpu: GPU
    num_gpus: int
    pipe: int  # ranks of the pipeline
    data: int  # replicas of each
    model: int  # devices that share a replica's stage
    per_host: int = _PER_HOST

    @property
    def words(self) -> str:
        """For people: ``8 x H100, 4 x 2 x 1``."""
        return f"{self.num_gpus} x {self.gpu.shown}, {self.mesh}"

    @property
    def mesh(self) -> str:
        """Ranks, replicas and shards: ``4 x 2 x 1``."""
        return f"{self.pipe} x {self.data} x {self.model}"

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Devices that only compile, on as many hosts as they need."""
        hosts = next(count for count in range(-(-self.num_gpus // self.per_host), self.num_gpus + 1) if self.num_gpus % count == 0)
        return target(self.gpu, self.num_gpus, hosts=hosts)

    @property
    def where(self) -> Arguments:
        """The arguments of ``Pipeline`` that say where it runs."""
        if self.model == 1:
            return {"devices": self.devices, **({"data_parallel": self.data} if self.data > 1 else {})}
        grid = np.array(self.devices).reshape(self.pipe, self.data, self.model)
        return {"mesh": Mesh(grid, ("pipe", "data", "model"))}


@dataclass(frozen=True, repr=False)
class PlanRow:
    """The best pipeline that was found for a layout.

    Attributes:
        layout: the GPUs and their mesh.
        candidate: schedule, numbers of stages and microbatches, and what stages keep.
        saves: further options of ``Pipeline`` that save memory: ``shard``, ``host``.
        room: bytes that each device has.
        peaks: bytes that the device of each rank holds at its peak.
        seconds: what a step likely takes, and between which times it is expected to lie.
        parts: what these seconds are made of.
        bubble: idle time over ranks x makespan.
        mfu: the model's own arithmetic over what the GPUs could do in that time at their peak.
        bound: the bound of the compiled programs; None for a row that is estimated from shapes.
        dollars: what an hour of one GPU costs; None if no price was given.
        steps: how many steps a run has, if that was said.
        per_step: tokens of a step, or examples where no leaf of the batch holds several whole numbers an example.
        given: options of ``Pipeline`` that all rows share.
        shardings: how GPUs share a stage, where that was proposed (``jaxpp.propose_shardings``).
    """

    layout: GPUMesh
    candidate: Candidate
    saves: Arguments
    room: int
    peaks: tuple[int, ...]
    seconds: Prediction
    parts: Parts
    bubble: float
    mfu: float
    bound: StepBound | None = None
    dollars: float | None = None
    steps: float | None = None
    per_step: int = 1
    given: Arguments = dataclasses.field(default_factory=dict)
    shardings: Mapping[str, PartitionSpec] | None = None

    def __repr__(self) -> str:
        schedule, held = self.candidate.schedule, f"{bytes_in_words(max(self.peaks))} of {bytes_in_words(self.room)}"
        count = f"{schedule.num_microbatches} microbatch{'es' * (schedule.num_microbatches > 1)}"
        return f"PlanRow({self.layout.words}: {schedule.name}, {count}, {_range(self.seconds)}, {held})"

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it has room for."""
        return max(self.peaks) <= self.room

    @property
    def rate(self) -> float:
        """Tokens (or examples) a second, of all GPUs."""
        return self.per_step / self.seconds.seconds

    @property
    def days(self) -> float | None:
        """Of the run, without pauses."""
        return None if self.steps is None else self.steps * self.seconds.seconds / _DAY

    @property
    def cost(self) -> float | None:
        """Dollars of the run."""
        if self.days is None or self.dollars is None:
            return None
        return self.days * _DAY / _HOUR * self.dollars * self.layout.num_gpus

    @property
    def limit(self) -> str:
        """What takes the largest part of a step."""
        return max(zip(self.parts, _LIMITS, strict=True))[1]

    @property
    def exposed(self) -> float:
        """Seconds of a step that transfers and copies add because nothing hides them."""
        return self.parts.transfer + self.parts.copies

    @property
    def options(self) -> Arguments:
        """The arguments of ``Pipeline`` for this row, but for the devices."""
        shared = {name: value for name, value in self.candidate.options.items() if name != "data_parallel"}
        return {
            **shared,
            **({"data_parallel": self.layout.data} if self.layout.data > 1 == self.layout.model else {}),
            **self.saves,
            **({} if self.shardings is None else {"shardings": self.shardings}),
        }

    @property
    def line(self) -> str:
        """The line to paste, on the devices that there are; options that are no words or numbers stand under their own names."""
        schedule, options = self.candidate.schedule, dict(self.options)
        if not isinstance(options["schedule"], str):
            sizes = f"{schedule.num_ranks}, {schedule.num_microbatches}, stages_per_rank={self.candidate.stages_per_rank}"
            options["schedule"] = f"jaxpp.schedule.make({schedule.name!r}, {sizes})"
        if self.shardings is not None:
            said = "".join(_argument(name, self.given[name]) for name in _OF_LOSS if name in self.given)
            params = "(params, model_state)" if self.given.get("has_state") else "params"
            said += ", task_params=bank.params(bank.tasks[0])" * ("bank" in self.given)
            options["shardings"] = f"jaxpp.propose_shardings(loss_fn, {params}, batch, model={self.layout.model}{said})"
        said = ", ".join(
            f"{name}={value if isinstance(value, str) and value.startswith('jaxpp.') else repr(value)}"
            for name, value in options.items()
        )
        said += "".join(_argument(name, value) for name, value in self.given.items())
        mesh = f', mesh=jax.make_mesh(({self.layout.mesh.replace(" x ", ", ")}), ("pipe", "data", "model"))'
        return f"jaxpp.Pipeline(loss_fn, optimizer, {said}{mesh * (self.layout.model > 1)})"


@entries
@dataclass(frozen=True, eq=False, repr=False)
class Planning:
    """What ``jaxpp.plan`` found. ``print`` it for a table; in a notebook it draws itself.

    Attributes:
        rows: a row for each layout for which something fits: the quickest first, or the cheapest where there are prices.
        too_large: the best of layouts where nothing that was looked at fits.
        left_out: why there is no row of other layouts.
        what: what ``rate`` counts: tokens or examples.
        given: options of ``Pipeline`` that all rows share.
    """

    rows: tuple[PlanRow, ...]
    too_large: tuple[PlanRow, ...]
    left_out: Mapping[str, JaxppError]
    what: str
    given: Arguments
    loss_fn: LossFn
    optimizer: optax.GradientTransformation

    def pipeline(self, number: int = 0, **options: object) -> Pipeline:
        """The pipeline of a row, on devices that only compile, for its ``forecast`` and ``programs``.

        Args:
            number: of the row, from 0 for the best.
            **options: of ``Pipeline``, in place of the row's: ``devices=jax.devices()`` on the machine itself.

        Raises:
            ArgumentError: there is no such row.
        """
        if not is_count(number) or number >= len(self.rows):
            fix = f"pass a number up to {len(self.rows) - 1}" if self.rows else "allow more GPUs"
            raise ArgumentError("Planning.pipeline(number)", "rows are counted from 0", shown(number), fix)
        row = self.rows[int(number)]
        where = {} if {"devices", "mesh"} & set(options) else row.layout.where
        return Pipeline(self.loss_fn, self.optimizer, **{**self.given, **row.options, **where, **options})

    def _cells(self) -> list[list[str]]:
        rows = (*self.rows[:_SHOWN], *self.too_large[: max(0, _SHOWN - len(self.rows))])
        money, runs = any(row.cost is not None for row in rows), any(row.days is not None for row in rows)
        head = ["", "GPUs", "mesh", "schedule", "microbatches", "stages a rank", "saves", "fullest GPU", "at least", "likely"]
        head += [f"{self.what}/s", "MFU", "bubble", "limited by", *["days"] * runs, *["cost"] * money]
        table = [head]
        for number, row in enumerate(rows):
            candidate, bound = row.candidate, row.bound
            saved = [candidate.remat] * (candidate.remat != "least") + [
                f"{name}={_words(value)}" for name, value in row.saves.items()
            ]
            cells = [str(number) if row.fits else "", f"{row.layout.num_gpus} x {row.layout.gpu.shown}", row.layout.mesh]
            cells += [candidate.schedule.name, str(candidate.schedule.num_microbatches), str(candidate.stages_per_rank)]
            cells += [", ".join(saved) or "nothing", f"{bytes_in_words(max(row.peaks))}{'' if row.fits else ': too much'}"]
            cells += ["" if bound is None else time_in_words(bound.seconds), _range(row.seconds)]
            cells += [three_digits(row.rate), f"{row.mfu:.0%}", f"{row.bubble:.0%}", row.limit]
            cells += [f"{row.days:,.3g}" if row.days is not None else ""] * runs
            cells += [f"${row.cost:,.0f}" if row.cost is not None else ""] * money
            table.append(cells)
        return table

    def remarks(self) -> list[str]:
        """What the table leaves out, and what its columns mean."""
        compiled = sum(row.bound is not None for row in (*self.rows, *self.too_large))
        kinds = {row.layout.gpu.shown: row.room for row in (*self.rows, *self.too_large)}
        rooms = ", ".join(f"{bytes_in_words(room)} of {name}" for name, room in kinds.items())
        went = f"the {compiled} with a bound (at least) went through the compiler, the others are estimated from shapes"
        lines = [
            f"mesh: ranks of the pipeline x replicas x shards; microbatches: of each replica; room: {rooms}",
            f"likely: what a step is expected to take, and its range; {went if compiled else 'all rows are estimated from shapes'}",
        ]
        more = len(self.rows) - _SHOWN
        lines += [f"the {_SHOWN} best of {len(self.rows)}; planning.rows has all"] * (more > 0)
        hidden = self.too_large[max(0, _SHOWN - len(self.rows)) :]
        least = min(hidden, key=lambda row: max(row.peaks) / row.room, default=None)
        if least is not None:
            need = f"needs {bytes_in_words(max(least.peaks))} of {bytes_in_words(least.room)}"
            lines.append(f"too large: {'; '.join(row.layout.words for row in hidden)}; nearest: {least.layout.words}, which {need}")
        told: dict[str, list[str]] = {}
        for what, error in self.left_out.items():
            told.setdefault(str(error).splitlines()[0], []).append(what)
        lines += [f"left out: {'; '.join(names)}: {message}" for message, names in told.items()]
        if self.rows:
            lines += ["", "row 0, on the machine itself (planning.pipeline(0) makes it here):", f"  {self.rows[0].line}"]
        else:
            lines += ["", "nothing that was looked at fits: allow more GPUs, or a smaller batch"]
        return lines

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._cells(), keep=3), "", *fold_lines(self.remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        picture = figure_html(self.figure(), f"{len(self.rows)} layouts") if has_matplotlib() and self.rows else ""
        return f"{picture}{html_table(self._cells())}{html_remarks(self.remarks())}"

    def figure(self, width: float | None = None) -> Figure:
        """Cost of the run against its days, a mark for each row; without prices the GPUs against the time of a step.

        Args:
            width: of the figure in inches; 9.4 unless given.

        Raises:
            ArgumentError: there is no row.
            ImportError: without matplotlib, saying how to install it.
        """
        if not self.rows:
            raise ArgumentError("Planning.figure()", "a figure has a mark for each row", "no row", "allow more GPUs")
        money = all(row.cost is not None for row in self.rows)
        figure = new_figure((width or 9.375, 4.4), "constrained")
        axes = figure.subplots()
        kinds = list(dict.fromkeys(row.layout.gpu.shown for row in self.rows))
        colour = {kind: group_colour(number) for number, kind in enumerate(kinds)}
        points = list[tuple[float, float]]()
        for row in self.rows:
            scale = row.days / row.seconds.seconds if row.days is not None else 1.0
            across, up = row.seconds.seconds * scale, row.cost if money else float(row.layout.num_gpus)
            spread = [[scale * (row.seconds.seconds - row.seconds.low)], [scale * (row.seconds.high - row.seconds.seconds)]]
            axes.errorbar([across], [up], xerr=spread, fmt="o", color=colour[row.layout.gpu.shown], markersize=5, elinewidth=0.8)
            points.append((across, float(up or 0)))
        axes.set(xscale="log", facecolor="none", ylim=(0, None))
        axes.set_xlabel("a run, days" if self.rows[0].days is not None else "a step, seconds", size=9, color=INK)
        axes.set_ylabel("cost of the run, dollars" if money else "GPUs", size=9, color=INK)
        axes.tick_params(which="both", length=3, labelsize=8, labelcolor=INK, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        words = [f"{number}  {row.layout.words}" for number, row in enumerate(self.rows[:_SHOWN])]
        axes.text(1.02, 1, "\n".join(words), transform=axes.transAxes, va="top", size=8, color=INK, linespacing=1.6)
        draw_key(figure, [(kind, colour[kind]) for kind in kinds], f"{len(self.rows)} layouts; a line is the range of a prediction")
        for _ in range(2):  # the list beside the axes takes of their width
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
        number_points(axes, points[:_SHOWN], first=0)
        return figure


@entry
def plan(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    init_or_params: Tree,
    batch: Batch,
    key: Key | None = None,
    *,
    gpus: str | GPU | Sequence[str | GPU] = ("h100",),
    counts: int | Sequence[int] = (8,),
    per_host: int = _PER_HOST,
    model: int | Sequence[int] = 1,
    hbm: float | str | None = None,
    tokens: float | None = None,
    price: Mapping[str, float] | None = None,
    schedules: str | Sequence[str] | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    num_compiled: int = 3,
    **options: object,
) -> Planning:
    """Say which GPUs, how many and in which mesh train a loss: what fits, how long a step takes, and what a run costs.

    For every kind, count and mesh the schedule, the number of microbatches and what stages keep are chosen as ``jaxpp.tune`` does,
    by costs and bytes that are estimated from shapes. Where nothing fits, replicas divide more of the state, and then the state
    waits in host memory. The best rows are then compiled for their GPU. Nothing runs, and no GPU is needed, but for JAX's CUDA
    plug-in (the extra ``targets``).

    Args:
        loss_fn: as for ``Pipeline``.
        optimizer: as for ``Pipeline``.
        init_or_params: ``init_fn(key) -> params``, or the parameters, or their shapes.
        batch: a whole batch of all GPUs together, or its shapes.
        key: for the loss, if it takes one, and for ``init_fn``; ``jax.random.key(0)`` unless given.
        gpus: kinds as ``jaxpp.target`` takes them; with a count in front (``"8xh100"``) only so many of it.
        counts: how many GPUs, one number or several; each is divided into ranks and replicas in every way.
        per_host: how many GPUs a host has; more are on several hosts, with their network between them.
        model: how many GPUs share each stage of a replica (the axis ``model`` of a mesh), one number or several. ``shardings=``
            says how, unless the parameters do; without either, ``jaxpp.propose_shardings`` does.
        hbm: bytes of each GPU that may be used. Default: what JAX takes of the GPU's memory, less what libraries hold.
        tokens: of a whole run, for days and cost. A batch has as many tokens as its largest leaf of whole numbers has elements;
            where that is one an example, as labels are, or there is none, examples are counted.
        price: dollars for an hour of one GPU, by the names in ``gpus``.
        schedules: names, or one. Default: ``"1f1b"``, ``"interleaved"`` and ``"zb-h1"``; ``"looped-bfs"`` for a state on the host.
        num_microbatches: of each replica, a number or several. Default: two, four and eight times the ranks, or what near these
            divides the batch.
        num_compiled: how many of the best rows go through the compiler; a model of 8 billion parameters takes about half a minute.
        **options: of ``Pipeline``, for all rows: ``has_aux``, ``weight``, ``shardings``, ``loss_scale``, ... With a ``bank``, every
            step trains a set like its first, which is on the devices when the step begins, as with ``pipe.prefetch``; the sets that
            wait beside it (``slots``) are counted.

    Returns:
        a ``Planning``: its ``rows``, ``pipeline(0)`` and ``figure()``.

    Raises:
        ArgumentError: options that cannot be what they stand for; an unknown GPU; JAX's CUDA plug-in is missing.
        BatchError: a batch that cannot be split.
        JaxppError: for a loss, parameters or an optimizer that cannot be run at all.
    """
    planner = _checked((loss_fn, optimizer, init_or_params, batch, key), options, hbm, schedules, num_microbatches)
    if not is_count(num_compiled):
        rule = "the number of rows that are compiled is a whole number of at least 0"
        raise ArgumentError("jaxpp.plan(..., num_compiled=...)", rule, shown(num_compiled), "pass num_compiled=3")
    if tokens is not None and not _is_positive(tokens):
        raise ArgumentError("jaxpp.plan(..., tokens=...)", "a run has some tokens", shown(tokens), "pass tokens=10e9")
    if not is_count(per_host, least=1):
        rule = "the number of GPUs of a host is a whole number of at least 1"
        raise ArgumentError("jaxpp.plan(..., per_host=...)", rule, shown(per_host), "pass per_host=8")
    kinds = dict.fromkeys(_kinds(gpus, counts_of("jaxpp.plan", "counts", counts), {} if price is None else price))
    if price and tokens is None:
        rule, fix = "a price says what a run costs, whose tokens are known", "pass tokens=10e9, or leave price out"
        raise ArgumentError("jaxpp.plan(..., price=...)", rule, f"price={shown(price)} without tokens", fix)
    widths = counts_of("jaxpp.plan", "model", model)
    layouts = [
        (GPUMesh(gpu, count, *mesh, per_host=int(per_host)), dollars)
        for gpu, count, dollars in kinds
        for mesh in _meshes(count, widths)
    ]
    if not layouts:
        rule, got = "some number of GPUs is divided by the number that share a stage", f"{sorted({kind[1] for kind in kinds})} GPUs"
        raise ArgumentError("jaxpp.plan(..., model=...)", rule, f"{got}, model={shown(model)}", "pass model=1, or other counts")
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(batch) if jnp.issubdtype(leaf.dtype, jnp.integer)]
    per_step = max([*sizes, planner.num_examples])
    what = "tokens" if per_step > planner.num_examples else "examples"
    steps = None if tokens is None else float(tokens) / per_step
    planner = planner.sized([layout for layout, _ in layouts])
    with _cycles_sought_seldom(), questions_noted() as asked:
        planner = dataclasses.replace(planner, layouts=[layout for layout, _ in layouts], asked=asked)
        outcomes = _searched_all(planner, planner.layouts)
    found = [
        dataclasses.replace(each, dollars=dollars, steps=steps, per_step=per_step, given=planner.options)
        for each, (_, dollars) in zip(outcomes, layouts, strict=True)
        if isinstance(each, PlanRow)
    ]
    left_out = {layout.words: each for (layout, _), each in zip(layouts, outcomes, strict=True) if isinstance(each, JaxppError)}
    if not found:
        raise next(iter(left_out.values()))
    money = all(row.cost is not None for row in found)
    order = [*sorted((row for row in found if row.fits), key=partial(_price, money=money))]
    order = [*planner.compiled_rows(order[: int(num_compiled)], left_out), *order[int(num_compiled) :]]
    fits = sorted((row for row in order if row.fits), key=partial(_price, money=money))
    large = sorted((row for row in (*order, *found) if not row.fits), key=lambda row: max(row.peaks) / row.room)
    return Planning(tuple(fits), tuple(large), left_out, what, dict(options), loss_fn, optimizer)


def _checked(
    given: tuple[LossFn, optax.GradientTransformation, Tree, Batch, Key | None],
    options: Arguments,
    hbm: float | str | None,
    schedules: str | Sequence[str] | None,
    num_microbatches: int | Sequence[int] | None,
) -> "_Planner":
    """What is planned, once the arguments are known to be what they stand for."""
    loss_fn, optimizer, init_or_params, batch, key = given
    refuse_tracers("jaxpp.plan(loss_fn, optimizer, ...)", init_or_params, batch, key)
    check_optimizer(loss_fn, optimizer)
    refuse_containers("jaxpp.plan", init_or_params, batch)
    check_order("jaxpp.plan", init_or_params, batch, key)
    bank: Tree = options.get("bank")
    check_key(key, loss_fn, 2 + bool(options.get("has_state")) + (bank is not None))
    check_options("jaxpp.plan", plan, options, _DECIDED)
    if bank is not None:
        check_bank(bank, "jaxpp.plan(..., bank=...)")
    init_or_params, _ = with_inputs("jaxpp.plan", init_or_params, batch)
    return _Planner(
        (loss_fn, optimizer, init_or_params, batch, key),
        dict(options),
        check_batch(batch, 1, shared=as_tuple(options.get("broadcast", ()))),
        None if hbm is None else parse_bytes(hbm),
        () if schedules is None else schedules_of("jaxpp.plan", schedules),
        () if num_microbatches is None else counts_of("jaxpp.plan", "num_microbatches", num_microbatches),
    )


@contextmanager
def _cycles_sought_seldom() -> Iterator[None]:
    """Meanwhile Python seeks garbage in cycles seldom: to look at so many equations again and again is a sixth of a plan's time."""
    usual = gc.get_threshold()
    if not 0 < usual[0] < _OBJECTS:  # it never does, or another thread plans and will say what was usual
        yield
        return
    gc.set_threshold(_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _searched_all(planner: "_Planner", layouts: Sequence[GPUMesh]) -> list[PlanRow | JaxppError]:
    """The best of each layout, or why there is none; those of one mesh follow one another, as they share their traces."""
    outcomes = dict[int, PlanRow | JaxppError]()
    by_mesh = sorted(range(len(layouts)), key=lambda k: (layouts[k].num_gpus, layouts[k].mesh))
    with progress(by_mesh, after=_PATIENCE, desc="layouts") as bar:
        for number in bar:
            bar.set_description(layouts[number].words)
            try:
                outcomes[number] = planner.best(layouts[number])
            except JaxppError as error:
                if is_of_loss(error):
                    raise
                outcomes[number] = error
    return [outcomes[number] for number in range(len(layouts))]


def _price(row: PlanRow, *, money: bool) -> float:
    return (row.cost or 0.0) if money else row.seconds.seconds


class _Way(NamedTuple):
    """How memory is saved."""

    saves: Arguments
    stages_per_rank: tuple[int, ...] = (1, 2)
    microbatches: tuple[int, ...] = (2, 4, 8)  # in ranks


def _ways(replicas: int) -> Iterator[_Way]:
    """The cheapest first: replicas divide more, then the state waits in host memory, then a visit brings less of it."""
    if replicas > 1:
        yield _Way({"shard": "optimizer"})
        yield _Way({"shard": ("gradients", "parameters")})
        yield _Way({"shard": "optimizer", "host": "optimizer"})
    else:
        yield _Way({})
        yield _Way({"host": "optimizer"})
    yield from (_Way({"host": "params"}, *each) for each in _VISITS)


@dataclass(frozen=True, eq=False)
class _Planner:
    """What is planned, and the best pipeline of each layout."""

    given: tuple[LossFn, optax.GradientTransformation, Tree, Batch, Key | None]
    options: Arguments
    num_examples: int
    room: int | None
    schedules: Sequence[str]
    num_microbatches: Sequence[int]
    sizes: tuple[int, int] = 0, 0  # bytes of the parameters, and of the optimizer's state; 0 of what cannot be made
    shardings: Mapping[int, Mapping[str, PartitionSpec]] = dataclasses.field(default_factory=dict)  # that are proposed
    machines: dict[str, Devices] = field(default_factory=dict)  # of one mesh, which GPUs of all kinds and all ways share
    traces: Traces = field(default_factory=Traces)
    layouts: Sequence[GPUMesh] = ()
    asked: set[str] = field(default_factory=set)  # what traces have asked of their GPU so far

    def sized(self, layouts: Sequence[GPUMesh]) -> "_Planner":
        """The same with its sizes, shapes for what makes them, and how GPUs share stages.

        Of what cannot be made the pipeline itself says why.
        """
        loss_fn, optimizer, made, batch, key = self.given
        bank = self.options.get("bank")
        own, joint = (None, loss_fn) if bank is None else (bank.shapes(bank.tasks[0])[0], join_losses(loss_fn))
        try:
            with cudnn_of(layouts[0].devices):
                shapes = jax.eval_shape(made, jax.random.key(0) if key is None else key) if callable(made) else made
            params = shapes[0] if self.options.get("has_state") else shapes
            state = jax.eval_shape(optimizer.init, params)
        except (TypeError, ValueError):
            return self
        first, second = (sum(map(count_bytes, jax.tree.leaves(tree))) for tree in (params, state))
        said = {name: self.options[name] for name in _OF_LOSS if name in self.options}
        proposals, wide = dict[int, Mapping[str, PartitionSpec]](), {layout.model: layout for layout in layouts if layout.model > 1}
        for width, layout in wide.items():
            options = Options.of(joint, num_stages=layout.pipe, num_microbatches=1, mesh=layout.where["mesh"])
            if "shardings" not in self.options and not any(
                axis_names(entry) for spec in specs_of(None, params, options.axes) for entry in spec
            ):
                asked = {**said, "model": width, "devices": layout.devices[:1], "task_params": own}
                proposals[width] = propose_shardings(loss_fn, shapes, batch, key, **asked)
        given = loss_fn, optimizer, shapes, batch, key
        return dataclasses.replace(self, given=given, sizes=(first, second), shardings=proposals)

    @cached_property
    def refused(self) -> Mapping[tuple[int, int], JaxppError]:
        """What refuses the loss on some GPUs and not on others, as attention by cuDNN does, by their compute capability.

        All share their traces, so the loss is traced once for each capability, on one device and at the whole batch. What cannot be
        traced so for any of them is left to the pipelines.
        """
        first = {layout.gpu.chip.capability: layout for layout in self.layouts}
        loss_fn, _, made, batch, key = self.given
        bank, has_state = self.options.get("bank"), bool(self.options.get("has_state"))
        loss_fn = loss_fn if bank is None else join_losses(positional_key(loss_fn, 3 + has_state))
        said, found = {name: self.options[name] for name in _OF_LOSS if name in self.options}, dict[tuple[int, int], JaxppError]()
        for capability, layout in first.items():
            asked = Options.of(loss_fn, num_stages=1, num_microbatches=1, devices=layout.devices[:1], **said)
            tracing, several = Tracing(asked), has_state or asked.has_aux
            try:
                with cudnn_of(layout.devices):
                    given = with_set(bank, variables_of(asked, made))
                    named = tracing.key_for(given, batch, key)
                    differentiated = jax.value_and_grad(asked.loss_fn, has_aux=several, allow_int=True)
                    asked.axes.shapes(differentiated, *given, batch, *([] if named is None else [named]))
            except JaxppError as error:
                found[capability] = error
            except Exception as error:  # noqa: BLE001  (whatever the loss or JAX says of this GPU)
                rule, got = "a loss is traced for the GPU that is to run it", f"{type(error).__name__}: {error}"
                found[capability] = ArgumentError(f"gpus={layout.gpu.name!r}", rule, got, "leave it out of gpus")
        return {} if len(found) == len(first) else found

    def best(self, layout: GPUMesh) -> PlanRow:
        """The quickest that fits, with as little of the state divided or on the host as that takes; else what needs least."""
        if self.asked and (error := self.refused.get(layout.gpu.chip.capability)) is not None:
            raise error
        room = self.room or reported_room(layout.devices) or layout.gpu.memory
        found, last = list[PlanRow](), None
        if self.options.get("host") == "params":
            ways = [_Way({}, *each) for each in _VISITS]
        else:
            ways = [_Way({})] if {"shard", "host"} & set(self.options) else list(_ways(layout.data))
        for way in ways:
            if way is not ways[-1] and self._least(layout, {**self.options, **way.saves}) > room:
                continue  # nothing need be traced to know
            try:
                row = self._searched(layout, way, room)
            except JaxppError as error:
                if is_of_loss(error):
                    raise
                last = error
                continue
            found.append(row)
            if row.fits:
                break
        if not found and last is not None:
            raise last
        return min(found, key=lambda row: (not row.fits, row.seconds.seconds if row.fits else max(row.peaks)))

    def _least(self, layout: GPUMesh, saves: Arguments) -> float:
        """Bytes that some device holds in any case, of parameters, gradients and the optimizer's state."""
        params, state = self.sizes
        divided, ranks = saves.get("shard", ()), layout.pipe * layout.model
        waits = saves.get("host")
        if waits == "params":
            return 0.0
        if "trains" in self.options:  # others have neither gradients nor a state of the optimizer
            return params / ranks
        gradients = params / (layout.data if "gradients" in divided else 1)
        beside = 0.0 if waits else state / (layout.data if divided else 1)
        return (params + gradients + beside) / ranks

    def _options_of(self, layout: GPUMesh, saves: Arguments) -> Arguments:
        """The options of all pipelines of a layout."""
        proposed = self.shardings.get(layout.model)
        return {**self.options, **saves, **({} if proposed is None else {"shardings": proposed})}

    def _searched(self, layout: GPUMesh, way: _Way, room: int) -> PlanRow:
        given, mesh = self._options_of(layout, way.saves), layout.where.get("mesh")
        visits = given.get("host") == "params"
        machine = self._shared(layout, given)
        space = Space(
            num_examples=self.num_examples // (layout.data if mesh is not None else 1),
            num_ranks=(layout.pipe,) if layout.data == 1 or mesh is not None else (),
            splits=((layout.pipe, layout.data),) if layout.data > 1 and mesh is None else (),
            schedules=tuple(self.schedules) or (_VISITED if visits else _SCHEDULES),
            stages_per_rank=way.stages_per_rank if layout.pipe > 1 or visits else (1,),
            num_microbatches=self._counts_of(layout, way.microbatches if layout.pipe > 1 or visits else _ALONE),
            remat=("offload",) if visits else ("least",),
            in_order=bool(given.get("has_state")),
        )
        families = 1 if visits else _FAMILIES
        limits = Limits(
            room, num_measured=0, families=families, processes={layout.data if mesh is None else 1: tuple(range(layout.pipe))}
        )
        return self._row(layout, way.saves, room, search(machine, space, limits, saves=not visits, least=True), machine)

    def _machine(self, layout: GPUMesh, options: Arguments) -> Devices:
        """What estimates a layout; it compiles nothing unless it is asked for that."""
        mesh = layout.where.get("mesh")
        return Devices(*self.given, devices=layout.devices, mesh=mesh, options=options, compiles=False, traces=self.traces)

    def _shared(self, layout: GPUMesh, options: Arguments) -> Devices:
        """What estimates a layout; all GPUs and ways to save memory share its traces, unless cuts go by time or bytes."""
        if options.get("balance", "flops") != "flops":
            return self._machine(layout, options)
        mesh = f"{layout.num_gpus}, {layout.mesh}, {layout.per_host}"
        if mesh not in self.machines:
            self.machines.clear()
            self.machines[mesh] = self._machine(layout, options)
        saves = {name: options.get(name) for name in ("shard", "host")}
        return self.machines[mesh].elsewhere(layout.devices, layout.where.get("mesh"), **saves)

    def _counts_of(self, layout: GPUMesh, in_ranks: Sequence[int]) -> tuple[int, ...]:
        """Numbers of microbatches that divide the examples of a replica."""
        if self.num_microbatches:
            return tuple(self.num_microbatches)
        examples = max(1, self.num_examples // layout.data)  # with fewer examples than replicas the search says so
        divisors = [n for n in range(1, examples + 1) if examples % n == 0]
        wanted = [times * layout.pipe for times in in_ranks]
        return tuple(sorted({min(divisors, key=lambda n, near=near: abs(math.log2(n / near))) for near in wanted}))

    def _row(self, layout: GPUMesh, saves: Arguments, room: int, found: SearchResult, machine: Devices) -> PlanRow:
        best, candidate = found.best, found.best.candidate
        costs, seconds = found.costs[candidate.family], found.best.predicted
        made = parts(candidate.schedule, costs, candidate.offload)
        flops, peak = machine.arithmetic(candidate.family)
        return PlanRow(
            layout,
            candidate,
            saves,
            room,
            best.peaks or (),
            Prediction(seconds, SPREAD[0] * seconds, SPREAD[1] * seconds),
            made,
            Simulation(candidate.schedule, costs, candidate.offload).bubble_fraction,
            layout.data * candidate.schedule.num_microbatches * flops / (peak * layout.num_gpus * seconds),
            shardings=self.shardings.get(layout.model),
        )

    def compiled_rows(self, rows: Sequence[PlanRow], left_out: dict[str, JaxppError]) -> Iterator[PlanRow]:
        """The rows as they are compiled, without those that cannot be."""
        with progress(rows, after=_PATIENCE, desc="compiling") as bar:
            for row in bar:
                bar.set_description(f"compiling for {row.layout.words}")
                try:
                    yield self.compiled(row)
                except JaxppError as error:
                    left_out[row.layout.words] = error

    def compiled(self, row: PlanRow) -> PlanRow:
        """The same row with the bound, the prediction and the bytes of its compiled programs."""
        machine = self._machine(row.layout, self._options_of(row.layout, row.saves))
        forecast = machine.compiled(row.candidate, row.room)
        bound = cast("StepBound", forecast.bound)  # as the numbers of these GPUs are known
        return dataclasses.replace(
            row,
            peaks=tuple(forecast.peaks.values()),
            seconds=bound.predicted,
            parts=bound.likely_parts,
            bubble=bound.bubble_fraction,
            mfu=bound.peak_fraction * bound.seconds / bound.predicted.seconds,
            bound=bound,
        )


def _meshes(count: int, widths: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    for width in (width for width in widths if count % width == 0):
        ranks = count // width
        yield from ((pipe, ranks // pipe, width) for pipe in range(ranks, 0, -1) if ranks % pipe == 0)


def _kinds(gpus: object, counts: Sequence[int], price: Mapping[str, float]) -> Iterator[tuple[GPU, int, float | None]]:
    """The kinds of GPUs with each of their counts, and the price of an hour, which may be told by any name of the kind."""
    if is_count(gpus, least=1):
        fix = f'pass gpus="{gpus}xh100", or gpus="h100" and counts={gpus}'
        raise ArgumentError("jaxpp.plan(..., gpus=...)", "gpus are kinds of GPUs, and counts how many of them", shown(gpus), fix)
    given = [_kind(each) for each in as_tuple(gpus)]
    if not given:
        raise ArgumentError("jaxpp.plan(..., gpus=...)", "there is at least one kind of GPU", shown(gpus), 'pass gpus="h100"')
    names, prices = {gpu.name for gpu, _ in given}, dict[str, float]()
    told = price.items() if isinstance(price, Mapping) else [("", price)]
    for name, dollars in told:
        try:
            prices[_kind(name)[0].name] = dollars
        except ArgumentError:  # a price of no GPU at all
            prices[str(name)] = dollars
    if set(prices) - names or not all(map(_is_positive, prices.values())):
        rule = "price has dollars for an hour of a GPU, by its name in gpus"
        raise ArgumentError("jaxpp.plan(..., price=...)", rule, shown(price), f"pass price={{{given[0][0].name!r}: 2.5}}")
    for gpu, own in given:
        yield from ((gpu, number, prices.get(gpu.name)) for number in ([own] if own else counts))


def _kind(given: object) -> tuple[GPU, int | None]:
    """A kind of GPU, and the count in front of its name."""
    if isinstance(given, GPU):
        return given, None
    count = re.match(r"^\s*0*([1-9]\d*)\s*x\s*", given) if isinstance(given, str) else None
    name = given[count.end() :] if count else given  # pyright: ignore[reportIndexIssue]
    return gpu_named(name), int(count[1]) if count else None  # pyright: ignore[reportArgumentType]


def _is_positive(value: Tree) -> bool:
    return is_real(value) and 0 < float(value) < math.inf


def _is_plain(value: object) -> bool:
    """Whether code may have a value as it prints: words, numbers, or several of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int, float))


def _argument(name: str, value: object) -> str:
    """An argument behind others; what code may not have as it prints stands under its own name."""
    return f", {name}={repr(value) if _is_plain(value) else name}"


def _range(seconds: Prediction) -> str:
    return f"{time_in_words(seconds.seconds)} ({time_in_words(seconds.low)} to {time_in_words(seconds.high)})"


def _words(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)
