"""Why a candidate was chosen: one sentence for each choice, from its neighbours that differ in this choice alone.

Each neighbour was simulated with costs that were measured. Why it takes longer is told by the part of the step that grows most: the
computing, the bubble, transfers, or the dispatch. A neighbour that would be faster does not fit, or was slower when it ran.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.observe.evaluate import Parts, alone, parts
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.knobs import KNOBS, Candidate, Knob
from jaxpp.tuner.search import Row, SearchResult

_PARTS = {
    "compute": "computing",
    "bubble": "the bubble",
    "sharing": "sharing cores",
    "transfer": "transfers that nothing hides",
    "copies": "copies to the host that nothing hides",
    "dispatch": "waiting for dispatch",
    "rest": "the beginning and the update",
}
_ALWAYS = ("schedule", "microbatches", "stages a rank", "remat")  # told first, even of a search in which they had one value
_SAME = 5e-4  # of a step: a difference that is none


def reasons(found: SearchResult, hbm: int | None, processes: Sequence[int] = ()) -> tuple[str, ...]:
    """The sentences: first how the choice ran, then one for each choice that there was."""
    why = _Reasons(found, hbm, processes)
    knobs = sorted(KNOBS, key=lambda knob: (*_ALWAYS, "balance", "ranks").index(knob.name))
    return (why.ran(), *filter(None, map(why.about, knobs)), *why.one_device())


class _Reasons(NamedTuple):
    """Sentences about what a search found; the attributes are the arguments of ``reasons``."""

    found: SearchResult
    hbm: int | None
    processes: Sequence[int]

    def ran(self) -> str:
        best = self.found.best
        step = f"{best.candidate.words}: a step takes {time_in_words(best.predicted)} by prediction"
        if best.measured is None:
            return f"{step}; it did not run."
        others = sum(row.measured is not None for row in self.found.rows) - 1
        off = _percent(abs(best.predicted / best.measured - 1))
        fastest = f", the fastest of {others + 1} candidates that ran" * bool(others)
        return f"{step}, {time_in_words(best.measured)} when it ran (the prediction is {off} off){fastest}."

    def about(self, knob: Knob) -> str:
        """One sentence about a choice: what the neighbours would take instead; empty if there is nothing to say."""
        best = self.found.best.candidate
        others = [row for row in self.found.rows if knob.value(row.candidate) != knob.value(best)]
        fixed = [other for other in KNOBS if other.name not in (knob.name, *knob.turns)]
        near = [row for row in others if all(other.value(row.candidate) == other.value(best) for other in fixed)]
        chosen = f"{knob.name.capitalize()}: {knob.words(knob.value(best))}"
        if not others:
            return f"{chosen}, {self._only(knob)}." if knob.name in _ALWAYS else ""
        told = [
            f"with {knob.words(knob.value(row.candidate))}{_beside(knob, row.candidate, best)} {self._compared(row)}"
            for row in self._worth_telling(knob, near or others)  # where nothing differs in it alone, others as they are
        ]
        return f"{chosen}; {'; '.join(told)}."

    def _only(self, knob: Knob) -> str:
        best = self.found.best
        if knob.name != "remat" or best.candidate.remat != "least":
            return "the only choice that was looked at"
        if self.hbm is None or best.peak is None:
            return "since no hbm is given or reported that it would have to fit into"
        room = f"the fullest device holds {bytes_in_words(best.peak)} of {bytes_in_words(self.hbm)}"
        return f"since {room}, so nothing needs to be saved"

    def _worth_telling(self, knob: Knob, near: Sequence[Row]) -> list[Row]:
        """Of numbers of microbatches the next below and above; else the best neighbour, and the best that was not slower."""
        best = self.found.best
        if knob.name == "microbatches":
            own, counts = best.candidate.schedule.num_microbatches, {}
            for row in reversed(near):
                counts[row.candidate.schedule.num_microbatches] = row
            next_to = [max((n for n in counts if n < own), default=None), min((n for n in counts if n > own), default=None)]
            return [counts[n] for n in next_to if n is not None]
        faster = [row for row in near if row.predicted < best.predicted * (1 - _SAME)]
        slower = [row for row in near if row not in faster]
        return [*faster[:1], *slower[: 1 if knob.name != "remat" else None]]

    def _compared(self, row: Row) -> str:
        """What a step would take, beside that of the best: longer, and why; or shorter, and why it was not chosen."""
        best = self.found.best
        ratio = row.predicted / best.predicted
        too_much = self.hbm is not None and row.peak is not None and row.peak > self.hbm
        holds = f"a device would hold {bytes_in_words(row.peak or 0)} of {bytes_in_words(self.hbm or 0)}"
        if ratio < 1 - _SAME:
            less = f"a step would take {_percent(1 - ratio)} less"
            if too_much:
                return f"{less}, but {holds}"
            if row.measured is not None and best.measured is not None:
                return f"{less} by prediction, but it took {time_in_words(row.measured)} when it ran"
            return f"{less}, but it could not be run"
        if ratio <= 1 + _SAME:
            return f"a step would take as long{f', but {holds}' * too_much}"
        more = f"a step would take {_percent(ratio - 1)} more" if ratio < 2 else f"a step would take {ratio:.2g} times as long"
        name, a, b = max(zip(Parts._fields, self._parts(best), self._parts(row), strict=True), key=lambda part: part[2] - part[1])
        return f"{more} ({_PARTS[name]}: {time_in_words(b)} instead of {time_in_words(a)})"

    def _parts(self, row: Row) -> Parts:
        candidate = row.candidate
        return parts(candidate.schedule, self.found.costs[candidate.family], candidate.offload, self.processes)

    def one_device(self) -> tuple[str, ...]:
        best = self.found.best.candidate
        if any(row.candidate.schedule.num_ranks == 1 for row in self.found.rows):
            return ()
        seconds = alone(best.schedule, self.found.costs[best.family])
        ratio = seconds / self.found.best.predicted
        if ratio >= 1:
            return (f"One device alone would take {ratio:.2g} times as long, by the same costs.",)
        faster = f"One device alone would be faster by the same costs ({time_in_words(seconds)} a step)"
        return (f"{faster}: pass num_ranks=(1, {best.schedule.num_ranks}) to have it looked at.",)


def _beside(knob: Knob, one: Candidate, other: Candidate) -> str:
    knobs = [beside for beside in KNOBS if beside.name in ("schedule", "microbatches", "remat") and beside.name != knob.name]
    differ = [beside.phrase(beside.value(one)) for beside in knobs if beside.value(one) != beside.value(other)]
    return f" ({', '.join(differ)})" * bool(differ)


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%" if part >= 0.095 else f"{100 * part:.2g}%" if part >= 1e-3 else "less than 0.1%"


def time_in_words(seconds: float) -> str:
    """A time as people say it, with three digits: ``12.3 ms``."""
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
