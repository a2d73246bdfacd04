"""The programs of a step are those that were compiled, each with what its text says; waste is told where it is and nowhere else."""

import dataclasses
import html
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.programs import Kept, ProgramRow, ProgramTable, WeightCopy, roofline_figure
from jaxpp.runtime.hlo import Kernel, read_kernels
from jaxpp.runtime.roofline import Roofline, program_roofline
from jaxpp.schedule.action import Kind
from jaxpp.targets import TARGETS
from tests.figures import assert_apart, key_words
from tests.models import PARAMS, X, pipeline

H100 = {each.name: each for each in TARGETS}["h100"]
SHAPES = jax.eval_shape(lambda: PARAMS)
BATCH = jax.ShapeDtypeStruct(X.shape, X.dtype)
MICROBATCHES = 4


def by_name(programs):
    return {row.name: row for row in programs}


@pytest.fixture(scope="module")
def on_cpu():
    return pipeline(microbatches=MICROBATCHES, schedule="1f1b").programs(SHAPES, BATCH)


@pytest.fixture(scope="module")
def gpus():
    pytest.importorskip("jax_plugins.xla_cuda12")
    return jaxpp.target("h100", 2)


@pytest.fixture(scope="module")
def on_gpu(gpus):
    return pipeline(microbatches=MICROBATCHES, schedule="1f1b", devices=gpus).programs(SHAPES, BATCH)


# --- rows ---


def test_each_program_of_a_step_is_a_row_that_runs_as_often_as_the_step_runs_it(on_cpu):
    runs = {row.name: row.runs for row in on_cpu}
    assert {name: count for name, count in runs.items() if re.fullmatch(r"stage_\d_(for|back)ward", name)} == {
        "stage_0_forward": MICROBATCHES,
        "stage_0_backward": MICROBATCHES,
        "stage_1_forward": MICROBATCHES,
        "stage_1_backward": MICROBATCHES,
    }
    assert {count for name, count in runs.items() if "ward" not in name} == {1}
    assert {(row.stage, row.rank) for row in on_cpu} == {(0, 0), (1, 1)}
    assert len(by_name(on_cpu)) == len(on_cpu) == len({id(row.compiled) for row in on_cpu})
    assert on_cpu[0] is next(iter(on_cpu))


@pytest.mark.parametrize("programs", ["on_cpu", pytest.param("on_gpu", marks=pytest.mark.targets)])
def test_a_row_has_the_sums_of_its_kernels_and_the_statistics_of_its_program(programs, request):
    for row in request.getfixturevalue(programs):
        kernels, memory = read_kernels(row.compiled.as_text()), row.compiled.memory_analysis()
        assert row.kernels == kernels
        assert row.num_kernels == sum(each.runs for each in kernels)
        assert row.bytes_read == sum(each.runs * each.bytes_read for each in kernels)
        assert row.bytes_written == sum(each.runs * each.bytes_written for each in kernels)
        assert row.flops == sum(each.runs * each.flops for each in kernels)
        products = sum(each.runs * sum(each.products.values()) for each in kernels)
        assert sum(row.products.values()) == sum(row.written_by.values()) == products
        assert (row.arguments, row.outputs) == (memory.argument_size_in_bytes, memory.output_size_in_bytes)
        assert (row.temporaries, row.aliased) == (memory.temp_size_in_bytes, memory.alias_size_in_bytes)


@pytest.mark.parametrize("programs", ["on_cpu", pytest.param("on_gpu", marks=pytest.mark.targets)])
def test_sums_of_a_step_count_each_program_as_often_as_it_runs(programs, request):
    programs = request.getfixturevalue(programs)
    assert programs.num_kernels == sum(row.runs * row.num_kernels for row in programs)
    assert programs.num_bytes == sum(row.runs * (row.bytes_read + row.bytes_written) for row in programs)
    forward = 2 * len(X) * (4 * 6 + 6 * 6 + 6 * 2)  # of three products; the backward has two for each but the first, which has one
    assert sum(programs.products.values()) == 3 * forward - 2 * len(X) * 4 * 6
    parts = [programs.of(rank=rank) for rank in (0, 1)]
    assert sum(part.num_bytes for part in parts) == programs.num_bytes


