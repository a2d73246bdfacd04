"""What the processes of ``test_process_tune.py`` run: the devices of all of them as a machine for the search."""

import json
from pathlib import Path

import jax
import optax

from jaxpp.schedule import make
from jaxpp.tuner.knobs import Candidate
from jaxpp.tuner.machine import Devices
from tests.processes.process_observe_cases import BATCH, PARAMS, loss_fn

ADAM = optax.adam(1e-2)
CANDIDATES = [Candidate(make("1f1b", 4, 3)), Candidate(make("gpipe", 4, 3)), Candidate(make("zb-h1", 4, 3))]


def main(folder: str) -> None:
    """Ask the machine, and once more what it remembers."""
    me, told = jax.process_index(), []
    for _ in range(2):
        machine = Devices(loss_fn, ADAM, PARAMS, BATCH, keep=Path(folder, f"kept by {me}"))
        answers = [[repr(machine.costs(each.family)), machine.peaks(each), machine.step(each)] for each in CANDIDATES]
        told.append([answers, machine.num_measured, machine.remark])
    Path(folder, f"{me}.json").write_text(json.dumps(told))
