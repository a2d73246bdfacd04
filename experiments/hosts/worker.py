"""One of the processes that ``experiments.hosts.launch`` starts: it joins the others, and calls one function.

What a user writes at the top of a script for several hosts is ``jax.distributed.initialize()``. ``connect`` does that for processes
on one machine without an accelerator, where nothing finds the others by itself and JAX must be told how CPU devices are reached.
"""

import dataclasses
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import jax

__all__ = ["Job", "connect", "main"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is told.

    Attributes:
        target: the function, as ``module:function``.
        arguments: of the function, by name; what JSON can hold.
        number: of this process, from 0.
        count: of all processes; one alone is not connected to anything.
        coordinator: port of process 0, at which all meet.
        transfer: port of this process's own, at which it receives arrays.
        devices: CPU devices to force; None sets nothing that concerns devices.
        initialize: further arguments of ``jax.distributed.initialize``.
        together: whether a failure ends this process at once, so that whoever started it can end the others. Without it JAX first
            waits for the others, as it does in a user's script.
    """

    target: str
    arguments: Mapping[str, Any]
    number: int
    count: int
    coordinator: int
    transfer: int
    devices: int | None
    initialize: Mapping[str, Any]
    together: bool

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


def connect(job: Job) -> None:
    """Force CPU devices if any are wanted, and join the other processes; call it before JAX makes its first array."""
    config: Any = jax.config  # its options are attributes that no type checker sees
    if job.devices is not None:
        config.update("jax_platforms", "cpu")
        config.update("jax_num_cpu_devices", job.devices)
    if job.count > 1:
        if job.devices is not None:  # with port 0 the first address is never answered
            config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{job.transfer}")
            config.update("jax_cross_host_transport_addresses", ",".join(["127.0.0.1:0"] * 4))
        address = f"127.0.0.1:{job.coordinator}"
        jax.distributed.initialize(address, num_processes=job.count, process_id=job.number, **job.initialize)


def main() -> None:
    """Do the job that stands on the command line; end with whoever started this process."""
    job = Job(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connect(job)
        module, _, name = job.target.partition(":")
        getattr(importlib.import_module(module), name)(**job.arguments)
    except BaseException:
        if not job.together:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_with_parent() -> None:
    """Standard input ends when the process that started this one does, even if it was killed."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
