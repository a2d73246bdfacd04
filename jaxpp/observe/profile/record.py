"""Running steps under JAX's profiler, and making a ``Profile`` of what the trace says.

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

from jaxpp.engine.engine import Engine
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.spans import Span, Stamp, durations_of, isolated_spans, traced_spans, watched_spans
from jaxpp.observe.profile.trace import STEP, Run, TraceError, matched, read_runs
from jaxpp.observe.profile.watch import Watch
from jaxpp.plan.leaves import Leaves
from jaxpp.plan.plan import Instruction
from jaxpp.schedule.validate import is_count
from jaxpp.types import Array, Batch, Key, Leaf

__all__ = ["record"]

_WARM_UP = 3  # steps that do not count: the first find the caches of other programs
_ALONE = 3  # steps in which each program runs alone


class _Stamps:
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


class _Steps:
    """Runs one step after the other on a state of its own."""

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None):
        self.engine, self.batch, self.key = engine, batch, key
        self.leaves = engine.copy(leaves)

    def run(self, observer: _Stamps | Watch | None = None, *, watched: bool = False) -> float:
        """Run a step to its end; returns its seconds."""
        begun = time.perf_counter()
        with jax.profiler.TraceAnnotation(STEP):
            if isinstance(observer, _Stamps):
                observer.begin()
            outcome = self.engine.run("update", self.leaves, self.batch, self.key, observer=observer, watched=watched)
            self.leaves = outcome.state
            if isinstance(observer, Watch):
                observer.stamps()  # it looks while the results arrive, not when all are there
            jax.block_until_ready(outcome)  # the norm of the gradients too, or its program would run in the next step
        return time.perf_counter() - begun


def check_profile(num_steps: int, clock: str | None) -> None:
    """Refuse what cannot be profiled.

    Raises:
        ArgumentError: fewer than one step, or an unknown clock.
    """
    if not is_count(num_steps, least=1):
        raise ArgumentError("pipe.profile", "num_steps is a whole number of at least 1", f"num_steps={num_steps!r}", "pass 3")
    if clock not in (None, "trace", "isolated"):
        rule = 'the times are those of the trace ("trace"), or of each program alone ("isolated")'
        raise ArgumentError("pipe.profile", rule, f"clock={clock!r}", 'pass clock="trace", or leave it out')


def record(engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, num_steps: int, clock: Clock | None) -> Profile:
    """Run steps under the profiler, then one step whose memory is looked at; the profile is of the traced step of median length.

    The leaves of the state are copied, and stay as they are. The numbers are those of the isolated clock where devices share what
    they compute with, unless a clock is given.

    Raises:
        ArgumentError: somebody else is taking a trace.
    """
    plan, _ = engine.plan("update", batch, key)
    schedule, steps = engine.options.schedule, _Steps(engine, leaves, batch, key)
    plain = [steps.run() for _ in range(_WARM_UP + num_steps)][_WARM_UP:]
    together, apart = [_Stamps(waits=False) for _ in range(num_steps)], [_Stamps(waits=True) for _ in range(_ALONE)]
    with tempfile.TemporaryDirectory() as folder:
        with _session(folder):
            lengths = [steps.run(stamps) for stamps in together]
            for stamps in apart:
                steps.run(stamps)
        try:
            runs, missing = matched(plan, read_runs(Path(folder)), num_steps + _ALONE), ""
        except (TraceError, FileNotFoundError) as error:
            runs, missing = [], str(error)
    alone = durations_of(plan, [_seconds(stamps.stamps, runs[num_steps + k :][:1]) for k, stamps in enumerate(apart)])
    if runs:
        found = [traced_spans(plan, runs[k], stamps.stamps, alone, schedule) for k, stamps in enumerate(together)]
    else:
        found, lengths = _watched(steps, num_steps)
    cost = statistics.median(lengths) / statistics.median(plain)
    ledger, _ = sample_step(engine, steps.leaves, batch, key)
    median = sorted(range(num_steps), key=lengths.__getitem__)[num_steps // 2]
    spans = found[median], isolated_spans(plan, alone, schedule)
    places, shown = engine.placement.by_rank, engine.placement.ranks_shown
    shared = len(set(places)) < len(places) or places[0].devices[0].platform == "cpu"
    clock = clock or ("isolated" if shared else "trace")
    return Profile(schedule, shown, *spans, clock, tuple(lengths), cost, ledger, missing)


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


def _seconds(stamps: Sequence[Stamp], runs: Sequence[Sequence[Run | None]]) -> list[float]:
    """How long each instruction took, in a step where each waited for the one before.

    The trace says so for programs. For the rest, such as sends, it is the time on the host's clock from when the host went on to
    when the result was there.
    """
    known = runs[0] if runs else [None] * len(stamps)
    return [stamp.done - stamp.handed if run is None else run.end - run.start for stamp, run in zip(stamps, known, strict=True)]


def _watched(steps: _Steps, num_steps: int) -> tuple[list[tuple[Span, ...]], list[float]]:
    """Steps whose results are polled, and their lengths."""
    engine = steps.engine
    plan, _ = engine.plan("update", steps.batch, steps.key, watched=True)
    found, lengths = [], []
    for _ in range(_WARM_UP + num_steps):
        watch = Watch(plan)
        steps.run(watch, watched=True)
        stamps = watch.stamps()
        found.append(watched_spans(plan, stamps, engine.options.schedule))
        lengths.append(max(stamp.done for stamp in stamps) - stamps[0].begun)
    return found[_WARM_UP:], lengths[_WARM_UP:]
