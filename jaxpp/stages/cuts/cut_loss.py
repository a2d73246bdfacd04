"""A traced loss cut into stages: which equations each stage runs, what crosses between them, and their programs.

What crosses are the cheapest values from which the next stage can compute what it reads: cheap equations are run again by the
reader where fewer bytes cross then, by a minimum cut (``remat.py``). Equations that read parameters, model state, batch or key are
not. A model state leaf that several stages read, such as the position in a cache, is not sent at every pass: each stage has a copy,
whose few cheap equations are written once more for it (``with_copies``).
"""

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn, Var
from jax.typing import ArrayLike

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.balance import Cuts, readers
from jaxpp.stages.graph import Graph, Piece, Rewriter, descendants, partition
from jaxpp.stages.jaxpr import Atom, aval_of, function_of, new_variable, shapes_of, variables
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.remat import RematPolicy
from jaxpp.stages.repeatable import SINK, SOURCE, Network, price_of, repeatable
from jaxpp.stages.stage import ProgramOptions, StageBuilder, StageCode, StagePrograms
from jaxpp.types import Batch

_POSITION = re.compile(r"jaxpp_spine_(\d+)")


@dataclass(frozen=True)
class CutLoss:
    """A loss cut into stages."""

    loss: TracedLoss  # what was cut
    cuts: Cuts  # where
    stages: tuple[StageCode, ...]  # the programs of each stage
    activations: tuple[jax.ShapeDtypeStruct, ...]  # shape of each value that crosses between stages
    producer: tuple[int, ...]  # the stage that makes each
    consumers: tuple[tuple[int, ...], ...]  # the stages that read each
    state_home: tuple[int, ...]  # the stage that makes the new value of each model state leaf
    reducers: Mapping[int, Reducer]  # of the aux leaves that are not averaged
    weight: Callable[[Batch], ArrayLike] | None = None  # of a microbatch; None: the number of its examples


def cut(loss: TracedLoss, cuts: Cuts, owner: Sequence[int], options: ProgramOptions | None = None) -> CutLoss:
    """Cut a traced loss at ``cuts`` and build the programs of every stage; ``owner`` is the stage of each parameter leaf."""
    graph, options, ends = loss.graph, options or ProgramOptions(), [*cuts, len(loss.spine)]
    colors: list[int | None] = [None] * len(graph.eqns)
    for stage, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        for k in range(start, end):
            colors[loss.spine[k]] = stage
    state_home = _state_home(loss, cuts, options.state_owner)
    homes = _homes(loss, len(cuts), state_home)
    pieces = partition_stages(graph, colors, homes)
    made = {var: stage for stage, piece in pieces.items() for var in piece.outputs}
    crossing = sorted(made, key=lambda var: (made[var], pieces[made[var]].outputs.index(var)))
    consumers = tuple(tuple(sorted(t for t, piece in pieces.items() if t != made[v] and v in piece.inputs)) for v in crossing)
    carried = tuple(
        tuple(reader for reader in readers if not any(made[var] <= boundary < reader for boundary in options.cut_gradient))
        for var, readers in zip(crossing, consumers, strict=True)
    )
    builder = StageBuilder(loss, options, owner, homes, len(cuts), crossing, carried, made)
    stages = tuple(builder.build(k, pieces.get(k, Piece())) for k in range(len(ends)))
    producer = tuple(made[var] for var in crossing)
    return CutLoss(loss, cuts, stages, shapes_of(crossing), producer, consumers, state_home, options.reducers)


def uncut(loss: TracedLoss, kept: RematPolicy, *, train: bool = True) -> tuple[StagePrograms, list[tuple[int, ...]]]:
    """The whole loss as one stage whose forward keeps what ``kept`` says: its equations, not yet made into programs.

    With them, for each equation, the spine position from which it comes, if it comes from one.
    """
    on_spine = {i: k for k, i in enumerate(loss.spine)}
    numbers = tuple(on_spine.get(i, -1) for i in range(len(loss.graph.eqns)))
    parts = {field.name: getattr(loss.graph, field.name) for field in fields(Graph)}
    loss, homes = replace(loss, graph=_Numbered(**parts, positions=numbers)), _homes(loss, 0, (0,) * len(loss.state))
    piece = partition_stages(loss.graph, [0 if i in on_spine else None for i in range(len(numbers))], homes).get(0, Piece())
    builder = StageBuilder(loss, ProgramOptions(remat=(kept,), train=train), (0,) * len(loss.params), homes)
    programs = builder.colored(0, piece)
    return programs, [tuple(map(int, _POSITION.findall(name)[-1:])) for name in programs.traced.graph.names]


