"""Rows that wait for one another for ever: the shortest cycle of such waits, for the message."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpp.errors import ScheduleError
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.clock import ActionRow, Times, dependencies
from jaxpp.schedule.validate import mark_cells

__all__ = ["check_runs"]

_MOST_ROOTS = 1000


def check_runs(
    name: str, rows: Sequence[ActionRow], stage_to_rank: Sequence[int], times: Times, num_groups: int | None = None
) -> None:
    """Check that a replay came to the end of every row.

    Raises:
        ScheduleError: with the shortest cycle of actions that wait for one another (see ``shortest_cycle``), marked in the rows.
    """
    begun = [len(starts) for starts in times.starts]
    if begun == [len(row) for row in rows]:
        return
    cycle = _Stuck(rows, begun, len(stage_to_rank), num_groups).shortest_cycle()
    cells = {(rank, k) for rank, row in enumerate(rows) for k, action in enumerate(row) if action in cycle}
    raise ScheduleError(
        f"schedule {name!r}",
        "the rows must not wait for one another in a circle",
        [f"{action} {link.words(action)}" for action, link in cycle.items()],
        "order each row so that what an action needs can run before it",
        mark_cells(rows, cells, {}),
    )


class _Link(NamedTuple):
    """What an action waits for: something that it depends on, or something that stands before it in its row."""

    need: Action
    depends: bool

    def words(self, action: Action) -> str:
        """What the action waits for; only in a ring does a forward need one of another microbatch."""
        if not self.depends:
            return f"stands after {self.need} in its row"
        is_token = action.kind == Kind.F and action.microbatch != self.need.microbatch
        return f"needs the token of {self.need}" if is_token else f"needs {self.need}"


class _Stuck:
    """The actions that never ran. Each waits for the actions that it depends on, and for the actions before it in its row."""

    def __init__(self, rows: Sequence[ActionRow], begun: Sequence[int], num_stages: int, num_groups: int | None):
        self.rows = [row[n:] for row, n in zip(rows, begun, strict=True)]
        self.place = {action: (rank, k) for rank, row in enumerate(self.rows) for k, action in enumerate(row)}
        present = frozenset(action for row in rows for action in row)
        needs = {action: dependencies(action, num_stages, present, num_groups) for action in self.place}
        self.needs = {action: [need for need in found if need in self.place] for action, found in needs.items()}

    def shortest_cycle(self) -> dict[Action, _Link]:
        """The shortest cycle of actions, each of which waits for the next, and the last for the first.

        In a table with more than a thousand stuck actions: two actions of one row, or the shortest cycle through the first stuck
        action of a rank, which always exists.
        """
        best = self._inverted()
        if not best:
            heads = [row[0] for row in self.rows if row]
            for root in heads if len(self.place) > _MOST_ROOTS else self.place:
                best = self._cycle(root, len(best) or len(self.place) + 1) or best
        return best

    def _inverted(self) -> dict[Action, _Link]:
        """Two actions of one row, the first of which needs the second; nothing if there are none."""
        for action, (rank, k) in self.place.items():
            for need in self.needs[action]:
                if self.place[need] > (rank, k) and self.place[need][0] == rank:
                    return {action: _Link(need, True), need: _Link(action, False)}
        return {}

    def _cycle(self, root: Action, limit: int) -> dict[Action, _Link]:
        """The shortest cycle through ``root`` of fewer than ``limit`` actions; nothing if there is none."""
        paths: dict[Action, dict[Action, _Link]] = {root: {}}
        behind = [0] * len(self.rows)  # how many actions of each row have been reached from an action that stands after them
        level = [root]
        for _ in range(limit - 1):
            further: list[Action] = []
            for action in level:
                for link in self._waits(action, behind):
                    if link.need == root:
                        return {**paths[action], action: link}
                    if link.need not in paths:
                        paths[link.need] = {**paths[action], action: link}
                        further.append(link.need)
            level = further
        return {}

    def _waits(self, action: Action, behind: list[int]) -> Iterator[_Link]:
        yield from (_Link(need, True) for need in self.needs[action])
        rank, k = self.place[action]
        yield from (_Link(before, False) for before in self.rows[rank][behind[rank] : k])
        behind[rank] = max(behind[rank], k)
