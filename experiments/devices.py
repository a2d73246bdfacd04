"""Enough devices for the stages: on a machine without an accelerator, the CPU is split into as many as are asked for.

JAX fixes its devices when its first backend starts, so by the time it can say how many there are it is too late to ask for more.
``ensure_devices`` decides from what can be seen without it: the platform the user chose, the plugins installed, and the files
under ``/dev`` that a driver makes. It never overrides a choice made before it.
"""

import fnmatch
import glob
import io
import os
import pkgutil
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import jax

__all__ = ["ensure_devices", "has_accelerator", "is_chosen", "join_hosts", "runs_on_cpu"]

FLAG = "--xla_force_host_platform_device_count"

# A word in the plugin's name, the files its driver makes (WSL's and Jetson's too), and the variables that hide its devices.
DRIVERS = (
    ("cuda", ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu"), ("CUDA_VISIBLE_DEVICES",)),
    ("rocm", ("/dev/kfd",), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")),
    ("tpu", ("/dev/accel*", "/dev/vfio/[0-9]*"), ()),
)


def ensure_devices(count: int) -> None:
    """Force ``count`` CPU devices where JAX would find one, and say so on stderr; call it before JAX makes its first array.

    Nothing happens where an accelerator is expected, where the number of CPU devices was chosen before (``jax_num_cpu_devices``,
    or its flag in ``XLA_FLAGS``), or where a backend runs already, as in a notebook. Stages share devices then, if those are
    fewer.

    Args:
        count: devices wanted, one a stage.
    """
    config: Any = jax.config  # its options are attributes that no type checker sees
    if count < 2 or is_chosen(os.environ.get("XLA_FLAGS", ""), config.jax_num_cpu_devices):
        return
    if not runs_on_cpu(config.jax_platforms, has_accelerator(_plugins(), _device_files(), os.environ)):
        return
    try:
        config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # a backend runs already
        return
    print(f"No accelerator found: forcing {count} CPU devices, which share this machine's cores.", file=sys.stderr)


def join_hosts() -> None:
    """Join the processes of this command on the other hosts, which ``jax.distributed.initialize`` finds.

    From then on only process 0 prints. Whoever called ``jax.distributed.initialize`` before has joined them already.
    """
    if not jax.distributed.is_initialized():
        jax.distributed.initialize()
    if jax.process_index() != 0:
        sys.stdout = io.StringIO()


def is_chosen(xla_flags: str, configured: int) -> bool:
    """Whether the number of CPU devices was chosen before.

    Args:
        xla_flags: the environment variable.
        configured: ``jax_num_cpu_devices``; -1 when unset.
    """
    return configured >= 0 or FLAG in xla_flags


def runs_on_cpu(platforms: str | None, accelerator: bool) -> bool:
    """Whether JAX will make arrays on the CPU unless told otherwise.

    Args:
        platforms: ``jax_platforms``, names in order of preference; empty leaves the choice to JAX.
        accelerator: whether there is one for JAX to choose.

    Example:
        >>> runs_on_cpu(None, accelerator=True), runs_on_cpu("cpu,cuda", accelerator=True)
        (False, True)
    """
    return platforms.split(",")[0].strip() == "cpu" if platforms else not accelerator


def has_accelerator(plugins: Collection[str], files: Collection[str], environment: Mapping[str, str]) -> bool:
    """Whether JAX can be expected to find an accelerator.

    A plugin alone says little: ``jax[cuda12]`` is often installed where there is no GPU. So its driver's files are asked for too.
    A plugin of an unknown kind is believed.

    Args:
        plugins: names of the plugins installed.
        files: device files there are.
        environment: variables, of which some hide devices.

    Example:
        >>> has_accelerator(["xla_cuda12"], [], {}), has_accelerator(["xla_cuda12"], ["/dev/nvidia0"], {})
        (False, True)
    """
    return any(_finds_device(plugin, files, environment) for plugin in plugins)


def _finds_device(plugin: str, files: Collection[str], environment: Mapping[str, str]) -> bool:
    for word, patterns, variables in DRIVERS:
        if word in plugin:
            hidden = any(environment.get(name, "0").strip() in ("", "-1") for name in variables)
            return not hidden and any(fnmatch.filter(files, pattern) for pattern in patterns)
    return True


def _plugins() -> set[str]:
    """The plugins that JAX would load, found the way it does: by entry point, and under the ``jax_plugins`` namespace."""
    found = {entry.name for entry in entry_points(group="jax_plugins")}
    namespace = find_spec("jax_plugins")
    if namespace is not None and namespace.submodule_search_locations is not None:
        found |= {module.name for module in pkgutil.iter_modules(list(namespace.submodule_search_locations))}
    return found | {"libtpu"} if find_spec("libtpu") else found


def _device_files() -> list[str]:
    return [path for _, patterns, _ in DRIVERS for pattern in patterns for path in glob.glob(pattern)]
