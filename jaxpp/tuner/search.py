"""Which pipelines ``tune`` looks at, and the search among them.

A candidate is the options of one pipeline. Candidates that run the same stage programs are a *family*, which costs seconds to
trace, cut, compile and measure. Which schedule orders the programs, which rank runs them, and whether residuals wait in host memory
makes no other program, so candidates are only simulated, which costs milliseconds. Then the best few are improved, by turns: each
is cut for its own schedule, and schedules are made to measure, from what the stages of a family were measured to take. Of those
that fit, the best few are run. Without a budget nothing depends on how long the search takes, so every process finds the same.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from jaxpp.errors import ArgumentError, JaxppError, LossError, ScheduleError
from jaxpp.observe.evaluate import CandidateSearch, step_seconds
from jaxpp.runtime.progress import progress
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.offload import offloads
from jaxpp.schedule.registry import AUTO, SCHEDULES, make
from jaxpp.schedule.synthesis.synthesise import synthesise
from jaxpp.tables import bytes_in_words
from jaxpp.types import Arguments

_PATIENCE = 1  # seconds before a progress bar shows
_SAVES = ("least", "offload", "recompute")  # what stages may keep where memory is short
_ROUNDS = 3  # in each, the best few are improved: with cuts, then a schedule for these cuts, then cuts for this schedule
_EFFORT = 500  # steps of the search for one schedule: the last parts in a thousand are less than what a measurement misses
_TRIES = 3  # schedules that are made with less and less room, until one fits
_POWERS = range(-1, 4)  # of two: the numbers of microbatches in parts of the number of ranks


class Family(NamedTuple):
    """What candidates with the same stage programs have in common."""

    num_stages: int
    num_microbatches: int  # of a batch, or of a replica's part of it; with the batch it says the size of a microbatch
    remat: str  # ``"least"``, ``"keep"`` or ``"recompute"``, the same for all stages
    balance: str  # by what the loss is cut
    splits: bool  # whether backwards are split into I and W
    replicas: int = 1  # of each stage; the number of microbatches is that of each of them
    cuts: tuple[int, ...] = ()  # where stages begin on the spine; where they do for a plain schedule if it is empty
    homes: tuple[int, ...] = ()  # the rank of each stage where ranks are of unequal width; empty where that makes no other programs

    @property
    def words(self) -> str:
        """For people."""
        more = f", {_counted(self.replicas, 'replica')}" * (self.replicas > 1) + ", recomputed" * (self.remat == "recompute")
        more += f", cut at {', '.join(map(str, self.cuts))}" * bool(self.cuts)
        return f"{_counted(self.num_stages, 'stage')}, {_counted(self.num_microbatches, 'microbatch', 'es')}{more}"


@dataclass(frozen=True)
class Candidate:
    """The options of one pipeline."""

    schedule: Schedule  # made for its ranks, stages and microbatches, under a name that ``Pipeline`` takes
    remat: str = "least"  # ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``, the same for all stages
    balance: str = "flops"  # by what the loss is cut
    replicas: int = 1  # of each stage, a device each: ``data_parallel``
    cuts: tuple[int, ...] = ()  # where its loss is cut, once that is known and if it depends on the schedule
    unequal: bool = False  # whether its ranks are of unequal width

    @cached_property
    def family(self) -> Family:
        """The family whose programs it runs; offloading keeps what ``"least"`` keeps."""
        kept, schedule = "least" if self.remat == "offload" else self.remat, self.schedule
        splits = any(action.kind == Kind.W for row in schedule.rows for action in row)
        homes = schedule.stage_to_rank if self.unequal else ()
        return Family(schedule.num_stages, schedule.num_microbatches, kept, self.balance, splits, self.replicas, self.cuts, homes)

    @property
    def is_cut(self) -> bool:
        """Whether its family has the cuts of its pipeline, and not those that a plain schedule would have."""
        return bool(self.cuts) or self.balance == "flops" or self.schedule.num_stages == 1

    @property
    def offload(self) -> tuple[int | None, ...]:
        """``except_last`` of each stage, as ``schedule.offload.offloads`` takes it; None of each where nothing is offloaded."""
        return (1 if self.remat == "offload" else None,) * self.schedule.num_stages

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank runs."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def words(self) -> str:
        """For people."""
        schedule, *others = (knob.phrase(knob.value(self)) for knob in KNOBS if knob.name != "replicas" or self.replicas > 1)
        return f"{schedule} with {', '.join(others)}"

    @property
    def options(self) -> Arguments:
        """The arguments of ``Pipeline`` that differ; the schedule itself where a rank has more stages than its name stands for."""
        schedule = self.schedule
        named = schedule.name in SCHEDULES and SCHEDULES[schedule.name].stages_per_rank == self.stages_per_rank
        sizes: Arguments = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
        sizes |= {"data_parallel": self.replicas} if self.replicas > 1 else {}
        return {**sizes, "schedule": schedule.name if named else schedule, "remat": self.remat, "balance": self.balance}


class Knob(NamedTuple):
    """A choice between candidates."""

    name: str  # of its column in a table; a sentence about it begins with this name
    value: Callable[[Candidate], int | str]  # what a candidate chose
    phrase: Callable[[int | str], str]  # a value among the options of a candidate
    words: Callable[[int | str], str] = str  # a value in a sentence about the knob
    turns: tuple[str, ...] = ()  # the knobs that turn with it: candidates that differ in it alone may differ in these too


_OTHERS = ("schedule", "microbatches", "stages a rank", "balance", "remat")
KNOBS = (
    Knob("schedule", lambda c: c.schedule.name, str),
    Knob("ranks", lambda c: c.schedule.num_ranks, lambda n: _counted(n, "rank"), turns=(*_OTHERS, "replicas")),
    Knob("replicas", lambda c: c.replicas, lambda n: _counted(n, "replica"), turns=(*_OTHERS, "ranks")),
    Knob("microbatches", lambda c: c.schedule.num_microbatches, lambda n: _counted(n, "microbatch", "es")),
    Knob("stages a rank", lambda c: c.stages_per_rank, lambda n: f"{_counted(n, 'stage')} a rank", turns=("schedule",)),
    Knob("balance", lambda c: c.balance, "balance={!r}".format, repr),
    Knob("remat", lambda c: c.remat, "remat={!r}".format, repr),
)


def _counted(number: int | str, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


@dataclass(frozen=True)
class Space:
    """What is looked at: every combination of these is a candidate, if there is such a schedule; and what improves the best few."""

    num_examples: int  # of the batch: each microbatch has at least one of them
    num_ranks: tuple[int, ...]  # of candidates with one replica
    schedules: tuple[str, ...] = tuple(SCHEDULES)  # names, and ``"auto"`` where schedules are made to measure, too
    stages_per_rank: tuple[int, ...] = (1, 2)
    num_microbatches: tuple[int, ...] = ()  # numbers of microbatches; the usual ones if none are given, and 1 for ``naive``
    remat: tuple[str, ...] = ("least",)  # what stages keep: ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``
    balance: tuple[str, ...] = ("flops",)  # by what the loss is cut
    in_order: bool = False  # whether each stage must run its forwards in order, because the loss has a model state
    splits: tuple[tuple[int, int], ...] = ()  # the numbers of ranks and of replicas of candidates with several
    own_cuts: bool = False  # whether the best few are also looked at as they are cut by cost, each for its schedule
    widths: tuple[int, ...] = ()  # how many devices each rank has; as many each if it is empty


def usual_microbatches(num_examples: int, num_ranks: int) -> tuple[int, ...]:
    """The numbers of microbatches that are looked at unless others are asked for.

    Example:
        >>> usual_microbatches(num_examples=96, num_ranks=4)
        (2, 4, 8, 16, 32)
        >>> usual_microbatches(num_examples=10, num_ranks=4)
        (2, 5, 10)
    """
    divisors = [n for n in range(1, num_examples + 1) if num_examples % n == 0]
    counts = set[int]()
    for power in _POWERS:
        wanted = max(1, math.ceil(num_ranks * 2.0**power))
        near = min(divisors, key=lambda n, wanted=wanted: abs(math.log2(n / wanted)))
        if abs(math.log2(near / wanted)) < 0.5:
            counts.add(near)
        elif wanted <= num_examples:
            counts.add(wanted)
    return tuple(sorted(counts))


def candidates(space: Space) -> tuple[Candidate, ...]:
    """All candidates, each once; residuals that would never leave their device make no candidate of their own."""
    every: dict[Candidate, None] = {}
    for schedule, replicas in _schedules(space):
        for balance in space.balance:
            for remat in space.remat:
                unequal = len(set(space.widths[: schedule.num_ranks])) > 1
                candidate = Candidate(schedule, remat, balance, replicas, unequal=unequal)
                if remat != "offload" or offloads(schedule.rows, candidate.offload):
                    every.setdefault(candidate)
    return tuple(every)


def _schedules(space: Space) -> Iterator[tuple[Schedule, int]]:
    """The schedules, each with its number of replicas."""
    for ranks, replicas in (*((ranks, 1) for ranks in space.num_ranks), *space.splits):
        num_examples = space.num_examples // replicas
        usual = usual_microbatches(max(1, num_examples), ranks)
        names = [name for name in space.schedules if name != AUTO] or SCHEDULES  # there is none to measure without another one
        for name in names:
            recipe = SCHEDULES[name]
            for v in (v for v in space.stages_per_rank if v == recipe.stages_per_rank or (recipe.varies and v > 1)):
                for count in space.num_microbatches or ((1,) if name == "naive" else usual):
                    with contextlib.suppress(ScheduleError):  # there is none of these sizes
                        schedule = make(name, ranks, count, v)
                        if count <= num_examples and not (space.in_order and schedule.out_of_order):
                            yield schedule, replicas


class Machine(Protocol):
    """What a search asks about costs and memory: the devices themselves (``Devices``), or numbers that a test injects."""

    def costs(self, family: Family) -> StepCosts:
        """Measure a family, once; the candidates of a family for which it raises ``JaxppError`` are left out."""
        ...

    def peaks(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that the device of each rank holds at its peak; of a family that was measured."""
        ...

    def cuts(self, candidate: Candidate) -> tuple[int, ...]:
        """Where the pipeline of a candidate cuts its loss."""
        ...

    def kept(self, family: Family) -> tuple[int, ...]:
        """The bytes of residuals that each stage keeps of a microbatch; of a family that was measured."""
        ...

    def steps(self, candidates: Sequence[Candidate]) -> Sequence[tuple[float, ...]]:
        """The seconds of some steps of each, from the call until all its results are there; they run by turns."""
        ...


