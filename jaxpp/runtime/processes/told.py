"""A few numbers of each process, told to all of them."""

import jax
import numpy as np

from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.here import spread
from jaxpp.types import Device

__all__ = ["first_devices", "from_all"]


def first_devices() -> dict[int, Device]:
    """The first device of each process."""
    devices = sorted(jax.devices(), key=lambda device: device.id, reverse=True)
    return dict(sorted({device.process_index: device for device in devices}.items()))


def from_all(values: np.ndarray) -> np.ndarray:
    """What each process passes, a row each; every process calls it, with as many numbers of the same type.

    By sends alone, since a collective may be blocked by the sends of an earlier step. Every process makes all calls, also those for
    values that it neither has nor wants (``crossing``).
    """
    me, devices = jax.process_index(), first_devices()
    own = spread(np.array(values), devices[me])
    rows = {me: own}
    for source in devices:
        for process in sorted(devices.keys() - {source}):
            came = crosser(own, devices[source], devices[process])(*([own] if me == source else []))
            if me == process:
                (rows[source],) = came
    return np.stack([rows[process] for process in sorted(rows)])
