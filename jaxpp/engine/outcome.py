"""A step as lines: what it takes of a batch, and what it returns, names while it is lowered and arrays once it has run.

Every process passes a batch of the same shapes; of what its stages do not read a shape will do, and of a global array its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax

from jaxpp.errors import BatchError
from jaxpp.lowering.builder import Name
from jaxpp.lowering.step import Leaves, Step, total_name
from jaxpp.runtime.bind import Bound, BoundLine
from jaxpp.runtime.edges import unaliased
from jaxpp.runtime.processes.here import LocalRows, local
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.program import Role
from jaxpp.types import Array, Batch, Leaf

Purpose = Literal["update", "grads", "forward"]  # what is run: a training step, its gradients alone, or forwards

_T = TypeVar("_T")


class Outcome(NamedTuple, Generic[_T]):
    """What a step returns; or, while the step is lowered, what its results are called."""

    loss: Any  # float scalar, on the last stage; None for a function that returns outputs, which are its aux
    aux: Any  # the aux leaves; as the user's tree, once the step has run
    grads: Sequence[_T] = ()  # for "grads", the gradients of the floating parameters as they are held, shared and own
    state: Leaves[_T] = Leaves()  # for "update", the leaves of the new state
    model_state: Sequence[_T] = ()  # for "grads" and "forward"
    grad_norm: _T | None = None  # for "update"
    finite: _T | None = None  # for "update" with a scaled loss, whether all gradients were; if not, only the scale has changed
    squares: Sequence[_T] = ()  # for "update", the sum of squared gradients of each stage that owns parameters


@dataclass(frozen=True)
class LoweredStep:
    """A step as lines, with their places."""

    bound: Bound  # its inputs are leaves of the state, batch leaves, the key; its outputs those of the plan, in their order
    step: Step
    tree: Any  # the structure of the results, an ``Outcome``

    def outcome(self, values: Sequence[Array]) -> Outcome[Array]:
        """The results of a plan, each in its place."""
        found = self.tree.unflatten(values)
        return found._replace(aux=self.step.cuts[0].loss.aux_tree.unflatten(found.aux))


def call_of(purpose: Purpose, *, is_loss: bool) -> str:
    """What the user called."""
    return {"update": "pipe.step", "grads": "grad_fn", "forward": "pipe.evaluate"}[purpose] if is_loss else "apply"


def aux_names(step: Step) -> list[Name]:
    """The name of each leaf of aux."""
    found: dict[int, Name] = {}
    for stage in range(step.num_stages):
        for ref in step.codes(stage)[0].forward.outputs:
            if ref.role in (Role.AUX, Role.ROWS):
                found[ref.index] = total_name(stage, Role.AUX, ref.index)
    return [found[k] for k in sorted(found)]


def batch_leaves(batch: Batch) -> list[Leaf]:
    """The leaves of a batch as far as they are in this process; NumPy arrays are copied."""
    if jax.process_count() == 1:
        return list(map(unaliased, jax.tree.leaves(batch)))
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return [unaliased(local(leaf, f"batch{jax.tree_util.keystr(path)}")) for path, leaf in leaves]


def leaves_read(lowered: LoweredStep) -> Mapping[int, Sequence[BoundLine]]:
    """The places of the batch leaves that stages of this process read, and the lines that bring each of them to its stages."""
    places = {name: place for place, name in enumerate(lowered.step.given)}
    found: dict[int, list[BoundLine]] = {}
    for line in lowered.bound.lines:
        for name in line.inputs:
            if name in places and line.place.is_here:
                found.setdefault(places[name], []).append(line)
    return found


def check_leaves(lowered: LoweredStep, batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Refuse a batch of which this process reads more than it was given; ``leaves`` are its ``batch_leaves``."""
    partial = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, (jax.ShapeDtypeStruct, LocalRows))}
    if not partial:
        return
    wrong, lines, replicas = [], leaves_read(lowered), lowered.step.num_replicas
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    for k, leaf in partial.items():
        for line in lines.get(k, ()):
            lacks = "is a shape without values"
            if isinstance(leaf, LocalRows):
                split = replicas > 1 and k not in lowered.step.whole
                row = (leaf.split(replicas) if split else leaf).lacks(line.place.home(line.outputs[0].ref))
                if row is None:
                    continue
                lacks = f"lacks row {row}"
            wrong.append(f"batch{paths[k]}: {describe(leaf)} {lacks}, and stage {line.stage} reads it, on {line.place}")
    if wrong:
        rule = f"process {jax.process_index()} passes the values that its own stages read of a batch"
        fix = "pass them in this process; pipe.reads(batch) says which leaves each process reads"
        raise BatchError("batch", rule, wrong, fix)
