"""Where to cut: ``num_stages - 1`` positions on the spine of the traced loss, found or named by the user.

A pipeline is as fast as its largest stage, every stage should have something to do, and little should cross, in this order. So
bisection finds the least that the largest stage can cost. Of the cuts that cost at most ``SLACK`` more, one dynamic program keeps
those with the fewest stages without real work (a matrix product, a parameter), and of these the one that sends the fewest bytes.
A second trace of the model (another batch shape, an evaluation loss) is cut where parameters stay with their owners (``align``).
"""

import bisect
import re
from collections.abc import Callable, Collection, Sequence

import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Float, Int

from jaxpp.errors import CutError
from jaxpp.errors.keywords import spelt
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.head import head_of
from jaxpp.stages.graph import descendants
from jaxpp.stages.jaxpr import aval_of, inner_jaxprs, kind_of, multiplies, scan_of, variables
from jaxpp.stages.loss.traced_loss import STATE_RULE, TracedLoss
from jaxpp.stages.own_params import OWN_NAME

_Charges = Callable[[int, slice, int], np.ndarray]  # what a stage is charged from each of some starts to an end
Cuts = tuple[int, ...]  # ``cuts[k]`` is the spine position at which stage k + 1 begins

SLACK = 0.05  # How much more than the least possible the largest stage may cost, for fewer bytes
REAL_WORK = 0.01  # the part of the mean cost below which a stage counts as empty; where unavoidable, a hundredth of it is worse


def balance(loss: TracedLoss, num_stages: int, slack: float = SLACK, speeds: Sequence[float] = ()) -> Cuts:
    """Cut for the smallest largest stage, but for ``slack``; then for stages that all have something to do, then for few bytes.

    Stages are as large as their cost by their ``speeds``, how many times as fast as the narrowest rank the rank of each is.
    """
    _check_size(loss, num_stages)
    if num_stages == 1:
        return ()
    total = prefix_sums(loss)
    least = least_largest(loss, num_stages, speeds)
    if least is None:
        raise _divided(loss, num_stages)
    most = (1 + slack) * least * (1 + 1e-12)
    first = [np.searchsorted(total, total - speed * most) for speed in speeds or [1.0] * num_stages]
    return balance_within(loss, np.asarray(first))


def balance_within(loss: TracedLoss, first: Int[np.ndarray, "stages ends"]) -> Cuts:
    """Cut for stages that all have something to do, then for the fewest bytes; a stage begins at ``first[stage, end]`` or later.

    What a stage lacks is charged more than all bytes that could cross.
    """
    price, lacking = 4.0 * len(first) * (max(loss.boundary_bytes, default=0) + 1.0), faults(loss, len(first))
    charges: _Charges = lambda _, starts, end: price * lacking(np.arange(starts.start, starts.stop), end)  # noqa: E731
    return _cheapest(loss, first, np.zeros(first.shape), charges)


def least_largest(loss: TracedLoss, num_stages: int, speeds: Sequence[float] = ()) -> float | None:
    """The least that the largest of ``num_stages`` stages can cost, over all cuts; None if model state leaves too few places.

    Costs are divided by the ``speeds`` of the stages, if there are any.
    """
    total = prefix_sums(loss)
    allowed = [k for k in range(1, len(total) - 1) if k not in loss.barred]
    if len(allowed) < num_stages - 1:
        return None
    return _least(total[[*allowed, len(total) - 1]], num_stages, speeds)


def _least(sums: Float[np.ndarray, " ends"], num_stages: int, speeds: Sequence[float] = ()) -> float:
    """The least that the largest of ``num_stages`` stages can cost, each of which ends where ``sums`` has been passed."""

    def reach(limit: float) -> float:
        """The largest stage if each is as long as ``limit`` lets it be; infinite if that takes more stages than there are."""
        start, largest, at = 0.0, 0.0, -1
        for speed in speeds or [1.0] * num_stages:
            last = int(np.searchsorted(sums, start + speed * limit, side="right")) - 1
            if last <= at:
                return np.inf
            largest, start, at = max(largest, float(sums[last] - start) / speed), float(sums[last]), last
            if at == len(sums) - 1:
                return largest
        return np.inf

    low, high = 0.0, float(sums[-1])
    for _ in range(100):
        middle = (low + high) / 2
        found = reach(middle)
        low, high = (low, min(middle, found)) if np.isfinite(found) else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high


