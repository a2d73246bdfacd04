"""Loops that keep less: the body of a ``scan`` that a stage differentiates, checkpointed by a policy.

A loop is one equation to the minimum cut of ``least.py``, and would keep all that its body's pullback reads, once an iteration. So
its body goes under ``jax.checkpoint``, with a policy that keeps what is never computed again (``repeat.py``), and no more. The
policy cannot know which values are rounded, so that it keeps every comparison of floating-point numbers. A body in which the user
has checkpointed something, or that has loops of its own, stays as it is.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import aval_of, inner_jaxprs, kind_of, scan_of, shapes_of, with_body
from jaxpp.stages.remat.repeatable import may_repeat
from jaxpp.types import Aval

__all__ = ["checkpoint_loops"]

_LEFT = frozenset({"checkpoint", "scan", "while", "cond", "name", "shard_map"})


def checkpoint_loops(graph: Graph, chosen: Iterable[int]) -> list[Graph]:
    """The graph with a checkpoint in the body of each of the chosen equations that is a loop; nothing if there is none."""
    loops = {i: scan_of(graph.eqns[i]) for i in chosen}
    plain = {i: loop.body for i, loop in loops.items() if loop is not None and _is_plain(graph.eqns[i])}
    changed = {i: with_body(graph.eqns[i], _checkpointed(body)) for i, body in plain.items()}
    return [replace(graph, eqns=tuple(changed.get(i, eqn) for i, eqn in enumerate(graph.eqns)))] if changed else []


def _is_plain(eqn: JaxprEqn) -> bool:
    floating = any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)
    return floating and not eqn.effects and not _kinds(eqn) & _LEFT


def _kinds(eqn: JaxprEqn) -> set[str]:
    """The kinds of the equations inside another."""
    inner = [inside for jaxpr in inner_jaxprs(eqn) for inside in jaxpr.eqns]
    return set(map(kind_of, inner)).union(*map(_kinds, inner))


def _checkpointed(body: ClosedJaxpr) -> ClosedJaxpr:
    checkpointed = jax.checkpoint(jaxpr_as_fun(body), policy=_is_kept, prevent_cse=False)
    return jax.make_jaxpr(checkpointed)(*shapes_of(body.in_avals))


def _is_kept(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
    """A policy of ``jax.checkpoint``: keep what is never computed again."""
    return not may_repeat(primitive.name, avals, params.get("new_dtype"))
