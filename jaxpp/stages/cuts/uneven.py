"""Work that cannot be divided evenly: refused where a pipeline would be pointless, otherwise told with what would help."""

import numpy as np
from jax.extend.core import JaxprEqn

from jaxpp.errors import CutError, warn
from jaxpp.stages.cuts.balance import Cuts, least_largest
from jaxpp.stages.jaxpr import inner_jaxprs, kind_of, scan_of, variables
from jaxpp.stages.loss.traced_loss import TracedLoss

__all__ = ["UNEVEN", "UnevenStagesWarning", "check_giant", "uneven", "warn_of"]

UNEVEN = 1.5
"""How many times the mean the largest stage may cost before a warning says so."""


class UnevenStagesWarning(UserWarning):
    """The automatic cut is uneven, because no cut of this loss into so many stages is even."""


def check_giant(loss: TracedLoss, num_stages: int) -> None:
    """Refuse a loss in which one loop, branch or call does more than two stages' work.

    Raises:
        CutError: naming the equation, with advice for its kind and the largest number of stages that works.
    """
    giant = max(range(len(loss.spine)), key=loss.costs.__getitem__, default=None)
    if giant is None or not _too_large(loss, giant, num_stages):
        return
    eqn = loss.graph.eqns[loss.spine[giant]]
    kind, advice = _kind_and_advice(loss, eqn)
    where = f"{kind} in {loss.graph.names[loss.spine[giant]] or f'the {loss.noun}'}"
    reads = sorted(loss.param_uses[giant])
    shown = ", ".join(loss.param_paths[leaf] for leaf in reads[:3]) + (", ..." if len(reads) > 3 else "")
    fewer = max((n for n in range(1, num_stages) if not _too_large(loss, giant, n)), default=1)
    raise CutError(
        f"num_stages={num_stages}",
        f"stages of equal work need a {loss.noun} that can be cut, and one equation of it cannot",
        [f"{where}: {_share(loss, giant):.0%} of the work", f"it reads {shown or 'no parameter'}"],
        f"{advice}; say where stages begin with cuts=[...]; or pass num_stages={fewer}",
    )


def uneven(loss: TracedLoss, cuts: Cuts) -> str | None:
    """What to warn of: the largest stage of the best cut costs more than ``UNEVEN`` times the mean. None if it does not."""
    num_stages = len(cuts) + 1
    costs = np.asarray(loss.costs)
    stages = [costs[start:end] for start, end in zip([0, *cuts], [*cuts, len(costs)], strict=True)]
    sums = [float(stage.sum()) for stage in stages]
    total, largest = sum(sums), int(np.argmax(sums))
    if sums[largest] <= UNEVEN * total / num_stages:
        return None
    start = [0, *cuts][largest]
    weights: dict[str, float] = {}
    for k, cost in enumerate(stages[largest], start):
        name = loss.modules[k] or "equations outside any module"
        weights[name] = weights.get(name, 0.0) + float(cost)
    module, weight = max(weights.items(), key=lambda item: item[1])
    heaviest = start + int(np.argmax(stages[largest]))
    eqn = loss.graph.eqns[loss.spine[heaviest]]
    share = sums[largest] / total
    lines = [
        f"num_stages={num_stages}: the stages are uneven, and no other cut of this {loss.noun} is much better.",
        f"Got: stage {largest} does {share:.0%} of the work, {share * num_stages:.1f} times the mean, so {num_stages} stages are "
        f"at most {1 / share:.2f} times as fast as one device. {module} weighs most in it: {weight / total:.0%} of the work, "
        f"{_share(loss, heaviest):.0%} in one {eqn.primitive.name}.",
        f"Fix: {_remedy(loss, range(start + 1, start + len(stages[largest])), eqn, num_stages)}.",
    ]
    return "\n  ".join(lines)


def warn_of(unevenness: str | None) -> None:
    """Warn, at the user's own line, of what ``uneven`` found.

    Warns:
        UnevenStagesWarning: it found something.
    """
    if unevenness is not None:
        warn(unevenness, UnevenStagesWarning)


def _remedy(loss: TracedLoss, inside: range, eqn: JaxprEqn, num_stages: int) -> str:
    """What helps where the stage of the spine positions ``inside`` is too large, in which ``eqn`` weighs most."""
    total = sum(loss.costs)
    fits = [n for n in range(2, num_stages) if (least_largest(loss, n) or total) * n <= UNEVEN * total]
    fewer = f"pass num_stages={fits[-1]}" if fits else "use one device, or data parallelism alone"
    held = sorted({loss.barred[k] for k in inside if k in loss.barred})
    if held:
        other = f"update model_state {', '.join(held[:3])} where it is read, so that a stage can begin in between"
    elif inner_jaxprs(eqn):
        other = _kind_and_advice(loss, eqn)[1]
    else:
        other = f"shard its parameters with {'Pipeline' if loss.is_loss else 'Forward'}(mesh=..., shardings=...)"
    quiet = 'warnings.filterwarnings("ignore", category=jaxpp.UnevenStagesWarning)'
    return f"{fewer}; or {other}; if the stages are there for memory, {quiet}"


def _share(loss: TracedLoss, position: int) -> float:
    return loss.costs[position] / max(sum(loss.costs), 1.0)


def _too_large(loss: TracedLoss, position: int, num_stages: int) -> bool:
    share = _share(loss, position)
    whole = bool(inner_jaxprs(loss.graph.eqns[loss.spine[position]]))
    return whole and num_stages > 1 and (share * num_stages > 2 or share > 0.9)


_LAYERS = (
    "loop over layers with lax.scan over parameters stacked along their first axis (as they are, or cast), "
    "without stacked model state"
)
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
    """What an equation that cannot be cut is called, and what its author can do."""
    if kind_of(eqn) != "scan":
        return _ADVICE.get(kind_of(eqn), (eqn.primitive.name, "split it into one call for each layer"))
    loop = scan_of(eqn)
    rows = [] if loop is None else eqn.invars[loop.num_before :]
    if loop is not None and not rows:
        return "a loop that counts (fori_loop, or scan without xs)", _LAYERS
    if not loss.of_params.isdisjoint(variables(rows)):
        return "a scan over parameters", _LAYERS
    return (
        "a scan over the data (over time, say)",
        "give each layer a loop of its own, so that a stage can begin between two of them",
    )
