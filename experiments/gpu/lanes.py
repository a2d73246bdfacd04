"""Who hands a step over to GPUs: one thread, a thread for each rank, or threads of XLA's own; times, bits, memory and errors.

XLA can hand launches to a thread for each device itself, with ``PJRT_GPU_ENABLE_ASYNC_DISPATCH=1`` in the environment before JAX is
imported. So each way runs in a process of its own, where its peak of memory is its own too. This process uses no device: it
compares what the others have found.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.parts import run_beside
from experiments.gpu.pipelines import ready
from experiments.gpu.rows import Job, Row, spread

__all__ = ["ASYNC", "WAYS", "rows", "where_raised"]

SCHEDULES = ("1f1b", "zb-h1")
ASYNC = "PJRT_GPU_ENABLE_ASYNC_DISPATCH"


class Way(NamedTuple):
    """Who hands over: ``Pipeline(threads=...)``, and whether XLA has a thread for each device besides."""

    threads: str
    by_xla: bool


AGAIN = "one thread, again"
WAYS: Mapping[str, Way] = {
    "one thread": Way("one", by_xla=False),
    AGAIN: Way("one", by_xla=False),
    "one thread, and XLA's": Way("one", by_xla=True),
    "a thread for each rank": Way("ranks", by_xla=False),
    "a thread for each rank, and XLA's": Way("ranks", by_xla=True),
}
"""The first is what the others are compared with; the second tells whether its programs give the same bits twice."""
_LEAST = 20.0  # seconds that must be left for a process to begin
_MIB = 2**20


def rows(job: Job) -> Iterator[Row]:
    """The case is a model; behind semicolons, the schedule and the way that one of the processes is for."""
    model, *of = job.case.split("; ")
    if of:
        yield from _measure(job, model, of[0], WAYS[of[1]])
    else:
        yield from _compare(job)


def _measure(job: Job, model: str, schedule: str, way: Way) -> Iterator[Row]:
    it = ready(model, job.sizes.models, "bfloat16")
    pipe = it.pipe(schedule, threads=way.threads)
    state, key = it.init(pipe), it.key
    calls, steps = list[float](), list[float]()
    common: dict[str, Any] = {"devices": len(jax.devices()), "platform": jax.devices()[0].platform}
    for number in range(job.sizes.rounds * job.sizes.steps + 1):
        begun = time.perf_counter()
        state, metrics = pipe.step(state, it.batch, key)
        called = time.perf_counter()
        jax.block_until_ready((state, metrics))
        if number:  # the first compiles
            calls.append(called - begun)
            steps.append(time.perf_counter() - begun)
    bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state))))
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    raised = where_raised([found["bytes_limit"] for found in stats if "bytes_limit" in found])
    goes_on = bool(np.isfinite(pipe.step(state, it.batch, key)[1].loss))
    yield job.row(schedule, "", **common, calls=calls, steps=steps, bits=bits.hexdigest(), peaks=peaks, raised=raised, on=goes_on)


def where_raised(limits: list[int]) -> str:
    """Who is told that a program needs more memory than the first device has.

    Args:
        limits: bytes of each device that JAX may use; none where that is not counted, and then nothing is tried.
    """
    if not limits:
        return "not tried: this device counts no memory"
    program = jax.jit(lambda: jnp.zeros(2 * limits[0], "int8")).lower().compile()
    try:
        made = program()
    except jax.errors.JaxRuntimeError:
        return "the call"
    try:
        made.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return "whoever waits for the result"
    return "nobody"


def _compare(job: Job) -> Iterator[Row]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            found: dict[str, Row] = {}
            for name, way in WAYS.items():
                what, left = f"{schedule}, {name}", 0.95 * job.seconds - (time.perf_counter() - began)
                if why := _left_out(way, next(iter(found.values()), None), left):
                    yield job.row(what, "left out", note=why)
                    continue
                log = Path(folder) / f"{schedule}-{len(found)}.log"
                measured, trouble = run_beside(job, f"{job.case}; {schedule}; {name}", left, log, {ASYNC: str(int(way.by_xla))})
                if trouble or not measured:
                    yield job.row(what, "failed", note=trouble or "it found nothing")
                    continue
                found[name] = measured[0]
                yield from _way(job, what, measured[0], found)


def _left_out(way: Way, first: Row | None, left: float) -> str:
    """Why a way is not tried; empty if it is."""
    if first is not None and first.numbers["devices"] == 1 and way.threads == "ranks":
        return "all ranks share one device: a thread for each needs several"
    if first is not None and first.numbers["platform"] != "gpu" and way.by_xla:
        return f"a {first.numbers['platform']} does not look at {ASYNC}, which only GPUs have"
    return "" if left > _LEAST else f"{left:.0f} seconds were left"


def _way(job: Job, what: str, row: Row, found: Mapping[str, Row]) -> Iterator[Row]:
    """What a way has come to, beside the first of those found."""
    it, (name, base) = row.numbers, next(iter(found.items()))
    low, median, high = spread(it["steps"])
    ratio = median / float(np.median(base.numbers["steps"]))
    note = f"{low * 1e3:.2f} to {high * 1e3:.2f}; the call returns after {1e3 * np.median(it['calls']):.2f} ms"
    yield job.row(what, f"{1e3 * median:.2f} ms", note=f"{ratio:.3f} of {name}; {note}", ratio=ratio, **it)
    if row is base:
        return
    same, again = it["bits"] == base.numbers["bits"], found.get(AGAIN)
    fixed = again is None or again.numbers["bits"] == base.numbers["bits"]
    note = f"as {name}" + "; kernels of this model add in no fixed order, so two runs of one way differ" * (not fixed)
    yield job.row(f"{what}: bits", "the same" if same else "differ", "the same" * fixed, note)
    if it["peaks"]:
        most, before = max(it["peaks"]), max(base.numbers["peaks"])
        note = f"{most / _MIB:,.0f} of {before / _MIB:,.0f} MiB on the fullest device"
        yield job.row(f"{what}: peak of memory", f"{most / before:.3f}", note=note)
    note = f"with {name}: {base.numbers['raised']}; the next step {'runs' if it['on'] else 'DOES NOT RUN'}"
    yield job.row(f"{what}: who is told of too little memory", it["raised"], note=note)
