"""What jaxpp knows of the insides of a jaxpr: the one file to edit when JAX changes them.

JAX promises nothing about names of primitives, parameters of equations, kinds of effects, or the name stack; each fact is checked
in ``tests/stages/test_jaxpr.py``. Other files use ``eqns``, ``invars``, ``outvars``, ``effects`` and ``primitive``.
"""

import dataclasses
import functools
import math
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding, use_abstract_mesh

from jaxpp.errors import LossError
from jaxpp.types import Aval, Leaf, Tree

_T = TypeVar("_T")

Atom = Var | Literal  # What an equation reads: a variable or a number

Checkpoint = Callable[[Callable[..., Tree]], Callable[..., Tree]]  # Puts a function under ``jax.checkpoint``

_RENAMED = {"remat2": "checkpoint", "copy_p": "copy", "custom_vjp_call": "custom_vjp", "custom_jvp_call": "custom_jvp"}
CALLS = frozenset({"jit", "closed_call", "core_call", "program_order"})  # Kinds of equations that only call a function
CUSTOM_RULES = frozenset({"custom_jvp", "custom_vjp"})  # Kinds of equations that call a function with a derivative of its own
CHECKPOINTS = frozenset({"checkpoint"})  # Kinds of equations that call a function under ``jax.checkpoint``

LAYOUT = frozenset("broadcast_in_dim reshape squeeze expand_dims iota copy stop_gradient".split())  # the compiler folds them away
CHEAP = LAYOUT | frozenset(
    "convert_element_type slice select_n transpose rev pad concatenate stack eq ne lt le gt ge and or not xor add sub mul div rem "
    "neg max min abs sign exp log sqrt rsqrt pow integer_pow clamp floor ceil round is_finite shift_left shift_right_logical "
    "shift_right_arithmetic bitcast_convert_type random_wrap random_unwrap random_fold_in random_split random_seed "
    "random_clone square".split()
)  # Kinds that cost less to run again than their result costs to send
FREE = LAYOUT | frozenset(
    "transpose slice dynamic_slice concatenate stack convert_element_type pad rev gather random_wrap random_unwrap split "
    "bitcast_convert_type".split()
)  # Kinds that compute nothing: they move, lay out or convert
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex convert_element_type copy cos cosh "
    "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt max min "
    "mul ne neg nextafter not or population_count pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor".split()
)  # Kinds that compute each element of the result from the elements at its own place alone
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor argmax argmin".split())
ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), "axis"),
    **dict.fromkeys(("sort", "concatenate"), "dimension"),
}  # Kinds that work along one axis and leave the others as they are, with the name of the parameter that says along which
MATRIX = frozenset(
    "cholesky triangular_solve lu qr eigh eig svd schur householder_product lu_pivots_to_permutation tridiagonal_solve "
    "tridiagonal hessenberg cholesky_update geqrf ormqr symmetric_product".split()
)  # Kinds that do something with matrices, which lie along the last two axes
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
_COMPARISONS = frozenset({"max", "min", "clamp", "lt", "le", "gt", "ge", "reduce_window_max", "reduce_window_min"})
_ON_HOST = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback"})

_OF_KERNELS = frozenset({"GridMapping", "BlockMapping"})  # Parameters of ``pallas_call`` with shapes and functions inside
_ATTENTION = re.compile(r"dot_product_attention_(?:fp8_)?(?P<way>fwd|bwd)")
_SHAPED = type(jax.make_jaxpr(jax.lax.neg)(1.0).in_avals[0])

_OWN = str(pathlib.Path(__file__).parents[1])
_EMPTY: Jaxpr = jax.make_jaxpr(lambda: ())().jaxpr


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are variables, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def aval_of(atom: Atom) -> Any:
    """Shape and dtype of a variable or a number."""
    return atom.aval


def describe(aval: Aval) -> str:
    """A shape as people write it: ``f32[8,64]``."""
    short = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c"}
    name = str(aval.dtype)
    letters = name.rstrip("0123456789")
    return f"{short.get(letters, letters)}{name[len(letters) :]}[{','.join(map(str, aval.shape))}]"


def shapes_of(atoms: Iterable[Atom | Aval]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each variable, abstract value or array."""
    avals = (aval_of(atom) if isinstance(atom, (Var, Literal)) else atom for atom in atoms)
    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


def varying_shapes(atoms: Iterable[Atom]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each, and along which axes of its mesh it varies (inside a ``jax.shard_map``) or is said to be divided."""

    def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
        aval = aval_of(atom)
        manual, sharding = getattr(aval, "manual_axis_type", None), getattr(aval, "sharding", None)
        if manual is None or not manual.varying:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if sharding and any(sharding.spec) else None)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=manual)

    return tuple(map(shape_of, atoms))