def faults(loss: TracedLoss, num_stages: int) -> Callable[[np.ndarray, np.ndarray | int], np.ndarray]:
    """Counts what stages from some starts to some ends lack: real work (by how many hundreds too little), products, parameters."""
    total = prefix_sums(loss)
    floor, least = REAL_WORK * float(total[-1]) / num_stages, 1e-15 * float(total[-1])
    reading = [k for k, uses in enumerate(loss.param_uses) if uses]
    products = [k for k, i in enumerate(loss.spine) if multiplies(loss.graph.eqns[i])]
    ends = np.arange(len(total))
    last = [np.asarray([-1, *at])[np.searchsorted(np.asarray(at, int), ends)] for at in (reading, products)]

    def lacking(starts: np.ndarray, ends: np.ndarray | int) -> np.ndarray:
        work = np.maximum(total[ends] - total[starts], least)
        idle = np.ceil(np.log(np.maximum(floor / work, 1.0)) / np.log(100.0))
        return idle + (starts > last[0][ends]) + (starts > last[1][ends])

    return lacking


def align(
    loss: TracedLoss, num_stages: int, owner: Sequence[int | None], state_owner: Sequence[int] = (), *, train: bool = True
) -> Cuts:
    """Cut another trace of a model so that parameters and model state stay with their owners, as far as they have any."""
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
                moved[stage, k + 1] += sum(weights[leaf] for leaf in uses if home[leaf] not in (stage, None))
    return _cheapest(loss, np.zeros((num_stages, size + 1), dtype=int), 8.0 * np.cumsum(moved, axis=1))


def owners(loss: TracedLoss, cuts: Cuts) -> tuple[int, ...]:
    """The stage that owns each parameter leaf: the first that uses it; an unused leaf stays with the leaf before it."""
    result = [0]
    for stages in readers(loss.param_uses, len(loss.params), cuts):
        result.append(min(stages, default=result[-1]))
    return tuple(result[1:])


def readers(uses: Sequence[Collection[int]], num_leaves: int, cuts: Cuts) -> list[set[int]]:
    """The stages that use each leaf, where spine equation k ``uses[k]``."""
    found: list[set[int]] = [set() for _ in range(num_leaves)]
    for k, leaves in enumerate(uses):
        for leaf in leaves:
            found[leaf].add(bisect.bisect_right(cuts, k))
    return found