def test_donated_arguments_are_the_sums_of_gradients_and_what_the_update_replaces(on_cpu):
    rows = by_name(on_cpu)
    assert rows["stage_0_forward"].num_donated == rows["stage_0_forward"].aliased == 0
    assert rows["stage_0_backward"].num_donated == 1  # the vector of a's and b's gradients, or a's alone
    held = sum(row.num_donated for row in on_cpu if row.name.endswith("_update"))
    assert held == 3 * len(PARAMS)  # each parameter, and its two moments
    for row in on_cpu:
        assert 0 <= row.num_donated <= row.num_arguments


def test_a_program_that_is_forward_and_backward_counts_as_both():
    programs = pipeline(microbatches=MICROBATCHES, schedule="1f1b", fuse=True).programs(SHAPES, BATCH)
    both = by_name(programs)["stage_1_forward_backward"]
    assert (both.kinds, both.runs) == (("F", "B"), MICROBATCHES)
    assert both in programs.of("F").rows and both in programs.of(Kind.B).rows
    alone = programs.of("F", stage=0).num_kernels + programs.of("B", stage=0).num_kernels
    assert programs.of("F").num_kernels + programs.of("B").num_kernels == alone + 2 * MICROBATCHES * both.num_kernels
    assert "(4 runs are of both)" in str(programs).replace("\n  ", " ")


def test_a_split_backward_is_in_b_too():
    programs = pipeline(microbatches=MICROBATCHES, schedule="zb-h1").programs(SHAPES, BATCH)
    parts = {row.name for kind in "IW" for row in programs.of(kind)}
    assert parts and {row.name for row in programs.of("B")} >= parts
    with pytest.raises(ArgumentError) as caught:
        programs.of("A")
    assert str(caught.value).splitlines() == [
        "programs.of('A'): a kind of action is F, B, I or W.",
        "  Got: 'A'.",
        '  Fix: pass for example "F"; leave it out for the whole step.',
    ]


def test_stages_by_number_and_a_step_without_programs_of_a_kind(on_cpu):
    assert {row.stage for row in on_cpu.of(stage=1)} == {1}
    assert str(on_cpu.of("W")) == "no programs"
    assert on_cpu.of("W").num_kernels == 0


