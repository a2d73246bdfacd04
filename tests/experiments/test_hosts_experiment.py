"""The experiment on several processes: the losses of one process, what crosses, and processes that somebody else has started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.hosts.launch import free_ports
from experiments.hosts.main import Config, run, table

ROOT = Path(__file__).parents[2]
MAIN = """
import jax, sys
jax.config.update("jax_cross_host_transfer_socket_address", sys.argv.pop(1))
jax.config.update("jax_cross_host_transport_addresses", ",".join(["127.0.0.1:0"] * 4))
from experiments.hosts.main import main
main()
"""
SMALL = {"width": 8, "depth": 4, "batch": 8, "microbatches": 4, "losses": 2, "steps": 2, "rounds": 1, "ranks": 2}


@pytest.mark.long
def test_two_processes_have_the_losses_of_one_share_its_work_and_send_activations_and_cotangents():
    result = run(Config(processes=(2,), **SMALL))
    one, two = result.rows
    assert (one.processes, two.processes) == (1, 2)
    assert two.losses == one.losses and len(one.losses) == 2
    assert two.agree and two.equal
    assert sum(two.programs) == one.programs[0]
    assert max(two.instructions) < one.instructions[0]
    assert (one.ratio, one.sends, one.crossing) == (1, 0, (0.0,))
    assert min(two.crossing) > 0
    crossings = {(source, target, kind): (times, size) for source, target, kind, times, size in result.rows[1].crossings}
    whole = 8 * 8 * 4  # the batch, of the width, in float32
    assert crossings[0, 1, "activations"] == crossings[1, 0, "cotangents"] == (4, whole)
    assert not [kind for _, _, kind in crossings if kind == "tied"]
    assert f"{whole}" in table(result)
    assert json.loads(result.to_json())["rows"][1]["equal"] is True


@pytest.mark.long
def test_processes_started_by_slurm_find_each_other_and_the_first_says_what_they_found():
    ports = free_ports(3)
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "SLURM_JOB_ID": str(ports[2]),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
    }
    sizes = [f"--{name}={value}" for name, value in SMALL.items() if name not in ("ranks", "rounds")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAIN, f"127.0.0.1:{ports[k]}", "--no-spawn", *sizes],
            cwd=ROOT,
            env={**common, "SLURM_PROCID": str(k)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    try:
        first, second = (process.communicate(timeout=60)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert "Losses: 0." in first
    assert "Losses" not in second
