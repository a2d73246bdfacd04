"""What a stage keeps for its backward: the policies of ``remat``, made of what the user wrote (``policies_of``).

``Least`` is a minimum cut: keeping a value costs its bytes, running an equation again has a price too. Keeping everything is one of
the cuts, so no choice is worse. Where the backward is split, a second cut finds the cheapest values that I keeps for W, and moves
what is cheap in W and makes less than it reads (the gradient of a bias) into I where that keeps less.

Reference: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; the minimum cut is known from PyTorch.
"""
# ruff: noqa: ARG002  (a policy need not look at all that it is told)

import math
import numbers
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun

from jaxpp.errors import ArgumentError, shown
from jaxpp.errors.tracebacks import entries
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import aval_of, inner_jaxprs, kind_of, multiplies, number_in, scan_of, shapes_of, variables, with_body
from jaxpp.stages.repeatable import (
    ELEMENT,
    EXTREMES,
    SINK,
    SOURCE,
    Network,
    decided_on,
    is_written,
    may_repeat,
    price_of,
    repeatable,
    settled,
)
from jaxpp.types import Aval, Policy

_Eqns = Collection[int]  # the numbers of equations
_PRICES = {
    "cpu": (1.0, ELEMENT)
}  # bytes an element that ``tanh`` and the like, and other arithmetic, cost, by platform; else nothing

_MOVED = 1e-3  # what I does in W's place is done once all the same: a price only so that W keeps what it can
_OPERAND = 1 / 16  # of what a product of the backward reads: if it is computed again, it is written again
_BUFFER = (
    1 + 1 / 32
)  # of nearly equal bytes, what a product made is kept: it is in memory, and the others would be written beside it
_LATER = 1 + 1 / 256  # what I computes for W is there twice while I runs: what it only holds is a little cheaper


@dataclass(frozen=True)
class RematPolicy:
    """What a stage's forward keeps: by itself, everything that its backward reads. Equal policies make the same programs."""

    recomputes = False  # Whether the backward runs the forward again, and the stage holds its inputs for that

    def loops(self, graph: Graph, eqns: Iterable[int]) -> list[Graph]:
        """The graph with fewer residuals in those of the equations that are loops, to be taken if it keeps less; or nothing."""
        return []

    def prepared(self, graph: Graph) -> Graph:
        """A stage's forward and pullback, rewritten so that less need be kept."""
        return graph

    def again(self, graph: Graph, forward: _Eqns, free: _Eqns, held: Collection[Var], reads: Iterable[Var]) -> set[int]:
        """The equations of a ``forward`` that its backward, which needs ``reads``, runs again; ``free`` are repeated anyway.

        The inputs ``held`` are let go after the forward unless the backward needs them.
        """
        return set()

    def between(
        self, graph: Graph, of_input: _Eqns, of_weight: _Eqns, free: _Eqns, held: Collection[Var]
    ) -> tuple[set[int], set[int]] | None:
        """The equations of I that W runs as well, and those of W that I runs in its place; None: I runs all that is run again.

        W would run ``of_weight`` if I kept nothing for it. I is given the values ``held``: residuals, activations, cotangents.
        """
        return None


@dataclass(frozen=True)
class ByPolicy(RematPolicy):
    """Keep what a policy of ``jax.checkpoint_policies`` says, asked once for each equation of the forward."""

    policy: Policy
    recomputes = True

    def again(self, graph: Graph, forward: _Eqns, free: _Eqns, held: Collection[Var], reads: Iterable[Var]) -> set[int]:
        """The equations whose results the policy does not keep."""
        return {i for i in forward if not graph.eqns[i].effects and not self._keeps(graph.eqns[i])}

    def _keeps(self, eqn: JaxprEqn) -> bool:
        try:
            keep = self.policy(eqn.primitive, *map(aval_of, eqn.invars), **eqn.params)
        except Exception as error:
            error.add_note("jaxpp: raised by the policy passed as remat, which is one like jax.checkpoint_policies.dots_saveable")
            raise
        if not isinstance(keep, (bool, np.bool_)):
            rule = "a policy says for each operation whether its result is kept (True) or recomputed (False)"
            fix = 'pass a policy that does not offload, such as jax.checkpoint_policies.dots_saveable; remat="offload" offloads'
            raise ArgumentError("remat", rule, f"{type(keep).__name__} for {eqn.primitive.name}", fix)
        return bool(keep)


