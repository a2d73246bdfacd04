"""Checkpoints of a state that lives in several processes; what the processes run is in process_checkpoint_cases.py."""

import shutil
import time

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpp
from tests.processes import process_checkpoint_cases as cases
from tests.processes.processes import launch, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have saved trees made by hand, and read what this one had saved."""
    folder = tmp_path_factory.mktemp("by_hand")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "one", cases.state_of(5, 5))
    ended = launch("tests.processes.process_checkpoint_cases:by_hand", 2, {"folder": str(folder)}, seconds=60)
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


def train(folder, name, until, *, dies=False):
    """Two processes train a pipeline up to a step; or the second is killed while the last step is saved."""
    arguments = {"folder": str(folder), "name": name, "until": until, "dies": dies}
    return start("tests.processes.process_checkpoint_cases:train_killed", 2, arguments, together=not dies)


@pytest.fixture(scope="module", params=["unequal slices", pytest.param("equal slices", marks=pytest.mark.slow)])
def killed(request, tmp_path_factory):
    """What two processes leave of which one is killed while it writes the fourth checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    with train(folder, request.param, 4, dies=True) as processes:
        limit = time.monotonic() + 60
        while processes[1].code is None and time.monotonic() < limit:
            time.sleep(0.05)
        assert processes[1].code == -9, processes[1].ended()
        time.sleep(0.5)  # for the first, which has written its part and waits
        assert processes[0].code is None
    return request.param, folder


def test_a_save_that_was_killed_in_the_middle_is_no_checkpoint(killed):
    _, folder = killed
    assert {path.name for path in folder.iterdir() if path.name.isdigit()} == {"1", "2", "3"}
    assert [path for path in folder.iterdir() if path.name.startswith("4.")], "nothing was begun"
    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == [1, 2, 3]


def test_two_processes_and_one_go_on_with_the_bits_of_an_unbroken_run(killed, tmp_path):
    name, before = killed
    folder = shutil.copytree(before, tmp_path / "resumed")
    with train(folder, name, 6) as processes:
        processes.wait(60)
    params, pipe = cases.runs()[name], cases.pipeline()
    wanted = jax.device_get(cases.train(params, tmp_path / "unbroken", 6))
    assert wanted.step == 6
    target = pipe.abstract_state(params, np.zeros((8, 3), np.float32))
    with cases.open_manager(folder) as manager:
        assert manager.all_steps() == [4, 5, 6]
        chex.assert_trees_all_equal(manager.restore(6, args=ocp.args.StandardRestore(target)), wanted)
        state = manager.restore(4, args=ocp.args.StandardRestore(target))
    *_, state = cases.advance(pipe, state, 6)
    chex.assert_trees_all_equal(state, wanted)
    gathered = np.load(folder.with_suffix(".npz"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        np.testing.assert_array_equal(gathered[jax.tree_util.keystr(path)], leaf)
