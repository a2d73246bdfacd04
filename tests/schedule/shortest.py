"""The shortest schedule there is, by an integer program: what ``synthesise`` is measured against where sizes are small.

Each action has a start, and each pair of actions of a rank whose order is not known has a binary. What comes before a forward
decides how many residuals are alive beside its own. HiGHS solves a few dozen actions in seconds.
"""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxpp.schedule import Action, Kind, dependencies

KINDS = (Kind.F, Kind.I, Kind.W)


class Program:
    """The columns (starts, the makespan, binaries) and rows of the program; every backward is I and W."""

    def __init__(self, owner, num_microbatches):
        self.owner = owner
        self.actions = [Action(s, kind, i) for s in range(len(owner)) for kind in KINDS for i in range(num_microbatches)]
        self.start = {action: k for k, action in enumerate(self.actions)}
        self.end = len(self.actions)
        open_pairs = [pair for pair in itertools.combinations(self.actions, 2) if self.same(*pair) and not self.known(*pair)]
        self.binary = {pair: self.end + 1 + k for k, pair in enumerate(open_pairs)}
        self.size = self.end + 1 + len(self.binary)
        self.rows, self.least = [], []

    def same(self, a, b):
        return self.owner[a.stage] == self.owner[b.stage]

    def known(self, a, b):
        """Whether ``a`` comes before ``b`` in some shortest schedule: microbatches are alike, so a stage may keep their order."""
        first = a.stage == b.stage and a.microbatch <= b.microbatch and KINDS.index(a.kind) <= KINDS.index(b.kind)
        return first and a != b

    def comes_before(self, a, b):
        """Whether ``a`` comes before ``b``, as a constant and terms in binaries."""
        if (a, b) in self.binary:
            return 0, [(self.binary[a, b], 1)]
        if (b, a) in self.binary:
            return 1, [(self.binary[b, a], -1)]
        return int(self.known(a, b)), []

    def at_least(self, value, terms):
        row = np.zeros(self.size)
        for column, factor in terms:
            row[column] += factor
        self.rows.append(row)
        self.least.append(value)

    def wait(self, costs, horizon):
        """The clock: what an action needs has arrived, and one action of a rank ends before the next starts."""
        times = dict(zip(KINDS, (costs["forward"], costs["input_grad"], costs["weight_grad"]), strict=True))
        takes, start, present = {a: times[a.kind][a.stage] for a in self.actions}, self.start, frozenset(self.actions)
        for action in self.actions:
            self.at_least(takes[action], [(self.end, 1), (start[action], -1)])
            for need in dependencies(action, len(self.owner), present):
                hop = 0 if self.same(need, action) else costs["transfer"][min(need.stage, action.stage)]
                self.at_least(takes[need] + hop, [(start[action], 1), (start[need], -1)])
        for a, b in itertools.permutations(self.actions, 2):
            if self.same(a, b) and self.known(a, b):
                self.at_least(takes[a], [(start[b], 1), (start[a], -1)])
        for (a, b), first in self.binary.items():
            self.at_least(takes[a] - horizon, [(start[b], 1), (start[a], -1), (first, -horizon)])
            self.at_least(takes[b], [(start[a], 1), (start[b], -1), (first, horizon)])

    def hold(self, residuals, room):
        """Memory: the residuals of a forward, and of those before it that have not ended."""
        for forward in (action for action in self.actions if action.kind == Kind.F):
            left, used = room[self.owner[forward.stage]] - residuals[forward.stage], []
            for other in self.actions:
                if other != forward and self.same(other, forward) and other.kind != Kind.I:
                    size = residuals[other.stage] * (1 if other.kind == Kind.F else -1)
                    constant, terms = self.comes_before(other, forward)
                    left -= size * constant
                    used += [(column, -size * factor) for column, factor in terms]
            self.at_least(-left - 1e-6, used)


def shortest(owner, num_microbatches, costs, room, known):
    """The least makespan; ``known`` is that of some schedule."""
    horizon = 1.01 * known  # some room for rounding
    program = Program(owner, num_microbatches)
    program.wait(costs, horizon)
    program.hold(costs["residuals"], room)
    place = np.arange(program.size)
    solved = milp(
        (place == program.end).astype(float),
        integrality=(place > program.end).astype(int),
        bounds=Bounds(0, np.where(place > program.end, 1, horizon)),
        constraints=LinearConstraint(np.array(program.rows), np.array(program.least), np.inf),
    )
    assert solved.status == 0, solved.message
    return solved.fun
