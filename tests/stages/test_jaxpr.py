"""What jaxpp relies on inside a jaxpr, fact by fact, on the JAX that is installed: the first test to read after an update of JAX.

Each test names the function of ``jaxpp/stages/jaxpr.py`` to change where it fails.
"""

import importlib
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var

import jaxpp
from jaxpp.stages import jaxpr as inside
from jaxpp.stages.graph import marked, trace
from jaxpp.stages.layers import _Integers

X = jnp.ones((6, 4))


def equations(function, *args):
    """The equations of a traced function, calls of ``jit`` opened."""

    def flat(jaxpr):
        for eqn in jaxpr.eqns:
            body = inside.called(eqn, inside.CALLS)
            yield from [eqn] if body is None else flat(body.jaxpr)

    return list(flat(jax.make_jaxpr(function)(*args).jaxpr))


def only(kind, function, *args):
    """The one equation of a kind in a traced function."""
    eqns = equations(function, *args)
    found = [eqn for eqn in eqns if inside.kind_of(eqn) == kind]
    assert len(found) == 1, f"JAX {jax.__version__} traces no single {kind!r}: kind_of says {[inside.kind_of(eqn) for eqn in eqns]}"
    return found[0]


@jax.custom_jvp
def with_jvp(x):
    return x * 2


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] * 2))


@jax.custom_vjp
def with_vjp(x):
    return x * 2


