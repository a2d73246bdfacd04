"""Numbers and texts that each process has, told to all of them, by the sends that steps use too.

``jax.experimental.multihost_utils`` does the same by a collective over all devices, which may be blocked by the sends of an earlier
step. Every process calls these functions, in the same order, and makes all sends (see ``crossing``), also those between others.
"""

import functools
import zlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.here import spread
from jaxpp.types import Array, Device, DType

__all__ = ["first_devices", "rows_of_all", "sent", "texts_of_all"]


@functools.cache
def first_devices() -> dict[int, Device]:
    """The first device of each process."""
    found: dict[int, Device] = {}
    for device in sorted(jax.devices(), key=lambda device: (device.process_index, device.id)):
        found.setdefault(device.process_index, device)
    return found


def sent(values: np.ndarray, source: int, target: int) -> np.ndarray | None:
    """What the process ``source`` passes, in the process ``target``, which waits for it; None in the others.

    Of the values of the others only shape and type are used; the type is one that JAX knows without 64 bits.
    """
    me, cross = jax.process_index(), _crosser(values.shape, values.dtype, source, target)
    found = cross(spread(np.array(values), first_devices()[source])) if me == source else cross()
    return np.asarray(found[0]) if me == target else None


@functools.cache
def _crosser(shape: tuple[int, ...], dtype: DType, source: int, target: int) -> Callable[..., Sequence[Array]]:
    devices = first_devices()
    return crosser(jax.ShapeDtypeStruct(shape, dtype), devices[source], devices[target])


def rows_of_all(values: np.ndarray) -> np.ndarray:
    """What each process passes, a row each; equal shapes, of a type that JAX knows without 64 bits."""
    me, rows = jax.process_index(), {jax.process_index(): values}
    for source in range(jax.process_count()):
        for target in range(jax.process_count()):
            found = None if source == target else sent(values, source, target)
            if found is not None:
                rows[source] = found
    assert len(rows) == jax.process_count(), f"process {me} has heard of {sorted(rows)} alone"
    return np.stack([rows[process] for process in sorted(rows)])


def texts_of_all(text: str) -> tuple[str, ...]:
    """The text of each process."""
    data = np.frombuffer(zlib.compress(text.encode()), np.uint8)
    sizes = rows_of_all(np.array([len(data)], np.int32))[:, 0]
    rows = rows_of_all(np.pad(data, (0, int(sizes.max()) - len(data))))
    return tuple(zlib.decompress(row[:size].tobytes()).decode() for row, size in zip(rows, sizes, strict=True))
