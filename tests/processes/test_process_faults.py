"""Processes that differ, fail, are killed or are interrupted: all end, and say why."""

import json
import signal
import time

import pytest

from tests.processes.processes import start

CASES = "tests.processes.process_fault_cases"
HEARTBEAT = {"heartbeat_timeout_seconds": 10}


def wait_for(process, text: str, seconds: float = 60) -> None:
    """Wait until a process has printed something."""
    limit = time.monotonic() + seconds
    while text not in process.out:
        assert process.code is None, process.errors
        assert time.monotonic() < limit, process.errors
        time.sleep(0.02)


def lines(ended) -> list[dict]:
    return [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]


EXPECTED = {
    "code": ["pipe.init: all processes run the same pipeline", "loss, line", ": process 0: ", " = tanh", ": process 1: ", " = sin"],
    "batch": [
        "batch, line 1: process 0: x f32[16,8]",
        "batch, line 1: process 1: x f32[8,8]",
        "Fix: pass batches of the same shapes",
    ],
    "optimizer": ["optimizer, line", "Fix: start the same script"],
    "rate": ["optimizer, line", "0.01", "0.001"],
    "schedule": ["schedule, line 1: process 0: 1f1b", "schedule, line 1: process 1: gpipe"],
    "devices": ["devices, line 1: process 0: rank 0: cpu:0", "jax.devices(), which lists those of all processes"],
    "option": ["options, line", "process 0: remat = None", "process 1: remat = "],
    "x64": ["flags, line 1: process 0: jax_enable_x64 = False", "flags, line 1: process 1: jax_enable_x64 = True"],
    "precision": ["flags, line", "jax_default_matmul_precision = 'highest'", "Fix: set the same options of JAX"],
    "xla_flags": ["flags, line", "process 1: XLA_FLAGS --xla_cpu_enable_fast_math=true"],
    "key": ["key: process 0: key<fry>[] [0, 0]", "key: process 1: key<fry>[] [0, 1]", "the same seed"],
    "init": ["init, line"],
    "later batch": ["pipe.step: ", "batch, line 1: process 0: x f32[12,8]", "process 1: x f32[8,8]"],
    "call": ["call: process 0: pipe.evaluate", "call: process 1: pipe.step"],
    "drop-in": ["grad_fn: ", "loss, line"],
}


def test_a_difference_is_an_error_on_every_process_and_leaves_all_at_work_and_ctrl_c_on_one_ends_all():
    with start(f"{CASES}:mismatches", 2, together=False) as processes:
        wait_for(processes[1], "another batch")
        processes[1].send(signal.SIGINT)
        begun = time.monotonic()
        ended = processes.wait(40)
        assert time.monotonic() - begun < 20
    said = [{line["name"]: line for line in lines(each) if "name" in line} for each in ended]
    for name, fragments in EXPECTED.items():
        errors = [each[name]["error"] for each in said]
        assert all(fragment in errors[0] for fragment in ["ProcessError: ", *fragments]), errors[0]
        assert errors[0].partition("Got")[2] == errors[1].partition("Got")[2]
        assert max(each[name]["seconds"] for each in said) < 10
    # what one raises itself, it raises unchanged; the other hears of it
    assert said[1]["loss that raises"]["error"] == "RuntimeError: in the user's loss"
    assert "process 1 raised RuntimeError: in the user's loss" in said[0]["loss that raises"]["error"]
    # after all these errors the processes are still together
    losses = [[line["loss"] for line in lines(each) if "loss" in line] for each in ended]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    # then process 1 came to another batch, while process 0 waited for a device
    error = said[1]["another batch"]["error"]
    assert "process 0 went on with pipe.step with a batch of x f32[16,8], y f32[16,8]" in error
    assert "process 1 is in pipe.step with a batch of x f32[8,8], y f32[8,8]" in error
    assert "jaxpp: process 1 waits in pipe.step with a batch of x f32[8,8]" in ended[0].errors
    # at last Ctrl-C on process 1
    assert "KeyboardInterrupt" in ended[1].errors
    assert "jaxpp: process 1 failed; it ends within 5 seconds" in ended[1].errors
    assert "jaxpp: process 1 raised KeyboardInterrupt; process 0 cannot go on without it" in ended[0].errors
    assert all(each.code != 0 for each in ended)


