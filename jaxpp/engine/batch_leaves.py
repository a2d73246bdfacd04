"""The leaves of a batch as a step takes them, and which of them a process reads.

Every process passes a batch of the same shapes, and reads of it only what its own stages read. What it does not read may be a shape
(``jax.ShapeDtypeStruct``); of a global array it has the rows that are here. Whether that is enough is known before anything runs.
"""

from collections.abc import Mapping, Sequence

import jax

from jaxpp.engine.outcome import Lowered
from jaxpp.errors import BatchError
from jaxpp.plan.builder import CALLER
from jaxpp.runtime.bind import BoundLine
from jaxpp.runtime.processes.here import LocalRows, local
from jaxpp.runtime.transfer import unaliased
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.program import Role
from jaxpp.types import Batch, Leaf

__all__ = ["batch_leaves", "check_leaves", "leaves_read"]


def batch_leaves(batch: Batch) -> list[Leaf]:
    """The leaves of a batch as far as they are in this process; NumPy arrays are copied.

    Raises:
        BatchError: a global array is divided along another axis than the first.
    """
    if jax.process_count() == 1:
        return list(map(unaliased, jax.tree.leaves(batch)))
    return [unaliased(local(leaf, f"batch{jax.tree_util.keystr(path)}")) for path, leaf in _with_paths(batch)]


def leaves_read(lowered: Lowered) -> Mapping[int, Sequence[BoundLine]]:
    """The numbers of the batch leaves that stages of this process read, and the lines that bring each of them to its stages."""
    found: dict[int, list[BoundLine]] = {}
    for line in lowered.bound.lines:
        for name in line.inputs:
            if name.stage == CALLER and name.ref.role == Role.BATCH and line.place.is_here:
                found.setdefault(name.ref.index, []).append(line)
    return found


def check_leaves(lowered: Lowered, batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Refuse a batch of which this process reads more than it was given.

    Args:
        lowered: the step.
        batch: as the caller passed it.
        leaves: of it, as ``batch_leaves`` returns them.

    Raises:
        BatchError: a stage of this process reads a leaf that is a shape here, or rows that are not here.
    """
    partial = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, (jax.ShapeDtypeStruct, LocalRows))}
    if not partial:
        return
    wrong, lines = [], leaves_read(lowered)
    for k, leaf in partial.items():
        where = f"batch{jax.tree_util.keystr(_with_paths(batch)[k][0])}: {describe(leaf)}"
        for line in lines.get(k, ()):
            row = None if isinstance(leaf, jax.ShapeDtypeStruct) else _lacks(lowered, k, leaf, line)
            lacks = f"lacks row {row}" if isinstance(leaf, LocalRows) else "is a shape without values"
            if row is not None or not isinstance(leaf, LocalRows):
                wrong.append(f"{where} {lacks}, and stage {line.stage} reads it, on {line.place}")
    if wrong:
        rule = f"process {jax.process_index()} passes the values that its own stages read of a batch"
        fix = "pass them in this process; pipe.reads(batch) says which leaves each process reads"
        raise BatchError("batch", rule, wrong, fix)


def _lacks(lowered: Lowered, leaf: int, rows: LocalRows, line: BoundLine) -> int | None:
    """The first row that a place of this process reads and does not have."""
    (target,) = line.outputs
    replicas = lowered.step.num_replicas
    split = replicas > 1 and leaf not in lowered.step.shared
    return (rows.split(replicas) if split else rows).lacks(line.place.home(target.ref))


def _with_paths(batch: Batch) -> list[tuple[jax.tree_util.KeyPath, Leaf]]:
    return jax.tree_util.tree_leaves_with_path(batch)
