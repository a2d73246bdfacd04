"""Which parameter leaves a pipeline holds as slices, once it is known where its loss is cut."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp.options import Settings
from jaxpp.runtime.sharding_rules import specs_of
from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.joint import Joint
from jaxpp.stages.loops.rows import rows_between
from jaxpp.stages.loops.split_scan import slices_between
from jaxpp.stages.loops.stacked import Slicing
from jaxpp.stages.loss.traced_loss import TracedLoss

__all__ = ["Permit", "slicing_at"]

Permit = Callable[[Any, Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], Slicing]
"""The slices that a pipeline may hold: of parameters, those that cut loops need and those of what is read row by row."""


def slicing_at(
    loss: TracedLoss, cuts: Cuts, params: Any, settings: Settings, permit: Permit, known: Slicing | None = None
) -> Slicing:
    """The leaves that a cut loop runs over, and those that several stages read row by row.

    A leaf that is read row by row stays whole where its rows are sharded already, or belong to a set of theta[t].

    Args:
        loss: traced with every layer of a loop as an equation of its own.
        cuts: where it is cut.
        params: tree of parameter shapes.
        settings: of the pipeline.
        permit: takes back what the optimizer cannot run on.
        known: the slices of another engine, if the shared parameters are to have the same.
    """
    count = len(jax.tree.leaves(params))
    shared = len(jax.tree.leaves(params.shared)) if isinstance(params, Joint) else count
    if known is not None:
        return Slicing((*known.sizes[:shared], *[()] * (count - shared)))
    specs = specs_of(settings.shardings, params, settings.placement.num_shards)
    sharded = {leaf for leaf, spec in enumerate(specs) if next(iter(spec), None) is not None}
    single = rows_between(loss.params, loss.reads, cuts)
    single = [() if leaf in sharded or leaf >= shared else sizes for leaf, sizes in enumerate(single)]
    return permit(params, slices_between(loss.params, loss.layers, _stages_of(loss, cuts)), single)


def _stages_of(loss: TracedLoss, cuts: Cuts) -> list[int | None]:
    """The stage of each part of a loop over layers; None for one that no cut divides, as it depends on parameters alone."""
    position = {var: k for k, i in enumerate(loss.spine) for var in loss.graph.eqns[i].outvars}
    places = [position.get(layer.result) for layer in loss.layers]
    return [None if place is None else bisect.bisect_right(cuts, place) for place in places]
