"""The programs of one stage: its traced equations coloured, and each colour made into a program.

Every equation of a stage's forward and pullback has its place by what it depends on:

* on the cotangent: the *backward*, whose halves are I and W (``split_backward.py``);
* on data: the *forward*; what the backward reads of it is the residuals;
* on parameters alone (a bf16 cast, a transposed kernel): the *statics*, computed once per step, so that no residual is ever a
  weight, or a copy, cast or transpose of one;
* on nothing that costs anything to redo: wherever it is needed.

A stage that is to recompute (``remat``) has one rule more: what the forward computes and the policy does not keep is done again
wherever the backward needs it. Nothing else changes, for forward and backward are programs of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import Known, fingerprint
from jaxpp.stages.graph import Piece, descendants, partition
from jaxpp.stages.jaxpr import CHEAP, LAYOUT, aval_of, kind_of, shapes_of, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import cheap_values
from jaxpp.stages.packing import Pack, packed, packs_of
from jaxpp.stages.program import Backward, Program, Ref, Role
from jaxpp.stages.remat.least import Least
from jaxpp.stages.remat.policy import Kept, recomputed
from jaxpp.stages.split_backward import BACKWARD, INPUT, WEIGHT, split_backward
from jaxpp.stages.stage_trace import TracedStage
from jaxpp.types import Aval

__all__ = ["StagePrograms"]

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
