"""A step as lines, and what it returns: the same structure of names while it is lowered, of arrays once it has run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax

from jaxpp.plan.builder import Name
from jaxpp.plan.step import Leaves, Step, total_name
from jaxpp.runtime.bind import Bound
from jaxpp.stages.program import Role
from jaxpp.types import Array, Tree

__all__ = ["Lowered", "Outcome", "Purpose", "aux_names", "call_of", "with_reports"]

Purpose = Literal["update", "grads", "forward"]
"""What is run: a training step, its gradients alone, or forwards."""

_T = TypeVar("_T")


class Outcome(NamedTuple, Generic[_T]):
    """What a step returns; or, while the step is lowered, what its results are called.

    Attributes:
        loss: float scalar, on the last stage; None for a function that returns outputs, which are its aux.
        aux: the aux leaves; as the user's tree, once the step has run.
        grads: for ``grads``, the gradients of the parameters as they are held, shared and own.
        state: for ``update``, the leaves of the new state.
        model_state: for ``grads`` and ``forward``, the new model state.
        grad_norm: for ``update``.
        finite: for ``update`` with a scaled loss, whether all gradients were; if not, only the scale has changed.
        squares: for ``update``, the sum of squared gradients of each stage that owns parameters.
    """

    loss: Any
    aux: Any
    grads: Sequence[_T] = ()
    state: Leaves[_T] = Leaves()
    model_state: Sequence[_T] = ()
    grad_norm: _T | None = None
    finite: _T | None = None
    squares: Sequence[_T] = ()


@dataclass(frozen=True)
class Lowered:
    """A step as lines.

    Attributes:
        bound: the lines, with their places.
        step: what was lowered.
        inputs: the names of the arguments: leaves of the state, batch leaves, the key.
        results: the names of the results.
    """

    bound: Bound
    step: Step
    inputs: list[Name]
    results: Outcome[Name]

    @cached_property
    def outputs(self) -> list[Name]:
        """The names of the results, in the order in which the plan returns them."""
        return jax.tree.leaves(self.results, is_leaf=_is_name)

    @cached_property
    def _tree(self) -> Tree:
        return jax.tree.structure(self.results, is_leaf=_is_name)

    def outcome(self, values: Sequence[Array]) -> Outcome[Array]:
        """The results of a plan, each in its place."""
        found = self._tree.unflatten(values)
        return found._replace(aux=self.step.cuts[0].loss.aux_tree.unflatten(found.aux))


def call_of(purpose: Purpose, *, is_loss: bool) -> str:
    """What the user called."""
    return {"update": "pipe.step", "grads": "grad_fn", "forward": "pipe.evaluate"}[purpose] if is_loss else "apply"


def with_reports(found: Outcome[Name], copied: Callable[[list[Name]], Mapping[Name, Name]]) -> Outcome[Name]:
    """The results of a step, with other names for what every process can read: those that ``copied`` gives them."""
    given = (found.loss, found.grad_norm, found.finite)
    names = copied([name for name in (*given, *found.aux) if name is not None])
    loss, grad_norm, finite = (None if name is None else names[name] for name in given)
    return found._replace(loss=loss, aux=[names[name] for name in found.aux], grad_norm=grad_norm, finite=finite)


def aux_names(step: Step) -> list[Name]:
    """The name of each leaf of aux."""
    found: dict[int, Name] = {}
    for stage in range(step.num_stages):
        for ref in step.codes(stage)[0].forward.outputs:
            if ref.role in (Role.AUX, Role.ROWS):
                found[ref.index] = total_name(stage, Role.AUX, ref.index)
    return [found[k] for k in sorted(found)]


def _is_name(value: object) -> bool:
    return isinstance(value, Name)
