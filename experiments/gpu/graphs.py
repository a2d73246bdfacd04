"""CUDA graphs: whether a call of a program is one launch, or updates its graph kernel by kernel because buffers have moved.

A *variant* is XLA as it comes, or with one of its flags. Each variant runs the same step in processes of its own, since flags are
read when JAX starts. One process measures. On a GPU a second one runs a few steps while XLA logs its graphs, which takes time that
no measurement should have. A step is run in two *ways*: with one program for all microbatches, and with a copy of the program for
each call (``copies``). This process uses no device: it compares what the others have found.
"""

import dataclasses
import gzip
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxpp
from experiments.gpu.copies import Addresses, count_programs, with_copies, with_eyes
from experiments.gpu.graph_log import LOGGED, GraphCounts, counts_of, graphs_made, step_line
from experiments.gpu.host import Stopwatch
from experiments.gpu.parts import run_beside
from experiments.gpu.pipelines import Ready, ready
from experiments.gpu.rows import Job, Row
from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep
from jaxpp.lowering.plan import Plan
from jaxpp.runtime.execute import Observer, execute
from jaxpp.runtime.hlo import read_kernels
from jaxpp.stages.loss.microbatch import raw_key

__all__ = ["VARIANTS", "Variant", "is_known", "rows"]


class Variant(NamedTuple):
    """One of XLA's flags, or none.

    Attributes:
        flags: ``name=value``; of several, which versions of XLA spell differently, the first that the installed jaxlib knows.
        copies: whether the step is also run with a copy of the program for each call.
    """

    flags: tuple[str, ...] = ()
    copies: bool = True


_NONE = "xla_gpu_enable_command_buffer="
"""Without graphs, of which nothing is logged then."""

VARIANTS: Mapping[str, Variant] = {
    "as it comes": Variant(),
    "no graphs": Variant((_NONE,), copies=False),
    "fixed addresses": Variant(
        ("xla_gpu_command_buffer_update_mode=SKIP_PROFILED", "xla_gpu_command_buffer_update_mode=NEVER_UPDATE"), copies=False
    ),
    "fixed temporaries": Variant(
        ("xla_gpu_command_buffer_update_mode=SKIP_TEMP", "xla_gpu_command_buffer_update_mode=VMM_PERSISTENT_TEMP")
    ),
    "graphs of any size": Variant(("xla_gpu_graph_min_graph_size=1",)),
    "64 traces kept": Variant(("xla_cmd_buffer_trace_cache_size=64",)),
    "64 graphs a program": Variant(("xla_gpu_command_buffer_cache_size=64",), copies=False),
}
"""What is tried, the most important first: if there is not time for all, the last are left out."""

ONE, COPIES = "one program", "a copy for each call"
_STEPS = 10  # in which addresses are looked at, or graphs logged
_WARM = 3  # steps of each way that are not counted: graphs are recorded in them
_LEAST = 20.0  # seconds that must be left for a process to begin
_SHARE = 0.4  # of all seconds, that a process may take
_BASE = next(iter(VARIANTS))
_TARGET = "h100"  # that kernels are counted for where there is no GPU


def rows(job: Job) -> Iterator[Row]:
    """The case is a model; behind a comma, what one of the processes is for."""
    model, *of = job.case.split(", ")
    if not of:
        yield from _compare(job)
    elif of == ["flags"]:
        yield job.row("flags", "", known=[flag for each in VARIANTS.values() for flag in each.flags if is_known(flag)])
    elif of == ["kernels"]:
        yield _counted(job, model)
    elif of[1:] == ["logged"]:
        yield _logged(job, model, VARIANTS[of[0]])
    else:
        yield from _measure(job, model, VARIANTS[of[0]])


def is_known(flag: str) -> bool:
    """Whether the installed jaxlib knows a flag, ``name=value``, with this value; JAX aborts the process if it does not.

    Every flag is an option of compiling too, and an unknown option raises an error instead.
    """
    name, _, value = flag.partition("=")
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class _Steps:
    """A step of a pipeline by a plan, and a state of its own that it trains."""

    def __init__(self, it: Ready, engine: Engine, plan: Plan, lowered: LoweredStep, state: jaxpp.State):
        self.plan, self._lowered = plan, lowered
        self._given = [*jax.tree.leaves(it.batch), raw_key(it.key)]
        self.leaves = engine.copy(engine.leaves(state.held))

    def run(self, observer: Observer | None = None, plan: Plan | None = None, *, wait: bool = True) -> None:
        """Run a step, by another plan if one is given."""
        arguments = [*self.leaves.flat(), *self._given]
        self.leaves = self._lowered.outcome(execute(plan or self.plan, arguments, observer)).state
        del arguments
        if wait:
            jax.block_until_ready(self.leaves)


