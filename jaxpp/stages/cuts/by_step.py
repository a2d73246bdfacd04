"""Where to cut for the shortest step: what counts is the longest chain of the schedule, not the largest stage.

What F, I and W of each equation of the loss cost is read off one trace of the whole loss and its pullback (``step_costs``), so
frozen parameters, cotangents that nobody wants and what is computed again cost what they cost. The lengths of the step under many
cuts at once come from the schedule's clock. Few cuts are all tried. Of many, boundaries are moved, alone and in groups, from the
cuts with the most even stages, as long as that shortens the step. Of steps that are ``SLACK`` apart the neatest cut is taken,
but for a gain that is worth its bytes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import Var
from jaxtyping import Float, Int

from jaxpp.stages.cuts.balance import SLACK, UNEVEN, Cuts, balance, balance_within, faults, least_largest, prefix_sums
from jaxpp.stages.cuts.cut_loss import uncut
from jaxpp.stages.estimate import Rates, SpineCosts, seconds_of
from jaxpp.stages.graph import Graph, Piece
from jaxpp.stages.jaxpr import variables
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.remat import RECOMPUTE, RematPolicy
from jaxpp.stages.stage import BACKWARD, FORWARD

_GAIN = 0.01  # How much faster each microbatch must become for more bytes, or a cut within a module
_WIDER = 2.0  # How many times the bytes may cross for that, as a stage also keeps what it receives
_SLACKS = (SLACK, SLACK / 2, SLACK / 4)  # How much larger than the least possible the largest stage may be, the neatest first
_FEW = 4096  # Up to how many cuts all are tried
_AT_ONCE = 1024  # How many are tried at once
_NEAR = 16  # Up to how many places a boundary is moved by every distance
_GROUPS = 4  # How many neighbouring boundaries are moved together at most

PerStage = Float[np.ndarray, "cuts stages"]
Lengths = Callable[[PerStage, PerStage, PerStage, Float[np.ndarray, "cuts boundaries"]], Float[np.ndarray, " cuts"]]
"""The lengths of the step under many cuts: from what F, I and W of each stage take, and a send across each boundary."""


@dataclass(frozen=True)
class Links:
    """What sends between neighbouring stages take."""

    per_send: tuple[float, ...]  # seconds of a send without its bytes, for each boundary
    per_byte: tuple[float, ...]  # seconds of a byte, for each boundary

    def scaled(self, factor: float) -> "Links":
        """The same in another unit of time."""
        return Links(*(tuple(factor * seconds for seconds in costs) for costs in (self.per_send, self.per_byte)))


def step_costs(loss: TracedLoss, kept: RematPolicy, rates: Rates) -> SpineCosts:
    """What F, I and W of each spine equation take, where forwards keep what ``kept`` says; a function has only F.

    What comes from no equation of the spine costs nothing, such as the sum of the gradients of a leaf's rows: the cut divides that.
    """
    if loss.remat is not None:  # one checkpoint around all: its pullback would be one equation
        loss, kept = replace(loss, remat=None), RECOMPUTE
    programs, where = uncut(loss, kept, train=loss.is_loss)
    graph = programs.traced.graph
    costs, end = np.zeros((3, len(loss.spine))), len(loss.spine)
    forward, backward = (programs.pieces.get(color, Piece()) for color in (FORWARD, BACKWARD))
    for i, seconds in _seconds(graph, forward, rates):
        for at in where[i]:
            costs[0, at] += seconds
    lowest, reached = dict[int, int](), dict[Var, int]()  # the first position that needs what an equation, or a value, is for
    for i in reversed(backward.eqns):
        lowest[i] = min((reached[var] for var in graph.eqns[i].outvars if var in reached), default=end)
        for var in variables(graph.eqns[i].invars):
            reached[var] = min((reached.get(var, end), lowest[i], *where[i]))
    for i, seconds in _seconds(graph, backward, rates):
        for at in where[i]:
            costs[1 if lowest[i] < at else 2, at] += seconds
    rows = (tuple(row) for row in costs.tolist())
    return SpineCosts(next(rows), next(rows), next(rows), min(reached.values(), default=end))


def _seconds(graph: Graph, piece: Piece, rates: Rates) -> Iterator[tuple[int, float]]:
    seconds = seconds_of([graph.eqns[i] for i in piece.eqns], [*piece.outputs, *graph.outputs], rates)
    yield from zip(piece.eqns, seconds, strict=True)


def balance_step(loss: TracedLoss, num_stages: int, links: Links, lengths: Lengths) -> Cuts:
    """Cut for the shortest step; ``links`` are in the unit of the loss's costs.

    If cuts into even stages make the step at most ``SLACK`` longer than the shortest, the neatest of them is taken, with few bytes;
    but a more even one where each microbatch becomes at least 1% faster by that, even if no send is hidden, and at most twice the
    bytes cross. If there is none, the cut is one whose stages are about as large as those of the shortest. No stage is ``UNEVEN``
    times the mean if none need be, as it would hold as many times the memory. The step is never longer than with equal FLOPs.
    """
    if num_stages == 1:
        return balance(loss, num_stages)
    even = [balance(loss, num_stages, slack) for slack in _SLACKS] + [balance(replace(loss, step=None), num_stages)]
    search = _Search(loss, links, lengths, even[0])
    times, paces, shortest = search.times(np.asarray(even)), search.paces(np.asarray(even)), search.shortest(even)
    limit = min((1 + SLACK) * float(search.times(np.asarray([shortest]))[0]), float(times[0]), float(times[-1]))
    if (good := np.flatnonzero(times <= limit)).size:
        chosen, moved = good[0], np.asarray(loss.boundary_bytes)[np.asarray(even)].sum(axis=1)
        for k in good[1:]:
            pays = paces[k] < (1 - _GAIN) * paces[chosen] and moved[k] <= _WIDER * moved[good[0]]
            chosen = k if pays else chosen
        return even[chosen]
    total = prefix_sums(loss)
    sizes = np.diff(total[[0, *shortest, len(loss.spine)]])
    for slack in _SLACKS:
        first = [np.searchsorted(total, total - (1 + slack) * size * (1 + 1e-12)) for size in sizes]
        near = balance_within(loss, np.asarray(first))
        if search.times(np.asarray([near]))[0] <= limit:
            return near
    return shortest


class _Search:
    """Looks for the cut with the shortest step, among those whose stages lack no more than those of ``like``."""

    def __init__(self, loss: TracedLoss, links: Links, lengths: Lengths, like: Cuts):
        costs = loss.timed or SpineCosts(loss.flops, (0.0,) * len(loss.spine), (0.0,) * len(loss.spine), 0)
        self._lengths, self._first, self._size = lengths, costs.first, len(loss.spine)
        self._before = [np.concatenate([[0.0], np.cumsum(each)]) for each in costs[:3]]
        moved = np.asarray(loss.boundary_bytes, float)
        self._hops = [send + byte * moved for send, byte in zip(links.per_send, links.per_byte, strict=True)]
        self._faults = faults(loss, len(like) + 1)
        self._most = self._lacking(np.asarray([[0, *like, self._size]]))[0]
        self._total = np.sum(self._before, axis=0)
        mean = float(self._total[-1]) / (len(like) + 1)
        self._largest = max(UNEVEN * mean, (1 + SLACK) * (least_largest(loss, len(like) + 1) or 0.0)) * (1 + 1e-9)
        self._allowed = np.asarray([k for k in range(1, self._size) if k not in loss.barred])

    def times(self, cuts: Int[np.ndarray, "cuts boundaries"]) -> Float[np.ndarray, " cuts"]:
        """The length of the step with each of some cuts; infinite where stages lack more than they need to, or one is too large."""
        ends = self._ends(cuts)
        forward, input_grad, weight_grad = (np.diff(before[ends], axis=1) for before in self._before)
        none = ends[:, :-1] <= self._first  # stages whose input wants no cotangent
        weight_grad, input_grad = np.where(none, weight_grad + input_grad, weight_grad), np.where(none, 0.0, input_grad)
        hops = np.stack([hop[cuts[:, k]] for k, hop in enumerate(self._hops)], axis=1)
        refused = (self._lacking(ends) > self._most) | (np.diff(self._total[ends], axis=1).max(axis=1) > self._largest)
        return np.where(refused, np.inf, self._lengths(forward, input_grad, weight_grad, hops))

    def paces(self, cuts: Int[np.ndarray, "cuts boundaries"]) -> Float[np.ndarray, " cuts"]:
        """What each microbatch takes on the slowest stage, if that also waits for all that it sends and receives."""
        hops = np.pad(np.stack([hop[cuts[:, k]] for k, hop in enumerate(self._hops)], axis=1), ((0, 0), (1, 1)))
        return (np.diff(self._total[self._ends(cuts)], axis=1) + 2 * (hops[:, :-1] + hops[:, 1:])).max(axis=1)

    def _ends(self, cuts: np.ndarray) -> np.ndarray:
        return np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self._size)))

    def _lacking(self, ends: np.ndarray) -> np.ndarray:
        return self._faults(ends[:, :-1], ends[:, 1:]).sum(axis=1)

    def shortest(self, starts: Sequence[Cuts]) -> Cuts:
        """The cut with the shortest step: of all, if they are few, else of those that are reached from the ``starts``.

        One more start is the best of all cuts at as few places, far from each other, as makes them few.
        """
        boundaries, places = len(starts[0]), self._allowed
        while math.comb(len(places), boundaries) > _FEW:
            places = self._thinned(places, max(boundaries, len(places) * 15 // 16 - 1))
            if len(places) == boundaries:
                break
        coarse = self._best(np.asarray(list(itertools.combinations(places.tolist(), boundaries))))
        if len(places) == len(self._allowed):
            return coarse[0]
        found = [self._moved(start) for start in dict.fromkeys([*starts, coarse[0]])]
        return min(found, key=lambda each: each[1])[0]

    def _thinned(self, places: np.ndarray, count: int) -> np.ndarray:
        """So many of the places, with about as much work between any two."""
        work = self._total[places]
        wanted = np.linspace(work[0], work[-1], count)
        nearest = np.abs(work[:, None] - wanted).argmin(axis=0)
        left = np.setdiff1d(np.arange(len(places)), nearest)
        chosen = np.concatenate([np.unique(nearest), left[: count - len(np.unique(nearest))]])
        return places[np.sort(chosen)]

    def _best(self, cuts: np.ndarray) -> tuple[Cuts, float]:
        times = np.concatenate([self.times(cuts[at : at + _AT_ONCE]) for at in range(0, len(cuts), _AT_ONCE)])
        best = int(times.argmin())
        return tuple(cuts[best].tolist()), float(times[best])

    def _moved(self, cuts: Cuts) -> tuple[Cuts, float]:
        """The cut after moving boundaries, as long as that shortens the step."""
        at = np.searchsorted(self._allowed, cuts)
        time = float(self.times(np.asarray([cuts]))[0])
        while True:
            following, better = self._best(self._allowed[self._neighbours(at)])
            if better >= time * (1 - 1e-9):
                return tuple(self._allowed[at].tolist()), time
            at, time = np.searchsorted(self._allowed, following), better

    def _neighbours(self, at: Int[np.ndarray, " boundaries"]) -> Int[np.ndarray, "cuts boundaries"]:
        """The cuts, by the numbers of their places, with one boundary elsewhere, or some neighbouring ones moved together."""
        count, found = len(self._allowed), []
        for width in range(1, min(_GROUPS, len(at)) + 1):
            for low in range(len(at) - width + 1):
                group = slice(low, low + width)
                least = at[low - 1] + 1 if low else 0
                most = at[low + width] - 1 if low + width < len(at) else count - 1
                for by in _distances(int(least - at[low]), int(most - at[low + width - 1])):
                    moved = at.copy()
                    moved[group] += by
                    found.append(moved)
        return np.unique(np.asarray(found), axis=0)


def _distances(least: int, most: int) -> list[int]:
    """Distances from ``least`` (below 0, or 0) to ``most``: all small ones, then ever fewer."""
    steps = [*range(1, _NEAR), *(int(_NEAR * 1.25**k) for k in range(40))]
    return [*(-by for by in steps if by <= -least), *(by for by in steps if by <= most), 0]