with_vjp.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("jit", jax.jit(lambda x: x + 1)),
        ("checkpoint", jax.checkpoint(lambda x: x + 1)),
        ("custom_jvp", with_jvp),
        ("custom_vjp", with_vjp),
    ],
)
def test_a_call_is_known_by_its_kind_and_gives_its_body(kind, function):
    (eqn,) = jax.make_jaxpr(function)(X).jaxpr.eqns
    assert inside.kind_of(eqn) == kind, f"the primitive is called {eqn.primitive.name}: add it to _RENAMED"
    body = inside.called(eqn, {kind})
    assert isinstance(body, ClosedJaxpr), f"the body of {kind} is under another parameter, of {sorted(eqn.params)}: see called"
    assert body.jaxpr.eqns
    assert inside.called(eqn, set()) is None
    assert [inner.eqns for inner in inside.inner_jaxprs(eqn)] == [body.jaxpr.eqns], "inner_jaxprs finds another body"


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("dot_general", lambda x: x @ x.T),
        ("conv_general_dilated", lambda x: jax.lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME")),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16)),
        ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (2, 6, 4))),
        ("reshape", lambda x: x.reshape(24)),
        ("squeeze", lambda x: jax.lax.squeeze(x[:1], (0,))),
        ("transpose", lambda x: x.T),
        ("select_n", lambda x: jax.lax.select(x > 0, x, -x)),
        ("max", lambda x: jnp.maximum(x, 0.0)),
        ("gt", lambda x: x > 0),
        ("reduce_max", lambda x: x.max()),
        ("reduce_sum", lambda x: x.sum()),
        ("sort", jnp.sort),
        ("tanh", jnp.tanh),
        ("logistic", jax.nn.sigmoid),
        ("integer_pow", lambda x: x**3),
        ("square", jnp.square),
        ("concatenate", lambda x: jnp.concatenate([x, x])),
        ("split", lambda x: jnp.split(x, 2)),
        ("slice", lambda x: x[1:3]),
        ("dynamic_slice", lambda x: jax.lax.dynamic_slice_in_dim(x, x.shape[0] // 2, 2)),
        ("gather", lambda x: jnp.take(x, 3, axis=0)),
        ("copy", lambda x: jnp.array(x, copy=True)),
        ("name", lambda x: checkpoint_name(x, "kept")),
        ("scan", lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0], x)),
        ("while", lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)),
        ("cond", lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)),
        ("random_fold_in", lambda x: jax.random.fold_in(jax.random.key(0), x.astype(int)[0, 0])),
        ("random_wrap", lambda x: jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))),
        ("random_bits", lambda x: jax.random.bits(jax.random.key(0), (2,))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_operation_has_the_kind_that_the_tables_name(kind, function):
    only(kind, function, X)


def test_what_stops_gradients_hides_its_operand_from_them():
    kinds = {inside.kind_of(eqn) for eqn in equations(lambda x: jax.lax.stop_gradient(x) * x, X)}
    assert "mul" in kinds
    _, pullback = jax.vjp(lambda x: jax.lax.stop_gradient(x).sum(), X)
    assert not np.any(pullback(1.0)[0])


def test_the_names_of_scopes_are_the_module_path():
    def function(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.tanh(x)

    eqn = only("tanh", function, X)
    assert inside.module_path(eqn) == "outer/inner", "source_info.name_stack prints otherwise: see module_path"


def test_a_value_has_the_marks_of_all_that_it_is_made_of():
    graph, _ = trace(lambda a, b, c: (a * b + 1, b - c, -c), X, X, X)
    marks = marked(graph, {var: 1 << k for k, var in enumerate(graph.inputs)})
    assert [marks[var] for var in graph.outputs] == [0b011, 0b110, 0b100]


@pytest.mark.parametrize("enforce", [False, True])
def test_what_runs_in_the_order_of_the_program_is_opened_as_a_call_is(enforce):
    overlap = pytest.importorskip("jax.experimental.overlap")

    @overlap.program_order(enforce=enforce)
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    params, x = [jnp.eye(4) * 0.9] * 3, jnp.ones((4, 4))
    wanted = jax.value_and_grad(loss)(params, x)
    found = jaxpp.gather(jaxpp.value_and_grad(loss, num_stages=3, num_microbatches=2)(params, x))
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_an_equation_says_which_line_of_the_model_it_is_of():
    eqn = only("tanh", lambda x: jnp.tanh(x), X)  # noqa: PLW0108  (the frame of this file is looked for)
    assert inside.user_line(eqn).startswith(f"{__file__}:"), "see user_line"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_is_known_and_whether_it_is_ordered(ordered):
    def function(x):
        jax.debug.callback(lambda x: None, x, ordered=ordered)
        return x

    eqns = equations(function, X)
    assert inside.calls_host(eqns), f"no callback is known in {[eqn.primitive.name for eqn in eqns]}: see _ON_HOST"
    assert any(eqn.effects for eqn in eqns)
    assert any(map(inside.is_ordered, eqns)) == ordered, "an ordered effect is not called Ordered...: see is_ordered"
    assert inside.calls_host(equations(lambda x: jax.lax.scan(lambda c, r: (function(c), None), x, x[0]), X)), "nor inside a loop"
    assert not inside.calls_host(equations(jnp.tanh, X))


def test_functions_on_the_host_and_prints_are_known():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert inside.calls_host(equations(lambda x: jax.pure_callback(lambda x: x, shape, x), X))
    assert inside.calls_host(equations(lambda x: jax.experimental.io_callback(lambda x: x, shape, x), X))
    assert inside.calls_host(equations(lambda x: (jax.debug.print("{}", x), x)[1], X))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_says_what_it_runs_over_what(reverse):
    def loop(const, carry, rows):
        def body(carry, row):
            return (carry[0] + row[0] @ const.T @ row[1], carry[1] * 2), row[1] * 2

        return jax.lax.scan(body, carry, rows, reverse=reverse, unroll=2)

    carry, rows = (jnp.ones(()), jnp.ones(3)), (jnp.ones((5, 4)), jnp.ones((5, 6)))
    eqn = only("scan", loop, X, carry, rows)
    scan = inside.scan_of(eqn)
    assert scan is not None, "its body closes over arrays, or is kept otherwise: see scan_of"
    assert (scan.length, scan.reverse, scan.unroll) == (5, reverse, 2)
    assert (scan.num_fixed, scan.num_carry, len(eqn.invars) - scan.num_before) == (1, 2, 2), "operands stand in another order"
    assert inside.length_of(eqn) == 5
    assert inside.kind_of(inside.with_body(eqn, scan.body)) == "scan"
    results = jax.extend.core.jaxpr_as_fun(scan.body)(X, jnp.ones(()), jnp.ones(3), jnp.ones(4), jnp.ones(6))
    assert [result.shape for result in results] == [(), (3,), (6,)]
    assert inside.scan_of(only("tanh", jnp.tanh, X)) is None


def test_the_branches_of_a_condition_run_by_themselves():
    eqn = only("cond", lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), X)
    first, second = (jax.extend.core.jaxpr_as_fun(branch)(X)[0] for branch in inside.inner_of(eqn, {"cond"}).branches)
    np.testing.assert_array_equal(first, jnp.cos(X), "branch 0 is not the one of False")
    np.testing.assert_array_equal(second, jnp.sin(X))
    assert inside.inner_of(only("tanh", jnp.tanh, X), {"cond"}) is None


def test_a_checkpoint_is_made_again_with_its_policy():
    policy = jax.checkpoint_policies.dots_saveable
    eqn = only("checkpoint", jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False), X)
    again = only("checkpoint", inside.checkpoint_like(eqn)(jnp.sin), X)
    assert again.params["policy"] is policy
    assert again.params["prevent_cse"] is False


