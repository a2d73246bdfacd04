"""What the processes of tests/processes/test_launch.py run: one hands an array to the other, one fails, or all wait."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding


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


def wait():
    """All wait, after saying that they do."""
    print("waits", flush=True)
    time.sleep(600)
