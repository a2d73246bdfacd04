"""An optimizer's update, traced and placed (``owners.py``), and its lines: one program a stage and level, and their sends."""

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.optim.loss_scale import Scaling
from jaxpp.plan.builder import Builder, Name
from jaxpp.plan.lower import closed_function
from jaxpp.plan.step import scale_name, total_name
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import ComparableFunction
from jaxpp.stages.graph import Graph, Piece, descendants, partition
from jaxpp.stages.jaxpr import Atom, aval_of, describe, shapes_of, variables
from jaxpp.stages.program import Pack, Program, Ref, Role
from jaxpp.types import Array, DType, Tree

HUB = 0  # the stage where scalars of several stages meet; its backward ends last, so nothing waits for it longer

_T = TypeVar("_T")
_Packed = Mapping[int, tuple[Name, Pack]]  # gradients that are parts of vectors: the name of the vector, and what is where in it
_Own = Collection[tuple[Role, int]]  # the leaves of which each replica has its own


class UpdatePart(NamedTuple):
    """One program of an update: what a stage computes between two hops of scalars from stage to stage."""

    level: int
    stage: int
    own: bool = False  # what each replica computes of its own, where replicas compute the rest together


class UpdateInputs(NamedTuple, Generic[_T]):
    """Something about each input of an update."""

    grads: tuple[_T, ...]
    opt: tuple[_T, ...]
    params: tuple[_T, ...]
    loss: tuple[_T, ...]
    scale: tuple[_T, ...]  # this and what follows: for a scaled loss alone
    old_state: tuple[_T, ...]  # the model state before the step
    new_state: tuple[_T, ...]  # the model state after it


class UpdateResults(NamedTuple, Generic[_T]):
    """Something about each result of an update."""

    params: tuple[_T, ...]
    opt: tuple[_T, ...]
    state: tuple[_T, ...]  # the model state after the update, for a scaled loss
    scale: tuple[_T, ...]
    finite: tuple[_T, ...]  # whether all gradients were finite, for a scaled loss
    norm: tuple[_T, ...]  # of the gradient
    squares: tuple[_T, ...]  # the square of the norm on each stage of ``Update.watched``


def flat(groups: UpdateInputs[_T] | UpdateResults[_T]) -> list[_T]:
    """All of the groups, in order."""
    return [value for group in groups for value in group]


def refilled(groups: UpdateInputs[Any] | UpdateResults[Any], values: Iterable[_T]) -> Iterator[tuple[_T, ...]]:
    """Other values, in groups of the same sizes."""
    supply = iter(values)
    return (tuple(itertools.islice(supply, len(group))) for group in groups)


def opt_name(stage: int, leaf: int) -> Name:
    """An optimizer state leaf, as its owner holds it."""
    return Name(stage, Ref(Role.OPT, leaf))


@dataclass(frozen=True)
class Update:
    """An optimizer's init and update, traced and placed."""

    graph: Graph  # of the update, from ``UpdateInputs`` to ``UpdateResults``, both flat
    init_graph: Graph  # of ``optimizer.init``, from parameter leaves to optimizer leaves
    tree: Tree  # structure of the optimizer state
    owner: tuple[int, ...]  # the stage of each parameter leaf
    opt_owner: tuple[int, ...]  # the stage of each optimizer leaf
    parts: tuple[UpdatePart | None, ...]  # of each equation; an equation of None is repeated where it is needed
    watched: tuple[int, ...]  # the stages that own parameters which are not frozen
    scaling: Scaling | None  # how the loss is scaled, or None
    state_owner: tuple[int, ...]  # the stage of each model state leaf, if the loss is scaled
    loss_stage: int  # the stage that has the loss, and its scale
    kept: frozenset[int] = frozenset()  # the results, of parameters and optimizer leaves, that are what they were
    programs: WeakValueDictionary[Hashable, Program] = field(default_factory=WeakValueDictionary)  # the same at every batch size

    @property
    def scales(self) -> tuple[Name, ...]:
        """The names of the loss scale's leaves."""
        return () if self.scaling is None else (scale_name(self.loss_stage, 0), scale_name(self.loss_stage, 1))

    @cached_property
    def result_stages(self) -> UpdateResults[int]:
        """The stage that each result goes to."""
        scale, finite = ((), ()) if self.scaling is None else ((self.loss_stage, self.loss_stage), (HUB,))
        return UpdateResults(self.owner, self.opt_owner, self.state_owner, scale, finite, (HUB,), self.watched)

    def names(self, loss: Name, params: Sequence[Name], before: Sequence[Name], states: Sequence[Name]) -> UpdateInputs[Name]:
        """The names of the inputs, each on its owner; ``states`` are those of the new model state, ``before`` of the old one."""
        return UpdateInputs(
            grads=tuple(total_name(stage, Role.GRAD, leaf) for leaf, stage in enumerate(self.owner)),
            opt=tuple(opt_name(stage, leaf) for leaf, stage in enumerate(self.opt_owner)),
            params=tuple(params),
            loss=(loss,),
            scale=self.scales,
            old_state=() if self.scaling is None else tuple(before),
            new_state=() if self.scaling is None else tuple(states),
        )


