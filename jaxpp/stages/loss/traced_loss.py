"""The loss at one microbatch's shapes as a graph, with the role of every value known.

Three kinds of equations come out:

* *spine*: depends on the data, and is worth sending; the only equations a cut divides. What depends on data but on no parameter
  (a dropout mask, a count of tokens) sinks to its first reader, so that it is made where it is used.
* *static*: depends on parameters (or on nothing) alone; each stage that needs it computes it itself, once per step.
* *cheap*: made of the batch, the key or the model state by elementwise and layout operations (a mask, positions, shifted labels);
  each stage that needs it makes it again, and only the batch leaf travels.

A model state leaf (running statistics) has a new value after every microbatch. The stage that makes it keeps it, so whatever reads
the old one before lies on the same stage (``state_spans``).
"""

import itertools
import math
import posixpath
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.tree_util import KeyPath

from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.graph import Graph, descendants
from jaxpp.stages.jaxpr import CHEAP, Atom, Checkpoint, aval_of, kind_of, variables
from jaxpp.stages.loops.rows import Read, first_reads
from jaxpp.stages.loops.split_scan import Layers
from jaxpp.stages.own_params import without_joint
from jaxpp.types import Tree

__all__ = ["STATE_RULE", "TracedLoss", "cheap_values", "path_name"]

STATE_RULE = "one stage reads a model state leaf and makes its new value, or the next microbatch would wait for the one before"
"""Why no stage may begin at some places (``TracedLoss.barred``)."""


