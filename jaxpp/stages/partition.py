"""Where to cut: ``num_stages - 1`` positions on the spine of the traced loss.

Problem: stages should take equally long, and little should cross between them. Idea: among all cuts whose stages are within
``SLACK`` of the mean (``LOOSE``, if that saves arrays and a third of the bytes), take the one that sends the fewest; where there
are none, weigh bytes against balance. Mechanism: one small dynamic program over prefix sums. On a transformer the cheap places are
between blocks, so the blocks come out whole without anyone naming them.

A user who wants to say where gives names (``resolve``). A second trace of the same model (another batch shape, an evaluation loss)
must leave every parameter with its owner, so it is cut where it fits the owners best (``align``); what does not fit is copied.
"""

import difflib
from collections.abc import Sequence

import numpy as np

from jaxpp.errors import CutError
from jaxpp.stages.cost import count_bytes, has_inner
from jaxpp.stages.loss import TracedLoss
from jaxpp.stages.scans import same_layer

__all__ = ["Cuts", "align", "balance", "owners", "resolve"]

Cuts = tuple[int, ...]
"""``cuts[k]`` is the spine position at which stage k + 1 begins."""

Window = tuple[np.ndarray, np.ndarray]
"""For each position where a stage may end, the first and last position where it may start."""

SLACK, LOOSE = 0.1, 0.2
"""How far from the mean a stage's cost may be for fewer bytes; and for fewer arrays with two thirds of the bytes."""


def balance(loss: TracedLoss, num_stages: int) -> Cuts:
    """Cut for balanced FLOPs with the smallest boundaries.

    Raises:
        CutError: there are fewer spine equations than stages, or model state that cannot be divided leaves too few.
    """
    size = len(loss.spine)
    _check_size(size, num_stages)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(loss.costs) + 1e-9)])
    nowhere = np.zeros((num_stages, size + 1))
    mean = total[-1] / num_stages
    _check_giant(loss, num_stages)
    even, loose = (
        _cheapest(loss, num_stages, _window(total, (1 - slack) * mean, (1 + slack) * mean), nowhere) for slack in (SLACK, LOOSE)
    )
    if even is not None and loose is not None:
        size, number = ([sum(at[k] for k in cuts) for cuts in (even, loose)] for at in (loss.boundary_bytes, loss.boundary_values))
        return loose if 3 * size[1] <= 2 * size[0] and number[1] < number[0] else even
    if loose is not None:
        return loose
    typical = float(np.median(loss.boundary_bytes[1:]))
    traded = _cheapest(loss, num_stages, _window(total, 0.0, np.inf), nowhere, evenness=20 * typical + 1.0)
    return _found(loss, num_stages, traded)


def _window(total: np.ndarray, low: float, high: float) -> Window:
    """For each end of a stage, the first and last position at which it may start to cost between ``low`` and ``high``."""
    first = np.searchsorted(total, total - high * (1 + 1e-12)) if np.isfinite(high) else np.zeros(len(total), dtype=int)
    last = np.searchsorted(total, total - low * (1 - 1e-12), side="right") - 1
    return first, np.minimum(last, np.arange(len(total)) - 1)


def align(loss: TracedLoss, num_stages: int, owner: Sequence[int], state_owner: Sequence[int] = (), *, train: bool = True) -> Cuts:
    """Cut another trace of a model so that parameters and model state stay with their owners, as far as possible.

    Args:
        loss: the new trace.
        num_stages: stages.
        owner: the stage that owns each parameter leaf.
        state_owner: the stage that owns each model state leaf.
        train: whether every stage must have something to do; a loss that is only evaluated may leave some idle.

    Raises:
        CutError: there are fewer spine equations than stages, in training.
    """
    size = len(loss.spine)
    if size < num_stages and not train:
        return tuple(min(stage, size) for stage in range(1, num_stages))
    _check_size(size, num_stages)
    moved = np.zeros((num_stages, size + 1))
    for leaves, all_uses, home in ((loss.params, loss.param_uses, owner), (loss.state, loss.state_uses, state_owner)):
        weights = [count_bytes(var.aval) for var in leaves]
        for k, uses in enumerate(all_uses):
            for stage in range(num_stages):
                moved[stage, k + 1] += sum(weights[leaf] for leaf in uses if home[leaf] != stage)
    anywhere = _window(np.arange(size + 1.0), 0.0, np.inf)
    return _found(loss, num_stages, _cheapest(loss, num_stages, anywhere, 8.0 * np.cumsum(moved, axis=1)))


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


