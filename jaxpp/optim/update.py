"""An update, run where the parameters live, exactly as on one device: its equations placed, and the lines that run them.

Every equation goes to the stage of its largest operand, from the leaves of a state on, whose homes ``owners.py`` knows. What
depends on no parameter is repeated where it is needed; scalars of several stages meet on stage 0; an equation's *level* counts the
hops before it, and one program runs per stage and level: adamw, lion, adafactor and lamb need one level, clip_by_global_norm three.
A condition over all leaves becomes one choice a leaf.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from jaxpp.errors import OptimizerError
from jaxpp.lowering.builder import Builder, Name
from jaxpp.lowering.lower import closed_function
from jaxpp.lowering.step import Leaves, StateLeaf, total_name
from jaxpp.optim.divided import MOVABLE
from jaxpp.optim.loss_scale import Scaling
from jaxpp.optim.owners import LOSS, HeldOptimizer, size
from jaxpp.stages.axes import DATA, axes_named
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import ComparableFunction
from jaxpp.stages.graph import CONDITIONS, Graph, Piece, descendants, opened, partition, trace
from jaxpp.stages.jaxpr import ELEMENTWISE, Atom, aval_of, describe, kind_of, shapes_of, variables
from jaxpp.stages.program import Pack, Program, Ref, Role
from jaxpp.types import Array, Aval, DType, Tree

HUB = 0  # the stage where scalars of several stages meet; its backward ends last, so nothing waits for it longer

_T = TypeVar("_T")
_Packed = Mapping[int, tuple[Name, Pack]]  # gradients that are parts of vectors: the name of the vector, and what is where in it
_SPREADING = ELEMENTWISE | {"broadcast_in_dim"}


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


def _read_by(leaves: Leaves[StateLeaf], of_leaf: Callable[[StateLeaf], _T], of_loss: _T) -> UpdateInputs[_T]:
    """Something about each input of the update of these leaves: a gradient counts as its parameter."""
    groups = leaves.all_params, leaves.all_opt, leaves.loss_scale, leaves.model_state
    params, opt, scale, state = (tuple(map(of_leaf, group)) for group in groups)
    return UpdateInputs(params, opt, params, (of_loss,), scale, state, state)


@dataclass(frozen=True)
class Update:
    """An optimizer's init and update, traced and placed."""

    graph: Graph  # of the update, from ``UpdateInputs`` to ``UpdateResults``, both flat
    init_graph: Graph  # of ``optimizer.init``, from parameter leaves to optimizer leaves
    tree: Tree  # structure of the optimizer state
    leaves: Leaves[StateLeaf]  # what it reads and makes: of the model state and the loss scale those of a scaled loss
    parts: tuple[UpdatePart | None, ...]  # of each equation; an equation of None is repeated where it is needed
    watched: tuple[int, ...]  # the stages that own parameters which are not frozen
    late_scale: tuple[int, ...] = ()  # with ``delay``, the number of the leaf of the loss scale that is kept for the next gradients
    programs: WeakValueDictionary[Hashable, Program] = field(default_factory=WeakValueDictionary)  # the same at every batch size

    @cached_property
    def result_stages(self) -> UpdateResults[int]:
        """The stage that each result goes to."""
        _, opt, params, _, _, state, _ = _read_by(self.leaves, lambda leaf: leaf.stage, HUB)
        scale = tuple(leaf.stage for leaf in self.leaves.loss_scale if leaf.changes)
        return UpdateResults(params, opt, state, scale, (HUB,) if scale else (), (HUB,), self.watched)

    def new_state(self, names: Leaves[Name], made: UpdateResults[Name], states: Sequence[Name]) -> Leaves[Name]:
        """What the leaves of the state after a step are called: ``names`` before it, ``states`` of the new model state."""
        newest = {leaf.index: name for leaf, name in zip(self.leaves.all_params, names.all_params, strict=True)}
        previous = [_copy_of(newest[leaf.index]) if leaf.changes else newest[leaf.index] for leaf in self.leaves.previous]
        scale = [*made.scale, *(names.loss_scale[number] for number in self.late_scale)]
        return names.fill([*made.params, *made.opt, *(made.state or states), *scale, *previous])

    @cached_property
    def kept(self) -> frozenset[int]:
        """The results, of parameters and optimizer leaves, that are what they were."""
        return frozenset(k for k, leaf in enumerate(self.leaves.all_params + self.leaves.all_opt) if not leaf.changes)