@dataclass(frozen=True)
class _Numbered(Graph):
    """A graph that runs each equation under a name scope with its position on the spine, -1 where it is not on it."""

    positions: tuple[int, ...] = ()

    def function(self, eqns: Iterable[int], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Callable[..., list[jax.Array]]:
        numbers = list(eqns)

        def run(*args: jax.Array) -> list[jax.Array]:
            values = dict(zip(inputs, args, strict=True))
            for i in numbers:
                eqn, position = self.eqns[i], self.positions[i]
                needs = variables(eqn.invars)
                with jax.named_scope(f"jaxpp_spine_{position}") if position >= 0 else nullcontext():
                    results = function_of([eqn], needs, eqn.outvars)(*(values[var] for var in needs))
                values.update(zip(eqn.outvars, results, strict=True))
            return function_of([], variables(outputs), outputs)(*(values[var] for var in variables(outputs)))

        return run


def _state_home(loss: TracedLoss, cuts: Cuts, owner: Sequence[int] | None) -> tuple[int, ...]:
    """The stage that makes the new value of each model state leaf; if it has none, its owner, or the first stage that reads it."""
    homes = []
    for leaf, place in enumerate(loss.state_spans):
        default = 0 if owner is None else owner[leaf]
        homes.append(bisect.bisect_right(cuts, place[1]) if place and (owner is None or leaf not in loss.unchanged) else default)
    return tuple(homes)


def _homes(loss: TracedLoss, last: int, state_home: Sequence[int]) -> dict[Var, int]:
    """The stage that returns the loss and aux: the last, at every batch shape; and new model state: its home."""
    changed = ((k, atom) for k, atom in enumerate(loss.new_state) if k not in loss.unchanged)
    homes = dict.fromkeys(variables((*loss.graph.outputs[:1], *loss.aux)), last)
    return homes | {atom: state_home[k] for k, atom in changed if isinstance(atom, Var)}


def partition_stages(graph: Graph, colors: Sequence[int | None], homes: Mapping[Var, int]) -> dict[int, Piece]:
    """The piece of each stage, split so that the fewest bytes cross."""
    plain = partition(graph, colors, homes)
    again = _again(graph, colors, plain)
    if not again:
        return plain
    leaner = partition(graph, [None if i in again else color for i, color in enumerate(colors)], homes)
    return leaner if _sent(leaner) < _sent(plain) else plain


def _sent(pieces: Mapping[int, Piece]) -> int:
    made = {var for piece in pieces.values() for var in piece.outputs}
    return sum(count_bytes(aval_of(var)) for piece in pieces.values() for var in piece.inputs if var in made)


def _again(graph: Graph, colors: Sequence[int | None], pieces: Mapping[int, Piece]) -> set[int]:
    """The equations that stages do better to run again than to receive the results of."""
    may, producers = repeatable(graph), graph.producers()
    from_inputs = descendants(graph, (*graph.inputs, *graph.constants))
    for i, eqn in enumerate(graph.eqns):
        stays = any(var in from_inputs and colors[producers[var]] is None for var in variables(eqn.invars) if var in producers)
        may[i] &= not stays and all(var in producers or var not in from_inputs for var in variables(eqn.invars))
    cheaper: set[int] = set()
    for piece in pieces.values():
        reads = [var for var in piece.inputs if var in producers]
        network, pending, seen = Network(), [producers[var] for var in reads], set[int]()
        while pending:
            i = pending.pop()
            if i in seen:
                continue
            seen.add(i)
            eqn = graph.eqns[i]
            network.edge(SOURCE, i, *([price_of(eqn, 0.0)] if may[i] else []))
            for var in eqn.outvars:
                network.edge(i, var, count_bytes(aval_of(var)))
            for var in variables(eqn.invars) if may[i] else ():
                if var in from_inputs:
                    network.edge(var, i)
                    pending.append(producers[var])
        for var in reads:
            network.edge(var, SINK)
        if any(may[i] for i in seen):
            cheaper |= seen & network.sink_side()
    return cheaper


class StateCopy(NamedTuple):
    """A further copy of a leaf: the number of the leaf, and the stage that keeps the copy."""

    leaf: int
    stage: int


def copies_of(loss: TracedLoss, cuts: Cuts) -> tuple[StateCopy, ...]:
    """The copies that are needed so that no leaf is sent: one for each stage that reads a leaf, but for the first."""
    stages = readers(loss.state_uses, len(loss.state), cuts)
    made = {var for i in loss.spine for var in loss.graph.eqns[i].outvars}
    copied = [leaf for leaf, source in enumerate(loss.sources) if not (isinstance(source, Var) and source in made)]
    return tuple(StateCopy(leaf, stage) for leaf in copied for stage in sorted(stages[leaf])[1:])


def with_copies(loss: TracedLoss, cuts: Cuts, copies: tuple[StateCopy, ...]) -> TracedLoss:
    """The loss whose last model state leaves, returned as they are when it was traced, become the copies of the stages."""
    if not copies:
        return loss
    graph, count = loss.graph, len(loss.state) - len(copies)
    stage_of = {i: bisect.bisect_right(cuts, k) for k, i in enumerate(loss.spine)}
    replaced: dict[int, dict[Atom, Var]] = {}
    for number, (leaf, stage) in enumerate(copies):
        replaced.setdefault(stage, {})[loss.state[leaf]] = loss.state[count + number]
    moving = descendants(graph, [loss.state[leaf] for leaf, _ in copies])
    rewriter = Rewriter()
    for i, (eqn, rewriter.name) in enumerate(zip(graph.eqns, graph.names, strict=True)):
        stage = stage_of.get(i)
        rewriter.emit(eqn if stage is None else _reading(eqn, replaced.get(stage, {})))
        if stage is None and not moving.isdisjoint(eqn.outvars):
            for own in replaced.values():
                if not own.keys().isdisjoint(variables(eqn.invars)):
                    own.update((var, new_variable(var)) for var in eqn.outvars)
                    rewriter.emit(_reading(eqn, own).replace(outvars=[own[var] for var in eqn.outvars]))
    outputs, first = list(graph.outputs), len(graph.outputs) - len(copies)
    for number, (leaf, stage) in enumerate(copies):
        if leaf not in loss.unchanged:
            outputs[first + number] = replaced[stage].get(loss.new_state[leaf], loss.new_state[leaf])
    return replace(loss, graph=rewriter.graph(replace(graph, outputs=tuple(outputs))))


def _reading(eqn: JaxprEqn, replaced: Mapping[Atom, Var]) -> JaxprEqn:
    if replaced.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[replaced.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars])
