"""The passes of a generation, as what is profiled: the same prompts are generated again and again, up to a number of passes."""

from collections.abc import Callable
from typing import NamedTuple

from jaxpp.forward.observed.memory import PassKind, group_aval, prompt_aval, ring_liveness
from jaxpp.forward.ring import AHEAD, Ring
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.profile.profile import RingPass
from jaxpp.observe.profile.record import Work, join_plans, schedule_of
from jaxpp.plan.plan import Plan
from jaxpp.runtime.execute import Observer
from jaxpp.types import Tree

__all__ = ["Begun", "RingRuns"]


class Begun(NamedTuple):
    """A pass that was begun.

    Attributes:
        group: for which group.
        num_tokens: how many tokens it takes of each sequence.
        num_made: how many tokens it makes that somebody wants.
        is_prompt: whether it is a chunk of a prompt.
    """

    group: int
    num_tokens: int
    num_made: int
    is_prompt: bool


class RingRuns(Work):
    """Generations of the same prompts.

    Args:
        ring: what they run.
        generate: begins a generation whose passes the observer sees, goes to its end, and returns the passes that were begun.
    """

    def __init__(self, ring: Ring, generate: Callable[[Observer | None], list[Begun]]):
        self.engine, self._ring, self._generate = ring.alone.engine, ring, generate
        begun = generate(None)
        self.passes = _numbered(begun)
        awaits = {number: each.awaits for number, each in enumerate(self.passes) if each.awaits >= 0}
        plans = [kind.passes.prepare(kind.batch)[0].plan for kind in self._kinds()]
        self.plan: Plan = join_plans(plans, range(len(plans)), awaits)
        self.schedule = schedule_of(self.plan, self.engine.options.schedule.stage_to_rank, "ring")

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Generate once; all tokens are read, so there is nothing left to wait for."""
        del watched
        self._generate(observer)
        return ()

    def watched_plan(self) -> None:
        """The passes are compiled for a generation, which asks none of them whether it is done."""

    def ledger(self) -> Ledger:
        """What memory holds, from shapes."""
        ring = self._ring
        return Ledger(ring_liveness(self._kinds(), ring.alone, ring.together, AHEAD * ring.num_groups), (), {})

    def _kinds(self) -> list[PassKind]:
        """Each pass, and how many carries wait meanwhile."""
        ring, found = self._ring, list[PassKind]()
        size, holding = ring.carries.size, set[int]()
        for each in self.passes:
            own = each.is_prompt and size > 1  # it runs on a carry beside that of its group
            waiting = len(holding if own else holding - {each.group})
            passes, batch = (ring.alone, prompt_aval(each.num_tokens)) if each.is_prompt else (ring.together, group_aval(size))
            found.append(PassKind(f"group {each.group}", passes, batch, waiting))
            holding.add(each.group)
        return found


def _numbered(begun: list[Begun]) -> tuple[RingPass, ...]:
    """The passes with the turns of their groups, and the passes whose tokens they take."""
    turns: dict[int, int] = {}
    last: dict[int, int] = {}
    found = []
    for number, (group, num_tokens, num_made, is_prompt) in enumerate(begun):
        turn = turns[group] = turns.get(group, -1) + 1
        found.append(RingPass(group, turn, num_tokens, num_made, is_prompt, -1 if is_prompt else last.get(group, -1)))
        last[group] = number
    return tuple(found)
