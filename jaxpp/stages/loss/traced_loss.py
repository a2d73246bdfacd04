"""The user's loss traced at one microbatch's shapes, checked, as a graph of three kinds of equations.

* *spine*: depends on the data, and is worth sending; the only equations a cut divides. What needs no parameter (a dropout mask)
  sinks to its first reader.
* *static*: depends on parameters (or on nothing) alone; each stage that needs it computes it itself, once per step.
* *cheap*: elementwise and layout operations on batch, key or model state (a mask, positions); each stage makes it again.

A model state leaf has a new value after every microbatch, so the stage that makes it also reads the old one (``state_spans``).
"""

import fnmatch
import itertools
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal, Var
from jax.tree_util import KeyPath

from jaxpp.errors import JaxppError, LossError, OutputError, ParamsError
from jaxpp.stages.axes import MODEL, ONE_DEVICE, RankAxes
from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.estimate import SpineCosts
from jaxpp.stages.floating import has_gradient
from jaxpp.stages.graph import Graph, descendants, inline_remat, trace
from jaxpp.stages.jaxpr import (
    CHEAP,
    Atom,
    Checkpoint,
    aval_of,
    describe,
    effects_not_taken,
    is_ordered,
    kept_on_device,
    kind_of,
    user_line,
    variables,
)
from jaxpp.stages.layers import Layers, Read, first_reads, place_rows, split_scans
from jaxpp.stages.own_params import OWN_NAME, num_own, without_joint
from jaxpp.stages.stacked import concatenated, first_rows, is_slices, joined, split_like, whole_shape
from jaxpp.types import Aval, Batch, Leaf, LossFn, Params, Tree

STATE_RULE = "one stage reads a model state leaf and makes its new value, or the next microbatch would wait for the one before"
"""Why no stage may begin at some places (``TracedLoss.barred``)."""


class Words(NamedTuple):
    """What messages call a loss and the parts of its result."""

    where: str
    noun: str
    error: type[JaxppError]
    aux: str
    state: str
    pair: str  # how both are returned
    fix: str  # how to return both
    traced: str  # what it was called with, around the shapes


_LOSS = Words(
    "loss_fn",
    "the loss",
    LossError,
    "aux",
    "model state",
    "(loss, (new_model_state, aux))",
    "return the new model state and aux as a pair beside the loss; aux may be {}",
    "for one microbatch, batch leaves {}",
)
_FN = Words(
    "fn",
    "fn",
    OutputError,
    "output",
    "carry",
    "(new_carry, outputs)",
    "return the new carry and the outputs as a pair; outputs may be {}",
    "with {} beside its parameters",
)


