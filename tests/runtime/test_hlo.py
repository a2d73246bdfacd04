"""Kernels are read from what the compiler made for four H100s, without any, and for CPUs; the counts are those made by hand."""

import math
import os
import pathlib
import re
from collections import Counter
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import DotAlgorithmPreset
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp.runtime import hlo, not_public
from jaxpp.runtime.hlo import aliased, float64_in, parse_hlo, parse_shape, read_kernels
from models.gpt import GPT

BF16, F32, S32 = 2, 4, 4  # bytes of an element
NONE: dict[str, int] = {}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0}", 30),
        ("f64[2]{0:T(256)}", 16),
        ("(f16[3]{0}, (c64[2], pred[7]{0}), token[])", 6 + 16 + 7),
        ("u8[0,4]{1,0}", 0),
        ("s4[5]{0}", 5),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[6]{0}", 6),
        ("s64[<=4]{0}", 32),
    ],
)
def test_bytes_of_a_shape_are_those_of_its_arrays(text, num_bytes):
    assert parse_shape(text).num_bytes == num_bytes


def test_tuples_are_flattened_and_an_array_prints_as_hlo_writes_it():
    shape = parse_shape("(f32[], (bf16[16,4]{1,0:S(5)}, pred[7]{0})) tuple(%a)")
    assert [str(array) for array in shape.arrays] == ["f32[]", "bf16[16,4]", "pred[7]"]
    assert [array.on_host for array in shape.arrays] == [False, True, False]
    assert (shape.size, shape.num_bytes, shape.on_host) == (1 + 64 + 7, 4 + 128 + 7, True)


def test_instructions_are_read_with_their_operands_and_what_they_call():
    computations, entry = parse_hlo(LOOP)
    assert entry == "main"
    body = {instruction.name: instruction for instruction in computations["body"]}
    assert [name for name, instruction in body.items() if instruction.is_root] == ["next"]
    assert body["layer"].names == ("w", "x")
    assert [str(array) for operand in body["layer"].operands for array in operand.arrays] == ["f32[6,8,16]", "f32[8,16]"]
    (loop,) = [instruction for instruction in computations["main"] if instruction.opcode == "while"]
    assert [(call.name, call.role, call.times) for call in loop.calls] == [("cond", "condition", 7), ("body", "body", 6)]


def counts(text):
    """Of each kernel: its kind, who wrote it, runs, products, other FLOPs, bytes read, bytes written."""
    found = read_kernels(text)
    return [(one.kind, one.by, one.runs, one.products, one.flops, one.bytes_read, one.bytes_written) for one in found]


