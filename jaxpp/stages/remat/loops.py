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
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from jaxpp.stages.cost import inner_jaxprs
from jaxpp.stages.graph import Graph, aval_of
from jaxpp.stages.remat.repeatable import may_repeat

__all__ = ["leaner"]

_LEFT = frozenset("checkpoint remat remat2 scan while cond name shard_map".split())


def leaner(graph: Graph, chosen: Iterable[int]) -> list[Graph]:
    """The graph with a checkpoint in the body of each of the chosen equations that is a loop; nothing if there is none."""
    changed = {i: _checkpointed(graph.eqns[i]) for i in chosen if _is_plain_loop(graph.eqns[i])}
    return [replace(graph, eqns=tuple(changed.get(i, eqn) for i, eqn in enumerate(graph.eqns)))] if changed else []


def _is_plain_loop(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "scan":
        return False
    floating = any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)
    return floating and not eqn.effects and not eqn.params["jaxpr"].consts and not _names(eqn) & _LEFT


def _names(eqn: JaxprEqn) -> set[str]:
    """The primitives inside an equation."""
    inner = [inside for jaxpr in inner_jaxprs(eqn) for inside in jaxpr.eqns]
    return {inside.primitive.name for inside in inner}.union(*map(_names, inner))


def _checkpointed(eqn: JaxprEqn) -> JaxprEqn:
    body: ClosedJaxpr = eqn.params["jaxpr"]
    leaner_body = jax.checkpoint(jaxpr_as_fun(body), policy=_is_kept, prevent_cse=False)
    closed = jax.make_jaxpr(leaner_body)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals))
    return eqn.replace(params={**eqn.params, "jaxpr": closed})


def _is_kept(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy of ``jax.checkpoint``: keep what is never computed again."""
    return not may_repeat(primitive.name, avals, params.get("new_dtype"))
