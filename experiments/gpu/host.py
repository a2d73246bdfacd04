"""What the host does in a step: microseconds an instruction, programs and sends apart; and the gaps that this leaves on the device.

The case ``instructions`` runs an MLP so small that a step is nearly all dispatching. The case ``calls`` waits after each
instruction, of that MLP and of the GPT, and says what the host takes to hand each over. The case ``gaps`` traces some steps of the
GPT, handed over in a row, and looks for idle time between the programs in the middle of the trace, where the steady state is.
"""

import contextlib
import gzip
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxpp
from experiments.gpu.gaps import Gap, busy_lanes, described, gaps_between
from experiments.gpu.pipelines import Ready, ready
from experiments.gpu.rows import Job, Row, first_line
from experiments.plain import Runner
from jaxpp.lowering.plan import Instruction

__all__ = ["TRACE", "Stopwatch", "rows"]

TRACE = "trace.xplane.pb.gz"
_LONG = 20e-6  # seconds: no gap is to be longer
_SHOWN = 5


def rows(job: Job) -> Iterator[Row]:
    """Either case."""
    if job.case == "gaps":
        yield from _gaps(job)
        return
    if job.case == "calls":
        yield from _calls(job)
        return
    for schedule in ("1f1b", "zb-h1"):
        yield from _instructions(job, schedule)


class Stopwatch:
    """Observes how long the host takes with each instruction; if it waits, each finds devices that have nothing to do."""

    def __init__(self, *, waits: bool = False):
        self._waits = waits
        self.found: defaultdict[str, list[float]] = defaultdict(list)
        self._went_on = time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        """Called by the executor after each instruction."""
        about = instruction.about
        kind = getattr(about.action, "kind", None)
        name = "sends" if about.sends else str(kind) if kind else "other programs"
        self.found[name].append(time.perf_counter() - self._went_on)
        if self._waits:
            jax.block_until_ready([each for each in slots if isinstance(each, jax.Array) and not each.is_deleted()])
        self._went_on = time.perf_counter()


def _instructions(job: Job, schedule: str) -> Iterator[Row]:
    it = ready("mlp", job.sizes.tiny, "float32")
    pipe = it.pipe(schedule)
    state = it.init(pipe)
    plan, _ = pipe.engine.plan("update", it.batch, it.key)
    count, times = len(plan.instructions), 10 * job.sizes.steps
    watch, leaves = Stopwatch(), pipe.engine.copy(pipe.engine.leaves(state.held))
    for k in range(times + 3):
        watch.found.update({name: [] for name in watch.found} if k == 3 else {})  # the first steps find cold caches
        watch.begin()
        outcome = pipe.engine.run("update", leaves, it.batch, it.key, observer=watch)
        leaves = jax.block_until_ready(outcome).state
    runner = Runner(lambda state: pipe.step(state, it.batch, it.key), state)
    waited = runner.time(times, warm_up=3)
    in_a_row = runner.time(times, warm_up=3, wait=False)
    note = f"{count} instructions; a step that is waited for: {waited[0]:.0f} us, {waited[1]:.0f} of them until pipe.step returns"
    note += f"; steps in a row: {in_a_row[0]:.0f} us"
    numbers = {"waited": waited, "in_a_row": in_a_row, "instructions": count}
    yield job.row(f"{schedule}: host time an instruction", f"{waited[1] / count:.1f} us", "at most 20 us", note, **numbers)
    for name, taken in sorted(watch.found.items()):
        each, share = statistics.median(taken), sum(taken) / times
        note = f"{len(taken) // times} a step, {1e6 * share:.0f} us together"
        yield job.row(f"{schedule}: {name}", f"{1e6 * each:.1f} us", note=note, seconds=each)
    if "sends" not in watch.found:
        yield job.row(f"{schedule}: sends", "none", note="all stages are on one device")