LOOP = """HloModule jit_loop, input_output_alias={ {0}: (2, {}, may-alias), {1,0}: (5, {}, must-alias) }, num_partitions=1

%fused (p: f32[6,8,16], q: f32[8,16]) -> f32[8,16] {
  %p = f32[6,8,16]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %row = f32[1,8,16]{2,1,0} dynamic-slice(%p, %zero, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %flat = f32[8,16]{1,0} bitcast(%row)
  %q = f32[8,16]{1,0} parameter(1)
  ROOT %sum = f32[8,16]{1,0} add(%flat, %q)
}

%body (arg: (f32[8,16], f32[6,8,16])) -> (f32[8,16], f32[6,8,16]) {
  %arg = (f32[8,16]{1,0}, f32[6,8,16]{2,1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%arg), index=0
  %w = f32[6,8,16]{2,1,0} get-tuple-element(%arg), index=1
  %layer = f32[8,16]{1,0} fusion(%w, %x), kind=kLoop, calls=%fused
  ROOT %next = (f32[8,16]{1,0}, f32[6,8,16]{2,1,0}) tuple(%layer, %w)
}

%cond (arg.1: (f32[8,16], f32[6,8,16])) -> pred[] {
  %arg.1 = (f32[8,16]{1,0}, f32[6,8,16]{2,1,0}) parameter(0)
  %y = f32[8,16]{1,0} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] custom-call(%y), custom_call_target="less"
}

ENTRY %main (x: f32[8,16], w: f32[6,8,16]) -> (f32[8,16], f32[6,8,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[6,8,16]{2,1,0} parameter(1)
  %t = (f32[8,16]{1,0}, f32[6,8,16]{2,1,0}) tuple(%x, %w)
  ROOT %loop = (f32[8,16]{1,0}, f32[6,8,16]{2,1,0}) while(%t), condition=%cond, body=%body, TRIPS
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"6"}}')


def test_a_loop_of_known_trips_runs_its_body_that_often_and_does_not_evaluate_its_condition():
    (layer,) = read_kernels(LOOP)
    assert (layer.name, layer.runs, layer.exact, layer.flops) == ("layer", 6, True, 8 * 16)
    assert (layer.bytes_read, layer.bytes_written) == (2 * 8 * 16 * F32, 8 * 16 * F32)  # one row of six, and the sum


def test_a_loop_of_unknown_trips_counts_as_one_trip_and_evaluates_its_condition():
    less, layer = read_kernels(re.sub(r", backend_config=.*", "", LOOP))
    assert (less.kind, less.by, less.runs, less.exact) == ("custom call", "less", 1, False)
    assert (less.bytes_read, less.bytes_written) == (8 * 16 * F32, 1)
    assert (layer.runs, layer.exact) == (1, False)


def test_parameters_that_a_result_takes_over_are_those_of_the_header():
    assert aliased(LOOP) == {2, 5}
    assert aliased(LOOP.replace("input_output_alias", "other")) == frozenset()


def test_double_precision_is_found_wherever_it_is():
    assert not float64_in(LOOP)
    assert float64_in(LOOP.replace("%row = f32[1,8,16]", "%row = f64[1,8,16]"))


def entry(*lines, before=""):
    return f"HloModule m\n\n{before}\nENTRY %main () -> () {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"


X, Y = "%x = f32[64,32]{1,0} parameter(0)", "%y = f32[32,16]{1,0} parameter(1)"
DIMS = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}'
PRODUCT = 2 * 64 * 32 * 16


def cublas(precision, result="(f32[64,16]{1,0}, s8[4194304]{0})", target="__cublas$lt$matmul"):
    config = f'{{"gemm_backend_config":{{{DIMS},"precision_config":{{{precision}}}}}}}'
    call = f'%p = {result} custom-call(%x, %y), custom_call_target="{target}", backend_config={config}'
    return entry(X, Y, call)


@pytest.mark.parametrize(
    ("precision", "products"),
    [
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"', {"tensorfloat32": PRODUCT}),
        ('"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"', {"float32": PRODUCT}),
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_DOT_F32_F32_F32"', {"float32": PRODUCT}),
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_DOT_BF16_BF16_F32_X3"', {"bfloat16": 3 * PRODUCT}),
        ('"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32"', {"float8": PRODUCT}),
    ],
)
def test_a_call_of_cublas_is_a_product_without_its_workspace(precision, products):
    assert counts(cublas(precision)) == [("product", "cuBLAS", 1, products, 0, (64 * 32 + 32 * 16) * F32, 64 * 16 * F32)]
    assert counts(cublas(precision, result="f32[64,16]{1,0}", target="__cublas$gemm")) == counts(cublas(precision))


@pytest.mark.parametrize(
    ("kind", "factor", "name"),
    [("bf16", 1, "bfloat16"), ("f8e5m2", 1, "float8"), ("s8", 1, "int8"), ("f64", 1, "float64"), ("c64", 4, "float32")],
)
def test_a_product_by_xla_is_computed_in_the_type_of_its_operands(kind, factor, name):
    dot = f"%dot = {kind}[64,16]{{1,0}} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    (product,) = read_kernels(entry(X.replace("f32", kind), Y.replace("f32", kind), dot))
    assert (product.kind, product.by, product.products) == ("product", "XLA", {name: factor * PRODUCT})


LABELS = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("Forward", "bf16[8,32,32,128]", ("bf16[8,32,32,64]", "bf16[128,3,3,64]")),
        ("BackwardInput", "bf16[8,32,32,64]", ("bf16[8,32,32,128]", "bf16[128,3,3,64]")),
        ("BackwardFilter", "bf16[128,3,3,64]", ("bf16[8,32,32,64]", "bf16[8,32,32,128]")),
    ],
)
def test_convolutions_of_cudnn_and_their_gradients_cost_the_same(target, result, operands):
    parameters = [f"%p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    call = f'%conv = ({result}, u8[64]{{0}}) custom-call(%p0, %p1), {LABELS}, custom_call_target="__cudnn$conv{target}"'
    flops = 2 * (8 * 32 * 32 * 128) * (3 * 3) * 64
    sizes = [math.prod(parse_shape(shape).arrays[0].sizes) * BF16 for shape in (*operands, result)]
    assert counts(entry(*parameters, call)) == [("product", "cuDNN", 1, {"bfloat16": flops}, 0, sizes[0] + sizes[1], sizes[2])]


def total_products(text):
    total = Counter()
    for kernel in read_kernels(text):
        total.update({name: kernel.runs * flops for name, flops in kernel.products.items()})
    return dict(total)


KEPT = pathlib.Path(__file__).parent / "printed"
"""What XLA printed for an H100, by version of JAX, without the tables of source lines and the metadata that name them; the tests
marked ``targets`` write it where JAXPP_WRITE_HLO=1."""

BATCH, LENGTH, HEADS, SHARED, WIDE, WINDOW = 4, 1024, 12, 4, 64, 129
SCORES = {
    "attention": LENGTH * LENGTH,
    "attention_causal": LENGTH * (LENGTH + 1) // 2,
    "attention_causal_gradients": LENGTH * (LENGTH + 1) // 2,
    "attention_causal_dropout": LENGTH * (LENGTH + 1) // 2,
    "attention_window": WINDOW * (WINDOW + 1) // 2 + (LENGTH - WINDOW) * WINDOW,
    "attention_gradients": LENGTH * LENGTH,
}
"""Of one head of one example: all; those of a query with the keys up to its own; and of those the last so many."""


def attention_flops(name):
    """Two products for each score forward; with gradients five more, the scores among them once again."""
    products = 2 + 5 * name.endswith("gradients")
    return 2 * products * BATCH * HEADS * SCORES[name] * WIDE


KEPT_PRODUCTS = {
    **{name: {"bfloat16": attention_flops(name)} for name in SCORES},
    "three_products": {"bfloat16": 3 * 2 * 512**3},
    "cublas_batch": {"tensorfloat32": 2 * 8 * 128 * 64 * 32},
    "cublas_float8": {"float8": 2 * 512**3},
    "int8": {"int8": 2 * 512**3},
    "convolutions": {"bfloat16": 3 * 2 * (8 * 32 * 32 * 128) * (3 * 3) * 64},
    "scan": {"bfloat16": 6 * 2 * 512**3},
    "branch": {"bfloat16": 2 * 512**3},
    "int4": {"bfloat16": 2 * 512**3},
    "pool": {},
    "update_in_place": {},
    "to_the_host": {},
}


MEMBERS, ROWS = ((0, 1, 2, 3),), 256 * 256 * 4  # of a mesh of four, each with so many bytes
KEPT_COLLECTIVES = {  # kind, groups, bytes read and written by each device
    "psum": ("all-reduce", MEMBERS, ROWS, ROWS),
    "all_gather": ("all-gather", MEMBERS, ROWS, 4 * ROWS),
    "psum_scatter": ("reduce-scatter", MEMBERS, ROWS, ROWS // 4),
    "all_to_all": ("all-to-all", MEMBERS, ROWS, ROWS),
    "ppermute": ("collective-permute", ((0, 1), (1, 2), (2, 3), (3, 0)), ROWS, ROWS),
    "psum_of_pairs": ("all-reduce", ((0, 2), (1, 3)), ROWS, ROWS),
}


def collectives(text):
    found = [kernel for kernel in read_kernels(text) if kernel.kind == "collective"]
    return [(kernel.collective, kernel.groups, kernel.bytes_read, kernel.bytes_written) for kernel in found]


@pytest.mark.parametrize("path", sorted(path for path in KEPT.rglob("*.txt") if path.stem in KEPT_COLLECTIVES), ids=str)
def test_of_what_xla_printed_the_collectives_are_those_that_were_asked_for(path):
    assert collectives(path.read_text()) == [KEPT_COLLECTIVES[path.stem]]


def kept():
    return [
        pytest.param(path, id=f"{path.parent.name}, {path.stem}")
        for path in sorted(KEPT.rglob("*.txt"))
        if path.stem in KEPT_PRODUCTS
    ]


@pytest.mark.parametrize("path", kept())
def test_of_what_xla_printed_the_products_are_those_counted_by_hand(path):
    assert total_products(path.read_text()) == KEPT_PRODUCTS[path.stem]


SIZES = {  # of each product: batch, rows, columns, terms of a sum; of attention heads, queries, keys, features
    "attention": [(BATCH * HEADS, LENGTH, LENGTH, WIDE)],
    "attention_causal_gradients": [(BATCH * HEADS, LENGTH, LENGTH, WIDE)] * 2,
    "cublas_batch": [(8, 128, 32, 64)],
    "cublas_float8": [(1, 512, 512, 512)],
    "int8": [(1, 512, 512, 512)],
    "scan": [(4, 512, 512, 128)],  # whose sum is divided into four
    "three_products": [(8, 512, 512, 3 * 64)],
    "convolutions": [(1, 8 * 32 * 32, 128, 9 * 64), (1, 9 * 64, 128, 8 * 32 * 32), (1, 8 * 32 * 32, 9 * 64, 128)],
}


@pytest.mark.parametrize("path", [path for path in kept() if path.values[0].stem in SIZES])
def test_of_what_xla_printed_each_product_has_its_sizes(path):
    sizes = [product for kernel in read_kernels(path.read_text()) for product in kernel.sizes]
    assert [(each.batch, each.m, each.n, each.k) for each in sizes] == SIZES[path.stem]
    plain = [each for each in sizes if not each.attends]
    assert all(each.flops == 2 * each.batch * each.m * each.n * each.k for each in plain)
    ways = [(each.attends, each.causal) for each in sizes if each.attends]
    assert ways == {"attention": [("forward", False)], "attention_causal_gradients": [("forward", True), ("backward", True)]}.get(
        path.stem, []
    )


def test_of_what_xla_printed_a_kernel_reads_again_what_was_touched_before():
    for folder in KEPT.iterdir():
        product, total = read_kernels((folder / "int4.txt").read_text())
        assert product.again == () and total.again == ((total.bytes_read, 0),), "the sum of the parts follows the product"
        forward, *_, backward = read_kernels((folder / "attention_gradients.txt").read_text())
        queries = BATCH * LENGTH * HEADS * WIDE * BF16
        assert forward.again == () and (queries, 0) in backward.again
        assert max(since for _, since in backward.again) > queries, "the cotangent was made before the forward"


def test_of_what_xla_printed_updates_are_in_place_and_the_host_has_memory_of_its_own():
    for folder in KEPT.iterdir():
        assert aliased((folder / "update_in_place.txt").read_text()) == {0}
        sine, copy = read_kernels((folder / "to_the_host.txt").read_text())
        size = 512 * 512 * F32
        assert (sine.host_bytes, copy.bytes_read, copy.bytes_written, copy.host_bytes) == (0, size, 0, size)
        (pool,) = read_kernels((folder / "pool.txt").read_text())
        assert (pool.kind, pool.flops) == ("reduction", 8 * 16 * 16 * 64 * 4)
        writers = {kernel.by for path in folder.iterdir() for kernel in read_kernels(path.read_text())}
        assert {"Triton", "cuBLAS", "cuDNN", "XLA"} <= writers


def test_every_pattern_that_is_looked_for_is_in_what_xla_printed():
    texts = [path.read_text() for path in KEPT.rglob("*.txt")]
    lines = [line for text in texts for line in text.splitlines()]
    instructions = [each for text in texts for body in parse_hlo(text)[0].values() for each in body]
    attributes = [text for each in instructions for text in (each.attributes, each.config)]
    patterns = {name: pattern for name, pattern in vars(hlo).items() if isinstance(pattern, re.Pattern)}
    elsewhere = {"_IOTA", "_AXIS"}  # in groups of meshes, of which tests/observe has others
    missing = [
        name for name, pattern in patterns.items() if name not in elsewhere and not any(map(pattern.search, [*lines, *attributes]))
    ]
    assert len(patterns) > 20
    assert missing == []


def test_of_what_xla_printed_every_program_is_kept_of_two_versions():
    found = {folder.name: {path.stem for path in folder.iterdir()} for folder in KEPT.iterdir()}
    assert len(found) == 2
    assert all(names == {*KEPT_PRODUCTS, *KEPT_COLLECTIVES} for names in found.values())


FUSED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%replace (d: f32[], e: f32[]) -> f32[] {
  %d = f32[] parameter(0)
  ROOT %e = f32[] parameter(1)
}

%halves (p: f32[64,32]) -> f32[64,16] {
  %p = f32[64,32]{1,0} parameter(0)
  %wide = f32[64,32]{1,0} negate(%p)
  %left = f32[64,8]{1,0} slice(%wide), slice={[0:64], [0:8]}
  %right = f32[64,8]{1,0} slice(%wide), slice={[0:64], [24:32]}
  ROOT %both = f32[64,16]{1,0} concatenate(%left, %right), dimensions={1}
}

%keep (q: f32[64,32], u: f32[1,32], i: s32[]) -> (f32[64,32], f32[64,32]) {
  %q = f32[64,32]{1,0} parameter(0)
  %u = f32[1,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,32]{1,0} dynamic-slice(%q, %i, %zero), dynamic_slice_sizes={1,32}
  %new = f32[1,32]{1,0} add(%old, %u)
  %once = f32[64,32]{1,0} dynamic-update-slice(%q, %new, %i, %zero)
  %twice = f32[64,32]{1,0} dynamic-update-slice(%once, %u, %zero, %zero)
  %empty = f32[64,32]{1,0} broadcast(%zero), dimensions={}
  %fresh = f32[64,32]{1,0} dynamic-update-slice(%empty, %u, %i, %zero)
  ROOT %pair = (f32[64,32]{1,0}, f32[64,32]{1,0}) tuple(%twice, %fresh)
}

%some_calls (r: f32[64,32]) -> f32[64,16] {
  %r = f32[64,32]{1,0} parameter(0)
  ROOT %inner = f32[64,16]{1,0} fusion(%r), kind=kLoop, calls=%halves
}
"""
UPDATE, INDEX = "%u = f32[1,32]{1,0} parameter(1)", "%i = s32[] parameter(2)"


