"""Enough devices for the stages: on a CPU, forced ones. To be called before JAX starts."""

import sys

import jax

__all__ = ["ensure_devices"]


def ensure_devices(count: int) -> None:
    """Force ``count`` CPU devices if the machine has no other accelerator and fewer devices, and say so."""
    if jax.config.jax_platforms in (None, "", "cpu") and not _has_accelerator():
        jax.config.update("jax_num_cpu_devices", count)
        print(f"No accelerator found: forcing {count} CPU devices, which share this machine's cores.", file=sys.stderr)


def _has_accelerator() -> bool:
    return False
