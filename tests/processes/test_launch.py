"""Several processes on one machine: they find each other, and none of them is left, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from experiments.hosts.launch import free_ports
from tests.processes.processes import ProcessesError, launch, start


def exchange(count: int):
    """Process 0 sends arrays from its last device to the first device of process 1."""
    first, last = (jax.local_devices(process_index=number) for number in (0, 1))
    source, target = SingleDeviceSharding(first[-1]), SingleDeviceSharding(last[0])
    for k in range(count):
        if jax.process_index() == 0:
            value = jax.device_put(jnp.arange(8.0) + k, source)
        else:
            value = jax.make_array_from_single_device_arrays((8,), source, [], dtype=jnp.float32)
        sent = jax.device_put(value, target)
        if jax.process_index() == 1:
            assert np.array_equal(sent, np.arange(8.0) + k)
    print(f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} of {jax.device_count()} devices")


def fail(number: int):
    """One process fails, the others would wait for it."""
    if jax.process_index() == number:
        raise ValueError("what the loss of a user might raise")
    time.sleep(600)


def leave(seconds: float):
    """The process ends, and something that it started lives on for a while."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"], start_new_session=True)


def wait():
    """All wait, after saying that they do."""
    print("waits", flush=True)
    time.sleep(600)


ROOT = Path(__file__).parents[2]
PARENT = """
import time
from tests.processes.processes import start
if __name__ == "__main__":
    with start("tests.processes.test_launch:wait", 2) as processes:
        print(*(process.popen.pid for process in processes), flush=True)
        time.sleep(600)
"""


def running(number: int) -> bool:
    """Whether there is a process of this number that is more than the status of one that has ended."""
    try:
        return "Z" not in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[:1]
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_processes_send_arrays_to_each_other():
    for number, ended in enumerate(launch("tests.processes.test_launch:exchange", 2, {"count": 3}, seconds=60)):
        assert (ended.number, ended.code) == (number, 0)
        assert ended.out == f"process {number} of 2, 2 of 4 devices\n"


@pytest.mark.long
def test_the_failure_of_one_ends_all_and_the_error_shows_what_each_wrote():
    with start("tests.processes.test_launch:fail", 2, {"number": 1}) as processes, pytest.raises(ProcessesError) as error:
        processes.wait(60)
    assert str(error.value).startswith("process 1 ended with status 1\n")
    assert "ValueError: what the loss of a user might raise" in str(error.value)
    assert [process.code for process in processes] == [-signal.SIGKILL, 1]


def test_a_time_limit_ends_all():
    with start("tests.processes.test_launch:wait", 2) as processes:
        with pytest.raises(ProcessesError, match=r"2 of 2 processes had not ended after 0\.1 seconds"):
            processes.wait(0.1)
        assert [process.code for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.long
def test_what_a_process_leaves_running_is_not_waited_for():
    began = time.monotonic()
    (ended,) = launch("tests.processes.test_launch:leave", 1, {"seconds": 60}, seconds=60)
    assert ended.code == 0 and time.monotonic() - began < 40


@pytest.mark.long
def test_the_pipes_of_what_a_process_leaves_running_are_closed_when_that_ends():
    with start("tests.processes.test_launch:leave", 1, {"seconds": 10}) as processes:
        (ended,) = processes.wait(60)
    streams = processes[0].popen.stdout, processes[0].popen.stderr
    assert ended.code == 0 and not any(stream.closed for stream in streams)
    limit = time.monotonic() + 60
    while not all(stream.closed for stream in streams) and time.monotonic() < limit:
        time.sleep(0.1)
    assert all(stream.closed for stream in streams)


def test_an_exception_in_the_block_ends_all():
    with pytest.raises(KeyboardInterrupt), start("tests.processes.test_launch:wait", 2) as processes:
        raise KeyboardInterrupt
    assert [process.code for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux lists its processes as files")
def test_processes_end_when_the_one_that_started_them_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    try:
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 2 and all(map(running, children))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    limit = time.monotonic() + 30
    while any(map(running, children)):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_ports_differ_and_are_free():
    assert len(set(free_ports(5))) == 5