def test_what_a_fusion_slices_counts_as_what_is_read_of_it():
    fusion = "%f = f32[64,16]{1,0} fusion(%x), kind=kLoop, calls=%halves"
    sliced = (64 * 8 + 64 * 8) * F32
    assert counts(entry(X, fusion, before=FUSED)) == [("elementwise", "XLA", 1, NONE, 64 * 32, sliced, 64 * 16 * F32)]


def test_updates_of_a_buffer_that_a_result_takes_over_count_and_the_buffer_does_not():
    fusion = "%f = (f32[64,32]{1,0}, f32[64,32]{1,0}) fusion(%x, %u, %i), kind=kLoop, calls=%keep"
    read = 32 * F32 + 32 * F32 + S32  # the old row, the update and the index
    written = 2 * 32 * F32 + 64 * 32 * F32  # two rows in place, and a new buffer
    assert counts(entry(X, UPDATE, INDEX, fusion, before=FUSED)) == [("copy", "XLA", 1, NONE, 32, read, written)]


@pytest.mark.parametrize(("apply", "reads", "flops"), [("add", 2, 5 * 32), ("replace", 1, 0)])
def test_a_scatter_reads_what_it_adds_to_and_not_what_it_replaces(apply, reads, flops):
    indices, updates = "%n = s32[5]{0} parameter(1)", "%u = f32[5,32]{1,0} parameter(2)"
    scatter = f"%s = f32[64,32]{{1,0}} scatter(%x, %n, %u), update_window_dims={{1}}, to_apply=%{apply}"
    rows = 5 * 32 * F32
    scattered = ("scatter", "XLA", 1, NONE, flops, reads * rows + 5 * S32, rows)
    assert counts(entry(X, indices, updates, scatter, before=FUSED)) == [scattered]


