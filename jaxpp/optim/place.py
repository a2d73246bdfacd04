"""Any optax optimizer, run where the parameters live, exactly as on one device.

Problem: ``optimizer.update`` wants the whole tree; the tree is spread over devices. Idea: trace it on the whole tree, as shapes,
and give every equation to the stage that owns its largest operand. Mechanism: what depends on no parameter (counts, schedules)
belongs to nobody and is repeated where it is needed; scalars of several stages meet on stage 0 (a global norm); an equation's
*level* counts the hops before it, and one program runs per stage and level. adamw, lion, adafactor and lamb need one level;
clip_by_global_norm three, with only scalars between them, packed into one vector a pair of stages.

An optimizer state leaf belongs to the stage whose gradients it is combined with; what is combined with none (a step count)
belongs to stage 0.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal, Var

from jaxpp.errors import OptimizerError
from jaxpp.optim.conditions import open_conditions
from jaxpp.optim.loss_scale import Scaling
from jaxpp.plan.builder import Name
from jaxpp.plan.step import param_name, scale_name, state_name, total_name
from jaxpp.stages.graph import Graph, ancestors, marked, trace
from jaxpp.stages.jaxpr import aval_of, shapes_of, variables
from jaxpp.stages.loss.roles import describe, path_name
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["HUB", "Color", "Update", "flat_update", "opt_name", "plan_update", "trace_update", "unread_gradients"]

HUB = 0
"""The stage where scalars of several stages meet. Its backward ends last, so nothing waits for it longer."""

_MOVABLE = 1024
"""The most elements of a value that may move between stages in an update."""

_LINE_SEARCH = re.compile(r"missing \d+ required keyword-only arguments?: .*'value_fn'")
"""What Python says of an update that wants to call the loss."""

Color = tuple[int, int]
"""(level, stage): one program of the update."""


def opt_name(stage: int, leaf: int) -> Name:
    """An optimizer state leaf, as its owner holds it."""
    return Name(stage, Ref(Role.OPT, leaf))


@dataclass(frozen=True)
class Update:
    """An optimizer's init and update, traced and placed.

    Attributes:
        graph: inputs are gradient leaves, optimizer leaves, parameter leaves, the loss, and for a scaled loss the scale's leaves
            and the model state before and after the step; outputs new parameter leaves, new optimizer leaves, for a scaled loss the
            model state, the scale's leaves and whether all was finite, then the norm of the gradient, and its square on each stage
            of ``watched``.
        birth: ``optimizer.init``: parameter leaves to optimizer leaves.
        tree: structure of the optimizer state.
        owner: the stage of each parameter leaf.
        opt_owner: the stage of each optimizer leaf.
        colors: the level and stage of each equation; None is repeated where needed.
        watched: the stages that own parameters which are not frozen.
        state_owner: the stage of each model state leaf, if the loss is scaled.
        loss_stage: the stage that has the loss, and its scale.
        programs: made so far, for as long as a plan has them: they are the same at every batch size.
    """

    graph: Graph
    birth: Graph
    tree: Any
    owner: tuple[int, ...]
    opt_owner: tuple[int, ...]
    colors: tuple[Color | None, ...]
    watched: tuple[int, ...]
    scaling: Scaling | None
    state_owner: tuple[int, ...]
    loss_stage: int
    programs: WeakValueDictionary[Any, Program] = field(default_factory=WeakValueDictionary)

    @property
    def scales(self) -> tuple[Name, ...]:
        """The names of the loss scale's leaves."""
        return () if self.scaling is None else (scale_name(self.loss_stage, 0), scale_name(self.loss_stage, 1))

    @property
    def num_params(self) -> int:
        """How many parameter leaves there are."""
        return len(self.owner)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The stage of each result."""
        scaled = () if self.scaling is None else (*self.state_owner, self.loss_stage, self.loss_stage, HUB)
        return (*self.owner, *self.opt_owner, *scaled, HUB, *self.watched)

    def names(self, loss: Name, states: Sequence[Name]) -> list[Name]:
        """The names of the inputs, each on its owner; ``states`` are those of the new model state."""
        grads = [total_name(stage, Role.GRAD, leaf) for leaf, stage in enumerate(self.owner)]
        opts = [opt_name(stage, leaf) for leaf, stage in enumerate(self.opt_owner)]
        params = [param_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        scaled = []
        if self.scaling is not None:
            scaled = [*self.scales, *(state_name(stage, leaf) for leaf, stage in enumerate(self.state_owner)), *states]
        return [*grads, *opts, *params, loss, *scaled]


def unread_gradients(optimizer: optax.GradientTransformation, params: Any, loss: Any) -> frozenset[int]:
    """The parameter leaves whose gradient changes nothing, as with ``optax.set_to_zero``: the optimizer freezes them.

    Args:
        optimizer: any optax transformation.
        params: tree of parameter shapes.
        loss: shape of the loss.

    Raises:
        OptimizerError: it calls the loss (a line search).
    """
    update, opt_leaves, _ = flat_update(optimizer, params)
    leaves = jax.tree.leaves(params)
    graph = trace_update(update, leaves, opt_leaves, leaves, loss)
    read = ancestors(graph, variables(graph.outputs))
    return frozenset(k for k, var in enumerate(graph.inputs[: len(leaves)]) if var not in read)


def plan_update(
    optimizer: optax.GradientTransformation,
    params: Any,
    owner: Sequence[int],
    loss_stage: int,
    loss: Any,
    frozen: Collection[int] = (),
    scaling: Scaling | None = None,
    states: Sequence[tuple[int, Any]] = (),
    counted: Collection[int] | None = None,
) -> Update:
    """Trace an optimizer on a spread tree and place its equations.

    Args:
        optimizer: any optax transformation.
        params: tree of parameter shapes.
        owner: the stage of each leaf.
        loss_stage: the stage that has the loss.
        loss: shape of the loss.
        frozen: the leaves whose gradient it does not read; they are given none.
        scaling: how the loss is scaled, if it is: then nothing changes where a gradient is not finite.
        states: stage and shape of each model state leaf.
        counted: the leaves that count in the norm that is reported; all unless given.

    Raises:
        OptimizerError: it calls the loss (a line search), or would move a large array between stages.
    """
    leaves, tree = jax.tree.flatten(params)
    plain, opt_leaves, opt_tree = flat_update(optimizer, params)
    counted = range(len(leaves)) if counted is None else counted
    apart = {*frozen, *(k for k in range(len(leaves)) if k not in counted)}
    wanted = sorted({home for leaf, home in enumerate(owner) if leaf not in apart})

    def update(
        given: list[Any], opt: list[Any], params: list[Any], loss: Any, scale: list[Any], old: list[Any], new: list[Any]
    ) -> list[Any]:
        made = [jnp.zeros_like(grad) if k in frozen else grad for k, grad in enumerate(given)]
        if scaling is None:
            results = plain(made, opt, params, loss)
        else:
            made, finite = scaling.unscale(made, scale)
            pairs = zip((*plain(made, opt, params, loss), *new), (*params, *opt, *old), strict=True)
            results = [jnp.where(finite, after, before) for after, before in pairs]
            results += [*scaling.adjust(scale, finite), finite]
        free = [(home, _wide(grad)) for k, (home, grad) in enumerate(zip(owner, made, strict=True)) if k not in apart]
        parts = [optax.tree.norm([grad for home, grad in free if home == stage], squared=True) for stage in wanted]
        return [
            jnp.array(leaf, copy=True)
            for leaf in (*results, optax.tree.norm([grad for k, grad in enumerate(made) if k in counted]), *parts)
        ]

    def birth(params: list[Any]) -> list[Any]:
        return [jnp.array(leaf, copy=True) for leaf in jax.tree.leaves(optimizer.init(tree.unflatten(params)))]

    scale = [] if scaling is None else shapes_of(scaling.birth())
    stages, shapes = tuple(stage for stage, _ in states), [shape for _, shape in states]
    graph = trace_update(update, leaves, opt_leaves, leaves, loss, scale, shapes, shapes)
    if len(set(owner)) > 1:
        graph = open_conditions(graph)
    born, _ = trace(birth, leaves)
    homes = (*owner, *(loss_stage for _ in (loss, *scale)), *stages, *stages)
    placer = _Placer(graph, len(leaves), len(opt_leaves), tuple(owner), homes)
    placer.own(_born_with(born, owner))
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    colors = placer.color(paths)
    return Update(graph, born, opt_tree, tuple(owner), placer.opt_owner(), colors, tuple(wanted), scaling, stages, loss_stage)


def flat_update(optimizer: optax.GradientTransformation, params: Any) -> tuple[Callable[..., list[Any]], list[Any], Any]:
    """The update as a function of flat lists (gradients, state, parameters, loss); and the leaves and tree of the state."""
    tree = jax.tree.structure(params)
    try:
        opt_leaves, opt_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, params))
    except Exception as error:
        error.add_note("jaxpp: raised while tracing the optimizer's init(params)")
        raise
    with_value = optax.with_extra_args_support(optimizer)

    def update(grads: list[Any], opt: list[Any], params: list[Any], loss: Any) -> list[Any]:
        whole = tree.unflatten(params)
        updates, new_opt = with_value.update(tree.unflatten(grads), opt_tree.unflatten(opt), whole, value=loss)
        return [*jax.tree.leaves(optax.apply_updates(whole, updates)), *jax.tree.leaves(new_opt)]

    return update, opt_leaves, opt_tree


def trace_update(update: Callable[..., list[Any]], *shapes: Any) -> Graph:
    """Trace an update.

    Raises:
        OptimizerError: it calls the loss (a line search).
        Exception: whatever else it raises, unchanged, with a note.
    """
    try:
        return trace(update, *shapes)[0]
    except Exception as error:
        if isinstance(error, TypeError) and _LINE_SEARCH.search(str(error)):
            raise OptimizerError(
                "optimizer",
                "an optimizer sees gradients, its state, the parameters and the value of the loss, and cannot call the loss again",
                str(error),
                "use a transformation without a line search, such as optax.adamw or optax.sgd",
            ) from error
        error.add_note(
            "jaxpp: raised while tracing the optimizer's update(grads, state, params); a transformation that takes more is given "
            "value=loss"
        )
        raise


def _wide(grad: Any) -> Any:
    """A float16 gradient as float32: its square would vanish where it is small."""
    return grad.astype(jnp.float32) if grad.dtype == jnp.float16 else grad


def _born_with(birth: Graph, owner: Sequence[int]) -> list[int | None]:
    """The stage of each optimizer leaf that is made from one parameter (a copy, an average), None for others."""
    found = marked(birth, {var: 1 << stage for var, stage in zip(birth.inputs, owner, strict=True)})
    stages = [0 if isinstance(atom, Literal) else found.get(atom, 0) for atom in birth.outputs]
    return [bits.bit_length() - 1 if bits.bit_count() == 1 else None for bits in stages]


def _size(atom: Any) -> int:
    return math.prod(getattr(aval_of(atom), "shape", ()))


class _Placer:
    """Finds the owner of every optimizer leaf, then the level and stage of every equation."""

    def __init__(self, graph: Graph, num_params: int, num_opt: int, owner: tuple[int, ...], homes: tuple[int, ...]):
        """``homes`` are the stages of the inputs after the gradients and the optimizer leaves."""
        self.graph = graph
        inputs = graph.inputs
        self.opt = inputs[num_params : num_params + num_opt]
        self.stage: dict[Var, int] = dict(zip(inputs[:num_params], owner, strict=True))
        self.stage |= dict(zip(inputs[num_params + num_opt :], homes, strict=True))

    def own(self, born: Sequence[int | None]) -> None:
        """Follow the dataflow: a leaf goes to the stage of the first owned value it is combined with."""
        self.stage |= {var: stage for var, stage in zip(self.opt, born, strict=True) if stage is not None}
        stage = dict(self.stage)
        lost = {1 << k: var for k, var in enumerate(self.opt) if var not in stage}  # leaves without a stage yet, a bit each
        origins = {var: bit for bit, var in lost.items()}
        arrays = sum(bit for bit, var in lost.items() if _size(var) > 1)
        inexact = sum(bit for bit, var in lost.items() if jnp.issubdtype(aval_of(var).dtype, jnp.inexact))
        for eqn in self.graph.eqns:
            operands = variables(eqn.invars)
            owned = [var for var in operands if var in stage]
            leaves = functools.reduce(operator.or_, (origins.get(var, 0) for var in operands), 0)
            if not owned:
                origins.update(dict.fromkeys(eqn.outvars, leaves))
                continue
            largest = max(owned, key=_size)
            home = stage[largest]
            found = leaves & (arrays | inexact if _size(largest) == 1 else arrays)
            arrays, inexact = arrays & ~found, inexact & ~found
            while found:
                var = lost[found & -found]
                stage[var] = self.stage[var] = home
                found &= found - 1
            stage.update(dict.fromkeys(eqn.outvars, home))

    def opt_owner(self) -> tuple[int, ...]:
        """The stage of each optimizer leaf."""
        return tuple(self.stage.get(var, HUB) for var in self.opt)

    def color(self, paths: Sequence[str]) -> tuple[Color | None, ...]:
        """Level and stage of each equation.

        Raises:
            OptimizerError: an equation combines large values of several stages.
        """
        place: dict[Var, Color] = {var: (0, stage) for var, stage in self.stage.items()}
        colors: list[Color | None] = []
        crossed: list[str] = []
        for eqn in self.graph.eqns:
            owned = [var for var in variables(eqn.invars) if var in place]
            if not owned:
                colors.append(None)
                continue
            stages = {place[var][1] for var in owned}
            largest = max(owned, key=_size)
            home = place[largest][1] if len(stages) == 1 or _size(largest) > 1 else HUB
            for var in owned:
                away = place[var][1]
                if away != home and _size(var) > _MOVABLE:
                    both = f"{describe(aval_of(largest))} of stage {home}, {describe(aval_of(var))} of stage {away}"
                    crossed.append(f"{eqn.primitive.name}: {both}")
            level = max(place[var][0] + (place[var][1] != home and var not in self.stage) for var in owned)
            colors.append((level, home))
            place.update((var, (level, home)) for var in eqn.outvars)
        if crossed:
            raise OptimizerError(
                "optimizer",
                "an update may combine small values of different stages (a norm), but not move large arrays between them",
                crossed,
                "use a transformation that treats each parameter by itself, or pass num_stages=1",
                f"parameters: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
            )
        return self._late(colors)

    def _late(self, colors: Sequence[Color | None]) -> tuple[Color | None, ...]:
        """Each equation at the last level at which it serves its readers, so that no moment is held from one level to the next."""
        users, results = self.graph.users(), set(variables(self.graph.outputs))
        late = list(colors)
        for i, eqn in reversed(list(enumerate(self.graph.eqns))):
            color = colors[i]
            readers = [late[j] for var in eqn.outvars for j in users.get(var, ())]
            large = any(_size(var) > 1 for var in eqn.outvars)
            if color is not None and large and readers and results.isdisjoint(eqn.outvars):
                latest = min(reader[0] - (reader[1] != color[1]) for reader in readers if reader is not None)
                late[i] = max(color[0], latest), color[1]
        return tuple(late)
