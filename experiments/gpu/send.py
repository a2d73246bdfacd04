"""The direct copy of a send against ``jax.device_put``: whether it is used here, and the host's microseconds for each.

A step on one device has no sends. The CPU devices of the machine are measured besides, as their sends are copies too.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.rows import Job, Row, first_line
from jaxpp.runtime.send import Send

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