def test_an_operand_that_is_passed_twice_is_read_once_also_behind_bitcasts():
    turned = "%z = f32[32,64]{0,1} bitcast(%x)"
    dot = "%dot = f32[64,64]{1,0} dot(%x, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    assert counts(entry(X, turned, dot)) == [("product", "XLA", 1, {"float32": 2 * 64 * 64 * 32}, 0, 64 * 32 * F32, 64 * 64 * F32)]
    pair = "%t = (f32[64,32]{1,0}, f32[64,32]{1,0}) parameter(0)"
    parts = [f"%g{i} = f32[64,32]{{1,0}} get-tuple-element(%t), index={i}" for i in range(2)]
    different, same = "%a = f32[64,32]{1,0} add(%g0, %g1)", "%a = f32[64,32]{1,0} add(%g1, %g1)"
    assert [kernel.bytes_read for kernel in read_kernels(entry(pair, *parts, different))] == [2 * 64 * 32 * F32]
    assert [kernel.bytes_read for kernel in read_kernels(entry(pair, *parts, same))] == [64 * 32 * F32]


def test_a_window_needs_all_that_it_slides_over():
    pool = "%p = f32[32,32]{1,0} reduce-window(%x, %zero), window={size=2x1 stride=2x1}, to_apply=%add"
    reduced = ("reduction", "XLA", 1, NONE, 2 * 32 * 32, 64 * 32 * F32 + F32, 32 * 32 * F32)
    assert counts(entry(X, "%zero = f32[] constant(0)", pool, before=FUSED)) == [reduced]