def prefix_sums(loss: TracedLoss) -> np.ndarray:
    """The cost before each spine position; every equation costs a little, so that no two positions are the same."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(loss.costs) + 1e-12 * (sum(loss.costs) or 1.0))])


def _check_size(loss: TracedLoss, num_stages: int) -> None:
    size, noun = len(loss.spine), loss.noun
    if size < num_stages and not (num_stages == 1 and not loss.is_loss):
        reads = f"check that {'loss_fn' if loss.is_loss else 'fn'} reads its batch"
        where = f"num_stages={num_stages}"
        got = f"{num_stages} stage{'s' * (num_stages > 1)} and a {noun} that can be cut into {size} at most"
        products = sum(multiplies(loss.graph.eqns[i]) for i in loss.spine)
        fewer = ", one for each matrix product, or fewer" if products > 1 else " or fewer" if not products and size > 1 else ""
        fix = f"pass num_stages={max(products or size, 1)}{fewer}; or {reads}" if num_stages > 1 else reads
        raise CutError(where, f"each stage needs at least one equation of the {noun} that works on data", got, fix)


def _divided(loss: TracedLoss, num_stages: int) -> CutError:
    paths = list(loss.barred.values())
    lengths = sorted(((paths.count(path), path) for path in set(paths)), reverse=True)
    got = [f"model_state {path}: {length} places where no stage can begin" for length, path in lengths]
    return CutError(f"num_stages={num_stages}", STATE_RULE, got, "update the state where it is read, or pass fewer stages")


def _cheapest(loss: TracedLoss, first: np.ndarray, misplaced: np.ndarray, charges: _Charges | None = None) -> Cuts:
    """The cuts with the fewest bytes, across boundaries and of parameters away from home; then the neatest, then the most even.

    A stage that ends at e starts at ``first[stage, e]`` or later; ``misplaced[stage, e]`` bytes move if positions 0 to e are on it;
    ``charges`` says what else a stage costs.
    """
    num_stages, size = len(first), len(loss.spine)
    price = np.asarray(loss.boundary_bytes, dtype=float) + 1e-3 * np.asarray(_untidiness(loss))
    price[list(loss.barred)] = np.inf
    price[size] = 0.0
    total = np.concatenate([[0.0], np.cumsum(loss.costs)])
    evenness = 1e-4 * (num_stages / (total[-1] or 1.0)) ** 2
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    for stage in range(num_stages):
        following = np.full(size + 1, np.inf)
        origin = np.zeros(size + 1, dtype=int)
        last = stage == num_stages - 1
        for end in [size] if last else range(stage + 1, size - (num_stages - stage - 1) + 1):
            low = max(int(first[stage, end]), stage)
            if low >= end or not np.isfinite(price[end]):
                continue
            starts = slice(low, end)
            scores = best[starts] + evenness * (total[end] - total[starts]) ** 2 + misplaced[stage, end] - misplaced[stage, starts]
            if charges is not None:
                scores = scores + charges(stage, starts, end)
            choice = int(np.argmin(scores))
            following[end] = scores[choice] + price[end]
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


def resolve(loss: TracedLoss, names: Sequence[str]) -> Cuts:
    """Cut where the user says: stage k + 1 begins at the module, or the first use of the parameters, called ``names[k]``.

    ``w[3]`` is a layer of a loop, or the first use of row 3 of the parameter ``w`` (or of all parameters under that path).
    """
    where = f"cuts={list(names)!r}"
    places = [_place(loss, name) for name in names]
    unknown = [name for name, place in zip(names, places, strict=True) if place is None]
    if unknown:
        names_there = [known for known in _known_names(loss) if _place(loss, known)]  # no stage but the first begins at 0
        rule, got = "a cut names a module path or a parameter prefix of the model", [repr(name) for name in unknown]
        fix = spelt(unknown, [known for known in names_there if known not in names], "use one of the names below")
        error = CutError(where, rule, got, fix, "names: " + ", ".join(names_there))
        error.unknown = tuple(unknown)
        raise error
    cuts = tuple(place for place in places if place is not None)
    if list(cuts) != sorted(set(cuts)) or cuts[:1] == (0,) or cuts[-1:] == (len(loss.spine),):
        rule = "cuts stand in the order in which the model runs, each after the start and before the end"
        got = [f"{name!r} begins at equation {cut} of {len(loss.spine)}" for name, cut in zip(names, cuts, strict=True)]
        raise CutError(where, rule, got, "list the names in the order the model runs them, each once, without the first module")
    barred = loss.barred
    divided = [f"{name!r} divides model_state {barred[cut]}" for name, cut in zip(names, cuts, strict=True) if cut in barred]
    if divided:
        raise CutError(where, STATE_RULE, divided, "begin the stage before or after the module that updates this state")
    return cuts


def _components(name: str) -> str:
    return "/" + re.sub(r"\[(\d+):\d+\]", r"[\1]", name).strip("/") + "/"  # layers[3:6] is found as layers[3]


def _place(loss: TracedLoss, name: str) -> int | None:
    wanted = _components(str(name))
    for k, i in enumerate(loss.spine):
        if wanted in _components(loss.graph.names[i]):
            return k
    indexed = re.fullmatch(r"(.+)\[(\d+)\]", str(name))
    for is_own in (False, True):  # a name that a task's own parameters have too is that of the shared ones
        leaves = {leaf for leaf, path in enumerate(loss.param_paths) if _is_called(loss, leaf, path, wanted, is_own=is_own)}
        position = next((k for k, uses in enumerate(loss.param_uses) if uses & leaves), None)
        if position is None and indexed:
            position = _first_use_of_row(loss, _components(indexed[1]), int(indexed[2]), is_own=is_own)
        if position is not None:
            return _retreat(loss, position)
    return None


def _is_called(loss: TracedLoss, leaf: int, path: str, wanted: str, *, is_own: bool) -> bool:
    """Whether a parameter, one of a task's or not, has a name that begins as is wanted."""
    return loss.is_own(leaf) == is_own and any(_components(each).startswith(wanted) for each in loss.spellings(leaf, path))


def _first_use_of_row(loss: TracedLoss, wanted: str, row: int, *, is_own: bool) -> int | None:
    """Where a row is first read, of the parameters with a path that begins so; not with all others, unless it only is so."""
    uses_of_row: list[tuple[bool, int]] = []
    for leaf, (path, first, axis) in enumerate(loss.stacks):
        length = sum(aval_of(loss.params[leaf]).shape[axis : axis + 1])
        if _is_called(loss, leaf, path, wanted, is_own=is_own) and 0 <= row - first < length:
            is_slice = loss.param_paths[leaf] != path
            reads = (read for read in loss.reads if read.leaf == leaf and read.start <= row - first < read.stop)
            uses_of_row += [(not is_slice and read.stop - read.start == length, read.position) for read in reads]
            uses_of_row += [(False, k) for k, uses in enumerate(loss.param_uses) if is_slice and leaf in uses]
    return min(uses_of_row, default=(False, None))[1]


