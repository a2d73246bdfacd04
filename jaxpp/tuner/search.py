"""The search: families are measured, all candidates simulated, those that fit are kept, and the best few are run.

Memory is asked for last, because that takes longer than to simulate: of the fastest by prediction, until as many fit as will be
run. Without a budget nothing depends on how long the search takes, so every process finds the same. With a budget, the family that
promises most is measured next (``estimate``).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tqdm import tqdm

from jaxpp.errors import ArgumentError, JaxppError
from jaxpp.observe.evaluate import Evaluator, StepCosts, step_seconds
from jaxpp.runtime.progress import progress
from jaxpp.schedule.action import Kind
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.knobs import Candidate, Family, Space, candidates

_PATIENCE = 1  # seconds before a progress bar shows
_SAVES = ("least", "offload", "recompute")  # what stages may keep where memory is short


class Machine(Protocol):
    """What a search asks about costs and memory: the devices themselves (``Devices``), or numbers that a test injects."""

    def costs(self, family: Family) -> StepCosts:
        """Measure a family, once; the candidates of a family for which it raises ``JaxppError`` are left out."""
        ...

    def peaks(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that the device of each rank holds at its peak; of a family that was measured."""
        ...

    def step(self, candidate: Candidate) -> float:
        """The seconds of a step, from the call until all its results are there."""
        ...


class Limits(NamedTuple):
    """What bounds a search."""

    hbm: int | None = None  # bytes that each device has; None if that is not known
    seconds: float | None = None  # how long families are measured; None to measure all
    num_measured: int = 3  # how many candidates are run; the best of them is chosen. With 0, the best by prediction is.
    processes: tuple[int, ...] = ()  # the process of each rank's device; one process unless given
    clock: Callable[[], float] = time.perf_counter  # seconds since some moment; in several processes, the same in all


class Row(NamedTuple):
    """A candidate with what is known of it."""

    candidate: Candidate  # its options
    predicted: float  # seconds of a step
    peaks: tuple[int, ...] | None = None  # bytes that the device of each rank holds at its peak; None if that was not asked
    measured: float | None = None  # seconds of a step as it ran; None if it did not run

    @property
    def peak(self) -> int | None:
        """Bytes on the device that holds most."""
        return None if self.peaks is None else max(self.peaks)


class SearchResult(NamedTuple):
    """What a search found."""

    best: Row  # the choice
    rows: tuple[Row, ...]  # all candidates that were simulated, the fastest by prediction first
    costs: Mapping[Family, StepCosts]  # of the families that were measured
    left_out: Mapping[Family | Candidate, JaxppError]  # why families or candidates could not be used
    unseen: tuple[Family, ...]  # families that the budget left no time for


_UNLIMITED = Limits()


def search(machine: Machine, space: Space, limits: Limits = _UNLIMITED, *, saves: bool = False) -> SearchResult:
    """The candidate whose step takes the least time, of those that fit; with ``saves`` stages may offload or recompute for that."""
    with progress(after=_PATIENCE, unit="measured", total=0) as bar:
        run = _Search(machine, limits, bar)
        run.add(candidates(space))
        if saves and limits.hbm is not None and not run.evaluator.fits(run.ordered()[0]):
            known, saving = frozenset(run.candidates), candidates(dataclasses.replace(space, remat=_SAVES))
            run.add([candidate for candidate in saving if candidate not in known])
        return run.result()


