"""The rules that a schedule obeys, and the message when one is broken.

1. Each stage runs each microbatch's forward once, and its backward once (one B, or one I and one W) or, of forwards only, never.
2. Each stage runs them on the rank that owns the stage.
3. The passes of a ring are forwards, and split into turns of all groups.
4. The rows do not wait for one another in a cycle; if they do, the message shows the shortest one.
Stages and microbatches are numbered without gaps: with stages 0, 1 and 5, stage 5 is out of range.
"""

import contextlib
import itertools
import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from jaxpp.errors import JaxppError, ScheduleError, is_count, shown
from jaxpp.schedule.action import Action, Kind, parse
from jaxpp.schedule.clock import ActionRow, Times, dependencies

_BITS = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_WHOLE = frozenset({1 | 2, 1 | 4 | 8})
_RUN = 8
_MOST_ROOTS = 1000  # stuck actions, from all of which the shortest cycle is looked for


def check_counts(where: str, counts: Mapping[str, object], error: type[JaxppError] = ScheduleError) -> None:
    """Check counts, by name: whole numbers of at least 1."""
    wrong = {name: value for name, value in counts.items() if not is_count(value, least=1)}
    if wrong:
        meant = [f"{name}={number}" for name, value in wrong.items() if (number := _whole_number(value))]
        fixes = [f"pass {' and '.join(meant)}"] * bool(meant) + ["pass 1 or more"] * (len(meant) < len(wrong))
        got = [f"{name}={shown(value)}" for name, value in wrong.items()]
        raise error(where, "counts are whole numbers of at least 1", got, "; ".join(fixes))


