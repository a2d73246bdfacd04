"""Devices that only compile (``jaxpp.target``): what is planned works and says bounds, what holds arrays is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, FitError
from jaxpp.observe.bound import bound_of
from jaxpp.observe.evaluate import step_seconds
from jaxpp.observe.memory import forecast as forecasts
from jaxpp.runtime.hlo import read_kernels
from jaxpp.runtime.roofline import program_roofline
from jaxpp.schedule.action import Kind
from jaxpp.targets import TARGETS

pytest.importorskip("jax_plugins.xla_cuda12")
pytestmark = pytest.mark.targets

H100 = next(target for target in TARGETS if target.name == "h100")
SIZE = 256
SHAPES = [jax.ShapeDtypeStruct((SIZE, SIZE), "float32")] * 4
BATCH = {"x": jax.ShapeDtypeStruct((32, SIZE), "float32"), "y": jax.ShapeDtypeStruct((32, SIZE), "float32")}
ARRAYS = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in BATCH.items()}


def loss_fn(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def outputs(params, batch):
    return batch["x"] @ params[0] @ params[1]


def pipeline(name="h100", num_devices=2, hosts=1, **options):
    devices = jaxpp.target(name, num_devices, hosts=hosts)
    given = {"num_stages": num_devices, "num_microbatches": 4, "devices": devices} | options
    return jaxpp.Pipeline(loss_fn, optax.adam(1e-3), **given)


@pytest.fixture(scope="module")
def planned():
    pipe = pipeline()
    return pipe, pipe.forecast(SHAPES, BATCH)


def test_a_forecast_counts_what_the_compiler_says_to_the_byte(planned):
    pipe, forecast = planned
    plan, lowered = pipe.engine.plan("update", BATCH, None)
    liveness = forecast.liveness
    sizes = dict.fromkeys(lowered.bound.constants, 4) | {life.name: life.num_bytes for life in liveness.lives}
    for number, (line, instruction) in enumerate(zip(lowered.bound.lines, plan.instructions, strict=True)):
        if line.program is None:
            continue
        stats = instruction.call.memory_analysis()
        assert liveness.temporaries[number] == stats.temp_size_in_bytes
        results = sum(sizes[name] for name in line.outputs)
        tuple_of = 8 * len(line.outputs) * (len(line.outputs) > 1)  # the pointers of a tuple count as output
        assert abs(results + tuple_of - stats.output_size_in_bytes) <= 0.01 * stats.output_size_in_bytes
        read = sum(sizes[name] for name in dict.fromkeys(line.inputs))
        assert abs(read - stats.argument_size_in_bytes) <= 0.01 * stats.argument_size_in_bytes + 8 * len(line.inputs)


def test_the_table_has_short_names_the_room_of_the_gpu_and_bounds_within_the_width(planned):
    pipe, forecast = planned
    text = str(forecast)
    assert max(map(len, text.splitlines())) <= 120
    assert "H100:0" in text
    assert "NVIDIA" not in text + repr(pipe) + str(pipe.stages)
    assert forecast.hbm == int(0.98 * 0.75 * H100.memory)
    assert re.search(r"a step takes at least [\d.]+ ms on 2 x H100 \(a bound, no prediction\): ", text)
    assert "it fits: H100:" in text


def test_more_room_than_the_gpu_has_is_refused_wherever_it_is_asked_for():
    card = next(target for target in TARGETS if target.name == "rtx-4090")
    for ask in (
        lambda: pipeline("rtx-4090").forecast(SHAPES, BATCH, hbm="80GiB"),
        lambda: pipeline("rtx-4090", hbm="80GiB").forecast(SHAPES, BATCH),
        lambda: jaxpp.tune(loss_fn, optax.sgd(0.1), SHAPES, BATCH, devices=jaxpp.target("rtx-4090", 2), hbm="80GiB", keep=False),
    ):
        with pytest.raises(ArgumentError) as caught:
            ask()
        assert str(caught.value).splitlines() == [
            "hbm: a step has no more room on a GPU than the GPU has memory.",
            "  Got: 80 GiB, and RTX-4090:0 has 23.64 GiB.",
            '  Fix: pass at most hbm="23.64 GiB"; without hbm, it is the 75% of that which JAX takes.',
        ]
    assert pipeline("rtx-4090").forecast(SHAPES, BATCH, hbm=card.memory).hbm == card.memory


def test_the_room_says_what_part_of_the_gpu_it_is_and_what_alone_makes_a_step_fit(planned, monkeypatch):
    _, forecast = planned
    taken = "the 75% of 79.11 GiB that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise, but for 2% that fragments"
    assert f"of 58.15 GiB, {taken}\n" in " ".join(str(forecast).split()) + "\n"
    monkeypatch.setattr(forecasts, "_MARGINS", {})  # beside which nothing would have room on so small a GPU
    peak = max(forecast.peaks.values())
    small = jaxpp.GPU.like("h100", "small", memory=int(peak / 0.8))
    monkeypatch.setattr(jaxpp.targets, "_DESCRIBED", {})

    def said(**options):
        pipe = pipeline(devices=jaxpp.target(small, 2))
        return " ".join(str(pipe.forecast(SHAPES, BATCH, **options)).split())

    assert "the room is the 75% of" in said()
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 alone makes it fit: the room is then" in said()
    assert "FRACTION" not in said(hbm=int(0.7 * peak / 0.8))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
    assert "the 85% of" in said() and "that XLA_PYTHON_CLIENT_MEM_FRACTION says" in said()
    small = jaxpp.GPU.like("h100", "smaller", memory=int(peak / 0.95))
    assert "it does not fit" in said() and "alone makes it fit" not in said()


def test_the_room_follows_the_variable_by_which_jax_takes_its_share(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert pipeline().forecast(SHAPES, BATCH).hbm == int(0.98 * 0.5 * H100.memory)


def test_what_cuda_and_libraries_hold_is_left_out_of_the_room_by_name(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.99")
    forecast = pipeline("rtx-4090").forecast(SHAPES, BATCH)
    card = next(target for target in TARGETS if target.name == "rtx-4090")
    assert forecast.hbm == int(0.98 * (card.memory - (600 << 20) - (1 << 30) - (256 << 20)))
    said = " ".join(str(forecast).split())
    assert "what it must leave (600 MiB for CUDA's context, 1 GiB for NCCL, 256 MiB for the workspace of libraries)" in said
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert "NCCL" not in str(pipeline("rtx-4090").forecast(SHAPES, BATCH)), "a tenth of the card is enough for them"


def test_a_bound_is_the_rooflines_of_the_programs_on_the_clock_of_the_schedule(planned):
    pipe, forecast = planned
    bound = forecast.bound
    plan, lowered = pipe.engine.plan("update", BATCH, None)
    pairs = zip(lowered.bound.lines, plan.instructions, strict=True)
    texts = {str(line.action): instruction.call.as_text() for line, instruction in pairs if line.program is not None}
    seconds = {action: program_roofline(read_kernels(text), H100).seconds for action, text in texts.items()}
    assert bound.costs.actions[Kind.F][0] == pytest.approx(min(seconds[f"0F{k}"] for k in range(4)))
    whole = min(seconds[f"1F{k}"] for k in range(4))  # the last stage's F and B are one program
    assert bound.costs.actions[Kind.F][1] + bound.costs.actions[Kind.B][1] == pytest.approx(whole)
    threads = range(pipe.schedule.num_ranks)  # one for each rank hands over what it runs
    assert bound.seconds == pytest.approx(step_seconds(pipe.schedule, bound.costs, processes=threads), rel=0.1)  # on actions
    assert bound.costs.transfer == (pytest.approx(8 * SIZE * 4 / H100.links.peer),)
    assert sum(bound.parts) == pytest.approx(bound.seconds)
    assert bound.simulation.makespan <= bound.seconds
    products = 3 * 2 * 32 * SIZE * SIZE * 4 - 2 * 32 * SIZE * SIZE  # three products a layer, but no cotangent of the input
    assert sum(bound.products.values()) == products
    assert 0 < bound.peak_fraction < 1
    assert bound.host_limits  # for a step of microseconds


def test_the_network_is_slower_than_the_link_of_a_host_and_an_older_gpu_slower_than_a_newer_one():
    large = {name: jax.ShapeDtypeStruct((1 << 18, SIZE), "float32") for name in BATCH}

    def of(*args, **kwargs):
        pipe = pipeline(*args, **kwargs)
        pipe.abstract_state(SHAPES, large)
        return bound_of(pipe.engine, large, None)

    near, far, old = of(), of(hosts=2), of("a100-40gb")
    ratio = H100.links.peer / H100.links.network
    assert far.costs.transfer[0] == pytest.approx(ratio * near.costs.transfer[0])
    assert far.seconds >= near.seconds
    assert sum(old.costs.actions[Kind.F]) > sum(near.costs.actions[Kind.F])


def test_replicas_on_other_hosts_sum_their_gradients_over_the_network():
    def of(hosts, order):  # the gradients of four large matrices, and next to no work
        devices = np.array(jaxpp.target("h100", 4, hosts=hosts)).reshape(2, 2)
        mesh = jax.sharding.Mesh(devices.T if order == "replicas apart" else devices, ("pipe", "data"))
        shapes = [jax.ShapeDtypeStruct((4096, 4096), "float32")] * 4
        batch = {name: jax.ShapeDtypeStruct((16, 4096), "float32") for name in BATCH}
        pipe = pipeline(num_stages=2, devices=None, mesh=mesh)
        pipe.abstract_state(shapes, batch)
        (row,) = (row for row in pipe.programs(shapes, batch) if row.stage == 0 and row.runs == 1 and not row.kinds and sums(row))
        return bound_of(pipe.engine, batch, None).seconds, sum(kernel.bytes_read for kernel in sums(row))

    def sums(row):
        return [kernel for kernel in row.kernels if kernel.collective == "all-reduce"]

    (near, num_bytes), (beside, _), (apart, _) = of(1, ""), of(2, "replicas on a host"), of(2, "replicas apart")
    assert num_bytes == pytest.approx(2 * 4096**2 * 4, rel=0.01)
    assert beside - near < 1e-4  # activations cross
    slower = num_bytes * (1 / H100.links.network - 1 / H100.links.peer)  # of two devices each sends half of it twice
    assert apart - near == pytest.approx(slower, rel=0.05)


def test_stages_that_share_a_gpu_take_as_long_as_all_their_work_and_the_peak_is_that_of_one_gpu():
    large = {name: jax.ShapeDtypeStruct((1 << 16, SIZE), "float32") for name in BATCH}

    def of(num_devices):
        pipe = pipeline(num_devices=4, devices=jaxpp.target("h100", num_devices))
        pipe.abstract_state(SHAPES, large)
        return bound_of(pipe.engine, large, None)

    one, two, four = map(of, (1, 2, 4))
    work = sum(4 * sum(seconds) for seconds in one.costs.actions.values()) + sum(one.costs.after)
    assert one.seconds >= work > four.seconds
    assert sum(one.parts) == pytest.approx(one.seconds)
    assert one.parts.sharing > 0 == four.parts.sharing
    assert 0.999 * four.seconds < two.seconds < one.seconds  # on two GPUs fewer values are sent, so less is handed over
    assert "ms on 1 x H100 (a bound, no prediction): " in str(one)
    assert "devices that are shared" in str(one)
    assert "ms on 2 x H100 (" in str(two)
    assert four.peak_fraction < one.peak_fraction < 1


def test_equal_stages_are_compiled_once_for_all_gpus_of_a_kind_and_have_rows_of_their_own():
    def of(hosts):
        rows = pipeline(num_devices=4, hosts=hosts).programs(SHAPES, BATCH)
        return {(row.name, row.device): row for row in rows}, jaxpp.target("h100", 4, hosts=hosts)

    rows, devices = of(hosts=1)
    for name in ("forward", "backward"):
        second, third = (rows[f"stage_{stage}_{name}", devices[stage]] for stage in (1, 2))
        assert second.compiled is third.compiled
    assert rows["stage_0_backward", devices[0]].compiled is not second.compiled  # it has no cotangent of its input
    far, others = of(hosts=2)
    assert [row.compiled for row in far.values()] == [row.compiled for row in rows.values()]
    assert not set(others) & set(devices)


def test_devices_of_another_source_are_planned_without_bounds():
    from jax.experimental import topologies  # noqa: PLC0415

    spec = H100.spec().replace(H100.kind, "A GPU of my own")
    devices = topologies.get_topology_desc(platform="cuda", target_config=spec, topology="1x1x2").devices
    options = {"num_stages": 2, "devices": devices}
    forecast = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), **options).forecast(SHAPES, BATCH)
    assert (forecast.hbm, forecast.bound) == (None, None)
    assert "gpu:1" in str(forecast)
    with pytest.raises(ArgumentError, match=r"times are predicted from the numbers of the GPU"):
        jaxpp.Pipeline(loss_fn, optax.adam(1e-3), balance="time", **options).forecast(SHAPES, BATCH)
    with pytest.raises(ArgumentError, match=r"candidates are compared by the numbers of the GPU"):
        jaxpp.tune(loss_fn, optax.adam(1e-3), SHAPES, BATCH, devices=devices, schedules="1f1b", num_microbatches=2, keep=False)


def test_cuts_by_time_offloading_by_hbm_and_remat_use_bounds():
    size = 2048  # where products take far longer than a kernel does besides
    pipe, rows = pipeline(balance="time"), jax.ShapeDtypeStruct((16384, size), "float32")
    pipe.abstract_state([jax.ShapeDtypeStruct((size, size), "float32")] * 4, dict.fromkeys(BATCH, rows))
    assert [stage.num_params for stage in pipe.stages] == [2 * size * size] * 2
    deep, wide = SHAPES * 4, {name: jax.ShapeDtypeStruct((65536, SIZE), "float32") for name in BATCH}
    free = pipeline(num_devices=4, num_microbatches=8).forecast(deep, wide)
    room = max(free.peaks.values()) * 9 // 10
    tight = pipeline(num_devices=4, num_microbatches=8, hbm=room)
    tight.abstract_state(deep, wide)
    assert re.search(r"stage 0: (offload|recompute|remat=0\.\d+) \(peak .*, step \+", str(tight.stages))
    assert max(tight.forecast(deep, wide).peaks.values()) <= room
    with pytest.raises(FitError, match=r"H100:0 needs"):
        pipeline(hbm="1MiB").abstract_state(SHAPES, BATCH)


def test_a_mesh_replicas_forwards_and_generations_are_planned():
    mesh = jax.sharding.Mesh(np.array(jaxpp.target("h100", 4)).reshape(2, 2), ("pipe", "data"))
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=2, mesh=mesh)
    text = str(pipe.forecast(SHAPES, BATCH))
    assert "H100:0 1 (2 data)" in text
    assert "4 x H100" in text
    assert "all-reduce" in str(pipe.collectives(BATCH))
    forward = jaxpp.Forward(outputs, num_stages=2, devices=jaxpp.target("h100", 2))
    assert "a pass takes at least" in str(forward.forecast(SHAPES[:2], BATCH))

    def step(params, carry, tokens):
        carry = carry + params["table"][tokens[0]].sum(0)
        return carry, (carry @ params["head"])[None]

    params = {"table": jax.ShapeDtypeStruct((16, 8), "float32"), "head": jax.ShapeDtypeStruct((8, 16), "float32")}
    lm = jaxpp.Forward(lambda p, b: p["table"][b] @ p["head"], num_stages=1, devices=jaxpp.target("h100"))
    shapes = lm.abstract_params(params, jax.ShapeDtypeStruct((4, 3), "int32"))
    assert "H100:0" in str(lm.generate(shapes, step, jax.ShapeDtypeStruct((8,), "float32"), [], 3).forecast())


def test_tune_compares_candidates_by_their_predictions_and_runs_none():
    options = {"schedules": ("gpipe", "1f1b"), "num_microbatches": 4, "keep": False}
    tuning = jaxpp.tune(loss_fn, optax.adam(1e-3), SHAPES, BATCH, devices=jaxpp.target("h100", 2), **options)
    assert tuning.planned
    assert not tuning.measured
    assert "predicted" in str(tuning) and "at least" not in str(tuning)
    assert re.search(
        r"a step likely takes [\d.]+ ms \([\d.]+ ms to [\d.]+ ms\), by what kernels of their size reach", tuning.why[0]
    )
    assert tuning.why[0].endswith("nothing ran.")
    pipe = tuning.pipeline()
    pipe.abstract_state(SHAPES, BATCH)
    rows = {row.candidate.schedule.name: row for row in tuning.rows}
    assert rows[tuning.best["schedule"]].predicted == min(row.predicted for row in rows.values())


def test_tune_counts_what_the_host_takes_for_kernels_as_a_forecast_says():
    def tuned(**more):  # of products of microseconds, of which the host launches many
        options = {"schedules": "1f1b", "num_microbatches": (2, 8), "keep": False}
        tuning = jaxpp.tune(loss_fn, optax.adam(1e-3), SHAPES, BATCH, devices=jaxpp.target("h100", 2), **options, **more)
        return {row.candidate.schedule.num_microbatches: row for row in tuning.rows}

    def likely(num_microbatches, **more):
        return pipeline(num_microbatches=num_microbatches, **more).forecast(SHAPES, BATCH).bound

    rows = tuned()
    for count, row in rows.items():
        bound = likely(count)
        assert bound.host.num_threads == 2
        assert row.predicted >= 0.9 * bound.host.likely > bound.seconds
        assert row.predicted < bound.seconds + 1.5 * bound.host.likely
    assert rows[2].predicted < rows[8].predicted
    (one,) = (row for count, row in tuned(threads="one").items() if count == 8)
    assert one.predicted >= 0.9 * likely(8, threads="one").host.likely > rows[8].predicted


PARAMS = [np.zeros((SIZE, SIZE), np.float32)] * 4
REFUSED = {
    "pipe.init": lambda pipe, state: pipe.init(PARAMS, ARRAYS),
    "pipe.step": lambda pipe, state: pipe.step(state, ARRAYS),
    "pipe.evaluate": lambda pipe, state: pipe.evaluate(state, ARRAYS),
    "pipe.verify": lambda pipe, state: pipe.verify(state, ARRAYS),
    "pipe.profile": lambda pipe, state: pipe.profile(state, ARRAYS),
    "pipe.apply": lambda pipe, state: pipe.apply(PARAMS, ARRAYS, outputs),
    "pipe.stream": lambda pipe, state: pipe.stream(PARAMS, [ARRAYS], outputs),
    "pipe.generate": lambda pipe, state: pipe.generate(PARAMS, outputs, np.zeros(3), [[1]], 2),
    "pipe.stages[0].forward": lambda pipe, state: pipe.stages[0].forward(PARAMS, {}, ARRAYS),
    "grad_fn(params, batch, key)": lambda pipe, state: jaxpp.value_and_grad(loss_fn, num_stages=2, devices=jaxpp.target("h100", 2))(
        PARAMS, ARRAYS
    ),
    "jaxpp.gather(tree, device)": lambda pipe, state: jaxpp.gather(PARAMS, jaxpp.target("h100", 2)[0]),
    "Bank(device=...)": lambda pipe, state: jaxpp.Bank({"a": PARAMS}, optax.adam(1e-3), device=jaxpp.target("h100", 2)[0]),
}


@pytest.mark.parametrize("where", REFUSED)
def test_what_holds_arrays_says_that_it_cannot(planned, where):
    pipe, _ = planned
    state = pipe.abstract_state(SHAPES, BATCH)
    with pytest.raises(ArgumentError) as caught:
        REFUSED[where](pipe, state)
    first, got, fix = str(caught.value).splitlines()
    assert first == f"{where}: it holds arrays, and these devices only compile programs."
    assert got.startswith("  Got: H100:0")
    assert fix.startswith("  Fix: pass ")


def test_devices_that_hold_arrays_and_devices_that_do_not_make_no_pipeline():
    with pytest.raises(ArgumentError) as caught:
        jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, devices=[jaxpp.target("h100", 2)[0], jax.devices()[0]])
    assert "either all devices hold arrays or all of them only compile" in str(caught.value)