def plan_update(
    optimizer: HeldOptimizer,
    leaves: Leaves[StateLeaf],
    paths: Sequence[str],
    loss: Aval,
    loss_stage: int,
    scaling: Scaling | None,
    *,
    num_replicas: int = 1,
) -> Update:
    """Give the leaves of an optimizer's state and the equations of its update to the stages of these parameters.

    ``paths`` are what the user calls the parameters; ``leaves`` has these, the model state and the loss scale. Where gradients are
    late, the state has parameters as they were before the last step: what were the newest, or copies of what does not change.

    Of frozen leaves no gradient is read, and only those that replicas share count in the reported norm. With ``scaling`` a
    gradient that is not finite changes nothing, nor the model state, also if one of several replicas alone has it, of a parameter
    of its own. What does not change lives where it otherwise would.
    """
    params = leaves.all_params
    opts = [_opt_leaf(optimizer, k, params, loss_stage) for k in range(len(optimizer.homes))]
    shared = len(opts) - (optimizer.tree.children()[1].num_leaves if leaves.own_params else 0)  # a pair of states
    leaves = leaves._replace(opt=opts[:shared], own_opt=[replace(leaf, own=True) for leaf in opts[shared:]])
    leaves = leaves if scaling is not None else leaves._replace(model_state=())
    previous = [replace(leaf, role=Role.PREVIOUS, changes=not leaf.changes) for leaf in params if leaf.late]
    leaves = leaves._replace(previous=previous)
    uncounted = {leaf.index for leaf in params if leaf.frozen or leaf.own}
    watched = sorted({leaf.stage for leaf in params if leaf.index not in uncounted})
    apart = [leaf.stage if leaf.own and not leaf.frozen and num_replicas > 1 else None for leaf in params]

    def update(inputs: UpdateInputs[Array]) -> list[Array]:
        grads = [jnp.zeros_like(grad) if leaf.frozen else grad for leaf, grad in zip(params, inputs.grads, strict=True)]
        scale, finite = [], []
        if scaling is None:
            results = optimizer.update(grads, inputs.opt, inputs.params, *inputs.loss)
        else:
            grads, all_finite = scaling.unscale(grads, inputs.scale, functools.partial(_on_all_replicas, apart))
            after = *optimizer.update(grads, inputs.opt, inputs.params, *inputs.loss), *inputs.new_state
            before = *inputs.params, *inputs.opt, *inputs.old_state
            results = [jnp.where(all_finite, new, old) for new, old in zip(after, before, strict=True)]
            scale, finite = scaling.adjust(inputs.scale, all_finite), [all_finite]
        free = [(leaf.stage, _wide(grad)) for leaf, grad in zip(params, grads, strict=True) if leaf.index not in uncounted]
        squares = [optax.tree.norm([grad for own, grad in free if own == stage], squared=True) for stage in watched]
        norm = optax.tree.norm([grad for _, grad in free])
        new = (*results, *scale, *finite, norm, *squares)
        old = dict(enumerate((*inputs.params, *inputs.opt)))
        kept = {k for k, leaf in enumerate(params + opts) if not leaf.changes}
        return [old[k] if k in kept else jnp.array(leaf, copy=True) for k, leaf in enumerate(new)]

    def init(params: list[Array]) -> list[Array]:
        return [jnp.array(leaf, copy=True) for leaf in optimizer.init(params)]

    graph, _ = trace(update, _read_by(leaves, lambda leaf: leaf.aval, loss), env=((DATA, num_replicas),))
    graph = opened(graph, CONDITIONS) if len({leaf.stage for leaf in params}) > 1 else graph
    homeless = {leaf.index for leaf, home in zip(opts, optimizer.homes, strict=True) if home is None}
    placed = _read_by(leaves, lambda leaf: None if leaf.role == Role.OPT and leaf.index in homeless else leaf.stage, loss_stage)
    homes = {var: stage for var, stage in zip(graph.inputs, flat(placed), strict=True) if stage is not None}
    init_graph, _ = trace(init, [leaf.aval for leaf in params])
    late_scale = (scaling.scale,) if scaling is not None and scaling.is_late else ()
    return Update(graph, init_graph, optimizer.tree, leaves, _parts(graph, homes, paths), tuple(watched), late_scale)


