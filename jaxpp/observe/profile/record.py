"""Running steps, or forwards, under JAX's profiler, and making a ``Profile`` of what the trace says.

First some steps run as they are. The trace says when each program ran, and the host's stamps when each instruction was handed over.
Then some steps run in which the host waits for each instruction before it hands over the next. There every program runs alone, and
takes the time that it would take on a device of its own.

Where the trace of a backend lacks something, the results are polled instead (``watch``), which cannot see when a program began.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxpp.errors import ArgumentError
from jaxpp.observe.profile.merge import Company, Seen, SeenStep
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import Steps, Watch, Work
from jaxpp.observe.profile.spans import (
    Span,
    Stamp,
    beginning,
    durations_of,
    isolated_spans,
    traced_spans,
    watched_spans,
)
from jaxpp.observe.profile.trace import STEP, Run, TraceError, matched, read_runs
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.runtime.processes.channel import align_clocks
from jaxpp.runtime.processes.here import processes_of
from jaxpp.schedule.validate import is_count
from jaxpp.types import Leaf

__all__ = ["Stamps", "check_profile", "record"]

_WARM_UP = 3  # steps that do not count: the first find the caches of other programs
_ALONE = 3  # steps in which each program runs alone


class Stamps:
    """Observes when the host hands each instruction of a step over; waits for each result if instructions are to run alone."""

    def __init__(self, *, waits: bool):
        self.waits = waits
        self.stamps: list[Stamp] = []
        self._went_on = 0.0

    def begin(self) -> None:
        """The step begins."""
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        """Called by the executor after each instruction."""
        handed = time.perf_counter()
        if self.waits:
            jax.block_until_ready([slots[slot] for slot in instruction.outputs])
        done = time.perf_counter()
        self.stamps.append(Stamp(self._went_on, handed, done))
        self._went_on = time.perf_counter()


def _run(work: Work, observer: Stamps | Watch | None = None, *, watched: bool = False) -> tuple[SeenStep, Run]:
    """Run the work to its end; returns the run, with the observer's stamps, and between when and when its annotation begins."""
    begun = time.perf_counter()
    with jax.profiler.TraceAnnotation(STEP):
        entered = time.perf_counter()
        if isinstance(observer, Stamps):
            observer.begin()
        results = work.run(observer, watched=watched)
        if isinstance(observer, Watch):
            observer.stamps()  # it looks while the results arrive, not when all are there
        jax.block_until_ready(results)
    stamps = observer.stamps if isinstance(observer, Stamps) else () if observer is None else observer.stamps()
    return SeenStep(begun, time.perf_counter(), tuple(stamps)), Run(begun, entered)


def check_profile(clock: str | None, where: str = "pipe.profile", **counts: int) -> None:
    """Refuse what cannot be profiled.

    Raises:
        ArgumentError: a count below 1, or an unknown clock.
    """
    for name, count in counts.items():
        if not is_count(count, least=1):
            raise ArgumentError(where, f"{name} is a whole number of at least 1", f"{name}={count!r}", "pass 3")
    if clock not in (None, "trace", "isolated"):
        rule = 'the times are those of the trace ("trace"), or of each program alone ("isolated")'
        raise ArgumentError(where, rule, f"clock={clock!r}", 'pass clock="trace", or leave it out')


