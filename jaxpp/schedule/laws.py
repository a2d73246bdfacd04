"""The laws of a schedule, and what to say when one is broken.

1. Each stage runs each microbatch's forward once, and its backward once: one B, or one I and one W.
2. It runs them on the rank that owns the stage.
3. The rows do not wait for one another in a circle.

Numbers have no gaps: with stages 0, 1 and 5, stage 5 is out of range.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import Row, Times, dependencies

__all__ = ["check_complete", "check_runs", "count", "owners"]

_BITS = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_WHOLE = frozenset({1 | 2, 1 | 4 | 8})
_MOST_LINES = 12
_RUN = 8


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
    needs = _needs(rows, stage_to_rank, begun)
    cycle = _shortest_cycle(needs)
    lines = [_waits(action, needed, needs) for action, needed in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    cells = {(rank, k) for rank, row in enumerate(rows) for k, action in enumerate(row) if action in cycle}
    raise ScheduleError(
        f"schedule {name!r}",
        "the rows must not wait for one another in a circle",
        lines,
        "order each row so that what an action needs can run before it",
        _picture(rows, cells, {}),
    )


def _needs(rows: Sequence[Row], stage_to_rank: Sequence[int], begun: Sequence[int]) -> dict[Action, list[Action]]:
    """What each action that never ran waits for, of those that never ran: its dependencies, then the one before it in its row."""
    present = frozenset(action for row in rows for action in row)
    stuck = {action for row, n in zip(rows, begun, strict=True) for action in row[n:]}
    needs: dict[Action, list[Action]] = {}
    for row, n in zip(rows, begun, strict=True):
        for k in range(n, len(row)):
            found = [need for need in dependencies(row[k], len(stage_to_rank), present) if need in stuck]
            needs[row[k]] = [*found, *([row[k - 1]] if k > n and row[k - 1] not in found else [])]
    return needs


def _shortest_cycle(needs: Mapping[Action, list[Action]]) -> list[Action]:
    """The fewest actions of which each waits for the next and the last for the first."""
    best: list[Action] = []
    for root in needs:
        before: dict[Action, Action] = {}
        depth = {root: 1}
        queue = deque([root])
        while queue:
            action = queue.popleft()
            if best and depth[action] >= len(best):
                break
            if root in needs[action]:
                best = [action]
                while best[0] != root:
                    best.insert(0, before[best[0]])
                break
            for need in needs[action]:
                if need not in depth:
                    depth[need], before[need] = depth[action] + 1, action
                    queue.append(need)
    assert best, "rows that are stuck wait in a circle"
    return best


def _waits(action: Action, needed: Action, needs: Mapping[Action, list[Action]]) -> str:
    in_row = needs[action][-1] == needed and needed not in needs[action][:-1] and not _depends(action, needed)
    return f"{action} stands after {needed} in its row" if in_row else f"{action} needs {needed}"


def _depends(action: Action, needed: Action) -> bool:
    """Whether ``action`` needs ``needed`` whatever the rows."""
    if action.microbatch != needed.microbatch:
        return False
    if action.kind == Kind.F:
        return needed == (action.stage - 1, Kind.F, action.microbatch)
    if action.kind == Kind.W:
        return needed == (action.stage, Kind.I, action.microbatch)
    return (needed.stage, needed.kind) in {(action.stage, Kind.F), (action.stage + 1, Kind.B), (action.stage + 1, Kind.I)}


def _picture(rows: Sequence[Row], marked: Collection[tuple[int, int]], missing: Mapping[int, Sequence[str]]) -> str:
    """The rows, ``>bad<`` cells marked, missing ones at the end; long stretches without either are left out."""
    lines = []
    for rank, row in enumerate(rows):
        cells: list[str] = []
        plain: list[str] = []

        def flush(cells: list[str] = cells, plain: list[str] = plain) -> None:
            left_out = len(plain) - _RUN
            cells += plain if left_out <= 1 else [*plain[: _RUN // 2], f"({left_out} more)", *plain[-_RUN // 2 :]]
            plain.clear()

        for k, action in enumerate(row):
            if (rank, k) in marked:
                flush()
                cells.append(f">{action}<")
            else:
                plain.append(str(action))
        flush()
        gone = missing.get(rank, ())
        cells += [f">{cell} missing<" for cell in gone[:_RUN]]
        cells += [f"({len(gone) - _RUN} more missing)"] if len(gone) > _RUN else []
        lines.append(f"rank {rank}: " + " ".join(cells))
    return "\n".join(lines)
