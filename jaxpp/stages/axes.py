"""The user's own sharding code, moved to the devices of a stage.

A model may say how its values are sharded (``with_sharding_constraint``, ``shard_map``, ``reshard``) and may name the replicas
(``jax.lax.pmean(x, "data")``). It says so of the mesh of all devices, and a stage runs on those of its rank alone. So a function is
traced with the whole mesh in force, and then its equations are rewritten for the mesh of a rank: the axes that a rank has are
kept, that of the pipeline is left out, and others are refused.

The axis of the replicas is manual before a stage begins, as inside a ``jax.shard_map`` over ``data``: each has its own part of the
batch. So a collective over ``data`` is one between replicas, and ``data`` in the sharding of a value says nothing new.

A ``shard_map`` over axes that divide nothing inside a stage (``data``, ``pipe``, those of other devices) says what is computed of
each block of a value. The rank computes that of all blocks, by ``jax.vmap``, and collectives over these axes are between blocks.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp.errors import LossError
from jaxpp.errors.user_mesh import user_mesh
from jaxpp.stages.interpreter import Body, Interpreter
from jaxpp.stages.jaxpr import (
    CUSTOM_RULES,
    Atom,
    ShardMap,
    all_equations,
    aval_of,
    called,
    constraint_of,
    equations_of,
    function_of,
    in_mesh,
    inner_jaxprs,
    is_named,
    is_typed,
    kind_of,
    mesh_of,
    named_axes,
    needed_of,
    new_variable,
    on_mesh,
    shard_map_of,
    traced_inside,
    user_line,
    varying_shapes,
    with_params,
    with_shard_map,
)
from jaxpp.types import Leaf, Tree

_T = TypeVar("_T")

PIPE, DATA, MODEL = "pipe", "data", "model"

AxisEnv = tuple[tuple[str, int], ...]  # The names of axes and how many devices there are along each
AxisNames = tuple[tuple[str, str, int], ...]  # What functions call an axis, which of a rank's axes it is part of, and its size

_NO_MESH = AbstractMesh((), ())
_FIX = "leave the axis out there, or pass the pipeline a mesh=... that has it"


@dataclass(frozen=True)
class RankAxes:
    """The axes of a rank, and how functions call them."""

    devices: AbstractMesh = _NO_MESH  # of a rank, with the axes data and model; without axes for one device
    names: AxisNames = ()  # other names that functions call the axes by
    whole: Mesh | None = None  # in force where a function needs one and the user has set none: of all devices, or of a listed rank
    outside: AxisEnv | None = None  # for what runs on the devices as one program: the axes of the replicas around it

    @property
    def sizes(self) -> dict[str, int]:
        """How many devices a rank has along each axis."""
        return dict(self.devices.shape)

    def called(self, axis: str) -> frozenset[str]:
        """All names of an axis of a rank."""
        return frozenset([axis, *(name for name, own, _ in self.names if own == axis)])

    def named(self, spec: PartitionSpec) -> PartitionSpec:
        """A sharding with the names that axes have on a rank; without further axes of the mesh, of one device each."""
        axis = {name: own for name, own, _ in self.names}
        further = set(() if self.whole is None else self.whole.axis_names).difference(axis, (PIPE, DATA, MODEL))

        def entry(given: Tree) -> Tree:
            names = tuple(dict.fromkeys(axis.get(name, name) for name in axis_names(given) if name not in further))
            return given if given is PartitionSpec.UNCONSTRAINED else names[0] if len(names) == 1 else names or None

        return PartitionSpec(*map(entry, spec))

    @cached_property
    def manual(self) -> frozenset[str]:
        """The axes over which programs are mapped, not divided by the compiler."""
        if self.sizes.get(DATA, 1) == 1 or self.outside is not None:
            return frozenset()
        return frozenset([DATA] if self.sizes[MODEL] > 1 else [DATA, MODEL])  # all of them, as callbacks want it, where that may be

    @cached_property
    def rank(self) -> AbstractMesh:
        """The devices of a rank as programs see them there."""
        return self.devices.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    @property
    def env(self) -> AxisEnv:
        """The axes that a function may name in a collective."""
        if self.outside is not None:
            return self.outside
        named = [(name, size) for name, axis, size in self.names if axis == DATA]
        return tuple(named) if DATA in dict(named) else (*named, (DATA, self.sizes.get(DATA, 1)))

    def plain(self) -> AbstractContextManager[object]:
        """Where a function that divides its values runs in plain JAX: on the mesh that the user has set, or that of all devices.

        The axes of the mesh have no types there (see ``untyped``).
        """
        mesh = self._in_plain
        if mesh is None:
            return nullcontext()
        if isinstance(mesh, AbstractMesh):
            return jax.sharding.use_abstract_mesh(_untyped(mesh))
        return jax.set_mesh(Mesh(mesh.devices, mesh.axis_names, (AxisType.Auto,) * mesh.devices.ndim))

    @property
    def _in_plain(self) -> Mesh | AbstractMesh | None:
        mesh = user_mesh()
        return mesh if isinstance(mesh, Mesh) else self.whole or mesh

    def untyped(self, function: Callable[..., Tree]) -> Callable[..., Tree]:
        """A function that divides its values as it runs in ``plain``: the same equations, where types do not say what is divided.

        JAX refuses to differentiate some functions where they do: a ``shard_map`` of what is whole has divided cotangents. And it
        refuses those that map over a part of the mesh where the whole is in force.
        """
        mesh = self._in_plain
        if mesh is None:
            return function
        typed = mesh.abstract_mesh
        axes = RankAxes(_untyped(typed), outside=self.env)

        def run(*args: Tree) -> Tree:
            try:
                return function(*args)
            except Exception:  # noqa: BLE001  (some functions run only where axes have types, or where no mesh is in force)
                shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
                make = jax.make_jaxpr(function, axis_env=self.env, return_shape=True)
                try:
                    closed, results = traced_inside(typed, (), lambda: make(*shapes))
                except ValueError:
                    closed, results = traced_inside(_NO_MESH, (), lambda: make(*shapes))
            closed = moved(closed, axes, rules_in(closed.jaxpr, self))
            return jax.tree.structure(results).unflatten(jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

        return run

    def shapes(self, function: Callable[..., Tree], *args: Tree) -> Tree:
        """What ``jax.eval_shape`` says of a function of the user's."""
        return self.in_force(lambda: jax.make_jaxpr(function, axis_env=self.env, return_shape=True)(*args)[1])

    def in_force(self, trace: Callable[[], _T]) -> _T:
        """Trace a function of the user's where the mesh is in force that the user has set, or that of all devices if need be.

        JAX wants axes without types for some functions, and for others those that the user gave them.
        """
        if isinstance(known := user_mesh(), Mesh):
            with jax.set_mesh(known):
                return trace()
        try:
            return trace()
        except Exception:
            mesh = self._in_plain
            found = None if mesh is None else _within(mesh.abstract_mesh, trace)
            if found is None:
                raise
        return found[0]