def resolve(loss: TracedLoss, names: Sequence[str]) -> Cuts:
    """Cut where the user says: stage k + 1 begins at the module, or the first use of the parameters, called ``names[k]``.

    Raises:
        CutError: a name that is neither, or names out of order.
    """
    where = f"cuts={list(names)!r}"
    places = [_place(loss, name) for name in names]
    unknown = [name for name, place in zip(names, places, strict=True) if place is None]
    if unknown:
        known = _known_names(loss)
        near = [match for name in unknown for match in difflib.get_close_matches(str(name), known, n=1)]
        error = CutError(
            where,
            "a cut names a module path or a parameter prefix of the model",
            [repr(name) for name in unknown],
            f"write {near[0]!r}" if near else "use one of the names below",
            "names: " + ", ".join(known),
        )
        error.unknown = tuple(unknown)
        raise error
    cuts = tuple(place for place in places if place is not None)
    if list(cuts) != sorted(set(cuts)) or cuts[:1] == (0,) or cuts[-1:] == (len(loss.spine),):
        raise CutError(
            where,
            "cuts stand in the order in which the model runs, each after the start and before the end",
            [f"{name!r} begins at equation {cut} of {len(loss.spine)}" for name, cut in zip(names, cuts, strict=True)],
            "list the names in the order the model runs them, each once, without the first module",
        )
    barred = _barred(loss)
    divided = [f"{name!r} divides model_state {barred[cut]}" for name, cut in zip(names, cuts, strict=True) if cut in barred]
    if divided:
        raise CutError(where, _STATE_RULE, divided, "begin the stage before or after the module that updates this state")
    return cuts


_STATE_RULE = "one stage reads a model state leaf and makes its new value, or the next microbatch would wait for the one before"


def _barred(loss: TracedLoss) -> dict[int, str]:
    """The positions where no stage may begin, each with the model state leaf that it would divide."""
    barred: dict[int, str] = {}
    for path, place in zip(loss.state_paths, loss.together, strict=True):
        if place is not None:
            barred.update((k, path) for k in range(place[0] + 1, place[1] + 1))
    return barred


def _found(loss: TracedLoss, num_stages: int, cuts: Cuts | None) -> Cuts:
    """The cuts, which only model state can make impossible."""
    if cuts is None:
        barred = _barred(loss)
        lengths = sorted(((list(barred.values()).count(path), path) for path in set(barred.values())), reverse=True)
        raise CutError(
            f"num_stages={num_stages}",
            _STATE_RULE,
            [f"model_state {path}: {length} places where no stage can begin" for length, path in lengths[:8]],
            "update the state where it is read, or pass fewer stages",
        )
    return cuts


def _check_size(size: int, num_stages: int) -> None:
    if size < num_stages:
        raise CutError(
            f"num_stages={num_stages}",
            "each stage needs at least one equation of the loss that works on data",
            f"{num_stages} stages and a loss that can be cut into {size} at most",
            f"pass num_stages={max(size, 1)} or fewer, or check that loss_fn reads its batch",
        )


def _check_giant(loss: TracedLoss, num_stages: int) -> None:
    """Refuse a loss of which one equation that cannot be cut does more than two stages' work."""
    total = sum(loss.costs)
    giant = max(range(len(loss.spine)), key=loss.costs.__getitem__)
    eqn = loss.graph.eqns[loss.spine[giant]]
    share = loss.costs[giant] / max(total, 1.0)
    if has_inner(eqn) and num_stages > 1 and (share * num_stages > 2 or share > 0.9):
        kind = _KINDS.get(eqn.primitive.name, eqn.primitive.name)
        where = f"{kind} in {loss.graph.names[loss.spine[giant]] or 'the loss'}"
        reads = sorted(loss.param_uses[giant])
        shown = ", ".join(loss.param_paths[leaf] for leaf in reads[:3]) + (", ..." if len(reads) > 3 else "")
        raise CutError(
            f"num_stages={num_stages}",
            "stages of equal work need a loss that can be cut, and one equation of it cannot",
            [f"{where}: {share:.0%} of the work", f"it reads {shown or 'no parameter'}"],
            "loop over layers with lax.scan over parameters stacked along their first axis (as they are, or cast), without stacked "
            "model state; put jax.checkpoint or a custom rule around each layer instead of all; say where stages begin with "
            f"cuts=[...]; or pass num_stages={max(1, int(1 / share))}",
        )