@pytest.mark.parametrize(
    ("function", "terms"),
    [
        (lambda x: x @ x.T, 4),
        (lambda x: jnp.einsum("ij,ij->", x, x), 24),
        (lambda x: jax.lax.conv(x[None, None], jnp.ones((3, 1, 2, 2)), (1, 1), "SAME"), 4),
        (lambda x: x * x, None),
    ],
)
def test_a_product_says_how_much_it_adds_up(function, terms):
    found = [inside.terms(eqn) for eqn in equations(function, X)]
    assert [number for number in found if number is not None] == ([] if terms is None else [terms]), "see terms"
    assert any(map(inside.multiplies, equations(function, X))) == (terms is not None)


@pytest.mark.parametrize(
    ("function", "start", "stop", "strides", "squeezed"),
    [
        (lambda x: x[1:4], (1, 0), (4, 4), (1, 1), False),
        (lambda x: x[1:5:2, 1:], (1, 1), (5, 4), (2, 1), False),
        (lambda x: jax.lax.dynamic_slice(x, (5, 0), (2, 4)), (4, 0), (6, 4), (1, 1), False),
        (lambda x: jnp.take(x, 3, axis=0), (3, 0), (4, 4), (1, 1), True),
        (lambda x: jax.lax.dynamic_index_in_dim(x, 2, 0), (2, 0), (3, 4), (1, 1), False),
    ],
)
def test_a_slice_says_what_it_takes(function, start, stop, strides, squeezed):
    integers, windows = _Integers(), []
    for eqn in trace(function, X)[0].eqns:
        integers.add(eqn)
        if inside.aval_of(eqn.invars[0]).shape == X.shape:
            windows.append(inside.window_of(eqn, integers.get))
    assert windows == [(start, stop, strides, squeezed)], "the parameters of slices have changed: see window_of"


def test_rows_are_put_together_split_and_cut_out():
    eqn = only("concatenate", lambda x: jnp.concatenate([x, x[:2]]), X)
    assert [inside.aval_of(atom).shape for atom in inside.concatenated_rows(eqn)] == [(6, 4), (2, 4)]
    assert inside.concatenated_rows(only("concatenate", lambda x: jnp.concatenate([x, x], 1), X)) == ()
    assert inside.split_rows(only("split", lambda x: jnp.split(x, [1, 4]), X)) == ([1, 3, 2], False)
    assert inside.split_rows(only("split", lambda x: jnp.split(x, 2, 1), X)) is None
    eqn = only("slice", lambda x: x[1:4], X)
    like = inside.new_variable(eqn.invars[0], (9, 4))
    cut = inside.sliced_like(eqn, like, 2, 7)
    value = jnp.arange(36.0).reshape(9, 4)
    np.testing.assert_array_equal(inside.function_of([cut], [like], cut.outvars)(value)[0], value[2:7])


def test_rows_that_are_put_together_are_told_from_other_reshapes():
    def grouped(*shape):
        return inside.grouped_rows(only("reshape", lambda x: x.reshape(shape), X))

    assert [grouped(3, 2, 4), grouped(1, 6, 4), grouped(6, 1, 4)] == [2, 6, 1]
    assert [grouped(6, 2, 2), grouped(24), grouped(2, 3, 2, 2), grouped(4, 6)] == [None] * 4
    assert inside.grouped_rows(only("reshape", lambda x: x.reshape(3, 2), X[:, 0])) == 2
    assert inside.grouped_rows(only("mul", lambda x: x * 2, X)) is None


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_a_lookup_of_rows_can_be_asked_of_another_array(mode):
    rows, where = jnp.arange(24.0).reshape(6, 4), jnp.asarray([[0, 5], [9, 2]])
    found = inside.lookup_of(only("gather", lambda x, i: x.at[i].get(mode=mode), rows, where))
    assert found is not None, "the parameters of gathers have changed: see lookup_of"
    assert found.batch_axes == (0, 1)
    want = rows[2:].at[where - 2].get(mode=mode)
    np.testing.assert_array_equal(found.rows(rows[2:], where[..., None] - 2)[0, 1], want[0, 1])
    assert inside.lookup_of(only("gather", lambda x, i: jnp.take(x, i, axis=1), rows, where)) is None
    assert inside.lookup_of(only("mul", lambda x: x * 2, X)) is None