def _within(mesh: AbstractMesh, trace: Callable[[], _T]) -> tuple[_T] | None:
    """A function of the user's traced with ``mesh`` in force; None if it maps over another mesh, which JAX refuses there."""
    try:
        with jax.sharding.use_abstract_mesh(_untyped(mesh)):
            return (trace(),)
    except Exception as error:
        if AxisType.Explicit not in mesh.axis_types:
            if "context mesh" in str(error):
                return None
            raise
    with jax.sharding.use_abstract_mesh(mesh):
        return (trace(),)


def _untyped(mesh: AbstractMesh) -> AbstractMesh:
    return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))


ONE_DEVICE = RankAxes()


class Derivative(NamedTuple):
    """The derivative of a function that has one of its own."""

    jaxpr: Jaxpr
    mesh: AbstractMesh  # in force where it can be traced


Rules = Mapping[Hashable, Derivative]  # The derivatives that name a mesh or an axis of one, by ``_function`` of equations


def moved(closed: ClosedJaxpr, axes: RankAxes, rules: Rules = MappingProxyType({})) -> ClosedJaxpr:
    """A traced function, with these derivatives inside, as it runs on a rank.

    Raises:
        LossError: it names axes that a rank does not have.
    """
    if not axes.sizes and not rules and not _mentions(closed.jaxpr):
        return closed
    return ClosedJaxpr(_Mover(axes, rules).moved(closed.jaxpr), closed.consts)