@dataclass(frozen=True)
class TracedLoss:
    """The flat graph of a loss and the roles of its inputs and outputs."""

    graph: Graph  # of parameters, model state, batch and the raw key (if any), to the loss, aux and the new model state; all leaves
    param_paths: tuple[str, ...]  # such as ``h_2/attn/kernel``
    state_paths: tuple[str, ...]
    batch_tree: Tree
    aux_tree: Tree
    remat: Checkpoint | None  # checkpoints a stage the way the user checkpointed the whole loss
    frozen: frozenset[int] = frozenset()  # the parameter leaves whose gradient nobody wants
    layers: tuple[Layers, ...] = ()  # what loops over layers were split into
    step: SpineCosts | None = None  # what each spine equation takes in a step, if the stages are balanced by that
    clock: tuple[tuple[float, float], ...] = ()  # where measured, after which part of the costs which part of the time has passed
    shared: frozenset[int] = frozenset()  # the batch leaves that every microbatch gets as they are
    stacks: tuple[tuple[str, int, int], ...] = ()  # of each parameter leaf the user's leaf, its first row there, and the rows' axis
    is_loss: bool = True  # False for a function whose outputs are the aux leaves; its loss is a literal that nobody reads
    axes: RankAxes = ONE_DEVICE  # of the ranks on which it is to run
    num_own: int = 0  # how many parameter leaves, the last, each replica has of its own (those of a task)
    num_offloading: int = 0  # how many of the equations that were traced have a ``jax.checkpoint`` that would offload

    @property
    def noun(self) -> str:
        """What messages call it."""
        return "loss" if self.is_loss else "function"

    @property
    def words(self) -> Words:
        """What messages call its parts."""
        return _LOSS if self.is_loss else _FN

    @cached_property
    def aux_paths(self) -> tuple[str, ...]:
        """The tree path of each aux leaf."""
        tree = self.aux_tree.unflatten(range(self.aux_tree.num_leaves))
        return tuple(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))

    @cached_property
    def batch_leaves(self) -> tuple[str, ...]:
        """Each batch leaf as the user writes it, ``batch['x']``."""
        tree = self.batch_tree.unflatten(range(self.batch_tree.num_leaves))
        return tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree))

    @cached_property
    def params(self) -> tuple[Var, ...]:
        """One variable a parameter leaf."""
        return self.graph.inputs[: len(self.param_paths)]

    @cached_property
    def state(self) -> tuple[Var, ...]:
        """One variable a model state leaf."""
        return self.graph.inputs[len(self.params) :][: len(self.state_paths)]

    @cached_property
    def batch(self) -> tuple[Var, ...]:
        """One variable a batch leaf."""
        return self.graph.inputs[len(self.params) + len(self.state) :][: self.batch_tree.num_leaves]

    @cached_property
    def key(self) -> Var | None:
        """The raw key, if the loss takes one."""
        rest = self.graph.inputs[len(self.params) + len(self.state) + self.batch_tree.num_leaves :]
        return rest[0] if rest else None

    @cached_property
    def aux(self) -> tuple[Atom, ...]:
        """One variable or literal an aux leaf."""
        return self.graph.outputs[1 : len(self.graph.outputs) - len(self.state)]

    @cached_property
    def new_state(self) -> tuple[Atom, ...]:
        """The value of each model state leaf after the microbatch."""
        return self.graph.outputs[1 + len(self.aux) :]

    @cached_property
    def sources(self) -> tuple[Atom, ...]:
        """What each new model state leaf is a copy of."""
        producers = self.graph.producers()
        return tuple(self.graph.eqns[producers[atom]].invars[0] if isinstance(atom, Var) else atom for atom in self.new_state)

    @cached_property
    def unchanged(self) -> frozenset[int]:
        """The model state leaves whose new value is the old one."""
        return frozenset(k for k, (old, source) in enumerate(zip(self.state, self.sources, strict=True)) if old is source)

    @cached_property
    def of_params(self) -> set[Var]:
        """Everything that depends on a parameter."""
        return descendants(self.graph, self.params)

    @cached_property
    def carries(self) -> set[Var]:
        """Everything on a way from a parameter that wants a gradient to the loss: what has a cotangent."""
        graph, wanted = self.graph, {var for k, var in enumerate(self.params) if k not in self.frozen}
        for eqn in graph.eqns:
            if kind_of(eqn) != "stop_gradient" and not wanted.isdisjoint(variables(eqn.invars)):
                wanted.update(var for var in eqn.outvars if has_gradient(aval_of(var)))
        reaching = set(variables(graph.outputs[:1]))
        for eqn in reversed(graph.eqns):
            if kind_of(eqn) != "stop_gradient" and not reaching.isdisjoint(eqn.outvars):
                reaching.update(var for var in variables(eqn.invars) if has_gradient(aval_of(var)))
        return wanted & reaching

    @cached_property
    def of_data(self) -> set[Var]:
        """Everything that depends on the batch, the key or the model state."""
        return descendants(self.graph, self.graph.inputs[len(self.params) :])

    @cached_property
    def spine(self) -> tuple[int, ...]:
        """The equations that a cut divides, in the order they run."""
        free = (*self.state, *(() if self.key is None else (self.key,)))
        cheap = cheap_values(self.graph, self.batch, free, self.of_params)
        results = set(variables(self.graph.outputs[1:]))
        due, chosen = self._due(), []
        for i, eqn in enumerate(self.graph.eqns):
            outs = set(eqn.outvars)
            floating = self.of_data.isdisjoint(outs) or outs <= cheap or not results.isdisjoint(outs)
            if eqn.effects or not floating:
                chosen.append(i)
        return tuple(sorted(chosen, key=lambda i: (due[i], i)))

    @cached_property
    def position(self) -> dict[Atom, int]:
        """The spine position at which each value is made, of those that are made there."""
        return {var: k for k, i in enumerate(self.spine) for var in self.graph.eqns[i].outvars}

    @cached_property
    def primitives(self) -> tuple[str, ...]:
        """The name of the primitive of each spine equation."""
        return tuple(self.graph.eqns[i].primitive.name for i in self.spine)

    def _due(self) -> list[float]:
        """The number at which each equation runs: its own, or its first reader's if it depends on data but on no parameter.

        What only model state needs runs as soon as its operands are there, after the first other reader of its leaves.
        """
        graph, users, producers = self.graph, self.graph.users(), self.graph.producers()
        due = [math.inf] * len(graph.eqns)
        needed = set(variables(graph.outputs[: 1 + len(self.aux)]))
        aside = []
        for i in reversed(range(len(graph.eqns))):
            outs = set(graph.eqns[i].outvars)
            if needed.isdisjoint(outs) and not graph.eqns[i].effects:
                aside.append(i)
                continue
            needed.update(variables(graph.eqns[i].invars))
            if not self.of_params.isdisjoint(outs) and not self.of_data.isdisjoint(outs):
                due[i] = i
            else:
                due[i] = min((due[j] for var in outs for j in users.get(var, ())), default=math.inf)
        read = {var: [due[j] for j in users.get(var, ()) if due[j] < math.inf] for var in (*self.params, *self.state)}
        first = {var: min(times, default=0) for var, times in read.items()}
        for i in reversed(aside):
            operands = variables(graph.eqns[i].invars)
            after = [due[producers[var]] if var in producers else first.get(var, 0) for var in operands]
            due[i] = max(after, default=0)
        return due

    @cached_property
    def flops(self) -> tuple[float, ...]:
        """FLOPs of the forward of each spine equation."""
        return tuple(count_flops(self.graph.eqns[i]) for i in self.spine)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """What the stages are balanced by: FLOPs of the forward, or seconds of forward and backward."""
        return self.flops if self.timed is None else self.timed.total

    @cached_property
    def timed(self) -> SpineCosts | None:
        """What each spine equation takes in a step: as it was estimated or, where there is a clock, measured."""
        if self.step is None or not self.clock:
            return self.step
        work, passed = zip(*self.clock, strict=True)
        total = np.asarray(self.step.total)
        ends = np.concatenate([[0.0], np.cumsum(total)])
        times = np.diff(np.interp(ends / (ends[-1] or 1.0), work, passed)) * ends[-1]
        rates = times / np.where(total > 0, total, 1.0)
        forward, input_grad, weight_grad = (tuple(rates * np.asarray(costs)) for costs in self.step[:3])
        return SpineCosts(forward, input_grad, weight_grad, self.step.first)

    @cached_property
    def own_paths(self) -> tuple[str, ...]:
        """The path of each parameter leaf below what all of them share (``params``); a task's parameters are a tree apart."""
        return tuple(path[len(self._prefix(leaf)) :].lstrip("/") for leaf, path in enumerate(self.param_paths))

    def is_own(self, leaf: int) -> bool:
        """Whether a parameter leaf is one of which each replica has its own."""
        return leaf >= len(self.param_paths) - self.num_own

    @cached_property
    def _prefixes(self) -> tuple[str, str]:
        """What the paths of all shared parameters begin with, and those of all parameters of a task."""
        split = len(self.param_paths) - self.num_own
        whole = [path for path, _, _ in self.stacks[split:]]
        own = _shared_prefix(whole)
        if own not in (OWN_NAME, "") and all(posixpath.dirname(path) == own for path in whole):
            own = posixpath.dirname(own)  # a task of one module has its name
        return _shared_prefix(self.param_paths[:split]), own

    def _prefix(self, leaf: int) -> str:
        return self._prefixes[self.is_own(leaf)]

    def spellings(self, leaf: int, path: str) -> tuple[str, ...]:
        """What users call a parameter leaf of this path: so, or without the first parts of what all paths begin with."""
        shared, parts = self._prefix(leaf), path.split("/")
        below = ["/".join(parts[k:]) for k in range(len(shared.split("/")) * bool(shared) + 1)]
        return (*below, *(f"{OWN_NAME}/{each}" for each in below)) if self.is_own(leaf) else tuple(below)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The module of each spine equation: as Linen names it, or of the parameters that it reads where few names are theirs."""
        parts = [[part for part in path.split("/") if part] for path in self.own_paths]
        path_parts = {part for path in parts for part in path}
        names = [self.graph.names[i] for i in self.spine]
        reading = [name for name, uses in zip(names, self.param_uses, strict=True) if uses]
        if 2 * sum(bool(path_parts.intersection(re.split(r"[/\[]", name))) for name in reading) > len(reading):
            return tuple(names)
        of_param = [".".join(path[: 2 if path[1:] and path[1].isdigit() else 1]) for path in parts]
        shared = {name for leaf, name in enumerate(of_param) if not self.is_own(leaf)}
        of_param = [f"{OWN_NAME}.{name}" if self.is_own(leaf) and name in shared else name for leaf, name in enumerate(of_param)]
        for leaf, (path, row, axis) in enumerate(self.stacks):
            if path != self.param_paths[leaf]:
                of_param[leaf] += f"[{row}:{row + aval_of(self.params[leaf]).shape[axis]}]"
        common = Counter(leaf for uses in self.param_uses for leaf in uses)
        return tuple(of_param[min(uses, key=lambda leaf: (common[leaf], leaf))] if uses else "" for uses in self.param_uses)

    @cached_property
    def last_uses(self) -> dict[Var, int]:
        """The last spine position at which each value is needed, directly or through what is made again from it."""
        position = {eqn: k for k, eqn in enumerate(self.spine)}
        last: dict[Var, int] = {}
        for i in reversed(range(len(self.graph.eqns))):
            eqn = self.graph.eqns[i]
            at = position.get(i, max((last[var] for var in eqn.outvars if var in last), default=-1))
            for var in variables(eqn.invars):
                last[var] = max(last.get(var, -1), at)
        return last

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """``boundary_bytes[k]``: bytes that cross a cut between spine positions k - 1 and k."""
        crossing = [0] * (len(self.spine) + 1)
        for k, i in enumerate(self.spine):
            for var in self.graph.eqns[i].outvars:
                end = self.last_uses.get(var, -1)
                if end > k:
                    crossing[k + 1] += count_bytes(var.aval)
                    crossing[end + 1] -= count_bytes(var.aval)
        return tuple(itertools.accumulate(crossing))

    @cached_property
    def param_uses(self) -> tuple[frozenset[int], ...]:
        """The parameter leaves that each spine equation needs, directly or through static values."""
        return self._uses_of(self.params)[0]

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """Where rows of parameters are first needed that are read one by one."""
        return first_reads(self.graph, self.params, self.spine)

    @cached_property
    def state_uses(self) -> tuple[frozenset[int], ...]:
        """The model state leaves that each spine equation needs, directly or through values that are made again."""
        return self._uses_of(self.state)[0]

    @cached_property
    def state_spans(self) -> tuple[tuple[int, int] | None, ...]:
        """The spine positions of each model state leaf's first reader and of its maker, between which no cut lies.

        They are the same where only one is on the spine; None where neither is.
        """
        first = {leaf: k for k, uses in reversed(list(enumerate(self.state_uses))) for leaf in uses}
        made = [self.position.get(source) if isinstance(source, Var) else None for source in self.sources]
        needs = self._uses_of(self.state)[1]
        sources = {leaf: source for leaf, source in enumerate(self.sources) if made[leaf] is None}
        floating = {leaf: needs.get(source, ()) if isinstance(source, Var) else () for leaf, source in sources.items()}
        for _ in floating:  # what is made of other state alone, where it is first read, reads that there
            for leaf, others in floating.items():
                for other in others:
                    if leaf in first:
                        first[other] = min(first.get(other, first[leaf]), first[leaf])
        ends = [first.get(leaf) if end is None else end for leaf, end in enumerate(made)]
        others = [max((ends[k] or 0 for k in floating.get(leaf, ())), default=None) for leaf in range(len(ends))]
        ends = [other if end is None else end for end, other in zip(ends, others, strict=True)]
        return tuple(None if end is None else (min(first.get(leaf, end), end), end) for leaf, end in enumerate(ends))

    @cached_property
    def barred(self) -> dict[int, str]:
        """The spine positions where no stage may begin, each with the model state leaf that it would divide."""
        places: dict[int, str] = {}
        for path, place in zip(self.state_paths, self.state_spans, strict=True):
            if place is not None:
                places.update((k, path) for k in range(place[0] + 1, place[1] + 1))
        return places

    def _uses_of(self, leaves: Sequence[Var]) -> tuple[tuple[frozenset[int], ...], dict[Atom, frozenset[int]]]:
        spine = set(self.spine)
        needs: dict[Atom, frozenset[int]] = {var: frozenset([k]) for k, var in enumerate(leaves)}
        uses_of: dict[int, frozenset[int]] = {}
        for i, eqn in enumerate(self.graph.eqns):
            uses = frozenset().union(*(needs.get(var, frozenset()) for var in variables(eqn.invars)))
            if i in spine:
                uses_of[i] = uses
            else:
                needs.update((var, uses) for var in eqn.outvars)
        return tuple(uses_of[i] for i in self.spine), needs


def _shared_prefix(paths: Sequence[str]) -> str:
    shared = posixpath.commonpath([posixpath.dirname(path) for path in paths] or [""])
    if any(path[len(shared) :].lstrip("/")[:1].isdigit() for path in paths):  # a list of layers: its name says more than numbers
        return posixpath.dirname(shared)
    return shared


_WORTH = 8


def cheap_values(graph: Graph, leaves: Sequence[Var], free: Sequence[Var], barred: set[Var]) -> set[Var]:
    """The values made by cheap operations alone from ``leaves`` and ``free`` (inputs that are everywhere), of nothing ``barred``.

    The leaves travel once a step, the value at every microbatch; so they may take ``_WORTH`` times its bytes (a mask: 1/8).
    """
    sources: dict[Var, frozenset[Var]] = {var: frozenset([var]) for var in leaves} | {var: frozenset() for var in free}
    made = set()
    for eqn in graph.eqns:
        needs = variables(eqn.invars)
        moving = [var for var in needs if var in sources]
        foreign = any(var in barred or (var in made and var not in sources) for var in needs)
        made.update(eqn.outvars)
        if kind_of(eqn) in CHEAP and not foreign and not eqn.effects:
            union = frozenset().union(*(sources[var] for var in moving))
            sources.update((var, union) for var in eqn.outvars)
    inputs = {*leaves, *free}
    return {
        var
        for var, needs in sources.items()
        if var not in inputs and sum(count_bytes(leaf.aval) for leaf in needs) <= _WORTH * count_bytes(var.aval)
    }


def path_name(path: KeyPath) -> str:
    """A tree path as ``h_2/attn/kernel``."""
    return jax.tree_util.keystr(without_joint(path), simple=True, separator="/")


def fits_pattern(path: str, pattern: str) -> bool:
    """Whether a path, or the module that it lies in, is the pattern's."""
    return fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"{pattern}/*")


