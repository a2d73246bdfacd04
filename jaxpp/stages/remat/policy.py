"""What a stage keeps for its backward, as the user wrote it: everything, the least, or what a policy says."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp.errors import ArgumentError
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import aval_of
from jaxpp.stages.remat.least import Least
from jaxpp.stages.remat.offload import Offload, Remat, each_stage
from jaxpp.types import Policy

__all__ = ["RECOMPUTE", "Kept", "kept_of", "recomputed"]

Kept = Policy | Least | None
"""What a stage keeps: what a policy says, the least, or (None) everything that its backward reads."""

RECOMPUTE: Policy = jax.checkpoint_policies.nothing_saveable
"""Keep a stage's inputs only."""

_TRANSCENDENTAL = {"cpu": 1.0}
"""The price of ``tanh`` and the like, in bytes an element of the result, by platform; nothing where it is not named."""


def kept_of(remat: Remat | Sequence[Remat], num_stages: int, platform: str) -> tuple[Kept, ...] | None:
    """What the forward of each stage keeps, from what the user passed as ``remat``; None if all keep everything.

    Raises:
        ArgumentError: it says of no stage what to keep, or the list has another length.
    """
    known: dict[str | None, Kept] = {None: None, "keep": None, "recompute": RECOMPUTE}
    known["least"] = known["offload"] = Least(_TRANSCENDENTAL.get(platform, 0.0))
    each = each_stage(remat, num_stages)
    wrong = [
        f"stage {k}: {item!r}"
        for k, item in enumerate(each)
        if not (callable(item) or item is None or isinstance(item, Offload) or (isinstance(item, str) and item in known))
    ]
    wrong += [f"{len(each)} for {num_stages} stages"] if len(each) != num_stages else []
    if wrong:
        raise ArgumentError(
            "remat",
            'a stage keeps the least ("least"; "offload": in host memory), everything ("keep"), its inputs only ("recompute"), '
            "or what a policy says",
            wrong,
            'pass "least", "offload", "recompute", a policy of jax.checkpoint_policies, or a list of one a stage',
        )
    each = tuple("offload" if isinstance(item, Offload) else item for item in each)
    kept: tuple[Any, ...] = tuple(item if callable(item) else known[item] for item in each)
    return kept if any(item is not None for item in kept) else None


def recomputed(graph: Graph, forward: Collection[int], policy: Policy) -> set[int]:
    """The equations of the forward whose results a policy does not keep.

    Raises:
        ArgumentError: a policy that answers anything but True or False.
    """
    found = set()
    for i in forward:
        eqn = graph.eqns[i]
        if not eqn.effects:
            try:
                keep = policy(eqn.primitive, *(aval_of(atom) for atom in eqn.invars), **eqn.params)
            except Exception as error:
                error.add_note(
                    "jaxpp: raised by the policy passed as remat, which is one like jax.checkpoint_policies.dots_saveable"
                )
                raise
            if not isinstance(keep, (bool, np.bool_)):
                raise ArgumentError(
                    "remat",
                    "a policy says for each operation whether its result is kept (True) or recomputed (False)",
                    f"{type(keep).__name__} for {eqn.primitive.name}",
                    "pass a policy that does not offload, such as jax.checkpoint_policies.dots_saveable",
                )
            found |= set() if keep else {i}
    return found