def rules_in(jaxpr: Jaxpr, axes: RankAxes) -> Rules:
    """The derivatives, of functions inside a user's, that name a mesh or an axis of one; but for those in maps over a mesh.

    A derivative that cannot be traced is left out: nobody may ever ask for it.

    Raises:
        NameError: one names an axis that nothing has.
    """
    found: dict[Hashable, Derivative | None] = {}

    def look(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            plain = called(eqn, CUSTOM_RULES)
            if plain is None and shard_map_of(eqn) is None:
                inner_bodies = [inner for inner in inner_jaxprs(eqn) if inner not in seen]
                seen.update(inner_bodies)
                for inner in inner_bodies:
                    look(inner)
            elif plain is not None and _function(eqn) not in found:
                rule = _rule(eqn, axes)
                found[_function(eqn)] = rule if rule is not None and _mentions(rule.jaxpr) else None

    seen = set[Jaxpr]()
    look(jaxpr)
    return {function: rule for function, rule in found.items() if rule is not None}


def _function(eqn: JaxprEqn) -> Hashable:
    """What stands for the function that an equation calls which has a derivative of its own; copies of the equation share it."""
    return id(eqn.params["call_jaxpr"])


def _rule(eqn: JaxprEqn, axes: RankAxes) -> Derivative | None:
    """The derivative of a function that has one of its own; None if it cannot be traced."""
    own, gives = mesh_of(eqn), _inexact([aval_of(var) for var in eqn.outvars])

    def derivative(of_inexact: Callable[..., Callable[..., Tree]], *args: jax.Array) -> Tree:
        run = of_inexact(args)
        wanted = list(itertools.compress(args, _inexact(args)))
        if kind_of(eqn) == "custom_jvp":
            return jax.jvp(run, wanted, wanted)[0]
        results, pullback = jax.vjp(lambda *given: list(itertools.compress(run(*given), gives)), *wanted)
        return pullback(results)

    whole = [] if axes.whole is None or not own.empty else [_untyped(axes.whole.abstract_mesh), axes.whole.abstract_mesh]
    for mesh in (own, *whole):
        of_inexact = _of_inexact(eqn if mesh is own else in_mesh(eqn, mesh))
        make = jax.make_jaxpr(functools.partial(derivative, of_inexact), axis_env=axes.env)
        try:
            return Derivative(traced_inside(mesh, (), lambda make=make: make(*varying_shapes(eqn.invars))).jaxpr, mesh)
        except NameError:
            raise
        except Exception:  # noqa: BLE001, S112  (whatever it is, it comes again if the function is differentiated)
            continue
    return None


def _inexact(values: Iterable[Leaf]) -> list[bool]:
    return [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]


def _of_inexact(eqn: JaxprEqn) -> Callable[[Sequence[jax.Array]], Callable[..., list[jax.Array]]]:
    """What an equation computes, as a function of those of its operands that have a derivative; it takes all others first."""
    inputs: list[Leaf] = [new_variable(atom) for atom in eqn.invars]
    run = function_of([eqn.replace(invars=inputs)], inputs, eqn.outvars)

    def of_inexact(args: Sequence[jax.Array]) -> Callable[..., list[jax.Array]]:
        def function(*given: jax.Array) -> list[jax.Array]:
            supply = iter(given)
            return run(*(next(supply) if want else arg for arg, want in zip(args, _inexact(args), strict=True)))

        return function

    return of_inexact


def _mentions(jaxpr: Jaxpr) -> bool:
    """Whether any equation names a mesh or an axis of one."""
    return divides(jaxpr.eqns) or any(not mesh_of(eqn).empty or named_axes(eqn) for eqn in all_equations(jaxpr.eqns))


def axes_named(eqns: Iterable[JaxprEqn]) -> set[str]:
    """The axes of the collectives among equations, and of those inside them; a ``jax.shard_map`` keeps those over which it maps."""
    found = set[str]()
    for eqn in eqns:
        mapped = shard_map_of(eqn)
        inside = set[str]().union(*(axes_named(inner.eqns) for inner in inner_jaxprs(eqn)))
        found.update(named_axes(eqn), inside if mapped is None else inside - mapped.manual)
    return found


def divides(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether equations say that values are divided among the devices of a rank."""
    return any(constraint_of(eqn) is not None or shard_map_of(eqn) is not None for eqn in all_equations(eqns))


def maps(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether any of the equations, or any equation inside them, is a ``jax.shard_map``."""
    return any(shard_map_of(eqn) is not None for eqn in all_equations(eqns))


@dataclass(frozen=True)
class _Scope:
    """Where an equation stands."""

    mesh: AbstractMesh  # in force there
    gone: Mapping[str, int] = field(default_factory=dict)  # axes over which the function maps and nothing is done; their sizes
    in_rule: bool = False  # whether it is in the derivative of a function that has one of its own
    checked: frozenset[str] = frozenset()  # the axes of maps around it that check along which of them values vary
    blocks: Mapping[str, int] = field(default_factory=dict)  # axes of maps around it that run block by block here; their sizes


class _Mover(Interpreter[Atom]):
    """Copies jaxprs for the mesh of a rank; its values are what stands for variables there."""

    enters = frozenset()  # of an equation with functions inside it, these are moved as all its parameters are

    def __init__(self, axes: RankAxes, rules: Rules):
        super().__init__()
        self._rules = rules
        self._sizes, self._env, self._outside = dict(axes.outside or ()) | axes.sizes, axes.env, axes.manual
        self._axis = {name: axis for name, axis, _ in axes.names}
        self._count = {name: size for name, _, size in axes.names} | self._sizes
        self._known: dict[Hashable, Jaxpr] = {}
        self._contexts: dict[tuple[Hashable, AbstractMesh], JaxprEqn] = {}
        self._scope = _Scope(axes.rank)  # of the equations that are copied now
        self._lines: list[JaxprEqn] = []  # the copies, in the jaxpr that is made now

    @contextmanager
    def _within(self, scope: _Scope, lines: list[JaxprEqn]) -> Iterator[None]:
        around = self._scope, self._lines
        self._scope, self._lines = scope, lines
        yield
        self._scope, self._lines = around

    def moved(self, jaxpr: Jaxpr, scope: _Scope | None = None) -> Jaxpr:
        """A jaxpr as it stands in a scope, unless one is given in that of what is around it; made once."""
        scope = scope or self._scope
        key = jaxpr, scope.mesh, frozenset(scope.gone), scope.in_rule, scope.checked, frozenset(scope.blocks)
        if key not in self._known:
            eqns, split = list[JaxprEqn](), len(jaxpr.constvars)
            with self._within(scope, eqns):
                inputs: list[Leaf] = list(map(self._fresh, (*jaxpr.constvars, *jaxpr.invars)))
                outputs = self.call(jaxpr, inputs)
            ends = {"constvars": inputs[:split], "invars": inputs[split:], "outvars": outputs}
            self._known[key] = jaxpr.replace(**ends, eqns=eqns, effects=self._bound(jaxpr.effects))
        return self._known[key]

    def opened(self, body: Jaxpr) -> Body:
        """What is needed of a function, for nobody reads what an ``init`` computes of its inputs; its constants are arguments."""
        needed = needed_of(body.eqns, body.outvars, lambda eqn: not all(map(is_named, eqn.effects)))
        return Body((*body.constvars, *body.invars), body.outvars, [body.eqns[i] for i in needed])

    def number(self, atom: Literal) -> Atom:
        """A number where the mesh of a rank is in force."""
        return self._fresh(atom)

    def plain(self, eqn: JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        """What stands for the results of an equation."""
        before, eqn = eqn, eqn.replace(invars=values)
        mapped, sharding, names, plain = shard_map_of(eqn), constraint_of(eqn), named_axes(eqn), called(eqn, CUSTOM_RULES)
        if mapped is not None:
            return self._map(eqn, mapped)
        if sharding is not None:
            return self._constraint(eqn, sharding)
        if names:
            return self._collective(eqn, names)
        if plain is not None and (self._scope.in_rule or _function(eqn) in self._rules or not mesh_of(before).empty):
            return self._custom(eqn, plain, before)
        return self._on_rank(with_params(eqn, self._parameter))

    def _on_rank(self, eqn: JaxprEqn) -> Sequence[Atom]:
        """An equation with the mesh of a rank in force."""
        scope = self._scope
        key = eqn.ctx, scope.mesh
        context = self._contexts[key] = self._contexts.get(key) or in_mesh(eqn, scope.mesh)
        outs = [self._fresh(var) for var in eqn.outvars]
        new = eqn.replace(outvars=outs, effects=self._bound(eqn.effects), ctx=context.ctx)
        divided = set(scope.mesh.auto_axes)
        if kind_of(new) in _CALLBACKS and scope.mesh.manual_axes and divided:  # they want all axes manual
            call: Callable[..., Tree] = lambda *args: new.primitive.bind(*args, **new.params)  # noqa: E731
            if kind_of(new) == "io_callback" and outs:
                rule = "where a rank has replicas and shards, a callback with effects has no results"
                fix = "return nothing from it; or use jax.pure_callback, which may be called once on each device"
                raise _error(eqn, rule, f"jax.experimental.io_callback with {len(outs)} results", fix)
            call = call if kind_of(new) == "pure_callback" else _on_the_first(call, tuple(divided))
            whole = PartitionSpec()
            run = jax.shard_map(call, in_specs=whole, out_specs=whole, axis_names=divided, check_vma=False)
            return self._made(eqn, run)
        self._lines.append(new)
        return outs

    def _custom(self, eqn: JaxprEqn, plain: ClosedJaxpr, before: JaxprEqn) -> Sequence[Atom]:
        """A function with a derivative of its own, whose rule is traced now: later it would be with another mesh in force."""
        rule = self._rules.get(_function(eqn))
        mesh, avals = mesh_of(before) if rule is None else rule.mesh, varying_shapes(before.invars)
        primal = jaxpr_as_fun(ClosedJaxpr(self.moved(plain.jaxpr), plain.consts))
        if self._scope.in_rule:  # nobody differentiates twice
            return self._made(eqn, primal)
        varies, of_inexact = _inexact(avals), _of_inexact(eqn if rule is None else in_mesh(eqn, mesh))

        def moved(function: Callable[..., Tree], *args: Tree) -> tuple[Callable[..., list[jax.Array]], Tree]:
            make = jax.make_jaxpr(function, axis_env=self._env, return_shape=True)
            closed, shapes = traced_inside(mesh, self._scope.checked, lambda: make(*args))
            shapes = jax.tree.structure(shapes).unflatten(varying_shapes(closed.jaxpr.outvars))
            body = self.moved(closed.jaxpr, replace(self._scope, in_rule=True))
            if wrong := [name for name in self._scope.blocks if _of_a_map(name) in axes_named(body.eqns)]:
                rule = "in a map, a derivative of one's own has collectives over axes of a rank, and no other"
                raise _error(eqn, rule, f"the axis {wrong[0]!r}", "leave the axis out there, or the function out of the map")
            return jaxpr_as_fun(ClosedJaxpr(body, closed.consts)), shapes

        def inexact(args: Sequence[_T]) -> list[_T]:
            return list(itertools.compress(args, varies))

        if kind_of(eqn) == "custom_jvp":
            rule, _ = moved(lambda args, tangents: jax.jvp(of_inexact(args), inexact(args), tangents), avals, inexact(avals))
            function = jax.custom_jvp(primal)

            @function.defjvp
            def _(args: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                results = rule(*args, *inexact(tangents))
                return results[: len(eqn.outvars)], results[len(eqn.outvars) :]
        else:
            forward, (outs, pullback) = moved(lambda *args: jax.vjp(of_inexact(args), *inexact(args)), *avals)
            backward, _ = moved(lambda pullback, cotangents: pullback(cotangents), pullback, outs)
            function = jax.custom_vjp(primal)

            def kept(*args: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
                results = forward(*args)
                return results[: len(eqn.outvars)], results[len(eqn.outvars) :]

            def pulled(residuals: list[jax.Array], cotangents: list[jax.Array]) -> tuple[jax.Array | None, ...]:
                supply = iter(backward(*residuals, *cotangents))
                return tuple(next(supply) if want else None for want in varies)

            function.defvjp(kept, pulled)
        return self._made(eqn, function)

    def _made(self, eqn: JaxprEqn, function: Callable[..., Tree]) -> Sequence[Atom]:
        """The equations of a function of an equation's operands, in the equation's module."""
        scope = self._scope
        checked = set(map(self._rank_axis, scope.checked)).intersection(scope.mesh.manual_axes).difference(self._outside)
        env = self._env
        if scope.blocks:  # where nothing is checked
            checked = set[str]()
            shards = [(name, self._sizes[name]) for name in scope.mesh.manual_axes if name not in dict(env)]
            env = (*env, *shards, *((_of_a_map(name), size) for name, size in scope.blocks.items()))
        eqns, results = traced_inside(scope.mesh, checked, lambda: equations_of(function, eqn.invars, env))
        self._lines += [each.replace(source_info=eqn.source_info) for each in eqns]
        return results

    def _parameter(self, name: str, value: Tree) -> Tree:
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(self.moved(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            return self.moved(value)
        if isinstance(value, (Mesh, AbstractMesh)):
            return self._scope.mesh
        if isinstance(value, NamedSharding):
            return _UNSPECIFIED if name in ("in_shardings", "out_shardings") else None
        if is_typed(value):  # a kernel says so of its results and of the blocks of its operands
            return aval_of(self._fresh(Var(value)))
        return value

    def _constraint(self, eqn: JaxprEqn, sharding: Sharding) -> Sequence[Atom]:
        """A constraint over the axes of a rank; none where these have one device each, or are manual already."""
        operands = eqn.invars[:1]
        if not isinstance(sharding, NamedSharding):
            return operands
        spec = self._spec(eqn, sharding.spec, sharding.mesh.shape, self._scope.blocks)
        if not [name for name in self._scope.mesh.auto_axes if self._divides(name)]:
            return operands
        return self._made(eqn, lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(self._scope.mesh, spec)))

    def _map(self, eqn: JaxprEqn, mapped: ShardMap) -> Sequence[Atom]:
        scope = self._scope
        sizes = mapped.mesh.shape
        mine = [name for name in mapped.manual if self._divides(name) and self._rank_axis(name) not in scope.mesh.manual_axes]
        mine = [name for name in mine if sizes[name] == self._sizes[self._rank_axis(name)]]
        named = axes_named(mapped.body.eqns).union(*map(axes_of_spec, mapped.specs))
        able = named.intersection(mapped.manual).difference(mine)
        blocks = {name: size for name, size in sizes.items() if name in able and size > 1}
        if blocks and scope.checked:
            fix = "pass check_vma=False to the outer map, or map over all axes at once"
            raise _error(eqn, "a map inside a map is over axes of a rank", f"the axis {next(iter(blocks))!r}", fix)
        checked = scope.checked | mapped.manual if mapped.checked else frozenset()
        gone = {**scope.gone, **{name: sizes[name] for name in mapped.manual.difference(mine) if name not in blocks}}
        inside = replace(scope, gone=gone, checked=checked, blocks={**scope.blocks, **blocks})
        if not mine and not blocks:
            with self._within(inside, self._lines):
                return self.call(mapped.body, eqn.invars)
        inside = replace(inside, mesh=scope.mesh.update_axis_types(dict.fromkeys(map(self._rank_axis, mine), AxisType.Manual)))
        specs = tuple(self._spec(eqn, spec, sizes, inside.blocks) for spec in mapped.specs)
        manual = frozenset(map(self._rank_axis, mine))
        if inside.blocks:
            run: Callable[..., Tree] = jaxpr_as_fun(ClosedJaxpr(self.moved(mapped.body, inside), ()))
            ins, outs = specs[: len(eqn.invars)], specs[len(eqn.invars) :]
            if mine:
                run = jax.shard_map(run, in_specs=ins, out_specs=list(outs), axis_names=set(manual), check_vma=False)
            return self._made(eqn, _by_blocks(run, mapped.specs, sizes, blocks))
        new = ShardMap(self.moved(mapped.body, inside), scope.mesh, specs, manual, mapped.checked)
        return self._on_rank(with_shard_map(eqn, new))

    def _collective(self, eqn: JaxprEqn, names: Sequence[str]) -> Sequence[Atom]:
        scope = self._scope
        kind = kind_of(eqn)
        if scope.blocks and kind in _VARYING:
            return eqn.invars
        if found := [name for name in names if name in scope.blocks]:
            others = [name for name in names if name not in scope.blocks]
            if others and kind not in _REDUCTIONS:
                rule = (
                    f"in a map, a rank computes all blocks along {found[0]!r} itself, and its devices share those along "
                    f"{others[0]!r}: no collective is over both at once but a sum, a maximum or a minimum"
                )
                raise _error(eqn, rule, f"{kind} over {', '.join(map(repr, names))}", "call one collective for each axis")
            eqn = _renamed(eqn, [_of_a_map(name) for name in found])
            results = self._on_rank(eqn)
            return self._collective(_renamed(eqn, others).replace(invars=list(results)), others) if others else results
        if scope.blocks:
            eqn = _renamed(eqn, names)
        wrong = [name for name in names if scope.gone.get(name, 1) > 1]
        if wrong and kind not in _VARYING:
            rule = "a collective inside shard_map is one between the shards of a rank"
            outside = "leave the axis out of axis_names, and call the collective outside of shard_map"
            fix = outside if self._rank_axis(wrong[0]) == DATA else _FIX
            raise _error(eqn, rule, f"{kind.removesuffix('_invariant')} over {wrong[0]!r}", fix)
        kept = [name for name in names if name not in scope.gone and self._divides(name)]
        own = tuple(dict.fromkeys(map(self._rank_axis, kept)))
        counts = {axis: math.prod(self._count[name] for name in kept if self._rank_axis(name) == axis) for axis in own}
        parts = [axis for axis in own if counts[axis] != self._sizes[axis]]
        if parts or (kept and len(own) < len(names) and "axes" not in eqn.params):
            rule = "a collective is over all axes that stand for the same axis of a rank, and no other"
            fix = f"name all axes that stand for {parts[0]!r}" if parts else _FIX
            raise _error(eqn, rule, f"{kind} over {', '.join(map(repr, names))}", fix)
        if kept:
            name = "axes" if "axes" in eqn.params else "axis_name"
            value = own if isinstance(eqn.params[name], tuple) else own[0]
            return self._on_rank(eqn.replace(params={**eqn.params, name: value}))
        if kind in _VARYING or kind in _REDUCTIONS:
            return eqn.invars
        bind: Callable[..., Tree] = lambda *args: eqn.primitive.bind(*args, **eqn.params)  # noqa: E731
        for name in names:  # of one device each
            bind = _alone(bind, name)
        return self._made(eqn, bind)

    def _spec(self, eqn: JaxprEqn, spec: PartitionSpec, sizes: Mapping[str, int], blocks: Mapping[str, int]) -> PartitionSpec:
        """A sharding over the axes of a rank that are not manual."""
        wrong = [
            name
            for given in spec
            for name in axis_names(given)
            if self._rank_axis(name) not in (*self._sizes, PIPE, DATA, MODEL) and sizes[name] > 1 and name not in blocks
        ]
        if wrong and self._sizes:
            rule = f"inside a stage, values are sharded over the axes of a rank: {', '.join(map(repr, self._sizes))}"
            raise _error(eqn, rule, f"the axis {wrong[0]!r}")

        def entry(given: Tree) -> Tree:
            names = dict.fromkeys(self._rank_axis(name) for name in axis_names(given) if self._divides(name) and name not in blocks)
            own = tuple(name for name in names if name not in self._scope.mesh.manual_axes)
            return given if given is PartitionSpec.UNCONSTRAINED else own or None

        return PartitionSpec(*map(entry, spec))

    def _divides(self, name: str) -> bool:
        """Whether a rank has several devices along an axis."""
        return self._sizes.get(self._rank_axis(name), 1) > 1

    def _rank_axis(self, name: str) -> str:
        """What an axis is called on a rank."""
        return self._axis.get(name, name)

    def _fresh(self, atom: Atom) -> Leaf:
        divided = (lambda _: False) if self._scope.blocks else self._divides
        return on_mesh(atom, self._scope.mesh, lambda names: [self._rank_axis(name) for name in names if divided(name)])

    def _bound(self, effects: Iterable[_T]) -> frozenset[_T]:
        """The effects without those that name an axis which programs on a rank do not have."""
        return frozenset(each for each in effects if self._divides(getattr(each, "name", "") or "") or not is_named(each))


_VARYING = frozenset({"pvary", "pcast"})  # Kinds that say along which axes a value varies, and do nothing
_REDUCTIONS = frozenset({"psum", "psum_invariant", "pmax", "pmin"})  # Kinds that give back what the only device along an axis has
_CALLBACKS = frozenset({"pure_callback", "io_callback"})
_UNSPECIFIED = jax.make_jaxpr(jax.jit(lambda: 0))().eqns[0].params["out_shardings"][0]


def axis_names(entry: Tree) -> tuple[str, ...]:
    """The axes in an entry of a ``PartitionSpec``."""
    return entry if isinstance(entry, tuple) else () if entry is None or entry is PartitionSpec.UNCONSTRAINED else (entry,)


def axes_of_spec(spec: PartitionSpec) -> list[str]:
    """The axes in a ``PartitionSpec``, as often as they are there."""
    return [axis for entry in spec for axis in axis_names(entry)]


def _of_a_map(name: str) -> str:
    """What the axis of a map is called whose blocks one rank computes, so that it is not taken for one of the rank."""
    return f"{name} of a map"


_SUM = jax.make_jaxpr(lambda x: jax.lax.psum(x, "axis"), axis_env=[("axis", 2)])(1.0).eqns[0]


def _renamed(eqn: JaxprEqn, names: Sequence[str]) -> JaxprEqn:
    """A collective over axes of these names where nobody checks along which of them values vary."""
    name = "axes" if "axes" in eqn.params else "axis_name"
    if kind_of(eqn) == "psum_invariant":
        return eqn.replace(primitive=_SUM.primitive, params={**_SUM.params, name: tuple(names)})
    return eqn.replace(params={**eqn.params, name: tuple(names) if isinstance(eqn.params[name], tuple) else names[0]})


def _by_blocks(
    function: Callable[..., Tree], specs: Sequence[PartitionSpec], sizes: Mapping[str, int], blocks: Mapping[str, int]
) -> Callable[..., list[Leaf]]:
    """A function of a block of each operand as one of whole operands, which makes whole results.

    ``specs``: of operands and results, over axes of these ``sizes``. Of these, ``blocks`` are the axes that number the blocks.
    """

    def entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
        return [axis_names(entry) for entry in spec] + [()] * (ndim - len(spec))

    def divided(x: Leaf, spec: PartitionSpec) -> Leaf:
        """The blocks along axes in front."""
        shape, first, others = [], {}, []
        for names, size in zip(entries(spec, x.ndim), x.shape, strict=True):
            first |= {name: len(shape) + k for k, name in enumerate(names) if name in blocks}
            parts = [*(sizes[name] for name in names), size // math.prod(sizes[name] for name in names)]
            others.append([len(shape) + k for k in range(len(parts)) if k == len(names) or names[k] not in blocks])
            shape += parts
        order = [first[name] for name in blocks if name in first]
        own = [math.prod(shape[k] for k in each) for each in others]
        moved = x.reshape(shape).transpose([*order, *itertools.chain(*others)])
        return moved.reshape([*(shape[k] for k in order), *own])

    def joined(x: Leaf, spec: PartitionSpec) -> Leaf:
        """What ``divided`` makes the blocks of; along axes that the result does not have, all are the same."""
        of_each = entries(spec, x.ndim - len(blocks))
        named = set(itertools.chain(*of_each))
        x = x[tuple(slice(None) if name in named else 0 for name in blocks)]
        front = [name for name in blocks if name in named]
        shape, order = [blocks[name] for name in front], []
        whole = []
        for names, size in zip(of_each, x.shape[len(front) :], strict=True):
            inner = [sizes[name] for name in names if name not in blocks]
            at = iter(range(len(shape), len(shape) + len(inner)))
            order += [front.index(name) if name in blocks else next(at) for name in names] + [len(shape) + len(inner)]
            shape += [*inner, size // math.prod(inner)]
            whole.append(size * math.prod(blocks[name] for name in names if name in blocks))
        return x.reshape(shape).transpose(order).reshape(whole)

    def run(*args: Leaf) -> list[Leaf]:
        ins, outs = specs[: len(args)], specs[len(args) :]
        of_all = function
        for name in reversed(list(blocks)):
            axes = tuple(0 if name in itertools.chain(*map(axis_names, spec)) else None for spec in ins)
            of_all = jax.vmap(of_all, axes, 0, axis_name=_of_a_map(name), axis_size=blocks[name])
        results = of_all(*map(divided, args, ins))
        return list(map(joined, results, outs))

    return run


def _alone(function: Callable[..., Tree], axis: str) -> Callable[..., Tree]:
    """A function that communicates along an axis of one device."""

    def run(*args: Leaf) -> Tree:
        many = jax.vmap(function, in_axes=0, out_axes=0, axis_name=axis, axis_size=1)
        return jax.tree.map(lambda x: x[0], many(*(x[None] for x in args)))

    return run


def _on_the_first(call: Callable[..., Tree], axes: tuple[str, ...]) -> Callable[..., Tree]:
    """A call with effects and no results that the first device along some axes makes."""

    def run(*args: Leaf) -> list[Leaf]:
        return jax.lax.cond(jax.lax.axis_index(axes) == 0, lambda *given: list(call(*given)), lambda *_: [], *args)

    return run


def _error(eqn: JaxprEqn, rule: str, got: str, fix: str = _FIX) -> LossError:
    line = user_line(eqn)
    return LossError("the sharding inside the loss", rule, f"{got}, at {line}" if line else got, fix)