def trace_loss(  # noqa: PLR0913  (what the user has decided)
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    key: Aval | None,
    *,
    has_aux: bool | None,
    model_state: Tree = None,
    differentiable: bool = True,
    frozen: frozenset[int] = frozenset(),
    per_layer: bool = False,
    shared: frozenset[int] = frozenset(),
    is_loss: bool = True,
    axes: RankAxes = ONE_DEVICE,
) -> TracedLoss:
    """Trace ``loss_fn(params[, model_state], batch[, key])`` at the shapes of one microbatch, and check that it is a loss.

    It returns ``loss``, ``(loss, aux)`` with ``has_aux`` (None: either), or ``(loss, (new_model_state, aux))`` with a model state;
    without ``is_loss`` outputs, or ``(new_model_state, outputs)``. With ``per_layer`` each layer of a loop is an equation.
    """
    param_leaves, param_tree = jax.tree_util.tree_flatten_with_path(params)
    state_leaves, state_tree = jax.tree_util.tree_flatten_with_path(() if model_state is None else model_state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    implementation = key_implementation(key)
    keys = [] if key is None else [key if implementation is None else jax.eval_shape(jax.random.key_data, key)]
    words = _LOSS if is_loss else _FN
    aux_trees: list[Tree] = []

    def flat(leaves: list[Leaf], state: list[Leaf], batch_leaves: list[Leaf], keys: list[Leaf]) -> tuple[Leaf, list[Leaf]]:
        states = () if model_state is None else (joined(state_tree.unflatten(state), concatenated),)
        typed = keys if implementation is None else [jax.random.wrap_key_data(data, impl=implementation) for data in keys]
        result = loss_fn(joined(param_tree.unflatten(leaves), concatenated), *states, batch_tree.unflatten(batch_leaves), *typed)
        pair = isinstance(result, tuple) if has_aux is None else has_aux or model_state is not None
        loss, aux = _check_result(result, pair, differentiable) if is_loss else (0.0, result)
        new = state
        if model_state is not None and (pair or not is_loss):
            new, aux = _check_state(aux, joined(model_state, whole_shape), words)
            new = split_like(new, model_state)
        _check_aux(aux, words)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        aux_trees.append(aux_tree)
        return loss, [jnp.array(leaf, copy=True) for leaf in (*aux_leaves, *new)]

    given = [leaf for _, leaf in param_leaves], [leaf for _, leaf in state_leaves], batch_leaves, keys
    graph = _trace(flat, given, axes, words, differentiable=differentiable)
    offloaded = 0
    if differentiable:
        eqns = tuple(kept_on_device(graph.eqns))
        offloaded = sum(eqn is not old for eqn, old in zip(eqns, graph.eqns, strict=True))
        graph = replace(graph, eqns=eqns)
    graph, remat = inline_remat(graph)
    stacked = graph.inputs[: len(param_leaves)], graph.inputs[len(param_leaves) :][: len(state_leaves)]
    graph = place_rows(graph, [*stacked[0], *stacked[1]])
    graph, layers = split_scans(graph, *stacked, per_layer=per_layer)
    _check_effects(graph, words)
    paths = _paths(param_leaves), _paths(state_leaves)
    whole = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_slices)[0]
    stacks = tuple((path, *at) for path, (_, leaf) in zip(_paths(whole), whole, strict=True) for at in first_rows(leaf))
    traced = TracedLoss(
        graph,
        *paths,
        batch_tree,
        aux_trees[-1],
        remat,
        frozen,
        layers,
        shared=shared,
        stacks=stacks,
        is_loss=is_loss,
        axes=axes,
        num_own=num_own(params),
        num_offloading=offloaded,
    )
    if differentiable:
        _check_depends(traced)
    return traced