class Limits(NamedTuple):
    """What bounds a search."""

    hbm: int | None = None  # bytes that each device has; None if that is not known
    seconds: float | None = None  # how long families are measured; None to measure all
    num_measured: int = 3  # how many candidates are run; the best of them is chosen. With 0, the best by prediction is.
    processes: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # of each rank, by the number of replicas; one unless given
    clock: Callable[[], float] = time.perf_counter  # seconds since some moment; in several processes, the same in all
    families: int | None = None  # how many of the families that are added at once are measured, those that promise most; None: all


class Row(NamedTuple):
    """A candidate with what is known of it."""

    candidate: Candidate  # its options
    predicted: float  # seconds of a step
    peaks: tuple[int, ...] | None = None  # bytes that the device of each rank holds at its peak; None if that was not asked
    measured: float | None = None  # seconds of a step as it ran, the median; None if it did not run
    middle: tuple[float, float] | None = None  # the middle half of its steps took between these seconds

    @property
    def peak(self) -> int | None:
        """Bytes on the device that holds most."""
        return None if self.peaks is None else max(self.peaks)

    def told_apart(self, other: "Row") -> bool:
        """Whether two that ran differ by more than their steps do: the middle halves have nothing in common."""
        assert self.middle and other.middle, "both ran"
        return self.middle[1] < other.middle[0] or other.middle[1] < self.middle[0]


