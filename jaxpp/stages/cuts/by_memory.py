"""Where to cut for equal memory: the device that holds most should hold as little as possible.

A stage holds its parameters, gradients and optimizer state once, and its residuals as often as there are microbatches between
forward and backward. If every stage has a device of its own, a dynamic program finds the least for the fullest device, else cuts
are moved one at a time. What a stage would keep is estimated from one trace of the whole loss: every equation carries its spine
position into the pullback, which tells at which positions the backward reads each value. Stages that run one hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var
from jaxtyping import Float

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import Cuts, balance, balance_within
from jaxpp.stages.cuts.cut_loss import uncut
from jaxpp.stages.graph import Piece
from jaxpp.stages.jaxpr import Atom, aval_of, variables
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.program import Role
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.stage import BACKWARD, StageCode

MEMORY_SLACK = 0.02  # How much more than the least possible the fullest device may hold, for fewer bytes across boundaries
_MOST_PLACES = 512  # How many positions are looked at; of a longer spine only some, those at which the fewest bytes cross
_BEGINNINGS = 32  # From how many cuts the search begins where stages share devices
_POWER = 16  # Loads of devices are compared by the sum of so high a power that the largest decides, then the next


class Use(NamedTuple):
    """Bytes that a stage holds once if it runs at least one of some spine positions."""

    num_bytes: float
    positions: tuple[int, ...]  # where they are needed, in order


@dataclass(frozen=True)
class StageBytes:
    """What stages hold, besides what the loss says."""

    of_user: tuple[tuple[float, ...], ...]  # for each stage, bytes of each parameter leaf if it uses it, its gradient included
    of_owner: tuple[tuple[float, ...], ...]  # for each stage, bytes of each leaf if it owns it, besides: the optimizer's state
    num_kept: tuple[int, ...]  # for each stage, of how many microbatches it holds what is kept when its device holds most
    policies: tuple[RematPolicy, ...]  # what the forward of each stage keeps
    devices: tuple[int, ...]  # the number of each stage's device

    def fullest(self, stages: Sequence[StageCode], owner: Sequence[int]) -> float:
        """The bytes of the fullest device, from what the stages of a cut keep."""
        sizes = [
            sum(used[leaf] + owned[leaf] * (owner[leaf] == code.index) for leaf in code.params) + count * code.kept
            for code, count, used, owned in zip(stages, self.num_kept, self.of_user, self.of_owner, strict=True)
        ]
        return self.largest(sizes)

    def largest(self, of_stage: Sequence[float]) -> float:
        """The bytes of the fullest device, from those of the stages."""
        return float(np.bincount(self.devices, of_stage).max())


def balance_memory(loss: TracedLoss, held: StageBytes) -> Cuts:
    """Cut for the least memory on the device that holds most, then as ``balance`` does."""
    num_stages = len(held.devices)
    flops = balance(loss, num_stages)
    if num_stages == 1:
        return flops
    stretches = _Stretches(loss, held, _places(loss, flops))
    at = stretches.least(flops)
    sizes = stretches.sizes(at)
    limit = (1 + MEMORY_SLACK) * held.largest(sizes)
    room = np.asarray(sizes) * limit / np.bincount(held.devices, sizes)[list(held.devices)]
    return balance_within(loss, stretches.first(room))


def _places(loss: TracedLoss, flops: Cuts) -> tuple[int, ...]:
    size = len(loss.spine)
    allowed = [k for k in range(1, size) if k not in loss.barred]
    if len(allowed) > _MOST_PLACES:
        groups = np.array_split(np.asarray(allowed), _MOST_PLACES)
        allowed = [int(min(group, key=loss.boundary_bytes.__getitem__)) for group in groups]
    return (0, *sorted({*allowed, *flops}), size)


class _Stretches:
    """What each stretch of the spine holds as each of the stages; stretches are named by the numbers of their two ends."""

    def __init__(self, loss: TracedLoss, held: StageBytes, places: tuple[int, ...]):
        self.held, self.places = held, places
        sizes = list(zip(held.of_user, held.of_owner, strict=True))
        weights = {each: self._table(_param_uses(loss, *each)) for each in set(sizes)}
        kept = {policy: self._kept(loss, policy) for policy in set(held.policies)} if any(held.num_kept) else {}
        stages = zip(sizes, held.num_kept, held.policies, strict=True)
        self.tables = [weights[each] + count * kept[policy] if count else weights[each] for each, count, policy in stages]

    def _table(self, uses: Sequence[Use]) -> Float[np.ndarray, " starts ends"]:
        places, count = np.asarray(self.places), len(self.places)
        changes = np.zeros((count + 1, count + 1))
        for num_bytes, positions in uses:
            before = -1
            for at in positions:  # stretches that begin after the position before, and in which this position is
                low, high = np.searchsorted(places, (before, at), side="right")
                changes[low, high] += num_bytes
                changes[high, high] -= num_bytes
                before = at
        return changes.cumsum(axis=0).cumsum(axis=1)[:count, :count]

    def _kept(self, loss: TracedLoss, policy: RematPolicy) -> Float[np.ndarray, " starts ends"]:
        """What the forward of a stage keeps; one that computes things again holds the activations that it begins with."""
        table = self._table(kept_uses(loss, policy))
        if not policy.recomputes:
            return table
        return table + np.asarray([loss.boundary_bytes[k] if k else 0 for k in self.places], float)[:, None]

    def sizes(self, at: Sequence[int]) -> list[float]:
        return [float(table[a, b]) for table, a, b in zip(self.tables, (0, *at[:-1]), at, strict=True)]

    def first(self, room: np.ndarray) -> np.ndarray:
        """``first[stage, end]``: where the stage may begin at the earliest that ends at a position, with so many bytes of room."""
        places = np.asarray(self.places)
        first = np.tile(np.arange(places[-1] + 1), (len(self.tables), 1))
        for stage, (table, most) in enumerate(zip(self.tables, room, strict=True)):
            fits = table <= most * (1 + 1e-9)
            first[stage, places] = np.where(fits.any(axis=0), places[fits.argmax(axis=0)], places)
        return first

    def least(self, flops: Cuts) -> tuple[int, ...]:
        equal = self._smallest(np.ones(len(self.tables)))
        devices = np.asarray(self.held.devices)
        if len(set(self.held.devices)) == len(devices):
            return equal
        by_flops = tuple(int(k) for k in np.searchsorted(self.places, (*flops, self.places[-1])))
        drawn = np.random.default_rng(0).exponential(size=(_BEGINNINGS, len(devices)))  # each stage another part of its device
        starts = [equal, by_flops, *(self._smallest(sizes / np.bincount(devices, sizes)[devices]) for sizes in drawn)]
        return min(map(self._moved, starts), key=lambda at: self.held.largest(self.sizes(at)))

    def _smallest(self, parts: np.ndarray) -> tuple[int, ...]:
        count = len(self.places)
        best = np.where(np.arange(count) == 0, 0.0, np.inf)
        later = np.tril_indices(count)  # a stage ends after it begins
        came = []
        for table, part in zip(self.tables, parts, strict=True):
            largest = np.maximum(best[:, None], table / part)
            largest[later] = np.inf
            came.append(largest.argmin(axis=0))
            best = largest.min(axis=0)
        ends = [count - 1]
        for origin in reversed(came[1:]):
            ends.append(int(origin[ends[-1]]))
        return tuple(reversed(ends))

    def _moved(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """The ends after moving one of them at a time, as long as that lowers what the fullest devices hold."""
        devices, ends = np.asarray(self.held.devices), list(at)
        score = float((np.bincount(devices, self.sizes(ends)) ** _POWER).sum())
        while True:
            before = score
            for stage in range(len(ends) - 1):
                low = ends[stage - 1] if stage else 0
                inside = np.arange(low + 1, ends[stage + 1])
                loads = np.bincount(devices, self.sizes(ends))[:, None].repeat(len(inside), axis=1)
                loads[devices[stage]] += self.tables[stage][low, inside] - self.tables[stage][low, ends[stage]]
                following = self.tables[stage + 1][:, ends[stage + 1]]
                loads[devices[stage + 1]] += following[inside] - following[ends[stage]]
                scores = (loads**_POWER).sum(axis=0)
                if scores.min() < score * (1 - 1e-12):
                    ends[stage], score = int(inside[scores.argmin()]), float(scores.min())
            if score == before:
                return tuple(ends)


def kept_uses(loss: TracedLoss, kept: RematPolicy) -> list[Use]:
    """The values but batch leaves that a microbatch keeps from forward to backward, and where the backward reads them."""
    programs, where = uncut(loss, kept)
    traced = programs.traced.graph
    piece = programs.pieces.get(BACKWARD, Piece())
    passing = {var for var, ref in programs.refs.items() if ref.role in (Role.COTANGENT, Role.BATCH)} | programs.lasting
    held = [var for var in piece.inputs if var not in passing]
    sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in held}
    read_at: dict[Var, set[int]] = {var: set() for var in held}
    for i in piece.eqns:
        eqn = traced.eqns[i]
        needs = frozenset[Var]().union(*(sources.get(var, frozenset()) for var in variables(eqn.invars)))
        for var in needs:
            read_at[var].update(where[i])
        if i in programs.again or i in programs.free:  # computed again: who reads the result reads what it is made of
            sources.update((var, needs) for var in eqn.outvars)
    makers = traced.producers()
    for var, at in read_at.items():
        if not at and var in makers:
            at.update(where[makers[var]])
    return [Use(count_bytes(aval_of(var)), tuple(sorted(at))) for var, at in read_at.items() if at]


def _param_uses(loss: TracedLoss, of_user: Sequence[float], of_owner: Sequence[float]) -> list[Use]:
    """What parameters take on the stages that use them, and besides on the first of these."""
    number: dict[Atom, int] = {var: leaf for leaf, var in enumerate(loss.params)}
    rows = [(leaf, 0, start, stop, at) for leaf, start, stop, at in loss.reads]
    known = {leaf for leaf, *_ in rows}
    rows += [  # along other axes than the first
        (number[leaf], axis, start, stop, loss.position[layers.result])
        for layers in loss.layers
        for leaf, start, stop, axis in layers.rows
        if layers.result in loss.position and number.get(leaf, -1) not in {-1, *known}
    ]
    uses = []
    for leaf, axis, start, stop, at in rows:
        part = (stop - start) / max(1, aval_of(loss.params[leaf]).shape[axis])
        uses.append(Use(part * (of_user[leaf] + of_owner[leaf]), (at,)))
    divided, positions = {leaf for leaf, *_ in rows}, dict[int, list[int]]()
    for k, leaves in enumerate(loss.param_uses):
        for leaf in leaves - divided:
            positions.setdefault(leaf, []).append(k)
    for leaf, at in positions.items():
        uses += [Use(of_user[leaf], tuple(at)), Use(of_owner[leaf], tuple(at[:1]))]
    return uses