def test_a_process_that_is_killed_ends_the_others_within_the_heartbeat_time():
    with start(f"{CASES}:steps", 2, together=False, initialize=HEARTBEAT) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[1].kill()
        begun = time.monotonic()
        other, _ = processes.wait(40)
        assert time.monotonic() - begun < 20
    assert other.code != 0
    assert "jaxpp: process 1 does not answer: killed" in other.errors or "Task 1 heartbeat timeout" in other.errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_steps_run_ends_all(number):
    with start(f"{CASES}:steps", 3, {"pause": 0.02}, together=False) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[number].send(signal.SIGINT)
        ended = processes.wait(40)
    assert "KeyboardInterrupt" in ended[number].errors
    assert all(each.code != 0 for each in ended)


@pytest.mark.slow
def test_a_process_0_that_is_killed_ends_the_others_at_once():
    with start(f"{CASES}:steps", 2, together=False) as processes:
        for process in processes:
            wait_for(process, "step 3")
        processes[0].kill()
        begun = time.monotonic()
        _, other = processes.wait(40)
        assert time.monotonic() - begun < 10
    assert other.code != 0
    assert "JaxRuntimeError" in other.errors or "JAX distributed service" in other.errors


@pytest.mark.slow
def test_an_exception_in_the_loop_of_one_process_ends_all():
    with start(f"{CASES}:steps", 2, {"raises": True}, together=False) as processes:
        other, failed = processes.wait(60)
    assert failed.code == other.code == 1
    assert "RuntimeError: in the user's loop" in failed.errors
    assert "jaxpp: process 1 raised RuntimeError: in the user's loop; process 0 cannot go on without it" in other.errors


@pytest.mark.slow
def test_a_process_that_has_broken_off_a_step_makes_no_other():
    with start(f"{CASES}:broken_off", 2, together=False) as processes:
        other, failed = processes.wait(60)
    assert "caught" in failed.out
    assert failed.code == other.code == 1
    assert "ProcessError: pipe.step: a process that was interrupted" in failed.errors
    assert "Got: pipe.step was broken off here by " in failed.errors
    assert "jaxpp: process 1 raised ProcessError: pipe.step" in other.errors


@pytest.mark.slow
def test_a_process_whose_script_has_ended_is_not_waited_for():
    with start(f"{CASES}:uneven", 2, together=False) as processes:
        waiting, gone = processes.wait(60)
    assert gone.code == 0
    assert waiting.code == 1
    assert "process 1 has come to the end of its script" in waiting.errors
    assert "Fix: give every process the same batches, as many" in waiting.errors


@pytest.mark.slow
def test_a_process_that_comes_late_is_waited_for_and_people_are_told():
    with start(f"{CASES}:late", 2, together=False) as processes:
        first, second = processes.wait(60)
    assert first.code == second.code == 0
    assert "met" in first.out
    assert "jaxpp: process 0 has waited in pipe.init with a batch of x f32[16,8], y f32[16,8] for 5 seconds" in first.errors
    assert "because process 1 did not come to it yet" in first.errors
    assert "waited" not in second.errors


@pytest.mark.slow
def test_calls_in_another_order_are_found_at_the_next_meeting():
    with start(f"{CASES}:other_order", 2, together=False) as processes:
        ended = processes.wait(60)
    for each in ended:
        assert each.code == 1
        assert "earlier calls, line 3: process 0: pipe.step with a batch of x f32[8]" in each.errors
        assert "earlier calls, line 3: process 1: pipe.evaluate with a batch of x f32[8]" in each.errors


@pytest.mark.slow
def test_without_the_shared_store_differences_are_found_by_a_collective():
    with start(f"{CASES}:without_store", 2, together=False) as processes:
        ended = processes.wait(60)
    said = [{line["name"]: line["error"] for line in lines(each) if "name" in line} for each in ended]
    for name in ("code", "batch", "x64"):
        assert all(fragment in said[0][name] for fragment in EXPECTED[name]), said[0][name]
        assert said[0][name] == said[1][name]
    losses = [[line["loss"] for line in lines(each) if "loss" in line] for each in ended]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
