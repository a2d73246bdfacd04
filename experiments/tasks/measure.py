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

    def listen(event: str, duration: float, **_: Any) -> None:  # noqa: ARG001
        if event == _COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def seconds_a_step(ways: Mapping[str, Way], chain: Chain, warm_up: int) -> dict[str, float]:
    """One round: every way takes the same steps, one way after the other.

    As in training, nothing waits between the steps of a way. The first ``warm_up`` of them are not timed: the way before has
    emptied the caches, and nobody has prefetched the first set.

    Args:
        ways: by name.
        chain: the steps.
        warm_up: how many of them.
    """
    found = {}
    for name, way in ways.items():
        for step in chain[:warm_up]:
            way.step(*step)
        way.wait()
        start = time.perf_counter()
        for step in chain[warm_up:]:
            way.step(*step)
        way.wait()
        found[name] = (time.perf_counter() - start) / (len(chain) - warm_up)
    return found


def seconds_to_move(params: Any, optimizer: Any, device: Any, times: int) -> tuple[float, float]:
    """Median seconds to bring a set to the device, and to write it back, while nothing else happens.

    Args:
        params: of a set.
        optimizer: of the bank.
        device: likewise.
        times: sets moved.
    """
    bank = jaxpp.Bank({k: params for k in range(2)}, optimizer, device=device, slots=1)  # one slot: each is brought anew
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