class _Made(NamedTuple):
    """The ways to run a step of a model, and what its plan comes to."""

    ways: dict[str, _Steps]
    plan: Plan
    copies: int  # how many programs were loaded once more
    seconds: float  # that loading took


def _make(job: Job, model: str, variant: Variant) -> _Made:
    it = ready(model, job.sizes.models, "bfloat16")
    pipe = it.pipe("1f1b", threads="one")
    state, engine = it.init(pipe), pipe.engine
    plan, lowered = engine.plan("update", it.batch, it.key)
    ways, copies, begun = {ONE: _Steps(it, engine, plan, lowered, state)}, 0, time.perf_counter()
    if variant.copies:
        copied, copies = with_copies(plan)
        ways[COPIES] = _Steps(it, engine, copied, lowered, state)
    return _Made(ways, plan, copies, time.perf_counter() - begun)


def _measure(job: Job, model: str, variant: Variant) -> Iterator[Row]:
    """What calls take of the host, what steps take, and where their arrays are, of each way in turns."""
    made = _make(job, model, variant)
    watch = Stopwatch(waits=True)
    calls: dict[str, list[float]] = {way: [] for way in made.ways}
    taken: dict[str, list[float]] = {way: [] for way in made.ways}
    for _ in range(job.sizes.rounds):
        for way, steps in made.ways.items():
            for _ in range(_WARM):
                steps.run()
            begun = time.perf_counter()
            for _ in range(job.sizes.steps):
                steps.run(wait=False)
            jax.block_until_ready(steps.leaves)
            taken[way].append((time.perf_counter() - begun) / job.sizes.steps)
            for _ in range(job.sizes.steps):
                watch.found.clear()
                watch.begin()
                steps.run(watch)
                calls[way].append(sum(sum(each) for name, each in watch.found.items() if name != "sends"))
    programs = _programs(made.plan)
    common: dict[str, Any] = {"platform": jax.devices()[0].platform, "programs": programs}
    common["calls"], common["kernels"] = sum(runs for runs, _ in programs.values()), _kernels(programs)
    for way, steps in made.ways.items():
        seen = Addresses()
        watched = with_eyes(steps.plan, seen)
        for number in range(_WARM + _STEPS):
            steps.run(plan=watched if number >= _WARM else None)
        moves = {name: seen.moves(copies=copies) for name, copies in ((ONE, False), (COPIES, True))}
        numbers = {"host": calls[way], "steps": taken[way], "values": seen.spread(), "moves": moves}
        yield job.row(way, "", **common, **numbers)
    if variant.copies:
        one, copies = ([np.asarray(leaf).tobytes() for leaf in steps.leaves.params] for steps in made.ways.values())
        yield job.row("copies", "", loaded=made.copies, seconds=made.seconds, same=one == copies)


def _programs(plan: Plan) -> dict[str, tuple[int, int]]:
    """How often a step calls each program, and the kernels of each, by what the programs are called in a trace."""
    runs, found = count_programs(plan), dict[str, tuple[int, int]]()
    for line in plan.instructions:
        if id(line.call) in runs and line.about.program not in found:
            compiled: Any = line.call
            kernels = sum(kernel.runs for kernel in read_kernels(compiled.as_text() or ""))
            found[line.about.program] = runs[id(line.call)], kernels
    return found


def _logged(job: Job, model: str, variant: Variant) -> Row:
    """Steps with a line before each; the log is this process's stderr."""
    made = _make(job, model, variant)
    for way, steps in made.ways.items():
        for number in range(_WARM + _STEPS):
            print(step_line(way, number), file=sys.stderr, flush=True)
            steps.run()
    return job.row("logged", "", ways=list(made.ways))