def test_a_forward_has_the_programs_of_apply_and_a_pipeline_those_of_a_function():
    def outputs(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    forward = jaxpp.Forward(outputs, num_stages=2)
    programs = forward.programs({name: SHAPES[name] for name in "ab"}, BATCH)
    assert {row.runs for row in programs.of("F")} == {2}
    assert not programs.of("B") and not any(row.num_donated for row in programs)
    pipe = pipeline(microbatches=MICROBATCHES)
    whole = pipe.programs(PARAMS, X)
    assert pipe.programs(SHAPES, BATCH) == whole, "shapes are enough"
    assert {row.kinds for row in pipe.programs(SHAPES, BATCH, fn=outputs) if row.kinds} == {("F",)}


def test_swapped_arguments_are_told_by_the_name_of_the_method():
    with pytest.raises(jaxpp.JaxppError, match=r"pipe\.programs"):
        pipeline().programs(BATCH, SHAPES)


# --- times ---


@pytest.mark.targets
def test_least_times_are_those_of_the_kernels_on_the_target(on_gpu):
    assert on_gpu.target is H100
    for row in on_gpu:
        assert row.roofline == program_roofline(row.kernels, H100)
        assert row.limit == "launch" and row.short == row.num_kernels, "all kernels of so small a model are short"
    seconds = [on_gpu.of(rank=rank).least_seconds for rank in (0, 1)]
    assert on_gpu.least_seconds == pytest.approx(sum(seconds))
    assert on_gpu.bound == max(seconds)
    assert any("tensorfloat32" in row.products or "float32" in row.products for row in on_gpu)


def test_a_device_without_numbers_has_no_times_and_no_roof(on_cpu):
    assert on_cpu.target is on_cpu.least_seconds is on_cpu.bound is None
    assert {row.roofline for row in on_cpu} == {None}
    said = " ".join(str(on_cpu).split())
    assert "at least" not in said and f"does not have the numbers of {jax.devices()[0]}, {jax.devices()[1]}" in said
    with pytest.raises(ArgumentError) as caught:
        on_cpu.figure()
    where, got, fix = str(caught.value).splitlines()
    assert where.startswith("programs.figure(): a roof is made of the peaks and the bandwidth of a GPU")
    assert got == f"  Got: {jax.devices()[0]}, {jax.devices()[1]}."
    assert fix == '  Fix: plan for a GPU, with devices=jaxpp.target("h100", 4).'


def test_a_mesh_has_the_programs_of_one_of_its_devices():
    devices = jax.devices()[:4]
    programs = pipeline(microbatches=2, devices=devices, data_parallel=2).programs(SHAPES, BATCH)
    assert "numbers are those of one of them" in str(programs).replace("\n  ", " ")
    assert any(kernel.kind == "collective" for row in programs for kernel in row.kernels)


# --- how it shows itself ---


@pytest.mark.targets
@pytest.mark.parametrize("columns", [60, 100, 200])
def test_no_line_is_wider_than_the_terminal(columns, on_gpu, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(on_gpu).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[:3] == ["program", "stage", "runs"]


@pytest.mark.targets
def test_the_table_has_a_line_for_each_program_and_the_page_too(on_gpu, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    head, *rows = str(on_gpu).split("\n\n")[0].splitlines()
    assert re.split(r"  +", head.strip()) == [
        *("program", "stage", "runs", "kernels", "products", "by", "bytes", "temporaries", "donated", "at least", "limited by")
    ]
    assert [row.split()[0] for row in rows] == [row.name for row in on_gpu]
    page = on_gpu._repr_html_()
    assert page.count("<tr>") == len(on_gpu) + 1
    assert all(html.escape(remark) in page for remark in on_gpu.remarks())


@pytest.mark.targets
def test_json_has_every_number(on_gpu):
    told = json.loads(on_gpu.to_json())
    assert told["target"] == "h100" and told["remarks"] == on_gpu.remarks()
    assert told["sums"]["num_kernels"] == on_gpu.num_kernels and told["sums"]["bound"] == on_gpu.bound
    for row, found in zip(on_gpu, told["rows"], strict=True):
        assert (found["name"], found["runs"], found["least_seconds"]) == (row.name, row.runs, row.least_seconds)
        assert found["roofline"] == row.roofline._asdict() and found["products"] == row.products
        assert [kernel["bytes_read"] for kernel in found["kernels"]] == [kernel.bytes_read for kernel in row.kernels]
        assert found["device"] == f"H100:{row.stage}" and "compiled" not in found


# --- waste, of programs that are written down ---

PRODUCT = Kernel("dot", "product", "Triton", 1, True, {"bfloat16": 2**36}, 0, 2**24, 2**24, 0)
GOOD = ProgramRow(
    *("stage_0_forward", 0, 0, "H100:0", (Kind.F,), 4, (PRODUCT,)),
    temporaries=2**20,
    num_arguments=2,
    activations=2**20,
    residuals=(Kept("bf16[8,64]", 2**19),),
    roofline=program_roofline([PRODUCT], H100),
)
WIDE = dataclasses.replace(PRODUCT, products={"tensorfloat32": 2**34})
SHORT = Kernel("add", "elementwise", "XLA", 60, True, {}, 64, 512, 256, 0)
WEIGHT = WeightCopy("transpose", "params/w f32[1024,1024]", 2**22, False, 1)


def changed(**fields):
    kernels = fields.get("kernels", GOOD.kernels)
    return dataclasses.replace(GOOD, name="stage_1_forward", stage=1, roofline=program_roofline(kernels, H100), **fields)


WASTE = {
    "a wide product": (
        changed(kernels=(PRODUCT, WIDE)),
        changed(kernels=(PRODUCT, dataclasses.replace(PRODUCT, products={"float32": 2**28}))),
        r"stage_1_forward multiplies 17.18 GFLOP in tensorfloat32, of products of 85.9 GFLOP, while most of the step's are in "
        r"bfloat16, whose peak is 2 times as high: look for",
    ),
    "a copied weight": (
        changed(copied=(WEIGHT,)),
        changed(copied=(WEIGHT._replace(num_bytes=2**16),)),
        r"stage_1_forward copies or transposes whole weights, 4 MiB in each of its runs \(params/w f32\[1024,1024\]; kernel",
    ),
    "a weight that is copied once a step": (None, changed(copied=(WEIGHT,), kinds=(), runs=1), ""),
    "a converted weight": (
        changed(copied=(WEIGHT._replace(converts=True), WEIGHT)),
        GOOD,
        r"stage_1_forward converts whole weights, 8 MiB in each of its runs \(params/w f32\[1024,1024\] and 1 more;",
    ),
    "short kernels": (
        changed(kernels=(PRODUCT, SHORT), short=60),
        changed(kernels=(PRODUCT, dataclasses.replace(SHORT, runs=10)), short=10),
        r"stage_1_forward has 60 kernels, of 61, that are shorter than their launch, which is 46% of its bound: fewer and larger",
    ),
    "a large residual": (
        changed(residuals=(*GOOD.residuals, Kept("f32[8,8,64,64]", 2**22)), temporaries=2**22),
        changed(residuals=(Kept("f32[8,8,64,64]", 2**22),), temporaries=2**23),
        r"stage_1_forward keeps a residual f32\[8,8,64,64\] of 4 MiB for the backward, as large as all its temporaries \(4 MiB\): ",
    ),
    "scores of attention": (
        changed(residuals=(Kept("bf16[8,12,64,64]", 2**22),), temporaries=2**22),
        GOOD,
        r'.*\(4 MiB\): if it has the scores of attention, .*_attention\(..., implementation="cudnn"\) keeps none; else compute',
    ),
    "a residual that is no scores": (
        changed(residuals=(Kept("bf16[8,64,256]", 2**22),), temporaries=2**22),
        GOOD,
        r".*\(4 MiB\): compute it in a narrower type",
    ),
    "a residual no larger than what is sent": (None, changed(residuals=(Kept("f32[8]", 2**20),)), ""),
    "a residual without temporaries": (
        changed(residuals=(Kept("f32[8]", 2**22),), temporaries=0),
        changed(residuals=(Kept("f32[8]", 2**21),), temporaries=0),
        r"stage_1_forward keeps a residual f32\[8\] of 4 MiB for the backward, as large as all its temporaries \(0\)",
    ),
    "double precision": (
        changed(has_float64=True),
        GOOD,
        r"stage_1_forward computes in float64, whose peak is 7.39 times lower than that of tensorfloat32: look for NumPy scalars",
    ),
}


@pytest.mark.parametrize("name", WASTE)
def test_waste_is_told_where_it_is_and_nowhere_else(name):
    wasteful, thrifty, sentence = WASTE[name]
    assert ProgramTable((GOOD, thrifty), H100).waste() == []
    if wasteful is not None:
        (found,) = ProgramTable((GOOD, wasteful), H100).waste()
        assert re.match(sentence, found), found


def test_other_programs_with_the_same_waste_are_named_behind_the_worst_and_not_too_many():
    rows = [dataclasses.replace(changed(has_float64=True), name=f"stage_{k}_forward") for k in range(6)]
    (found,) = ProgramTable(tuple(rows), H100).waste()
    assert "; so do stage_1_forward, stage_2_forward, stage_3_forward and 2 more: " in found
    (found,) = ProgramTable(tuple(rows[:2]), H100).waste()
    assert "; so does stage_1_forward: " in found


def test_all_products_in_float32_are_no_mixture():
    assert ProgramTable((changed(kernels=(WIDE,)), changed(kernels=(WIDE,))), H100).waste() == []


# --- waste, of models ---


def waste(loss, params, batch, devices, **options):
    pipe = jaxpp.Pipeline(loss, optax.sgd(0.1), **{"num_stages": 2, "num_microbatches": 2, "devices": devices} | options)
    return pipe.programs(params, batch)


def chain(inner=jnp.bfloat16):
    """Three matrices, the first of which is multiplied in a type of its own."""

    def loss(params, x):
        h = jnp.tanh(x.astype(inner) @ params["a"].astype(inner)).astype(jnp.bfloat16)
        for name in "bc":
            h = jnp.tanh(h @ params[name].astype(jnp.bfloat16))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return loss


SQUARES = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abc"}
ROWS = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.targets
def test_a_product_that_was_not_cast_is_told_of_and_a_loss_in_float32_is_not(gpus):
    mixed, narrow = (waste(chain(inner), SQUARES, ROWS, gpus) for inner in (jnp.float32, jnp.bfloat16))
    (found,) = [sentence for sentence in mixed.waste() if "multiplies" in sentence]
    assert found.startswith("stage_0_") and "in tensorfloat32" in found
    assert not any("multiplies" in sentence for sentence in narrow.waste())


@pytest.mark.targets
def test_a_weight_whose_layout_a_library_turns_for_every_microbatch_is_told_of(gpus):
    def loss(params, x):
        dims = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=dims)
        return jnp.mean(jnp.tanh(h @ params["out"]).astype(jnp.float32) ** 2)

    def shapes(channels):
        return {
            "w": jax.ShapeDtypeStruct((3, 3, 128, channels), jnp.bfloat16),
            "out": jax.ShapeDtypeStruct((channels, 2), jnp.bfloat16),
        }

    batch = jax.ShapeDtypeStruct((4, 8, 8, 128), jnp.bfloat16)
    large, small = (waste(loss, shapes(channels), batch, gpus[:1], num_stages=1) for channels in (1024, 128))
    (found,) = [sentence for sentence in large.waste() if "whole weights" in sentence]
    assert "w bf16[3,3,128,1024]" in found
    assert not any("whole weights" in sentence for sentence in small.waste())
    assert any(row.copied for row in small), "it is too small to be told of"


@pytest.mark.targets
def test_casts_once_a_step_are_no_waste(gpus):
    shapes = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in "abc"}
    programs = waste(chain(), shapes, jax.ShapeDtypeStruct((8, 1024), jnp.float32), gpus)
    begin = [row for row in programs if row.name.startswith("begin")]
    assert any(copied.converts and copied.num_bytes == 4 << 20 for row in begin for copied in row.copied)
    assert not any("whole weights" in sentence for sentence in programs.waste())


@pytest.mark.targets
def test_attention_that_is_kept_for_the_backward_is_told_of_and_activations_are_not(gpus):
    def loss(params, x):
        for name in "ab":
            x = jnp.tanh(x @ params[name])
            x = x + jnp.tanh(x @ x.swapaxes(1, 2)) @ x
        return jnp.mean(x**2)

    params = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in "ab"}
    long, short = (waste(loss, params, jax.ShapeDtypeStruct((4, length, 16), jnp.float32), gpus) for length in (256, 16))
    (found,) = [sentence for sentence in long.waste() if "residual" in sentence]
    assert found.startswith("stage_0_forward keeps a residual f32[2,256,256] of 512 KiB for the backward")
    assert not any("residual" in sentence for sentence in short.waste())