def test_what_takes_one_element_of_each_row_and_what_reduces_rows():
    def pick(x, i):
        return jnp.take_along_axis(x, i, axis=-1)

    assert inside.picks_one(only("gather", pick, X, jnp.zeros((6, 1), int)))
    assert not inside.picks_one(only("gather", pick, X, jnp.zeros((6, 2), int)))
    assert not inside.picks_one(only("gather", lambda x, i: x[i], X, jnp.arange(3)))
    assert inside.reduces_last(only("reduce_sum", lambda x: x.sum(-1), X))
    assert not inside.reduces_last(only("reduce_sum", lambda x: x.sum(0), X))
    assert inside.reduces_last(only("reduce_max", lambda x: x.max(1), X))
    assert not inside.reduces_last(only("mul", lambda x: x * 2, X))


def test_where_a_write_into_an_array_puts_its_values():
    def update(x, i):
        return jax.lax.dynamic_update_slice(x, x[:2], (i, 0))

    eqn = only("dynamic_update_slice", update, X, 3)
    assert inside.writes_of(eqn) == ((0, 2, 0, 2), (1, 3, 0, 4))  # axis, operand, column, rows
    assert inside.number_in(eqn.invars[3]) == 0
    rows = only("scatter", lambda x, i: x.at[i + jnp.arange(3)].set(1.0), X, 1)
    assert inside.writes_of(rows) == ((0, 1, 0, 1),) and inside.aval_of(rows.invars[1]).shape == (3, 1)
    columns = only("scatter", lambda x, i: x.at[:, i].set(1.0), X, 1)
    assert inside.writes_of(columns) == ((1, 1, 0, 1),)
    blocks = only("scatter-add", jax.vmap(lambda row, i: row.at[i].add(1.0)), X, jnp.arange(6) % 4)
    assert inside.writes_of(blocks)[0][2:] == (0, 1)
    both = only("scatter", lambda x, i, j: x.at[i, j].set(1.0), X, jnp.arange(3), jnp.arange(3))
    assert inside.writes_of(both) == ((0, 1, 0, 1), (1, 1, 1, 1))
    assert inside.writes_of(only("mul", lambda x: x * 2, X)) == ()


def test_which_columns_indices_are_put_together_from():
    def write(x, i, j):
        return x.at[i, j].set(1.0)

    eqn = only("concatenate", write, X, jnp.arange(3), jnp.arange(3))
    assert [inside.aval_of(atom).shape for atom in inside.columns_of(eqn)] == [(3, 1), (3, 1)]
    assert inside.columns_of(only("concatenate", lambda x: jnp.concatenate([x, x], 1), X)) == ()
    assert inside.columns_of(only("mul", lambda x: x * 2, X)) == ()


def test_variables_and_numbers_are_told_apart():
    (eqn,) = equations(lambda x: jnp.maximum(x, 0.0), X)
    variable, number = eqn.invars
    assert isinstance(variable, Var)
    assert isinstance(number, Literal)
    assert inside.variables([variable, number, variable]) == [variable]
    assert (inside.number_in(variable), inside.number_in(number), number.val) == (None, 0.0, 0.0)
    made = inside.new_variable(variable, (2, 3))
    assert (made.aval.shape, made.aval.dtype) == ((2, 3), X.dtype)
    assert made is not variable
    assert inside.shapes_of([variable, X]) == (jax.ShapeDtypeStruct((6, 4), X.dtype),) * 2


def test_equations_become_a_function_and_a_function_becomes_equations():
    (variable,) = jax.make_jaxpr(jnp.tanh)(X).jaxpr.invars
    eqns, results = inside.equations_of(lambda x: (x * 2 + 1, x), [variable])
    assert results[1] is variable
    found = inside.function_of(eqns, [variable], results)(X)
    np.testing.assert_array_equal(found[0], X * 2 + 1)
    other, _ = inside.equations_of(lambda x: (x * 2 + 1, x), [variable])
    assert not {var for eqn in eqns for var in eqn.outvars} & {var for eqn in other for var in eqn.outvars}