def record(work: Work, num_steps: int, clock: Clock | None) -> Profile:
    """Run the work under the profiler, then look at memory; the profile is of the traced run of median length.

    The numbers are those of the isolated clock where devices share what they compute with, unless a clock is given. Several
    processes tell each other what they saw of a training step, and all return the same profile.

    Raises:
        ArgumentError: somebody else is taking a trace.
    """
    engine, plan, schedule = work.engine, work.plan, work.schedule
    for _ in range(_WARM_UP):
        _run(work)
    processes = processes_of(engine.options.devices)
    company = _company(work) if len(processes) > 1 else None
    seen = _seen(plan, work, num_steps)
    if company is not None:
        plan, seen = company.plan, company.seen(seen)
    plain, together, apart = (seen.steps[k : k + num_steps] for k in (0, num_steps, 2 * num_steps))
    alone = durations_of(plan, [step.seconds for step in apart])
    if seen.missing:
        together, found = _watched(work, num_steps, company, plan, seen.missing)
    else:
        found = [traced_spans(plan, _from_zero(step), step.stamps, alone, schedule) for step in together]
    lengths = [step.ended - step.begun for step in together]
    cost = statistics.median(lengths) / statistics.median(step.ended - step.begun for step in plain)
    ledger = work.ledger()
    ledger = ledger if company is None else company.ledger(ledger)
    median = sorted(range(num_steps), key=lengths.__getitem__)[num_steps // 2]
    spans = found[median], isolated_spans(plan, alone, schedule)
    places, shown = engine.placement.by_rank, engine.placement.ranks_shown
    shared = len(set(places)) < len(places) or places[0].devices[0].platform == "cpu"
    clock = clock or ("isolated" if shared else "trace")
    error = 0.0 if company is None else seen.error
    made = {"missing": seen.missing, "num_processes": len(processes), "clock_error": error, "passes": tuple(work.passes)}
    return Profile(schedule, shown, *spans, clock, tuple(lengths), cost, ledger, offloaded=engine.options.offloaded, **made)


def _company(work: Work) -> Company:
    """The processes that run a training step together."""
    if not isinstance(work, Steps):
        rule, fix = "forwards are profiled in one process", "make a pipeline over the devices of one process"
        raise ArgumentError("profile", rule, "devices of several processes", fix)
    return Company(work.engine, work.batch, work.key, align_clocks())


def _seen(plan: Plan, work: Work, num_steps: int) -> Seen:
    """Run the work as it is, as often under the profiler, and a few times so that each program runs alone."""
    plain = [_run(work)[0] for _ in range(num_steps)]
    observers = [Stamps(waits=k >= num_steps) for k in range(num_steps + _ALONE)]
    with tempfile.TemporaryDirectory() as folder:
        with _session(folder):
            found = [_run(work, stamps) for stamps in observers]
        try:
            read = read_runs(Path(folder))
            runs, missing = matched(plan, read, len(found)), ""
        except (TraceError, FileNotFoundError) as error:
            return Seen((*plain, *(step.timed() for step, _ in found)), str(error), 0.0)
    offset, error = min((_offset(window, begun) for (_, window), begun in zip(found, read.steps, strict=True)), key=lambda o: o[1])
    traced = [
        step._replace(runs=tuple(run and Run(*(time + begun + offset for time in run)) for run in each)).timed()
        for (step, _), begun, each in zip(found, read.steps, runs, strict=True)
    ]
    return Seen((*plain, *traced), missing, error)


def _offset(window: Run, begun: float) -> tuple[float, float]:
    """Seconds from the clock of the trace to that of the host, and their error: the host knows between when and when it began."""
    return (window.start + window.end) / 2 - begun, (window.end - window.start) / 2


def _from_zero(step: SeenStep) -> list[Run | None]:
    """The runs of a step, counted from its beginning."""
    zero = beginning(step.stamps)
    return [run and Run(run.start - zero, run.end - zero) for run in step.runs]


@contextlib.contextmanager
def _session(folder: str) -> Iterator[None]:
    """A trace of what programs run, without Python's own calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise ArgumentError(
            "pipe.profile",
            "it takes a trace with JAX's profiler, which takes one at a time",
            str(error),
            "end the other trace first: jax.profiler.stop_trace()",
        ) from None
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _watched(
    work: Work, num_steps: int, company: Company | None, plan: Plan, missing: str
) -> tuple[list[SeenStep], list[tuple[Span, ...]]]:
    """Runs whose results are polled, and their spans."""
    watched = work.watched_plan()
    if watched is None:
        rule, fix = "the profile of a generation is read from the trace of JAX's profiler", "profile pipe.apply in its place"
        raise ArgumentError("generation.profile", rule, f"a trace that lacks what is needed: {missing}", fix)
    found = [_run(work, Watch(watched), watched=True)[0] for _ in range(_WARM_UP + num_steps)][_WARM_UP:]
    seen = Seen(tuple(found), "", 0.0)
    seen = seen if company is None else company.seen(seen)
    found = [step._replace(begun=beginning(step.stamps), ended=max(stamp.done for stamp in step.stamps)) for step in seen.steps]
    return found, [watched_spans(plan, step.stamps, work.schedule) for step in found]
