"""What is measured: bytes on each device, programs compiled, the seconds of a step and of moving a set."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

import jaxpp
from experiments.tasks.ways import Way

__all__ = ["Chain", "compilations", "device_bytes", "seconds_a_step", "seconds_to_move"]

_COMPILED = "/jax/core/compile/backend_compile_duration"

Chain = Sequence[tuple[int, Any, int]]
"""Steps: the task of each, its batch, and the task of the next."""


def device_bytes() -> tuple[int, ...]:
    """Bytes of live arrays in each device's own memory, every buffer once; what waits on the host is not in it."""
    found: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        if array.is_deleted() or array.sharding.memory_kind not in _kinds(array):
            continue
        for shard in array.addressable_shards:
            found[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return tuple(sum(size for (device, _), size in found.items() if device == each) for each in jax.local_devices())


def _kinds(array: Any) -> set[str]:
    return {device.default_memory().kind for device in array.sharding.device_set}


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one for each program that is compiled in the block."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:  # noqa: ARG001
        if event == _COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def seconds_a_step(ways: Mapping[str, Way], chain: Chain, warm_up: int, *, wait: bool) -> dict[str, tuple[float, float]]:
    """One round: every way takes the same steps, one way after the other.

    The first ``warm_up`` steps are waited for one by one, which says how long the host is busy with each. The others are timed
    together: as in training, nothing waits between them, unless ``wait``. The first of all counts for neither, if there are more:
    the way before has emptied the caches.

    Args:
        ways: by name.
        chain: the steps.
        warm_up: how many of them.
        wait: whether each timed step is waited for before the next.

    Returns:
        for each way the seconds of a step, and those of the host's part of it: from the call to its return.
    """
    found = {}
    for name, way in ways.items():
        host = []
        for step in chain[:warm_up]:
            start = time.perf_counter()
            way.step(*step)
            host.append(time.perf_counter() - start)
            way.wait()
        start = time.perf_counter()
        for step in chain[warm_up:]:
            way.step(*step)
            if wait:
                way.wait()
        way.wait()
        found[name] = (time.perf_counter() - start) / (len(chain) - warm_up), float(np.median(host[1:] or host))
    return found


def seconds_to_move(params: Any, optimizer: Any, device: Any, times: int) -> tuple[float, float]:
    """Median seconds to bring a set to the device, and to write it back, while nothing else happens.

    Args:
        params: of a set.
        optimizer: of the bank.
        device: of the bank.
        times: sets moved.
    """
    bank = jaxpp.Bank(dict.fromkeys(range(2), params), optimizer, device=device, slots=1)  # one slot: each is brought anew
    change = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))
    loads, stores = [], []
    for k in range(-2, times):
        start = time.perf_counter()
        with bank.use(k % 2) as task:
            both = jax.block_until_ready((task.params, task.opt_state))
            loads.append(time.perf_counter() - start)
            task.params, task.opt_state = jax.block_until_ready(change(both))
            start = time.perf_counter()
        bank.wait()
        stores.append(time.perf_counter() - start)
    return float(np.median(loads[2:])), float(np.median(stores[2:]))
