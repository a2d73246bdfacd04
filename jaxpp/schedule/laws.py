"""The laws of a schedule, and what to say when one is broken.

1. Each stage runs each microbatch's forward once, and its backward once: one B, or one I and one W.
2. It runs them on the rank that owns the stage.
3. The rows do not wait for one another in a circle.

Numbers have no gaps: with stages 0, 1 and 5, stage 5 is out of range.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import Row, Times, dependencies

__all__ = ["check_complete", "check_runs", "count", "owners"]

_BITS = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_WHOLE = frozenset({1 | 2, 1 | 4 | 8})
_MOST_LINES = 12
_RUN = 8
_MOST_ROOTS = 1000


def count(numbers: Iterable[int]) -> int:
    """How many of 0, 1, 2, ... are there before the first gap."""
    found, n = set(numbers), 0
    while n in found:
        n += 1
    return n


def owners(rows: Sequence[Row]) -> tuple[int, ...]:
    """The rank of each stage: the row that holds most of its actions, the first of equals."""
    votes = Counter((action.stage, rank) for rank, row in enumerate(rows) for action in row)
    best: dict[int, int] = {}
    for (stage, rank), n in votes.items():
        if stage not in best or n > votes[stage, best[stage]]:
            best[stage] = rank
    return tuple(best[stage] for stage in range(count(best)))


def check_complete(name: str, rows: Sequence[Row], stage_to_rank: Sequence[int], num_microbatches: int) -> None:
    """Laws 1 and 2.

    Raises:
        ScheduleError: with every violation, and the rows with the bad cells marked.
    """
    where, num_stages = f"schedule {name!r}", len(stage_to_rank)
    if not any(rows):
        raise ScheduleError(where, "a schedule needs at least one action", "no action in any row", "fill the rows")
    astray = [rank for rank in stage_to_rank if not 0 <= rank < len(rows)]
    if astray:
        got = f"stage_to_rank={tuple(stage_to_rank)}, {len(rows)} rows"
        raise ScheduleError(where, "each stage belongs to the rank of one row", got, f"use ranks 0 to {len(rows) - 1}")
    wrong: list[str] = []
    marked: set[tuple[int, int]] = set()
    seen: dict[Action, int] = {}
    masks = [[0] * num_microbatches for _ in range(num_stages)]
    for rank, row in enumerate(rows):
        for k, action in enumerate(row):
            stage, kind, microbatch = action
            inside = stage < num_stages and microbatch < num_microbatches
            if inside and action not in seen and stage_to_rank[stage] == rank:
                seen[action] = rank
                masks[stage][microbatch] |= _BITS[kind]
                continue
            marked.add((rank, k))
            wrong.append(_misplaced(action, rank, stage_to_rank, num_microbatches, seen.get(action)))
            if inside and action not in seen:
                masks[stage][microbatch] |= _BITS[kind]
            seen.setdefault(action, rank)
    missing: dict[int, list[str]] = {}
    for stage, of_stage in enumerate(masks):
        for microbatch, mask in enumerate(of_stage):
            if mask not in _WHOLE:
                lacks = _lacking(mask, stage, microbatch, wrong)
                missing.setdefault(stage_to_rank[stage], []).extend(lacks)
                of_this = {a for a in seen if a.stage == stage and a.microbatch == microbatch} if not lacks else set()
                marked |= {(rank, k) for rank, row in enumerate(rows) for k, a in enumerate(row) if a in of_this}
    if wrong:
        more = len(wrong) - _MOST_LINES
        raise ScheduleError(
            where,
            "each stage runs each microbatch's forward once and its backward once (B, or I and W), on the rank that owns it",
            wrong if more <= 0 else [*wrong[:_MOST_LINES], f"... and {more} more"],
            "write each action once, in the row of its stage's rank",
            _picture(rows, marked, missing),
        )


def _misplaced(action: Action, rank: int, owner: Sequence[int], num_microbatches: int, earlier: int | None) -> str:
    if action.stage >= len(owner):
        return f"{action}, rank {rank}: stage {action.stage} is out of range, the stages are 0 to {len(owner) - 1}"
    if action.microbatch >= num_microbatches:
        last = num_microbatches - 1
        return f"{action}, rank {rank}: microbatch {action.microbatch} is out of range, the microbatches are 0 to {last}"
    if earlier is not None:
        return f"{action}, rank {rank}: a duplicate, it stands in the row of rank {earlier} already"
    return f"{action} stands in the row of rank {rank}, its stage belongs to rank {owner[action.stage]}"


def _lacking(mask: int, stage: int, microbatch: int, wrong: list[str]) -> list[str]:
    """The missing actions of one stage and microbatch; adds to ``wrong`` what to say of them."""
    has = {kind for kind, bit in _BITS.items() if mask & bit}
    lacks = [] if Kind.F in has else [f"{stage}F{microbatch}"]
    if not has - {Kind.F}:
        lacks.append(f"{stage}B{microbatch}")
    elif Kind.B not in has:
        lacks += [f"{stage}{kind}{microbatch}" for kind in (Kind.I, Kind.W) if kind not in has]
    elif len(has - {Kind.F}) > 1:
        both = " beside ".join(f"{stage}{kind}{microbatch}" for kind in _BITS if kind in has and kind != Kind.F)
        wrong.append(f"{both}: stage {stage}, microbatch {microbatch} needs one B, or one I and one W")
    wrong += [f"{cell} is missing" for cell in lacks]
    return lacks


def check_runs(name: str, rows: Sequence[Row], stage_to_rank: Sequence[int], times: Times) -> None:
    """Law 3, given how far a replay came.

    Raises:
        ScheduleError: with the shortest circle of actions that wait for one another, marked in the rows.
    """
    begun = [len(starts) for starts in times.starts]
    if begun == [len(row) for row in rows]:
        return
    cycle = _Stuck(rows, begun, len(stage_to_rank)).shortest_cycle()
    cells = {(rank, k) for rank, row in enumerate(rows) for k, action in enumerate(row) if action in cycle}
    raise ScheduleError(
        f"schedule {name!r}",
        "the rows must not wait for one another in a circle",
        [why for _, why in cycle.values()],
        "order each row so that what an action needs can run before it",
        _picture(rows, cells, {}),
    )


Link = tuple[Action, str]
"""What an action waits for, and why."""


class _Stuck:
    """The actions that never ran, of which each waits for others: those it depends on, and those before it in its row."""

    def __init__(self, rows: Sequence[Row], begun: Sequence[int], num_stages: int):
        self.rows = [row[n:] for row, n in zip(rows, begun, strict=True)]
        self.place = {action: (rank, k) for rank, row in enumerate(self.rows) for k, action in enumerate(row)}
        self._num_stages = num_stages
        self._present = frozenset(action for row in rows for action in row)

    def shortest_cycle(self) -> dict[Action, Link]:
        """The fewest actions of which each waits for the next and the last for the first.

        In a very large table: the fewest through the first stuck action of a rank, for there is always such a circle.
        """
        roots = self.place if len(self.place) <= _MOST_ROOTS else [row[0] for row in self.rows if row]
        best: dict[Action, Link] = {}
        for root in roots:
            best = self._cycle(root, len(best) or len(self.place) + 1) or best
        assert best, "rows that are stuck wait in a circle"
        return best

    def _cycle(self, root: Action, limit: int) -> dict[Action, Link] | None:
        """The shortest cycle through ``root``, if it has fewer than ``limit`` actions."""
        reached: dict[Action, Link | None] = {root: None}
        behind = [0] * len(self.rows)  # how many actions of each row have been reached from one that stands after them
        level = [root]
        for _ in range(limit - 1):
            further: list[Action] = []
            for action in level:
                for need, why in self._waits(action, behind):
                    if need == root:
                        return _walk_back(reached, action, (root, why))
                    if need not in reached:
                        reached[need] = (action, why)
                        further.append(need)
            level = further
        return None

    def _waits(self, action: Action, behind: list[int]) -> Iterator[Link]:
        for need in dependencies(action, self._num_stages, self._present):
            if need in self.place:
                yield need, f"{action} needs {need}"
        rank, k = self.place[action]
        for before in self.rows[rank][behind[rank] : k]:
            yield before, f"{action} stands after {before} in its row"
        behind[rank] = max(behind[rank], k)


def _walk_back(reached: Mapping[Action, Link | None], last: Action, closing: Link) -> dict[Action, Link]:
    """The cycle that ``closing`` closes at ``last``, from its first action on."""
    links = [(last, closing)]
    while (step := reached[links[-1][0]]) is not None:
        before, why = step
        links.append((before, (links[-1][0], why)))
    return dict(reversed(links))


def _picture(rows: Sequence[Row], marked: Collection[tuple[int, int]], missing: Mapping[int, Sequence[str]]) -> str:
    """The rows, ``>bad<`` cells marked, missing ones at the end; what is long and unmarked is left out."""
    touched = {rank for rank, _ in marked} | set(missing)
    lines = []
    for shown, group in itertools.groupby(range(len(rows)), key=lambda rank: rank in touched or len(rows) <= _RUN):
        ranks = list(group)
        if shown:
            lines += [f"rank {rank}: " + " ".join(_cells(rows[rank], rank, marked, missing.get(rank, ()))) for rank in ranks]
        else:
            lines.append(f"ranks {ranks[0]} to {ranks[-1]}: ..." if len(ranks) > 1 else f"rank {ranks[0]}: ...")
    return "\n".join(lines)


def _cells(row: Row, rank: int, marked: Collection[tuple[int, int]], missing: Sequence[str]) -> Iterator[str]:
    for bad, group in itertools.groupby(enumerate(row), key=lambda cell: (rank, cell[0]) in marked):
        cells = [str(action) for _, action in group]
        left_out = len(cells) - _RUN
        if bad:
            yield from (f">{cell}<" for cell in cells)
        elif left_out <= 1:
            yield from cells
        else:
            yield from (*cells[: _RUN // 2], f"({left_out} more)", *cells[-_RUN // 2 :])
    yield from (f">{cell} missing<" for cell in missing[:_RUN])
    if len(missing) > _RUN:
        yield f"({len(missing) - _RUN} more missing)"