def _on_all_replicas(apart: Sequence[int | None], flags: Sequence[Array]) -> Array:
    """Whether all flags are true; those of leaves of which each replica has its own, whose stage ``apart`` has, on each of them."""
    verdict = functools.reduce(jnp.logical_and, (flag for stage, flag in zip(apart, flags, strict=True) if stage is None), True)
    for stage in sorted({stage for stage in apart if stage is not None}):
        wrong = functools.reduce(jnp.logical_or, (~flag for own, flag in zip(apart, flags, strict=True) if own == stage))
        verdict &= jax.lax.psum(wrong.astype(jnp.int32), DATA) == 0
    return jnp.asarray(verdict)


def _opt_leaf(optimizer: HeldOptimizer, number: int, params: Sequence[StateLeaf], loss_stage: int) -> StateLeaf:
    """A leaf of the optimizer's state, on the stage of its home, and divided as that is if it has its shape."""
    aval, home, changes = optimizer.shapes[number], optimizer.homes[number], number not in optimizer.kept
    if home is None or home == LOSS:
        return StateLeaf(Role.OPT, number, aval, HUB if home is None else loss_stage, changes=changes)
    part = params[home].part if params[home].aval.shape == aval.shape else PartitionSpec()
    return StateLeaf(Role.OPT, number, aval, params[home].stage, part, part, changes=changes)


_LARGE = 1 << 27  # bytes of arguments above which an update holds little at once, rather than update all leaves side by side


class _Part(NamedTuple):
    start: int
    end: int
    shape: tuple[int, ...]

    def of(self, vector: Array) -> Array:
        return jax.lax.slice(vector, (self.start,), (self.end,)).reshape(self.shape)


def _packing(
    run: ComparableFunction,
    reads: tuple[tuple[int, _Part | None], ...],
    chosen: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...],
) -> ComparableFunction:
    """A function that reads its arguments, or parts of them, and returns those chosen of its values, and groups as vectors."""

    def function(*args: Array) -> list[Array]:
        values = run(*(args[k] if part is None else part.of(args[k]) for k, part in reads))
        return [*(values[k] for k in chosen), *(jnp.stack([values[k] for k in group]) for group in groups)]

    return ComparableFunction(function, lambda: run.does and (run.does, reads, chosen, groups))  # all that the function reads