@dataclass(frozen=True)
class Least(RematPolicy):
    """Keep what costs least."""

    transcendental: float = 0.0  # the price, in bytes, of one element of ``tanh``, ``exp`` and the like, computed again
    element: float = ELEMENT  # of one element of other elementwise arithmetic; if that is nothing, what a product made is kept

    def loops(self, graph: Graph, eqns: Iterable[int]) -> list[Graph]:
        """The graph with a checkpoint in the body of each loop among the equations; nothing if there is none.

        Else a loop, one equation to the cut, would keep all that its pullback reads. The checkpoint keeps what is never computed
        again, and every comparison of floating-point numbers, of which some are rounded. A body with a checkpoint or loop
        stays, and one whose products all have a derivative of their own (``jax.custom_vjp``): that says what is kept.
        """
        scans = {i: scan_of(graph.eqns[i]) for i in eqns}
        plain = {i: scan.body for i, scan in scans.items() if scan is not None and _is_plain(graph.eqns[i])}
        changed = {i: with_body(graph.eqns[i], _checkpointed(body)) for i, body in plain.items()}
        return [replace(graph, eqns=tuple(changed.get(i, eqn) for i, eqn in enumerate(graph.eqns)))] if changed else []

    def prepared(self, graph: Graph) -> Graph:
        """The graph with ``max(x, 0) > 0`` in place of ``x > 0`` where there is such a maximum: a relu's result says it all."""
        results: dict[Var, Var] = {}
        eqns = list(graph.eqns)
        for i, eqn in enumerate(eqns):
            if kind_of(eqn) not in ("max", "gt") or isinstance(eqn.invars[0], Literal) or number_in(eqn.invars[1]) != 0:
                continue
            if kind_of(eqn) == "max":
                results[eqn.invars[0]] = eqn.outvars[0]
            elif eqn.invars[0] in results:
                eqns[i] = eqn.replace(invars=[results[eqn.invars[0]], eqn.invars[1]])
        return replace(graph, eqns=tuple(eqns))

    def again(self, graph: Graph, forward: _Eqns, free: _Eqns, held: Collection[Var], reads: Iterable[Var]) -> set[int]:
        """The equations on the sink's side of the cut between what the forward has and what the backward reads."""
        network, may = Network(), settled(graph, {*forward, *free})
        after = [eqn for i, eqn in enumerate(graph.eqns) if i not in forward and i not in free]
        operands = {var for eqn in after if is_written(eqn) and not self.element for var in variables(eqn.invars)}
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        available, producers = set(held), graph.producers()
        for i, eqn in enumerate(graph.eqns):
            if i not in forward and i not in free:
                continue
            repeated = i in free or may[i]
            if i not in free:
                written = _OPERAND * sum(count_bytes(aval_of(var)) for var in eqn.outvars if var in operands)
                price = price_of(eqn, self.transcendental, self.element) + written
                network.edge(SOURCE, i, price if may[i] else math.inf)
            for var in variables(eqn.invars) if repeated else ():
                if var in available:
                    network.edge(var, i)
                if kind_of(eqn) in EXTREMES and var in producers:  # a maximum is one of the values, bit for bit
                    network.edge(i, producers[var])
            buffer = 1 if self.element or is_written(eqn) else _BUFFER
            for var in eqn.outvars:
                network.edge(i, var, math.inf if i in free else buffer * count_bytes(aval_of(var)))
            available.update(eqn.outvars)
        for var in reads:
            if var in available:
                network.edge(var, SINK)
        chosen = network.sink_side(most=not self.element)
        again = {i for i in forward if i in chosen}
        kept = {var for var in available if var in chosen and producers.get(var) not in again}
        return again | decided_on(graph, {*forward, *free} - again, kept)

    def between(
        self, graph: Graph, of_input: _Eqns, of_weight: _Eqns, free: _Eqns, held: Collection[Var]
    ) -> tuple[set[int], set[int]]:
        """The cheapest of what I has from which W can do the rest."""
        network, may = Network(), repeatable(graph)
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        made = {var: i for i in (*of_input, *of_weight) for var in graph.eqns[i].outvars}
        for i in {*of_input, *of_weight}:
            eqn, shared = graph.eqns[i], i in of_input
            price = price_of(eqn, self.transcendental, self.element) if may[i] else math.inf
            if i not in free:  # what is only moved from W to I costs nothing, but W is the place for it
                network.edge(*((SOURCE, i, price) if shared else (i, SINK, math.inf if price == math.inf else _MOVED)))
            for var in variables(eqn.invars):
                if var in made or var in held:
                    network.edge(var, i)
                if not shared and var in made and made[var] not in of_input and made[var] not in free:
                    network.edge(i, made[var])
            for var in eqn.outvars:
                network.edge(i, var, math.inf if i in free else _LATER * count_bytes(aval_of(var)))
        chosen = network.sink_side()
        again = {i for i in of_input if i in chosen and i not in free}
        return again, {i for i in of_weight if i not in chosen and i not in of_input and i not in free}


_LEFT = frozenset({"checkpoint", "scan", "while", "cond", "name", "shard_map"})


def _is_plain(eqn: JaxprEqn) -> bool:
    floating = any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)
    return floating and not eqn.effects and not _kinds(eqn) & _LEFT and not _chooses(eqn)


def _chooses(eqn: JaxprEqn) -> bool:
    """Whether all products of a loop are in functions with a derivative of their own, and there are some."""
    inside = [inner for body in inner_jaxprs(eqn) for inner in body.eqns if multiplies(inner)]
    return bool(inside) and all(kind_of(inner) == "custom_vjp" for inner in inside)


