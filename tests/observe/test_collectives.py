"""Collectives are read from what the compiler made: real programs on a mesh of 2 x 2 CPU devices, and text as GPUs have it."""

import html
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.collectives import Collective, Collectives, ProgramCollective, parse_groups, read_collectives
from tests import models

SIZES = {"data": 2, "model": 2}
ALONG_DATA, ALONG_MODEL = {(0, 2), (1, 3)}, {(0, 1), (2, 3)}
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)  # a device of the mesh has 4 x 8 of it: 128 bytes
SPLIT = P("data", "model")


def mesh(*sizes, names=("data", "model")):
    sizes = sizes or (2, 2)
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def compiled(function, *args, **options):
    return jax.jit(function, **options).lower(*args).compile().as_text()


def mapped(function, *args, in_specs=SPLIT, out_specs=SPLIT, on=None):
    return compiled(jax.shard_map(function, mesh=on or mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False), *args)


def only(text, sizes=None):
    (collective,) = read_collectives(text, sizes or SIZES)
    return collective


MAPPED = {
    "psum over model": (lambda x: jax.lax.psum(x, "model"), SPLIT, "all-reduce", ("model",), ALONG_MODEL),
    "psum over data": (lambda x: jax.lax.psum(x, "data"), SPLIT, "all-reduce", ("data",), ALONG_DATA),
    "psum over both": (lambda x: jax.lax.psum(x, ("data", "model")), SPLIT, "all-reduce", ("data", "model"), {(0, 1, 2, 3)}),
    "all_gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), SPLIT, "all-gather", ("data",), ALONG_DATA),
    "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "model", tiled=True), SPLIT, "reduce-scatter", ("model",), ALONG_MODEL),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, "model", 0, 1, tiled=True), SPLIT, "all-to-all", ("model",), ALONG_MODEL),
    "ppermute": (
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        SPLIT,
        "collective-permute",
        ("data",),
        {(0, 2), (2, 0), (1, 3), (3, 1)},
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_collective_of_shard_map_is_read_as_it_was_written(name):
    function, out_specs, kind, axes, groups = MAPPED[name]
    found = only(mapped(function, X, out_specs=out_specs))
    assert (found.kind, found.num_bytes, found.axes, set(found.groups)) == (kind, 128, axes, groups)
    assert (found.times, found.in_loop, found.exact, found.on_host) == (1, False, True, False)


def test_a_group_over_two_of_three_axes_has_both():
    cube = mesh(2, 2, 2, names=("a", "b", "c"))
    text = mapped(lambda x: jax.lax.psum(x, ("a", "c")), X, in_specs=P(("a", "c"), "b"), out_specs=P(None, "b"), on=cube)
    found = only(text, cube.shape)
    assert (found.num_bytes, found.axes, set(found.groups)) == (2 * 8 * 4, ("a", "c"), {(0, 1, 4, 5), (2, 3, 6, 7)})


def test_positions_are_those_of_the_mesh_whatever_the_devices():
    devices = np.array(jax.devices())[[5, 1, 7, 2]].reshape(2, 2)
    found = only(mapped(lambda x: jax.lax.psum(x, "model"), X, on=Mesh(devices, ("data", "model"))))
    assert (found.axes, set(found.groups)) == (("model",), ALONG_MODEL)


def test_collectives_that_the_compiler_joined_are_one_of_all_their_bytes():
    ints = jax.ShapeDtypeStruct((6,), jnp.int16)
    text = mapped(lambda x, n: jax.lax.psum((x, x[0], n), "data"), X, ints, in_specs=(SPLIT, P("data")), out_specs=P())
    found = read_collectives(text, SIZES)
    assert sum(collective.num_bytes for collective in found) == 128 + 32 + 3 * 2
    assert sorted(shape for collective in found for shape in collective.shapes) == ["f32[4,8]", "f32[8]", "s16[3]"]


def test_what_the_partitioner_made_of_a_matmul_is_read():
    on = mesh()
    rows, columns = NamedSharding(on, P("data", "model")), NamedSharding(on, P("model", None))
    found = only(compiled(jnp.matmul, X, jax.ShapeDtypeStruct((16, 32), jnp.float32), in_shardings=(rows, columns)))
    assert (found.kind, found.num_bytes, found.axes) == ("all-reduce", 4 * 32 * 4, ("model",))


def test_gradients_that_the_partitioner_reduces_run_over_data_and_have_the_bytes_of_the_shard():
    on = mesh()
    sharded = (NamedSharding(on, P(None, "model")), NamedSharding(on, P("data")))
    weights, batch = jax.ShapeDtypeStruct((16, 32), jnp.float32), X
    text = compiled(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), weights, batch, in_shardings=sharded)
    found = only(text)
    assert (found.kind, found.num_bytes, found.axes, set(found.groups)) == ("all-reduce", 16 * 16 * 4, ("data",), ALONG_DATA)


def test_a_collective_in_a_scan_runs_once_a_trip():
    def scanned(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "model") / 2, None), x, None, length=3)[0] + 1, None

        return jax.lax.scan(outer, x, None, length=4)[0]

    found = only(mapped(scanned, X))
    assert (found.times, found.in_loop, found.exact, found.num_bytes) == (12, True, True, 128)


