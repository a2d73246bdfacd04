"""Batches, banks and ``value_and_grad`` of two processes; what they run is in process_front_door_cases.py."""

import json

import jax
import numpy as np
import optax
import pytest

import jaxpp
from tests.processes import process_front_door_cases as cases
from tests.processes.processes import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes have found and saved; Orbax waits in collectives, which leave some threads to the sends before them."""
    folder = tmp_path_factory.mktemp("two")
    launch("tests.processes.process_front_door_cases:main", 2, {"folder": str(folder)}, seconds=120)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds with as many devices."""
    return cases.run(jax.devices()[:4], tmp_path_factory.mktemp("one"))


@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")
@pytest.mark.parametrize("process", [0, 1])
def test_two_processes_find_the_bits_of_one(folder, alone, process):
    with np.load(folder / f"{process}.npz") as found:
        assert set(found) == set(alone) and len(alone) > 60
        assert [name for name, array in alone.items() if found[name].tobytes() != array.tobytes()] == []


def test_one_process_restores_the_sets_that_two_have_saved(folder, alone):
    bank = jaxpp.Bank({}, optax.adamw(1e-2))
    bank.restore(folder / "sets", json.loads((folder / "manifest.json").read_text()))
    assert sorted(bank.tasks) == ["cat", "gecko", "horse"]
    for name in bank.tasks:
        read = cases.Found()
        read.add(name, (bank.params(name), bank.opt_state(name)))
        assert read and all(array.tobytes() == alone[key].tobytes() for key, array in read.items())