@dataclass(frozen=True)
class TracedLoss:
    """The flat graph of a loss and the roles of its inputs and outputs.

    Attributes:
        graph: inputs are the parameter leaves, the model state leaves, the batch leaves, then the raw key if there is one; outputs
            the loss, the aux leaves, then the new model state leaves.
        param_paths: the tree path of each parameter leaf, as ``h_2/attn/kernel``.
        state_paths: the tree path of each model state leaf.
        num_batch_leaves: how many batch leaves there are.
        aux_tree: the structure of aux.
        remat: checkpoints a stage the way the user checkpointed the whole loss, or None.
        frozen: the parameter leaves whose gradient nobody wants.
        layers: what loops over layers were split into.
        clock: where measured, after which part of the FLOPs which part of the time has passed.
        shared: the batch leaves that every microbatch gets as they are.
        stacks: for each parameter leaf the path of the user's leaf, and which row of that is its first (those of slices differ).
        is_loss: False for a function that returns outputs; they are the aux leaves, and the loss is a literal that nobody reads.
    """

    graph: Graph
    param_paths: tuple[str, ...]
    state_paths: tuple[str, ...]
    num_batch_leaves: int
    aux_tree: Tree
    remat: Checkpoint | None
    frozen: frozenset[int] = frozenset()
    layers: tuple[Layers, ...] = ()
    clock: tuple[tuple[float, float], ...] = ()
    shared: frozenset[int] = frozenset()
    stacks: tuple[tuple[str, int], ...] = ()
    is_loss: bool = True

    @property
    def noun(self) -> str:
        """What messages call it."""
        return "loss" if self.is_loss else "function"

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
        return self.graph.inputs[len(self.params) + len(self.state) :][: self.num_batch_leaves]

    @cached_property
    def key(self) -> Var | None:
        """The raw key, if the loss takes one."""
        rest = self.graph.inputs[len(self.params) + len(self.state) + self.num_batch_leaves :]
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
            if _passes(eqn) and not wanted.isdisjoint(variables(eqn.invars)):
                wanted.update(filter(_is_inexact, eqn.outvars))
        reaching = set(variables(graph.outputs[:1]))
        for eqn in reversed(graph.eqns):
            if _passes(eqn) and not reaching.isdisjoint(eqn.outvars):
                reaching.update(filter(_is_inexact, variables(eqn.invars)))
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
    def primitives(self) -> tuple[str, ...]:
        """The name of the primitive of each spine equation."""
        return tuple(self.graph.eqns[i].primitive.name for i in self.spine)

    def _due(self) -> list[float]:
        """When each equation runs, as a number of one: its own, or its first reader's if it depends on data but on no parameter.

        What only model state needs runs as soon as it can, wherever the user wrote it: after what makes its operands, and not
        before the first other reader of a parameter or model state leaf that it reads.
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
        first = {var: min(found, default=0) for var, found in read.items()}
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
        """What the stages are balanced by: FLOPs, or the part of the time, in FLOPs."""
        if not self.clock:
            return self.flops
        work, passed = zip(*self.clock, strict=True)
        ends = np.concatenate([[0.0], np.cumsum(self.flops)])
        return tuple(np.diff(np.interp(ends / max(ends[-1], 1.0), work, passed)) * ends[-1])

    @cached_property
    def own_paths(self) -> tuple[str, ...]:
        """The path of each parameter leaf below what all of them share (``params``)."""
        shared = posixpath.commonpath([posixpath.dirname(path) for path in self.param_paths] or [""])
        found = [path[len(shared) :].lstrip("/") for path in self.param_paths]
        if any(path[:1].isdigit() for path in found):  # a list of layers: its name says more than their numbers
            found = [path[len(posixpath.dirname(shared)) :].lstrip("/") for path in self.param_paths]
        return tuple(found)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The module of each spine equation.

        Linen leaves its modules' paths in the equations. Where most equations that read parameters are not called as any part of a
        parameter's path (NNX, plain functions), the paths of the parameters say where an equation is.
        """
        parts = [[part for part in path.split("/") if part] for path in self.own_paths]
        known = {part for path in parts for part in path}
        names = [self.graph.names[i] for i in self.spine]
        reading = [name for name, uses in zip(names, self.param_uses, strict=True) if uses]
        if 2 * sum(bool(known.intersection(re.split(r"[/\[]", name))) for name in reading) > len(reading):
            return tuple(names)
        of_param = [".".join(path[: 2 if path[1:] and path[1].isdigit() else 1]) for path in parts]
        for leaf, (path, row) in enumerate(self.stacks):
            if path != self.param_paths[leaf]:
                of_param[leaf] += f"[{row}:{row + aval_of(self.params[leaf]).shape[0]}]"
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
        """For each model state leaf the spine position that makes its new value, and before it the first that reads the old one.

        No cut lies between the two. They are the same where only one is on the spine; None where neither is.
        """
        position = {var: k for k, i in enumerate(self.spine) for var in self.graph.eqns[i].outvars}
        first = {leaf: k for k, uses in reversed(list(enumerate(self.state_uses))) for leaf in uses}
        made = [position.get(source) if isinstance(source, Var) else None for source in self.sources]
        needs = self._uses_of(self.state)[1]
        sources = {leaf: source for leaf, source in enumerate(self.sources) if made[leaf] is None}
        floating = {leaf: needs.get(source, ()) if isinstance(source, Var) else () for leaf, source in sources.items()}
        for _ in floating:  # what is made of other state alone, where it is first read, reads that there
            for leaf, others in floating.items():
                for other in others:
                    if leaf in first:
                        first[other] = min(first.get(other, first[leaf]), first[leaf])
        ends = [first.get(leaf) if end is None else end for leaf, end in enumerate(made)]
        ends = [
            end if end is not None else max((ends[k] or 0 for k in floating[leaf]), default=None) for leaf, end in enumerate(ends)
        ]
        return tuple(None if end is None else (min(first.get(leaf, end), end), end) for leaf, end in enumerate(ends))

    @cached_property
    def barred(self) -> dict[int, str]:
        """The spine positions where no stage may begin, each with the model state leaf that it would divide."""
        found: dict[int, str] = {}
        for path, place in zip(self.state_paths, self.state_spans, strict=True):
            if place is not None:
                found.update((k, path) for k in range(place[0] + 1, place[1] + 1))
        return found

    def _uses_of(self, leaves: Sequence[Var]) -> tuple[tuple[frozenset[int], ...], dict[Atom, frozenset[int]]]:
        """The leaves that each spine equation needs, and the leaves needed by each value that is made again where it is read."""
        spine = set(self.spine)
        needs: dict[Atom, frozenset[int]] = {var: frozenset([k]) for k, var in enumerate(leaves)}
        found: dict[int, frozenset[int]] = {}
        for i, eqn in enumerate(self.graph.eqns):
            uses = frozenset().union(*(needs.get(var, frozenset()) for var in variables(eqn.invars)))
            if i in spine:
                found[i] = uses
            else:
                needs.update((var, uses) for var in eqn.outvars)
        return tuple(found[i] for i in self.spine), needs


def _passes(eqn: JaxprEqn) -> bool:
    """Whether gradients go through an equation."""
    return kind_of(eqn) != "stop_gradient"


def _is_inexact(var: Var) -> bool:
    return jnp.issubdtype(aval_of(var).dtype, jnp.inexact)


_WORTH = 8


def cheap_values(graph: Graph, leaves: Sequence[Var], free: Sequence[Var], barred: set[Var]) -> set[Var]:
    """The values made from ``leaves`` and ``free`` by cheap operations alone, and not much smaller than the leaves they need.

    Args:
        graph: where they are made.
        leaves: inputs that would have to travel along, once a step; those together may take at most so many times the bytes of the
            value, which would travel at every microbatch: a mask of tokens is an eighth of them.
        free: inputs that are everywhere anyway (the key).
        barred: values that are never made again (what depends on parameters).
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
