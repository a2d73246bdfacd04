"""Where to cut: ``num_stages - 1`` positions on the spine of the traced loss.

Problem: a pipeline is as fast as its largest stage, every stage should have something to do, and little should cross between them.
Idea: satisfy these in that order. The yardstick is the least that the largest stage can cost over all cuts. Of the cuts whose
largest stage costs at most ``SLACK`` more, keep those with the fewest stages that lack real work, a matrix product or a parameter;
of these, take the one that sends the fewest bytes. Mechanism: the yardstick by bisection, the rest by one dynamic program over
prefix sums. On a transformer the cheap places are between blocks, so the blocks come out whole without anyone naming them.

A second trace of the same model (another batch shape, an evaluation loss) must leave every parameter with its owner, so it is cut
where it fits the owners best (``align``); what does not fit is copied.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxpp.errors import CutError
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import multiplies
from jaxpp.stages.loss.traced_loss import STATE_RULE, TracedLoss

__all__ = ["SLACK", "Cuts", "align", "balance", "balance_for_sends", "balance_within", "least_largest", "owners", "prefix_sums"]

Cuts = tuple[int, ...]
"""``cuts[k]`` is the spine position at which stage k + 1 begins."""

SLACK = 0.05
"""How much more than the least possible the largest stage may cost, for fewer bytes."""
REAL_WORK = 0.01
"""The part of the mean cost below which a stage counts as empty; where that cannot be avoided, a hundredth of it is worse."""


def balance(loss: TracedLoss, num_stages: int) -> Cuts:
    """Cut for the smallest largest stage, then for stages that all have something to do, then for the fewest bytes.

    Raises:
        CutError: there are fewer spine equations than stages, or model state that cannot be divided leaves too few.
    """
    _check_size(loss, num_stages)
    if num_stages == 1:
        return ()
    total = prefix_sums(loss)
    least = least_largest(loss, num_stages)
    if least is None:
        raise _divided(loss, num_stages)
    first = np.searchsorted(total, total - (1 + SLACK) * least * (1 + 1e-12))
    return balance_within(loss, np.tile(first, (num_stages, 1)))


def balance_within(loss: TracedLoss, first: Int[np.ndarray, "stages ends"]) -> Cuts:
    """Cut for stages that all have something to do, then for the fewest bytes.

    Args:
        loss: what to cut.
        first: ``first[stage, end]``, where the stage may begin at the earliest if it ends at a spine position.

    Raises:
        CutError: there are no such cuts.
    """
    num_stages = len(first)
    return _cheapest(loss, num_stages, first, np.zeros(first.shape), poor=_Poor.of(loss, prefix_sums(loss), num_stages))


def balance_for_sends(loss: TracedLoss, hops: Float[np.ndarray, "stages ends"], share: float, most: float) -> Cuts | None:
    """Cut for stages that all have something to do, then for the cheapest sends; None if no cut has stages as small as ``most``.

    Args:
        loss: what to cut.
        hops: ``hops[stage, end]``, what a send across the boundary at ``end`` costs that follows the stage; 0 after the last stage.
        share: how much of the sends across its boundaries counts as a stage's own cost.
        most: the largest cost of a stage.
    """
    num_stages, total = len(hops), prefix_sums(loss)
    price = hops * (max(loss.boundary_bytes) / max(hops.max(), 1e-300))
    before = np.concatenate([np.zeros((1, hops.shape[1])), hops[:-1]])

    def barred(stage: int, starts: slice, end: int) -> np.ndarray:
        cost = total[end] - total[starts] + share * (before[stage, starts] + hops[stage, end])
        return np.where(cost <= most, 0.0, np.inf)

    first = np.tile(np.searchsorted(total, total - most * (1 + 1e-12)), (num_stages, 1))
    poor = _Poor.of(loss, total, num_stages)
    try:
        return _cheapest(loss, num_stages, first, np.zeros(hops.shape), poor=poor, price=price, barred=barred)
    except CutError:
        return None


def least_largest(loss: TracedLoss, num_stages: int) -> float | None:
    """The least that the largest of ``num_stages`` stages can cost, over all cuts; None if model state leaves too few places."""
    total = prefix_sums(loss)
    allowed = [k for k in range(1, len(total) - 1) if k not in loss.barred]
    if len(allowed) < num_stages - 1:
        return None
    ends = np.asarray([*allowed, len(total) - 1])
    sums = total[ends]

    def reach(limit: float) -> float:
        """The largest stage if each is as long as ``limit`` lets it be; infinite if that takes more stages than there are."""
        start, largest, at = 0.0, 0.0, -1
        for _ in range(num_stages):
            last = int(np.searchsorted(sums, start + limit, side="right")) - 1
            if last <= at:
                return np.inf
            largest, start, at = max(largest, float(sums[last] - start)), float(sums[last]), last
            if at == len(ends) - 1:
                return largest
        return np.inf

    low, high = 0.0, float(total[-1])
    for _ in range(100):
        middle = (low + high) / 2
        found = reach(middle)
        low, high = (low, min(middle, found)) if np.isfinite(found) else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high


class _Poor:
    """Says which stages have no real work, by how many hundreds too little, no matrix product, or no parameter.

    Args:
        total: prefix sums of the cost.
        floor: the cost below which a stage counts as empty.
        wanted: the spine positions that read a parameter, and the positions that multiply matrices.
        price: what each fault counts, in bytes: more than all that could cross.
    """

    def __init__(self, total: np.ndarray, floor: float, wanted: Sequence[Sequence[int]], price: float):
        self._total, self._floor, self._price = total, floor, price
        ends = np.arange(len(total))
        self._last = [np.asarray([-1, *found])[np.searchsorted(np.asarray(found, int), ends)] for found in wanted]

    @classmethod
    def of(cls, loss: TracedLoss, total: np.ndarray, num_stages: int) -> "_Poor":
        """What is poor of a loss cut into so many stages."""
        reading = [k for k, uses in enumerate(loss.param_uses) if uses]
        products = [k for k, i in enumerate(loss.spine) if multiplies(loss.graph.eqns[i])]
        price = 4.0 * num_stages * (max(loss.boundary_bytes, default=0) + 1.0)
        return cls(total, REAL_WORK * float(total[-1]) / num_stages, (reading, products), price)

    def scores(self, starts: slice, end: int) -> np.ndarray:
        """What the stages from each of ``starts`` to ``end`` are to be charged."""
        work = np.maximum(self._total[end] - self._total[starts], 1e-9)
        idle = np.ceil(np.log(np.maximum(self._floor / work, 1.0)) / np.log(100.0))
        first = np.arange(starts.start, starts.stop)
        return self._price * (idle + sum(first > last[end] for last in self._last))


def align(loss: TracedLoss, num_stages: int, owner: Sequence[int], state_owner: Sequence[int] = (), *, train: bool = True) -> Cuts:
    """Cut another trace of a model so that parameters and model state stay with their owners, as far as possible.

    Raises:
        CutError: there are fewer spine equations than stages, in training.
    """
    size = len(loss.spine)
    if size < num_stages and not train:
        return tuple(min(stage, size) for stage in range(1, num_stages))
    _check_size(loss, num_stages)
    moved = np.zeros((num_stages, size + 1))
    both = [(loss.params, loss.param_uses, owner), (loss.state, loss.state_uses, state_owner)]
    for leaves, all_uses, home in both if len(state_owner) == len(loss.state) else both[:1]:
        weights = [count_bytes(var.aval) for var in leaves]
        for k, uses in enumerate(all_uses):
            for stage in range(num_stages):
                moved[stage, k + 1] += sum(weights[leaf] for leaf in uses if home[leaf] != stage)
    return _cheapest(loss, num_stages, np.zeros((num_stages, size + 1), dtype=int), 8.0 * np.cumsum(moved, axis=1))


def owners(loss: TracedLoss, cuts: Cuts) -> tuple[int, ...]:
    """The stage that owns each parameter leaf: the first that uses it; an unused leaf stays with the leaf before it."""
    found: dict[int, int] = {}
    for k, uses in enumerate(loss.param_uses):
        stage = int(np.searchsorted(cuts, k, side="right"))
        for leaf in uses:
            found.setdefault(leaf, stage)
    result: list[int] = []
    for leaf in range(len(loss.params)):
        result.append(found.get(leaf, result[-1] if result else 0))
    return tuple(result)


def prefix_sums(loss: TracedLoss) -> np.ndarray:
    """The cost before each spine position; every equation costs a little, so that no two positions are the same."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(loss.costs) + 1e-9)])