def _counted(job: Job, model: str) -> Row:
    """The kernels of a step on GPUs that are not there."""
    it = ready(model, job.sizes.models, "bfloat16")
    pipe = it.pipe("1f1b", devices=jaxpp.target(_TARGET, job.sizes.models.stages))
    shapes = jax.eval_shape(it.problem.init, it.key)
    table = pipe.programs(shapes, it.batch, it.key)
    return job.row("kernels", "", programs={row.name: (row.runs, row.num_kernels) for row in table})


def _kernels(programs: Mapping[str, Sequence[int]]) -> int:
    """Of a step."""
    return sum(runs * kernels for runs, kernels in programs.values())


class _Others:
    """The other processes of a case, and the time that is left for them."""

    def __init__(self, job: Job, folder: Path):
        self._job, self._folder, self._began = job, folder, time.perf_counter()
        self.trouble = ""

    @property
    def left(self) -> float:
        """Seconds until this process must have ended."""
        return 0.95 * self._job.seconds - (time.perf_counter() - self._began)

    def run(self, of: str, variables: Mapping[str, str] | None = None) -> list[Row]:
        """Run one, unless there is no time; ``trouble`` is what went wrong.

        What raises is run once more without JAX's cache of compiled programs, as what came from there may not be loaded twice (on a
        CPU it lacks its functions then, with JAX 0.10.2).
        """
        found = self._run(of, variables or {})
        if self.trouble.startswith("ended with code"):
            found = self._run(of, {**(variables or {}), "JAX_ENABLE_COMPILATION_CACHE": "false"})
        return found

    def _run(self, of: str, variables: Mapping[str, str]) -> list[Row]:
        left = self.left
        if left < _LEAST:
            self.trouble = f"{left:.0f} seconds were left"
            return []
        seconds = min(left, _SHARE * self._job.seconds)
        found, self.trouble = run_beside(self._job, f"{self._job.case}, {of}", seconds, self.log(of), variables)
        return found

    def log(self, of: str) -> Path:
        """What it printed."""
        return self._folder / f"{of.replace(', ', '-').replace(' ', '-')}.log"


def _compare(job: Job) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        others = _Others(job, Path(folder))
        known = {flag for row in others.run("flags", {"JAX_PLATFORMS": "cpu"}) for flag in row.numbers["known"]}
        if others.trouble:
            yield job.row("flags", "failed", note=others.trouble)
        base: Row | None = None
        for name, variant in VARIANTS.items():
            flag = next((flag for flag in variant.flags if flag in known), None)
            if variant.flags and flag is None:
                yield job.row(name, "left out", note=f"the installed jaxlib does not know {' or '.join(variant.flags)}")
            elif base is not None and not _has_graphs(base):
                yield job.row(name, "left out", note=f"a {base.numbers['platform']} has no CUDA graphs; on a GPU: --{flag}")
            else:
                found = _run_variant(job, others, name, flag)
                yield from _variant_rows(job, name, found, base or next(iter(found.ways), None))
                base = base or next(iter(found.ways), None)
        if base is not None and not _has_graphs(base):
            yield _without_gpu(job, others)


class _Found(NamedTuple):
    """What the processes of a variant have found.

    Attributes:
        ways: a row for each way, in which calls and steps were measured.
        copies: the row about the copies, if there were any.
        made: the row about the graphs that XLA has made of the programs, where it makes any.
        logged: what XLA logged of steps, by way.
        trouble: what went wrong.
    """

    ways: Sequence[Row]
    copies: Row | None
    made: Row | None
    logged: Mapping[str, GraphCounts]
    trouble: str


def _run_variant(job: Job, others: _Others, name: str, flag: str | None) -> _Found:
    given = os.environ.get("XLA_FLAGS", "")
    variables = {"XLA_FLAGS": f"{given} --{flag}".strip()} if flag else {}
    measured = others.run(name, variables)
    troubles, logged, made = [others.trouble], dict[str, GraphCounts](), None
    if measured and _has_graphs(measured[0]) and flag != _NONE:
        others.run(f"{name}, logged", {**variables, **LOGGED})
        troubles.append(others.trouble)
        logged = _read_log(job, others.log(f"{name}, logged"))
        made = _made_row(job, f"{name}: graphs made", measured[0].numbers["programs"], others.log(f"{name}, logged"))
    ways = [row for row in measured if row.what != "copies"]
    copies = next((row for row in measured if row.what == "copies"), None)
    return _Found(ways, copies, made, logged, "; ".join(filter(None, troubles)))