def _whole_number(value: object) -> int:
    """The count that another value says in another type (4.0, "4"); 0 if it says none."""
    if isinstance(value, (str, numbers.Real)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # other text; not a number; infinity
            number = float(value)
            return int(number) if number >= 1 and number == int(number) else 0
    return 0


def count(present: Iterable[int]) -> int:
    """How many of 0, 1, 2, ... are there before the first gap."""
    found, n = set(present), 0
    while n in found:
        n += 1
    return n


def read_rows(name: str, rows: object) -> tuple[ActionRow, ...]:
    """The rows as tuples of actions; each may be given as actions or their text, one by one or in one string."""
    wrong: list[str] = []
    found: list[ActionRow] = []
    for rank, row in enumerate(rows if _is_listing(rows) else [rows]):
        cells = row.split() if isinstance(row, str) else tuple(row) if _is_listing(row) else (row,)
        actions = [_read_cell(cell) for cell in cells]
        wrong += [f"rank {rank}, cell {k}: {cells[k]!r}" for k, action in enumerate(actions) if action is None]
        wrong += [] if actions else [f"rank {rank}: no action"]
        found.append(tuple(action for action in actions if action is not None))
    if wrong or not found:
        rule = "a row holds the actions of its rank, at least one, each an Action or its text <stage><kind><microbatch>"
        fix = "write rows like [['0F0', '0B0'], ['1F0', '1B0']]"
        raise ScheduleError(f"schedule {name!r}", rule, wrong or "no rows", fix)
    return tuple(found)


def _is_listing(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, (str, Action))


def _read_cell(cell: object) -> Action | None:
    if isinstance(cell, str):
        try:
            return parse(cell)
        except ScheduleError:
            return None
    if isinstance(cell, Action) and is_count(cell.stage) and is_count(cell.microbatch) and cell.kind in _BITS:
        plain = type(cell.kind) is Kind and type(cell.stage) is type(cell.microbatch) is int
        return cell if plain else Action(int(cell.stage), Kind(cell.kind), int(cell.microbatch))
    return None


def infer_owners(rows: Sequence[ActionRow]) -> tuple[int, ...]:
    """The rank of each stage: the row that holds most of its actions, the first of equals."""
    votes = Counter((action.stage, rank) for rank, row in enumerate(rows) for action in row)
    best = {stage: rank for (stage, rank), _ in sorted(votes.items(), key=lambda vote: (vote[1], -vote[0][1]))}
    return tuple(best[stage] for stage in range(count(best)))


def check_owners(name: str, stage_to_rank: object, num_ranks: int) -> tuple[int, ...]:
    """The owners as given, each a rank; none if there are none."""
    given = stage_to_rank if stage_to_rank is not None else ()
    if isinstance(given, Sequence) and all(is_count(rank) and rank < num_ranks for rank in given):
        return tuple(map(int, given))
    rule = "stage_to_rank is a sequence that gives each stage the rank of a row"
    got = f"stage_to_rank={stage_to_rank!r}, {num_ranks} rows"
    raise ScheduleError(f"schedule {name!r}", rule, got, f"use whole numbers below {num_ranks}, or leave it out")


def check_complete(name: str, rows: Sequence[ActionRow], stage_to_rank: Sequence[int], num_microbatches: int) -> None:
    """Check rules 1 and 2; the message has every violation, and the rows with the bad cells marked."""
    num_stages = len(stage_to_rank)
    wrong = _outside("stage", rows, num_stages) + _outside("microbatch", rows, num_microbatches)
    marked: set[tuple[int, int]] = set()
    masks = [[0] * num_microbatches for _ in range(num_stages)]
    forwards = all(action.kind == Kind.F for row in rows for action in row)
    whole = {_BITS[Kind.F]} if forwards else _WHOLE
    for rank, row in enumerate(rows):
        for k, action in enumerate(row):
            stage, kind, microbatch = action
            if stage >= num_stages or microbatch >= num_microbatches:
                marked.add((rank, k))
                continue
            if stage_to_rank[stage] != rank:
                marked.add((rank, k))
                wrong.append(f"{action} stands in the row of rank {rank}, its stage belongs to rank {stage_to_rank[stage]}")
            elif masks[stage][microbatch] & _BITS[kind]:
                marked.add((rank, k))
                wrong.append(f"{action}, rank {rank}: a duplicate")
            masks[stage][microbatch] |= _BITS[kind]
    missing: dict[int, list[str]] = {}
    mixed: set[tuple[int, int]] = set()
    for stage, of_stage in enumerate(masks):
        for microbatch, mask in enumerate(of_stage):
            if mask not in whole:
                lacks = _lacking(mask, stage, microbatch, wrong, forwards)
                missing.setdefault(stage_to_rank[stage], []).extend(lacks)
                mixed |= set() if lacks else {(stage, microbatch)}
    if wrong:
        cells = ((rank, k, action) for rank, row in enumerate(rows) for k, action in enumerate(row))
        marked |= {(rank, k) for rank, k, a in cells if a.kind != Kind.F and (a.stage, a.microbatch) in mixed}
        backward = "" if forwards else " and its backward once (B, or I and W)"
        rule = f"each stage runs each microbatch's forward once{backward}, on the rank that owns it"
        fix = "write each action once, in the row of its stage's rank"
        raise ScheduleError(f"schedule {name!r}", rule, wrong, fix, _mark_cells(rows, marked, missing))


def _outside(what: str, rows: Sequence[ActionRow], size: int) -> list[str]:
    beyond = [action for row in rows for action in row if getattr(action, what) >= size]
    if not beyond:
        return []
    found = sorted({getattr(action, what) for action in beyond})
    plural = {"stage": "stages", "microbatch": "microbatches"}[what]
    which = f"{what} {found[0]} is" if len(found) == 1 else f"{plural} {found[0]} to {found[-1]} are"
    more = len(beyond) - _RUN // 2
    cells = ", ".join(map(str, beyond[: _RUN // 2])) + (f" and {more} more" if more > 0 else "")
    return [f"{which} out of range, for there is no {what} {size}: {cells}"]


def _lacking(mask: int, stage: int, microbatch: int, wrong: list[str], forwards: bool) -> list[str]:
    has = {kind for kind, bit in _BITS.items() if mask & bit}
    lacks = [] if Kind.F in has else [f"{stage}F{microbatch}"]
    if not has - {Kind.F}:
        lacks += [] if forwards else [f"{stage}B{microbatch}"]
    elif Kind.B not in has:
        lacks += [f"{stage}{kind}{microbatch}" for kind in (Kind.I, Kind.W) if kind not in has]
    elif len(has - {Kind.F}) > 1:
        both = " beside ".join(f"{stage}{kind}{microbatch}" for kind in _BITS if kind in has and kind != Kind.F)
        wrong.append(f"{both}: stage {stage}, microbatch {microbatch} needs one B, or one I and one W")
    wrong += [f"{cell} is missing" for cell in lacks]
    return lacks


def check_groups(name: str, num_groups: int | None, rows: Sequence[ActionRow], num_microbatches: int) -> int | None:
    """Check rule 3; the number of groups as an int."""
    if num_groups is None:
        return None
    where, got = f"schedule {name!r}", f"num_groups={num_groups!r}, {num_microbatches} passes"
    if not is_count(num_groups, least=1) or num_microbatches % int(num_groups):
        near = [n for n in range(1, num_microbatches + 1) if num_microbatches % n == 0]
        listed = " or ".join(map(str, near)) if len(near) <= 4 else f"{near[0]}, {near[1]}, ... or {near[-1]}"
        rule = "each group of a ring makes a pass in every turn, so the number of groups divides the number of passes"
        raise ScheduleError(where, rule, got, f"pass num_groups={listed}, or leave it out")
    backwards = {(rank, k): a for rank, row in enumerate(rows) for k, a in enumerate(row) if a.kind != Kind.F}
    if backwards:
        rule, fix = "a ring has forwards only", "leave num_groups out, or the backwards"
        wrong = [f"{action}, rank {rank}" for (rank, _), action in backwards.items()]
        raise ScheduleError(where, rule, wrong, fix, _mark_cells(rows, backwards, {}))
    return int(num_groups)


def _mark_cells(rows: Sequence[ActionRow], marked: Collection[tuple[int, int]], missing: Mapping[int, Sequence[str]]) -> str:
    """The rows, ``>bad<`` cells marked, missing ones at the end; what is long and unmarked is left out."""
    touched = {rank for rank, _ in marked} | set(missing)
    lines = []
    for whole, group in itertools.groupby(range(len(rows)), key=lambda rank: rank in touched or len(rows) <= _RUN):
        ranks = list(group)
        if whole:
            lines += [f"rank {rank}: " + " ".join(_cells(rows[rank], rank, marked, missing.get(rank, ()))) for rank in ranks]
        else:
            lines.append(f"ranks {ranks[0]} to {ranks[-1]}: ..." if len(ranks) > 1 else f"rank {ranks[0]}: ...")
    return "\n".join(lines)


def _cells(row: ActionRow, rank: int, marked: Collection[tuple[int, int]], missing: Sequence[str]) -> Iterator[str]:
    for bad, group in itertools.groupby(enumerate(row), key=lambda cell: (rank, cell[0]) in marked):
        cells = [str(action) for _, action in group]
        left_out = len(cells) - _RUN
        if left_out > 1:
            cells = [*cells[: _RUN // 2], f"({left_out} more)", *cells[-_RUN // 2 :]]
        yield from (f">{cell}<" for cell in cells) if bad else cells
    yield from (f">{cell} missing<" for cell in missing[:_RUN])
    if len(missing) > _RUN:
        yield f"({len(missing) - _RUN} more missing)"


def check_runs(
    name: str, rows: Sequence[ActionRow], stage_to_rank: Sequence[int], times: Times, num_groups: int | None = None
) -> None:
    """Check rule 4: that a replay came to the end of every row."""
    stuck = [row[len(starts) :] for row, starts in zip(rows, times.starts, strict=True)]
    place = {action: (rank, k) for rank, row in enumerate(stuck) for k, action in enumerate(row)}
    if not place:
        return
    present = frozenset(action for row in rows for action in row)
    found = {action: dependencies(action, len(stage_to_rank), present, num_groups) for action in place}
    needs = {action: [need for need in wanted if need in place] for action, wanted in found.items()}
    cycle = _shortest_cycle(stuck, place, needs)
    wrong = []
    for action, need in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        if need not in needs[action]:
            wrong.append(f"{action} stands after {need} in its row")
        else:  # only in a ring does a forward need one of another microbatch
            is_token = action.kind == Kind.F and action.microbatch != need.microbatch
            wrong.append(f"{action} needs {'the token of ' * is_token}{need}")
    cells = {(rank, k) for rank, row in enumerate(rows) for k, action in enumerate(row) if action in cycle}
    rule = "the rows must not wait for one another in a circle"
    fix = "order each row so that what an action needs can run before it"
    raise ScheduleError(f"schedule {name!r}", rule, wrong, fix, _mark_cells(rows, cells, {}))


_Places = Mapping[Action, tuple[int, int]]
_Needs = Mapping[Action, Sequence[Action]]


def _shortest_cycle(stuck: Sequence[ActionRow], place: _Places, needs: _Needs) -> list[Action]:
    """The shortest cycle of actions that never ran, each of which waits for the next, and the last for the first.

    An action waits for those that it needs, and for those before it in its row. Where very many are stuck, few cycles are compared.
    """
    best: list[Action] = []
    heads = [row[0] for row in stuck if row]
    for root in heads if len(place) > _MOST_ROOTS else place:
        best = _cycle(root, len(best) or len(place) + 1, stuck, place, needs) or best
    return best


def _cycle(root: Action, limit: int, stuck: Sequence[ActionRow], place: _Places, needs: _Needs) -> list[Action]:
    """The shortest cycle through ``root`` of fewer than ``limit`` actions; nothing if there is none."""
    paths = {root: [root]}
    behind = [0] * len(stuck)  # how many actions of each row have been reached from an action that stands after them
    level = [root]
    for _ in range(limit - 1):
        further: list[Action] = []
        for action in level:
            rank, k = place[action]
            for need in (*needs[action], *stuck[rank][behind[rank] : k]):
                if need == root:
                    return paths[action]
                if need not in paths:
                    paths[need] = [*paths[action], need]
                    further.append(need)
            behind[rank] = max(behind[rank], k)
        level = further
    return []
