"""The lines of an optimizer placed by ``optimizer``: one program a stage and level, and the scalars that meet between them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.optim.update import Update, UpdateInputs, UpdatePart, UpdateResults, flat
from jaxpp.plan.builder import Builder, Name
from jaxpp.plan.init_params import closed_function
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Piece, descendants, partition
from jaxpp.stages.jaxpr import Atom, aval_of, describe, shapes_of, variables
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, DType

__all__ = ["add_update"]

_NEW = 1
"""Marks the name of a parameter or optimizer leaf as the one after the update."""

_LARGE = 1 << 27
"""Bytes of arguments above which an update holds little at once, rather than update all leaves side by side."""


def add_update(
    builder: Builder, update: Update, loss: Name, states: Sequence[Name], own: Collection[tuple[Role, int]], *, donate: bool
) -> UpdateResults[Name]:
    """Add the update to a step.

    Returns:
        the names of the results.
    """
    return _Writer(builder, update, update.names(loss, states), own, donate).run()


class _Writer:
    """Writes one line a stage and level, and the sends between them."""

    def __init__(
        self, builder: Builder, update: Update, names: UpdateInputs[Name], own: Collection[tuple[Role, int]], donate: bool
    ):
        self.builder, self.update, self.donate = builder, update, donate
        graph, inputs = update.graph, names.refilled(update.graph.inputs)
        self.source: dict[Var, Name] = dict(zip(graph.inputs, flat(names), strict=True))
        self.old: list[Var] = [*inputs.params, *inputs.opt]  # the results begin with the new versions of these
        self.stages = flat(update.result_stages)
        self.result_parts = self._result_parts()
        homes = {atom: part for atom, part in zip(graph.outputs, self.result_parts, strict=True) if isinstance(atom, Var)}
        self.pieces: Mapping[UpdatePart, Piece] = partition(graph, update.parts, homes)
        self.made = {var: part for part, piece in self.pieces.items() for var in piece.outputs}
        self.readers: dict[Var, list[UpdatePart]] = {}
        for part, piece in self.pieces.items():
            for var in piece.inputs:
                self.readers.setdefault(var, []).append(part)
        self.held: dict[tuple[int, Var], tuple[Name, int | None]] = {
            (name.stage, var): (name, None) for var, name in self.source.items()
        }
        self.packed: dict[Name, jax.ShapeDtypeStruct] = {}
        self.serial = 0
        self.own = descendants(graph, [var for var, name in self.source.items() if (name.ref.role, name.ref.index) in own])

    def _result_parts(self) -> list[UpdatePart]:
        """The part that makes each result."""
        graph, producers = self.update.graph, self.update.graph.producers()
        eqns = [producers.get(atom) if isinstance(atom, Var) else None for atom in graph.outputs]
        made = [None if eqn is None else self.update.parts[eqn] for eqn in eqns]
        return [UpdatePart(0, stage) if part is None else part for part, stage in zip(made, self.stages, strict=True)]

    def run(self) -> UpdateResults[Name]:
        results: dict[int, Name] = {}
        chosen: dict[UpdatePart, list[int]] = {part: [] for part in sorted({*self.pieces, *self.result_parts})}
        for k, part in enumerate(self.result_parts):
            chosen[part].append(k)
        for part, mine in chosen.items():
            names = self._compute(part, mine)
            results.update(zip(mine, names, strict=True))
        return self.update.result_stages.refilled([self._bring(k, results[k]) for k in range(len(results))])

    def _bring(self, k: int, name: Name) -> Name:
        """A result made away from its owner (a scalar, or what a condition over all leaves makes) is sent there."""
        stage = self.stages[k]
        if name.stage == stage:
            return name
        target = self._new(stage, k)
        self.builder.send(f"send result {k} to stage {stage}", name, target)
        return target

    def _fresh(self, stage: int, *atoms: Atom) -> Name:
        """A new name for what is made of these: of all replicas, unless each has its own of any."""
        self.serial += 1
        return Name(stage, Ref(Role.VALUE, self.serial, shared=self.own.isdisjoint(variables(atoms))))

    def _new(self, stage: int, k: int) -> Name:
        """The name of the k-th result where it is made: a new parameter, a new optimizer leaf, or a value."""
        if k < len(self.old):
            return Name(stage, replace(self.source[self.old[k]].ref, peer=_NEW))
        return self._fresh(stage, self.update.graph.outputs[k])

    def _compute(self, part: UpdatePart, mine: Sequence[int]) -> list[Name]:
        (level, stage), piece, graph = part, self.pieces.get(part, Piece()), self.update.graph
        results = [graph.outputs[k] for k in mine]
        inputs = [var for var in piece.inputs if var not in graph.constants]
        held = [self._hold(stage, var) for var in inputs]
        donated = self._donated(part, mine)
        names_in = list(dict.fromkeys([*donated, *(name for name, _ in held)]))
        packs = self._packs(part)
        returned = [var for var in piece.outputs if aval_of(var).shape or stage in self._readers(var)]
        run = closed_function(graph, piece, inputs, [*results, *piece.outputs])
        order = {var: len(results) + k for k, var in enumerate(piece.outputs)}

        def function(*args: Array) -> list[Array]:
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
        avals = shapes_of(shapes[name] for name in names_in)
        made = Program(function, *refs, avals, name=called, lean=sum(map(count_bytes, avals)) > _LARGE)
        program = self.update.programs.setdefault((part, self.donate, *refs), made)  # the first one stays, for it is compiled
        label = f"update stage {stage}" + f", part {level + 1}" * (level > 0)
        self.builder.compute(label, program, stage, names_in, names_out, tuple(range(len(donated))))
        for (peer, dtype), group, name in zip(packs, packs.values(), names_out[len(results) + len(returned) :], strict=True):
            self._deliver(peer, group, name, jax.ShapeDtypeStruct((len(group),), dtype))
        return names_out[: len(results)]

    def _readers(self, var: Var) -> set[int]:
        return {stage for _, stage in self.readers.get(var, ())}

    def _packs(self, part: UpdatePart) -> dict[tuple[int, DType], list[Var]]:
        """The scalars that this program makes for each other stage, by stage and dtype."""
        packs: dict[tuple[int, DType], list[Var]] = {}
        for var in self.pieces[part].outputs:
            for peer in sorted(self._readers(var) - {part.stage}):
                if aval_of(var).shape == ():
                    packs.setdefault((peer, aval_of(var).dtype), []).append(var)
        return packs

    def _deliver(self, peer: int, group: list[Var], vector: Name, aval: jax.ShapeDtypeStruct) -> None:
        """Send scalars to a stage as one vector; its programs take them out."""
        arrived = self._fresh(peer, *group)
        self.builder.send(f"send {len(group)} scalars to stage {peer}", vector, arrived)
        self.packed[arrived] = aval
        self.held.update(((peer, var), (arrived, k)) for k, var in enumerate(group))

    def _hold(self, stage: int, var: Var) -> tuple[Name, int | None]:
        """Where a stage finds a value: a name, and its place if that is a vector. Sent there if it lives elsewhere."""
        if (stage, var) not in self.held:
            source = self.source[var] if var in self.source else self.held[self.made[var].stage, var][0]
            target = self._fresh(stage, var)
            self.builder.send(f"send {describe(aval_of(var))} to stage {stage}", source, target)
            self.held[stage, var] = target, None
        return self.held[stage, var]

    def _donated(self, part: UpdatePart, mine: Sequence[int]) -> list[Name]:
        """The old versions of this program's results that nobody reads later, in the order of the results.

        In that order each result takes over the buffer of its own old version; any other pairing costs copies.
        """
        donated = []
        for var in [self.old[k] for k in mine if self.donate and k < len(self.old)]:
            readers = self.readers.get(var, ())
            alone = all(reader.stage == part.stage for reader in readers) and self.source[var].stage == part.stage
            if alone and readers and max(readers) == part:
                donated.append(self.source[var])
        return donated
