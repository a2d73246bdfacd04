"""Why a candidate was chosen: one sentence for each choice, from its neighbours that differ in this choice alone.

Each neighbour was simulated with costs that were measured. Why it takes longer is told by the part of the step that grows most: the
computing, the bubble, transfers, or the dispatch. A neighbour that would be faster does not fit, or was slower when it ran.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.candidate import Candidate
from jaxpp.tuner.predict import Parts, alone, parts
from jaxpp.tuner.search import Found, Row

__all__ = ["reasons", "time_in_words"]

_PARTS = {
    "compute": "computing",
    "bubble": "the bubble",
    "sharing": "sharing cores",
    "transfer": "transfers that nothing hides",
    "copies": "copies to the host that nothing hides",
    "dispatch": "waiting for dispatch",
    "rest": "the beginning and the update",
}
_SAME = 5e-4
"""Of a step: a difference that is none."""


class _Choice(NamedTuple):
    """One choice between candidates.

    Attributes:
        what: the choice, as a sentence begins with it.
        value: what a candidate chose.
        words: a value in a sentence.
        fixed: the other choices, which neighbours share.
    """

    what: str
    value: Callable[[Candidate], int | str]
    words: Callable[[int | str], str]
    fixed: Callable[[Candidate], tuple[object, ...]]


def _rest(candidate: Candidate, *without: str) -> tuple[object, ...]:
    """The choices of a candidate but for some."""
    choices = {
        "schedule": candidate.schedule.name,
        "ranks": candidate.schedule.num_ranks,
        "stages": candidate.stages_per_rank,
        "microbatches": candidate.schedule.num_microbatches,
        "remat": candidate.remat,
        "balance": candidate.balance,
    }
    return tuple(value for name, value in choices.items() if name not in without)


_CHOICES = (
    _Choice("Schedule", lambda c: c.schedule.name, str, lambda c: _rest(c, "schedule")),
    _Choice("Microbatches", lambda c: c.schedule.num_microbatches, str, lambda c: _rest(c, "microbatches")),
    _Choice("Stages a rank", lambda c: c.stages_per_rank, str, lambda c: _rest(c, "stages", "schedule")),
    _Choice("Remat", lambda c: c.remat, repr, lambda c: _rest(c, "remat")),
    _Choice("Balance", lambda c: c.balance, repr, lambda c: _rest(c, "balance")),
    _Choice("Ranks", lambda c: c.schedule.num_ranks, str, lambda _: ()),
)


def reasons(found: Found, hbm: int | None, processes: Sequence[int] = ()) -> tuple[str, ...]:
    """The sentences: first how the choice ran, then one for each choice that there was.

    Args:
        found: what a search found.
        hbm: the bytes that each device has, if that is known.
        processes: as for ``predict``.
    """
    best, said = found.best, list[str]()
    for choice in _CHOICES:
        near = [row for row in found.rows if _is_neighbour(choice, row.candidate, best.candidate)]
        if not near:  # where nothing differs in this choice alone, the others are compared as they are
            near = [row for row in found.rows if choice.value(row.candidate) != choice.value(best.candidate)]
        if near:
            said.append(_sentence(choice, near, found, hbm, processes))
        elif choice.what not in ("Balance", "Ranks"):
            said.append(_only(choice, best, hbm))
    return (*_ran(found), *said, *_one_device(found))


def _is_neighbour(choice: _Choice, other: Candidate, best: Candidate) -> bool:
    return choice.value(other) != choice.value(best) and choice.fixed(other) == choice.fixed(best)


def _named(choice: _Choice, row: Row) -> str:
    return f"{choice.what}: {choice.words(choice.value(row.candidate))}"


def _only(choice: _Choice, best: Row, hbm: int | None) -> str:
    if choice.what != "Remat" or best.candidate.remat != "least":
        return f"{_named(choice, best)}, the only choice that was looked at."
    if hbm is not None and best.peak is not None:
        room = f"the fullest device holds {bytes_in_words(best.peak)} of {bytes_in_words(hbm)}"
        return f"{_named(choice, best)}, since {room}, so nothing needs to be saved."
    return f"{_named(choice, best)}, since no hbm is given or reported that it would have to fit into."


def _sentence(choice: _Choice, near: Sequence[Row], found: Found, hbm: int | None, processes: Sequence[int]) -> str:
    """One sentence about a choice: what the neighbours would take instead."""
    best, told = found.best, list[str]()
    for row in _worth_telling(choice, near, best):
        words = f"with {choice.words(choice.value(row.candidate))}{_by(choice, row, best)}"
        told.append(f"{words} {_compared(row, found, hbm, processes)}")
    return f"{_named(choice, best)}; {'; '.join(told)}."


def _by(choice: _Choice, row: Row, best: Row) -> str:
    """In what else a neighbour differs, if it does."""
    one, other = row.candidate, best.candidate
    differ = [one.schedule.name] * (one.schedule.name != other.schedule.name and choice.what != "Schedule")
    if choice.what != "Microbatches" and one.schedule.num_microbatches != other.schedule.num_microbatches:
        count = one.schedule.num_microbatches
        differ.append(f"{count} microbatch{'es' * (count != 1)}")
    if choice.what != "Remat" and one.remat != other.remat:
        differ.append(f"remat={one.remat!r}")
    return f" ({', '.join(differ)})" * bool(differ)


def _worth_telling(choice: _Choice, near: Sequence[Row], best: Row) -> Iterator[Row]:
    """Of numbers of microbatches the next below and above; else the best neighbour, and the best that was not slower."""
    if choice.what == "Microbatches":
        own = best.candidate.schedule.num_microbatches
        counts = {row.candidate.schedule.num_microbatches: row for row in reversed(near)}
        below, above = [n for n in counts if n < own], [n for n in counts if n > own]
        yield from (counts[n] for n in [*([max(below)] if below else []), *([min(above)] if above else [])])
        return
    faster = [row for row in near if row.predicted < best.predicted * (1 - _SAME)]
    slower = [row for row in near if row not in faster]
    yield from faster[:1]
    yield from slower[: 1 if choice.what != "Remat" else None]


def _compared(row: Row, found: Found, hbm: int | None, processes: Sequence[int]) -> str:
    """What a step would take, beside that of the best: longer, and why; or shorter, and why it was not chosen."""
    best = found.best
    ratio = row.predicted / best.predicted
    too_much = hbm is not None and row.peak is not None and row.peak > hbm
    holds = f"a device would hold {bytes_in_words(row.peak or 0)} of {bytes_in_words(hbm or 0)}"
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
    now, then = (parts(each.candidate, found.costs[each.candidate.family], processes) for each in (best, row))
    name, a, b = max(zip(Parts._fields, now, then, strict=True), key=lambda each: each[2] - each[1])
    return f"{more} ({_PARTS[name]}: {time_in_words(b)} instead of {time_in_words(a)})"


def _ran(found: Found) -> Iterable[str]:
    best = found.best
    step = f"{best.candidate.words}: a step takes {time_in_words(best.predicted)} by prediction"
    if best.measured is None:
        return (f"{step}; it did not run.",)
    others = sum(row.measured is not None for row in found.rows) - 1
    off = _percent(abs(best.predicted / best.measured - 1))
    fastest = f", the fastest of {others + 1} candidates that ran" * bool(others)
    return (f"{step}, {time_in_words(best.measured)} when it ran (the prediction is {off} off){fastest}.",)


def _one_device(found: Found) -> Iterable[str]:
    """What one device would take for the same work, if that is a question."""
    best = found.best.candidate
    if best.schedule.num_ranks == 1 or any(row.candidate.schedule.num_ranks == 1 for row in found.rows):
        return ()
    seconds = alone(best, found.costs[best.family])
    ratio = seconds / found.best.predicted
    if ratio >= 1:
        return (f"One device alone would take {ratio:.2g} times as long, by the same costs.",)
    faster = f"One device alone would be faster by the same costs ({time_in_words(seconds)} a step)"
    return (f"{faster}: pass num_ranks=(1, {best.schedule.num_ranks}) to have it looked at.",)


def _percent(part: float) -> str:
    return f"{100 * part:.0f}%" if part >= 0.095 else f"{100 * part:.2g}%" if part >= 1e-3 else "less than 0.1%"


def time_in_words(seconds: float) -> str:
    """A time as people say it, with three digits: ``12.3 ms``."""
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