_KINDS = {
    "while": "a while loop",
    "scan": "a scan",
    "cond": "a cond",
    "checkpoint": "a jax.checkpoint",
    "remat2": "a jax.checkpoint",
}


def _cheapest(loss: TracedLoss, num_stages: int, window: Window, misplaced: np.ndarray, evenness: float = 1e-4) -> Cuts | None:
    """The cuts with the fewest bytes: across boundaries, and of parameters away from their owner.

    Equal bytes are decided by neatness (between modules rather than inside one), then by an even spread of cost.

    Args:
        loss: what to cut.
        num_stages: stages.
        window: a stage that ends at position e may start from ``window[0][e]`` to ``window[1][e]``.
        misplaced: ``misplaced[stage, e]``, bytes moved if positions 0 to e were all on that stage (prefix sums).
        evenness: the bytes that the square of a stage's cost, in units of the mean, is worth.

    Returns:
        the cuts, or None if the window leaves none.
    """
    first, final = window
    size = len(loss.spine)
    price = np.asarray(loss.boundary_bytes, dtype=float) + 1e-3 * np.asarray(_untidiness(loss))
    price[list(_barred(loss))] = np.inf
    price[size] = 0.0
    total = np.concatenate([[0.0], np.cumsum(loss.costs)])
    share = evenness * (num_stages / max(total[-1], 1.0)) ** 2
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    for stage in range(num_stages):
        following = np.full(size + 1, np.inf)
        origin = np.zeros(size + 1, dtype=int)
        last = stage == num_stages - 1
        for end in [size] if last else range(stage + 1, size - (num_stages - stage - 1) + 1):
            low, high = max(int(first[end]), stage), int(final[end]) + 1
            if low >= high:
                continue
            spread = share * (total[end] - total[low:high]) ** 2
            scores = best[low:high] + spread + misplaced[stage, end] - misplaced[stage, low:high]
            choice = int(np.argmin(scores))
            following[end] = scores[choice] + price[end]
            origin[end] = low + choice
        best = following
        came.append(origin)
    if not np.isfinite(best[size]):
        return None
    cuts, at = [], size
    for origin in reversed(came):
        at = int(origin[at])
        cuts.append(at)
    return tuple(reversed(cuts[:-1]))


def _untidiness(loss: TracedLoss) -> list[int]:
    """How deep inside a module each position lies; a position right before a parameter's use is tidier."""
    paths = [tuple(filter(None, loss.graph.names[i].split("/"))) for i in loss.spine]
    untidy = [0] * (len(paths) + 1)
    for k in range(1, len(paths)):
        pairs = zip(paths[k - 1], paths[k], strict=False)
        shared = next((depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(paths[k - 1]), len(paths[k])))
        untidy[k] = 2 * shared + (not loss.param_uses[k])
    return untidy


def _components(name: str) -> str:
    return f"/{same_layer(name).strip('/')}/"


def _place(loss: TracedLoss, name: str) -> int | None:
    wanted = _components(str(name))
    for k, i in enumerate(loss.spine):
        if wanted in _components(loss.graph.names[i]):
            return k
    leaves = {leaf for leaf, path in enumerate(loss.param_paths) if _components(path).startswith(wanted)}
    for k, uses in enumerate(loss.param_uses):
        if uses & leaves:
            return _retreat(loss, k)
    return None


def _retreat(loss: TracedLoss, position: int) -> int:
    """From the first use of a parameter back to where least crosses, not before the last use of an earlier one."""
    low = max((k + 1 for k in range(position) if loss.param_uses[k]), default=0)
    return min(range(position, low - 1, -1), key=lambda k: loss.boundary_bytes[k])


def _known_names(loss: TracedLoss) -> list[str]:
    if tuple(loss.graph.names[i] for i in loss.spine) != loss.modules:
        return [name.replace(".", "/") for name in dict.fromkeys(loss.modules) if name]
    modules = dict.fromkeys(loss.graph.names[i] for i in loss.spine)
    depth_two = dict.fromkeys("/".join(name.split("/")[1:2]) for name in modules)
    tops = dict.fromkeys(path.split("/")[0] for path in loss.param_paths)
    return [name for name in dict.fromkeys([*depth_two, *tops]) if name]
