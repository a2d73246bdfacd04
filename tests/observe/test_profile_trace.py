"""What JAX's profiler records of a pipeline: the names of its programs, and a run for each instruction of the plan."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.lowering.plan import About, Instruction, Plan
from jaxpp.observe.profile.record import SeenStep, Watch
from jaxpp.observe.profile.spans import Stamp, durations_of, isolated_spans, traced_spans, typical
from jaxpp.observe.profile.trace import STEP, DamagedTraceError, Run, Runs, TraceError, matched, read_runs, runs_in
from jaxpp.schedule import Action, Kind, make
from tests.models import mlp_case


def pipeline(schedule="zb-h1"):
    case = mlp_case(batch_size=8)
    pipe = jaxpp.Pipeline(
        case.loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=2, has_aux=True, schedule=schedule, devices=jax.devices()[:2]
    )
    return pipe, pipe.init(case.params, case.batch), case.batch


def traced_loop(folder, schedule="zb-h1"):
    """Three steps traced as a user does it."""
    pipe, state, batch = pipeline(schedule)
    state, metrics = pipe.step(state, batch)
    jax.block_until_ready((state, metrics.grad_norm))
    with jax.profiler.trace(folder):
        for _ in range(3):
            state, metrics = pipe.step(state, batch)
        jax.block_until_ready((state, metrics.grad_norm))
    return pipe, batch


@pytest.mark.parametrize("zeroed", [1 << 24, 0], ids=["sums begin as zeros", "the first backward makes the sums"])
@pytest.mark.long
def test_a_trace_of_the_users_own_loop_has_the_names_of_the_stages(zeroed, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpp.lowering.step.ZEROED", zeroed)
    traced_loop(tmp_path)
    runs = read_runs(tmp_path)
    found = {}
    for (device, name, _), group in runs.of_program.items():
        found[device, name] = found.get((device, name), 0) + len(group)
        assert all(run.start <= run.end for run in group)
    assert len(runs.steps) == 3
    for stage in range(2):
        assert found[stage, f"stage_{stage}_forward"] == 6
        assert found.get((stage, f"stage_{stage}_weight_grad_first"), 0) == (0 if zeroed else 3)
        assert found[stage, f"stage_{stage}_weight_grad"] == (6 if zeroed else 3)
        assert found[stage, f"begin_stage_{stage}"] == 3
    assert found.get((1, "stage_1_input_grad_first"), 0) + found.get((1, "stage_1_input_grad"), 0) == 6
    assert {name for _, name in found if "update" in name} >= {"stage_0_update", "stage_1_update"}
    assert not [name for _, name in found if name in ("function", "program", "run")], "no program goes without a name"


@pytest.mark.long
def test_a_trace_taken_elsewhere_makes_a_profile(tmp_path):
    pipe, batch = traced_loop(tmp_path, "1f1b")
    other, _, _ = pipeline("1f1b")
    profile = jaxpp.observe.from_trace(tmp_path, other, batch)
    assert set(profile.actions) == {action for row in pipe.schedule.rows for action in row}
    assert len(profile.step_seconds) == 3
    assert all(0 <= span.start <= span.end for span in (*profile.spans, *profile.isolated))
    assert 0 < profile.bubble_fraction < 1
    assert "traced: " in profile.heading
    shared = dataclasses.replace(profile, devices=profile.devices[:1] * 2)
    assert "traced, 2 ranks on 1 device: " in shared.heading
    assert profile.figure() is not None
    with pytest.raises(ArgumentError, match="whole steps of a pipeline like this one") as error:
        jaxpp.observe.from_trace(tmp_path, pipeline("zb-h1")[0], batch)
    assert "runs of stage_" in str(error.value)
    with pytest.raises(ArgumentError, match="no trace"):
        jaxpp.observe.from_trace(tmp_path / "nothing", other, batch)


def test_where_there_is_no_trace_that_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        read_runs(tmp_path)


def test_a_file_that_is_no_trace_is_named(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(b"no trace at all")
    with pytest.raises(DamagedTraceError, match=r"host\.xplane\.pb cannot be read: RuntimeError: Failed to parse"):
        read_runs(tmp_path)


def random_damage(data, seed):
    """A file that has lost its end or a piece, or of which bits or a piece are others."""
    rng, data = np.random.default_rng(seed), bytearray(data)
    how, begin = rng.choice(["end", "bits", "bits", "lost", "other"]), rng.integers(len(data))
    end = begin + rng.choice([1, 4, 100, 5000])
    if how == "bits":
        for at in rng.integers(len(data), size=rng.choice([1, 2, 30, 1000])):
            data[at] ^= 1 << rng.integers(8)
        return data
    if how == "other":
        return data[:begin] + rng.bytes(end - begin) + data[end:]
    return data[:begin] + (data[end:] if how == "lost" else b"")


@pytest.mark.long
def test_random_damage_of_a_trace_is_one_clear_error_that_names_the_file(tmp_path):
    pipe, batch = traced_loop(tmp_path, "1f1b")
    file = next(tmp_path.rglob("*.xplane.pb"))
    whole, damaged = file.read_bytes(), []
    for seed in range(200):
        file.write_bytes(random_damage(whole, seed))
        try:
            jaxpp.observe.from_trace(tmp_path, pipe, batch)
        except ArgumentError as error:
            damaged += [str(error)] * ("it reads what jax.profiler.trace(folder) has written" in str(error))
    assert len(damaged) > 50
    for message in damaged:
        assert f"Got: {file} cannot be read: " in message
        assert "Fix: take the trace again, or copy it again." in message


def test_a_profile_beside_somebody_elses_trace_is_refused(tmp_path):
    pipe, state, batch = pipeline("1f1b")
    with jax.profiler.trace(tmp_path), pytest.raises(ArgumentError, match="one at a time") as error:
        pipe.profile(state, batch, num_steps=1)
    assert "Fix: end the other trace first" in str(error.value)
    assert pipe.profile(state, batch, num_steps=1).isolated, "afterwards it works"


def test_an_unknown_clock_is_refused():
    pipe, state, batch = pipeline("1f1b")
    with pytest.raises(ArgumentError, match="clock='wall'") as error:
        pipe.profile(state, batch, clock="wall")
    assert 'Fix: pass clock="trace"' in str(error.value)


@pytest.mark.long
def test_a_trace_that_cannot_be_read_is_replaced_by_asking_and_the_title_says_so(monkeypatch):
    def refused(*_):
        raise TraceError("2 runs in the trace, 4 were handed over")

    monkeypatch.setattr("jaxpp.observe.profile.record.matched", refused)
    pipe, state, batch = pipeline("1f1b")
    profile = pipe.profile(state, batch, num_steps=1, clock="trace")
    assert "watched, starts inferred" in profile.heading
    assert "warning: the trace of this backend lacks what is needed (2 runs in the trace" in str(profile)
    assert all(span.start <= span.end for span in (*profile.spans, *profile.isolated))
    assert set(profile.actions) == {action for row in pipe.schedule.rows for action in row}


@pytest.mark.long
def test_who_asks_for_results_looks_while_they_arrive_and_not_when_all_are_there(monkeypatch):
    def refused(*_):
        raise TraceError("nothing")

    calls, stamps, wait = [], Watch.stamps, jax.block_until_ready
    monkeypatch.setattr("jaxpp.observe.profile.record.matched", refused)
    monkeypatch.setattr(Watch, "stamps", lambda self: (calls.append("looked"), stamps(self))[1])
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (calls.append("waited"), wait(tree))[1])
    pipe, state, batch = pipeline("1f1b")
    pipe.profile(state, batch, num_steps=1)
    first = calls.index("looked")
    assert calls[first : first + 4] == ["looked", "waited"] * 2, "before the wait for each step"


def line(label, stage, program, inputs, outputs, *, action=None, call=None):
    about = About(jax.devices()[stage], stage, action, not program, program, -1)
    return Instruction(label, call or program, inputs, outputs, (), about)


F, B = (lambda stage: Action(stage, Kind.F, 0)), (lambda stage: Action(stage, Kind.B, 0))
PLAN = Plan(
    (
        line("0F0", 0, "stage_0_forward", (), (0,), action=F(0)),
        line("send 0F0 to stage 1", 1, "", (0,), (1,), action=F(0)),
        line("1F0", 1, "stage_1_forward", (1,), (2,), action=F(1)),
        line("1B0", 1, "stage_1_backward", (2,), (3,), action=B(1)),
        line("send 1B0 to stage 0", 0, "", (3,), (4,), action=B(1)),
        line("0B0", 0, "stage_0_backward", (4,), (), action=B(0)),
    ),
    5,
    (),
    (),
    (),
    6,
)
SCHEDULE = make("naive", num_ranks=2, num_microbatches=1)


def runs_of(*steps):
    """A trace of the plan; each step begins one second after the one before."""
    found = {}
    for k, times in enumerate(steps):
        for instruction, time in zip(PLAN.instructions, times, strict=True):
            if time is not None:
                key = instruction.about.stage, instruction.about.program, 7
                found.setdefault(key, []).append(Run(10 + k + time[0], 10 + k + time[1]))
    return Runs(found, [10.0 + k for k in range(len(steps))])


TIMES = ((0.0, 0.1), None, (0.15, 0.25), (0.25, 0.45), None, (0.5, 0.7))


def test_each_instruction_gets_the_run_of_its_step():
    later = tuple(time and (time[0] + 0.01, time[1] + 0.01) for time in TIMES)
    for found, times in zip(matched(PLAN, runs_of(TIMES, later), 2), (TIMES, later), strict=True):
        assert [run and pytest.approx(tuple(run)) for run in found] == list(times)


def test_a_run_too_few_or_too_many_is_no_match():
    for change, message in (
        (lambda group: group[:1], "1 runs of stage_1_forward on device 1"),
        (lambda group: group * 2, "4 runs of"),
    ):
        runs = runs_of(TIMES, TIMES)
        key = 1, "stage_1_forward", 7
        with pytest.raises(TraceError, match=message):
            matched(PLAN, runs._replace(of_program={**runs.of_program, key: change(runs.of_program[key])}), 2)
    with pytest.raises(TraceError, match="2 steps in the trace, 3 were run"):
        matched(PLAN, runs_of(TIMES, TIMES), 3)


def test_a_step_that_is_called_while_another_runs_begins_with_its_first_run():
    called = runs_of(TIMES, TIMES, TIMES)
    late = called._replace(steps=[10.0, 10.5, 12.0])  # the second is called while the first runs until 10.7
    for found in matched(PLAN, late, 3):  # the second from its first run at 11.0, and not from its call
        assert [run and pytest.approx(tuple(run)) for run in found] == list(TIMES)


def test_the_kernels_of_a_gpu_are_runs_of_their_programs_by_the_calls_that_launched_them():
    """As JAX 0.11.2 writes it on an H200: no line has whole programs, and a CUDA graph is one launch of many kernels."""

    def kernel(start, end, program, launch):
        return event("gemm", start, end, hlo_module=f"jit_{program}", program_id=str(len(program)), correlation_id=str(launch))

    def launched(start, end, number, *launches):
        calls = [event("cuGraphLaunch", at, at + 1, correlation_id=str(launch), device_id="0") for at, launch in launches]
        return [event("Execute", start, end, run_id=str(number)), *calls]

    host = [
        event(STEP, 0, 500),
        *launched(10, 20, 7, (12, 1), (15, 2)),
        *launched(21, 30, 8, (22, 3)),
        *launched(31, 40, -9, (33, 4)),
        *launched(41, 50, 11),  # it has no kernel
    ]
    compute = [kernel(100, 110, "f", 1), kernel(110, 130, "f", 2), kernel(130, 150, "f", 3), kernel(151, 170, "g", 4)]
    copies = [event("MemcpyD2H", 90, 95, correlation_id="5")]

    def read(threads):
        lines = [line("Stream #14(Compute)", *compute[::-1]), line("Stream #18(MemcpyD2H)", *copies)]
        planes = [plane("/device:GPU:1", *lines), plane("/host:CPU", *threads)]
        return runs_in(types.SimpleNamespace(planes=planes))

    found = read([line("python3", *host), line("other", event("cuLaunchKernel", 14, 15, correlation_id="9"))])
    assert found.steps == [0.0]
    f, g = (1, "f", "1"), (1, "g", "1")
    assert found.of_program == {f: [Run(1e-7, 1.3e-7), Run(1.3e-7, 1.5e-7)], g: [Run(1.51e-7, 1.7e-7)]}
    alone = read([line("python3", host[0])])
    assert alone.of_program == {f: [Run(1e-7, 1.5e-7)], g: [Run(1.51e-7, 1.7e-7)]}, "two behind each other look like one"


def test_a_line_of_whole_programs_has_their_runs():
    ran = [event("jit_f(7)", 300, 400), event("jit_f(7)", 100, 200), event("jit_g(8)", 210, 250)]
    device = plane("/device:TPU:1", line("XLA Modules", *ran))
    found = runs_in(types.SimpleNamespace(planes=[plane("/host:CPU", line("python3", event(STEP, 50, 500))), device]))
    f, g = (1, "f", "jit_f(7)"), (1, "g", "jit_g(8)")
    assert found == Runs({f: [Run(1e-7, 2e-7), Run(3e-7, 4e-7)], g: [Run(2.1e-7, 2.5e-7)]}, [5e-8])


def event(name, start, end, **stats):
    return types.SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=list(stats.items()))


def line(name, *events):
    return types.SimpleNamespace(name=name, events=events)


def plane(name, *lines):
    return types.SimpleNamespace(name=name, lines=lines)


def test_a_program_without_operations_is_found_by_its_device_and_its_count():
    runs = runs_of(TIMES, TIMES)
    nameless = {(d, "" if name == "stage_1_forward" else name, p): group for (d, name, p), group in runs.of_program.items()}
    assert matched(PLAN, runs._replace(of_program=nameless), 2) == matched(PLAN, runs, 2)


def test_a_send_lies_between_what_makes_and_what_reads_its_value():
    stamps = [Stamp(5 + 0.01 * k, 5.005 + 0.01 * k, 6.0) for k in range(6)]
    (runs,) = matched(PLAN, runs_of(TIMES), 1)
    runs = [run and Run(5 + run.start, 5 + run.end) for run in runs]  # on the clock of the stamps
    stamps = [stamp._replace(run=run) for stamp, run in zip(stamps, runs, strict=True)]
    spans = traced_spans(PLAN, stamps, [0.1, 0.03, 0.1, 0.2, 0.9, 0.2], SCHEDULE)
    assert [(s.rank, s.sends) for s in spans] == [(0, False), (1, True), (1, False), (1, False), (0, True), (0, False)]
    assert (spans[1].start, spans[1].end) == pytest.approx((0.1, 0.13)), "as long as alone"
    assert (spans[4].start, spans[4].end) == pytest.approx((0.45, 0.5)), "no longer than until it is read"
    assert [s.begun for s in spans] == pytest.approx([0.01 * k for k in range(6)])


def test_alone_each_program_takes_its_median_and_waits_for_its_operands_and_its_rank_only():
    steps = [[0.1, 0.02, 0.3, 0.2, 0.02, 0.1], [0.2, 0.04, 0.3, 0.2, 0.04, 0.1], [0.1, 0.03, 0.6, 0.2, 0.03, 0.1]]
    durations = durations_of(PLAN, steps)
    assert durations == pytest.approx([0.1, 0.03, 0.3, 0.2, 0.03, 0.1])
    spans = isolated_spans(PLAN, durations, SCHEDULE)
    assert [(s.start, s.end) for s in spans] == [
        pytest.approx(pair) for pair in ((0, 0.1), (0.1, 0.13), (0.13, 0.43), (0.43, 0.63), (0.63, 0.66), (0.66, 0.76))
    ]


def test_alone_a_program_takes_the_less_of_its_time_in_the_trace_and_from_its_call_until_it_is_ready():
    """A program with a loop inside was slowed by the tracer, more on one device than on its twin: 747 ms beside 179."""
    quiet = [[0.2, 0.02, 0.2, 0.4, 0.02, 0.4]] * 3
    slowed = [[0.21, 0.02, 0.9, 1.9, 0.02, 0.39]] * 3
    assert durations_of(PLAN, quiet, slowed) == pytest.approx([0.2, 0.02, 0.2, 0.4, 0.02, 0.39])
    tiny = [[1e-5, 0.02, 1e-5, 2e-5, 0.02, 2e-5]] * 3  # its call takes longer than it does
    assert durations_of(PLAN, [[5e-5, 0.02, 5e-5, 5e-5, 0.02, 5e-5]] * 3, tiny) == tiny[0]


def test_what_the_tracer_slows_takes_no_longer_alone(monkeypatch):
    def slowed(plan, runs, num_steps):
        found = matched(plan, runs, num_steps)
        pairs = [zip(plan.instructions, step, strict=True) for step in found]
        return [[run and Run(run.start, run.end + 10.0 * line.about.stage) for line, run in step] for step in pairs]

    monkeypatch.setattr("jaxpp.observe.profile.record.matched", slowed)
    pipe, state, batch = pipeline("1f1b")
    profile = pipe.profile(state, batch, num_steps=1)
    assert not profile.missing
    traced, alone = (dict(profile.actions) for profile in (dataclasses.replace(profile, clock="trace"), profile))
    for action in pipe.schedule.order:
        assert (traced[action].end - traced[action].start > 10.0) == (action.stage == 1)
        assert alone[action].end - alone[action].start < 5.0


def test_without_a_tracer_a_program_takes_from_its_call_until_it_is_ready_and_a_send_from_when_the_host_went_on():
    stamps = tuple(Stamp(k, k + 0.5, k + 0.75) for k in range(6))  # a device that runs in the thread that calls it, say
    assert SeenStep(0.0, 6.0, stamps).timed(PLAN).seconds == [0.75, 0.25, 0.75, 0.75, 0.25, 0.75]
    runs = (*[run and Run(*run) for run in TIMES[:4]], None, None)
    stamps = tuple(stamp._replace(run=run) for stamp, run in zip(stamps, runs, strict=True))
    assert SeenStep(0.0, 6.0, stamps).timed(PLAN).seconds == pytest.approx([0.1, 0.25, 0.1, 0.2, 0.25, 0.75])


def test_sends_of_what_one_program_makes_to_one_stage_take_the_same_time():
    lines, count = PLAN.instructions[:3], 3
    lines = [each._replace(label=f"{each.label}, {k}") for k in range(count) for each in lines]
    plan = dataclasses.replace(PLAN, instructions=(*lines, lines[1]._replace(inputs=(9,))))
    steps = [[0.1, 0.02, 0.1, 0.1, 0.5, 0.1, 0.1, 0.03, 0.1, 7.0]] * 3
    assert durations_of(plan, steps) == pytest.approx([0.1, 0.03, 0.1] * count + [7.0]), "one late send tells nothing of a boundary"


def test_of_steps_that_scatter_the_one_nearest_to_all_is_shown():
    def step(*ends):
        return isolated_spans(PLAN, np.diff([0.0, *ends]).tolist(), SCHEDULE)

    held_up = step(5.0, 5.1, 6.0, 7.0, 7.1, 8.0)  # of median length, but its first forward took five times as long as usual
    usual, long = step(1.0, 1.1, 2.0, 4.0, 4.1, 6.0), step(1.2, 1.3, 2.3, 4.5, 4.6, 9.0)
    for steps in ([held_up, usual, long], [long, held_up, usual], [usual, long, held_up]):
        assert steps[typical(steps)] is long
    assert typical([usual]) == 0


@pytest.mark.parametrize(("folder", "pipe", "got"), [(None, None, "None"), (3, None, "3"), ("out", 3, "3"), ("out", None, "None")])
def test_what_is_no_folder_or_no_pipeline_is_refused(folder, pipe, got):
    with pytest.raises(ArgumentError, match=f"Got: {got}\\.") as caught:
        jaxpp.observe.from_trace(folder, pipe, jnp.ones((4, 2)))
    assert "Fix: call from_trace(folder, pipe, batch)." in str(caught.value)