def _kinds(eqn: JaxprEqn) -> set[str]:
    inner = [inside for jaxpr in inner_jaxprs(eqn) for inside in jaxpr.eqns]
    return set(map(kind_of, inner)).union(*map(_kinds, inner))


def _checkpointed(body: ClosedJaxpr) -> ClosedJaxpr:
    checkpointed = jax.checkpoint(jaxpr_as_fun(body), policy=_is_kept, prevent_cse=False)
    return jax.make_jaxpr(checkpointed)(*shapes_of(body.in_avals))


def _is_kept(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
    """A policy of ``jax.checkpoint``: keep what is never computed again."""
    return not may_repeat(primitive.name, avals, params.get("new_dtype"))


@entries
@dataclass(frozen=True)
class Offload:
    """Keep the least, and let it wait in host memory: the value of ``remat`` that ``"offload"`` stands for.

    Results are bit by bit those of ``remat="least"``. After the forward of a microbatch its residuals are copied to pinned host
    memory beside the device; while the last action before their backward runs, they are copied back. Copies that are shorter than
    an action delay nothing. Residuals stay where leaving would free nothing: if fewer than three actions of the rank lie between
    forward and backward, if the rank holds as many at another time anyway, and if another stage on the same device needs them too.

    Args:
        except_last: of how many microbatches at a time, those whose backward is next, the residuals of the stage stay. With 0 all
            leave; a larger number moves fewer bytes and frees less memory.

    Raises:
        ArgumentError: ``except_last`` is no whole number of at least 0.

    Example:
        >>> import jaxpp
        >>> jaxpp.Offload() == jaxpp.Offload(except_last=1)
        True
    """

    except_last: int = 1

    def __post_init__(self):
        value = self.except_last
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 0:
            rule = "except_last says of how many microbatches the residuals stay on the device, a whole number of at least 0"
            raise ArgumentError(f"Offload(except_last={value!r})", rule, repr(value), "pass except_last=1, or leave it out")


Remat = str | Policy | Offload | None
"""``"least"``, ``"keep"`` or None (all), ``"recompute"`` (of inputs), a policy, or the least in host memory (``"offload"``)."""

RECOMPUTE = ByPolicy(jax.checkpoint_policies.nothing_saveable)  # Keep a stage's inputs only


def policies_of(remat: Remat | Sequence[Remat], num_stages: int, platform: str) -> tuple[RematPolicy, ...] | None:
    """What the forward of each stage keeps, from what the user passed as ``remat``; None if all keep everything."""
    least, everything = Least(*_PRICES.get(platform, (0.0, 0.0))), RematPolicy()
    words = {None: everything, "keep": everything, "recompute": RECOMPUTE, "least": least, "offload": least}
    values = _each_stage(remat, num_stages)
    bad = {k: value for k, value in enumerate(values) if not _is_remat(value, words)}
    if bad or len(values) != num_stages:
        wrong = [f"stage {k}: {shown(value)}" for k, value in bad.items()] if isinstance(remat, (list, tuple)) else [shown(remat)]
        wrong += [f"{len(values)} for {num_stages} stages"] if len(values) != num_stages else []
        rule = 'a stage keeps the least ("least"; "offload": in host memory), everything ("keep"), its inputs only ("recompute"), '
        fix = 'pass "least", "offload", "recompute", a policy of jax.checkpoint_policies, or a list of one a stage'
        first = next(iter(bad.values()), None)
        if isinstance(first, (bool, np.bool_)):
            fix = 'pass remat="recompute", which runs each forward again' if first else 'pass remat="keep", which keeps everything'
        elif first is Offload:
            fix = "call it: remat=jaxpp.Offload()"
        raise ArgumentError("remat", rule + "or what a policy says", wrong, fix)
    policies: tuple[RematPolicy, ...] = tuple(
        least if isinstance(value, Offload) else ByPolicy(value) if _is_policy(value) else words[value] for value in values
    )
    return None if all(policy == everything for policy in policies) else policies


def _is_policy(value: object) -> TypeGuard[Policy]:
    return callable(value) and not isinstance(value, type)


def offload_of(remat: Remat | Sequence[Remat], num_stages: int) -> tuple[int | None, ...]:
    """``except_last`` of each stage, from what the user passed as ``remat``; None for a stage whose residuals stay."""
    values = (Offload() if value == "offload" else value for value in _each_stage(remat, num_stages))
    return tuple(int(value.except_last) if isinstance(value, Offload) else None for value in values)


def _each_stage(remat: Remat | Sequence[Remat], num_stages: int) -> tuple[Remat, ...]:
    return tuple(remat) if isinstance(remat, Sequence) and not isinstance(remat, str) else (remat,) * num_stages


def _is_remat(value: object, words: Collection[object]) -> bool:
    if value is None or isinstance(value, str):
        return value in words
    return isinstance(value, Offload) or _is_policy(value)