def test_a_loop_of_unknown_length_and_a_branch_count_once_and_the_table_says_so():
    loop = only(mapped(lambda x: jax.lax.while_loop(lambda x: x.sum() < 99, lambda x: jax.lax.psum(x, "model"), x), X))
    assert (loop.times, loop.in_loop, loop.exact) == (1, True, False)
    branches = (lambda x: jax.lax.psum(x, "model"), lambda x: jax.lax.psum(x, "data"))
    found = read_collectives(mapped(lambda x: jax.lax.cond(x[0, 0] > 0, *branches, x), X), SIZES)
    assert {collective.axes for collective in found} == {("model",), ("data",)}
    assert {(collective.times, collective.in_loop, collective.exact) for collective in found} == {(1, False, False)}
    lines = str(Collectives((ProgramCollective("loop", 4, loop),))).splitlines()
    assert lines[1].split() == ["loop", "all-reduce", "model", "128", "B", "4?", "512", "B"]
    assert lines[-1] == "?: in a loop whose number of trips is not in the program, or in a branch; counted once"


def test_groups_of_one_device_are_no_communication():
    alone = mesh(4, 1)
    text = mapped(lambda x: jax.lax.psum(x, "model"), X, on=alone)
    assert " all-reduce(" in text
    assert read_collectives(text, alone.shape) == ()
    assert read_collectives(compiled(jnp.sin, X), {"data": 1}) == ()


def test_a_group_of_some_devices_beside_single_ones_is_kept_as_it_is():
    line = mesh(4, names=("data",))
    text = mapped(
        lambda x: jax.lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), X, in_specs=P("data"), out_specs=P("data"), on=line
    )
    assert set(only(text, line.shape).groups) == ALONG_MODEL
    text = ASYNC.replace("replica_groups={{0,2},{1,3}}", "replica_groups={{0,1},{2},{3}}")
    assert read_collectives(text, {"data": 4})[0].groups == ((0, 1), (2,), (3,))


ASYNC = """HloModule jit_step, entry_computation_layout={(bf16[4,8]{1,0}, f32[16]{0:S(5)})->f32[64]{0}}, num_partitions=4

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%wrapped (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), channel_id=3, replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
}, execution_thread="parallel"

ENTRY %main (x: bf16[4,8], y: f32[16]) -> f32[64] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = f32[16]{0:T(128)S(5)} parameter(1)
  %n = (pred[3]{0}, s8[2]{0}, /*index=2*/u4[3]{0:E(4)}) custom-call(%x), custom_call_target="calls=%wrapped"
  %r = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) all-reduce-start(%x, bf16[4,8]{1,0} %x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %g = (f32[16]{0:S(5)}, f32[64]{0}) all-gather-start(%y), channel_id=2, replica_groups={}, dimensions={0}
  %s = ((f32[16]{0}), f32[8]{0}, u32[]) async-start(%y), async_execution_thread="parallel", calls=%wrapped
  %p = (s8[2]{0}, s8[2]{0}) collective-permute-start(%n), source_target_pairs={{0,0},{1,1}}
  %t = (pred[3]{0}, s8[2]{0}, u4[3]{0:E(4)}) all-to-all(%n), replica_groups=[2,2]<=[2,2]T(1,0)
  %rd = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) all-reduce-done(%r), metadata={op_name="all-reduce(%x), replica_groups={{0,1}}"}
  %sd = f32[8]{0} async-done(%s), calls=%wrapped
  ROOT %gd = f32[64]{0} all-gather-done(%g)
}
"""


