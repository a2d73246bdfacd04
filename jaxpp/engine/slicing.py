"""Which parameter leaves a pipeline holds as slices, once it is known where its loss is cut."""

import bisect
from collections.abc import Callable, Sequence

from jax.sharding import PartitionSpec

from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.loops.rows import rows_between
from jaxpp.stages.loops.split_scan import slices_between
from jaxpp.stages.loops.stacked import Slicing
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.own_params import num_own, num_shared
from jaxpp.types import Params

__all__ = ["Permit", "slicing_at"]

Permit = Callable[[Params, Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], Slicing]
"""The slices that a pipeline may hold: of parameters, the slices that cut loops need, and those of leaves read row by row."""


def slicing_at(
    loss: TracedLoss,
    cuts: Cuts,
    params: Params,
    specs: Sequence[PartitionSpec],
    permit: Permit,
    known: Slicing | None = None,
) -> Slicing:
    """The leaves that a cut loop runs over, and the leaves that several stages read row by row.

    A leaf that is read row by row stays whole if its rows are sharded already, or if each replica has a leaf of its own.

    Args:
        loss: traced with every layer of a loop as an equation of its own.
        cuts: where the loss is cut.
        params: tree of parameter shapes.
        specs: how the leaves are sharded inside their stages; empty if none is.
        permit: takes back what the optimizer cannot run on.
        known: the slices of another engine, if the shared parameters are to have the same slices.
    """
    shared = num_shared(params)
    if known is not None:
        return Slicing((*known.sizes[:shared], *[()] * num_own(params)))
    sharded = {leaf for leaf, spec in enumerate(specs) if next(iter(spec), None) is not None}
    single = rows_between(loss.params, loss.reads, cuts)
    single = [() if leaf in sharded or leaf >= shared else sizes for leaf, sizes in enumerate(single)]
    return permit(params, slices_between(loss.params, loss.layers, _stages_of(loss, cuts)), single)


def _stages_of(loss: TracedLoss, cuts: Cuts) -> list[int | None]:
    """The stage of each part of a loop over layers; None for a part that no cut divides, as it depends on parameters alone."""
    position = {var: k for k, i in enumerate(loss.spine) for var in loss.graph.eqns[i].outvars}
    places = [position.get(layer.result) for layer in loss.layers]
    return [None if place is None else bisect.bisect_right(cuts, place) for place in places]
