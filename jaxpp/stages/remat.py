"""What a stage keeps for its backward: the policies of ``remat``, made of what the user wrote (``policies_of``).

``Least`` is a minimum cut: keeping a value costs its bytes, running an equation again has a price too. Keeping everything is one of
the cuts, so no choice is worse. ``Budget`` gives matrix products a price as well, and looks for the price at which the cut has the
bytes that the user grants (``within``). Where the backward is split, a second cut finds the cheapest values that I keeps for
W, and moves what is cheap in W and makes less than it reads (the gradient of a bias) into I where that keeps less.

Reference: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; the minimum cut is known from PyTorch.
"""
# ruff: noqa: ARG002  (a policy need not look at all that it is given)

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun

from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.errors.tracebacks import entries
from jaxpp.stages.axes import AxisEnv
from jaxpp.stages.cost import count_bytes, product_flops
from jaxpp.stages.floating import has_gradient
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import (
    LAYOUT,
    all_equations,
    aval_of,
    inner_jaxprs,
    kind_of,
    multiplies,
    number_in,
    scan_of,
    shapes_of,
    variables,
    with_body,
)
from jaxpp.stages.repeatable import (
    ELEMENT,
    EXTREMES,
    PRODUCTS,
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
_MOVED = 1e-3  # what I does in W's place is done once all the same: a price only so that W keeps what it can
_BUFFER = 1 + 1 / 32  # of nearly equal bytes, what a product made is kept: it is in memory, the others would be written beside it
_LATER = 1 + 1 / 256  # what I computes for W is there twice while I runs: what it only holds is a little cheaper


class Keeping(Protocol):
    """A stage whose forward keeps something."""

    kept_bytes: int  # that one microbatch holds from the forward to the backward
    repeated: float  # FLOPs of the matrix products and convolutions that the backward runs again for one microbatch


_Stage = TypeVar("_Stage", bound=Keeping)


class Halves(NamedTuple):
    """The forward of a stage, and what its backward reads of it."""

    graph: Graph  # of both
    forward: _Eqns
    free: _Eqns  # the equations that are repeated anyway
    held: Collection[Var]  # the inputs that are freed after the forward unless the backward needs them
    reads: Sequence[Var]  # what the backward needs


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

    def chosen(self, build: Callable[["RematPolicy"], Sequence[_Stage]]) -> _Stage:
        """One of the forms of a stage; ``build`` makes them by a policy: with loops as they are, and with those of ``loops``."""
        return min(build(self), key=lambda stage: stage.kept_bytes)

    def again(self, stage: Halves) -> set[int]:
        """The equations of the forward that the backward runs again."""
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

    def again(self, stage: Halves) -> set[int]:
        """The equations whose results the policy does not keep."""
        eqns = stage.graph.eqns
        return {i for i in stage.forward if not eqns[i].effects and not self._keeps(eqns[i])}

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
    """Keep what costs least.

    All prices are in bytes kept. On CPUs arithmetic has a price. On accelerators it has none beside memory traffic: what a product
    of the backward reads is in memory already where the forward made it, and would be written once more if it were computed again.
    """

    transcendental: float = 0.0  # the price of one element of ``tanh``, ``exp`` and the like, computed again
    element: float = ELEMENT  # of one element of other elementwise arithmetic
    written: float = 0.0  # of one byte that the backward writes again because one of its products reads it; 0: not on accelerators

    def loops(self, graph: Graph, eqns: Iterable[int]) -> list[Graph]:
        """The graph with a checkpoint in the body of each loop among the equations; nothing if there is none.

        Else a loop, one equation to the cut, would keep all that its pullback reads. The checkpoint keeps what is never computed
        again, and every comparison of floating-point numbers, of which some are rounded. A body with a checkpoint or loop
        stays, and one whose products all have a derivative of their own (``jax.custom_vjp``): that says what is kept.
        """
        return self._looped(graph, eqns, _KEPT_IN_LOOPS)

    def _looped(self, graph: Graph, eqns: Iterable[int], policy: Policy) -> list[Graph]:
        scans = {i: scan_of(graph.eqns[i]) for i in eqns}
        plain = {i: scan.body for i, scan in scans.items() if scan is not None and _is_plain(graph.eqns[i])}
        bodies = {id(body): body for body in plain.values()}  # loops over parts of a stack have one, which JAX differentiates once
        made = {number: _checkpointed(body, policy, graph.env) for number, body in bodies.items()}
        changed = {i: with_body(graph.eqns[i], made[id(body)]) for i, body in plain.items()}
        return [replace(graph, eqns=tuple(changed.get(i, eqn) for i, eqn in enumerate(graph.eqns)))] if changed else []

    def prepared(self, graph: Graph) -> Graph:
        """The graph with ``max(x, 0) > 0`` in place of ``x > 0`` where there is such a maximum: a relu's result says it all.

        On accelerators only where x is a product with a bias, which computes the relu itself. Where x is of a normalisation, the
        backward reads what x is made of, and a mask of a byte an element along with it; the relu would be read in one more pass.
        """
        results: dict[Var, Var] = {}
        eqns, producers = list(graph.eqns), graph.producers()
        for i, eqn in enumerate(eqns):
            if kind_of(eqn) not in ("max", "gt") or isinstance(eqn.invars[0], Literal) or number_in(eqn.invars[1]) != 0:
                continue
            if kind_of(eqn) == "max" and not (self.written and not _is_sum(graph, producers, eqn.invars[0])):
                results[eqn.invars[0]] = eqn.outvars[0]
            elif eqn.invars[0] in results:
                eqns[i] = eqn.replace(invars=[results[eqn.invars[0]], eqn.invars[1]])
        return replace(graph, eqns=tuple(eqns))

    def again(self, stage: Halves) -> set[int]:
        """The equations on the sink's side of the cut between what the forward has and what the backward reads."""
        may, written = settled(stage.graph, {*stage.forward, *stage.free}), self._written(stage)
        rows = zip(stage.graph.eqns, may, written, strict=True)
        return self._cheapest(stage, [self._price(eqn) + self.written * size if ok else math.inf for eqn, ok, size in rows])

    def _price(self, eqn: JaxprEqn) -> float:
        return price_of(eqn, self.transcendental, self.element)

    def _buffer(self, eqn: JaxprEqn) -> float:
        return _BUFFER if self.written and not is_written(eqn) else 1

    def _written(self, stage: Halves) -> list[int]:
        """Bytes of the results of each equation that are written again if it is run again, because a product reads them."""
        graph = stage.graph
        after = [eqn for i, eqn in enumerate(graph.eqns) if i not in stage.forward and i not in stage.free]
        operands = {var for eqn in after if is_written(eqn) for var in variables(eqn.invars)}
        return [sum(count_bytes(aval_of(var)) for var in eqn.outvars if var in operands) for eqn in graph.eqns]

    def _cheapest(self, stage: Halves, prices: Sequence[float]) -> set[int]:
        """The equations of the forward that are run again at these prices of each; an infinite price is for what may not be."""
        graph, forward, free, held, reads = stage
        network, available, producers = Network(), set(held), graph.producers()
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        for i, eqn in enumerate(graph.eqns):
            if i not in forward and i not in free:
                continue
            repeated = i in free or prices[i] < math.inf
            if i not in free:
                network.edge(SOURCE, i, prices[i])
            for var in variables(eqn.invars) if repeated else ():
                if var in available:
                    network.edge(var, i)
                if kind_of(eqn) in EXTREMES and var in producers:  # a maximum is one of the values, bit for bit
                    network.edge(i, producers[var])
            for var in eqn.outvars:
                network.edge(i, var, math.inf if i in free else self._buffer(eqn) * count_bytes(aval_of(var)))
            available.update(eqn.outvars)
        for var in reads:
            if var in available:
                network.edge(var, SINK)
        chosen = network.sink_side(most=self.written > 0)
        again = {i for i in forward if i in chosen}
        kept = {var for var in available if var in chosen and producers.get(var) not in again}
        return again | decided_on(graph, {*forward, *free} - again, kept)

    def between(
        self, graph: Graph, of_input: _Eqns, of_weight: _Eqns, free: _Eqns, held: Collection[Var]
    ) -> tuple[set[int], set[int]]:
        """The cheapest of what I has from which W can do the rest."""
        network, may = Network(), self._for_weights(graph)
        for var in held:
            network.edge(SOURCE, var, count_bytes(aval_of(var)))
        made = {var: i for i in (*of_input, *of_weight) for var in graph.eqns[i].outvars}
        for i in {*of_input, *of_weight}:
            eqn, shared = graph.eqns[i], i in of_input
            price = self._price(eqn) if may[i] else math.inf
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

    def _for_weights(self, graph: Graph) -> list[bool]:
        """Whether W may run each equation that I runs."""
        return repeatable(graph)


@dataclass(frozen=True)
class Budget(Least):
    """Keep a share of what the least takes beyond the fewest bytes that repeating products reaches, for the fewest FLOPs.

    ``room`` is that in bytes, once a stage is known. While the price of a FLOP falls from infinite to nothing, the minimum cut
    falls from what ``Least`` keeps to those fewest bytes. Each cut on the way is the cheapest for its bytes; one of them is taken.
    """

    share: float = 1.0
    room: float = math.inf

    def loops(self, graph: Graph, eqns: Iterable[int]) -> list[Graph]:
        """Those of ``Least``; then with checkpoints that keep no product of attention (with batch axes), and none at all."""
        numbers = list(eqns)
        return [found for policy in (_KEPT_IN_LOOPS, *_LESS_IN_LOOPS) for found in self._looped(graph, numbers, policy)]

    def chosen(self, build: Callable[[RematPolicy], Sequence[_Stage]]) -> _Stage:
        """The stage with the fewest FLOPs again within the share, of its graphs."""
        stages = build(Least(self.transcendental, self.element, self.written))
        fewest = [*build(replace(self, room=0.0)), *stages]
        least = min((stage for stage in stages if stage.repeated <= stages[0].repeated), key=lambda stage: stage.kept_bytes)
        floor = min(fewest, key=lambda stage: stage.kept_bytes)
        room = floor.kept_bytes + self.share * (least.kept_bytes - floor.kept_bytes)
        fitting = [stage for stage in (*build(replace(self, room=room)), *fewest) if stage.kept_bytes <= room]
        return min(fitting, key=lambda stage: (stage.repeated, stage.kept_bytes))

    def again(self, stage: Halves) -> set[int]:
        """The equations that are run again where ``room`` bytes are kept."""
        graph, makers = stage.graph, stage.graph.producers()
        may, written = settled(graph, {*stage.forward, *stage.free}, products=True), self._written(stage)
        base = [self._price(eqn) if ok else math.inf for eqn, ok in zip(graph.eqns, may, strict=True)]
        later = [1 + _LATER_COSTS * i / len(graph.eqns) for i in range(len(graph.eqns))]  # or all layers would change at one price
        whole = [sum(map(count_bytes, map(aval_of, eqn.outvars))) for eqn in graph.eqns]
        written = [full if is_written(eqn) else size for eqn, full, size in zip(graph.eqns, whole, written, strict=True)]
        traffic = self.written * _FLOPS_A_BYTE
        work = [more * (product_flops(eqn) + traffic * size) for more, eqn, size in zip(later, graph.eqns, written, strict=True)]

        def choice(again: Collection[int]) -> Choice:
            kept = [(var, count_bytes(aval_of(var))) for var in _kept(stage, again)]
            cost = sum(size * (self._buffer(graph.eqns[makers[var]]) if var in makers else 1) for var, size in kept)
            cost += sum(self._price(graph.eqns[i]) for i in again)
            return Choice(sum(size for _, size in kept), cost, sum(work[i] for i in again), frozenset(again))

        def cheapest(price: float) -> Choice:
            prices = [own + price * flops for own, flops in zip(base, work, strict=True)]
            return choice(self._cheapest(stage, prices))

        most = choice(super().again(stage))
        return set(within(self.room, most, cheapest(_NEXT_TO_NOTHING), cheapest).again)

    def _for_weights(self, graph: Graph) -> list[bool]:
        may = repeatable(graph, products=True)  # nothing is decided on a product that I has run again
        return [ok and kind_of(eqn) not in PRODUCTS for ok, eqn in zip(may, graph.eqns, strict=True)]


_CLOSE = 1e-6  # a minimum cut counts in parts of its sum: by so much a corner may lie above the line


class Choice(NamedTuple):
    """What is done twice so that less is kept; at a price of p bytes for a unit of work, the cheapest has the least ``at(p)``.

    Drawn as points (work across, cost up), the choices that are the cheapest at any price are the corners of a convex line that
    falls to the right, and no other choice lies below it.
    """

    num_bytes: float  # that are kept
    cost: float  # these, and what counts like bytes
    work: float  # that is done twice, in the unit that a price is for
    again: frozenset[int]  # what is done twice

    def at(self, price: float) -> float:
        """What the choice costs at a price for a unit of work."""
        return self.cost + price * self.work


def within(room: float, most: Choice, fewest: Choice, cheapest: Callable[[float], Choice]) -> Choice:
    """The corner with the least work whose bytes are at most ``room``; that of the fewest bytes if none has so few.

    Walks along the line without knowing it, and asks for the cheapest at the price at which two known corners cost the same, until
    none lies between them.
    ``most`` and ``fewest`` are the ends of the line: the least work, and the fewest bytes. ``cheapest`` finds the cheapest choice
    at a price.
    """
    over, under = most, fewest
    if over.num_bytes <= room or under.num_bytes > room:
        return over if over.num_bytes <= room else under
    while under.work > over.work and over.cost > under.cost:
        price = (over.cost - under.cost) / (under.work - over.work)
        found = cheapest(price)
        if found.at(price) >= (1 - _CLOSE) * under.at(price):
            break
        over, under = (over, found) if found.num_bytes <= room else (found, under)
    return under


def _kept(stage: Halves, again: Collection[int]) -> set[Var]:
    """What the backward reads, itself or to run equations again, of the forward's results and of what the forward reads itself."""
    graph, forward, free, held, reads = stage
    producers, pending, seen = graph.producers(), list(reads), set[Var]()
    own = {var for i in (*forward, *free) for var in variables(graph.eqns[i].invars)}.intersection(held)
    kept = set[Var]()
    while pending:
        var = pending.pop()
        if var in seen:
            continue
        seen.add(var)
        i = producers.get(var, -1)
        if i in again or i in free:
            pending += variables(graph.eqns[i].invars)
        elif i in forward or var in own:
            kept.add(var)
    return kept


_LATER_COSTS = 1 / 16  # how much more work counts at the end of a stage than at its beginning
_FLOPS_A_BYTE = 256  # FLOPs in bfloat16 that accelerators do in the time in which their memory moves a byte
_NEXT_TO_NOTHING = 1e-9  # bytes that a FLOP costs where only bytes count
_ADDING = LAYOUT | {"add", "sub", "convert_element_type", "transpose"}


def _is_sum(graph: Graph, producers: Mapping[Var, int], value: Var) -> bool:
    """Whether a value is made of matrix products, convolutions and the like by nothing but additions."""
    pending, seen = [value], set[int]()
    while pending:
        i = producers.get(pending.pop())
        if i is None or i in seen or is_written(graph.eqns[i]):
            continue
        seen.add(i)
        if kind_of(graph.eqns[i]) not in _ADDING:
            return False
        pending += variables(graph.eqns[i].invars)
    return True


_LEFT = frozenset({"checkpoint", "scan", "while", "cond", "name", "shard_map"})


def _is_plain(eqn: JaxprEqn) -> bool:
    floating, inside = any(has_gradient(aval_of(var)) for var in eqn.outvars), list(all_equations([eqn]))[1:]
    return floating and not eqn.effects and _LEFT.isdisjoint(map(kind_of, inside)) and not _chooses(eqn)


def _chooses(eqn: JaxprEqn) -> bool:
    """Whether all products of a loop are in functions with a derivative of their own, and there are some."""
    inside = [inner for body in inner_jaxprs(eqn) for inner in body.eqns if multiplies(inner)]
    return bool(inside) and all(kind_of(inner) == "custom_vjp" for inner in inside)


def _checkpointed(body: ClosedJaxpr, policy: Policy, env: AxisEnv) -> ClosedJaxpr:
    checkpointed = jax.checkpoint(jaxpr_as_fun(body), policy=policy, prevent_cse=False)
    return jax.make_jaxpr(checkpointed, axis_env=env)(*shapes_of(body.in_avals))


def _keeping(*, batched: bool, others: bool) -> Policy:
    """A policy of ``jax.checkpoint``: keep what is never computed again; and products with batch axes, and others."""

    def is_kept(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
        if primitive.name in PRODUCTS:
            return batched if primitive.name == "dot_general" and any(params["dimension_numbers"][1]) else others
        return not may_repeat(primitive.name, avals, params.get("new_dtype"))

    return is_kept


_KEPT_IN_LOOPS = _keeping(batched=True, others=True)
_LESS_IN_LOOPS = _keeping(batched=False, others=True), _keeping(batched=False, others=False)


@entries
@dataclass(frozen=True)
class Offload:
    """Keep the least, or the inputs only, and let it wait in host memory: the value of ``remat`` that ``"offload"`` stands for.

    Results are bit by bit those of ``remat="least"``. After the forward of a microbatch its residuals are copied to pinned host
    memory beside the device; while the last action before their backward runs, they are copied back. Copies that are shorter than
    an action delay nothing. Residuals stay where leaving would free nothing: if fewer than three actions of the rank lie between
    forward and backward, if the rank holds as many at another time anyway, and if another stage on the same device needs them too.

    Args:
        except_last: of how many microbatches at a time, those whose backward is next, the residuals of the stage stay. With 0 all
            leave; a larger number moves fewer bytes and frees less memory.
        recompute: whether a stage keeps its inputs only, as with ``remat="recompute"``, and lets these wait: the fewest bytes on
            the device, and the fewest that travel. Results are those of ``remat="recompute"``.

    Raises:
        ArgumentError: ``except_last`` is no whole number of at least 0, or ``recompute`` is neither True nor False.

    Example:
        >>> import jaxpp
        >>> jaxpp.Offload() == jaxpp.Offload(except_last=1)
        True
    """

    except_last: int = 1
    recompute: bool = False

    def __post_init__(self):
        if not isinstance(self.recompute, bool):
            rule, fix = "recompute says whether a stage keeps its inputs only", "pass recompute=True, or leave it out"
            raise ArgumentError(f"Offload(recompute={self.recompute!r})", rule, repr(self.recompute), fix)
        value = self.except_last
        if not is_count(value):
            rule = "except_last says of how many microbatches the residuals stay on the device, a whole number of at least 0"
            raise ArgumentError(f"Offload(except_last={value!r})", rule, repr(value), "pass except_last=1, or leave it out")


Remat = str | float | Policy | Offload | None
"""``"least"`` or a share of it, ``"keep"`` or None (all), ``"recompute"`` (of inputs), a policy, or the least in host memory."""

_LEAST = {"cpu": Least(transcendental=1.0)}  # by platform
_ON_ACCELERATORS = Least(element=0.0, written=2.0)  # written, and what it is made of read: more than the byte that is kept
RECOMPUTE = ByPolicy(jax.checkpoint_policies.nothing_saveable)  # Keep a stage's inputs only


def policies_of(remat: Remat | Sequence[Remat], num_stages: int, platform: str) -> tuple[RematPolicy, ...] | None:
    """What the forward of each stage keeps, from what the user passed as ``remat``; None if all keep everything."""
    least, everything = _LEAST.get(platform, _ON_ACCELERATORS), RematPolicy()
    words = {None: everything, "keep": everything, "recompute": RECOMPUTE, "least": least, "offload": least}
    values = _each_stage(remat, num_stages)
    bad = {k: value for k, value in enumerate(values) if not _is_remat(value, words)}
    if bad or len(values) != num_stages:
        wrong = [f"stage {k}: {shown(value)}" for k, value in bad.items()] if isinstance(remat, (list, tuple)) else [shown(remat)]
        wrong += [f"{len(values)} for {num_stages} stages"] if len(values) != num_stages else []
        rule = 'a stage keeps the least ("least"; "offload": in host memory), a share of it (above 0.0, at most 1.0), everything '
        rule += '("keep"), its inputs only ("recompute"), '
        fix = 'pass "least", "offload", "recompute", a policy of jax.checkpoint_policies, or a list of one a stage'
        first = next(iter(bad.values()), None)
        if isinstance(first, (bool, np.bool_)):
            fix = 'pass remat="recompute", which runs each forward again' if first else 'pass remat="keep", which keeps everything'
        elif first is Offload:
            fix = "call it: remat=jaxpp.Offload()"
        raise ArgumentError("remat", rule + "or what a policy says", wrong, fix)

    def policy_of(value: Remat) -> RematPolicy:
        if _is_number(value):
            return least if value == 1 else Budget(least.transcendental, least.element, least.written, float(value))
        if isinstance(value, Offload):
            return RECOMPUTE if value.recompute else least
        return ByPolicy(value) if _is_policy(value) else words[value]

    policies = tuple(map(policy_of, values))
    return None if all(policy == everything for policy in policies) else policies


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)  # 1 may be meant as True, and 0 as False


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
    if _is_number(value):
        return 0 < value <= 1
    return isinstance(value, Offload) or _is_policy(value)
