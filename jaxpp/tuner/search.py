"""The search: families are measured, all candidates simulated, those that fit are kept, and the best few are run.

Memory is asked for last, because that takes longer than to simulate: of candidates in the order of their predicted time, until as
many fit as will be run. Without a budget nothing depends on how long the search takes, so it finds the same in every process.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm import tqdm

from jaxpp.errors import ArgumentError, JaxppError
from jaxpp.runtime.progress import progress
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.candidate import Candidate, Family
from jaxpp.tuner.costs import FamilyCosts, Machine
from jaxpp.tuner.estimate import estimate, nearest
from jaxpp.tuner.predict import predict
from jaxpp.tuner.space import Space, candidates

__all__ = ["Found", "Limits", "Row", "search"]

_PATIENCE = 1  # seconds before a progress bar shows
_SAVES = ("least", "offload", "recompute")
"""What stages may keep where memory is short: as few bytes as repeat no work; the same, in host memory; their inputs alone."""


class Limits(NamedTuple):
    """What bounds a search.

    Attributes:
        hbm: bytes that each device has; None if that is not known.
        seconds: how long families are measured; None to measure all.
        num_measured: how many candidates are run; the best of them is chosen. With 0, the best by prediction is.
        processes: the process of each rank's device; one process unless given.
        clock: seconds since some moment; in several processes, the same in all.
    """

    hbm: int | None = None
    seconds: float | None = None
    num_measured: int = 3
    processes: tuple[int, ...] = ()
    clock: Callable[[], float] = time.perf_counter


class Row(NamedTuple):
    """A candidate with what is known of it.

    Attributes:
        candidate: its options.
        predicted: seconds of a step.
        peaks: bytes that the device of each rank holds at its peak; None if that was not asked.
        measured: seconds of a step as it ran; None if it did not run.
    """

    candidate: Candidate
    predicted: float
    peaks: tuple[int, ...] | None = None
    measured: float | None = None

    @property
    def peak(self) -> int | None:
        """Bytes on the device that holds most."""
        return None if self.peaks is None else max(self.peaks)


class Found(NamedTuple):
    """What a search found.

    Attributes:
        best: the choice.
        rows: all candidates that were simulated, the fastest by prediction first.
        costs: of the families that were measured.
        left_out: why families or candidates could not be used.
        unseen: families that the budget left no time for.
    """

    best: Row
    rows: tuple[Row, ...]
    costs: Mapping[Family, FamilyCosts]
    left_out: Mapping[Family | Candidate, JaxppError]
    unseen: tuple[Family, ...]


_UNLIMITED = Limits()


def search(machine: Machine, space: Space, limits: Limits = _UNLIMITED, *, saves: bool = False) -> Found:
    """The candidate whose step takes the least time, of those that fit.

    Args:
        machine: says what families cost, what candidates hold, and how long their steps take.
        space: what is looked at.
        limits: memory, time, and how many candidates are run.
        saves: whether residuals may be offloaded or recomputed as well, if the fastest candidate does not fit.

    Raises:
        ArgumentError: no candidate, none that fits, or a budget too short for one family.
        JaxppError: what the machine raised, if it could measure no family.
    """
    with progress(after=_PATIENCE, unit="measured", total=0) as bar:
        run = _Run(machine, limits, bar)
        run.add(candidates(space))
        if saves and limits.hbm is not None and not run.fits(run.ordered()[0]):
            known = frozenset(run.candidates)
            run.add([each for each in candidates(dataclasses.replace(space, remat=_SAVES)) if each not in known])
        return run.result()


@dataclass
class _Run:
    """A search under way.

    Attributes:
        machine: what is asked.
        limits: what bounds the search.
        bar: shows how far it is.
        candidates: all that are looked at.
        costs: of the families measured so far.
        predicted: seconds of a step of each candidate of these families.
        peaks: bytes of each device, of the candidates that were asked about.
        left_out: what the machine raised.
        unseen: families that the budget left no time for.
        promised: what steps of candidates would take, by what another family costs.
        began: when the search began, on the clock of the limits.
    """

    machine: Machine
    limits: Limits
    bar: tqdm
    candidates: list[Candidate] = field(default_factory=list)
    costs: dict[Family, FamilyCosts] = field(default_factory=dict)
    predicted: dict[Candidate, float] = field(default_factory=dict)
    peaks: dict[Candidate, tuple[int, ...]] = field(default_factory=dict)
    left_out: dict[Family | Candidate, JaxppError] = field(default_factory=dict)
    unseen: list[Family] = field(default_factory=list)
    promised: dict[tuple[Candidate, Family], float] = field(default_factory=dict)
    began: float = 0.0

    def __post_init__(self):
        self.began = self._now()

    def _now(self) -> float:
        """The time, if there is a budget: the processes of a run agree on it, which they need not without one."""
        return 0.0 if self.limits.seconds is None else self.limits.clock()

    def add(self, more: Sequence[Candidate]) -> None:
        """Measure the families of more candidates, and simulate them.

        Raises:
            JaxppError: what the machine raised first, if no family could be measured.
        """
        if not self.candidates and not more:
            rule = "there is a schedule of the sizes asked for, and at least one example for each microbatch"
            raise ArgumentError("jaxpp.tune(...)", rule, "no candidate", "allow more schedules, or other counts")
        self.candidates += more
        self._measure(dict.fromkeys(each.family for each in more if each.family not in self.costs))
        if not self.costs:
            raise next(iter(self.left_out.values()))
        for each in more:
            if each.family in self.costs:
                self.predicted[each] = predict(each, self.costs[each.family], self.limits.processes)

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
            usual = {each.family for each in self.candidates if each.schedule.name == "1f1b"}
            return min(waiting, key=lambda family: (family not in usual, family.num_microbatches))
        if self.limits.seconds is None:
            return waiting[0]
        best = dict.fromkeys(waiting, math.inf)
        for each in self.candidates:
            if each.family in best:
                best[each.family] = min(best[each.family], self._promise(each))
        return min(waiting, key=best.__getitem__)

    def _promise(self, candidate: Candidate) -> float:
        """The seconds of a step, by what the nearest family costs."""
        other = nearest(candidate.family, tuple(self.costs))
        if (candidate, other) not in self.promised:
            guess = estimate(candidate.family, other, self.costs[other], candidate.schedule.num_ranks)
            self.promised[candidate, other] = predict(candidate, guess, self.limits.processes)
        return self.promised[candidate, other]

    def ordered(self) -> list[Candidate]:
        """The candidates that were simulated, the fastest first; of equally fast ones, the one that was listed first."""
        return sorted(self.predicted, key=self.predicted.__getitem__)

    def fits(self, candidate: Candidate) -> bool:
        """Whether every device has room for a candidate."""
        return self.limits.hbm is None or max(self._held(candidate)) <= self.limits.hbm

    def _held(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that each device holds at its peak; asked once."""
        if candidate not in self.peaks:
            self.peaks[candidate] = self.machine.peaks(candidate)
        return self.peaks[candidate]

    def result(self) -> Found:
        """Run the best candidates that fit, and choose.

        Raises:
            ArgumentError: none fits.
            JaxppError: what the machine raised, if no candidate could be run.
        """
        fitting, measured = list[Candidate](), dict[Candidate, float]()
        self.bar.total += self.limits.num_measured
        ordered = self.ordered()
        for each in ordered:
            try:
                if len(fitting) < max(1, self.limits.num_measured) and self.fits(each):
                    if self.limits.num_measured:
                        self.bar.set_description(f"running {each.schedule.name}")
                        measured[each] = self.machine.step(each)
                    fitting.append(each)
                    self.bar.update()
            except JaxppError as error:
                self.left_out[each] = error
        if not fitting:
            raise self._nothing_fits()
        self._ask_for_shown([*fitting, *{each.schedule.name: each for each in reversed(ordered)}.values()])
        rows = {each: Row(each, self.predicted[each], self.peaks.get(each), measured.get(each)) for each in ordered}
        best = rows[min(fitting, key=lambda each: measured.get(each, 0.0))]
        return Found(best, tuple(rows.values()), self.costs, self.left_out, tuple(self.unseen))

    def _ask_for_shown(self, shown: Iterable[Candidate]) -> None:
        """The memory of the candidates that a table shows, the best of each schedule."""
        for each in shown:
            try:
                self._held(each)
            except JaxppError as error:
                self.left_out[each] = error

    def _nothing_fits(self) -> JaxppError:
        if not self.peaks or self.limits.hbm is None:
            return next(reversed(self.left_out.values()))
        least = min(self.peaks, key=lambda each: max(self.peaks[each]))
        need, room = bytes_in_words(max(self.peaks[least])), bytes_in_words(self.limits.hbm)
        rule = "a pipeline fits if no device holds more than hbm at its peak"
        got = [f"{len(self.peaks)} candidates, none of which fits into {room}", f"the least is {need}, of {least.words}"]
        fix = "use more devices or smaller batches, or pass a larger hbm if the devices have it"
        return ArgumentError(f"jaxpp.tune(..., hbm={room!r})", rule, got, fix)