def _read_log(job: Job, log: Path) -> dict[str, GraphCounts]:
    """What a process wrote about graphs; the whole text stays in the output folder, for whoever mends what is not understood."""
    if not log.exists():
        return {}
    with log.open("rb") as source, gzip.open(job.out / f"graphs-{log.stem}.log.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    with log.open(errors="replace") as lines:
        return counts_of(lines, _WARM)


def _has_graphs(row: Row) -> bool:
    return row.numbers.get("platform") == "gpu"


def _variant_rows(job: Job, name: str, found: _Found, base: Row | None) -> Iterator[Row]:
    for row in found.ways:
        yield from _way(job, f"{name}, {row.what}", row, base or row, found.logged.get(row.what))
    if found.made is not None:
        yield found.made
    if found.copies is not None:
        it = found.copies.numbers
        note = f"{it['loaded']} programs loaded once more, in {it['seconds']:.1f} s"
        yield job.row(f"{name}, bits of the copies", "the same" if it["same"] else "differ", "the same", note, **it)
    if found.trouble:
        yield job.row(name, "left out" if found.trouble.endswith("seconds were left") else "failed", note=found.trouble)


def _way(job: Job, what: str, row: Row, base: Row, logged: GraphCounts | None) -> Iterator[Row]:
    """What one way to run a step takes of the host, what XLA logged of it, and where its arrays were."""
    it = row.numbers
    host, step = (statistics.median(it[each]) for each in ("host", "steps"))
    kernels, calls, ratio = it["kernels"], it["calls"], host / statistics.median(base.numbers["host"])
    note = f"{ratio:.3f} of {_BASE}, {base.what}; {1e3 * host:.2f} ms for {calls} calls of {kernels:,} kernels a step; "
    note += f"steps in a row {1e3 * step:.2f} ms each" + f"; a {it['platform']} has no CUDA graphs" * (not _has_graphs(row))
    yield job.row(what, f"{1e6 * host / max(1, kernels):.2f} us a kernel", note=note, **it, ratio=ratio)
    if logged is not None:
        said = f"{logged.a_step('launched'):.0f} launched, {logged.a_step('updated'):.0f} updated a step"
        yield job.row(f"{what}: graphs", said, note=logged.said(), logged=dataclasses.asdict(logged))
    values, still, middle, most = it["values"]
    note = f"the others at {middle} (median of all) to {most} addresses; "
    note += f"{it['moves'][row.what]:.0%} of the calls find an array elsewhere than the call before of the same program"
    note += f"; a copy for each call would make that {it['moves'][COPIES]:.0%}" * (row.what == ONE)
    yield job.row(f"{what}: addresses", f"{still} of {values} values at one in {_STEPS} steps", note=note)


def _without_gpu(job: Job, others: _Others) -> Row:
    """How many graphs a step would launch on GPUs, and of how many kernels they would be: both are known from compiling."""
    what = f"graphs of a step, compiled for {_TARGET}"
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda12") is None:
        return job.row(what, "not counted", note='it needs JAX\'s CUDA plug-in: pip install -e ".[targets]"')
    found = others.run("kernels", {"JAX_PLATFORMS": "cpu", **LOGGED})
    if not found:
        return job.row(what, "failed", note=others.trouble)
    return _made_row(job, what, found[0].numbers["programs"], others.log("kernels"))


def _made_row(job: Job, what: str, programs: Mapping[str, Sequence[int]], log: Path) -> Row:
    """What a step would launch if no graph had to be updated: each graph at once, and each kernel that is in none."""
    with log.open(errors="replace") as lines:
        made = {name: graphs for name, graphs in graphs_made(lines).items() if name in programs}
    graphs = sum(programs[name][0] * len(sizes) for name, sizes in made.items())
    inside = sum(programs[name][0] * sum(sizes) for name, sizes in made.items())
    kernels, calls = _kernels(programs), sum(runs for runs, _ in programs.values())
    several = {name: len(sizes) for name, sizes in made.items() if len(sizes) > 1}
    note = f"of {inside:,} of {kernels:,} kernels a step, {max(0, kernels - inside):,} are in none; {calls} calls of programs"
    note += f"; programs of several graphs: {several}" * bool(several)
    return job.row(what, f"{graphs} graphs", note=note, programs=programs, made=made)