def _check_size(loss: TracedLoss, num_stages: int) -> None:
    size, noun = len(loss.spine), loss.noun
    if size < num_stages and not (num_stages == 1 and not loss.is_loss):
        reads = f"check that {'loss_fn' if loss.is_loss else 'fn'} reads its batch"
        raise CutError(
            f"num_stages={num_stages}",
            f"each stage needs at least one equation of the {noun} that works on data",
            f"{num_stages} stage{'s' * (num_stages > 1)} and a {noun} that can be cut into {size} at most",
            f"pass num_stages={max(size, 1)}{' or fewer' * (size > 1)}, or {reads}" if num_stages > 1 else reads,
        )


def _divided(loss: TracedLoss, num_stages: int) -> CutError:
    """The error for model state that leaves too few places for a stage to begin."""
    paths = list(loss.barred.values())
    lengths = sorted(((paths.count(path), path) for path in set(paths)), reverse=True)
    return CutError(
        f"num_stages={num_stages}",
        STATE_RULE,
        [f"model_state {path}: {length} places where no stage can begin" for length, path in lengths],
        "update the state where it is read, or pass fewer stages",
    )


def _cheapest(
    loss: TracedLoss,
    num_stages: int,
    first: np.ndarray,
    misplaced: np.ndarray,
    *,
    poor: _Poor | None = None,
    price: np.ndarray | None = None,
    barred: Callable[[int, slice, int], np.ndarray] | None = None,
) -> Cuts:
    """The cuts with the fewest bytes: across boundaries, and of parameters away from their owner.

    Equal bytes are decided by neatness (between modules rather than inside one), then by an even spread of cost.

    Args:
        loss: what to cut.
        num_stages: stages.
        first: a stage that ends at position e may start from ``first[stage, e]``.
        misplaced: ``misplaced[stage, e]``, bytes moved if positions 0 to e were all on that stage (prefix sums).
        poor: charges for stages without real work, a matrix product or a parameter.
        price: ``price[stage, e]``, instead of the bytes that cross where the stage ends at e.
        barred: of a stage, its starts and its end: infinite where it may not be so.

    Raises:
        CutError: there are none, because model state leaves too few places for a stage to begin.
    """
    size = len(loss.spine)
    price = np.tile(np.asarray(loss.boundary_bytes, dtype=float), (num_stages, 1)) if price is None else price
    price = price + 1e-3 * np.asarray(_untidiness(loss))
    price[:, list(loss.barred)] = np.inf
    price[:, size] = 0.0
    total = np.concatenate([[0.0], np.cumsum(loss.costs)])
    evenness = 1e-4 * (num_stages / max(total[-1], 1.0)) ** 2
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    for stage in range(num_stages):
        following = np.full(size + 1, np.inf)
        origin = np.zeros(size + 1, dtype=int)
        last = stage == num_stages - 1
        for end in [size] if last else range(stage + 1, size - (num_stages - stage - 1) + 1):
            low = max(int(first[stage, end]), stage)
            if low >= end or not np.isfinite(price[stage, end]):
                continue
            starts = slice(low, end)
            scores = best[starts] + evenness * (total[end] - total[starts]) ** 2 + misplaced[stage, end] - misplaced[stage, starts]
            if poor is not None:
                scores = scores + poor.scores(starts, end)
            if barred is not None:
                scores = scores + barred(stage, starts, end)
            choice = int(np.argmin(scores))
            following[end] = scores[choice] + price[stage, end]
            origin[end] = low + choice
        best = following
        came.append(origin)
    if not np.isfinite(best[size]):
        raise _divided(loss, num_stages)
    cuts, at = [], size
    for origin in reversed(came):
        at = int(origin[at])
        cuts.append(at)
    return tuple(reversed(cuts[:-1]))


def _untidiness(loss: TracedLoss) -> list[int]:
    """How deep inside a module each position lies; one between modules or right before a parameter's use is tidier."""
    paths = [tuple(filter(None, loss.graph.names[i].split("/"))) for i in loss.spine]
    untidy = [0] * (len(paths) + 1)
    for k in range(1, len(paths)):
        pairs = zip(paths[k - 1], paths[k], strict=False)
        shared = next((depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(paths[k - 1]), len(paths[k])))
        untidy[k] = 2 * shared + (paths[k - 1] == paths[k]) + (not loss.param_uses[k])
    return untidy
