"""A cut loss and its optimizer, placed: where every leaf of a state lives, and what it is called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax

from jaxpp.engine.layout import Layout
from jaxpp.engine.sharding_rules import opt_specs_of
from jaxpp.optim.owners import plan_update
from jaxpp.optim.update import Update, opt_name
from jaxpp.options import Options
from jaxpp.plan.builder import Name
from jaxpp.plan.step import Leaves, param_name, state_name
from jaxpp.runtime.place import Place, Placement
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.own_params import Joint
from jaxpp.stages.program import Role
from jaxpp.types import Aval, Home

__all__ = ["Placed", "place_leaves"]


@dataclass(frozen=True)
class Placed:
    """Where the leaves of a state live.

    Attributes:
        layout: what the first batch decided.
        base: where each stage lives.
        known: how parameters and optimizer leaves are sharded there, and which of them each replica has of its own.
        update: the optimizer, placed; None without an optimizer.
        scales: the shape of each leaf of the loss scale.
    """

    layout: Layout
    base: Placement
    known: Mapping[str, Any]
    update: Update | None
    scales: tuple[Aval, ...]

    @cached_property
    def placement(self) -> Placement:
        """Where each stage lives, and how values are sharded there."""
        return self.base.with_values(**self.known)

    @cached_property
    def names(self) -> Leaves[Name]:
        """What each leaf of a state is called."""
        layout, update = self.layout, self.update
        params = [param_name(stage, leaf) for leaf, stage in enumerate(layout.owner)]
        opts = [opt_name(stage, leaf) for leaf, stage in enumerate(update.opt_owner)] if update else []
        states = [state_name(stage, leaf) for leaf, stage in enumerate(layout.state_owner)]
        a, b = layout.num_shared, len(opts) - self._num_own_opts
        return Leaves(params[:a], params[a:], opts[:b], opts[b:], states, list(update.scales) if update else [])

    @cached_property
    def shapes(self) -> Leaves[Aval]:
        """The shape of each leaf of a state."""
        opts = [] if self.update is None else [atom.aval for atom in self.update.init_graph.outputs]
        flat = [*jax.tree.leaves(self.layout.params), *opts, *self.layout.state_shapes, *self.scales]
        return self.names.fill(flat)

    @cached_property
    def shapes_by_role(self) -> Mapping[tuple[Role, int], Aval]:
        """The shape of each leaf of a state, by what it is and its number."""
        return {(n.ref.role, n.ref.index): aval for n, aval in zip(self.names.flat(), self.shapes.flat(), strict=True)}

    @cached_property
    def homes(self) -> Leaves[Home]:
        """The device, or sharding, of each leaf of a state."""
        names = self.names.flat()
        return self.names.fill([place.home(name.ref) for place, name in zip(self.places(names), names, strict=True)])

    def places(self, names: Sequence[Name]) -> list[Place]:
        """Where each of these names lives."""
        return [self.placement[name.stage] for name in names]

    @property
    def _num_own_opts(self) -> int:
        """How many optimizer leaves each replica has of its own; they are the last."""
        if self.update is None or not isinstance(self.layout.params, Joint):
            return 0
        return self.update.tree.children()[1].num_leaves


def place_leaves(options: Options, optimizer: optax.GradientTransformation | None, layout: Layout, first: CutLoss) -> Placed:
    """Trace the optimizer, give each of its equations to a stage, and say where every leaf lives.

    Raises:
        OptimizerError: the optimizer would move large arrays between stages.
    """
    scales = () if options.loss_scale is None else tuple(shapes_of(options.loss_scale.init()))
    params, replicated = layout.params, options.placement.num_replicas > 1
    own = {(role, layout.num_shared + k) for k in range(layout.num_own) for role in (Role.PARAM, Role.GRAD)}
    known: dict[str, Any] = {"specs": layout.specs, "own": frozenset(own if replicated else ())}
    if optimizer is None:
        return Placed(layout, options.placement, known, None, scales)
    (loss,) = shapes_of(first.loss.graph.outputs[:1])
    states = list(zip(layout.state_owner, layout.state_shapes, strict=True)) if options.loss_scale else ()
    given = (layout.frozen, options.loss_scale, states, range(layout.num_shared))
    update = plan_update(optimizer, params, layout.owner, len(first.stages) - 1, loss, *given)
    opt_state = jax.eval_shape(optimizer.init, params)
    specs = opt_specs_of(opt_state, params, layout.specs)
    if replicated and isinstance(params, Joint):  # the optimizer state of two parts is a pair
        leaves = [len(jax.tree.leaves(part)) for part in opt_state]
        own |= {(Role.OPT, leaves[0] + k) for k in range(leaves[1])}
    known |= {"opt_specs": specs, "own": frozenset(own if replicated else ())}
    return Placed(layout, options.placement, known, update, scales)