_UNEQUAL = re.compile(r"\b(all_to_all|reduce_scatter)\b.*\b(divisible|equal|match)\b")  # what JAX says of blocks that do not divide


def _unbound(name: str, axes: RankAxes, words: Words) -> JaxppError:
    """What to tell of a collective over an axis that it cannot be over."""
    rule = "a collective names an axis of the mesh, or of the replicas"
    fix = f'pass axes={{"data": {name!r}}} if it is between replicas, or a mesh that has the axis'
    got = f"the axis name {name!r}, which nothing has"
    if axes.sizes and name in axes.called(MODEL):
        rule = "a collective between the shards of a rank stands in a jax.shard_map over them"
        fix = f"put it in jax.shard_map(..., axis_names={{{name!r}}})"
        got = f"the axis name {name!r} outside of one: values there are whole, and the compiler divides them"
    return words.error(words.where, rule, got, fix)


_MANY = 8  # batch leaves that a note shows


def _trace(
    flat: Callable[..., Tree], given: tuple[list[Leaf], ...], axes: RankAxes, words: Words, *, differentiable: bool
) -> Graph:
    """The graph of a function; what it raises has a note, and what JAX says of axes and of blocks is told with what to pass."""
    try:
        return trace(flat, *given, axes=axes, differentiable=differentiable)[0]
    except Exception as error:
        shapes = ", ".join([describe(leaf) for leaf in given[2][:_MANY]] + ["..."] * (len(given[2]) > _MANY))
        found = re.search(r"unbound axis name: ([^\s.]+)", str(error)) if isinstance(error, NameError) else None
        if found is not None:
            raise _unbound(found[1], axes, words) from error
        if isinstance(error, ValueError) and not isinstance(error, JaxppError) and _UNEQUAL.search(str(error)):
            rule = "all_to_all and psum_scatter give each device along their axes an equal share of a block"
            fix = (
                "split an axis of the block whose size the number of devices divides; if it is that of the examples, pass fewer "
                "microbatches or a larger batch; with jax.shard_map, also fewer axes"
            )
            got = [str(error).removesuffix("."), f"{words.noun} {words.traced.format(shapes)}"]
            raise words.error(words.where, rule, got, fix) from error
        if not isinstance(error, JaxppError):
            error.add_note(f"jaxpp: raised while tracing {words.noun} {words.traced.format(shapes)}")
        raise


