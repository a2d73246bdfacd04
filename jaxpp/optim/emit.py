"""The lines of an optimizer placed by ``optimizer``: one program a stage and level, and the scalars that meet between them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.optim.place import Color, Update, opt_name
from jaxpp.plan.builder import Draft, Name
from jaxpp.plan.init_params import closed_function
from jaxpp.plan.step import param_name
from jaxpp.runtime.placement import Placement
from jaxpp.stages.graph import Piece, descendants, partition
from jaxpp.stages.jaxpr import aval_of, shapes_of, variables
from jaxpp.stages.loss.roles import describe
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["draft_birth", "draft_update"]

_NEW = 1
"""Marks the name of a parameter or optimizer leaf as the one after the update."""


def draft_birth(update: Update, placement: Placement) -> Draft:
    """The lines that make the optimizer state, every leaf on its owner."""
    graph, draft = update.birth, Draft()
    draft.homes.update({param_name(stage, leaf): placement[stage] for leaf, stage in enumerate(update.owner)})
    numbers = {var: leaf for leaf, var in enumerate(graph.inputs)}
    for stage in sorted(set(update.opt_owner)):
        mine = [leaf for leaf, home in enumerate(update.opt_owner) if home == stage]
        atoms = [graph.outputs[leaf] for leaf in mine]
        piece = partition(graph, [None] * len(graph.eqns), dict.fromkeys(variables(atoms), stage)).get(stage, Piece())
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
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        program = Program(function, *refs, shapes_of(inputs), name=f"stage_{stage}_init_optimizer")
        draft.compute(f"init stage {stage}", program, placement[stage], names_in, names_out, ())
    return draft


def draft_update(
    draft: Draft, update: Update, placement: Placement, loss: Name, states: Sequence[Name], *, donate: bool
) -> list[Name]:
    """Add the update to a step.

    Args:
        draft: the step so far; holds gradients on their owners.
        update: what to run.
        placement: the device of each stage.
        loss: the name of the loss.
        states: the names of the new model state leaves.
        donate: whether the old parameters and optimizer state give up their buffers.

    Returns:
        the names of the graph's outputs.
    """
    return _Drafter(draft, update, placement, update.names(loss, states), donate).run()


class _Drafter:
    """Writes one line a stage and level, and the sends between them."""

    def __init__(self, draft: Draft, update: Update, placement: Placement, names: Sequence[Name], donate: bool):
        self.draft, self.update, self.placement, self.donate = draft, update, placement, donate
        graph = update.graph
        self.source: dict[Var, Name] = dict(zip(graph.inputs, names, strict=True))
        draft.homes.update({name: placement[name.stage] for name in self.source.values()})
        self.result_color = self._result_colors()
        homes = {atom: self.result_color[k] for k, atom in enumerate(graph.outputs) if isinstance(atom, Var)}
        self.pieces: Mapping[Color, Piece] = partition(graph, update.colors, homes)
        self.made = {var: color for color, piece in self.pieces.items() for var in piece.outputs}
        self.readers: dict[Var, list[Color]] = {}
        for color, piece in self.pieces.items():
            for var in piece.inputs:
                self.readers.setdefault(var, []).append(color)
        self.held: dict[tuple[int, Var], tuple[Name, int | None]] = {
            (name.stage, var): (name, None) for var, name in self.source.items()
        }
        self.packed: dict[Name, jax.ShapeDtypeStruct] = {}
        self.serial = 0
        places = [placement[name.stage] for name in names]
        own = [place.per_replica(name.ref) for place, name in zip(places, names, strict=True)]
        self.own = descendants(graph, [var for var, mine in zip(graph.inputs, own, strict=True) if mine])

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
        chosen: dict[Color, list[int]] = {color: [] for color in sorted({*self.pieces, *self.result_color})}
        for k, color in enumerate(self.result_color):
            chosen[color].append(k)
        for color, mine in chosen.items():
            names = self._compute(color, mine)
            results.update(zip(mine, names, strict=True))
        return [self._home(k, results[k]) for k in range(len(graph.outputs))]

    def _home(self, k: int, name: Name) -> Name:
        """A result made away from its owner (a scalar, or what a condition over all leaves makes) is sent there."""
        home = self.update.homes[k]
        if name.stage == home:
            return name
        target = self._new(home, k)
        self.draft.send(f"send result {k} to stage {home}", name, target, self.placement[home])
        return target

    def _fresh(self, stage: int, *atoms: Any) -> Name:
        """A new name for what is made of these: of all replicas, unless each has its own of any."""
        self.serial += 1
        return Name(stage, Ref(Role.VALUE, self.serial, shared=self.own.isdisjoint(variables(atoms))))

    def _new(self, stage: int, k: int) -> Name:
        """The name of the k-th result where it is made: a new parameter, a new optimizer leaf, or a value."""
        num_params, num_opt = self.update.num_params, len(self.update.opt_owner)
        if k < num_params:
            return Name(stage, Ref(Role.PARAM, k, _NEW))
        return (
            Name(stage, Ref(Role.OPT, k - num_params, _NEW))
            if k < num_params + num_opt
            else self._fresh(stage, self.update.graph.outputs[k])
        )

    def _compute(self, color: Color, mine: Sequence[int]) -> list[Name]:
        (level, stage), piece, graph = color, self._piece(color), self.update.graph
        results = [graph.outputs[k] for k in mine]
        inputs = [var for var in piece.inputs if var not in graph.constants]
        held = [self._hold(stage, var) for var in inputs]
        donated = self._donated(color, mine)
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

        fresh = [self._fresh(stage, *atoms) for atoms in (*((var,) for var in returned), *packs.values())]
        names_out = [*(self._new(stage, k) for k in mine), *fresh]
        self.held.update(((stage, var), (names_out[len(results) + k], None)) for k, var in enumerate(returned))
        shapes = {name: self.packed.get(name, var) for (name, _), var in zip(held, inputs, strict=True)}
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        called = f"stage_{stage}_update" + f"_{level}" * (level > 0)
        made = Program(function, *refs, shapes_of(shapes[name] for name in names_in), name=called)
        program = self.update.programs.setdefault((color, self.donate, *refs), made)  # the first one stays, for it is compiled
        label = f"update stage {stage} level {level}"
        self.draft.compute(label, program, self.placement[stage], names_in, names_out, tuple(range(len(donated))))
        for (peer, dtype), group, name in zip(packs, packs.values(), names_out[len(results) + len(returned) :], strict=True):
            self._deliver(peer, group, name, jax.ShapeDtypeStruct((len(group),), dtype))
        return names_out[: len(results)]

    def _piece(self, color: Color) -> Piece:
        return self.pieces.get(color, Piece())

    def _readers(self, var: Var) -> set[int]:
        return {stage for _, stage in self.readers.get(var, ())}

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
        arrived = self._fresh(peer, *group)
        self.draft.send(f"send {len(group)} scalars to stage {peer}", vector, arrived, self.placement[peer])
        self.packed[arrived] = aval
        self.held.update(((peer, var), (arrived, k)) for k, var in enumerate(group))

    def _hold(self, stage: int, var: Var) -> tuple[Name, int | None]:
        """Where a stage finds a value: a name, and its place if that is a vector. Sent there if it lives elsewhere."""
        if (stage, var) not in self.held:
            source = self.source[var] if var in self.source else self.held[self.made[var][1], var][0]
            target = self._fresh(stage, var)
            self.draft.send(f"send {describe(aval_of(var))} to stage {stage}", source, target, self.placement[stage])
            self.held[stage, var] = target, None
        return self.held[stage, var]

    def _donated(self, color: Color, mine: Sequence[int]) -> list[Name]:
        """The old versions of this program's results that nobody reads later, in the order of the results.

        In that order each result takes over the buffer of its own old version; any other pairing costs copies.
        """
        inputs, count = self.update.graph.inputs, self.update.num_params
        split = count + len(self.update.opt_owner)
        donated = []
        for k in mine:
            if k >= split:
                break
            var = inputs[split + k] if k < count else inputs[k]
            readers = self.readers.get(var, ())
            alone = all(stage == color[1] for _, stage in readers) and self.source[var].stage == color[1]
            if self.donate and alone and readers and max(readers) == color:
                donated.append(self.source[var])
        return donated