def traced_inside(mesh: AbstractMesh, mapped: Collection[str], trace: Callable[[], _T]) -> _T:
    """What ``trace`` finds with ``mesh`` in force, inside a ``jax.shard_map`` over ``mapped`` that checks how values vary."""
    found: list[_T] = []
    outside = mesh.update_axis_types(dict.fromkeys(mapped, AxisType.Auto))
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(outside):  # JAX goes from one to another by none
        if not mapped:
            return trace()
        run = jax.shard_map(lambda: found.append(trace()), in_specs=(), out_specs=None, axis_names=set(mapped))
        jax.eval_shape(run)
    return found[0]


def new_variable(like: Atom, shape: tuple[int, ...] | None = None) -> Var:
    """A variable like another, with another shape if one is given."""
    return Var(aval_of(like) if shape is None else aval_of(like).update(shape=shape))


def number_in(atom: Atom) -> Leaf | None:
    """The scalar that stands in an equation; None for a variable."""
    return atom.val if isinstance(atom, Literal) and np.ndim(atom.val) == 0 else None


def function_of(eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Callable[..., list[jax.Array]]:
    """The function of ``inputs`` that runs the equations and returns ``outputs``."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    jaxpr = _EMPTY.replace(invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))


def equations_of(
    function: Callable[..., Tree], atoms: Sequence[Atom], env: Sequence[tuple[str, int]] = ()
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations that compute ``function`` of these atoms, with variables of their own; and its results.

    ``env``: the axes over which it may communicate.
    """
    return equations_at(jax.make_jaxpr(function, axis_env=env)(*varying_shapes(atoms)), atoms)


def equations_at(closed: ClosedJaxpr, atoms: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of what was traced at shapes of these atoms, with variables of their own; and its results."""
    jaxpr = closed.jaxpr
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, atoms, strict=True))
    names |= {var: Literal(np.asarray(value), var.aval) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    names |= {var: Var(var.aval) for eqn in jaxpr.eqns for var in eqn.outvars}

    def renamed(inner: Iterable[Atom]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else names[atom] for atom in inner]

    eqns = [eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars)) for eqn in jaxpr.eqns]
    return eqns, renamed(jaxpr.outvars)


def called(eqn: JaxprEqn, opened: Collection[str]) -> ClosedJaxpr | None:
    """The function that an equation calls, if the equation is of one of the kinds ``opened``."""
    if kind_of(eqn) not in opened:
        return None
    named = [eqn.params.get(name) for name in ("jaxpr", "call_jaxpr", "call")]
    higher = eqn.params.get("_prim")  # ``jax.checkpoint`` and ``jax.custom_vjp`` under ``jax_remat3`` and ``jax_custom_vjp3``
    named += [getattr(higher, "jaxpr", None), getattr(getattr(higher, "traced", None), "jaxpr", None)]
    inner = next((each for each in named if isinstance(each, (Jaxpr, ClosedJaxpr))), None)
    return ClosedJaxpr(inner, []) if isinstance(inner, Jaxpr) else inner


def only_names(eqn: JaxprEqn) -> bool:
    """Whether an equation only gives its operand a name for the policies of ``jax.checkpoint``, which ``jax_remat3`` writes so."""
    return kind_of(eqn) == "name" or type(eqn.params.get("_prim")).__name__ == "CheckpointName"


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The bodies of a loop, a branch or a call."""
    values = [item for value in eqn.params.values() for item in (value if isinstance(value, (tuple, list)) else (value,))]
    bodies = [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in values]
    return [body for body in bodies if isinstance(body, Jaxpr)]


def all_equations(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """The equations, and after each those inside it: of bodies of loops, of branches, and of what is called."""
    for eqn in eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner.eqns)


def needed_of(eqns: Sequence[JaxprEqn], outputs: Iterable[Atom], stays: Callable[[JaxprEqn], bool]) -> list[int]:
    """The numbers of the equations whose results somebody reads, of those that ``outputs`` are made of, or that must stay."""
    read, kept = set(variables(outputs)), list[int]()
    for i in reversed(range(len(eqns))):
        if stays(eqns[i]) or not read.isdisjoint(eqns[i].outvars):
            kept.append(i)
            read.update(variables(eqns[i].invars))
    return kept[::-1]


def work_of(eqn: JaxprEqn, of_body: Callable[[Jaxpr], float]) -> float | None:
    """What an equation with functions inside it takes: as long as the longest branch, as often as a loop runs; None without any."""
    inner, length = list(map(of_body, inner_jaxprs(eqn))), length_of(eqn)
    return max(inner) * (1 if length is None else length) if inner else None


def _changed_inside(jaxpr: Jaxpr, change: Callable[[JaxprEqn], JaxprEqn]) -> Jaxpr:
    """A jaxpr with each equation changed, or, of one that is not, those of its bodies; the same one if nothing is."""
    known: dict[Jaxpr, Jaxpr] = {}

    def parameter(_: str, value: Tree) -> Tree:
        if isinstance(value, ClosedJaxpr):
            inner = body(value.jaxpr)
            return value if inner is value.jaxpr else ClosedJaxpr(inner, value.consts)
        return body(value) if isinstance(value, Jaxpr) else value

    def inside(eqn: JaxprEqn) -> JaxprEqn:
        return eqn if all(body(inner) is inner for inner in inner_jaxprs(eqn)) else with_params(eqn, parameter)

    def body(jaxpr: Jaxpr) -> Jaxpr:
        if jaxpr not in known:
            eqns = [changed if (changed := change(eqn)) is not eqn else inside(eqn) for eqn in jaxpr.eqns]
            same = all(map(operator.is_, eqns, jaxpr.eqns))
            known[jaxpr] = jaxpr if same else jaxpr.replace(eqns=eqns)
        return known[jaxpr]

    return body(jaxpr)


_REFS = frozenset({"InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect"})
_CALLBACKS = frozenset({"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect", "BufferCallbackEffect", "FfiEffect"})
TAKEN = frozenset({"NamedAxisEffect", "NoDCEEffect"}) | _CALLBACKS  # Kinds of effects that programs of stages may have


def _kinds_of(effects: Iterable[object]) -> set[str]:
    return {type(effect).__name__ for effect in effects}


def effects_not_taken(eqn: JaxprEqn) -> list[str]:
    """The kinds of effects of an equation of which nobody knows what becomes of them in a pipeline."""
    return sorted(_kinds_of(eqn.effects) - TAKEN)


def _is_ref(atom: Atom) -> bool:
    return hasattr(aval_of(atom), "inner_aval")


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    eqn: JaxprEqn


_HELD = Primitive("held")  # stands for an equation that is left as it is
_HELD.multiple_results = True
_HELD.def_effectful_abstract_eval(lambda *_, held: (list(map(aval_of, held.eqn.outvars)), held.eqn.effects))


def without_refs(closed: ClosedJaxpr, env: Sequence[tuple[str, int]] = ()) -> ClosedJaxpr:
    """A function that makes ``jax.Ref``s of its own as one of values alone, as JAX itself makes it before it compiles.

    JAX takes all derivatives before, and forgets rules of custom derivatives then; so what has no reference in it is hidden.

    Raises:
        LossError: a reference was made outside of the function, or goes into a function with a derivative of its own; or what JAX
            says.
    """
    if any(map(_is_ref, (*closed.jaxpr.constvars, *closed.jaxpr.invars))):
        rule = "a jax.Ref that a pipeline's function writes or reads is made in it: the programs of stages share none"
        fix = "pass what it holds as the model state (has_state=True) or in the batch, and return what is to be kept"
        raise LossError("jax.new_ref", rule, "a jax.Ref from outside of the function", fix)
    if not _REFS & _kinds_of(closed.effects):
        return closed

    def hidden(eqn: JaxprEqn) -> JaxprEqn:
        has_refs, plain = any(map(_is_ref, (*eqn.invars, *eqn.outvars))), called(eqn, CUSTOM_RULES)
        if plain is not None and has_refs:
            rule = "a function with a derivative of its own takes values, and makes the references that it works on itself"
            got = f"a jax.Ref as an operand of {eqn.primitive.name} ({user_line(eqn) or 'in no file'})"
            raise LossError("jax.new_ref", rule, got, "pass ref[...] to it, and write what it returns")
        if plain is not None and _REFS & _kinds_of(eqn.effects):
            inner = without_refs(plain, env)
            eqn = eqn.replace(params={**eqn.params, "call_jaxpr": inner}, effects=inner.effects)
        if has_refs or _REFS & _kinds_of(eqn.effects):
            return eqn
        return eqn.replace(primitive=_HELD, params={"held": _Held(eqn)})

    def shown(eqn: JaxprEqn) -> JaxprEqn:
        return eqn.params["held"].eqn.replace(invars=eqn.invars, outvars=eqn.outvars) if eqn.primitive is _HELD else eqn

    stateful = ClosedJaxpr(_changed_inside(closed.jaxpr, hidden), closed.consts)
    try:
        found = _discharged(stateful, env)
    except Exception as error:
        rule, got = "a jax.Ref is made into values, as JAX does before it compiles", f"JAX says: {type(error).__name__}: {error}"
        raise LossError("jax.new_ref", rule, got, "write that part without one, with .at[...].set") from error
    return ClosedJaxpr(_changed_inside(found.jaxpr, shown), found.consts)


def _discharged(closed: ClosedJaxpr, env: Sequence[tuple[str, int]]) -> ClosedJaxpr:
    """What JAX makes of a function with references: what ``run_state`` does when it runs, here while it is traced."""
    from jax.experimental import pallas  # noqa: PLC0415  (takes a tenth of a second, and few functions have references)

    run, outs = jaxpr_as_fun(closed), list(map(aval_of, closed.jaxpr.outvars))

    def stateful(*args: jax.Array) -> list[jax.Array]:
        def write(refs: Sequence[Tree]) -> None:
            for ref, value in zip(refs, run(*args), strict=True):
                ref[...] = value

        return pallas.run_state(write)([jnp.zeros(out.shape, out.dtype) for out in outs])

    made = jax.make_jaxpr(stateful, axis_env=env)(*varying_shapes(closed.jaxpr.invars))
    *before, state = made.eqns
    given = jaxpr_as_fun(ClosedJaxpr(made.jaxpr.replace(eqns=before, outvars=list(state.invars), effects=frozenset()), made.consts))

    def values(*args: jax.Array) -> list[jax.Array]:
        return state.primitive.impl(*given(*args), **state.params)[len(state.outvars) - len(outs) :]

    return jax.make_jaxpr(values, axis_env=env)(*varying_shapes(closed.jaxpr.invars))


@dataclasses.dataclass(frozen=True)
class _OnDevice:
    """A policy of ``jax.checkpoint`` that keeps where it is what another one sends to host memory."""

    policy: Callable[..., object]

    def __call__(self, *args: object, **params: object) -> object:
        said = self.policy(*args, **params)
        return True if _offloads(said) else said


def _offloads(said: object) -> bool:
    return hasattr(said, "src") and hasattr(said, "dst")  # as ``jax.checkpoint_policies`` say it, in place of True or False


def kept_on_device(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations of which no ``jax.checkpoint`` sends to host memory what it keeps; those that send nothing there as they are."""

    def changed(eqn: JaxprEqn) -> JaxprEqn:
        policy = eqn.params.get("policy") if kind_of(eqn) in CHECKPOINTS else None
        if policy is None:
            return eqn
        inner = {name: _changed_inside(value, changed) for name, value in eqn.params.items() if isinstance(value, Jaxpr)}
        said = (
            policy(each.primitive, *map(aval_of, each.invars), **each.params) for each in all_equations([eqn]) if each is not eqn
        )
        return eqn.replace(params={**eqn.params, **inner, "policy": _OnDevice(policy)}) if any(map(_offloads, said)) else eqn

    return _changed_inside(_EMPTY.replace(eqns=list(eqns)), changed).eqns


def checkpoint_like(eqn: JaxprEqn) -> Checkpoint:
    """A wrapper that checkpoints a function in the way that this ``jax.checkpoint`` does."""
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    return lambda function: jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


class FunctionCall(NamedTuple):
    """A call of a function."""

    body: ClosedJaxpr
    reads: tuple[int, ...] | None = None  # the numbers of the operands that it is given; None: of all


class Scan(NamedTuple):
    """A ``lax.scan``."""

    body: ClosedJaxpr
    num_before: int  # operands that have no rows: constants, then what is carried
    num_fixed: int  # how many of them are constants
    num_carry: int
    length: int
    reverse: bool  # whether the last iteration runs first
    unroll: int | bool  # as ``lax.scan`` takes it

    def split(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """The constants, what is carried, and what the loop runs over."""
        fixed, before = self.num_fixed, self.num_before
        return list(operands[:fixed]), list(operands[fixed:before]), list(operands[before:])


class While(NamedTuple):
    """A ``lax.while_loop``."""

    test: ClosedJaxpr
    body: ClosedJaxpr
    num_tested: int  # operands that only the test reads
    num_fixed: int  # and then those that the body reads, before what is carried

    def split(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """The constants of the test, those of the body, and what is carried."""
        tested, before = self.num_tested, self.num_tested + self.num_fixed
        return list(operands[:tested]), list(operands[tested:before]), list(operands[before:])


class Cond(NamedTuple):
    """A ``lax.cond`` or ``lax.switch``: its branches are functions of all operands but the first, which chooses."""

    branches: tuple[ClosedJaxpr, ...]


Inner = FunctionCall | Scan | While | Cond


def inner_of(eqn: JaxprEqn, kinds: Collection[str]) -> Inner | None:
    """The call, loop or choice that an equation is; None if its kind is none of ``kinds``, or its form is not known here."""
    kind = kind_of(eqn)
    if kind not in kinds:
        return None
    if kind == "scan":
        return scan_of(eqn)
    try:
        if kind == "while":
            names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
            return While(*(eqn.params[name] for name in names))
        if kind == "cond":
            return Cond(tuple(eqn.params["branches"]))
        if kind == "custom_linear_solve":
            lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
            before = lengths.matvec + lengths.vecmat
            return FunctionCall(solve, (*range(before, before + lengths.solve), *range(sum(lengths), len(eqn.invars))))
    except KeyError:  # another version of JAX has other parameters
        return None
    body = called(eqn, kinds)
    return None if body is None else FunctionCall(body)


def scan_of(eqn: JaxprEqn) -> Scan | None:
    """The ``lax.scan`` as a loop, operands told apart by shape; None for anything else, and if it closes over arrays."""
    if kind_of(eqn) != "scan":
        return None
    body = eqn.params["jaxpr"]
    body = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, list(getattr(body, "consts", ())))
    if body.consts:
        return None
    pairs = [(aval_of(a).shape, aval_of(b).shape) for a, b in zip(eqn.invars, body.jaxpr.invars, strict=True)]
    results = [(aval_of(a).shape, aval_of(b).shape) for a, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True)]
    before, carry = (sum(whole == inside for whole, inside in shapes) for shapes in (pairs, results))
    params = eqn.params
    return Scan(body, before, before - carry, carry, params["length"], params["reverse"], params["unroll"])


def length_of(eqn: JaxprEqn) -> int | None:
    """The iterations of a ``lax.scan``; None for anything else."""
    return eqn.params["length"] if kind_of(eqn) == "scan" else None


def with_body(eqn: JaxprEqn, body: ClosedJaxpr) -> JaxprEqn:
    """A ``lax.scan`` with another body of the same signature."""
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def kind_of(eqn: JaxprEqn) -> str:
    """What an equation does: the name of its primitive, the same in all versions of JAX."""
    return _RENAMED.get(eqn.primitive.name, eqn.primitive.name)


def mesh_of(eqn: JaxprEqn) -> AbstractMesh:
    """The mesh that was in force when an equation was traced, or on which its operands are; an empty one for none."""
    shardings = [getattr(aval_of(atom), "sharding", None) for atom in eqn.invars]
    meshes = [eqn.ctx.cur_abstract_mesh, *(sharding.mesh for sharding in shardings if sharding is not None)]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def in_mesh(eqn: JaxprEqn, mesh: AbstractMesh) -> JaxprEqn:
    """An equation as if it had been traced with another mesh in force."""
    with eqn.ctx.manager, use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):  # JAX goes from one to another by none
        return eqn.replace(ctx=jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx)


def on_mesh(atom: Atom, mesh: AbstractMesh, renamed: Callable[[Iterable[str]], Iterable[str]]) -> Atom:
    """A variable like another, or a number, where another mesh is in force; ``renamed`` says along which axes there it varies."""
    aval = aval_of(atom)
    if hasattr(aval, "inner_aval"):  # a reference, as kernels have
        aval = aval.update(inner_aval=aval_of(on_mesh(Var(aval.inner_aval), mesh, renamed)))
    elif hasattr(aval, "sharding"):
        sharding, manual = NamedSharding(mesh, PartitionSpec(*[None] * len(aval.shape))), aval.manual_axis_type
        sets = {name: frozenset(renamed(getattr(manual, name))) for name in ("varying", "unreduced", "reduced")}
        aval = aval.update(sharding=sharding, manual_axis_type=type(manual)(**sets))
    if isinstance(atom, Literal):
        return Literal(atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val, aval)  # an array knows its mesh
    return Var(aval)


_CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})


def constraint_of(eqn: JaxprEqn) -> Sharding | None:
    """How an equation says that its operand is sharded; None for an equation that does something else."""
    if kind_of(eqn) not in _CONSTRAINTS:
        return None
    return eqn.params.get("sharding", eqn.params.get("dst_sharding"))


def without_sharding(eqn: JaxprEqn, axis: int) -> JaxprEqn:
    """An equation that says nothing of how an axis of its operand is sharded; one that says nothing at all is the same."""

    def changed(_: str, value: Tree) -> Tree:
        if not isinstance(value, NamedSharding):
            return value
        entries = [None if k == axis else entry for k, entry in enumerate(value.spec)]
        return NamedSharding(value.mesh, PartitionSpec(*entries))

    return eqn if constraint_of(eqn) is None else with_params(eqn, changed)


class ShardMap(NamedTuple):
    """A ``jax.shard_map``."""

    body: Jaxpr
    mesh: AbstractMesh
    specs: tuple[PartitionSpec, ...]  # of operands and results
    manual: frozenset[str]  # the axes over which it maps
    checked: bool  # whether JAX checks there along which axes values vary


def shard_map_of(eqn: JaxprEqn) -> ShardMap | None:
    """The equation as a ``jax.shard_map``; None for anything else."""
    if kind_of(eqn) != "shard_map":
        return None
    params = eqn.params
    manual = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    specs = (*params["in_specs"], *params["out_specs"])
    return ShardMap(params["jaxpr"], params["mesh"].abstract_mesh, specs, frozenset(manual), params["check_vma"])


def with_shard_map(eqn: JaxprEqn, new: ShardMap) -> JaxprEqn:
    """The ``jax.shard_map`` of another body, over other axes."""
    params, split = dict(eqn.params), len(eqn.params["in_specs"])
    params |= {"jaxpr": new.body, "mesh": new.mesh, "in_specs": new.specs[:split], "out_specs": new.specs[split:]}
    name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    return eqn.replace(params=params | {name: new.manual})


def is_named(effect: object) -> bool:
    """Whether an effect only says that a mesh axis is named."""
    return type(effect).__name__ == "NamedAxisEffect"


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The names of mesh axes over which a collective, or ``axis_index``, works; empty for anything else."""
    if kind_of(eqn) == "shard_map":
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axis for axis in (axes if isinstance(axes, (tuple, list, frozenset)) else [axes]) if isinstance(axis, str))


def is_typed(value: object) -> bool:
    """Whether a parameter of an equation is a shape with its mesh, or a reference to an array of such a shape."""
    return isinstance(value, _SHAPED) or (hasattr(value, "inner_aval") and not isinstance(value, (Var, Literal)))


def with_params(eqn: JaxprEqn, changed: Callable[[str, Tree], Tree]) -> JaxprEqn:
    """An equation whose parameters are what ``changed`` makes of each, by name and value; also of those in tuples and kernels."""

    def each(name: str, value: Tree) -> Tree:
        if type(value) in (tuple, list):
            return type(value)(each(name, item) for item in value)
        if type(value).__name__ in _OF_KERNELS:
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return dataclasses.replace(value, **{field: each(field, getattr(value, field)) for field in fields})
        return changed(name, value)

    return eqn.replace(params={name: each(name, value) for name, value in eqn.params.items()})


def module_path(eqn: JaxprEqn) -> str:
    """The name scopes under which an equation was traced, such as ``GPT/h_2/attn``."""
    return str(eqn.source_info.name_stack)


def user_line(eqn: JaxprEqn) -> str:
    """The innermost line of the user's that traced an equation, as ``file:number``; empty where there is none."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if "-packages" not in frame.file_name and not frame.file_name.startswith((_OWN, "<frozen", sys.prefix)):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def is_cast(eqn: JaxprEqn) -> bool:
    """Whether an equation converts a value to another dtype."""
    return kind_of(eqn) == "convert_element_type"


def is_zeros(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array of zeros."""
    return kind_of(eqn) == "broadcast_in_dim" and number_in(eqn.invars[0]) == 0


class ScatterAdd(NamedTuple):
    """A scatter that adds ``updates`` to the places of ``operand`` that ``indices`` say."""

    operand: Atom
    indices: Atom
    updates: Atom
    add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # the same, of any dtype


def scatter_add_of(eqn: JaxprEqn) -> ScatterAdd | None:
    """The equation as a scatter that adds; None for anything else."""
    if kind_of(eqn) != "scatter-add":
        return None
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    operand, indices, updates = eqn.invars
    return ScatterAdd(
        operand, indices, updates, functools.partial(jax.lax.scatter_add, **{name: eqn.params[name] for name in names})
    )


def multiplies(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution, or has one inside."""
    return any(kind_of(each) in _PRODUCTS for each in all_equations([eqn]))


def has_kink(eqn: JaxprEqn) -> bool:
    """Whether an equation compares floating numbers, or has one inside that does: its result jumps where two are nearly equal."""
    compared = (each for each in all_equations([eqn]) if kind_of(each) in _COMPARISONS)
    return any(jnp.issubdtype(aval_of(each.invars[-1]).dtype, jnp.floating) for each in compared)


def terms(eqn: JaxprEqn) -> int | None:
    """How many products make up one element of the result of a matrix product or a convolution; None for anything else."""
    if kind_of(eqn) == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(aval_of(eqn.invars[0]).shape[axis] for axis in contracted)
    if kind_of(eqn) == "conv_general_dilated":
        kernel = aval_of(eqn.invars[1]).shape
        return math.prod(kernel) // max(kernel[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    return None


def attended(eqn: JaxprEqn) -> float | None:
    """FLOPs of attention that is one equation (by cuDNN), of which a causal mask leaves half; None for anything else."""
    sizes = attention_sizes(eqn)
    if sizes is None:
        return None
    query, _, value = (aval_of(atom).shape for atom in eqn.invars[:3])
    length, heads = axes_of_attention(eqn)
    scores = query[0] * query[heads] * query[length] * sizes.keys * (0.5 if sizes.causal else 1.0)
    return 2 * scores * (3 * query[-1] + 2 * value[-1] if sizes.backward else query[-1] + value[-1])


class Attention(NamedTuple):
    """What decides how fast attention that is one equation is."""

    backward: bool
    causal: bool
    keys: int
    width: int  # features of a head


def attention_sizes(eqn: JaxprEqn) -> Attention | None:
    """Of attention that is one equation (by cuDNN); None for anything else."""
    found = _ATTENTION.match(kind_of(eqn))
    if found is None:
        return None
    query, key = (aval_of(atom).shape for atom in eqn.invars[:2])
    causal = "CAUSAL" in str(eqn.params.get("mask_type")) or bool(eqn.params.get("use_causal_mask"))
    return Attention(found["way"] != "fwd", causal, key[axes_of_attention(eqn)[0]], query[-1])


def axes_of_attention(eqn: JaxprEqn) -> tuple[int, int]:
    """Where the length and the heads stand."""
    return (2, 1) if eqn.params.get("layout") == 1 else (1, 2)


def is_precise(eqn: JaxprEqn) -> bool:
    """Whether a product of float32 arrays is to be computed in all their digits (``precision="highest"``)."""
    asked = eqn.params.get("precision")
    return jax.lax.Precision.HIGHEST in (asked if isinstance(asked, tuple) else (asked,))


def calls_host(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether any of the equations, or any equation inside them (in a loop's body), calls a Python function on the host."""
    return any(kind_of(eqn) in _ON_HOST for eqn in all_equations(eqns))


def is_ordered(eqn: JaxprEqn) -> bool:
    """Whether the side effects of an equation have an order among those of others (``ordered=True``)."""
    return any(str(effect).startswith("Ordered") for effect in eqn.effects)


class Window(NamedTuple):
    """The part of its first operand that an equation takes."""

    start: tuple[int, ...]  # along each axis
    stop: tuple[int, ...]
    strides: tuple[int, ...]
    squeezed: bool = False  # whether the first axis, of which it takes one row, is not in the result


class Concatenation(NamedTuple):
    """What is put end to end along an axis."""

    axis: int
    parts: tuple[Atom, ...]


def concatenation_of(eqn: JaxprEqn) -> Concatenation | None:
    """The equation as a concatenation; None for any other."""
    return Concatenation(eqn.params["dimension"], tuple(eqn.invars)) if kind_of(eqn) == "concatenate" else None


def concatenated_rows(eqn: JaxprEqn) -> tuple[Atom, ...]:
    """What a concatenation along the first axis puts end to end; nothing for any other equation."""
    found = concatenation_of(eqn)
    return found.parts if found is not None and found.axis == 0 else ()


def order_of(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """The axes of its operand in the order that a transpose gives them; None for any other equation."""
    return tuple(eqn.params["permutation"]) if kind_of(eqn) == "transpose" else None


def is_by_row(eqn: JaxprEqn) -> bool:
    """Whether an equation does with each row of its operand the same: a cast, a constraint, a transpose that leaves rows rows."""
    order = order_of(eqn)
    return is_cast(eqn) or constraint_of(eqn) is not None or (order is not None and order[:1] == (0,))


def columns_of(eqn: JaxprEqn) -> tuple[Atom, ...]:
    """What a concatenation along the last axis puts side by side, each of width one; nothing for any other equation."""
    parts = tuple(eqn.invars) if kind_of(eqn) == "concatenate" else ()
    shapes = [aval_of(part).shape for part in parts]
    return parts if all(eqn.params["dimension"] == len(shape) - 1 and shape[-1] == 1 for shape in shapes) else ()


class Write(NamedTuple):
    """Where along an axis of its first operand an equation puts values: ``rows`` from what a column of another operand says."""

    axis: int
    operand: int
    column: int
    rows: int


def writes_of(eqn: JaxprEqn) -> tuple[Write, ...]:
    """Where a ``dynamic_update_slice`` or a scatter writes; nothing for any other equation."""
    kind = kind_of(eqn)
    if kind == "dynamic_update_slice":
        return tuple(Write(axis, 2 + axis, 0, rows) for axis, rows in enumerate(aval_of(eqn.invars[1]).shape))
    if kind not in ("scatter", "scatter-add"):
        return ()
    named, updates = eqn.params["dimension_numbers"], aval_of(eqn.invars[2]).shape
    single = (*named.inserted_window_dims, *named.operand_batching_dims)
    kept = [axis for axis in range(len(aval_of(eqn.invars[0]).shape)) if axis not in single]
    windows = dict(zip(kept, (updates[axis] for axis in named.update_window_dims), strict=True))
    return tuple(Write(axis, 1, column, windows.get(axis, 1)) for column, axis in enumerate(named.scatter_dims_to_operand_dims))


def split_rows(eqn: JaxprEqn) -> tuple[list[int], bool] | None:
    """How many rows each result takes of the first operand, and whether it drops the first axis; None for any other equation."""
    kind = kind_of(eqn)
    if kind == "split" and eqn.params["axis"] == 0 and all(eqn.params["sizes"]):
        return list(map(int, eqn.params["sizes"])), False
    return ([1] * len(eqn.outvars), True) if kind == "unstack" and eqn.params["axis"] == 0 else None


def window_of(eqn: JaxprEqn, integer: Callable[[Atom], int | None]) -> Window | None:
    """The part that a slice, or a gather of one row, takes of its first operand; None for any other equation."""
    kind, shape = kind_of(eqn), tuple(aval_of(eqn.invars[0]).shape)
    ones = (1,) * len(shape)
    if kind == "slice":
        start, stop, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
        return Window(start, stop, strides or ones)
    if kind == "dynamic_slice":
        sizes = eqn.params["slice_sizes"]
        indices = [index for index in map(integer, eqn.invars[1:]) if index is not None]
        if len(indices) != len(shape):
            return None
        start = tuple(min(max(a, 0), full - size) for a, size, full in zip(indices, sizes, shape, strict=True))
        return Window(start, tuple(a + size for a, size in zip(start, sizes, strict=True)), ones)
    if kind == "gather":  # of one row: jnp.take(w, 3, axis=0)
        row = integer(eqn.invars[1])
        if lookup_of(eqn) and aval_of(eqn.outvars[0]).shape == shape[1:] and row is not None and 0 <= row < shape[0]:
            return Window((row, *[0] * (len(shape) - 1)), (row + 1, *shape[1:]), ones, squeezed=True)
    return None


def grouped_rows(eqn: JaxprEqn) -> int | None:
    """How many rows of its operand each row of the result has, where an equation only puts rows together; None for any other."""
    if kind_of(eqn) != "reshape" or not aval_of(eqn.invars[0]).shape:
        return None
    (rows, *rest), shape = aval_of(eqn.invars[0]).shape, tuple(aval_of(eqn.outvars[0]).shape)
    groups = shape[0] if shape[2:] == tuple(rest) and len(shape) == len(rest) + 2 else 0
    return rows // groups if groups and rows == groups * shape[1] else None


class Lookup(NamedTuple):
    """Rows of an operand, in the order that ``indices`` say: an embedding."""

    indices: Atom  # one column of them
    rows: Callable[[jax.Array, jax.Array], jax.Array]  # of another operand, at other indices
    batch_axes: tuple[int, ...]  # the axes of the result that are those of the indices


def lookup_of(eqn: JaxprEqn) -> Lookup | None:
    """A gather of whole rows; None for any other equation."""
    if kind_of(eqn) != "gather":
        return None
    named, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    plain = (named.collapsed_slice_dims, named.start_index_map, named.operand_batching_dims) == ((0,), (0,), ())
    if not plain or sizes != (1, *aval_of(eqn.invars[0]).shape[1:]):
        return None
    names = ("dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "mode", "fill_value")
    rows = functools.partial(jax.lax.gather, **{name: eqn.params[name] for name in names})
    return Lookup(eqn.invars[1], rows, tuple(axis for axis in range(aval_of(eqn.outvars[0]).ndim) if axis not in named.offset_dims))


def picks_one(eqn: JaxprEqn) -> bool:
    """Whether an equation takes one element of each row of its first operand, at the places that another operand says."""
    if kind_of(eqn) != "gather":
        return False
    shape = aval_of(eqn.invars[0]).shape
    return set(eqn.params["slice_sizes"]) == {1} and aval_of(eqn.outvars[0]).size * shape[-1] == aval_of(eqn.invars[0]).size


def reduces_last(eqn: JaxprEqn) -> bool:
    """Whether an equation takes the sum or the maximum of each row: along the last axis alone."""
    return kind_of(eqn) in ("reduce_sum", "reduce_max") and tuple(eqn.params["axes"]) == (len(aval_of(eqn.invars[0]).shape) - 1,)


def sliced_like(eqn: JaxprEqn, operand: Atom, start: int, stop: int) -> JaxprEqn | None:
    """A slice of rows of ``operand`` made from an equation that slices something else, without tracing; None if it does not."""
    if kind_of(eqn) != "slice":
        return None
    shape = aval_of(operand).shape
    bounds = {"start_indices": (start, *[0] * (len(shape) - 1)), "limit_indices": (stop, *shape[1:]), "strides": None}
    return eqn.replace(invars=[operand], outvars=[new_variable(operand, (stop - start, *shape[1:]))], params=eqn.params | bounds)