def test_what_has_started_writes_what_is_done_and_runs_once():
    names = {"n": "f32[64,32]{1,0}", "h": "f32[64,32]{1,0:S(5)}", "w": "f32[256,32]{1,0}", "a": "f32[64,16]{1,0}"}
    text = entry(
        X,
        f"%cs = ({names['h']}, {names['n']}, u32[]) copy-start(%x)",
        f"%gs = ({names['n']}, {names['w']}) all-gather-start(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}",
        f"%as = (({names['n']}), {names['a']}, u32[]) async-start(%x), calls=%some_calls",
        f"%fs = (({names['n']}), {names['a']}, u32[]) fusion-start(%x), kind=kLoop, calls=%halves",
        f"%cd = {names['h']} copy-done(%cs)",
        f"%gd = {names['w']} all-gather-done(%gs)",
        f"%ad = {names['a']} async-done(%as), calls=%some_calls",
        f"%fd = {names['a']} fusion-done(%fs), calls=%halves",
        before=FUSED,
    )
    copy, gather, inner, fusion = read_kernels(text)
    size = 64 * 32 * F32
    assert (copy.kind, copy.bytes_read, copy.bytes_written, copy.host_bytes) == ("copy", size, 0, size)
    assert (gather.kind, gather.bytes_read, gather.bytes_written, gather.host_bytes) == ("collective", size, 4 * size, 0)
    assert (inner.name, fusion.name) == ("inner", "fs")
    assert inner.bytes_read == inner.bytes_written == fusion.bytes_read == fusion.bytes_written == 64 * 16 * F32


def test_the_computation_of_a_call_is_looked_into_and_the_dearest_branch_counts():
    call = "%c = f32[64,16]{1,0} call(%x), to_apply=%some_calls"
    branch = "%b = f32[64,16]{1,0} conditional(%i, %x, %x), branch_computations={%some_calls, %dear}"
    dear = "%dear (s: f32[64,32]) -> f32[64,32] {\n  %s = f32[64,32]{1,0} parameter(0)\n  ROOT %all = f32[64,32]{1,0} tanh(%s)\n}\n"
    found = read_kernels(entry(X, INDEX, call, branch, before=FUSED + dear))
    assert [(kernel.name, kernel.runs, kernel.exact) for kernel in found] == [("inner", 1, True), ("all", 1, False)]


def test_what_is_not_known_is_a_kernel_with_the_bytes_of_its_operands():
    (kernel,) = read_kernels(entry(X, UPDATE, "%f = (f32[64,32]{1,0}, s32[4]{0}) frobnicate(%x, %u), wobble=[{(3}]"))
    assert (kernel.kind, kernel.by, kernel.flops, kernel.products) == ("other", "XLA", 0, {})
    assert (kernel.bytes_read, kernel.bytes_written) == ((64 + 1) * 32 * F32, 64 * 32 * F32 + 4 * S32)
    assert read_kernels("") == read_kernels("module @jit_sin {\n}") == ()


# What follows compiles for GPUs that are not there.


@pytest.fixture(scope="module")
def gpus():
    pytest.importorskip("jax_plugins.xla_cuda12")
    return jaxpp.target("h100", 4)


@pytest.fixture
def on_gpu(gpus):
    """The text of a function that is compiled for one GPU, for arguments such as ``"f32[8,16]"``."""
    on = SingleDeviceSharding(gpus[0])
    dtypes = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "pred": "bool", "f64": "float64", "s8": "int8", "s4": "int4"}

    def text(function, *shapes, **options):
        arrays = [parse_shape(shape).arrays[0] for shape in shapes]
        args = [jax.ShapeDtypeStruct(array.sizes, dtypes[array.type], sharding=on) for array in arrays]
        with not_public.cudnn_of(gpus):
            return jax.jit(function, **{"out_shardings": on} | options).lower(*args).compile().as_text()

    return text


BY_CUBLAS = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}
N = 1024 * 1024


def scan(x, layers):
    return jax.lax.scan(lambda x, layer: (jnp.tanh(x + layer), None), x, layers)[0]


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def update(cache, new, at):
    return jax.lax.dynamic_update_slice(cache, new, (0, at, 0))