class _Search:
    """A search under way: what was looked at so far."""

    def __init__(self, machine: Machine, limits: Limits, bar: tqdm):
        self.machine, self.limits, self.bar = machine, limits, bar
        self.evaluator = Evaluator(self._seconds, machine.peaks, limits.hbm)
        self.candidates = list[Candidate]()
        self.costs = dict[Family, StepCosts]()
        self.left_out = dict[Family | Candidate, JaxppError]()
        self.unseen = list[Family]()
        self.promised = dict[tuple[Candidate, Family], float]()
        self.began = self._now()

    def _now(self) -> float:
        """The time, if there is a budget: the processes of a run agree on it, which they need not without one."""
        return 0.0 if self.limits.seconds is None else self.limits.clock()

    def _seconds(self, candidate: Candidate, costs: StepCosts | None = None) -> float:
        costs = costs or self.costs[candidate.family]
        return step_seconds(candidate.schedule, costs, candidate.offload, self.limits.processes)

    def add(self, more: Sequence[Candidate]) -> None:
        if not self.candidates and not more:
            rule = "there is a schedule of the sizes asked for, and at least one example for each microbatch"
            raise ArgumentError("jaxpp.tune(...)", rule, "no candidate", "allow more schedules, or other counts")
        self.candidates += more
        self._measure(dict.fromkeys(candidate.family for candidate in more if candidate.family not in self.costs))
        if not self.costs:
            raise next(iter(self.left_out.values()))
        for candidate in more:
            if candidate.family in self.costs:
                self.evaluator.seconds(candidate)

    def _measure(self, families: Iterable[Family]) -> None:
        """Ask for the costs of families, until the budget is spent; those that cannot be are left out."""
        waiting, budget = list(families), self.limits.seconds
        self.bar.total += len(waiting)
        while waiting:
            if budget is not None and self.costs and self._now() - self.began >= budget:
                self.unseen += waiting
                return
            family = self._next(waiting)
            waiting.remove(family)
            self.bar.set_description(family.words)
            try:
                self.costs[family] = self.machine.costs(family)
            except JaxppError as error:
                self.left_out[family] = error
            self.bar.update()
            if budget is not None and len(self.costs) == 1 and (spent := self._now() - self.began) > budget:
                rule, got = "a budget is long enough to measure one candidate", f"{family.words} took {spent:.3g} s"
                fix = f"pass seconds={math.ceil(10 * spent)} or more, or leave seconds out to measure all"
                raise ArgumentError(f"jaxpp.tune(..., seconds={budget:g})", rule, got, fix)

    def _next(self, waiting: Sequence[Family]) -> Family:
        """The family to measure now: first the default schedule at few microbatches; with a budget, then what promises most."""
        if not self.costs:
            usual = {candidate.family for candidate in self.candidates if candidate.schedule.name == "1f1b"}
            return min(waiting, key=lambda family: (family not in usual, family.num_microbatches))
        if self.limits.seconds is None:
            return waiting[0]
        best = dict.fromkeys(waiting, math.inf)
        for candidate in self.candidates:
            if candidate.family in best:
                best[candidate.family] = min(best[candidate.family], self._promise(candidate))
        return min(waiting, key=best.__getitem__)

    def _promise(self, candidate: Candidate) -> float:
        """The seconds of a step, by what the nearest family costs."""
        other = nearest(candidate.family, tuple(self.costs))
        if (candidate, other) not in self.promised:
            guess = estimate(candidate.family, other, self.costs[other], candidate.schedule.num_ranks)
            self.promised[candidate, other] = self._seconds(candidate, guess)
        return self.promised[candidate, other]

    def ordered(self) -> list[Candidate]:
        """The candidates that were simulated, the fastest first; of equally fast ones, the one that was listed first."""
        return sorted(self.evaluator.prices, key=self.evaluator.seconds)

    def result(self) -> SearchResult:
        """Run the best candidates that fit, and choose."""
        fitting, measured = list[Candidate](), dict[Candidate, float]()
        self.bar.total += self.limits.num_measured
        ordered = self.ordered()
        for candidate in ordered:
            try:
                if len(fitting) < max(1, self.limits.num_measured) and self.evaluator.fits(candidate):
                    if self.limits.num_measured:
                        self.bar.set_description(f"running {candidate.schedule.name}")
                        measured[candidate] = self.machine.step(candidate)
                    fitting.append(candidate)
                    self.bar.update()
            except JaxppError as error:
                self.left_out[candidate] = error
        if not fitting:
            raise self._nothing_fits()
        for candidate in (*fitting, *{each.schedule.name: each for each in reversed(ordered)}.values()):
            try:  # the memory of what a table shows, the best of each schedule
                self.evaluator.peaks(candidate)
            except JaxppError as error:
                self.left_out[candidate] = error
        prices, weights = self.evaluator.prices, self.evaluator.weights
        rows = {one: Row(one, prices[one], weights.get(one), measured.get(one)) for one in ordered}
        best = rows[min(fitting, key=lambda candidate: measured.get(candidate, 0.0))]
        return SearchResult(best, tuple(rows.values()), self.costs, self.left_out, tuple(self.unseen))

    def _nothing_fits(self) -> JaxppError:
        lightest = self.evaluator.lightest()
        if not lightest or self.limits.hbm is None:
            return next(reversed(self.left_out.values()))
        need, room = bytes_in_words(max(self.evaluator.peaks(lightest[0]))), bytes_in_words(self.limits.hbm)
        rule = "a pipeline fits if no device holds more than hbm at its peak"
        got = [f"{len(lightest)} candidates, none of which fits into {room}", f"the least is {need}, of {lightest[0].words}"]
        fix = "use more devices or smaller batches, or pass a larger hbm if the devices have it"
        return ArgumentError(f"jaxpp.tune(..., hbm={room!r})", rule, got, fix)


def nearest(family: Family, known: Sequence[Family]) -> Family:
    """The measured family that is most like another one; the first if several are."""

    def distance(other: Family) -> tuple[float, float]:
        choices = sum(a != b for a, b in zip(family[2:], other[2:], strict=True))
        return choices, sum(abs(math.log(a / b)) for a, b in zip(family[:2], other[:2], strict=True))

    return min(known, key=distance)


def estimate(family: Family, other: Family, costs: StepCosts, num_ranks: int) -> StepCosts:
    """What a family may cost, by what another one does; it decides which family is measured next, and nothing else.

    Computing and sending are in proportion to the size of a stage and a microbatch; to hand over an action takes as long for any
    size; to recompute costs one more forward.
    """
    part, size = other.num_stages / family.num_stages, other.num_microbatches / family.num_microbatches
    count = family.num_stages

    def every(values: Sequence[float], scale: float, number: int = count) -> tuple[float, ...]:
        return (scale * (statistics.fmean(values) if values else 0.0),) * number

    means = {kind: part * size * statistics.fmean(values) for kind, values in costs.actions.items()}
    full = means[Kind.B] if Kind.B in means else means.get(Kind.I, 0.0) + means.get(Kind.W, 0.0)
    again = ((family.remat == "recompute") - (other.remat == "recompute")) * means[Kind.F]
    works = {Kind.F: means[Kind.F], Kind.B: max(0.0, full + again)}
    if family.splits:
        works |= {Kind.I: max(0.0, means.get(Kind.I, full / 2) + again), Kind.W: means.get(Kind.W, full / 2)}
    handed = statistics.fmean(seconds for values in costs.dispatch.values() for seconds in values)
    return StepCosts(
        actions={kind: (seconds,) * count for kind, seconds in works.items()},
        dispatch=dict.fromkeys(works, (handed,) * count),
        transfer=every(costs.transfer, size, count - 1),
        offload=every(costs.offload, part * size),
        offload_dispatch=every(costs.offload_dispatch, 1.0),
        before=costs.before,
        after=every(costs.after, part),
        after_dispatch=costs.after_dispatch / part,
        capacity=min(costs.capacity, num_ranks),
    )