def _check_depends(traced: TracedLoss) -> None:
    loss = traced.graph.outputs[0]
    if isinstance(loss, Literal) or loss not in traced.of_params:
        rule = "the loss must depend on its parameters, or there is nothing to train"
        got = f"a loss that reads none of the {len(traced.param_paths)} parameter leaves"
        raise LossError("loss_fn", rule, got, "compute the loss from the params argument, not from arrays the function closed over")


def _paths(leaves: Sequence[tuple[KeyPath, Leaf]]) -> tuple[str, ...]:
    """The path of each leaf; NNX's ``value`` at the end of all of them is left out."""
    paths = [path_name(path) for path, _ in leaves]
    if paths and all(path.endswith("/value") for path in paths):
        paths = [path.removesuffix("/value") for path in paths]
    return tuple(paths)


def _check_effects(graph: Graph, words: Words) -> None:
    pairs = list(zip(graph.eqns, graph.names, strict=True))
    unknown = [
        f"{eqn.primitive.name} in {name or words.noun} ({user_line(eqn) or 'no line known'}): {', '.join(kinds)}"
        for eqn, name in pairs
        if (kinds := effects_not_taken(eqn))
    ]
    if unknown:
        rule = "a stage computes values; of its side effects only callbacks are known to happen as on one device"
        fix = f"leave it out, or return what it keeps as {words.aux} or {words.state}; put checkify around checkify.check"
        raise words.error(words.where, rule, unknown, fix)
    ordered = [f"{eqn.primitive.name} in {name or words.noun}" for eqn, name in pairs if is_ordered(eqn)]
    if ordered:
        rule = "stages run side by side, so side effects have no order among each other"
        raise words.error(words.where, rule, ordered, f"leave out ordered=True, or return the values as {words.aux}")


