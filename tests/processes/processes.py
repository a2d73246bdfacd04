"""Several processes for a test: ``experiments.hosts.launch`` with the environment that conftest.py gives to this process.

In a test file, with the function that the processes run in a module of its own (``tests.some_cases``; it is imported after
``jax.distributed.initialize``, and gets its arguments as JSON)::

    from tests.processes.processes import launch, start

    def test_all_of_them_end(tmp_path):
        first, second = launch("tests.some_cases:main", 2, {"folder": str(tmp_path)}, seconds=60)  # .code, .out, .errors

    def test_one_of_them_is_killed():
        with start("tests.some_cases:main", 2, together=False, initialize={"heartbeat_timeout_seconds": 10}) as processes:
            processes[1].kill()  # or processes[1].send(signal.SIGINT)
            killed, other = processes.wait(60)  # or look at processes[0].code, .out, .errors while it runs

Each process has two forced CPU devices (``devices=``). With ``together`` (the default) the failure of one is the failure of all:
``wait`` raises ``ProcessesError`` with the last lines of each. With ``together=False`` a process ends as a user's script does. No
process is left when the block ends, by whatever it ends, nor if this process is killed.
"""

from collections.abc import Mapping
from typing import Any

import jax

from experiments.hosts.launch import Ended, Processes, ProcessesError

__all__ = ["Ended", "Processes", "ProcessesError", "launch", "start"]


def start(target: str, count: int, arguments: Mapping[str, Any] | None = None, **options: Any) -> Processes:
    """Processes with the compiler's flags of this one, and its folder of compiled programs."""
    config: Any = jax.config
    environment = {
        "JAX_COMPILATION_CACHE_DIR": config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(config.jax_persistent_cache_min_compile_time_secs),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": str(config.jax_persistent_cache_min_entry_size_bytes),
    }
    return Processes(target, count, arguments, environment=environment | options.pop("environment", {}), **options)


def launch(target: str, count: int, arguments: Mapping[str, Any] | None = None, *, seconds: float, **options: Any) -> list[Ended]:
    """Run one function in several processes until all have ended."""
    with start(target, count, arguments, **options) as processes:
        return processes.wait(seconds)