def _retreat(loss: TracedLoss, position: int) -> int:
    """From the first use of a parameter back to where least crosses, not before the last use of an earlier one."""
    low = max((k + 1 for k in range(position) if loss.param_uses[k]), default=0)
    return min(range(position, low - 1, -1), key=loss.boundary_bytes.__getitem__)


def _known_names(loss: TracedLoss) -> list[str]:
    if tuple(loss.graph.names[i] for i in loss.spine) != loss.modules:
        return [name.replace(".", "/") for name in dict.fromkeys(loss.modules) if name]
    modules = dict.fromkeys(loss.graph.names[i] for i in loss.spine)
    depth_two = dict.fromkeys("/".join(name.split("/")[1:2]) for name in modules)
    tops = dict.fromkeys([*(path.split("/")[0] for path in loss.own_paths), *[OWN_NAME] * (loss.num_own > 0)])
    return [name for name in dict.fromkeys([*depth_two, *tops]) if name]


GAIN = 1.1  # How many times as fast a step must become before a warning says how to divide the head
UNEVEN = 1.5  # How many times the mean the largest stage may cost before a warning says so


class UnevenStagesWarning(UserWarning):
    """The automatic cut is uneven, because no cut of this loss into so many stages is even."""


def check_giant(loss: TracedLoss, num_stages: int) -> None:
    """Refuse a loss in which one loop, branch or call does more than two stages' work."""
    giant = max(range(len(loss.spine)), key=loss.costs.__getitem__, default=None)
    if giant is None or not _too_large(loss, giant, num_stages):
        return
    eqn = loss.graph.eqns[loss.spine[giant]]
    kind, advice = _kind_and_advice(loss, eqn)
    where = f"{kind} in {loss.graph.names[loss.spine[giant]] or f'the {loss.noun}'}"
    reads = sorted(loss.param_uses[giant])
    shown = ", ".join(loss.param_paths[leaf] for leaf in reads[:3]) + (", ..." if len(reads) > 3 else "")
    fewer = max((n for n in range(1, num_stages) if not _too_large(loss, giant, n)), default=1)
    rule = f"stages of equal work need a {loss.noun} that can be cut, and one equation of it cannot"
    got = [f"{where}: {_share(loss, giant):.0%} of the work", f"it reads {shown or 'no parameter'}"]
    fix = f"{advice}; say where stages begin with cuts=[...]; or pass num_stages={fewer}"
    raise CutError(f"num_stages={num_stages}", rule, got, fix)


def uneven(loss: TracedLoss, cuts: Cuts, speeds: Sequence[float] = ()) -> UnevenStagesWarning | None:
    """What to warn of: the largest stage of the best cut costs more than ``UNEVEN`` times the mean. None if it does not.

    Where ranks have unequal ``speeds``, it takes more than ``UNEVEN`` times as long as if all had work by their speeds.
    """
    num_stages = len(cuts) + 1
    speeds = speeds or (1.0,) * num_stages
    costs = np.asarray(loss.costs)
    stages = [costs[start:end] for start, end in zip([0, *cuts], [*cuts, len(costs)], strict=True)]
    sums = [float(stage.sum()) for stage in stages]
    times = [each / speed for each, speed in zip(sums, speeds, strict=True)]
    total, largest = sum(sums), int(np.argmax(times))
    if times[largest] <= UNEVEN * total / sum(speeds) * (1 + 1e-6):
        return None
    start = [0, *cuts][largest]
    weights: dict[str, float] = {}
    for k, cost in enumerate(stages[largest], start):
        name = loss.modules[k] or "equations outside any module"
        weights[name] = weights.get(name, 0.0) + float(cost)
    module, weight = max(weights.items(), key=lambda item: item[1])
    heaviest = start + int(np.argmax(stages[largest]))
    eqn = loss.graph.eqns[loss.spine[heaviest]]
    share, faster, ratio = sums[largest] / total, total / times[largest], times[largest] * sum(speeds) / total
    mean = "the mean" if len(set(speeds)) == 1 else "the part of its devices"
    lines = [
        f"num_stages={num_stages}: the stages are uneven, and no other cut of this {loss.noun} is much better.",
        f"Got: stage {largest} does {share:.0%} of the work, {ratio:.1f} times {mean}, so {num_stages} stages are "
        f"at most {faster:.2f} times as fast as one device. {module} weighs most in it: {weight / total:.0%} of the work, "
        f"{_share(loss, heaviest):.0%} in one {eqn.primitive.name}.",
        f"Fix: {_divide_head(loss, heaviest, speeds, faster)}"
        f"{_remedy(loss, range(start + 1, start + len(stages[largest])), eqn, speeds)}.",
    ]
    return UnevenStagesWarning("\n  ".join(lines))


