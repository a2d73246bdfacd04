"""The part graphs of the gpu experiment without a GPU: XLA's log as it writes it, copies of programs, addresses, and flags."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu import graphs, lanes
from experiments.gpu.copies import Addresses, count_programs, with_copies, with_eyes
from experiments.gpu.graph_log import LOGGED, counts_of, graphs_made, step_line
from experiments.gpu.graphs import COPIES, ONE, VARIANTS, is_known
from experiments.gpu.lanes import WAYS, where_raised
from experiments.gpu.parts import run_beside
from experiments.gpu.rows import Job
from experiments.gpu.sizes import SMALL
from jaxpp.lowering.plan import About, Instruction, Plan
from jaxpp.runtime.execute import execute

THUNK = "I1127 05:15:13.805910   18383 command_buffer_thunk.cc:466] "
EXECUTOR = "I1127 05:15:13.805911   18383 command_executor.cc:300] "
BEGIN = "[1] Create/Update command buffer by recoding command buffer cmd sequence after 3 executions since last update; "
UPDATE = [  # the lines of jaxlib 0.10.2 for a call whose graph is updated
    THUNK + BEGIN + "num_commands=85; updated_allocs=4; is_first_record=0; needs_update=1",
    EXECUTOR + "Record update 85 commands into command buffer 0x55d0c0ffee: record_id=0",
    EXECUTOR + "Updated 85 commands in 412 μs (skipped 5 command updates)",
    THUNK + "[1] Updated command buffer in 425 μs; num_commands=85",
    THUNK + "[1] Execute command buffer; num_executions=1",
]
OLDER = [  # those of XLA's sources before
    "2025-11-27 05:15:13.805910: I external/xla/xla/backends/gpu/runtime/command_buffer_thunk.cc:235] "
    "Update command buffer on device #0 by recoding command buffer cmd sequence after 1 executions since last update; "
    "num_commands=10; updated_allocs=2",
    THUNK + "Updated command buffer in 30 μs; num_commands=10",
    THUNK + "Execute command buffer on device #0; num_executions=1",
]
REPLAY = [THUNK + "[0] Execute command buffer; num_executions=7"]


def test_updates_launches_and_moved_buffers_are_counted_by_step_and_way():
    log = [
        THUNK + "Evicted 3 command buffer thunk command buffers",
        step_line(ONE, 0),
        *UPDATE,
        "something else",
        step_line(ONE, 1),
    ]
    log += [*UPDATE, *UPDATE, step_line(ONE, 2), *OLDER, *REPLAY, step_line(COPIES, 0), *UPDATE, step_line(COPIES, 1), *REPLAY]
    found = counts_of(log, first=1)
    one, copies = found[ONE], found[COPIES]
    assert (one.steps, one.lines["launched"], one.lines["updated"], "recorded" in one.lines) == (2, 4, 3, False)
    assert (one.moved, one.kernels, one.rewritten, one.microseconds) == (10, 180, 160, 880)
    assert (copies.steps, copies.lines, copies.moved) == (1, {"launched": 1}, 0)
    assert not one.unknown
    assert not copies.unknown
    assert "3.3 moved buffers an update, of 60 kernels; 80 kernels written anew a step" in one.said()
    assert one.a_step("updated") == 1.5


def test_a_first_record_is_no_update_and_a_profiler_or_a_trace_is_told():
    first = THUNK + BEGIN + "num_commands=85; updated_allocs=4; is_first_record=true; needs_update=false"
    log = [step_line(ONE, 0), first, THUNK + "Initialize command buffer on device #0 by recoding command buffer cmd sequence"]
    log += [THUNK + "Execute command buffer thunk as a regular thunk sequence because we detected active profiling session"]
    log += [
        "I1127 05:15:13.805911   18383 traced_command_buffer.cc:90] Command buffer trace cache create new item for command gemm"
    ]
    (found,) = counts_of(log).values()
    assert found.lines == {"recorded": 2, "refused": 1, "traced again": 1}
    assert "2.0 recorded a step; 1.0 traced again a step; 1.0 refused a step" in found.said()


def test_what_is_not_understood_is_kept_and_shown():
    strange = [THUNK + f"Graph {number} at 0x7f00{number} was remapped" for number in range(3)]
    (found,) = counts_of([step_line(ONE, 0), *strange, "I1127 05:15:13.805911   18383 bfc_allocator.cc:90] allocates"]).values()
    assert found.unknown == {"Graph # at # was remapped": 3}
    assert found.said().endswith("NOT UNDERSTOOD, 3 lines such as: Graph # at # was remapped")
    (nothing,) = counts_of([step_line(ONE, 0)]).values()
    assert nothing.said().startswith("nothing was logged of graphs")


def test_graphs_are_of_the_program_that_their_thread_has_named_last():
    def line(thread, text):
        return f"I1127 05:15:36.149675   {thread} command_buffer_conversion_pass.cc:602] {text}"

    of = "Creating command buffer thunk with the following thunks: "
    log = [
        line(7, "Module jit_f CommandBufferConfig: enabled_commands: [FUSION]"),
        line(8, "Module jit_g CommandBufferConfig: enabled"),
    ]
    log += [line(7, of + "dot, fusion"), line(8, of + "a, b, c"), line(7, of + "add"), line(9, of + "of no module")]
    log += [line(8, "Module jit_h CommandBufferConfig: "), line(8, "Thunk kind kCustomKernel is not lowered to command buffer")]
    assert graphs_made(log) == {"f": [2, 1], "g": [3], "h": []}


@pytest.mark.targets
def test_graphs_of_programs_that_are_compiled_for_a_gpu_are_read_from_what_xla_logs(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda12")
    log = tmp_path / "log"
    job = Job("graphs", "mlp", SMALL, tmp_path, 200.0)
    (row,), trouble = run_beside(job, "mlp, kernels", 200, log, {"JAX_PLATFORMS": "cpu", **LOGGED})
    assert trouble == ""
    programs, made = row.numbers["programs"], graphs_made(log.read_text(errors="replace").splitlines())
    for name, (_, kernels) in programs.items():
        assert made[name] == (
            [kernels] if kernels >= 5 else []
        )  # five is XLA's least number of kernels, of which it makes one graph
    assert max(kernels for _, kernels in programs.values()) >= 5


def hand_made_plan():
    """Three times ``x = x * 2 + y`` by one program, which takes the buffer of x over, then a function that is no program.

    The program is another each time, as what came from the cache of compiled programs cannot be loaded twice.
    """
    device, other = jax.devices()[1], np.random.default_rng().uniform(1e6, 2e6, 8)  # eight, so that no two runs draw the same
    shape = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    program = jax.jit(lambda x, y: (jnp.where(x < other, x * 2 + y, 0),), donate_argnums=0).lower(shape, shape).compile()
    about = About(device, 0, None, sends=False, program="double", watch=-1)
    lines = [Instruction(str(number), program, (0, 1), (0,), (), about) for number in range(3)]
    lines.append(Instruction("function", lambda x: (x,), (0,), (2,), (), about))
    return Plan(tuple(lines), 3, (), (0, 1), (2,), 0), device


def run(plan, device):
    x, y = (jax.device_put(jnp.full(8, value), device) for value in (1.0, 3.0))
    (found,) = execute(plan, [x, y])
    return np.asarray(found), x.is_deleted()


def test_every_call_has_a_program_of_its_own_on_the_same_device_with_the_same_results():
    plan, device = hand_made_plan()
    copied, copies = with_copies(plan)
    assert copies == 2
    assert sorted(count_programs(plan).values()) == [3]
    assert sorted(count_programs(copied).values()) == [1, 1, 1]
    assert copied.instructions[0].call is plan.instructions[0].call
    assert copied.instructions[3] == plan.instructions[3]
    for made in (plan, copied):
        found, taken_over = run(made, device)
        assert found.tolist() == [29.0] * 8
        assert taken_over
    assert with_copies(copied)[1] == 0


def test_addresses_are_noted_of_arguments_before_they_are_taken_over_and_of_results():
    plan, device = hand_made_plan()
    seen = Addresses()
    watched = with_eyes(plan, seen)
    for _ in range(2):
        assert run(watched, device)[0].tolist() == [29.0] * 8
    assert set(seen.calls) == {0, 1, 2}  # the function is no program
    assert [len(found) for found in seen.calls[0]] == [3, 3]  # x and y, and the result
    for taken_x, _, made in seen.calls[1]:
        assert made == taken_x  # its buffer is taken over
    assert set(seen.values) == {(0, 0), (1, 0), (2, 0), (3, 0)}
    assert len(set(seen.programs.values())) == 1


def test_a_call_moves_if_the_call_before_of_the_same_program_found_its_arrays_elsewhere():
    seen = Addresses()
    seen.programs.update({0: 7, 1: 7, 2: 8})
    for _ in range(3):  # two calls of a program, each always with arrays of its own; and one whose array moves
        seen.calls[0].append((1, 2))
        seen.calls[1].append((3, 4))
    seen.calls[2] += [(5,), (6,), (6,)]
    assert seen.moves(copies=False) == 5 / 6  # in the second and third step; the last call of program 8 finds its array again
    assert seen.moves(copies=True) == 1 / 6
    seen.values.update({(0, 0): {1}, (1, 0): {2}, (2, 0): {5, 6}})
    assert seen.spread() == (3, 2, 1, 2)
    assert Addresses().moves(copies=True) == 0.0


def test_a_flag_is_tried_as_an_option_before_it_could_abort_a_process():
    assert is_known("xla_gpu_graph_min_graph_size=1")
    assert is_known("xla_gpu_enable_command_buffer=")
    assert not is_known("xla_gpu_no_such_flag=1")
    assert not is_known("xla_gpu_command_buffer_update_mode=NO_SUCH_MODE")
    assert is_known(*VARIANTS["64 traces kept"].flags)
    assert any(map(is_known, VARIANTS["fixed addresses"].flags))


def numbers(platform, host, steps=(0.1,)):
    moves = {ONE: 1.0, COPIES: 0.25}
    programs = {"f": (8, 100), "g": (1, 50)}
    common = {"platform": platform, "calls": 9, "kernels": 850, "programs": programs, "values": (40, 30, 1, 8), "moves": moves}
    return {**common, "host": list(host), "steps": list(steps)}


@pytest.fixture
def job(tmp_path):
    return Job("graphs", "gpt", SMALL, tmp_path, 1000.0)


def beside(platform, asked):
    """What takes the place of the other processes, and notes what they were asked for."""

    def run_beside(job, case, seconds, log, variables):
        _, *of = case.split(", ")
        asked.append((of, dict(variables)))
        log.write_text("\n".join([step_line(ONE, 3), *UPDATE, step_line(COPIES, 3), *REPLAY]) if of[-1] == "logged" else "")
        if of == ["flags"]:
            return [job.row("flags", "", known=["xla_gpu_graph_min_graph_size=1", "xla_gpu_enable_command_buffer="])], ""
        if of == ["graphs of any size"]:
            return [], "ended with signal SIGABRT"
        if of == ["no graphs"] and "JAX_ENABLE_COMPILATION_CACHE" not in variables:
            return [], "ended with code 1: NOT_FOUND: a function of the cache"
        rows = [job.row(ONE, "", **numbers(platform, (0.0085, 0.0085)))]
        if VARIANTS[of[0]].copies:
            rows += [job.row(COPIES, "", **numbers(platform, (0.001,))), job.row("copies", "", loaded=7, seconds=0.1, same=True)]
        return ([] if of[-1] == "logged" else rows), ""

    return run_beside


def test_on_a_gpu_each_variant_is_measured_and_logged_and_compared_with_the_first(job, monkeypatch):
    asked = []
    monkeypatch.setattr(graphs, "run_beside", beside("gpu", asked))
    monkeypatch.setenv("XLA_FLAGS", "--of_the_user=1")
    rows = {row.what: row for row in graphs.rows(job)}
    one, copies = rows["as it comes, one program"], rows["as it comes, a copy for each call"]
    assert (one.measured, copies.measured) == ("10.00 us a kernel", "1.18 us a kernel")
    assert (one.numbers["ratio"], copies.numbers["ratio"]) == (1.0, pytest.approx(1 / 8.5))
    assert rows["as it comes, one program: graphs"].measured == "1 launched, 1 updated a step"
    assert rows["as it comes, a copy for each call: graphs"].measured == "1 launched, 0 updated a step"
    assert rows["as it comes, one program: addresses"].measured == "30 of 40 values at one in 10 steps"
    assert "a copy for each call would make that 25%" in rows["as it comes, one program: addresses"].note
    assert rows["as it comes, bits of the copies"].measured == "the same"
    assert rows["no graphs, one program"].measured == "10.00 us a kernel"
    assert (rows["graphs of any size"].measured, rows["graphs of any size"].note) == ("failed", "ended with signal SIGABRT")
    assert rows["64 traces kept"].note == "the installed jaxlib does not know xla_cmd_buffer_trace_cache_size=64"
    assert (job.out / "graphs-as-it-comes-logged.log.gz").exists()
    of = {", ".join(words): variables for words, variables in asked}
    assert of["as it comes"] == {}
    flags = "--of_the_user=1 --xla_gpu_enable_command_buffer="
    assert of["no graphs"] == {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}  # the second time
    assert [words for words, _ in asked].count(["no graphs"]) == 2
    assert [words for words, _ in asked].count(["graphs of any size"]) == 1
    assert "no graphs, logged" not in of  # nothing would be logged
    assert "command_buffer_thunk=3" in of["as it comes, logged"]["TF_CPP_VMODULE"]
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows.values()]))


def test_where_there_are_no_graphs_the_parts_about_graphs_say_so(job, monkeypatch):
    asked = []
    monkeypatch.setattr(graphs, "run_beside", beside("cpu", asked))
    monkeypatch.setattr(graphs, "find_spec", lambda name: None)
    rows = {row.what: row for row in graphs.rows(job)}
    assert rows["as it comes, one program"].note.endswith("a cpu has no CUDA graphs")
    assert rows["no graphs"].note == "a cpu has no CUDA graphs; on a GPU: --xla_gpu_enable_command_buffer="
    assert rows["graphs of a step, compiled for h100"].measured == "not counted"
    assert [words for words, _ in asked] == [["flags"], ["as it comes"]]


def test_without_time_everything_is_left_out_and_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "run_beside", None)
    rows = list(graphs.rows(Job("graphs", "gpt", SMALL, tmp_path, 15.0)))
    assert {row.measured for row in rows} <= {"left out", "failed"}
    assert any("seconds were left" in row.note for row in rows)


def way(job, platform, devices, bits, peak):
    common = {"calls": [0.5], "steps": [1.0], "raised": "the call", "on": True}
    return job.row("1f1b", "", platform=platform, devices=devices, bits=bits, peaks=[peak] if peak else [], **common)


def test_lanes_compare_bits_peaks_and_errors_of_all_ways_with_one_thread(job, monkeypatch):
    asked = []

    def run_beside(job, case, seconds, log, variables):
        _, schedule, name = case.split("; ")
        asked.append((schedule, name, dict(variables)))
        different = WAYS[name].by_xla and WAYS[name].threads == "ranks"
        return [way(job, "gpu", 4, "other" if different else "bits", 200 if WAYS[name].by_xla else 100)], ""

    monkeypatch.setattr(lanes, "run_beside", run_beside)
    rows = {row.what: row for row in lanes.rows(job)}
    assert rows["1f1b, one thread"].measured == "1000.00 ms"
    assert rows["1f1b, one thread, and XLA's: bits"].measured == "the same"
    assert rows["1f1b, a thread for each rank, and XLA's: bits"].measured == "differ"
    assert rows["1f1b, one thread, and XLA's: peak of memory"].measured == "2.000"
    assert rows["zb-h1, a thread for each rank: peak of memory"].measured == "1.000"
    assert rows["1f1b, one thread, and XLA's: who is told of too little memory"].measured == "the call"
    assert ("1f1b", "one thread", {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "0"}) in asked
    assert ("zb-h1", "one thread, and XLA's", {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}) in asked


def test_lanes_expect_the_same_bits_only_of_a_model_that_has_them_twice(job, monkeypatch):
    counts = iter(range(100))
    monkeypatch.setattr(lanes, "run_beside", lambda job, *_: ([way(job, "gpu", 4, f"bits {next(counts)}", 0)], ""))
    bits = [row for row in lanes.rows(job) if row.what.endswith("bits")]
    assert [(row.measured, row.aim) for row in bits] == [("differ", "")] * 8
    assert "two runs of one way differ" in bits[0].note


def test_lanes_leave_out_what_a_device_cannot_do(job, monkeypatch):
    monkeypatch.setattr(lanes, "run_beside", lambda job, *_: ([way(job, "gpu", 1, "bits", 0)], ""))
    rows = {row.what: row for row in lanes.rows(job)}
    assert rows["1f1b, a thread for each rank"].note == "all ranks share one device: a thread for each needs several"
    assert rows["1f1b, one thread, and XLA's: bits"].measured == "the same"
    assert "1f1b, one thread, and XLA's: peak of memory" not in rows
    monkeypatch.setattr(lanes, "run_beside", lambda job, *_: ([way(job, "cpu", 4, "bits", 0)], ""))
    rows = {row.what: row for row in lanes.rows(job)}
    assert "which only GPUs have" in rows["zb-h1, one thread, and XLA's"].note
    assert rows["zb-h1, a thread for each rank: bits"].measured == "the same"


def test_who_is_told_of_too_little_memory(monkeypatch):
    assert where_raised([]).startswith("not tried")
    assert where_raised([8]) == "nobody"

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def told(*, at_once):
        program = refuse if at_once else lambda: types.SimpleNamespace(block_until_ready=refuse)
        jitted = types.SimpleNamespace(lower=lambda: types.SimpleNamespace(compile=lambda: program))
        monkeypatch.setattr(lanes, "jax", types.SimpleNamespace(errors=jax.errors, jit=lambda _: jitted))
        return where_raised([8])

    assert told(at_once=True) == "the call"
    assert told(at_once=False) == "whoever waits for the result"