CACHE = "bf16[8,1024,64]", "bf16[8,1,64]", "s32[]"
CONV = "bf16[8,32,32,64]", "bf16[3,3,64,128]"
IMAGES = 8 * 32 * 32  # pixels of a batch
CONV_FLOPS = 2 * (IMAGES * 128) * (3 * 3) * 64  # of each element of the result, the products with a window
TURNED = ("copy", "XLA", 1, NONE, 0, 3 * 3 * 64 * 128 * BF16, 3 * 3 * 64 * 128 * BF16)  # the kernel of a convolution, for cuDNN
CLAMPED = 3  # a position is compared with 0, moved from the end, and selected
UPDATED = ("copy", "XLA", 1, NONE, CLAMPED, 8 * 64 * BF16 + S32, 8 * 64 * BF16)
PROGRAMS = {
    "a product": (
        (lambda x, y: x @ y, "bf16[8192,4096]", "bf16[4096,8192]"),
        {},
        [("product", "Triton", 1, {"bfloat16": 2 * 8192 * 4096 * 8192}, 0, 2 * 8192 * 4096 * BF16, 8192 * 8192 * BF16)],
    ),
    "a product with itself": (
        (lambda x: x @ x, "f32[4096,4096]"),
        {},
        [("product", "Triton", 1, {"tensorfloat32": 2 * 4096**3}, 0, 4096**2 * F32, 4096**2 * F32)],
    ),
    "a product with an epilogue": (
        (lambda x, y, b: jax.nn.relu(x @ y + b), "bf16[4096,4096]", "bf16[4096,4096]", "bf16[4096]"),
        {},
        [("product", "Triton", 1, {"bfloat16": 2 * 4096**3}, 2 * 4096**2, (2 * 4096**2 + 4096) * BF16, 4096**2 * BF16)],
    ),
    "a product in three products": (
        (lambda x, y: jax.lax.dot(x, y, precision=DotAlgorithmPreset.BF16_BF16_F32_X3), "f32[4096,4096]", "f32[4096,4096]"),
        {},
        [("product", "Triton", 1, {"bfloat16": 3 * 2 * 4096**3}, 0, 2 * 4096**2 * F32, 4096**2 * F32)],
    ),
    "a product by cuBLAS": (
        (lambda x, y: jnp.dot(x, y, precision="highest"), "f32[1023,511]", "f32[511,257]"),
        BY_CUBLAS,
        [("product", "cuBLAS", 1, {"float32": 2 * 1023 * 511 * 257}, 0, (1023 * 511 + 511 * 257) * F32, 1023 * 257 * F32)],
    ),
    "products of a batch by cuBLAS": (
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), "f32[8,128,64]", "f32[8,32,64]"),
        BY_CUBLAS,
        [("product", "cuBLAS", 1, {"tensorfloat32": 2 * 8 * 128 * 64 * 32}, 0, 8 * (128 + 32) * 64 * F32, 8 * 128 * 32 * F32)],
    ),
    "elementwise work": (
        (lambda x: jnp.sin(x) * 2 + x, "f32[1024,1024]"),
        {},
        [("elementwise", "XLA", 1, NONE, 3 * N, N * F32, N * F32)],
    ),
    "an update with momentum": (
        (lambda p, m, g: (p - m, 0.9 * m + g), "f32[1024,1024]", "f32[1024,1024]", "f32[1024,1024]"),
        {"donate_argnums": (0, 1)},
        [("elementwise", "XLA", 1, NONE, 3 * N, 3 * N * F32, 2 * N * F32)],
    ),
    "a reduction": (
        (lambda x: x.sum(0), "f32[1024,4096]"),
        {},
        [("reduction", "XLA", 1, NONE, 4 * N, 4 * N * F32, 4096 * F32)],
    ),
    "a softmax": (  # maximum, difference, exponential, sum, quotient
        (jax.nn.softmax, "f32[1024,4096]"),
        {},
        [("reduction", "Triton", 1, NONE, 5 * 4 * N, 4 * N * F32, 4 * N * F32)],
    ),
    "a scan over six layers": (  # the counter and the carry are copied first; the counter is incremented by a kernel of its own
        (scan, "f32[1024,1024]", "f32[6,1024,1024]"),
        {},
        [
            ("copy", "XLA", 1, NONE, 0, S32, S32),
            ("copy", "XLA", 1, NONE, 0, N * F32, N * F32),
            ("elementwise", "XLA", 6, NONE, 2 * N, 2 * N * F32 + S32, N * F32),
            ("elementwise", "XLA", 6, NONE, 1, S32, S32),
        ],
    ),
    "an embedding": (
        (lambda e, tokens: e[tokens], "bf16[50000,512]", "s32[16,128]"),
        {},
        [("copy", "XLA", 1, NONE, CLAMPED * 16 * 128, 16 * 128 * (512 * BF16 + S32), 16 * 128 * 512 * BF16)],
    ),
    "rows that are added in place": (
        (lambda e, rows, new: e.at[rows].add(new), "f32[50000,512]", "s32[64]", "f32[64,512]"),
        {"donate_argnums": 0},
        [("scatter", "XLA", 1, NONE, (512 + CLAMPED) * 64, 64 * (2 * 512 * F32 + S32), 64 * 512 * F32)],
    ),
    "an update in place": ((update, *CACHE), {"donate_argnums": 0}, [UPDATED]),
    "an update of a copy": (
        (update, *CACHE),
        {},
        [("copy", "XLA", 1, NONE, 0, 8 * 1024 * 64 * BF16, 8 * 1024 * 64 * BF16), UPDATED],
    ),
    "a slice": (
        (lambda x, at: jnp.sin(jax.lax.dynamic_slice(x, (0, at, 0), (8, 1, 64))), "f32[8,1024,64]", "s32[]"),
        {},
        [("elementwise", "XLA", 1, NONE, 8 * 64 + CLAMPED, 8 * 64 * F32 + S32, 8 * 64 * F32)],
    ),
    "a sort": (  # that keeps the order of equal values writes that order too
        (jnp.sort, "f32[1024,1000]"),
        {},
        [("sort", "XLA", 1, NONE, 0, 1024 * 1000 * F32, 1024 * 1000 * (F32 + S32))],
    ),
    "a convolution": (
        (conv, *CONV),
        {},
        [
            TURNED,
            ("product", "cuDNN", 1, {"bfloat16": CONV_FLOPS}, 0, (IMAGES * 64 + 3 * 3 * 64 * 128) * BF16, IMAGES * 128 * BF16),
        ],
    ),
}


