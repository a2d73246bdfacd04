"""Pipelined steps against plain ones, in interleaved rounds; what they take to compile, and the memory that they need.

The first schedule of a problem is compiled before anything else of that problem, so that its compile time owes nothing to programs
that other pipelines have compiled. Then an identical pipeline is made, to see what it costs to run a notebook's cell again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.monitoring import register_event_duration_secs_listener, unregister_event_duration_listener

import jaxpp
from experiments.plain import PlainKind, Runner, plain_steps
from experiments.problems import Problem
from jaxpp.schedule import Schedule

__all__ = ["Compiling", "StepRow", "measure_steps", "optimizer", "prepare"]

_COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event that JAX records for each program that XLA compiles."""
_MIB = 2**20
KEY = jax.random.key


@dataclass(frozen=True)
class Compiling:
    """The first step, from the loss to its result: ``init`` included.

    Attributes:
        seconds: of the pipeline.
        programs: that XLA compiled for it; every stage has its own, and ``init`` has some.
        again: seconds of a second, identical pipeline in the same process.
        plain: seconds of the plain step that turned out to be the fastest.
        plain_programs: that XLA compiled for that step.
    """

    seconds: float
    programs: int
    again: float
    plain: float
    plain_programs: int


@dataclass(frozen=True)
class StepRow:
    """One problem under one schedule.

    Attributes:
        problem: its name.
        schedule: its name.
        microbatches: parts of the batch.
        stages: of the pipeline.
        seconds: the median step.
        plain: the median of the fastest plain step.
        plain_kind: which of ``experiments.plain.PLAIN`` that is.
        ratio: pipelined / plain, the median of the rounds' ratios.
        quartiles: of these ratios.
        loop: the median of the faster plain step that splits its batch, as the pipeline does: ``scan`` or ``unrolled``.
        loop_kind: which of the two.
        loop_ratio: pipelined / loop, the median of the rounds' ratios.
        loop_quartiles: of these ratios.
        instructions: of the plan: programs and sends.
        host: microseconds of host time an instruction: the time until ``pipe.step`` returns.
        peak: MiB of the fullest device, as forecast.
        peak_sum: MiB of all devices together; their peaks are not at one time.
        plain_peak: MiB of the plain step: arguments and temporaries, by XLA's own account.
        compiling: the first step; None for all schedules but the first.
    """

    problem: str
    schedule: str
    microbatches: int
    stages: int
    seconds: float
    plain: float
    plain_kind: str
    ratio: float
    quartiles: tuple[float, float]
    loop: float
    loop_kind: str
    loop_ratio: float
    loop_quartiles: tuple[float, float]
    instructions: int
    host: float
    peak: float
    peak_sum: float
    plain_peak: float
    compiling: Compiling | None


@contextmanager
def _counted() -> Iterator[list[float]]:
    """The seconds of each program that XLA compiles in the block."""
    found: list[float] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            found.append(duration_secs)

    register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        unregister_event_duration_listener(note)


class _Pipelined:
    """A pipeline, compiled and after its first step."""

    def __init__(self, problem: Problem, batch: Any, schedule: Schedule):
        begun = time.perf_counter()
        counts: dict[str, Any] = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
        with _counted() as compiled:
            self.pipe = jaxpp.Pipeline(problem.loss_fn, optimizer(), schedule=schedule, **counts)
            state = self.pipe.init(problem.init, KEY(0), batch)
            self.runner = Runner(lambda state: self.pipe.step(state, batch), state)
        self.seconds, self.programs = time.perf_counter() - begun, len(compiled)
        plan, _ = self.pipe.engine.plan("update", batch, None)
        self.instructions = len(plan.instructions)


class _Plain:
    """A plain step, compiled and after its first run."""

    def __init__(self, kind: PlainKind, problem: Problem, batch: Any, num_microbatches: int):
        begun = time.perf_counter()
        same = optimizer()
        step = plain_steps(problem.loss_fn, same, num_microbatches)[kind]
        with _counted() as compiled:
            params = jax.jit(lambda key: problem.init(key))(KEY(0))  # noqa: PLW0108  (another function: each kind compiles its own)
            state = params, same.init(params)
            shapes = jax.eval_shape(lambda: state)
            self.runner = Runner(lambda state: step(state, batch), state)
        self.seconds, self.programs = time.perf_counter() - begun, len(compiled)
        found = step.lower(shapes, batch).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
        self.peak = 0.0
        if found is not None:
            new = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
            self.peak = (found.argument_size_in_bytes + found.temp_size_in_bytes + new) / _MIB


