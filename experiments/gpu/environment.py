"""What the numbers were measured on: the device, its memory, the versions, and how fast one matrix product is there."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from experiments.gpu.rows import Job, Row
from experiments.gpu.sizes import LARGE, SMALL
from experiments.results import versions

__all__ = ["rows"]

OPTIONAL = {
    "sklearn": "scikit-learn, for the part bank",
    "matplotlib": "matplotlib, for figures, of which this experiment has none",
}
QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def rows(job: Job) -> Iterator[Row]:
    """The device first: the parent reads from it how large the models are to be."""
    device, stats = jax.devices()[0], jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    kind = f"{device.platform}: {device.device_kind}"
    names = [str(each) for each in jax.devices()]
    yield job.row("device", kind, note=f"{len(names)} in all: {', '.join(names)}", platform=device.platform, devices=names)
    yield job.row("memory", f"{limit / 2**30:.1f} GiB" if limit else "not counted", note="that JAX may use", stats=stats)
    yield job.row("versions", f"jax {jax.__version__}", note=", ".join(f"{k} {v}" for k, v in versions().items()), **versions())
    yield job.row("platform", "; ".join(str(getattr(device.client, "platform_version", "unknown")).splitlines()), note=_smi())
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "CUDA_", "NVIDIA_TF32"))}
    yield job.row(
        "flags", os.environ.get("XLA_FLAGS", "") or "no XLA_FLAGS", note=_joined(flags), flags=flags, cores=os.cpu_count()
    )
    lacking = [use for name, use in OPTIONAL.items() if find_spec(name) is None]
    yield job.row("not installed", "; ".join(lacking) or "nothing that is used")
    yield _product(job)


def _joined(flags: dict[str, str]) -> str:
    return f"{os.cpu_count()} cores; " + " ".join(f"{name}={value}" for name, value in flags.items() if name != "XLA_FLAGS")


def _smi() -> str:
    """What the driver says of the GPUs; empty where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    asked = [command, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603  (a fixed command)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ")


def _product(job: Job) -> Row:
    """A matrix product in bfloat16, as a yardstick for the model FLOP/s of the other parts."""
    size, times = (SMALL if jax.default_backend() == "cpu" else LARGE).product, 10  # the sizes of the parts are not settled yet
    x = jax.random.normal(jax.random.key(0), (size, size), "bfloat16")
    product = jax.jit(jnp.matmul)
    y = jax.block_until_ready(product(x, product(x, x)))
    start = time.perf_counter()
    for _ in range(times):
        y = product(x, y)
    jax.block_until_ready(y)
    seconds = (time.perf_counter() - start) / times
    rate = 2 * size**3 / seconds / 1e12
    return job.row("matrix product", f"{rate:.3g} TFLOP/s", note=f"bfloat16, {size} x {size}, {1e3 * seconds:.3f} ms", tflops=rate)
