"""Any optax optimizer, run where the parameters live, exactly as on one device.

Problem: ``optimizer.update`` wants the whole tree; the tree is spread over devices. Idea: trace it on the whole tree, as shapes,
and give every equation to the stage that owns its largest operand. Mechanism: what depends on no parameter (counts, schedules)
belongs to nobody and is repeated where it is needed; scalars of several stages meet on stage 0 (a global norm); an equation's
*level* counts the hops before it, and one program runs per stage and level. adamw, lion, adafactor and lamb need one level;
clip_by_global_norm three, with only scalars between them, packed into one vector a pair of stages.

An optimizer state leaf belongs to the stage whose gradients it is combined with; what is combined with none (a step count)
belongs to stage 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal, Var

from jaxpp.errors import OptimizerError
from jaxpp.runtime.birth import closed_function
from jaxpp.runtime.lower import Name, grad_name, param_name
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.plan import Draft
from jaxpp.stages.graph import Graph, Piece, aval_of, carve, descendants, trace, variables
from jaxpp.stages.loss import describe, path_name
from jaxpp.stages.program import Program, Ref, Role, shapes_of

__all__ = ["Update", "opt_name", "plan_update"]

HUB = 0
"""The stage where scalars of several stages meet. Its backward ends last, so nothing waits for it longer."""

_MOVABLE = 1024
"""The most elements of a value that may move between stages in an update."""

Color = tuple[int, int]
"""(level, stage): one program of the update."""


def opt_name(stage: int, leaf: int) -> Name:
    """An optimizer state leaf, as its owner holds it."""
    return Name(stage, Ref(Role.OPT, leaf))


@dataclass(frozen=True)
class Update:
    """An optimizer's init and update, traced and placed.

    Attributes:
        graph: inputs are gradient leaves, optimizer leaves, parameter leaves, the loss; outputs new parameter leaves, new
            optimizer leaves, the norm of the gradient, and its square on each stage that owns parameters.
        birth: ``optimizer.init``: parameter leaves to optimizer leaves.
        tree: structure of the optimizer state.
        owner: the stage of each parameter leaf.
        opt_owner: the stage of each optimizer leaf.
        colors: the level and stage of each equation; None is repeated where needed.
    """

    graph: Graph
    birth: Graph
    tree: Any
    owner: tuple[int, ...]
    opt_owner: tuple[int, ...]
    colors: tuple[Color | None, ...]

    @property
    def num_params(self) -> int:
        """How many parameter leaves there are."""
        return len(self.owner)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The stage of each result."""
        return (*self.owner, *self.opt_owner, HUB, *self.trained)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The stages that own parameters."""
        return tuple(sorted(set(self.owner)))

    def names(self, loss: Name) -> list[Name]:
        """The names of the inputs, each on its owner."""
        grads = [grad_name(stage, leaf) for leaf, stage in enumerate(self.owner)]
        opts = [opt_name(stage, leaf) for leaf, stage in enumerate(self.opt_owner)]
        return [*grads, *opts, *(param_name(stage, leaf) for leaf, stage in enumerate(self.owner)), loss]


def plan_update(optimizer: optax.GradientTransformation, params: Any, owner: Sequence[int], loss_stage: int, loss: Any) -> Update:
    """Trace an optimizer on a spread tree and place its equations.

    Args:
        optimizer: any optax transformation.
        params: tree of parameter shapes.
        owner: the stage of each leaf.
        loss_stage: the stage that has the loss.
        loss: shape of the loss.

    Raises:
        OptimizerError: it calls the loss (a line search), or would move a large array between stages.
    """
    leaves, tree = jax.tree.flatten(params)
    state = jax.eval_shape(optimizer.init, params)
    opt_leaves, opt_tree = jax.tree.flatten(state)
    with_value = optax.with_extra_args_support(optimizer)

    def update(grads: list[Any], opt: list[Any], params: list[Any], loss: Any) -> list[Any]:
        whole_grads, whole = tree.unflatten(grads), tree.unflatten(params)
        updates, new_opt = with_value.update(whole_grads, opt_tree.unflatten(opt), whole, value=loss)
        results = [*jax.tree.leaves(optax.apply_updates(whole, updates)), *jax.tree.leaves(new_opt)]
        own = [[_wide(grad) for grad, home in zip(grads, owner, strict=True) if home == stage] for stage in sorted(set(owner))]
        parts = [optax.tree.norm(part, squared=True) for part in own]
        return [jnp.array(leaf, copy=True) for leaf in (*results, optax.tree.norm(whole_grads), *parts)]

    def birth(params: list[Any]) -> list[Any]:
        return [jnp.array(leaf, copy=True) for leaf in jax.tree.leaves(optimizer.init(tree.unflatten(params)))]

    try:
        graph, _ = trace(update, leaves, opt_leaves, leaves, loss)
    except TypeError as error:
        if "value_fn" not in str(error) and "keyword-only" not in str(error):
            raise
        raise OptimizerError(
            "optimizer",
            "an optimizer sees gradients, its state, the parameters and the value of the loss, and cannot call the loss again",
            str(error),
            "use a transformation without a line search, such as optax.adamw or optax.sgd",
        ) from error
    born, _ = trace(birth, leaves)
    placer = _Placer(graph, len(leaves), len(opt_leaves), tuple(owner), loss_stage)
    placer.own(_born_with(born, owner))
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    colors = placer.color(paths)
    return Update(graph, born, opt_tree, tuple(owner), placer.opt_owner(), colors)


def _wide(grad: Any) -> Any:
    """A float16 gradient as float32: its square would vanish where it is small."""
    return grad.astype(jnp.float32) if grad.dtype == jnp.float16 else grad


def _born_with(birth: Graph, owner: Sequence[int]) -> list[int | None]:
    """The stage of each optimizer leaf that is made from one parameter (a copy, an average), None for others."""
    reached = [descendants(birth, [var]) for var in birth.inputs]
    result: list[int | None] = []
    for atom in birth.outputs:
        stages = {owner[k] for k, vars_ in enumerate(reached) if not isinstance(atom, Literal) and atom in vars_}
        result.append(stages.pop() if len(stages) == 1 else None)
    return result


def _size(atom: Any) -> int:
    return int(np.prod(getattr(aval_of(atom), "shape", ()), dtype=np.int64))


class _Placer:
    """Finds the owner of every optimizer leaf, then the level and stage of every equation."""

    def __init__(self, graph: Graph, num_params: int, num_opt: int, owner: tuple[int, ...], loss_stage: int):
        self.graph = graph
        inputs = graph.inputs
        self.opt = inputs[num_params : num_params + num_opt]
        self.stage: dict[Var, int] = dict(zip(inputs[:num_params], owner, strict=True))
        self.stage |= dict(zip(inputs[num_params + num_opt : -1], owner, strict=True))
        self.stage[inputs[-1]] = loss_stage

    def own(self, born: Sequence[int | None]) -> None:
        """Follow the dataflow: a leaf goes to the stage of the first owned value it is combined with."""
        self.stage |= {var: stage for var, stage in zip(self.opt, born, strict=True) if stage is not None}
        stage = dict(self.stage)
        origins: dict[Var, set[Var]] = {var: {var} for var in self.opt if var not in stage}
        for eqn in self.graph.eqns:
            operands = variables(eqn.invars)
            owned = [var for var in operands if var in stage]
            leaves = set().union(*(origins.get(var, set()) for var in operands))
            if not owned:
                origins.update((var, leaves) for var in eqn.outvars)
                continue
            home = stage[max(owned, key=_size)]
            scalar = max(map(_size, owned)) == 1
            sized = {leaf for leaf in leaves if _size(leaf) > 1 or (scalar and jnp.issubdtype(aval_of(leaf).dtype, jnp.inexact))}
            stage.update((var, home) for var in (*eqn.outvars, *sized))
            self.stage.update((var, home) for var in sized)
            for derived in origins.values():
                derived.difference_update(sized)

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
                crossed[:8],
                "use a transformation that treats each parameter by itself, or pass num_stages=1",
                f"parameters: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
            )
        return tuple(colors)


def draft_birth(update: Update, placement: Placement) -> Draft:
    """The lines that make the optimizer state, every leaf on its owner."""
    graph, draft = update.birth, Draft()
    draft.homes.update({param_name(stage, leaf): placement[stage] for leaf, stage in enumerate(update.owner)})
    numbers = {var: leaf for leaf, var in enumerate(graph.inputs)}
    for stage in sorted(set(update.opt_owner)):
        mine = [leaf for leaf, home in enumerate(update.opt_owner) if home == stage]
        atoms = [graph.outputs[leaf] for leaf in mine]
        piece = carve(graph, [None] * len(graph.eqns), dict.fromkeys(variables(atoms), stage)).get(stage, Piece((), (), ()))
        inputs = [var for var in piece.inputs if var in numbers]
        for var in inputs:
            leaf = numbers[var]
            draft.send(
                f"send parameter {leaf} to stage {stage}",
                param_name(update.owner[leaf], leaf),
                param_name(stage, leaf),
                placement[stage],
            )
        function = closed_function(graph, piece, inputs, atoms)
        names_in = [param_name(stage, numbers[var]) for var in inputs]
        names_out = [opt_name(stage, leaf) for leaf in mine]
        program = Program(function, tuple(n.ref for n in names_in), tuple(n.ref for n in names_out), shapes_of(inputs))
        draft.compute(f"init stage {stage}", program, placement[stage], names_in, names_out, ())
    return draft


def draft_update(draft: Draft, update: Update, placement: Placement, loss: Name, *, donate: bool) -> list[Name]:
    """Add the update to a step.

    Args:
        draft: the step so far; holds gradients on their owners.
        update: what to run.
        placement: the device of each stage.
        loss: the name of the loss.
        donate: whether the old parameters and optimizer state give up their buffers.

    Returns:
        the names of the new parameters, the new optimizer state, the gradient norm, and the trained stages' parts of its square.
    """
    return _Drafter(draft, update, placement, loss, donate).run()


class _Drafter:
    """Writes one line a stage and level, and the sends between them."""

    def __init__(self, draft: Draft, update: Update, placement: Placement, loss: Name, donate: bool):
        self.draft, self.update, self.placement, self.donate = draft, update, placement, donate
        graph = update.graph
        self.source: dict[Var, Name] = dict(zip(graph.inputs, update.names(loss), strict=True))
        draft.homes.update({name: placement[name.stage] for name in self.source.values()})
        self.result_color = self._result_colors()
        homes = {atom: self.result_color[k] for k, atom in enumerate(graph.outputs) if isinstance(atom, Var)}
        self.pieces: Mapping[Color, Piece] = carve(graph, update.colors, homes)
        self.made = {var: color for color, piece in self.pieces.items() for var in piece.outputs}
        self.held: dict[tuple[int, Var], tuple[Name, int | None]] = {
            (name.stage, var): (name, None) for var, name in self.source.items()
        }
        self.packed: dict[Name, jax.ShapeDtypeStruct] = {}
        self.serial = 0

    def _result_colors(self) -> list[Color]:
        graph, producers = self.update.graph, self.update.graph.producers()
        result = []
        for atom, home in zip(graph.outputs, self.update.homes, strict=True):
            made = self.update.colors[producers[atom]] if isinstance(atom, Var) and atom in producers else None
            result.append((0, home) if made is None else made)
        return result

    def run(self) -> list[Name]:
        graph = self.update.graph
        results: dict[int, Name] = {}
        for color in sorted({*self.pieces, *self.result_color}):
            mine = [k for k, chosen in enumerate(self.result_color) if chosen == color]
            names = self._compute(color, [graph.outputs[k] for k in mine])
            results.update(zip(mine, names, strict=True))
        return [self._home(k, results[k]) for k in range(len(graph.outputs))]

    def _home(self, k: int, name: Name) -> Name:
        """A result made away from its owner is sent there (a scalar)."""
        home = self.update.homes[k]
        if name.stage == home:
            return name
        target = self._fresh(home)
        self.draft.send(f"send result {k} to stage {home}", name, target, self.placement[home])
        return target

    def _fresh(self, stage: int) -> Name:
        self.serial += 1
        return Name(stage, Ref(Role.VALUE, self.serial))

    def _compute(self, color: Color, results: list[Any]) -> list[Name]:
        (level, stage), piece, graph = color, self._piece(color), self.update.graph
        inputs = [var for var in piece.inputs if var not in graph.constants]
        held = [self._hold(stage, var) for var in inputs]
        donated = self._donated(color)
        names_in = list(dict.fromkeys([*donated, *(name for name, _ in held)]))
        packs = self._packs(color)
        returned = [var for var in piece.outputs if aval_of(var).shape or stage in self._readers(var)]
        run = closed_function(graph, piece, inputs, [*results, *piece.outputs])
        order = {var: len(results) + k for k, var in enumerate(piece.outputs)}

        def function(*args: Any) -> list[Any]:
            given = dict(zip(names_in, args, strict=True))
            values = run(*(given[name] if at is None else given[name][at] for name, at in held))
            vectors = [jnp.stack([values[order[var]] for var in group]) for group in packs.values()]
            return [*values[: len(results)], *(values[order[var]] for var in returned), *vectors]

        names_out = [self._fresh(stage) for _ in range(len(results) + len(returned) + len(packs))]
        self.held.update(((stage, var), (names_out[len(results) + k], None)) for k, var in enumerate(returned))
        shapes = {name: self.packed.get(name, var) for (name, _), var in zip(held, inputs, strict=True)}
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        program = Program(function, *refs, shapes_of(shapes[name] for name in names_in))
        label = f"update stage {stage} level {level}"
        self.draft.compute(label, program, self.placement[stage], names_in, names_out, tuple(range(len(donated))))
        for (peer, dtype), group, name in zip(packs, packs.values(), names_out[len(results) + len(returned) :], strict=True):
            self._deliver(peer, group, name, jax.ShapeDtypeStruct((len(group),), dtype))
        return names_out[: len(results)]

    def _piece(self, color: Color) -> Piece:
        return self.pieces.get(color, Piece((), (), ()))

    def _readers(self, var: Var) -> set[int]:
        return {stage for (_, stage), piece in self.pieces.items() if var in piece.inputs}

    def _packs(self, color: Color) -> dict[tuple[int, Any], list[Var]]:
        """The scalars that this program makes for each other stage, by stage and dtype."""
        packs: dict[tuple[int, Any], list[Var]] = {}
        for var in self.pieces[color].outputs:
            for peer in sorted(self._readers(var) - {color[1]}):
                if aval_of(var).shape == ():
                    packs.setdefault((peer, aval_of(var).dtype), []).append(var)
        return packs

    def _deliver(self, peer: int, group: list[Var], vector: Name, aval: jax.ShapeDtypeStruct) -> None:
        """Send scalars to a stage as one vector; its programs take them out."""
        arrived = self._fresh(peer)
        self.draft.send(f"send {len(group)} scalars to stage {peer}", vector, arrived, self.placement[peer])
        self.packed[arrived] = aval
        self.held.update(((peer, var), (arrived, k)) for k, var in enumerate(group))

    def _hold(self, stage: int, var: Var) -> tuple[Name, int | None]:
        """Where a stage finds a value: a name, and its place if that is a vector. Sent there if it lives elsewhere."""
        if (stage, var) not in self.held:
            source = self.source[var] if var in self.source else self.held[self.made[var][1], var][0]
            target = self._fresh(stage)
            self.draft.send(f"send {describe(aval_of(var))} to stage {stage}", source, target, self.placement[stage])
            self.held[stage, var] = target, None
        return self.held[stage, var]

    def _donated(self, color: Color) -> list[Name]:
        """The old versions of this program's results that nobody reads later, in the order of the results.

        In that order each result takes over the buffer of its own old version; any other pairing costs copies.
        """
        graph, count = self.update.graph, self.update.num_params
        old = [*graph.inputs[-1 - count : -1], *graph.inputs[count : -1 - count]]
        donated = []
        for var, chosen in zip(old, self.result_color, strict=False):
            readers = [other for other, piece in self.pieces.items() if var in piece.inputs]
            alone = all(stage == color[1] for _, stage in readers) and self.source[var].stage == color[1]
            if self.donate and chosen == color and alone and readers and max(readers) == color:
                donated.append(self.source[var])
        return donated