class Wrong(NamedTuple):
    """Leaves of a tree that are no arrays of JAX's: a line for each, and what to do about them."""

    lines: list[str]
    fix: str


def wrong_leaves(name: str, leaves: Sequence[tuple[KeyPath, Leaf]], fix: str, *, numbers: bool = False) -> Wrong | None:
    """The leaves of a tree that ``jax.jit`` takes for no arrays (or Python ``numbers``), if any; ``fix`` is for other types."""
    found = [(path, leaf, why) for path, leaf in leaves if (why := unfit(leaf, numbers=numbers)) is not None]
    lines = [f"{name}{jax.tree_util.keystr(path)}: {why.what}" for path, _, why in found]
    return Wrong(lines, "; ".join(dict.fromkeys(why.fix or fix for _, _, why in found))) if found else None


class Unfit(NamedTuple):
    """What a leaf is that JAX does not take, and what to do about it; empty if that depends on what it is for."""

    what: str
    fix: str = ""


def unfit(leaf: Leaf, *, numbers: bool = True) -> Unfit | None:
    """None for what ``jax.jit`` takes for an array (a shape, with ``numbers`` a Python number, too), else what is wrong with it."""
    if isinstance(leaf, jax.Array):
        fix = "copy what a step takes over before the step, jnp.copy(array), or pass the array anew"
        return Unfit(f"{describe(leaf)}, deleted", fix) if not isinstance(leaf, Tracer) and leaf.is_deleted() else None
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    if isinstance(leaf, np.ma.MaskedArray):
        return Unfit(f"{describe(leaf)}, masked", "pass array.filled(value), and the mask as an array of its own")
    typed = isinstance(leaf, (np.ndarray, np.generic))
    try:
        jax.typeof(leaf)  # which knows what JAX takes, but for NumPy's strings of any length
        return None if (numbers or typed) and not (typed and leaf.dtype.kind == "T") else Unfit(type(leaf).__name__)
    except (TypeError, ValueError, OverflowError):
        if not typed:
            return Unfit(type(leaf).__name__)
        swapped = not leaf.dtype.isnative
        fix = "array.dtype.newbyteorder('=')" if swapped else "np.float32"
        return Unfit(describe(leaf), f"convert it to a type that JAX knows, array.astype({fix})" + " for example" * (not swapped))