_LARGE = 1 << 27  # bytes of arguments above which an update holds little at once, rather than update all leaves side by side


def add_update(  # noqa: PLR0913  (what an update reads)
    builder: Builder,
    update: Update,
    loss: Name,
    params: Sequence[Name],
    before: Sequence[Name],
    states: Sequence[Name],
    packed: _Packed,
    own: _Own,
    *,
    apart: bool,
    before_last: Mapping[int, Name],
) -> UpdateResults[Name]:
    """Add the update to a step that has its gradients; ``states`` are those of the new model state, ``before`` of the old one.

    ``apart``: replicas divide what they do not have of their own, which programs of its own then update. New parameters may take
    over the buffers of the old ones; those of which the state has the values ``before_last`` step too, the buffers of these.
    """
    names = update.names(loss, params, before, states)
    return _Writer(builder, update, names, packed, own, before_last, apart=apart).run()


class _Part(NamedTuple):
    start: int
    end: int
    shape: tuple[int, ...]

    def of(self, vector: Array) -> Array:
        return jax.lax.slice(vector, (self.start,), (self.end,)).reshape(self.shape)


class _Writer:
    def __init__(
        self,
        builder: Builder,
        update: Update,
        names: UpdateInputs[Name],
        packed: _Packed,
        own: _Own,
        before_last: Mapping[int, Name],
        *,
        apart: bool,
    ):
        self.builder, self.update, self.apart = builder, update, apart
        graph, inputs = update.graph, UpdateInputs(*refilled(names, update.graph.inputs))
        self.source: dict[Var, Name] = dict(zip(graph.inputs, flat(names), strict=True))
        self.old: list[Var] = [*inputs.params, *inputs.opt]  # the results begin with the new versions of these
        self.before_last = before_last
        self.stages = flat(update.result_stages)
        self.own = descendants(graph, [var for var, name in self.source.items() if (name.ref.role, name.ref.index) in own])
        self.parts = [
            part._replace(own=apart and not self.own.isdisjoint(eqn.outvars)) if part else None
            for part, eqn in zip(update.parts, graph.eqns, strict=True)
        ]
        self.result_parts = self._result_parts()
        made = [
            (atom, part)
            for k, (atom, part) in enumerate(zip(graph.outputs, self.result_parts, strict=True))
            if k not in update.kept
        ]
        homes = {atom: part for atom, part in made if isinstance(atom, Var)}
        self.pieces: Mapping[UpdatePart, Piece] = partition(graph, self.parts, homes)
        self.made = {var: part for part, piece in self.pieces.items() for var in piece.outputs}
        self.readers: dict[Var, list[UpdatePart]] = {}
        for part, piece in self.pieces.items():
            for var in piece.inputs:
                self.readers.setdefault(var, []).append(part)
        self.held: dict[tuple[int, Var], tuple[Name, _Part | None]] = {
            (name.stage, var): (name, None) for var, name in self.source.items()
        }
        self.arrived: dict[tuple[int, Name], Name] = {}
        self.vectors: dict[Name, jax.ShapeDtypeStruct] = {}
        for leaf, (vector, pack) in packed.items():
            at = pack.members.index(Ref(Role.GRAD, leaf))
            self.vectors[vector] = pack.aval
            self.held[vector.stage, inputs.grads[leaf]] = vector, _Part(*pack.bounds[at], pack.avals[at].shape)
        self.serial = 0

    def _result_parts(self) -> list[UpdatePart]:
        graph, producers = self.update.graph, self.update.graph.producers()
        eqns = [producers.get(atom) if isinstance(atom, Var) else None for atom in graph.outputs]
        made = [None if eqn is None else self.parts[eqn] for eqn in eqns]
        own = [self.apart and atom in self.own for atom in graph.outputs]
        given = [UpdatePart(0, stage, each) for stage, each in zip(self.stages, own, strict=True)]
        return [at if part is None else part for part, at in zip(made, given, strict=True)]

    def run(self) -> UpdateResults[Name]:
        kept = self.update.kept
        results: dict[int, Name] = {k: self.source[self.old[k]] for k in kept}
        made = [(k, part) for k, part in enumerate(self.result_parts) if k not in kept]
        chosen: dict[UpdatePart, list[int]] = {part: [] for part in sorted({*self.pieces, *(part for _, part in made)})}
        for k, part in made:
            chosen[part].append(k)
        for part, mine in chosen.items():
            names = self._compute(part, mine)
            results.update(zip(mine, names, strict=True))
        return UpdateResults(*refilled(self.update.result_stages, [self._bring(k, results[k]) for k in range(len(results))]))

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
        if k < len(self.old):
            return Name(stage, replace(self.source[self.old[k]].ref, new=True))
        return self._fresh(stage, self.update.graph.outputs[k])

    def _compute(self, part: UpdatePart, mine: Sequence[int]) -> list[Name]:
        (level, stage, apart), piece, graph = part, self.pieces.get(part, Piece()), self.update.graph
        results = [graph.outputs[k] for k in mine]
        inputs = [var for var in piece.inputs if var not in graph.constants]
        held = [self._hold(stage, var) for var in inputs]
        shapes = {name: self.vectors.get(name, var) for (name, _), var in zip(held, inputs, strict=True)}
        replaced = dict(self._replaced(stage, mine, shapes))
        names_in = list(dict.fromkeys([*replaced, *shapes]))  # any other order of these than the results' would cost copies
        packs = self._packs(part)
        returned = [var for var in piece.outputs if aval_of(var).shape or stage in self._readers(var)]
        run = closed_function(graph, piece, inputs, [*results, *piece.outputs])
        order = {var: len(results) + k for k, var in enumerate(piece.outputs)}

        def function(*args: Array) -> list[Array]:
            arrays = dict(zip(names_in, args, strict=True))
            values = run(*(arrays[name] if part is None else part.of(arrays[name]) for name, part in held))
            vectors = [jnp.stack([values[order[var]] for var in group]) for group in packs.values()]
            return [*values[: len(results)], *(values[order[var]] for var in returned), *vectors]

        numbers = {name: k for k, name in enumerate(names_in)}
        groups = tuple(tuple(order[var] for var in group) for group in packs.values())
        places = tuple((numbers[name], at) for name, at in held), tuple(order[var] for var in returned), groups
        comparable = ComparableFunction(function, run.does and (run.does, len(results), *places))  # all that the function reads
        fresh = [self._fresh(stage, *atoms) for atoms in (*((var,) for var in returned), *packs.values())]
        names_out = [*(self._new(stage, k) for k in mine), *fresh]
        self.held.update(((stage, var), (names_out[len(results) + k], None)) for k, var in enumerate(returned))
        shapes |= replaced
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        called = f"stage_{stage}_update" + f"_{level}" * (level > 0) + "_own" * apart
        avals = shapes_of(shapes[name] for name in names_in)
        made = Program(comparable, *refs, avals, name=called, lean=sum(map(count_bytes, avals)) > _LARGE)
        program = self.update.programs.setdefault((part, *refs), made)  # the first one stays, for it is compiled
        label = f"update stage {stage}" + f", part {level + 1}" * (level > 0) + ", of each replica" * apart
        self.builder.compute(label, program, stage, names_in, names_out)
        for (peer, dtype), group, name in zip(packs, packs.values(), names_out[len(results) + len(returned) :], strict=True):
            self._deliver(peer, group, name, jax.ShapeDtypeStruct((len(group),), dtype))
        return names_out[: len(results)]

    def _readers(self, var: Var) -> set[int]:
        return {part.stage for part in self.readers.get(var, ())}

    def _packs(self, part: UpdatePart) -> dict[tuple[int, DType], list[Var]]:
        packs: dict[tuple[int, DType], list[Var]] = {}
        for var in self.pieces[part].outputs:
            for peer in sorted(self._readers(var) - {part.stage}):
                if aval_of(var).shape == ():
                    packs.setdefault((peer, aval_of(var).dtype), []).append(var)
        return packs

    def _deliver(self, peer: int, group: list[Var], vector: Name, aval: jax.ShapeDtypeStruct) -> None:
        arrived = self._fresh(peer, *group)
        self.builder.send(f"send {len(group)} scalars to stage {peer}", vector, arrived)
        self.vectors[arrived] = aval
        self.held.update(((peer, var), (arrived, _Part(k, k + 1, ()))) for k, var in enumerate(group))

    def _hold(self, stage: int, var: Var) -> tuple[Name, _Part | None]:
        """Where a stage finds a value: a name, and its place if that is a vector. Sent there if it lives elsewhere."""
        if (stage, var) not in self.held:
            home = self.source[var].stage if var in self.source else self.made[var].stage
            source, part = self.held[home, var]
            if (stage, source) not in self.arrived:
                self.arrived[stage, source] = target = self._fresh(stage, var)
                aval: jax.ShapeDtypeStruct = aval_of(var) if part is None else self.vectors[source]
                if part is not None:
                    self.vectors[target] = aval
                self.builder.send(f"send {describe(aval)} to stage {stage}", source, target)
            self.held[stage, var] = self.arrived[stage, source], part
        return self.held[stage, var]

    def _replaced(self, stage: int, mine: Sequence[int], reads: Collection[Name]) -> Iterator[tuple[Name, Var]]:
        """What the results of a program are the next versions of: what it reads, and the parameters before the last step."""
        for k in [k for k in mine if k < len(self.old)]:
            var = self.old[k]
            name = self.before_last.get(k, self.source[var])
            if name.stage == stage and (k in self.before_last or name in reads):
                yield name, var