@pytest.mark.targets
def test_launches_are_told_of_in_a_model_of_small_kernels(on_gpu):
    (found,) = [sentence for sentence in on_gpu.waste() if "launch" in sentence]
    assert "100% of its bound" in found


def test_float64_is_told_of(on_cpu):
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float64), SHAPES)
        programs = pipeline().programs(double, jax.ShapeDtypeStruct(X.shape, jnp.float64))
    assert any("computes in float64" in sentence for sentence in programs.waste())
    assert not any("float64" in sentence for sentence in on_cpu.waste())


# --- the roofline ---


def program(name, kinds, flops, num_bytes, seconds, runs, stage=0):
    kernel = Kernel("fusion", "product", "Triton", 1, True, {"bfloat16": flops}, 0, num_bytes, 0, 0)
    return ProgramRow(name, stage, 0, "H100:0", kinds, runs, (kernel,), roofline=Roofline(seconds, 0, 0))


def rows_of(stages, seconds=1e-3):
    found = []
    for stage in range(stages):
        found.append(program(f"stage_{stage}_forward", (Kind.F,), 10**11, 10**9, seconds, 8, stage))
        found.append(program(f"stage_{stage}_backward", (Kind.B,), 2 * 10**11, 10**9, 1.9 * seconds, 8, stage))
    update = program("stage_0_update", (), 10**7, 4 * 10**7, seconds, 1)
    return [*found, update, program("begin_stage_0", (), 0, 10**8, seconds, 1)]