def _divide_head(loss: TracedLoss, heaviest: int, speeds: Sequence[float], speed: float) -> str:
    """What dividing a language model's head would gain, and the line to write; nothing if that is not what weighs most."""
    head = head_of(loss, heaviest)
    if head is None:
        return ""
    num_stages = len(speeds)
    divided = sum(head.costs) / _least(np.cumsum(np.asarray(head.costs)), num_stages, speeds)
    if divided < GAIN * speed:
        return ""
    line = f"jaxpp.linear_cross_entropy(hidden, table, labels{', bias=bias' * head.has_bias}).mean()"
    what = f"the product with {head.table} and its cross entropy, with one row of table for each word"
    gain = f"{num_stages} stages are then at most {divided:.2f} times as fast as one device"
    return f"return the hidden states, and write {line} for {what}: {gain}; or "


def _remedy(loss: TracedLoss, inside: range, eqn: JaxprEqn, speeds: Sequence[float]) -> str:
    total, counts = sum(loss.costs), range(2, len(speeds) if len(set(speeds)) == 1 else 0)
    fits = [n for n in counts if (least_largest(loss, n) or total) * n <= UNEVEN * total]
    fewer = f"pass num_stages={fits[-1]}; or " if fits else "use one device, or data parallelism alone; or "
    held = sorted({loss.barred[k] for k in inside if k in loss.barred})
    if held:
        other = f"update model_state {', '.join(held[:3])} where it is read, so that a stage can begin in between"
    elif inner_jaxprs(eqn):
        other = _kind_and_advice(loss, eqn)[1]
    elif kind_of(eqn) == "conv_general_dilated":
        other = "use data parallelism alone, which suits convolutions: they have few parameters for their work"
        fewer = fewer if fits else ""
    else:
        other = f"shard its parameters with {'Pipeline' if loss.is_loss else 'Forward'}(mesh=..., shardings=...)"
    quiet = 'warnings.filterwarnings("ignore", category=jaxpp.UnevenStagesWarning)'
    return f"{fewer}{other}; if the stages are there for memory, {quiet}"


def _share(loss: TracedLoss, position: int) -> float:
    return loss.costs[position] / (sum(loss.costs) or 1.0)


def _too_large(loss: TracedLoss, position: int, num_stages: int) -> bool:
    share = _share(loss, position)
    whole = bool(inner_jaxprs(loss.graph.eqns[loss.spine[position]]))
    return whole and num_stages > 1 and (share * num_stages > 2 or share > 0.9)


_LAYERS = "loop over layers with lax.scan over parameters stacked along one axis (as they are, cast, or transposed)"
_ADVICE = {
    "while": ("a while loop", _LAYERS),
    "cond": ("a cond", "choose the branch outside the loss (a loss for each), or compute both and choose with jnp.where"),
    "checkpoint": (
        "a jax.checkpoint",
        'put jax.checkpoint around each layer instead of all, or leave it out and pass remat="recompute"',
    ),
    "custom_vjp": ("a custom_vjp function", "put the custom rule around each layer instead of all"),
    "custom_jvp": ("a custom_jvp function", "put the custom rule around each layer instead of all"),
}


def _kind_and_advice(loss: TracedLoss, eqn: JaxprEqn) -> tuple[str, str]:
    if kind_of(eqn) != "scan":
        return _ADVICE.get(kind_of(eqn), (eqn.primitive.name, "split it into one call for each layer"))
    loop = scan_of(eqn)
    rows = [] if loop is None else eqn.invars[loop.num_before :]
    if loop is not None and not rows:
        return "a loop that counts (fori_loop, or scan without xs)", _LAYERS
    data = descendants(loss.graph, [*loss.batch, *loss.state])
    if not loss.of_params.isdisjoint(variables(rows)) and data.isdisjoint(variables(rows)):
        return "a scan over parameters", _LAYERS
    return (
        "a scan over the data (over time, say)",
        "give each layer a loop of its own, so that a stage can begin between two of them: one recurrent layer is in one stage",
    )
