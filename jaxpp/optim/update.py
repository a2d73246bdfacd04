"""An optimizer's update, traced on the whole tree and placed: what ``optim.owners`` makes and ``optim.emit`` writes as lines."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from jaxpp.optim.loss_scale import Scaling
from jaxpp.plan.builder import Name
from jaxpp.plan.step import param_name, scale_name, state_name, total_name
from jaxpp.stages.graph import Graph
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Tree

__all__ = ["HUB", "Update", "UpdateInputs", "UpdatePart", "UpdateResults", "flat", "opt_name"]

HUB = 0
"""The stage where scalars of several stages meet. Its backward ends last, so nothing waits for it longer."""

_T = TypeVar("_T")
_U = TypeVar("_U")


class UpdatePart(NamedTuple):
    """One program of an update: what a stage computes between two hops of scalars from stage to stage."""

    level: int
    stage: int


class UpdateInputs(NamedTuple, Generic[_T]):
    """Something about each input of an update.

    Attributes:
        grads: gradient leaves.
        opt: optimizer leaves.
        params: parameter leaves.
        loss: the loss.
        scale: the leaves of the loss scale, for a scaled loss.
        old_state: model state leaves before the step, for a scaled loss.
        new_state: model state leaves after the step, for a scaled loss.
    """

    grads: tuple[_T, ...]
    opt: tuple[_T, ...]
    params: tuple[_T, ...]
    loss: tuple[_T, ...]
    scale: tuple[_T, ...]
    old_state: tuple[_T, ...]
    new_state: tuple[_T, ...]

    def refilled(self, values: Sequence[_U]) -> "UpdateInputs[_U]":
        """Other values, in groups of the same sizes."""
        return UpdateInputs(*_split(self, values))


class UpdateResults(NamedTuple, Generic[_T]):
    """Something about each result of an update.

    Attributes:
        params: new parameter leaves.
        opt: new optimizer leaves.
        state: model state leaves after the update, for a scaled loss.
        scale: new leaves of the loss scale, for a scaled loss.
        finite: whether all gradients were finite, for a scaled loss.
        norm: the norm of the gradient.
        squares: the square of the norm on each stage of ``Update.watched``.
    """

    params: tuple[_T, ...]
    opt: tuple[_T, ...]
    state: tuple[_T, ...]
    scale: tuple[_T, ...]
    finite: tuple[_T, ...]
    norm: tuple[_T, ...]
    squares: tuple[_T, ...]

    def refilled(self, values: Sequence[_U]) -> "UpdateResults[_U]":
        """Other values, in groups of the same sizes."""
        return UpdateResults(*_split(self, values))


def flat(groups: UpdateInputs[_T] | UpdateResults[_T]) -> list[_T]:
    """All of the groups, in order."""
    return [value for group in groups for value in group]


def _split(groups: Sequence[tuple[object, ...]], values: Sequence[_U]) -> list[tuple[_U, ...]]:
    supply = iter(values)
    return [tuple(itertools.islice(supply, len(group))) for group in groups]


def opt_name(stage: int, leaf: int) -> Name:
    """An optimizer state leaf, as its owner holds it."""
    return Name(stage, Ref(Role.OPT, leaf))


@dataclass(frozen=True)
class Update:
    """An optimizer's init and update, traced and placed.

    Attributes:
        graph: of the update, from ``UpdateInputs`` to ``UpdateResults``, both flat.
        init_graph: of ``optimizer.init``, from parameter leaves to optimizer leaves.
        tree: structure of the optimizer state.
        owner: the stage of each parameter leaf.
        opt_owner: the stage of each optimizer leaf.
        parts: the part that each equation belongs to; an equation of None is repeated where it is needed.
        watched: the stages that own parameters which are not frozen.
        scaling: how the loss is scaled, or None.
        state_owner: the stage of each model state leaf, if the loss is scaled.
        loss_stage: the stage that has the loss, and its scale.
        programs: made so far, for as long as a plan has them: they are the same at every batch size.
    """

    graph: Graph
    init_graph: Graph
    tree: Tree
    owner: tuple[int, ...]
    opt_owner: tuple[int, ...]
    parts: tuple[UpdatePart | None, ...]
    watched: tuple[int, ...]
    scaling: Scaling | None
    state_owner: tuple[int, ...]
    loss_stage: int
    programs: WeakValueDictionary[Hashable, Program] = field(default_factory=WeakValueDictionary)

    @property
    def scales(self) -> tuple[Name, ...]:
        """The names of the loss scale's leaves."""
        return () if self.scaling is None else (scale_name(self.loss_stage, 0), scale_name(self.loss_stage, 1))

    @cached_property
    def result_stages(self) -> UpdateResults[int]:
        """The stage that each result goes to."""
        scale, finite = ((), ()) if self.scaling is None else ((self.loss_stage, self.loss_stage), (HUB,))
        return UpdateResults(self.owner, self.opt_owner, self.state_owner, scale, finite, (HUB,), self.watched)

    def names(self, loss: Name, states: Sequence[Name]) -> UpdateInputs[Name]:
        """The names of the inputs, each on its owner; ``states`` are those of the new model state."""
        return UpdateInputs(
            grads=tuple(total_name(stage, Role.GRAD, leaf) for leaf, stage in enumerate(self.owner)),
            opt=tuple(opt_name(stage, leaf) for leaf, stage in enumerate(self.opt_owner)),
            params=tuple(param_name(stage, leaf) for leaf, stage in enumerate(self.owner)),
            loss=(loss,),
            scale=self.scales,
            old_state=tuple(state_name(stage, leaf) for leaf, stage in enumerate(self.state_owner)),
            new_state=() if self.scaling is None else tuple(states),
        )
