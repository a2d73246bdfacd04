"""Which residuals leave their device for host memory between forward and backward, and when they come back.

A rank of 1F1B holds the residuals of up to as many microbatches as there are ranks, of GPipe those of all, while it works on one at
a time. So residuals go out when their forward has run, and come back while the last action before their backward runs: each copy
has an action of its own to run beside, and delays nothing if it is shorter. Residuals stay where leaving would free nothing, as
with fewer than three actions between forward and backward, and those of the next microbatches in line stay, too (``except_last``).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind

_BETWEEN = 3  # actions at least between F and its backward: beside the copy out, beside the copy back, and while they are away


class Offloaded(NamedTuple):
    """The residuals of one stage and microbatch that wait in host memory."""

    forward: Action  # after which they go out
    ahead: Action  # of the same rank, beside which they come back
    backward: Action  # the action after it, the first that reads them: B or I, or W of a stage without an I


def offloads(rows: Sequence[Sequence[Action]], except_last: Sequence[int | None]) -> tuple[Offloaded, ...]:
    """What is offloaded, rank by rank in the order of the backwards.

    ``except_last`` is for each stage how many microbatches' residuals stay because their backwards are next; None: all stay.

    Example:
        >>> from jaxpp.schedule.registry import make
        >>> found = offloads(make("1f1b", num_ranks=4, num_microbatches=5).rows, (1, 1, 1, 1))
        >>> [" ".join(map(str, each)) for each in found]
        ['0F1 0F4 0B1', '0F2 0B1 0B2', '0F3 0B2 0B3', '0F4 0B3 0B4']
    """
    found: list[Offloaded] = []
    for row in rows:
        leaving: list[Offloaded] = []
        forwards: dict[tuple[int, int], int] = {}
        backwards: dict[int, list[int]] = {}
        for number, action in enumerate(row):
            stage, kind, microbatch = action
            if kind == Kind.F:
                forwards[stage, microbatch] = number
            elif (begin := forwards.pop((stage, microbatch), None)) is not None:
                before = [k for k in backwards.setdefault(stage, []) if k > begin]
                backwards[stage].append(number)
                least = except_last[stage]
                if least is not None and len(before) >= least and number - begin - 1 >= _BETWEEN:
                    leaving.append(Offloaded(row[begin], row[number - 1], action))
        found += _helping(row, leaving) if len(backwards) == 1 else leaving
    return tuple(found)


def _helping(row: Sequence[Action], leaving: Sequence[Offloaded]) -> list[Offloaded]:
    """Of what could leave a rank of one stage, what lowers the most residuals at once during a B, an I or a W.

    A forward needs less memory than a backward besides, so it may hold as many residuals as any backward.
    """
    number = {action: k for k, action in enumerate(row)}
    last = {action.microbatch: k for k, action in enumerate(row)}
    alive = [0] * len(row)
    for action in row:
        if action.kind == Kind.F:
            for k in range(number[action], last[action.microbatch] + 1):
                alive[k] += 1
    away = {each: range(number[each.forward] + 1, number[each.ahead]) for each in leaving}
    for k in itertools.chain.from_iterable(away.values()):
        alive[k] -= 1
    most: dict[Kind, int] = {}
    for action, count in zip(row, alive, strict=True):
        for kind in {action.kind, Kind.F}:
            most[kind] = max(count, most.get(kind, 0))
    found = []
    for each in leaving:
        if all(alive[k] < most[row[k].kind] for k in away[each]):
            for k in away[each]:
                alive[k] += 1
        else:
            found.append(each)
    return found