def optimizer() -> optax.GradientTransformation:
    """The optimizer of both sides: two moments of each parameter, and a count. It learns so little that no gradient becomes 0."""
    return optax.adam(1e-6)


def prepare() -> None:
    """Run a pipeline and a plain step of a few units, so that what Python imports at the first trace counts for neither side."""
    w, batch = jax.numpy.ones((2, 2)), jax.numpy.ones((2, 2))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return (batch @ params["a"] @ params["b"]).mean()

    problem = Problem(loss_fn, lambda key: {"a": w * jax.random.uniform(key), "b": w}, batch)
    _Pipelined(problem, batch, jaxpp.schedule.make("gpipe", num_ranks=2, num_microbatches=2))
    _Plain("scan", problem, batch, 2)


def measure_steps(
    name: str, problem: Problem, schedules: Sequence[Schedule], kinds: Sequence[PlainKind], rounds: int, seconds: float, bar: Any
) -> Iterator[StepRow]:
    """Compile and time one problem under all schedules, next to all plain steps.

    Args:
        name: of the problem.
        problem: the model and its batch.
        schedules: with equal numbers of microbatches.
        kinds: of plain steps.
        rounds: interleaved rounds.
        seconds: how long a kind of step is timed in a round; one step at least.
        bar: counts the rounds.

    Yields:
        a row for each schedule.
    """
    batch, count = jax.tree.map(jax.numpy.asarray, problem.batch), schedules[0].num_microbatches
    first = _Pipelined(problem, batch, schedules[0])
    again = _Pipelined(problem, batch, schedules[0]).seconds
    plain = {kind: _Plain(kind, problem, batch, count) for kind in kinds}
    pipes = {schedules[0].name: first}
    pipes |= {schedule.name: _Pipelined(problem, batch, schedule) for schedule in schedules[1:]}
    times = _times({name: each.runner for name, each in {**plain, **pipes}.items()}, rounds, seconds, bar)
    medians = {kind: float(np.median(times[kind][:, 0])) for kind in kinds}
    loops = [kind for kind in kinds if kind != "whole"] or kinds
    kind, loop = (min(some, key=medians.__getitem__) for some in (kinds, loops))
    best, shapes = plain[kind], jax.eval_shape(problem.init, KEY(0))
    for schedule in schedules:
        made, compiling = pipes[schedule.name], None
        if made is first:
            compiling = Compiling(first.seconds, first.programs, again, best.seconds, best.programs)
        taken = times[schedule.name]
        (ratio, quartiles), (loop_ratio, loop_quartiles) = (_ratio(taken, times[each]) for each in (kind, loop))
        peaks = [peak / _MIB for peak in made.pipe.forecast(shapes, batch).peaks.values()]
        yield StepRow(
            problem=name,
            schedule=schedule.name,
            microbatches=count,
            stages=schedule.num_stages,
            seconds=float(np.median(taken[:, 0])) / 1e6,
            plain=medians[kind] / 1e6,
            plain_kind=kind,
            ratio=ratio,
            quartiles=quartiles,
            loop=medians[loop] / 1e6,
            loop_kind=loop,
            loop_ratio=loop_ratio,
            loop_quartiles=loop_quartiles,
            instructions=made.instructions,
            host=float(np.median(taken[:, 1])) / made.instructions,
            peak=max(peaks),
            peak_sum=sum(peaks),
            plain_peak=best.peak,
            compiling=compiling,
        )


def _ratio(taken: np.ndarray, plain: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The median of the rounds' ratios, and their quartiles."""
    low, middle, high = (float(x) for x in np.quantile(taken[:, 0] / plain[:, 0], (0.25, 0.5, 0.75)))
    return middle, (low, high)


def _times(runners: Mapping[str, Runner], rounds: int, seconds: float, bar: Any) -> dict[str, np.ndarray]:
    """Microseconds of a step and of the host's part of it, of each kind of step in each round.

    Every second round runs backwards, so that no kind of step always follows the same other kind.
    """
    steps = {name: max(1, int(1e6 * seconds / runner.time(1)[0])) for name, runner in runners.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners)[:: 1 - 2 * (number % 2)]:
            found[name].append(runners[name].time(steps[name], min(20, steps[name] // 2)))
        bar.update()
    return {name: np.array(rows) for name, rows in found.items()}
