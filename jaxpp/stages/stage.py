"""One stage of a cut loss: its slice traced, coloured, and made into the programs of its forward and its backward.

The slice is traced once under ``jax.vjp``. What depends on the cotangent is the *backward*, what depends on data the *forward*,
what depends on parameters alone the *statics*, run once a step: so no residual is a weight, or its copy, cast or transpose. What
cheap equations make of quantised weights is made where it is read, for it is larger than they are and would stay all the step. The
backward runs again what the policy (``remat.py``) does not keep. I takes what the input's cotangent needs, W the rest, and what
crosses is kept: so I and W are exactly B, where XLA would repeat the chain of cotangents in W, a third more work. A gradient that
falls out of an equation of I (a ``scan``) is summed there. A stage whose input wants no cotangent, as the first, has nothing in I.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxpp.stages.axes import RankAxes
from jaxpp.stages.cost import count_bytes, count_flops, product_flops
from jaxpp.stages.estimate import CPU_RATES, EquationWork, Rates, works_of
from jaxpp.stages.fingerprint import ComparableFunction, fingerprint
from jaxpp.stages.floating import has_gradient, is_quantised
from jaxpp.stages.graph import Graph, Piece, descendants, live, needed_in, partition, trace
from jaxpp.stages.jaxpr import CHEAP, LAYOUT, Atom, aval_of, calls_host, kind_of, module_path, shapes_of, variables
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import TracedLoss, cheap_values
from jaxpp.stages.program import SMALL, Backward, Fused, Pack, Program, Ref, Role, packed, packs_of
from jaxpp.stages.remat import Halves, RematPolicy
from jaxpp.stages.repeatable import decodes
from jaxpp.stages.scatters import Summands, summands_of, with_one_hots
from jaxpp.types import Aval, Tree

FORWARD, BACKWARD = "forward", "backward"  # The colours of the equations of F and B
_T = TypeVar("_T")
_Run = Callable[..., list[jax.Array]]
_Added = Mapping[int, Summands]  # The number of each result that is added to what was there before, and what adds up to it
_Results = tuple[Sequence[Ref], _Added]
_STATICS, _INPUT, _WEIGHT, _FUSED = "statics", "input", "weight", "fused"
_OF_STEP = {Role.PARAM, Role.CONSTANT, Role.STATIC, Role.KEY}
_OF_MICROBATCH = (Role.BATCH, Role.KEY, Role.STATE, Role.ACTIVATION, Role.COTANGENT)
_NAMES = {"B": "backward", "I": "input_grad", "W": "weight_grad"}


@dataclass(frozen=True)
class StageCode:
    """The programs of one stage at one microbatch shape."""

    index: int
    statics: Program  # computes, once per step, what depends on parameters alone
    static_does: Mapping[Ref, tuple[Hashable, tuple[Ref, ...]]]  # by result, what tells equal ones; and of what made
    forward: Program  # of one microbatch; returns what is sent on, and the residuals
    backward: Mapping[str, Backward]  # of one microbatch, by kind: B, I and W, those that have anything to do
    fused: Fused | None  # F and B as one program, where B waits for no other stage: that of the loss
    packs: tuple[Pack, ...]  # the small gradients that are summed as one vector
    residuals: tuple[jax.ShapeDtypeStruct, ...]  # what is kept besides the stage's own inputs and outputs
    kept: int  # bytes that one microbatch holds from its forward to its backward, inputs and outputs included
    keepable: int  # what they would be if all were kept that the pullback reads
    repeated: float  # FLOPs of the matrix products and convolutions of F that B runs again
    products: float  # FLOPs of those of F
    constants: tuple[jax.Array, ...]  # arrays the loss closed over that this stage reads
    params: tuple[int, ...]  # the parameter leaves this stage reads
    flops: float  # of one forward
    backward_flops: float  # of one backward, with what it computes again
    rates: Rates  # of the devices that it was cut for
    costs_at: Callable[[Rates], Mapping[str, float]]  # seconds that one F, B, I or W takes at some rates, estimated
    modules: tuple[str, ...]
    calls_host: bool  # whether any of its programs calls a Python function on the host

    @cached_property
    def costs(self) -> Mapping[str, float]:
        """Seconds that one F, B, I or W takes on the devices that it was cut for, estimated."""
        return self.costs_at(self.rates)

    @cached_property
    def reads(self) -> Mapping[Ref, Aval]:
        """The shape of each value that its programs take, those of a microbatch too."""
        programs = [self.statics, self.forward, *(backward.then for backward in self.backward.values())]
        return {ref: aval for each in programs for ref, aval in zip(each.inputs, each.avals, strict=True)}


@dataclass(frozen=True)
class _Slice:
    stage: int
    piece: Piece
    inputs: list[Ref]
    outputs: list[tuple[Ref, Atom]]
    num_constants: int


@dataclass(frozen=True)
class TracedStage:
    """A stage's forward and pullback as one graph."""

    graph: Graph  # of the inputs and cotangents, to the results and what the pullback returns
    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]  # of the forward
    returned: tuple[Ref, ...]  # the inputs whose gradients or cotangents the pullback returns
    seeds: tuple[int, ...]  # the inputs that are the cotangent of the loss