@pytest.mark.targets
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_gpu_runs_is_what_is_counted_by_hand(name, on_gpu):
    program, options, kernels = PROGRAMS[name]
    text = on_gpu(*program, **options)
    assert counts(text) == kernels
    assert all(kernel.exact and not kernel.host_bytes for kernel in read_kernels(text))
    donated = options.get("donate_argnums", ())
    assert aliased(text) == set(np.atleast_1d(donated))
    assert not float64_in(text)


def attend(*given, **options):
    return jax.nn.dot_product_attention(*given, implementation="cudnn", **options)


def with_gradients(function):
    return jax.grad(lambda *given: function(*given).sum().astype("float32"), (0, 1, 2))


def dropping(q, k, v):
    """The only public way to dropout inside of attention by cuDNN is Flax's, which asks for a GPU; this is what it calls."""
    return not_public.attention.dot_product_attention(
        q, k, v, mask_type=not_public.attention.MaskType.CAUSAL, dropout_rate=0.1, seed=3
    )


def float8(x, y):
    return jax.lax.dot(x.astype("float8_e4m3fn"), y.astype("float8_e4m3fn"), preferred_element_type="bfloat16")


QUERIES, FEWER = f"bf16[{BATCH},{LENGTH},{HEADS},{WIDE}]", f"bf16[{BATCH},{LENGTH},{SHARED},{WIDE}]"
SQUARE = "bf16[512,512]"
TO_KEEP = {
    "attention": ((attend, QUERIES, QUERIES, QUERIES), {}),
    "attention_causal": ((partial(attend, is_causal=True), QUERIES, FEWER, FEWER), {}),
    "attention_causal_gradients": ((with_gradients(partial(attend, is_causal=True)), QUERIES, FEWER, FEWER), {}),
    "attention_causal_dropout": ((dropping, QUERIES, QUERIES, QUERIES), {}),
    "attention_window": (
        (partial(attend, is_causal=True, local_window_size=(WINDOW - 1, 0)), QUERIES, QUERIES, QUERIES),
        {},
    ),
    "attention_gradients": ((with_gradients(attend), QUERIES, QUERIES, QUERIES), {}),
    "three_products": (
        (lambda x, y: jax.lax.dot(x, y, precision=DotAlgorithmPreset.BF16_BF16_F32_X3), "f32[512,512]", "f32[512,512]"),
        {},
    ),
    "cublas_batch": ((lambda x, y: jnp.einsum("bij,bkj->bik", x, y), "f32[8,128,64]", "f32[8,32,64]"), BY_CUBLAS),
    "cublas_float8": ((float8, SQUARE, SQUARE), BY_CUBLAS),
    "int8": ((lambda x, y: jax.lax.dot(x, y, preferred_element_type="int32"), "s8[512,512]", "s8[512,512]"), BY_CUBLAS),
    "convolutions": ((jax.grad(lambda x, w: jax.nn.relu(conv(x, w)).sum().astype("float32"), (0, 1)), *CONV), {}),
    "scan": ((lambda x, layers: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0], SQUARE, "bf16[6,512,512]"), {}),
    "branch": ((lambda which, x: jax.lax.cond(which, lambda x: x @ x, lambda x: x * 2, x), "pred[]", SQUARE), {}),
    "pool": ((partial(flax.linen.max_pool, window_shape=(2, 2), strides=(2, 2)), "f32[8,32,32,64]"), {}),
    "update_in_place": ((update, *CACHE), {"donate_argnums": 0}),
    "to_the_host": ((lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Host), "f32[512,512]"), {"out_shardings": "host"}),
    "int4": ((lambda x, y: x.astype("bfloat16") @ y, "s4[512,512]", SQUARE), {}),
}


@pytest.mark.targets
@pytest.mark.parametrize("name", KEPT_PRODUCTS)
def test_what_xla_prints_now_counts_as_what_it_printed(name, gpus, on_gpu):
    program, options = TO_KEEP[name]
    if options.get("out_shardings") == "host":
        options = {"out_shardings": SingleDeviceSharding(gpus[0], memory_kind="pinned_host")}
    text = on_gpu(*program, **options)
    assert total_products(text) == KEPT_PRODUCTS[name]
    keep(name, text)


MAPPED = {
    "psum": (lambda x: jax.lax.psum(x, ("pair", "one")), P()),
    "all_gather": (lambda x: jax.lax.all_gather(x, ("pair", "one"), tiled=True), P()),
    "psum_scatter": (lambda x: jax.lax.psum_scatter(x, ("pair", "one"), tiled=True), P(("pair", "one"))),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, ("pair", "one"), 0, 0, tiled=True), P(("pair", "one"))),
    "ppermute": (lambda x: jax.lax.ppermute(x, ("pair", "one"), [(k, (k + 1) % 4) for k in range(4)]), P(("pair", "one"))),
    "psum_of_pairs": (lambda x: jax.lax.psum(x, "pair"), P("one")),
}


@pytest.mark.targets
@pytest.mark.parametrize("name", MAPPED)
def test_the_collectives_that_xla_prints_now_are_those_that_were_asked_for(name, gpus):
    mesh = Mesh(np.array(gpus).reshape(2, 2), ("pair", "one"))
    function, out = MAPPED[name]
    split = P(("pair", "one"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=out, check_vma=False)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=NamedSharding(mesh, split))
    text = jax.jit(mapped).lower(x).compile().as_text()
    assert collectives(text) == [KEPT_COLLECTIVES[name]]
    keep(name, text)