def _calls(job: Job) -> Iterator[Row]:
    """What a call of each program takes of the host while its device has nothing to do, so that it waits for nothing."""
    for model, sizes, compute in (("mlp", job.sizes.tiny, "float32"), ("gpt", job.sizes.models, "bfloat16")):
        it = ready(model, sizes, compute)
        pipe = it.pipe("1f1b")
        state = it.init(pipe)
        watch, leaves = Stopwatch(waits=True), pipe.engine.copy(pipe.engine.leaves(state.held))
        for k in range(5):
            watch.found.update({name: [] for name in watch.found} if k == 2 else {})
            watch.begin()
            outcome = pipe.engine.run("update", leaves, it.batch, it.key, observer=watch)
            leaves = jax.block_until_ready(outcome).state
        del leaves
        total = sum(map(sum, watch.found.values())) / 3
        for name, taken in sorted(watch.found.items()):
            note = f"{len(taken) // 3} a step; with nothing in flight"
            yield job.row(f"{model}: {name}", f"{1e6 * statistics.median(taken):.1f} us", note=note, seconds=taken)
        runner = Runner(lambda state, pipe=pipe, it=it: pipe.step(state, it.batch, it.key), state)
        step = min(runner.time(3, warm_up=2, wait=False)[0] for _ in range(2))
        note = f"of all calls of a step; steps in a row: {step:.0f} us each"
        yield job.row(f"{model}: host time of a step", f"{1e6 * total:.0f} us", note=note, seconds=total, step=step)
        del runner, state, pipe


def _gaps(job: Job) -> Iterator[Row]:
    it = ready("gpt", job.sizes.models, "bfloat16")
    pipe = it.pipe("1f1b")
    runner = Runner(lambda state: pipe.step(state, it.batch, it.key), it.init(pipe))
    runner.time(2, wait=False)
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 1
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            runner.time(job.sizes.traced, wait=False)
        finally:
            jax.profiler.stop_trace()
        yield from _kept(job, folder)
        yield _read(job, it, pipe, folder)
        lanes = busy_lanes(folder)
    for lane, spans in sorted(lanes.items()):
        yield _lane(job, lane, gaps_between(spans, job.sizes.traced))
    if not lanes:
        yield job.row("gaps", "unknown", note="the trace has no events of a device; see what it has")


def _kept(job: Job, folder: Path) -> Iterator[Row]:
    """The raw trace goes to the output folder, with a description of its planes for whoever mends the reader."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    with newest.open("rb") as source, gzip.open(job.out / TRACE, "wb") as target:
        shutil.copyfileobj(source, target)
    planes = described(folder)
    (job.out / "trace_planes.txt").write_text("\n".join(planes) + "\n")
    size = (job.out / TRACE).stat().st_size / 2**20
    note = "its planes, lines and a few events are in trace_planes.txt"
    yield job.row("raw trace", f"{size:.1f} MiB", note=f"{TRACE}; {note}", planes=planes)


def _read(job: Job, it: Ready, pipe: jaxpp.Pipeline, folder: Path) -> Row:
    """Whether jaxpp's own reader finds the runs of its programs in the trace."""
    try:
        profile = jaxpp.observe.from_trace(folder, pipe, it.batch, it.key)
    except Exception as error:  # noqa: BLE001  (whatever this backend's trace lacks)
        note = "; ".join([first_line(error), *str(error).splitlines()[1:3]])
        return job.row("jaxpp.observe.from_trace", "does not read it", "reads it", note)
    with contextlib.suppress(ImportError):  # figures need matplotlib
        profile.figure().savefig(job.out / "step.png", dpi=110)
    (job.out / "profile.txt").write_text(f"{profile}\n")
    note = f"a step takes {1e3 * profile.seconds:.2f} ms; {profile.beside} programs ran beside others of their rank"
    return job.row("jaxpp.observe.from_trace", "reads it", "reads it", note)


def _lane(job: Job, lane: str, gaps: Sequence[Gap]) -> Row:
    apart = [gap for gap in gaps if gap.before != gap.after]  # inside a program they are XLA's
    longest = sorted(apart, key=lambda gap: gap.seconds, reverse=True)
    long, idle = [gap for gap in apart if gap.seconds > _LONG], sum(gap.seconds for gap in gaps)
    most, anywhere = (max((gap.seconds for gap in some), default=0.0) for some in (apart, gaps))
    between = "; ".join(f"{1e6 * gap.seconds:.0f} us between {gap.before} and {gap.after}" for gap in longest[:_SHOWN])
    middle = f"{1e6 * statistics.median(gap.seconds for gap in apart):.1f} us" if apart else "none"
    note = f"{len(long)} longer than 20 us of {len(apart)} between programs, the median {middle}; "
    note += f"all gaps: {1e3 * idle:.2f} ms, the longest {1e6 * anywhere:.1f} us. {between}"
    numbers = {
        "longest": most,
        "long": len(long),
        "between": len(apart),
        "idle": idle,
        "anywhere": anywhere,
        "longest_few": longest[:_SHOWN],
    }
    return job.row(f"{lane}: longest gap between programs", f"{1e6 * most:.1f} us", "at most 20 us", note, **numbers)