@dataclass(frozen=True)
class ProgramOptions:
    """What the user, or an earlier trace, has decided about the programs of stages."""

    remat: Sequence[RematPolicy] | None = None  # what the forward of each stage keeps; None: everything
    train: bool = True  # whether there are backwards
    cut_gradient: Collection[int] = ()  # the boundaries, s between stages s and s + 1, across which no cotangent goes
    scaled_by: int | None = None  # the number of the loss scale's leaf that the backward starts from, if it does not start from 1
    skips: bool = False  # whether a microbatch of weight 0 adds nothing, not even 0 times what is not finite
    reducers: Mapping[int, Reducer] = field(default_factory=dict)  # of the aux leaves that are held, not averaged
    packs: Sequence[tuple[Pack, ...]] | None = None  # the gradients that each stage packs, if that is decided
    pack: bool = True  # whether small values are packed
    state_owner: Sequence[int] | None = None  # of the model state leaves that no stage changes, if that is decided
    rates: Rates = CPU_RATES  # of the devices, by which costs are estimated
    speeds: Sequence[float] = ()  # how many times as fast as the narrowest rank that of each stage is; empty: all are alike
    axes: Sequence[RankAxes] | None = None  # of the rank of each stage, where the loss names those of the widest rank


@dataclass(frozen=True)
class StageBuilder:
    """What is the same for every stage of a cut; ``build`` makes one stage's programs."""

    loss: TracedLoss
    options: ProgramOptions
    owner: Sequence[int]  # the stage of each parameter leaf
    homes: Mapping[Var, int]  # the stage that returns each result of the loss
    last: int = 0  # the last stage
    crossing: Sequence[Var] = ()  # the values that cross between stages
    carried: tuple[tuple[int, ...], ...] = ()  # for each of them the stages that send its cotangent back
    made: Mapping[Var, int] = field(default_factory=dict)  # the stage that makes each of them
    looped: dict[RematPolicy, list[Graph]] = field(default_factory=dict)  # the loss with its loops as a policy would have them
    traced: dict[Hashable, Graph] = field(default_factory=dict)  # stages with their pullback, by what tells equal ones
    works: dict[Hashable, tuple[Sequence[JaxprEqn], list[EquationWork]]] = field(default_factory=dict)  # of pieces of these

    def build(self, stage: int, piece: Piece) -> StageCode:
        """The programs of the stage that runs ``piece``."""
        loss, constants = self.loss, self.loss.graph.constants
        programs = self.colored(stage, piece)
        packs: tuple[Pack, ...] = ()
        if self.options.train:
            packs = self._packs(stage, programs) if self.options.packs is None else self.options.packs[stage]
        backward = {kind: programs.backward(kind, packs) for kind in "BIW"} if self.options.train else {}
        mine = set(piece.eqns)
        return StageCode(
            index=stage,
            statics=programs.statics(),
            static_does=programs.static_does(),
            forward=programs.forward(programs.small if self.options.train else ()),
            backward={kind: program for kind, program in backward.items() if program is not None},
            fused=programs.fused(packs) if backward.get("B") else None,
            packs=packs,
            residuals=shapes_of(programs.residuals),
            kept=programs.kept_bytes,
            keepable=programs.keepable_bytes,
            repeated=programs.repeated if backward.get("B") else 0.0,
            products=programs.products_of_forward,
            constants=(*(constants[v] for v in piece.inputs if v in constants), *programs.traced.graph.constants.values()),
            params=tuple(sorted(ref.index for ref in programs.traced.inputs if ref.role == Role.PARAM)),
            flops=sum(cost for cost, i in zip(loss.flops, loss.spine, strict=True) if i in mine),
            backward_flops=programs.backward_flops if self.options.train else 0.0,
            rates=self.options.rates,
            costs_at=partial(programs.costs, speed=self.options.speeds[stage] if self.options.speeds else 1.0),
            modules=tuple(dict.fromkeys(name for i, name in zip(loss.spine, loss.modules, strict=True) if name and i in mine)),
            calls_host=calls_host(programs.traced.graph.eqns),
        )

    def _slice(self, stage: int, piece: Piece) -> _Slice:
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
        return _Slice(stage, piece, [refs[var] for var in piece.inputs], [*sent, *results], len(constants))

    def colored(self, stage: int, piece: Piece) -> "StagePrograms":
        """A stage's equations as its programs run them, loops checkpointed where that keeps less."""
        remat = self.options.remat[stage] if self.options.remat else RematPolicy()
        body, graph = self._slice(stage, piece), self.loss.graph
        graphs = [graph]
        if self.options.train and self.loss.remat is None:
            if remat not in self.looped:
                self.looped[remat] = remat.loops(graph, range(len(graph.eqns)))
            graphs += [each for each in self.looped[remat] if any(each.eqns[i] is not graph.eqns[i] for i in piece.eqns)]
        traces = [self._trace(body, graph, remat) for graph in graphs]

        def build(policy: RematPolicy) -> list[StagePrograms]:
            found = [StagePrograms(self, traced, stage, body.num_constants, policy) for traced in traces]
            for programs in found:
                programs.repeated = programs.products - found[0].products_once
                programs.keepable_bytes = found[0].keepable_bytes
            return found

        return remat.chosen(build)

    def _trace(self, body: _Slice, whole: Graph, policy: RematPolicy) -> TracedStage:
        remat, inputs, outputs = self.loss.remat, body.inputs, body.outputs
        run = whole.function(body.piece.eqns, body.piece.inputs, [atom for _, atom in outputs])
        avals = shapes_of(body.piece.inputs)
        results = [ref for ref, _ in outputs]
        rank = self.options.axes[body.stage] if self.options.axes else None
        if not self.options.train:
            graph, _ = trace(run, *avals, env=whole.env, rank=rank)
            return TracedStage(graph, tuple(inputs), tuple(results), (), ())
        wants = [
            self._differentiable(ref, var) and (ref.role == Role.PARAM or body.stage in self.carried[ref.index])
            for ref, var in zip(inputs, body.piece.inputs, strict=True)
        ]
        gives: list[int] = []  # how many stages send a cotangent of each result
        cotangents: list[Ref] = []
        shapes: list[jax.ShapeDtypeStruct] = []
        for ref, atom in outputs:
            peers = (-1,) if ref.role == Role.LOSS else self.carried[ref.index] if self._differentiable(ref, atom) else ()
            gives.append(len(peers))
            cotangents += [Ref(Role.COTANGENT, ref.index, source=peer) for peer in peers]
            shapes += shapes_of([atom]) * len(peers)

        def both(args: Sequence[jax.Array], received: Sequence[jax.Array]) -> tuple[Tree, Tree]:
            def forward(wanted: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                supply = iter(wanted)
                values = run(*(next(supply) if want else arg for arg, want in zip(args, wants, strict=True)))
                return _divided(values, gives)

            outs, pullback, rest = jax.vjp(remat(forward) if remat else forward, _divided(args, wants)[0], has_aux=True)
            sums: dict[int, jax.Array] = {}  # one activation, several readers
            for ref, value in zip(cotangents, received, strict=True):
                number = ref.index if ref.source >= 0 else -1
                sums[number] = sums[number] + value if number in sums else value
            return (outs, rest), pullback(list(sums.values()))

        eqns, atoms = [whole.eqns[i] for i in body.piece.eqns], [atom for _, atom in outputs]
        does = fingerprint(eqns, body.piece.inputs, atoms, differentiable=True)
        alike = does and (does, *map(module_path, eqns), *wants, *gives, whole.env, rank, policy)
        graph = self.traced.get(alike)
        if graph is None:
            graph = policy.prepared(with_one_hots(trace(both, avals, shapes, opened=True, env=whole.env, rank=rank)[0]))
            if alike is not None:
                self.traced[alike] = graph
        differentiable, others = _divided(results, gives)
        returned = _divided(inputs, wants)[0]
        seeds = tuple(len(inputs) + k for k, ref in enumerate(cotangents) if ref.source < 0)
        return TracedStage(graph, (*inputs, *cotangents), (*differentiable, *others), tuple(returned), seeds)

    def _differentiable(self, ref: Ref, atom: Atom) -> bool:
        return ref.role == Role.LOSS or (ref.role in (Role.PARAM, Role.ACTIVATION) and atom in self.loss.carries)

    def _packs(self, stage: int, programs: "StagePrograms") -> tuple[Pack, ...]:
        """The packs of the stage's own small gradients; gradients that go home to another stage are not packed."""
        own = [ref.index for ref in programs.traced.returned if ref.role == Role.PARAM and self.owner[ref.index] == stage]
        avals = shapes_of(self.loss.params[leaf] for leaf in own)
        return packs_of([Ref(Role.GRAD, leaf) for leaf in own], avals, Ref(Role.GRAD), SMALL * self.options.pack)


class StagePrograms:
    """Colours the equations of a traced stage and turns the pieces into programs."""

    def __init__(self, builder: StageBuilder, traced: TracedStage, stage: int, num_constants: int, remat: RematPolicy):
        self.traced, self.stage, self._builder = traced, stage, builder
        graph, options, below = traced.graph, builder.options, SMALL * builder.options.pack
        does = graph.does
        names = traced.inputs, traced.results, traced.returned, traced.seeds
        decided = frozenset(options.reducers), num_constants, remat, options.scaled_by, below, options.skips
        self._does = does and (does, names, stage, *decided)
        self.refs: dict[Var, Ref] = dict(zip(graph.inputs, traced.inputs, strict=True))
        self.refs |= {var: Ref(Role.CONSTANT, num_constants + k) for k, var in enumerate(graph.constants)}
        split = len(traced.results)
        self._forward_atoms, self._backward_atoms = graph.outputs[:split], graph.outputs[split:]
        homes = dict.fromkeys(variables(self._backward_atoms), BACKWARD) | dict.fromkeys(variables(self._forward_atoms), FORWARD)
        self._before = before = self._colors()
        self.lasting = {var for var, ref in self.refs.items() if ref.shared or ref.role in _OF_STEP}
        self.lasting.update(*(eqn.outvars for eqn, color in zip(graph.eqns, before, strict=True) if color == _STATICS))
        self.free = {i for i, color in enumerate(before) if color is None}
        self.again = self._again(before, remat)
        colors = [None if i in self.again else color for i, color in enumerate(before)]
        self.pieces = partition(graph, colors, homes)
        statics = {var: Ref(Role.STATIC, k) for k, var in enumerate(self._piece(_STATICS).outputs)}
        self.refs |= statics
        self._small_statics = packs_of(list(statics.values()), shapes_of(statics), Ref(Role.STATIC), below)
        sent = {
            atom: ref
            for ref, atom in zip(traced.results, self._forward_atoms, strict=True)
            if ref.role == Role.ACTIVATION and isinstance(atom, Var) and atom not in self.refs
        }
        needed = [var for var in self._piece(BACKWARD).inputs if var not in self.refs]
        self.residuals = [var for var in needed if var not in sent]
        self.refs |= {var: Ref(Role.RESIDUAL, k) for k, var in enumerate(self.residuals)} | sent
        self.small = packs_of([self.refs[var] for var in self.residuals], shapes_of(self.residuals), Ref(Role.RESIDUAL), below)
        self.kept_bytes = self._held(self._piece(BACKWARD))
        costs = list(map(product_flops, graph.eqns))
        self.products_of_forward = sum(costs[i] for i in self._piece(FORWARD).eqns)
        self.products = self.products_of_forward + sum(costs[i] for i in self._piece(BACKWARD).eqns)
        self.products_once = sum(cost for cost, color in zip(costs, before, strict=True) if color in (FORWARD, BACKWARD))
        self.repeated = self.products - self.products_once  # loops as they are in this graph
        self.keepable_bytes = self._held(partition(graph, before, homes).get(BACKWARD, Piece()))
        self._returned_by = self._split(colors, remat)
        self._kept = [var for var in self._piece(_WEIGHT).inputs if var not in self.refs]
        names = [Ref(Role.RESIDUAL, len(self.residuals) + k) for k in range(len(self._kept))]
        self.refs |= zip(self._kept, names, strict=True)
        self._small_kept = packs_of(names, shapes_of(self._kept), Ref(Role.RESIDUAL, -len(self.small)), below)

    def _again(self, colors: Sequence[str | None], remat: RematPolicy) -> set[int]:
        graph, forward = self.traced.graph, {i for i, color in enumerate(colors) if color == FORWARD}
        reads = [var for eqn, color in zip(graph.eqns, colors, strict=True) if color == BACKWARD for var in variables(eqn.invars)]
        held = set(graph.inputs) - self.lasting
        return remat.again(Halves(graph, forward, self.free, held, [*reads, *variables(self._backward_atoms)]))

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
        data = descendants(graph, [var for role in _OF_MICROBATCH for var in roles[role]])
        backward = descendants(graph, roles[Role.COTANGENT])
        barred = descendants(graph, roles[Role.ACTIVATION] + roles[Role.PARAM] + roles[Role.COTANGENT])
        cheap = cheap_values(graph, roles[Role.BATCH], roles[Role.KEY] + roles[Role.STATE], barred)
        sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in roles[Role.PARAM]}
        quantised = {var for var in roles[Role.PARAM] if is_quantised(aval_of(var))}
        colors: list[str | None] = []
        for eqn in graph.eqns:
            outs = set(eqn.outvars)
            if not outs.isdisjoint(backward) or (eqn.effects and not backward.isdisjoint(variables(eqn.invars))):
                colors.append(BACKWARD)  # a host callback may have no results
            elif not outs.isdisjoint(data) or eqn.effects:
                colors.append(None if outs <= cheap and not eqn.effects else FORWARD)
            else:
                union = frozenset().union(*(sources.get(var, frozenset()) for var in variables(eqn.invars)))
                sources.update((var, union) for var in outs)
                operands = list(map(aval_of, eqn.invars))
                grows = sum(count_bytes(aval_of(v)) for v in outs) > 2 * sum(count_bytes(aval_of(v)) for v in union)
                grows = grows or not quantised.isdisjoint(union)
                again = kind_of(eqn) in LAYOUT or (grows and (kind_of(eqn) in CHEAP or decodes(eqn.primitive.name, operands)))
                colors.append(None if again else _STATICS)
        return colors

    def _split(self, colors: Sequence[str | None], remat: RematPolicy) -> tuple[str, ...]:
        """Divide the equations of the backward into the pieces of I and W; the half that returns each of its results."""
        graph = self.traced.graph
        results = list(zip(self._backward_atoms, (ref.role == Role.ACTIVATION for ref in self.traced.returned), strict=True))
        cotangents = set(variables(atom for atom, direct in results if direct))
        backward = {i for i, color in enumerate(colors) if color == BACKWARD}
        again = self.again.intersection(self._piece(BACKWARD).eqns)
        needed = set(needed_in(graph, {var: i for var, i in graph.producers().items() if i in backward}, (), cotangents))
        parts = [_INPUT if i in needed else _WEIGHT if i in backward else color for i, color in enumerate(colors)]
        made = cotangents.union(*(graph.eqns[i].outvars for i in needed))
        if needed:
            wanted = {atom: _WEIGHT for atom, _ in results if isinstance(atom, Var)}
            pieces = partition(graph, parts, wanted | dict.fromkeys(cotangents, _INPUT))
            of_input, of_weight = (pieces.get(half, Piece()) for half in (_INPUT, _WEIGHT))
            held = {*of_input.inputs, *of_weight.inputs}.difference(self.lasting)
            shared = remat.between(graph, of_input.eqns, of_weight.eqns, self.free, held)
            if shared is not None:  # what I and W both run has no colour
                both, early = shared
                early |= again & set(of_input.eqns)
                parts = [None if i in both else _INPUT if i in early else part for i, part in enumerate(parts)]
                made = cotangents.union(*(graph.eqns[i].outvars for i, part in enumerate(parts) if part == _INPUT), graph.inputs)
            else:  # what is recomputed is so once, in I
                parts = [_INPUT if i in again else part for i, part in enumerate(parts)]
                made.update(*(graph.eqns[i].outvars for i in again))
        halves = tuple(_INPUT if direct or (isinstance(atom, Var) and atom in made) else _WEIGHT for atom, direct in results)
        homes = {atom: half for (atom, _), half in zip(results, halves, strict=True) if isinstance(atom, Var)}
        pieces = partition(graph, parts, homes)
        self.pieces |= {half: pieces.get(half, Piece()) for half in (_INPUT, _WEIGHT)}
        return halves

    def statics(self) -> Program:
        """Computes what depends on parameters alone, once a step; small values, such as casts of biases, as parts of vectors."""
        piece, graph = self._piece(_STATICS), self.traced.graph
        does = fingerprint([graph.eqns[i] for i in piece.eqns], piece.inputs, piece.outputs)  # the same at all microbatch sizes
        inputs, outputs = (tuple(self.refs[var] for var in values) for values in (piece.inputs, piece.outputs))
        run = graph.function(piece.eqns, piece.inputs, piece.outputs)
        program = packed(Program(run, inputs, outputs, shapes_of(piece.inputs), env=graph.env), (), self._small_statics)
        function = ComparableFunction(program.function, does and (does, self._small_statics))
        return replace(program, function=function, name=f"stage_{self.stage}_statics")

    def static_does(self) -> dict[Ref, tuple[Hashable, tuple[Ref, ...]]]:
        """What makes each result of the statics, and of which arguments; without those of which that cannot be said."""
        piece, graph, does = self._piece(_STATICS), self.traced.graph, dict[Ref, tuple[Hashable, tuple[Ref, ...]]]()
        part = replace(graph, eqns=tuple(graph.eqns[i] for i in piece.eqns), names=tuple(graph.names[i] for i in piece.eqns))
        for var in piece.outputs:
            alone = live(replace(part, outputs=(var,)))
            needed = {*variables(atom for eqn in alone.eqns for atom in eqn.invars), var}
            inputs = [given for given in piece.inputs if given in needed]
            if made := fingerprint(alone.eqns, inputs, [var]):
                does[self.refs[var]] = made, tuple(self.refs[given] for given in inputs)
        for pack in self._small_statics:
            if all(ref in does for ref in pack.members):
                made, inputs = zip(*(does[ref] for ref in pack.members), strict=True)
                does[pack.ref] = made, tuple(itertools.chain(*inputs))
        return does

    def forward(self, packs: Sequence[Pack]) -> Program:
        """Runs one microbatch's forward, and returns its small residuals in ``packs``."""
        piece = self._piece(FORWARD)
        outputs, added = self._results()
        run = self.traced.graph.function(piece.eqns, piece.inputs, _reads([*self._forward_atoms, *self.residuals], added))
        outputs += [self.refs[var] for var in self.residuals]
        program = self._accumulating(run, piece.inputs, outputs, added)
        return self._called("forward", packed(program, (), packs) if packs else program, packs)

    def _results(self) -> tuple[list[Ref], dict[int, Summands]]:
        """What the forward returns besides residuals, and those of them that are added to a sum."""
        held = {Ref(Role.AUX, leaf): Ref(Role.ROWS, leaf) for leaf in self._builder.options.reducers}
        outputs = [held.get(ref, ref) for ref in self.traced.results]
        atoms = [(k, self._forward_atoms[k]) for k, ref in enumerate(outputs) if ref.role in (Role.LOSS, Role.AUX)]
        dtypes = {k: aval_of(atom).dtype if has_gradient(aval_of(atom)) else scale_dtype() for k, atom in atoms}  # of an average
        return outputs, {k: Summands(jax.ShapeDtypeStruct(aval_of(atom).shape, dtypes[k]), (atom,)) for k, atom in atoms}

    def backward(self, kind: str, packs: Sequence[Pack]) -> Backward | None:
        """The program of B, I or W; None if it has nothing to do."""
        halves = {"B": (_INPUT, _WEIGHT), "I": (_INPUT,), "W": (_WEIGHT,)}[kind]
        chosen = [k for k, half in enumerate(self._returned_by) if half in halves]
        kept = self._kept if kind == "I" else []
        if not chosen and not kept:
            return None
        piece = self._piece({"B": BACKWARD, "I": _INPUT, "W": _WEIGHT}[kind])
        reads, writes = (self.small, ()) if kind == "B" else ((*self.small, *self._small_kept), self._small_kept * (kind == "I"))
        lean = kind == "W" and bool(self._piece(_INPUT).eqns)  # else W is all of B
        programs = (self._backward(piece, chosen, kept, packs, first=first) for first in (True, False))
        first, then = (replace(packed(program, reads, writes), lean=lean) for program in programs)
        return Backward(self._called(f"{_NAMES[kind]}_first", first, packs), self._called(_NAMES[kind], then, packs))

    @property
    def backward_flops(self) -> float:
        """FLOPs of B."""
        return sum(count_flops(self.traced.graph.eqns[i]) for i in self._piece(BACKWARD).eqns)

    def costs(self, rates: Rates, speed: float) -> dict[str, float]:
        """Seconds that F, B, I and W take, by kind, on devices of these rates that are together as fast as ``speed`` of them."""
        eqns, outputs = self.traced.graph.eqns, self.traced.graph.outputs
        pieces = {"F": self._piece(FORWARD), "B": self._piece(BACKWARD), "I": self._piece(_INPUT), "W": self._piece(_WEIGHT)}
        known, found = self._builder.works, dict[str, float]()
        for kind, piece in pieces.items():
            name = id(eqns), piece.eqns, piece.outputs
            if name not in known:
                known[name] = eqns, works_of([eqns[i] for i in piece.eqns], [*piece.outputs, *outputs])
            found[kind] = sum(work.seconds(rates) for work in known[name][1]) / speed
        return found

    def _called(self, name: str, program: Program, packs: Sequence[Pack] = ()) -> Program:
        does = self._does and (self._does, name, tuple(packs))
        program = packed(program, self._small_statics)
        return replace(program, name=f"stage_{self.stage}_{name}", function=ComparableFunction(program.function, does))

    def fused(self, packs: Sequence[Pack]) -> Fused | None:
        """The program of F and B, which writes no residual and repeats nothing; None if B waits for another stage's cotangent."""
        traced, graph = self.traced, self.traced.graph
        if not traced.seeds or any(ref.role == Role.COTANGENT and ref.source >= 0 for ref in traced.inputs):
            return None
        colors = [_FUSED if color in (FORWARD, BACKWARD) else color for color in self._before]
        homes = dict.fromkeys(variables([*self._forward_atoms, *self._backward_atoms]), _FUSED)
        piece = partition(graph, colors, homes).get(_FUSED, Piece())
        chosen = range(len(traced.returned))
        results = self._results()
        first, then = (self._backward(piece, chosen, (), packs, first=first, results=results) for first in (True, False))
        costs = [(color, count_flops(eqn)) for color, eqn in zip(self._before, graph.eqns, strict=True)]
        forward, whole = (sum(cost for color, cost in costs if color in which) for which in ([FORWARD], [FORWARD, BACKWARD]))
        programs = self._called("forward_backward_first", first, packs), self._called("forward_backward", then, packs)
        return Fused(*programs, forward / max(whole, 1.0))

    def _backward(
        self,
        piece: Piece,
        chosen: Sequence[int],
        kept: Sequence[Var],
        packs: Sequence[Pack],
        *,
        first: bool,
        results: _Results = ((), MappingProxyType({})),
    ) -> Program:
        """A program that adds gradients to their sums, or makes the sums if it is the ``first``; ahead of them ``results`` of F."""
        graph, traced, scaled_by = self.traced.graph, self.traced, self._builder.options.scaled_by
        seeds, (made, totals) = {graph.inputs[k] for k in traced.seeds}, results
        returned = [traced.returned[k] for k in chosen]
        grads = {ref: Ref(Role.GRAD, ref.index) for ref in returned if ref.role == Role.PARAM}
        outputs = [grads.get(ref) or Ref(Role.COTANGENT, ref.index, source=self.stage) for ref in returned]
        outputs = [*made, *outputs, *(self.refs[var] for var in kept)]
        atoms = [*(self._forward_atoms if made else ()), *(self._backward_atoms[k] for k in chosen), *kept]
        numbers = [k for k, ref in enumerate(outputs) if ref.role == Role.GRAD]
        added = {**totals, **dict(zip(numbers, summands_of(graph, [atoms[k] for k in numbers], piece.eqns), strict=True))}
        run = graph.function(piece.eqns, piece.inputs, _reads(atoms, added))
        inputs = [var for var in piece.inputs if var not in seeds]
        scaled = [Ref(Role.LOSS_SCALE, scaled_by)] if scaled_by is not None and len(inputs) < len(piece.inputs) else []

        def seeded(*args: jax.Array) -> list[jax.Array]:
            seed = args[-1] if scaled else jnp.ones(())
            supply = iter(args)
            return run(*(seed.astype(aval_of(var).dtype) if var in seeds else next(supply) for var in piece.inputs))

        return self._accumulating(seeded, inputs, outputs, added, scaled, packs, first=first)

    def _accumulating(
        self,
        run: _Run,
        inputs: Sequence[Var],
        outputs: Sequence[Ref],
        added: _Added,
        scaled: Sequence[Ref] = (),
        packs: Sequence[Pack] = (),
        *,
        first: bool = False,
    ) -> Program:
        """A program that adds the weighted results ``added`` to their sums, or begins those of gradients if it is the ``first``.

        ``run`` takes the loss scale last, and returns the results, what adds up to one (``_reads``) in its place. The gradients in
        ``packs`` are added as vectors: a vector put together of sums would take over the buffer of none.
        """
        names, shapes = (*(self.refs[var] for var in inputs), *scaled), shapes_of(inputs)
        shapes += tuple(jax.ShapeDtypeStruct((), jnp.float32) for _ in scaled)
        if not added:
            return Program(run, names, tuple(outputs), shapes, env=self.traced.graph.env)
        skips, split = self._builder.options.skips, len(names)
        packs = [pack for pack in packs if not set(pack.members).isdisjoint(outputs)]
        members = {ref for pack in packs for ref in pack.members}
        sums = {outputs[k]: summands.sum for k, summands in added.items() if outputs[k] not in members}
        sums |= {pack.ref: pack.aval for pack in packs}
        going_on = [ref for ref in sums if not (first and ref.role == Role.GRAD)]
        returned = [*sums, *(ref for ref in outputs if ref not in sums and ref not in members)]

        def function(*args: jax.Array) -> list[jax.Array]:
            values, scale = iter(run(*args[:split])), args[split]
            terms = (jnp.where(scale == 0, jnp.zeros_like(term), term) for term in values) if skips else values
            totals = dict(zip(going_on, args[split + 1 :], strict=True))
            results = {}
            for k, ref in enumerate(outputs):
                results[ref] = added[k].added(totals.get(ref), scale, terms) if k in added else next(values)
            for pack in packs:
                missing = {ref: jnp.zeros(aval.shape, aval.dtype) for ref, aval in zip(pack.members, pack.avals, strict=True)}
                share = pack.join(missing | results)
                results[pack.ref] = totals[pack.ref] + share if pack.ref in totals else share
            return [results[ref] for ref in returned]

        names, shapes = (*names, Ref(Role.SCALE)), (*shapes, jax.ShapeDtypeStruct((), scale_dtype()))
        names, shapes = (*names, *going_on), (*shapes, *(sums[ref] for ref in going_on))
        return Program(function, names, tuple(returned), shapes, env=self.traced.graph.env)


def _reads(results: Sequence[Atom], added: _Added) -> list[Atom]:
    """What a program computes to return these results: of those that are added to sums, what adds up to them."""
    return [atom for k, result in enumerate(results) for atom in (added[k].reads if k in added else (result,))]


def _divided(values: Sequence[_T], flags: Sequence[int]) -> tuple[list[_T], list[_T]]:
    return list(itertools.compress(values, flags)), [value for value, flag in zip(values, flags, strict=True) if not flag]
