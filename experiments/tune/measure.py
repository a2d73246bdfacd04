"""Every candidate of a search run in earnest, by turns, so that what else the machine does falls on all of them."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import optax

import jaxpp
from experiments.problems import Problem

__all__ = ["Row", "exhaustive", "tuned"]


@dataclass(frozen=True)
class Row:
    """A candidate.

    Attributes:
        schedule: its name.
        microbatches: how many there are.
        stages: of the pipeline.
        remat: what stages keep.
        predicted: seconds of a step, by the search.
        tried: seconds of a step as the search ran it; None if it did not.
        measured: seconds of a step: the median over all steps of all rounds.
        ratio: over that of the choice: the median of the rounds' ratios.
        peak: bytes on the fullest device; None if the search did not ask.
        chosen: whether it is the choice.
    """

    schedule: str
    microbatches: int
    stages: int
    remat: str
    predicted: float
    tried: float | None
    measured: float
    ratio: float
    peak: int | None
    chosen: bool

    @property
    def name(self) -> str:
        """What it is called: ``1f1b, 8 microbatches, 4 stages``."""
        return f"{self.schedule}, {self.microbatches} microbatches, {self.stages} stages" + f", {self.remat}" * (
            self.remat != "least"
        )

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted / self.measured - 1


def tuned(problem: Problem, params: Any, **options: Any) -> Any:
    """What ``jaxpp.tune`` finds for a problem; ``options`` are its own."""
    return jaxpp.tune(problem.loss_fn, optax.adam(1e-3), params, problem.batch, **options)


def exhaustive(problem: Problem, params: Any, tuning: Any, *, rounds: int, steps: int, bar: Any) -> list[Row]:
    """Run all candidates of a search, by turns.

    Args:
        problem: the loss and the batch.
        params: of the first state of each.
        tuning: the search.
        rounds: in each of which every candidate has its turn, each time another one first.
        steps: timed in a turn, after one that is not.
        bar: counts the turns.
    """
    runs = [_Run(problem, params, {**tuning.given, **row.candidate.options}) for row in tuning.rows]
    for run in runs:
        run.turn(2)
    for number in range(rounds):
        for k in range(len(runs)):
            run = runs[(k + number * (len(runs) // rounds + 1)) % len(runs)]
            run.seconds.append(run.turn(steps))
            bar.update()
    best = next(k for k, row in enumerate(tuning.rows) if row.candidate == tuning.found.best.candidate)
    base = [statistics.median(turn) for turn in runs[best].seconds]
    found = []
    for k, (row, run) in enumerate(zip(tuning.rows, runs, strict=True)):
        each, turns = row.candidate, [statistics.median(turn) for turn in run.seconds]
        found.append(
            Row(
                schedule=each.schedule.name,
                microbatches=each.schedule.num_microbatches,
                stages=each.schedule.num_stages,
                remat=each.remat,
                predicted=row.predicted,
                tried=row.measured,
                measured=statistics.median(second for turn in run.seconds for second in turn),
                ratio=statistics.median(own / other for own, other in zip(turns, base, strict=True)),
                peak=row.peak,
                chosen=k == best,
            )
        )
    return found


class _Run:
    """A candidate at work."""

    def __init__(self, problem: Problem, params: Any, options: Any):
        self._pipe = jaxpp.Pipeline(problem.loss_fn, optax.adam(1e-3), **options)
        self._batch, self._state = problem.batch, self._pipe.init(params, problem.batch)
        self.seconds: list[list[float]] = []

    def turn(self, steps: int) -> list[float]:
        """Seconds of some steps after one that does not count, each waited for."""
        found = []
        for _ in range(steps + 1):
            begun = time.perf_counter()
            self._state, metrics = self._pipe.step(self._state, self._batch)
            jax.block_until_ready((self._state, metrics))
            found.append(time.perf_counter() - begun)
        return found[1:]