def keep(name, text):
    """Write what XLA printed, if that is asked for."""
    if os.environ.get("JAXPP_WRITE_HLO"):
        path = KEPT / f"jax-{jax.__version__}" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(without_places(text))


def without_places(text):
    """A program as it is printed, without the tables of the files and lines that it was made of."""
    header, _, rest = text.partition("\n")
    rest = rest[min(at for mark in ("\n%", "\nENTRY") if (at := rest.find(mark)) >= 0) :]
    header = re.sub(r", frontend_attributes=\{.*", "", header)
    for written in (r'metadata=\{(?:[^{}"]|"[^"]*")*\}', r'frontend_attributes=\{(?:[^{}"]|"[^"]*")*\}'):
        rest = re.sub(rf", {written}", "", rest)
    return f"{header}\n{rest.rstrip()}\n"


@pytest.mark.targets
def test_double_precision_on_a_gpu_is_found(x64, on_gpu):
    text = on_gpu(lambda x, y: x @ y, "f64[2048,2048]", "f64[2048,2048]")
    assert float64_in(text)
    assert total_products(text) == {"float64": 2 * 2048**3}


@pytest.mark.targets
def test_gradients_of_a_convolution_cost_as_much_as_the_convolution(on_gpu):
    gradients = jax.grad(lambda x, w: jax.nn.relu(conv(x, w)).sum().astype("float32"), (0, 1))
    assert total_products(on_gpu(gradients, *CONV)) == {"bfloat16": 3 * CONV_FLOPS}


@pytest.mark.targets
def test_an_all_reduce_reads_and_writes_the_array_on_each_device(gpus):
    mesh = Mesh(np.array(gpus), ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    summed = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=split)
    text = jax.jit(summed, out_shardings=whole).lower(x).compile().as_text()
    size = 256 * 256 * F32
    assert counts(text) == [("copy", "XLA", 1, NONE, 0, size, size), ("collective", "XLA", 1, NONE, 0, size, size)]


@pytest.mark.targets
def test_a_copy_to_the_host_is_counted_apart(gpus, on_gpu):
    host = SingleDeviceSharding(gpus[0], memory_kind="pinned_host")
    text = on_gpu(lambda x: jax.device_put(jnp.sin(x), jax.memory.Space.Host), "f32[1024,1024]", out_shardings=host)
    sine, copy = read_kernels(text)
    assert (sine.kind, sine.bytes_read, sine.bytes_written, sine.host_bytes) == ("elementwise", N * F32, N * F32, 0)
    assert (copy.kind, copy.bytes_read, copy.bytes_written, copy.host_bytes) == ("copy", N * F32, 0, N * F32)


@pytest.mark.targets
def test_the_dearest_branch_and_a_loop_of_unknown_trips_are_not_exact(on_gpu):
    def branch(which, x):
        return jax.lax.cond(which, lambda x: x @ x, lambda x: x * 2, x)

    for dear in (branch, lambda which, x: branch(~which, x)):
        found = read_kernels(on_gpu(dear, "pred[]", "f32[4096,4096]"))
        products = [kernel for kernel in found if kernel.products]
        assert [(kernel.products, kernel.exact) for kernel in products] == [({"tensorfloat32": 2 * 4096**3}, False)]
        assert not [kernel for kernel in found if kernel.flops > 1]  # the other branch
    loop = on_gpu(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 99, lambda x: x @ x, x), "f32[4096,4096]")
    assert [(kernel.runs, kernel.exact) for kernel in read_kernels(loop) if kernel.products] == [(1, False)]
    assert [kernel.exact for kernel in read_kernels(loop) if kernel.kind == "elementwise"] == [False]  # the condition


EXAMPLES, TOKENS, WIDTH, DEPTH, VOCAB = 4, 64, 64, 2, 128


def gpt_text(sharding):
    """The text of loss and gradients of a small decoder."""
    model = GPT(vocab_size=VOCAB, max_length=TOKENS, width=WIDTH, depth=DEPTH, dropout=0.0)

    def loss(params, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens, deterministic=True), tokens).mean()

    tokens = jax.ShapeDtypeStruct((EXAMPLES, TOKENS), jnp.int32, sharding=sharding)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    return jax.jit(jax.value_and_grad(loss), out_shardings=sharding).lower(params, tokens).compile().as_text()


def gpt_products():
    """2 m n k of each product, and twice that for its gradients: 12 squares of the width a block, scores and values, and logits."""
    tokens = EXAMPLES * TOKENS
    blocks = DEPTH * (2 * tokens * 12 * WIDTH**2 + 2 * 2 * tokens * TOKENS * WIDTH)
    return 3 * (blocks + 2 * tokens * WIDTH * VOCAB)


@pytest.mark.targets
def test_the_products_of_a_decoder_and_its_gradients_on_a_gpu_are_those_of_its_formula(gpus):
    assert total_products(gpt_text(SingleDeviceSharding(gpus[0]))) == {"tensorfloat32": gpt_products()}


def test_the_products_of_a_decoder_and_its_gradients_on_a_cpu_are_those_of_its_formula():
    text = gpt_text(SingleDeviceSharding(jax.devices()[0]))
    assert total_products(text) == {"float32": gpt_products()}
    assert {kernel.by for kernel in read_kernels(text) if kernel.products} == {"XLA"}
    assert all(kernel.exact for kernel in read_kernels(text))
