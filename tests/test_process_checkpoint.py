"""Checkpoints of a state that lives in several processes; what the processes run is in process_checkpoint_cases.py."""

import time

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpp
from tests import process_checkpoint_cases as cases
from tests.processes import launch, start

OPTIONS = {"environment": {"NPROC": "4"}}  # threads: those that wait in a collective leave some to the sends before it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have saved trees made by hand, and read what this one had saved."""
    folder = tmp_path_factory.mktemp("by_hand")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "one", cases.state_of(5, 5))
    ended = launch("tests.process_checkpoint_cases:by_hand", 2, {"folder": str(folder)}, seconds=60, **OPTIONS)
    assert "all is as it should be" in ended[0].out
    return folder


def test_one_process_restores_what_two_have_saved(folder):
    with ocp.CheckpointManager(folder / "several") as manager:
        assert manager.latest_step() == 2
        for step in (1, 2):
            cases.check(manager.restore(step, args=ocp.args.StandardRestore(cases.target())), step, step)


def test_what_two_have_saved_opens_without_a_target(folder):
    found = ocp.StandardCheckpointer().restore(folder / "several" / "2" / "default")
    jax.tree.map(np.testing.assert_array_equal, found, {"params": cases.values(2), "step": 2})


def test_in_one_process_the_handler_is_that_of_orbax():
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    assert jaxpp.array_handler() is registered
    assert type(registered) is ocp.type_handlers.ArrayHandler


def test_a_save_that_was_killed_in_the_middle_is_no_checkpoint(tmp_path):
    target, arguments = "tests.process_checkpoint_cases:killed_while_saving", {"folder": str(tmp_path)}
    with start(target, 2, arguments, together=False, **OPTIONS) as processes:
        limit = time.monotonic() + 60
        while processes[1].code is None and time.monotonic() < limit:
            time.sleep(0.05)
        assert processes[1].code == -9 and "saved\n" in processes[1].out
        time.sleep(0.5)  # for process 0, which has written its part and waits
        assert processes[0].code is None and "saved again" not in processes[0].out
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("2.")] == ["1"]
    assert [path.name for path in tmp_path.glob("2.*")]
    with cases.open_manager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        cases.check(manager.restore(1, args=ocp.args.StandardRestore(cases.target())), 1, 1)
        manager.save(2, args=ocp.args.StandardSave(cases.state_of(2, 2)))  # which waits until the remains are deleted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """What two processes had saved after three steps, and after six, when they were killed in between."""
    folder = tmp_path_factory.mktemp("resumed")
    for until in (3, 6):
        arguments = {"folder": str(folder), "until": until}
        with start("tests.process_checkpoint_cases:train_all", 2, arguments, together=False, **OPTIONS) as processes:
            ended = processes.wait(90)
        assert [each.code for each in ended] == [-9, -9], ended
    return folder


@pytest.mark.parametrize("name", cases.runs())
def test_two_processes_and_one_go_on_with_the_bits_of_an_unbroken_run(resumed, tmp_path, name):
    params = cases.runs()[name]
    wanted = jax.device_get(cases.train(params, tmp_path, 6))
    assert wanted.step == 6
    pipe = cases.pipeline()
    target = pipe.abstract_state(params, np.zeros((8, 3), np.float32))
    with cases.open_manager(resumed / name) as manager:
        assert manager.all_steps() == [4, 5, 6]
        chex.assert_trees_all_equal(manager.restore(6, args=ocp.args.StandardRestore(target)), wanted)
        state = manager.restore(4, args=ocp.args.StandardRestore(target))
    *_, state = cases.advance(pipe, state, 6)
    chex.assert_trees_all_equal(state, wanted)