@pytest.mark.parametrize("width", [None, 4.5])
@pytest.mark.parametrize("stages", [1, 4])
def test_the_figure_has_the_roof_and_a_dot_for_each_program_where_its_numbers_are(width, stages):
    rows = rows_of(stages)
    figure = roofline_figure(rows, ["bfloat16", "tensorfloat32"], H100, width)
    axes = figure.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert {"memory", "bfloat16  989.4 TFLOP/s", "tensorfloat32  494.7 TFLOP/s", "elementwise  66.9 TFLOP/s"} <= set(lines)
    for x, y in lines["memory"]:
        assert y == pytest.approx(x * H100.bandwidth)
    drawn = {each.get_label(): each for each in axes.collections}
    flops = {row.name: row.products["bfloat16"] for row in rows}
    assert set(drawn) == {name for name, number in flops.items() if number}
    for row in (row for row in rows if flops[row.name]):
        place = [flops[row.name] / row.num_bytes, flops[row.name] / row.least_seconds]
        assert drawn[row.name].get_offsets()[0].tolist() == pytest.approx(place)
    areas = {name: each.get_sizes()[0] for name, each in drawn.items()}
    assert areas["stage_0_backward"] / areas["stage_0_forward"] == pytest.approx(1.9)
    assert "1 program with" in axes.get_xlabel()
    assert key_words(figure) == ["F forward", "B backward", "rest of a step"]
    assert_apart(figure)


def test_programs_that_lie_on_one_another_share_a_number_and_a_name_with_their_stages():
    axes = roofline_figure(rows_of(4), ["bfloat16"], H100).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    assert "1 backward 0-3; 2 forward 0-3; 3 update 0" in axes.get_xlabel()
    assert "bfloat16  989.4 TFLOP/s" in axes.get_xlabel()


@pytest.mark.targets
def test_no_dot_is_above_the_roof(on_gpu):
    figure = on_gpu.figure()
    assert_apart(figure)
    for each in figure.axes[0].collections:
        x, y = each.get_offsets()[0]
        assert y <= min(x * H100.bandwidth, H100.peaks.bfloat16) * (1 + 1e-9)


def test_a_bound_without_kernels_is_nothing():
    empty = ProgramTable((ProgramRow("begin", 0, 0, "H100:0", (), 1, (), roofline=Roofline(0, 0, 0)),), H100)
    assert (empty.bound, empty[0].limit, empty.num_kernels) == (0, "", 0)
    assert not empty.figure().axes[0].collections