@dataclass(eq=False)
class UpdateWriter:
    """Adds the update to a step that has its gradients.

    New parameters may take over the buffers of the old ones; those of which the state has the values before the last step too, the
    buffers of these, unless the device has but copies of either (``visits``). Where replicas divide what they do not have of their
    own, programs of its own update what they have.
    """

    builder: Builder
    update: Update
    loss: Name
    states: Sequence[Name]  # what the new model state is called
    packed: _Packed
    num_replicas: int
    visits: bool

    def __post_init__(self):
        update, num_replicas = self.update, self.num_replicas
        graph, leaves = update.graph, update.leaves
        names = _read_by(leaves, lambda leaf: leaf.name(num_replicas), self.loss)
        grads = tuple(total_name(leaf.stage, Role.GRAD, leaf.index) for leaf in leaves.all_params)
        names = names._replace(grads=grads, new_state=tuple(self.states) if names.old_state else ())
        inputs = UpdateInputs(*refilled(names, graph.inputs))
        self.source: dict[Var, Name] = dict(zip(graph.inputs, flat(names), strict=True))
        self.old: list[Var] = [*inputs.params, *inputs.opt]  # the results begin with the new versions of these
        self.before_last = {leaf.index: leaf.name(num_replicas) for leaf in leaves.previous if not self.visits}
        self.stages = flat(update.result_stages)
        own = flat(_read_by(leaves, lambda leaf: leaf.own and num_replicas > 1, of_loss=False))
        self.own = descendants(graph, [var for var, mine in zip(graph.inputs, own, strict=True) if mine], until=_sums_replicas)
        self.divides = divides = any(leaf.part != leaf.spec for leaf in leaves.all_params)
        self.parts = [
            part._replace(own=divides and not self.own.isdisjoint(variables(eqn.invars))) if part else None
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
        for leaf, (vector, pack) in self.packed.items():
            at = pack.members.index(Ref(Role.GRAD, leaf))
            self.vectors[vector] = pack.aval
            self.held[vector.stage, inputs.grads[leaf]] = vector, _Part(*pack.bounds[at], pack.avals[at].shape)
        self.serial = 0

    def _result_parts(self) -> list[UpdatePart]:
        graph, producers = self.update.graph, self.update.graph.producers()
        eqns = [producers.get(atom) if isinstance(atom, Var) else None for atom in graph.outputs]
        made = [None if eqn is None else self.parts[eqn] for eqn in eqns]
        own = [self.divides and atom in self.own for atom in graph.outputs]
        given = [UpdatePart(0, stage, each) for stage, each in zip(self.stages, own, strict=True)]
        return [at if part is None else part for part, at in zip(made, given, strict=True)]

    def run(self) -> UpdateResults[Name]:
        """Write the lines; what their results are called."""
        kept = self.update.kept
        results: dict[int, Name] = {k: self.source[self.old[k]] for k in kept}
        made = [(k, part) for k, part in enumerate(self.result_parts) if k not in kept]
        chosen: dict[UpdatePart, list[int]] = {part: [] for part in sorted({*self.pieces, *(part for _, part in made)})}
        for k, part in made:
            chosen[part].append(k)
        for part, mine in chosen.items():
            names = self._compute(part, mine)
            results.update(zip(mine, names, strict=True))
        self._copy()
        return UpdateResults(*refilled(self.update.result_stages, [self._bring(k, results[k]) for k in range(len(results))]))

    def _copy(self) -> None:
        """Write the lines that copy what this step leaves alone and another loss trains: it is late for the next step too."""
        stages: dict[int, list[StateLeaf]] = {}
        for leaf in self.update.leaves.previous:
            if leaf.changes:
                stages.setdefault(leaf.stage, []).append(leaf)
        for stage, mine in stages.items():
            old = [leaf.name(self.num_replicas) for leaf in mine]
            newest = [name._replace(ref=name.ref._replace(role=Role.PARAM)) for name in old]
            reads, writes = [*([] if self.visits else old), *newest], list(map(_copy_of, newest))
            refs = tuple(name.ref for name in reads), tuple(name.ref for name in writes)
            program = self.update.programs.get((stage, *refs))
            if program is None:
                avals = shapes_of(leaf.aval for leaf in mine) * (len(reads) // len(mine))
                run = functools.partial(_copied, len(mine))
                program = Program(run, *refs, avals, name=f"stage_{stage}_copy_parameters")
                self.update.programs[stage, *refs] = program
            self.builder.compute(f"copy parameters of stage {stage}", program, stage, reads, writes)

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
            return Name(stage, self.source[self.old[k]].ref._replace(new=True))
        return self._fresh(stage, self.update.graph.outputs[k])

    def _compute(self, part: UpdatePart, mine: Sequence[int]) -> list[Name]:
        """Write the line of a part, which makes these of the results, and the sends of its scalars; what the results are called."""
        (level, stage, apart), graph, piece = part, self.update.graph, self.pieces.get(part, Piece())
        inputs, results = [var for var in piece.inputs if var not in graph.constants], [graph.outputs[k] for k in mine]
        held, packs = [self._hold(stage, var) for var in inputs], self._packs(part)
        shapes = {name: self.vectors.get(name, var) for (name, _), var in zip(held, inputs, strict=True)}
        replaced = dict(self._replaced(stage, mine, shapes))
        names_in = list(dict.fromkeys([*replaced, *shapes]))  # any other order of these than the results' would cost copies
        returned = [var for var in piece.outputs if aval_of(var).shape or stage in self._readers(var)]
        fresh = [self._fresh(stage, *atoms) for atoms in (*((var,) for var in returned), *packs.values())]
        names_out = [self._new(stage, k) for k in mine]
        self.held.update(((stage, var), (name, None)) for var, name in zip(returned, fresh, strict=False))
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in (*names_out, *fresh))
        label = f"update stage {stage}" + f", part {level + 1}" * (level > 0) + ", of each replica" * apart
        program = self.update.programs.get((part, *refs))  # the first one stays, for it is compiled
        if program is None:
            number = {name: k for k, name in enumerate(names_in)}
            order = {var: len(results) + k for k, var in enumerate(piece.outputs)}
            reads = tuple((number[name], at) for name, at in held)
            chosen = (*range(len(results)), *(order[var] for var in returned))
            groups = tuple(tuple(order[var] for var in group) for group in packs.values())
            values = [*results, *piece.outputs]
            run = closed_function(graph, piece, inputs, values)
            made = [*(aval_of(values[k]) for k in chosen), *(self._vector(group) for group in packs.values())]
            avals = shapes_of((shapes | replaced)[name] for name in names_in)
            called = f"stage_{stage}_update" + f"_{level}" * (level > 0) + "_own" * apart
            lean = sum(map(count_bytes, avals)) > _LARGE
            run = _packing(run, reads, chosen, groups)
            program = Program(run, *refs, avals, name=called, env=graph.env, lean=lean, makes=tuple(shapes_of(made)))
            self.update.programs[part, *refs] = program
        self.builder.compute(label, program, stage, names_in, [*names_out, *fresh])
        for (peer, _), group, name in zip(packs, packs.values(), fresh[len(returned) :], strict=True):
            self._deliver(peer, group, name, self._vector(group))
        return names_out

    def _vector(self, scalars: Sequence[Var]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(scalars),), aval_of(scalars[0]).dtype)

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