def differences(found: Tree, wanted: Tree, path: str, *, shapes: bool = True, as_taken: bool = False) -> list[str]:
    """Where a tree differs from the one that is wanted, a line for each node and leaf; without ``shapes`` in its nodes alone.

    ``as_taken``: NumPy's 64-bit numbers have the types as which JAX takes them.
    """
    (ours, mine), (theirs, yours) = map(_children, (found, wanted))
    if "" in ours and "" in theirs:
        alike = not shapes
        if shapes and (isinstance(found, jax.Array) or unfit(found, numbers=False) is None):
            dtype = jax.dtypes.canonicalize_dtype(found.dtype, allow_extended_dtype=True) if as_taken else found.dtype
            alike = (found.shape, dtype) == (wanted.shape, wanted.dtype)
        return [] if alike else [f"{path}: {_named(found)} instead of {_named(wanted)}"]
    if mine != yours and (type(found) is not type(wanted) or ours.keys() == theirs.keys()):
        return [f"{path}: {_named(found)} instead of {_named(wanted)}"]
    lines = [f"{path}{key} is missing" for key in theirs if key not in ours]
    lines += [f"{path}{key} is not expected" for key in ours if key not in theirs]
    for key in [key for key in ours if key in theirs]:
        lines += differences(ours[key], theirs[key], path + key, shapes=shapes, as_taken=as_taken)
    return lines


def _children(tree: Tree) -> tuple[dict[str, Tree], object]:
    """The children of a node by their keys, and what it is; a leaf is its own child, without a key."""
    children, node = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda child: child is not tree)
    return {jax.tree_util.keystr(path): child for path, child in children}, node


def _named(node: Tree) -> str:
    children, _ = _children(node)
    if "" in children:
        why = None if isinstance(node, jax.Array) else unfit(node, numbers=False)
        return describe(node) if why is None else why.what
    return "none" if node is None else f"a {type(node).__name__} of {len(children)}"


def _check_aux(aux: Tree, words: Words, name: str = "") -> None:
    name = name or words.aux
    if wrong := wrong_leaves(name, jax.tree_util.tree_leaves_with_path(aux), "leave out what is neither", numbers=True):
        raise words.error(words.where, f"every {name} leaf is an array or a number", wrong.lines, wrong.fix)


def _check_state(aux: Tree, old: Tree, words: Words) -> tuple[list[Leaf], Tree]:
    where = f"{words.where} with has_state=True" if words is _LOSS else f"{words.where} with a {words.state}"
    name = words.state.replace(" ", "_")
    if not isinstance(aux, tuple) or len(aux) != 2:
        got = type(aux).__name__ if not isinstance(aux, tuple) else f"a tuple of {len(aux)}"
        raise words.error(where, f"it returns {words.pair}", f"(loss, {got})" if words is _LOSS else got, words.fix)
    new, aux = aux
    if got := differences(new, old, name, shapes=False):
        rule, fix = f"the new {words.state} is a tree like the old one", f"return every leaf of the {words.state}, changed or not"
        raise words.error(where, rule, got, f"{fix}, and no other")
    _check_aux(new, words, name)
    if wrong := differences(jax.tree.map(lambda leaf: jax.eval_shape(jnp.asarray, leaf), new), old, name):
        rule = f"the leaves of the {words.state} keep their shapes and types"
        raise words.error(where, rule, wrong, "give new values the old shape, and cast them with .astype(old.dtype)")
    return jax.tree.leaves(new), aux


def check_trainable(leaves: Sequence[tuple[KeyPath, Leaf]], *, allow_int: bool) -> None:
    """Refuse parameter leaves that are no arrays of numbers, all of them at once, and a tree in which nothing can be trained.

    Leaves of types that have no gradient, such as quantised weights, are frozen, and refused unless ``allow_int``.
    """
    where = "params"
    if not leaves:
        raise ParamsError(where, "the parameters are a tree of arrays", "a tree without leaves", "pass the model's parameters")

    arrays = [(path, leaf) for path, leaf in leaves if hasattr(leaf, "dtype")]
    if unknown := wrong_leaves(where, arrays, "make an array of it with np.asarray"):
        raise ParamsError(where, "every parameter leaf is an array as JAX takes it", unknown.lines, unknown.fix)
    found = [
        (f"{where}{jax.tree_util.keystr(path)}: {describe(leaf) if hasattr(leaf, 'dtype') else type(leaf).__name__}", leaf)
        for path, leaf in leaves
    ]
    wrong = [shown for shown, leaf in found if not (hasattr(leaf, "dtype") and (allow_int or has_gradient(leaf)))]
    if wrong:
        rule = "every parameter leaf must be an array of floating type, because its gradient is"
        fix = "make scalars arrays, and pass allow_int=True for integers, booleans and PRNG keys, whose gradients are float0 then"
        if allow_int:
            rule = "every parameter leaf must be an array; those of integers, booleans and PRNG keys are frozen"
            fix = "make scalars arrays with jnp.asarray"
        if any(callable(leaf) for _, leaf in leaves):
            fix = (
                "keep the functions out of params, as with Equinox: params, static = eqx.partition(model, eqx.is_inexact_array), "
                "and in the loss model = eqx.combine(params, static)"
            )
        raise ParamsError(where, rule, wrong, fix)
    if not any(has_gradient(leaf) for _, leaf in leaves):
        rule = "integers and booleans have no gradient, so some parameter leaf is of floating type, or there is nothing to train"
        fix = "add what is to be trained to the parameters, such as an adapter"
        raise ParamsError(where, rule, [shown for shown, _ in found][:8], fix)


