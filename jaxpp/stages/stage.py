"""A stage's slice of the loss, traced as one graph: its forward, and under ``jax.vjp`` its pullback.

The backward split into I and W, without doing anything twice.

Asking XLA for the gradients and dropping what is not used makes W repeat the chain of cotangents: a third more work. So the
equations are divided: I takes what the input's cotangent needs, W takes the rest, and the values that cross from I to W are kept as
I's residuals. I and W together are exactly B.

A gradient that falls out of an equation of I (a ``scan`` over layers or a ``jax.checkpoint``, whose backward is one equation) is
summed in I. A stage whose input wants no cotangent, as the first, has nothing in I.

Where a stage keeps the least, a second minimum cut decides what W computes again (``remat/least.py``). Otherwise what the backward
computes again is computed once, in I.


The programs of one stage: its traced equations coloured, and each colour made into a program.

Every equation of a stage's forward and pullback has its place by what it depends on:

* on the cotangent: the *backward*, whose halves are I and W (``split_backward.py``);
* on data: the *forward*; what the backward reads of it is the residuals;
* on parameters alone (a bf16 cast, a transposed kernel): the *statics*, computed once per step, so that no residual is ever a
  weight, or a copy, cast or transpose of one;
* on nothing that costs anything to redo: wherever it is needed.

A stage that is to recompute (``remat``) has one rule more: what the forward computes and the policy does not keep is done again
wherever the backward needs it. Nothing else changes, for forward and backward are programs of their own.


One stage of a cut loss: the programs that run its forward and its backward, and what they keep.

The stage's slice of the loss is run under ``jax.vjp`` and traced once, forward and pullback together (``stage_trace.py``). What
goes into which program is decided in ``stage_programs.py``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import Known, fingerprint
from jaxpp.stages.graph import Graph, Piece, descendants, partition, trace
from jaxpp.stages.jaxpr import CHEAP, LAYOUT, Atom, aval_of, calls_host, kind_of, shapes_of, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import TracedLoss, cheap_values
from jaxpp.stages.program import Backward, Pack, Program, Ref, Role, packed, packs_of
from jaxpp.stages.remat import Kept, Least, checkpoint_loops, recomputed, reuse_maximum
from jaxpp.types import Aval, Tree

__all__ = [
    "BACKWARD",
    "INPUT",
    "WEIGHT",
    "Halves",
    "StageBuilder",
    "StageCode",
    "StagePrograms",
    "StageSlice",
    "TracedStage",
    "split_backward",
]


@dataclass(frozen=True)
class TracedStage:
    """A stage's forward and pullback as one graph: names of the inputs, and names of the results in order."""

    graph: Graph
    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]
    returned: tuple[Ref, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class StageSlice:
    """A slice of the loss, ready to be traced.

    Attributes:
        loss: the whole.
        piece: the slice.
        inputs: the name of each input of the slice.
        outputs: what it returns, by name.
    """

    loss: TracedLoss
    piece: Piece
    inputs: list[Ref]
    outputs: list[tuple[Ref, Atom]]

    def trace(self, stage: int, carried: Sequence[tuple[int, ...]], train: bool, whole: Graph) -> TracedStage:
        """Trace the slice, under ``jax.vjp`` if it is to be trained."""
        loss = self.loss
        run = whole.function(self.piece.eqns, self.piece.inputs, [atom for _, atom in self.outputs])
        avals = shapes_of(self.piece.inputs)
        results = tuple(ref for ref, _ in self.outputs)
        if not train:
            graph, _ = trace(run, *avals)
            return TracedStage(graph, tuple(self.inputs), results, (), ())
        wants = [
            self._differentiable(ref, var) and (ref.role == Role.PARAM or stage in carried[ref.index])
            for ref, var in zip(self.inputs, self.piece.inputs, strict=True)
        ]
        gives = [
            self._differentiable(ref, atom) and (ref.role == Role.LOSS or bool(carried[ref.index])) for ref, atom in self.outputs
        ]
        cotangents: list[Ref] = []
        shapes: list[jax.ShapeDtypeStruct] = []
        for (ref, atom), give in zip(self.outputs, gives, strict=True):
            peers = (-1,) if ref.role == Role.LOSS else carried[ref.index] if give else ()
            cotangents += [Ref(Role.COTANGENT, ref.index, peer) for peer in peers]
            shapes += shapes_of([atom]) * len(peers)

        def both(args: Sequence[jax.Array], received: Sequence[jax.Array]) -> tuple[Tree, Tree]:
            free = [arg for arg, want in zip(args, wants, strict=True) if want]

            def forward(free: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                supply = iter(free)
                outs = run(*(next(supply) if want else arg for arg, want in zip(args, wants, strict=True)))
                return _where(outs, gives, True), _where(outs, gives, False)

            outs, pullback, rest = jax.vjp(loss.remat(forward) if loss.remat else forward, free, has_aux=True)
            summed = _sum_by([ref.index if ref.peer >= 0 else -1 for ref in cotangents], received)
            return (outs, rest), pullback(summed)

        graph, _ = trace(both, avals, shapes, opened=True)
        order = [ref for ref, give in zip(results, gives, strict=True) if give]
        order += [ref for ref, give in zip(results, gives, strict=True) if not give]
        returned = [ref for ref, want in zip(self.inputs, wants, strict=True) if want]
        seeds = tuple(len(self.inputs) + k for k, ref in enumerate(cotangents) if ref.peer < 0)
        return TracedStage(graph, (*self.inputs, *cotangents), tuple(order), tuple(returned), seeds)

    def _differentiable(self, ref: Ref, atom: Atom) -> bool:
        return ref.role == Role.LOSS or (ref.role in (Role.PARAM, Role.ACTIVATION) and atom in self.loss.carries)


def _where(values: Sequence[jax.Array], flags: Sequence[bool], wanted: bool) -> list[jax.Array]:
    return [value for value, flag in zip(values, flags, strict=True) if flag == wanted]


def _sum_by(keys: Sequence[int], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Sum the values that share a key, in the order the keys first appear: one activation, several readers."""
    sums: dict[int, jax.Array] = {}
    for key, value in zip(keys, values, strict=True):
        sums[key] = sums[key] + value if key in sums else value
    return list(sums.values())


BACKWARD, INPUT, WEIGHT = "backward", "input", "weight"
"""The colours of the equations of B, and of the equations of its halves I and W."""


@dataclass(frozen=True)
class Halves:
    """A backward in two parts.

    Attributes:
        input: the equations of I.
        weight: the equations of W.
        returned_by: which half returns each result of the backward, ``INPUT`` or ``WEIGHT``.
    """

    input: Piece
    weight: Piece
    returned_by: tuple[str, ...]


def split_backward(
    graph: Graph,
    colors: Sequence[str | None],
    results: Sequence[tuple[Atom, bool]],
    *,
    again: set[int],
    free: Collection[int],
    lasting: Collection[Var],
    remat: Kept,
) -> Halves:
    """Divide the equations of a backward into I and W.

    Args:
        graph: a stage's forward and pullback.
        colors: the part of the stage that each equation belongs to; those of the backward are ``BACKWARD``.
        results: what the backward returns, and whether each result is the cotangent of an input, which I must return.
        again: the equations of the forward that the backward runs again.
        free: the equations that every program repeats anyway.
        lasting: the values that are there for all microbatches.
        remat: what the stage keeps.
    """
    cotangents = {atom for atom, of_input in results if of_input and isinstance(atom, Var)}
    backward = {i for i, color in enumerate(colors) if color == BACKWARD}
    needed = _needed(graph, backward, cotangents)
    parts = [INPUT if i in needed else WEIGHT if i in backward else color for i, color in enumerate(colors)]
    made = cotangents.union(*(graph.eqns[i].outvars for i in needed))
    if isinstance(remat, Least) and needed:  # what I and W both run has no colour
        wanted = {atom: WEIGHT for atom, _ in results if isinstance(atom, Var)}
        pieces = partition(graph, parts, wanted | dict.fromkeys(cotangents, INPUT))
        of_input, of_weight = (pieces.get(half, Piece()) for half in (INPUT, WEIGHT))
        held = {*of_input.inputs, *of_weight.inputs}.difference(lasting)
        both, early = remat.between(graph, of_input.eqns, of_weight.eqns, free, held)
        early |= again & set(of_input.eqns)
        parts = [None if i in both else INPUT if i in early else part for i, part in enumerate(parts)]
        made = cotangents.union(*(graph.eqns[i].outvars for i, part in enumerate(parts) if part == INPUT), graph.inputs)
    elif needed:  # what is recomputed is so once, in I
        parts = [INPUT if i in again else part for i, part in enumerate(parts)]
        made.update(*(graph.eqns[i].outvars for i in again))
    halves = tuple(INPUT if of_input or (isinstance(atom, Var) and atom in made) else WEIGHT for atom, of_input in results)
    homes = {atom: half for (atom, _), half in zip(results, halves, strict=True) if isinstance(atom, Var)}
    pieces = partition(graph, parts, homes)
    return Halves(pieces.get(INPUT, Piece()), pieces.get(WEIGHT, Piece()), halves)


def _needed(graph: Graph, backward: Collection[int], cotangents: Iterable[Atom]) -> set[int]:
    """The equations of the backward that the cotangents are computed by."""
    producers = graph.producers()
    found: set[int] = set()
    pending = variables(cotangents)
    while pending:
        i = producers.get(pending.pop())
        if i is not None and i in backward and i not in found:
            found.add(i)
            pending += variables(graph.eqns[i].invars)
    return found


_STATICS, _FORWARD = "statics", "forward"
_OF_STEP = {Role.PARAM, Role.CONSTANT, Role.STATIC, Role.KEY}
_NAMES = {"B": "backward", "I": "input_grad", "W": "weight_grad"}


class StagePrograms:
    """Colours the equations of a traced stage and turns the pieces into programs."""

    def __init__(
        self,
        traced: TracedStage,
        stage: int,
        rows: frozenset[int],
        num_constants: int,
        remat: Kept,
        scaled_by: int | None,
        pack_below: int,
    ):
        self.traced = traced
        self.pack_below = pack_below
        self.scaled_by = scaled_by
        self.stage = stage
        self.rows = rows
        graph = traced.graph
        does = fingerprint(graph.eqns, [*graph.inputs, *graph.constants], graph.outputs)
        names = traced.inputs, traced.results, traced.returned, traced.seeds
        self.does = does and (does, names, stage, rows, num_constants, remat, scaled_by, pack_below)
        self.refs: dict[Var, Ref] = dict(zip(graph.inputs, traced.inputs, strict=True))
        self.refs |= {var: Ref(Role.CONSTANT, num_constants + k) for k, var in enumerate(graph.constants)}
        self.new_constants = tuple(graph.constants.values())
        split = len(traced.results)
        self.forward_atoms, self.backward_atoms = graph.outputs[:split], graph.outputs[split:]
        homes = dict.fromkeys(variables(self.backward_atoms), BACKWARD) | dict.fromkeys(variables(self.forward_atoms), _FORWARD)
        colors = before = self._colors()
        self.lasting = {var for var, ref in self.refs.items() if ref.shared or ref.role in _OF_STEP}
        self.lasting.update(*(eqn.outvars for eqn, color in zip(graph.eqns, colors, strict=True) if color == _STATICS))
        self.free = {i for i, color in enumerate(colors) if color is None}
        self.again = self._again(colors, remat)
        colors = [None if i in self.again else color for i, color in enumerate(colors)]
        self.pieces = partition(graph, colors, homes)
        self.refs |= {var: Ref(Role.STATIC, k) for k, var in enumerate(self._piece(_STATICS).outputs)}
        sent = {
            atom: ref
            for ref, atom in zip(traced.results, self.forward_atoms, strict=True)
            if ref.role == Role.ACTIVATION and isinstance(atom, Var) and atom not in self.refs
        }
        needed = [var for var in self._piece(BACKWARD).inputs if var not in self.refs]
        self.residuals = [var for var in needed if var not in sent]
        self.refs |= {var: Ref(Role.RESIDUAL, k) for k, var in enumerate(self.residuals)} | sent
        self.small = packs_of([self.refs[var] for var in self.residuals], shapes_of(self.residuals), Ref(Role.RESIDUAL), pack_below)
        everything = partition(graph, before, homes).get(BACKWARD, Piece())
        self.kept_bytes, self.keepable_bytes = self._held(self._piece(BACKWARD)), self._held(everything)
        returned = zip(self.backward_atoms, (ref.role == Role.ACTIVATION for ref in traced.returned), strict=True)
        again = self.again.intersection(self._piece(BACKWARD).eqns)
        self.halves = split_backward(graph, colors, list(returned), again=again, free=self.free, lasting=self.lasting, remat=remat)
        self.kept = [var for var in self.halves.weight.inputs if var not in self.refs]
        names = [Ref(Role.RESIDUAL, len(self.residuals) + k) for k in range(len(self.kept))]
        self.refs |= zip(self.kept, names, strict=True)
        self.small_kept = packs_of(names, shapes_of(self.kept), Ref(Role.RESIDUAL, peer=0), pack_below)

    def _again(self, colors: Sequence[str | None], remat: Kept) -> set[int]:
        """The equations of the forward that the backward runs again."""
        graph, forward = self.traced.graph, {i for i, color in enumerate(colors) if color == _FORWARD}
        if not isinstance(remat, Least):
            return set() if remat is None else recomputed(graph, forward, remat)
        reads = [var for eqn, color in zip(graph.eqns, colors, strict=True) if color == BACKWARD for var in variables(eqn.invars)]
        held = set(graph.inputs) - self.lasting
        return remat.again(graph, forward, self.free, held, [*reads, *variables(self.backward_atoms)])

    def _held(self, piece: Piece) -> int:
        """Bytes of what a backward reads that was there before it, for this microbatch alone."""
        passing = self.lasting.union(var for var in self.traced.graph.inputs if self.refs[var].role == Role.COTANGENT)
        return sum(count_bytes(aval_of(var)) for var in piece.inputs if var not in passing)

    def _piece(self, color: str) -> Piece:
        return self.pieces.get(color, Piece())

    def _colors(self) -> list[str | None]:
        graph = self.traced.graph
        roles: dict[Role, list[Var]] = {role: [] for role in Role}
        for var in graph.inputs:
            roles[self.refs[var].role].append(var)
        of_microbatch = (Role.BATCH, Role.KEY, Role.STATE, Role.ACTIVATION, Role.COTANGENT)
        data = descendants(graph, [var for role in of_microbatch for var in roles[role]])
        backward = descendants(graph, roles[Role.COTANGENT])
        barred = descendants(graph, roles[Role.ACTIVATION] + roles[Role.PARAM] + roles[Role.COTANGENT])
        cheap = cheap_values(graph, roles[Role.BATCH], roles[Role.KEY] + roles[Role.STATE], barred)
        sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in roles[Role.PARAM]}
        colors: list[str | None] = []
        for eqn in graph.eqns:
            outs = set(eqn.outvars)
            if not outs.isdisjoint(backward) or (eqn.effects and not backward.isdisjoint(variables(eqn.invars))):
                colors.append(BACKWARD)  # a host callback may have no results
            elif not outs.isdisjoint(data) or eqn.effects:
                colors.append(None if outs <= cheap and not eqn.effects else _FORWARD)
            else:
                union = frozenset().union(*(sources.get(var, frozenset()) for var in variables(eqn.invars)))
                sources.update((var, union) for var in outs)
                grows = sum(count_bytes(aval_of(v)) for v in outs) > 2 * sum(count_bytes(aval_of(v)) for v in union)
                again = kind_of(eqn) in LAYOUT or (kind_of(eqn) in CHEAP and grows)
                colors.append(None if again else _STATICS)
        return colors

    def statics(self) -> Program:
        """Computes what depends on parameters alone, once a step."""
        piece = self._piece(_STATICS)
        graph = self.traced.graph
        does = fingerprint([graph.eqns[i] for i in piece.eqns], piece.inputs, piece.outputs)  # the same at all microbatch sizes
        function = Known(graph.function(piece.eqns, piece.inputs, piece.outputs), does)
        program = self._program(function, piece.inputs, [self.refs[var] for var in piece.outputs])
        return replace(program, name=f"stage_{self.stage}_statics")

    def forward(self, packs: Sequence[Pack]) -> Program:
        """Runs one microbatch's forward, and returns its small residuals in ``packs``."""
        piece = self._piece(_FORWARD)
        results = list(zip(self.traced.results, self.forward_atoms, strict=True))
        run = self.traced.graph.function(piece.eqns, piece.inputs, [*self.forward_atoms, *self.residuals])
        totals = [(k, self._total(ref)) for k, (ref, _) in enumerate(results) if ref.role not in (Role.ACTIVATION, Role.STATE)]
        added = [(k, ref) for k, ref in totals if ref.role != Role.ROWS]
        outputs = [ref for ref, _ in results] + [self.refs[var] for var in self.residuals]
        for k, ref in totals:
            outputs[k] = ref
        avals = [_average_like(aval_of(results[k][1])) for k, _ in added]
        program = self._accumulating(run, piece.inputs, outputs, added, avals, [])
        return self._called("forward", packed(program, (), packs) if packs else program, packs)

    def backward(self, kind: str, packs: Sequence[Pack]) -> Backward | None:
        """The program of B, I or W; None if it has nothing to do."""
        halves = {"B": (INPUT, WEIGHT), "I": (INPUT,), "W": (WEIGHT,)}[kind]
        chosen = [k for k, half in enumerate(self.halves.returned_by) if half in halves]
        kept = self.kept if kind == "I" else []
        if not chosen and not kept:
            return None
        piece = {"B": self._piece(BACKWARD), "I": self.halves.input, "W": self.halves.weight}[kind]
        first, then = (self._backward(piece, chosen, kept, first=first) for first in (True, False))
        sums = [pack for pack in packs if not set(pack.members).isdisjoint(then.outputs)]
        residuals = self.small if kind == "B" else (*self.small, *self.small_kept)
        writes = (*self.small_kept, *sums) if kind == "I" else sums
        lean = kind == "W" and bool(self.halves.input.eqns)  # else W is all of B
        first, then = (replace(program, lean=lean) for program in (first, then))
        first, then = packed(first, residuals, writes), packed(then, (*residuals, *sums), writes)
        return Backward(self._called(f"{_NAMES[kind]}_first", first, packs), self._called(_NAMES[kind], then, packs))

    def _called(self, name: str, program: Program, packs: Sequence[Pack] = ()) -> Program:
        """A program by its name. What it does follows from its name, from the packs, and from what this object was made of."""
        does = self.does and (self.does, name, tuple(packs))
        return replace(program, name=f"stage_{self.stage}_{name}", function=Known(program.function, does))

    def _backward(self, piece: Piece, chosen: Sequence[int], kept: Sequence[Var], *, first: bool) -> Program:
        graph, traced = self.traced.graph, self.traced
        seeds = {graph.inputs[k] for k in traced.seeds}
        run = graph.function(piece.eqns, piece.inputs, [*(self.backward_atoms[k] for k in chosen), *kept])
        inputs = [var for var in piece.inputs if var not in seeds]
        scaled = [Ref(Role.LOSS_SCALE, self.scaled_by)] if self.scaled_by is not None and len(inputs) < len(piece.inputs) else []

        def seeded(*args: jax.Array) -> list[jax.Array]:
            seed = args[-1] if scaled else jnp.ones(())
            supply = iter(args)
            return run(*(seed.astype(aval_of(var).dtype) if var in seeds else next(supply) for var in piece.inputs))

        outputs = [self._returned(traced.returned[k]) for k in chosen]
        added = [(k, ref) for k, ref in enumerate(outputs) if ref.role == Role.GRAD]
        avals = [shapes_of([self.backward_atoms[chosen[k]]])[0] for k, _ in added]
        outputs += [self.refs[var] for var in kept]
        return self._accumulating(seeded, inputs, outputs, added, avals, scaled, first=first)

    def _returned(self, ref: Ref) -> Ref:
        """What the backward returns for an input: the gradient of a parameter, the cotangent of an activation."""
        return Ref(Role.GRAD, ref.index) if ref.role == Role.PARAM else Ref(Role.COTANGENT, ref.index, self.stage)

    def _total(self, ref: Ref) -> Ref:
        return Ref(Role.ROWS, ref.index) if ref.role == Role.AUX and ref.index in self.rows else ref

    def _accumulating(
        self,
        run: Callable[..., list[jax.Array]],
        inputs: Sequence[Var],
        outputs: Sequence[Ref],
        added: Sequence[tuple[int, Ref]],
        avals: Sequence[jax.ShapeDtypeStruct],
        scaled: Sequence[Ref],
        *,
        first: bool = False,
    ) -> Program:
        """A program whose results ``added`` are weighted, and added to what was there before unless they are the ``first``.

        ``scaled`` is the loss scale, where the program starts from one; ``run`` takes it last.
        """
        seed = [jax.ShapeDtypeStruct((), jnp.float32) for _ in scaled]
        if not added:
            return self._program(run, inputs, outputs, scaled, seed)
        split = len(inputs) + len(scaled)

        def function(*args: jax.Array) -> list[jax.Array]:
            results = list(run(*args[:split]))
            scale, totals = args[split], args[split + 1 :]
            for number, (k, _) in enumerate(added):
                dtype = avals[number].dtype
                share = scale.astype(dtype) * jnp.asarray(results[k], dtype)
                results[k] = share if first else totals[number] + share
            return results

        more = [] if first else [ref for _, ref in added]
        extra = [jax.ShapeDtypeStruct((), scale_dtype()), *([] if first else avals)]
        return self._program(function, inputs, outputs, [*scaled, Ref(Role.SCALE), *more], [*seed, *extra])

    def _program(
        self,
        function: Callable[..., list[jax.Array]],
        inputs: Sequence[Var],
        outputs: Sequence[Ref],
        more: Sequence[Ref] = (),
        more_avals: Sequence[jax.ShapeDtypeStruct] = (),
    ) -> Program:
        names = (*(self.refs[var] for var in inputs), *more)
        return Program(function, names, tuple(outputs), (*shapes_of(inputs), *more_avals))


def _average_like(aval: Aval) -> jax.ShapeDtypeStruct:
    """The aval of a mean of values like ``aval``: floats stay, counts become floats."""
    inexact = jnp.issubdtype(aval.dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype if inexact else scale_dtype())


@dataclass(frozen=True)
class StageCode:
    """The programs of one stage at one microbatch shape.

    Attributes:
        index: which stage.
        statics: computes, once per step, what depends on parameters alone.
        forward: one microbatch's forward; returns what is sent on, and the residuals.
        backward: one microbatch's backward by kind, B, I and W; sums gradients, returns cotangents. A kind with nothing to do is
            not there, and none is when only forwards are run.
        packs: the small gradients that are summed as one vector.
        residuals: shape of each value the forward keeps for the backward, besides the stage's own inputs and outputs.
        kept: bytes that one microbatch holds from its forward to its backward, inputs and outputs included.
        keepable: what they would be if all were kept that the pullback reads.
        constants: arrays the loss closed over that this stage reads.
        params: the parameter leaves this stage reads.
        flops: of one forward.
        modules: module paths, in order.
        calls_host: whether any of its programs calls a Python function on the host.
    """

    index: int
    statics: Program
    forward: Program
    backward: Mapping[str, Backward]
    packs: tuple[Pack, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    kept: int
    keepable: int
    constants: tuple[jax.Array, ...]
    params: tuple[int, ...]
    flops: float
    modules: tuple[str, ...]
    calls_host: bool


@dataclass(frozen=True)
class StageBuilder:
    """What is the same for every stage of a cut; ``build`` makes one stage's programs."""

    loss: TracedLoss
    last: int
    owner: tuple[int, ...]
    homes: dict[Var, int]
    crossing: list[Var]
    carried: tuple[tuple[int, ...], ...]
    made: dict[Var, int]
    rows: frozenset[int]
    packs: Sequence[tuple[Pack, ...]] | None
    train: bool
    scaled_by: int | None
    pack_below: int

    def build(self, stage: int, piece: Piece, remat: Kept = None) -> StageCode:
        """The programs of the stage that runs ``piece``; ``remat`` says what its forward keeps, None: everything."""
        loss = self.loss
        body, constants = self._body(stage, piece)
        programs, keepable = self._programs(body, stage, len(constants), remat)
        packs: tuple[Pack, ...] = ()
        if self.train:
            packs = self._packs(stage, programs) if self.packs is None else self.packs[stage]
        backward = {kind: programs.backward(kind, packs) for kind in "BIW"} if self.train else {}
        values = [loss.graph.constants[var] for var in constants]
        mine = set(piece.eqns)
        return StageCode(
            index=stage,
            statics=programs.statics(),
            forward=programs.forward(programs.small if self.train else ()),
            backward={kind: found for kind, found in backward.items() if found is not None},
            packs=packs,
            residuals=shapes_of(programs.residuals),
            kept=programs.kept_bytes,
            keepable=keepable,
            constants=(*values, *programs.new_constants),
            params=tuple(sorted(ref.index for ref in body.inputs if ref.role == Role.PARAM)),
            flops=sum(cost for cost, i in zip(loss.flops, loss.spine, strict=True) if i in mine),
            modules=tuple(dict.fromkeys(name for i, name in zip(loss.spine, loss.modules, strict=True) if name and i in mine)),
            calls_host=calls_host(programs.traced.graph.eqns),
        )

    def colored(self, stage: int, piece: Piece, remat: Kept = None) -> StagePrograms:
        """The equations of a stage as its programs run them, of which ``build`` makes the programs themselves."""
        body, constants = self._body(stage, piece)
        return self._programs(body, stage, len(constants), remat)[0]

    def _body(self, stage: int, piece: Piece) -> tuple[StageSlice, list[Var]]:
        """What a stage runs, with the names of what goes in and comes out; and the constants among its inputs."""
        loss = self.loss
        numbers = {var: k for k, var in enumerate(self.crossing)}
        refs = {var: Ref(Role.PARAM, k) for k, var in enumerate(loss.params)}
        refs |= {var: Ref(Role.STATE, k) for k, var in enumerate(loss.state)}
        refs |= {var: Ref(Role.BATCH, k, shared=k in loss.shared) for k, var in enumerate(loss.batch)}
        refs |= {var: Ref(Role.ACTIVATION, k) for var, k in numbers.items()}
        if loss.key is not None:
            refs[loss.key] = Ref(Role.KEY)
        constants = [var for var in piece.inputs if var in loss.graph.constants]
        refs |= {var: Ref(Role.CONSTANT, k) for k, var in enumerate(constants)}
        sent = [(Ref(Role.ACTIVATION, numbers[var]), var) for var in self.crossing if self.made[var] == stage]
        named = [(Ref(Role.LOSS), loss.graph.outputs[0])] * loss.is_loss
        named += [(Ref(Role.AUX, k), atom) for k, atom in enumerate(loss.aux)]
        named += [(Ref(Role.STATE, k), atom) for k, atom in enumerate(loss.new_state) if k not in loss.unchanged]
        results = [(ref, atom) for ref, atom in named if (self.homes[atom] if isinstance(atom, Var) else self.last) == stage]
        return StageSlice(loss, piece, [refs[var] for var in piece.inputs], [*sent, *results]), constants

    def _programs(self, body: StageSlice, stage: int, num_constants: int, remat: Kept) -> tuple[StagePrograms, int]:
        """The programs of a stage, with checkpoints in its loops where that keeps less, and the bytes that it could keep."""
        graphs, loops = [self.loss.graph], isinstance(remat, Least) and self.train and self.loss.remat is None
        graphs += checkpoint_loops(self.loss.graph, body.piece.eqns) if loops else []
        given = stage, self.rows, num_constants, remat, self.scaled_by, self.pack_below
        traces = [body.trace(stage, self.carried, self.train, graph) for graph in graphs]
        if isinstance(remat, Least):
            traces = [replace(traced, graph=reuse_maximum(traced.graph)) for traced in traces]
        found = [StagePrograms(traced, *given) for traced in traces]
        return min(found, key=lambda programs: programs.kept_bytes), found[0].keepable_bytes

    def _packs(self, stage: int, programs: StagePrograms) -> tuple[Pack, ...]:
        """The packs of the stage's own small gradients; gradients that go home to another stage are not packed."""
        own = [ref.index for ref in programs.traced.returned if ref.role == Role.PARAM and self.owner[ref.index] == stage]
        avals = shapes_of(self.loss.params[leaf] for leaf in own)
        return packs_of([Ref(Role.GRAD, leaf) for leaf in own], avals, Ref(Role.GRAD), self.pack_below)