def test_a_start_and_its_done_are_one_collective_and_host_memory_is_seen():
    reduce, gather, scatter, exchange = read_collectives(ASYNC, SIZES)
    assert (reduce.kind, reduce.num_bytes, reduce.axes, reduce.on_host) == ("all-reduce", 2 * 64, ("data",), False)
    assert (gather.kind, gather.num_bytes, gather.axes, gather.on_host) == ("all-gather", 64, ("data", "model"), True)
    assert (scatter.kind, scatter.num_bytes, scatter.axes, scatter.on_host) == ("reduce-scatter", 64, ("model",), False)
    assert (exchange.kind, exchange.num_bytes, exchange.axes) == ("all-to-all", 3 + 2 + 2, ("data",))
    lines = str(Collectives((ProgramCollective("step", 1, gather),))).splitlines()
    assert lines[1].split()[-6:] == ["64", "B", "(host)", "1", "64", "B"]
    assert lines[-1] == "(host): in host memory"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("{{}}", ((0, 1, 2, 3),)),
        ("{{0,1,2,3}}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4,'b'=1] {'b'}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_every_form_of_groups_is_read(text, groups):
    assert parse_groups(f", channel_id=1, replica_groups={text}, to_apply=%add", 4) == groups


def collective(kind, num_bytes, *axes, times=1):
    return Collective(kind, num_bytes, ((0, 1),), axes, (f"u8[{num_bytes}]",), False, times, times > 1, True)


STEP = Collectives(
    (
        ProgramCollective("forward 0", 4, collective("all-reduce", 512, "model", times=3)),
        ProgramCollective("forward 0", 4, collective("all-reduce", 512, "model")),
        ProgramCollective("forward 1", 4, collective("all-gather", 100, "model")),
        ProgramCollective("reduce 0", 1, collective("all-reduce", 2048, "data")),
        ProgramCollective("reduce 1", 1, collective("all-reduce", 1024, "data", "model")),
    ),
    parameter_bytes=1 << 20,
)


def test_bytes_and_counts_of_a_step_are_summed_by_kind_axes_and_program():
    assert STEP.num_bytes() == 4 * 4 * 512 + 4 * 100 + 2048 + 1024
    assert STEP.count() == 16 + 4 + 1 + 1
    assert STEP.num_bytes("all-reduce") == 16 * 512 + 2048 + 1024
    assert STEP.num_bytes(axes="data") == 2048 + 1024
    assert STEP.num_bytes(axes=("data",)) == 2048
    assert STEP.num_bytes(axes=("model", "data")) == 1024
    assert STEP.count(kind="all-reduce", axes="model", program="forward 0") == 16
    assert STEP.num_bytes(program="forward 1") == 400
    assert STEP.num_bytes(program="backward") == STEP.count(kind="all-to-all") == 0
    assert STEP.communicated == 3072


def test_the_table_of_a_step_joins_equal_rows_and_ends_with_what_was_communicated():
    assert str(STEP) == "\n".join(
        [
            "  program        kind         axes  bytes  times  total",
            "forward 0  all-reduce        model  512 B     16  8 KiB",
            "forward 1  all-gather        model  100 B      4  400 B",
            " reduce 0  all-reduce         data  2 KiB      1  2 KiB",
            " reduce 1  all-reduce  data, model  1 KiB      1  1 KiB",
            "",
            "       axes        kind  times  total",
            "       data  all-reduce      1  2 KiB",
            "data, model  all-reduce      1  1 KiB",
            "      model  all-gather      4  400 B",
            "      model  all-reduce     16  8 KiB",
            "",
            "communicated 3 KiB of 1 MiB: all-reduced over data in a step, of all parameters",
        ]
    )
    assert str(Collectives(())) == "no collectives"
    assert str(Collectives((), 1024)).splitlines()[-1].startswith("communicated 0 B of 1 KiB")


def test_json_has_all_numbers_and_the_page_all_cells():
    data = json.loads(STEP.to_json())
    assert (data["communicated"], data["parameter_bytes"]) == (3072, 1 << 20)
    assert sum(row["runs"] * row["times"] * row["num_bytes"] for row in data["rows"]) == STEP.num_bytes()
    assert {"axes": ["model"], "kind": "all-reduce", "count": 16, "num_bytes": 8192} in data["sums"]
    page = Collectives((ProgramCollective("<f>", 1, collective("all-reduce", 512, "data")),))._repr_html_()
    assert html.escape("<f>") in page
    assert "<f>" not in page
    assert page.count("<th ") == 6 + 4


def test_the_collectives_of_a_step_are_those_of_programs_that_nobody_looks_into():
    pipe = jaxpp.Pipeline(
        models.loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, data_parallel=2, devices=jax.devices()[:4]
    )
    pipe.init(models.PARAMS, models.X)
    with jax.debug_nans(True):  # whose programs look at their results
        found = pipe.collectives(models.X)
    assert found.communicated > 0 and str(found) == str(pipe.collectives(models.X))


def test_text_that_was_not_compiled_is_refused():
    lowered = jax.jit(jnp.sin).lower(X).as_text()
    with pytest.raises(ArgumentError) as caught:
        read_collectives(lowered, SIZES)
    where, got, fix = str(caught.value).splitlines()
    assert where == (
        "read_collectives(hlo_text, mesh_shape={'data': 2, 'model': 2}): the text must be the optimized HLO of a compiled program."
    )
    assert got.startswith("  Got: a text without ENTRY that begins with 'module @jit_sin")
    assert fix == "  Fix: pass jax.jit(f).lower(...).compile().as_text()."


@pytest.mark.parametrize("size", [2, 8])
def test_a_mesh_that_is_not_the_programs_is_refused(size):
    with pytest.raises(ArgumentError) as caught:
        read_collectives(ASYNC, {"data": size})
    where, got, fix = str(caught.value).splitlines()
    assert where == f"read_collectives(hlo_text, mesh_shape={{'data': {size}}}): the program must be compiled for the mesh."
    assert got == f"  Got: a program for 4 devices and a mesh of {size}."
    assert fix == "  Fix: pass mesh.shape of the program's mesh."


def test_groups_of_an_unknown_form_are_refused():
    with pytest.raises(ArgumentError) as caught:
        read_collectives(ASYNC.replace("replica_groups={}", "replica_groups=<4>"), SIZES)
    where, got, fix = str(caught.value).splitlines()
    assert where.endswith(": the groups of devices must be written in a form that is known.")
    assert "replica_groups=<4>" in got
    assert fix == "  Fix: report it as a bug."
