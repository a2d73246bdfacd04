"""The direct copy of a send against ``jax.device_put``: whether it is used here, and the host's microseconds for each.

A step on one device has no sends. The CPU devices of the machine are measured besides, as their sends are copies too. Copies
between a device and pinned host memory are measured as well: whether the call comes back before the copy is done, or before the
value that it copies is there, decides whether a state or residuals in host memory hold up the rest of a step.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.gpu.rows import Job, Row, first_line
from jaxpp.runtime.send import HOST_MEMORY, Send

__all__ = ["is_direct", "rows"]

_KIB = (2, 4096)


def rows(job: Job) -> Iterator[Row]:
    """Each backend with two devices or more: from the first device to the second."""
    if getattr(jax.config, "jax_num_cpu_devices", 0) < 0:  # an accelerator was found, so the CPU is one device so far
        with contextlib.suppress(RuntimeError):  # a backend runs already
            jax.config.update("jax_num_cpu_devices", job.sizes.models.stages)
    for backend in dict.fromkeys((jax.default_backend(), "cpu")):
        try:
            devices = jax.devices(backend)
        except RuntimeError as error:
            yield job.row(backend, "not there", note=first_line(error))
            continue
        if len(devices) < 2:
            yield job.row(backend, "not measured", note="one device only: its stages share it, and nothing is sent")
            continue
        for size in _KIB:
            yield _pair(job, backend, devices, size)
    yield from _host_copies(job)


def _host_copies(job: Job) -> Iterator[Row]:
    """The call and the whole of a copy, to host memory and back, while the device is idle and while it works."""
    device = jax.devices()[0]
    if HOST_MEMORY not in [memory.kind for memory in device.addressable_memories()]:
        yield job.row("host memory", "not there", note=f"{device} has none that is pinned")
        return
    there, here = (SingleDeviceSharding(device, memory_kind=kind) for kind in (HOST_MEMORY, None))
    size = job.sizes.product
    matrix = jax.random.normal(jax.random.key(0), (size, size), "bfloat16")

    @jax.jit
    def work(x: jax.Array, m: jax.Array) -> jax.Array:
        for _ in range(16):
            m = m @ m / size
        return x + m[0, 0].astype(x.dtype)

    for kib in (2, 98304):
        x = jax.block_until_ready(work(jnp.zeros(kib * 256, "float32"), matrix))
        on_host = jax.block_until_ready(jax.device_put(x, there))
        for busy in (False, True):
            for name, value, goal in (("to", x, there), ("from", on_host, here)):
                calls, ends = [], []
                for _ in range(5):
                    begun, source = time.perf_counter(), value
                    if busy:
                        made = work(x, matrix)
                        source = made if name == "to" else value
                    start = time.perf_counter()
                    copied = jax.device_put(source, goal)
                    calls.append(time.perf_counter() - start)
                    jax.block_until_ready(copied)
                    ends.append(time.perf_counter() - (start if not busy else begun))
                    jax.block_until_ready(work(x, matrix))
                call, end = float(np.median(calls)), float(np.median(ends))
                state = ("of a value still being made" if name == "to" else "while the device works") if busy else "idle"
                note = f"{1e3 * end:.3f} ms until it is there, {kib * 1024 / end / 1e9:.1f} GB/s"
                yield job.row(f"{name} host memory, {kib} KiB, {state}", f"{1e6 * call:.1f} us", note=note, call=calls, end=ends)


def _pair(job: Job, backend: str, devices: list[Any], size: int) -> Row:
    value = jax.device_put(jnp.zeros(size * 256, "float32"), devices[0])
    direct = is_direct(devices[1], value)
    ways: dict[str, Callable[[Any], Any]] = {"send": Send(devices[1]).bind(), "device_put": lambda x: jax.device_put(x, devices[1])}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3 * job.sizes.rounds):
        for name, way in ways.items():
            times[name].append(_seconds(way, value))
    send, put = (1e6 * float(np.median(times[name])) for name in ways)
    used = "the direct copy is used" if direct else "the direct copy is not used: a send is jax.device_put"
    note = f"jax.device_put {put:.1f} us; {used}; {len(devices)} devices"
    return job.row(f"{backend}: send of {size} KiB", f"{send:.1f} us", note=note, send=send, put=put, direct=direct)


def is_direct(device: Any, value: Any) -> bool:
    """Whether a send of this value gets there without ``jax.device_put``."""
    with mock.patch.object(jax, "device_put", wraps=jax.device_put) as watched:
        send = Send(device).bind()
        before = watched.call_count
        jax.block_until_ready(send(value))
        return watched.call_count == before


def _seconds(way: Callable[[Any], Any], value: Any, times: int = 50) -> float:
    """Host time of a call; the copies are waited for afterwards."""
    jax.block_until_ready(way(value))
    start = time.perf_counter()
    found = [way(value) for _ in range(times)]
    taken = (time.perf_counter() - start) / times
    jax.block_until_ready(found)
    return taken