def check_bits(leaves: Sequence[tuple[KeyPath, Leaf]]) -> None:
    """Refuse leaves of numbers smaller than a byte: JAX gives them another layout than programs compiled ahead of time want."""
    kinds = (jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)
    bits = [next((of(leaf.dtype).bits for kind, of in kinds if jnp.issubdtype(leaf.dtype, kind)), 8) for _, leaf in leaves]
    narrow = [leaf for leaf, size in zip(leaves, bits, strict=True) if size < 8]
    small = [f"params{jax.tree_util.keystr(path)}: {describe(leaf)}" for path, leaf in narrow]
    if small:
        rule = "the numbers of a parameter have at least a byte each, for JAX cannot pass smaller ones to a compiled program"
        fix = "keep two in each number of a uint8 array, and take them apart where they are used, with q & 0xF and q >> 4"
        raise ParamsError("params", rule, small, fix)


def check_arrays(model_state: Tree, name: str = "model state") -> None:
    """Refuse leaves of a model state, or of another tree called ``name``, that are no arrays, all of them at once."""
    where = name.replace(" ", "_")
    leaves = [(path[1:], leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model_state)]
    if wrong := wrong_leaves(where, leaves, "make scalars arrays with jnp.asarray, and close over what never changes"):
        raise ParamsError(where, f"every leaf of the {name} is an array", wrong.lines, wrong.fix)


def key_implementation(key: Aval | None) -> str | None:
    """The implementation of a typed key; None for a raw one (or none at all)."""
    if key is None or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), key)  # a shape will do
    return names[0]


def _check_result(result: Leaf, has_aux: bool, differentiable: bool) -> tuple[Leaf, Tree]:
    rule, loss, aux = "the loss is one float scalar", result, ()
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            if not isinstance(result, tuple) and hasattr(result, "dtype"):
                got = f"one array, {describe(result)}"
            rule = "a loss with aux returns a pair (loss, aux)"
            raise LossError("loss_fn", rule, got, "return (loss, aux), or leave has_aux out")
        loss, aux = result
    if isinstance(loss, tuple):
        raise LossError("loss_fn", rule, f"a tuple of {len(loss)}", "pass has_aux=True, or return the loss")
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, float, int)):
        raise LossError("loss_fn", rule, type(loss).__name__, "return the loss itself")
    aval = jax.eval_shape(jnp.asarray, loss)
    if aval.shape != ():
        raise LossError("loss_fn", rule, describe(aval), "reduce it, for example with .mean()")
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        fix = "return a loss made of floating numbers; what counts or compares (argmax, ==, a cast to integers) has no gradient"
        if not differentiable:
            fix = 'return a mean over the examples, such as (logits.argmax(-1) == batch["y"]).mean(); or the count as aux, '
            fix += 'which is added over the microbatches: return loss, {"correct": count}'
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            fix = "return a real number, for example with jnp.abs or .real"
        raise LossError("loss_fn", rule, describe(aval), fix)
    return loss, aux


def in_order_of(loss: TracedLoss, owner: Sequence[int]) -> TracedLoss:
    """The loss with its equations in the order of the stages that own what they read, as far as they can run in it.

    A critic that judges real examples first, and then what a generator makes, runs on the stages behind the generator's both times.
    """
    graph = loss.graph
    stage, last = dict(zip(loss.params, owner, strict=True)), 0
    at: list[int] = []
    for eqn in graph.eqns:
        at.append(max((stage.get(var, 0) for var in variables(eqn.invars)), default=0))
        if eqn.effects:
            at[-1] = last = max(at[-1], last)
        stage.update(dict.fromkeys(eqn.outvars, at[-1]))
    order = sorted(range(len(at)), key=lambda i: (at[i], i))
    eqns, names = (tuple(each[i] for i in order) for each in (graph.eqns, graph.names))
    return replace(loss, graph=replace(graph, eqns=eqns, names=names))
