"""What a process runs on, as text that should be the same in all: versions, and the options of JAX that change results."""

import functools
import importlib.metadata
import os
import platform
from typing import Any

import jax

__all__ = ["flags_text", "versions_text"]

_PACKAGES = ("jaxlib", "jaxpp", "flax", "optax", "numpy")
_OPTIONS = """
enable_x64 default_matmul_precision default_prng_impl threefry_partitionable enable_custom_prng numpy_dtype_promotion
numpy_rank_promotion softmax_custom_jvp high_dynamic_range_gumbel random_seed_offset disable_jit debug_nans debug_infs
use_shardy_partitioner disable_most_optimizations exec_time_optimization_effort optimization_level
""".split()
"""Those that change what is traced or computed; others, such as folders and addresses, may differ from host to host."""

_FREE = ("--xla_dump", "--xla_gpu_dump", "--xla_gpu_per_fusion_autotune_cache_dir")
"""Flags of XLA that may differ."""


@functools.cache
def versions_text() -> str:
    """The versions of Python and of the libraries."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "jax": jax.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join(f"{name} {version}" for name, version in found.items())


def flags_text() -> str:
    """The options of JAX and the flags of XLA, as they are now."""
    config: Any = jax.config  # whose options checkers of types do not know
    names = [f"jax_{name}" for name in _OPTIONS]
    lines = [f"{name} = {getattr(config, name)!r}" for name in names if hasattr(config, name)]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FREE))
    return "\n".join([*lines, *(f"XLA_FLAGS {flag}" for flag in flags)])
