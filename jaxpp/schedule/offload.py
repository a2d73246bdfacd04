"""Which residuals leave their device for host memory between forward and backward, and when they come back.

Problem: a rank of 1F1B holds the residuals of up to as many microbatches as there are ranks, of GPipe those of all, while it works
on one microbatch at a time. Idea: residuals that are not needed soon wait in host memory, and copies run beside the computation.
Mechanism, read off the rows alone: residuals go out when their forward has run, and come back while the last action before their
backward runs. Each copy has an action of its own to run beside, so copies that are shorter than an action delay nothing. Residuals
stay where leaving would free nothing: with fewer than three actions between forward and backward they would be away during none,
and some ranks hold as many at another time anyway, as the last three of 1F1B do. Those of the next microbatches in line stay, too
(``except_last``).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Action, Kind

_BETWEEN = 3
"""The fewest actions of a rank between a forward and its backward for which residuals leave: one beside the copy out, one beside
the copy back, and one during which they are away."""


class Offloaded(NamedTuple):
    """The residuals of one stage and microbatch that wait in host memory.

    They go out after ``forward``, come back while ``ahead`` runs on the same rank, and the action after it, ``backward``, is the
    first that reads them: B or I, or W of a stage without an I.
    """

    forward: Action
    ahead: Action
    backward: Action


def offloads(rows: Sequence[Sequence[Action]], except_last: Sequence[int | None]) -> tuple[Offloaded, ...]:
    """What is offloaded, rank by rank in the order of the backwards.

    ``except_last`` says for each stage of how many microbatches at a time the residuals stay on the device: those whose backward
    is next. With 1, residuals stay if no other backward of the stage runs before theirs. None: nothing is offloaded.

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
    """Of what could leave a rank of one stage, what makes the most residuals at once fewer, during a B, an I or a W.

    A forward needs less memory than a backward besides, so it may hold as many residuals as any backward. A rank with several
    stages may hold more for one than for another, which the rows do not tell; there all that could leave does.
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