def _copy_of(name: Name) -> Name:
    """What a copy of a parameter is called that a step leaves alone, as the one before the last step for the next."""
    return name._replace(ref=name.ref._replace(role=Role.PREVIOUS, new=True))


def _copied(count: int, *args: Array) -> list[Array]:
    """Copies of the last arguments, which may take over the buffers of those before them."""
    return [jnp.array(value, copy=True) for value in args[-count:]]


def _wide(grad: Array) -> Array:
    """A gradient of float16, or of floating numbers of a byte, as float32: its square would vanish where it is small."""
    return grad.astype(jnp.float32) if grad.dtype == jnp.float16 or grad.dtype.itemsize == 1 else grad


def _sums_replicas(eqn: JaxprEqn) -> bool:
    """Whether an equation makes one value for all replicas, of what each of them has."""
    return bool(axes_named([eqn]))


def _parts(graph: Graph, homes: Mapping[Var, int], paths: Sequence[str]) -> tuple[UpdatePart | None, ...]:
    """The part of each equation, from the stages of the inputs on."""
    place: dict[Var, UpdatePart] = {var: UpdatePart(0, stage) for var, stage in homes.items()}
    parts: list[UpdatePart | None] = []
    crossed: list[str] = []
    spread: dict[Var, Var] = {}  # what is computed where it is read, as it is computed of one small value: that value
    results = set(variables(graph.outputs))
    summed = {var for eqn in graph.eqns if _sums_replicas(eqn) for var in eqn.outvars}  # programs of their own may make them
    for eqn in graph.eqns:
        owned = [var for var in dict.fromkeys(spread.get(var, var) for var in variables(eqn.invars)) if var in place]
        if not owned:
            parts.append(None)
            continue
        grows = kind_of(eqn) in _SPREADING and MOVABLE >= size(owned[0]) < size(eqn.outvars[0])
        if len(owned) == 1 and grows and results.isdisjoint(eqn.outvars):
            spread[eqn.outvars[0]] = owned[0]
            parts.append(None)
            continue
        stages = {place[var].stage for var in owned}
        largest = max(owned, key=size)
        home = place[largest].stage if len(stages) == 1 or size(largest) > 1 else HUB
        for var in owned:
            away = place[var].stage
            if away != home and size(var) > MOVABLE:
                both = f"{describe(aval_of(largest))} of stage {home}, {describe(aval_of(var))} of stage {away}"
                crossed.append(f"{eqn.primitive.name}: {both}")
        level = max(place[var].level + (var in summed or (place[var].stage != home and var not in homes)) for var in owned)
        parts.append(UpdatePart(level, home))
        place.update(dict.fromkeys(eqn.outvars, UpdatePart(level, home)))
    if crossed:
        rule = "an update may combine small values of different stages (a norm), but not move large arrays between them"
        fix = "use a transformation that treats each parameter by itself, or pass num_stages=1"
        names = f"parameters: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
        raise OptimizerError("optimizer", rule, crossed, fix, names)
    return _late(graph, parts)


def _late(graph: Graph, parts: Sequence[UpdatePart | None]) -> tuple[UpdatePart | None, ...]:
    """Each equation at the last level at which it serves its readers, so that no moment is held from one level to the next."""
    users, results = graph.users(), set(variables(graph.outputs))
    late = list(parts)

    def readers_of(eqn: JaxprEqn) -> Iterator[UpdatePart]:
        for j in (j for var in eqn.outvars for j in users.get(var, ())):
            reader = late[j]
            yield from readers_of(graph.eqns[j]) if reader is None else [reader]

    for i, eqn in reversed(list(enumerate(graph.eqns))):
        part = parts[i]
        large = any(size(var) > 1 for var in eqn.outvars)
        readers = list(readers_of(eqn)) if part is not None and large and results.isdisjoint(eqn.outvars) else []
        if part is not None and readers:
            latest = min(reader.level - (reader.stage != part.stage) for reader in readers)
            late[i] = UpdatePart(max(part.level, latest), part.stage)
    return tuple(late)