class SearchResult(NamedTuple):
    """What a search found."""

    best: Row  # the choice
    rows: tuple[Row, ...]  # all candidates that were simulated, the fastest by prediction first
    costs: Mapping[Family, StepCosts]  # of the families that were measured
    left_out: Mapping[Family | Candidate, JaxppError]  # why families or candidates could not be used
    unseen: tuple[Family, ...]  # families that the budget left no time for


_UNLIMITED = Limits()


def search(
    machine: Machine, space: Space, limits: Limits = _UNLIMITED, *, saves: bool = False, least: bool = False
) -> SearchResult:
    """The candidate whose step takes the least time, of those that fit; with ``saves`` stages may offload or recompute for that.

    Where nothing fits that is an error, or with ``least`` the candidate whose fullest device holds least.
    """
    with progress(after=_PATIENCE, unit="measured", total=0) as bar:
        run = _Search(machine, limits, bar)
        run.add(candidates(space))
        if saves and limits.hbm is not None and not run.search.fits(run.search.quickest()[0]):
            known, saving = frozenset(run.candidates), candidates(dataclasses.replace(space, remat=_SAVES))
            run.add([candidate for candidate in saving if candidate not in known])
        run.improve(space)
        return run.result(space, least=least)


class _Search:
    def __init__(self, machine: Machine, limits: Limits, bar: tqdm):
        self.machine, self.limits, self.bar = machine, limits, bar
        self.search = CandidateSearch(self._seconds, machine.peaks, limits.hbm)
        self.candidates = list[Candidate]()
        self.costs = dict[Family, StepCosts]()
        self.left_out = self.search.left_out  # families too
        self.unseen = list[Family]()
        self.promised = dict[tuple[Candidate, Family], float]()
        self.made = set[Family]()  # for which a schedule was made to measure
        self.to_measure = set[Candidate]()  # the candidates with these, of which one may have the rows of a schedule with a name
        self.began = self._now()

    def _now(self) -> float:
        """The time, if there is a budget: the processes of a run agree on it, which they need not without one."""
        return 0.0 if self.limits.seconds is None else self.limits.clock()

    def _seconds(self, candidate: Candidate, costs: StepCosts | None = None) -> float:
        costs = costs or self.costs[candidate.family]
        return step_seconds(candidate.schedule, costs, candidate.offload, self.limits.processes.get(candidate.replicas, ()))

    def _is_spent(self) -> bool:
        return self.limits.seconds is not None and bool(self.costs) and self._now() - self.began >= self.limits.seconds

    def add(self, more: Sequence[Candidate], *, always: bool = False) -> None:
        """Predict these too, as far as the budget has time to measure their families; ``always``: whatever time is left."""
        if not self.candidates and not more:
            rule = "there is a schedule of the sizes asked for, and at least one example for each microbatch"
            raise ArgumentError("jaxpp.tune(...)", rule, "no candidate", "allow more schedules, or other counts")
        self.candidates += more
        known = {*self.costs, *self.left_out}
        self._measure(dict.fromkeys(candidate.family for candidate in more if candidate.family not in known), always=always)
        if not self.costs:
            raise next(iter(self.left_out.values()))
        for candidate in more:
            if candidate.family in self.costs:
                self.search.seconds(candidate)

    def _measure(self, families: Iterable[Family], *, always: bool = False) -> None:
        waiting, budget = list(families), self.limits.seconds
        most = len(waiting) if self.limits.families is None or always else self.limits.families
        last = max(0, len(waiting) - most)
        self.bar.total += len(waiting) - last
        while waiting:
            if not always and (len(waiting) <= last or self._is_spent()):
                self.unseen += waiting
                return
            family = self._next(waiting)
            waiting.remove(family)
            self.bar.set_description(family.words)
            try:
                self.costs[family] = self.machine.costs(family)
            except JaxppError as error:
                if is_of_loss(error):
                    raise
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
        if self.limits.seconds is None and self.limits.families is None:
            return waiting[0]
        return min((candidate for candidate in self.candidates if candidate.family in waiting), key=self._promise).family

    def _promise(self, candidate: Candidate) -> float:
        other = nearest(candidate.family, tuple(self.costs))
        if (candidate, other) not in self.promised:
            guess = estimate(candidate.family, other, self.costs[other], candidate.schedule.num_ranks)
            self.promised[candidate, other] = self._seconds(candidate, guess)
        return self.promised[candidate, other]

    def _fitting(self, ordered: Iterable[Candidate]) -> list[Candidate]:
        """The first few of those that fit; what cannot be compiled is left out before any runs."""
        return list(itertools.islice(self.search.fitting(ordered), max(1, self.limits.num_measured)))

    def improve(self, space: Space) -> None:
        """Look at what the best few become with cuts for their schedules, and schedules for their cuts; and at the best then."""
        seen = set[Candidate]()
        for _ in range(_ROUNDS):
            ordered = self.search.quickest()
            widths = {candidate.stages_per_rank: candidate for candidate in reversed(ordered)}  # the best of each
            for candidate in dict.fromkeys([*self._fitting(ordered), *widths.values()]):
                if candidate not in seen:
                    self.bar.set_description(f"improving {candidate.schedule.name}")
                    self._improve(candidate, space)
                seen.add(candidate)

    def _improve(self, candidate: Candidate, space: Space) -> None:
        if not candidate.is_cut:  # it was predicted with the cuts of a plain schedule, and is to be with its own
            for own in self._cut(candidate):
                self.add([own], always=True)
                del self.search.prices[candidate]
        elif not self._is_spent():
            if space.own_cuts and candidate.balance == "flops":
                cuts = self.machine.cuts(candidate)
                self.add([own for own in self._cut(dataclasses.replace(candidate, balance="cost")) if own.cuts != cuts])
            if AUTO in space.schedules and candidate.schedule.name != AUTO:
                likes = [dataclasses.replace(candidate, remat=remat) for remat in self._kept(candidate)]
                found = [own for like in likes for own in self._made(like)]
                self.to_measure.update(found)
                self.add(found)

    def _cut(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same, cut for its own schedule where cuts depend on that; nothing if it cannot be cut."""
        try:
            yield candidate if candidate.balance == "flops" else dataclasses.replace(candidate, cuts=self.machine.cuts(candidate))
        except JaxppError as error:
            self.left_out[candidate] = error

    def _kept(self, candidate: Candidate) -> Iterable[str]:
        """What stages may keep under a schedule made to measure, which may need less memory than the one of the candidate."""
        own = candidate.family.remat
        saves = self.limits.hbm is not None and any(each.remat == "least" for each in self.candidates)
        return dict.fromkeys(("least", own)) if saves and own == "recompute" else (own,)

    def _made(self, like: Candidate) -> Iterator[Candidate]:
        """One with a schedule made to measure, in no more memory than is there; if that is not known, than this candidate takes."""
        family, hbm = like.family._replace(splits=True), self.limits.hbm
        if family in self.made or not (hbm is None or self.search.weighed(like)):
            return
        self.made.add(family)
        self._measure([] if family in self.costs or family in self.left_out else [family])
        if family not in self.costs:
            return
        kept = self.machine.kept(family)
        held = _residual_peaks(like.schedule, kept)
        room: Sequence[float] = [max(held)] * len(held)
        if hbm is not None:
            room = [hbm - peak + own for peak, own in zip(self.search.peaks(like), held, strict=True)]
        for _ in range(_TRIES):
            schedule = _made_like(like, self.costs[family], kept, room)
            if schedule is None:
                return
            made = dataclasses.replace(like, schedule=schedule)
            if hbm is None or (self.search.weighed(made) and self.search.fits(made)):
                yield from self._cut(made)
                return
            excess = max(self.search.weights.get(made, (hbm,))) - hbm
            room = [each - excess for each in room]

    def result(self, space: Space, *, least: bool = False) -> SearchResult:
        steps = dict[Candidate, tuple[float, ...]]()
        self.bar.total += self.limits.num_measured
        names, made = space.schedules, self.to_measure
        ordered = [candidate for candidate in self.search.quickest() if candidate.schedule.name in names or candidate in made]
        fitting = self._fitting(candidate for candidate in ordered if candidate.is_cut)
        if not fitting and least:
            fitting = [candidate for candidate in self.search.lightest() if candidate in ordered and candidate.is_cut][:1]
        if not fitting:
            raise self._nothing_fits()
        if self.limits.num_measured:
            self.bar.set_description("running " + ", ".join(dict.fromkeys(candidate.schedule.name for candidate in fitting)))
            steps = dict(zip(fitting, self.machine.steps(fitting), strict=True))
            self.bar.update(self.limits.num_measured)
        for candidate in {each.schedule.name: each for each in reversed(ordered)}.values():
            self.search.weighed(candidate)  # the memory of what a table shows, the best of each schedule
        prices, weights = self.search.prices, self.search.weights
        rows = {one: Row(one, prices[one], weights.get(one), *_middle(steps.get(one))) for one in ordered}
        best = rows[min(fitting, key=lambda candidate: rows[candidate].measured or 0.0)]
        return SearchResult(best, tuple(rows.values()), self.costs, self.left_out, tuple(self.unseen))

    def _nothing_fits(self) -> JaxppError:
        lightest = self.search.lightest()
        if not lightest or self.limits.hbm is None:
            return next(reversed(self.left_out.values()))
        need, room = bytes_in_words(max(self.search.peaks(lightest[0]))), bytes_in_words(self.limits.hbm)
        rule = "a pipeline fits if no device holds more than hbm at its peak"
        got = [f"{len(lightest)} candidates, none of which fits into {room}", f"the least is {need}, of {lightest[0].words}"]
        fix = "use more devices or smaller batches, or pass a larger hbm if the devices have it"
        return ArgumentError(f"jaxpp.tune(..., hbm={room!r})", rule, got, fix)


def is_of_loss(error: JaxppError) -> bool:
    """Whether an error is the loss's own, which it has in every pipeline."""
    return isinstance(error, LossError) and error.parts[0] == "loss_fn"


def _middle(seconds: Sequence[float] | None) -> tuple[float | None, tuple[float, float] | None]:
    """The median, and between which times the middle half lies."""
    if seconds is None:
        return None, None
    low, median, high = map(float, np.quantile(seconds, (0.25, 0.5, 0.75)))
    return median, (low, high)


def nearest(family: Family, known: Sequence[Family]) -> Family:
    """The measured family that is most like another one; the first if several are."""

    def distance(other: Family) -> tuple[float, float]:
        choices = sum(a != b for a, b in zip(family[2:], other[2:], strict=True))
        return choices, sum(abs(math.log(a / b)) for a, b in zip(family[:2], other[:2], strict=True))

    return min(known, key=distance)


def estimate(family: Family, other: Family, costs: StepCosts, num_ranks: int) -> StepCosts:
    """What a family may cost, by what another one does; it decides which family is measured next, and nothing else.

    Computing and sending grow with a stage and a microbatch, handing over does not; recomputing costs one more forward.
    """
    part = other.num_stages / family.num_stages
    size = other.num_microbatches * other.replicas / (family.num_microbatches * family.replicas)
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


def _residual_peaks(schedule: Schedule, kept: Sequence[float]) -> tuple[float, ...]:
    """The most bytes of residuals that each rank holds at once, where each stage keeps so many of a microbatch."""
    change = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}
    rows = [[change[action.kind] * kept[action.stage] for action in row] for row in schedule.rows]
    return tuple(max(itertools.accumulate(row), default=0) for row in rows)


def _made_like(like: Candidate, costs: StepCosts, kept: Sequence[float], room: Sequence[float]) -> Schedule | None:
    """The shortest schedule that is found, with as many ranks, stages and microbatches; None if the room is too small for any.

    Where ranks are of unequal width, each stage stays on its rank. ``costs`` are of programs with I and W apart. What the host
    takes to hand actions over is not looked at: the search predicts the step with it.
    """
    schedule = like.schedule
    try:
        return synthesise(
            schedule.num_ranks,
            schedule.num_microbatches,
            stages_per_rank=like.stages_per_rank,
            stage_to_rank=like.family.homes or None,
            forward=costs.actions[Kind.F],
            input_grad=costs.actions[Kind.I],
            weight_grad=costs.actions[Kind.W],
            transfer=costs.transfer or 0,
            residuals=kept,
            room=[max(0.0, each) for each in room],
            effort=_EFFORT,
        )
    except ScheduleError:  # not even one microbatch fits
        return None