def test_arrays_that_a_function_closes_over_are_its_constants():
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(np.arange(4.0)))(X)
    flat = [*closed.jaxpr.constvars, *(var for eqn in closed.jaxpr.eqns for var in eqn.invars if isinstance(var, Literal))]
    assert flat, "an array that the function closes over is neither a constant nor a number"
    assert len(closed.jaxpr.constvars) == len(closed.consts)
    assert isinstance(closed.jaxpr, Jaxpr)


def test_the_parameters_of_a_kernel_hold_the_shapes_of_blocks_and_their_functions():
    block = pl.BlockSpec((4,), lambda i: (i,))

    def double(x):
        def kernel(given, made):
            made[...] = given[...] * 2

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, grid=(2,), in_specs=[block], out_specs=block, interpret=True)(x)

    eqn = only("pallas_call", double, jnp.ones(8))
    seen = []
    inside.with_params(eqn, lambda name, value: seen.append((name, value)) or value)
    types = {name for name, value in seen if inside.is_typed(value)}
    assert {"out_avals", "transformed_block_aval"} <= types
    assert "index_map_jaxpr" in {name for name, _ in seen}


REFUSED = {
    "BoxEffect": "boxes and logs of jax.experimental.hijax, which outlive the function",
    "ErrorEffect": "checkify.check without checkify around it",
    "SingleSideCollectiveEffect": "psend and precv, between devices that know each other by number",
    "ShapeAssertionEffect": "of shapes that are not known, which are exported only",
}
"""Kinds of effects that a loss may not have."""

ELSEWHERE = ("jax._src.pallas", "jax._src.lax.parallel")  # Modules of primitives that stand in kernels alone, or communicate

WITH_EFFECTS = set(
    "addupdate box_get box_set buffer_callback call call_exported call_hi_primitive check closed_call compute_on cond core_map "
    "custom_jvp_call custom_jvp_call_jaxpr custom_linear_solve custom_vjp_call custom_vmap_call dce_sink debug_callback "
    "debug_print empty_ref eval_jaxpr ffi_call free_ref freeze get inspect_sharding io_callback jit jaxpr_call log_extend log_read "
    "new_box new_log new_ref optimization_barrier program_order remat2 remat_opt run_state scan shape_assertion shard_map swap "
    "while xla_metadata_call zeros_like".split()
)
"""Primitives that may have effects: their own, or those of functions inside. Each was looked at."""

EXPERIMENTS = "pallas checkify buffer_callback compute_on hijax custom_partitioning xla_metadata sparse control_deps".split()


def jax_modules():
    for name in EXPERIMENTS:
        try:
            importlib.import_module(f"jax.experimental.{name}")
        except ImportError:  # another version has others
            continue
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("jax", "jaxlib")}


def test_every_kind_of_effect_that_jax_knows_is_decided():
    jax_modules()
    base = next(
        cls
        for cls in type(next(iter(only("new_ref", lambda x: jax.new_ref(x)[...], X).effects))).__mro__
        if cls.__name__ == "Effect"
    )

    def kinds(cls):
        return {cls} | {kind for each in cls.__subclasses__() for kind in kinds(each)}

    found = {kind.__name__ for kind in kinds(base) if not kind.__module__.startswith(("flax", *ELSEWHERE[:1]))}
    abstract = {"Effect", "JaxprInputEffect", "RefEffect", "GenericEffect"}
    unknown = found - abstract - inside.TAKEN - inside._REFS - set(REFUSED)
    assert not unknown, f"JAX {jax.__version__} has new effects: say in TAKEN, or in REFUSED here, what becomes of them"
    assert not inside.TAKEN & set(REFUSED)


def test_every_primitive_of_jax_that_may_have_effects_was_looked_at():
    homes = {}
    for name, module in jax_modules().items():
        for value in list(vars(module).values()):
            if isinstance(value, Primitive) and "_effect_free" not in getattr(value.abstract_eval, "__qualname__", ""):
                homes.setdefault(value, []).append(name)
    found = {primitive.name for primitive, names in homes.items() if not any(name.startswith(ELSEWHERE) for name in names)}
    assert {"new_ref", "swap", "io_callback"} <= found
    assert not found - WITH_EFFECTS, f"JAX {jax.__version__} has new primitives that may have effects: try each in a loss"
