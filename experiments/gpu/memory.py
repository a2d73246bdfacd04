"""The forecast of a step's memory against the most that the device itself counted; a process for each case, as counts only grow.

Where a device counts nothing (a CPU), the ledger stands alone: every array alive after each instruction, and the temporaries.
"""

import dataclasses
from collections.abc import Iterator

import jax

from experiments.gpu.pipelines import ready
from experiments.gpu.rows import Job, Row
from experiments.memory.measure import arrays_now, measure

__all__ = ["rows"]

MIB = 2**20


def rows(job: Job) -> Iterator[Row]:
    """Forecast, init, two steps, and what was counted after each; the case is ``schedule, remat``."""
    schedule, remat = job.case.split(", ")
    models = dataclasses.replace(job.sizes.models, gpt_batch=job.sizes.models.gpt_batch // 2)  # several cases share the device
    it = ready("gpt", models, "bfloat16")
    before, counted = arrays_now(), {"at first": _counted()}
    pipe = it.pipe(schedule, remat)
    forecast = pipe.forecast(jax.eval_shape(it.problem.init, it.key), it.batch, it.key)
    counted["after compiling"] = _counted()
    state = it.init(pipe)
    counted["after init"] = _counted()
    for _ in range(2):
        state, metrics = pipe.step(state, it.batch, it.key)
        jax.block_until_ready((state, metrics))
    counted["after two steps"] = _counted()
    foreseen = {str(device): peak for device, peak in forecast.peaks.items()}
    for device, peak in counted["after two steps"].items():
        if device in foreseen:
            history = [found.get(device, 0) for found in counted.values()]
            yield _against(job, f"forecast / counted on {device}", foreseen[device], peak, history)
    yield job.row("forecast", f"{max(foreseen.values()) / MIB:,.1f} MiB", note=_largest(forecast.stages), counted=counted)
    for held in measure(pipe, forecast, state, it.batch, it.key, before):
        what, note = f"forecast / ledger on {held.device}", f"{sum(held.forecast) / MIB:,.1f} of {held.measured / MIB:,.1f} MiB"
        yield job.row(what, f"{held.ratio:.4f}", "0.9 to 1.1", note, holding=dataclasses.asdict(held), ratio=held.ratio)


def _counted() -> dict[str, int]:
    """The most bytes in use so far on each device that counts them."""
    stats = {str(device): device.memory_stats() or {} for device in jax.local_devices()}
    return {device: found["peak_bytes_in_use"] for device, found in stats.items() if "peak_bytes_in_use" in found}


def _against(job: Job, what: str, forecast: int, peak: int, history: list[int]) -> Row:
    first, compiled, made, stepped = (f"{size / MIB:,.1f}" for size in history)
    note = f"{forecast / MIB:,.1f} of {stepped} MiB; before: {first} at first, {compiled} after compiling, {made} after init"
    if history[1] == history[-1]:
        note += "; the peak is the compiler's (it tries kernels out), so the step's is hidden"
    return job.row(what, f"{forecast / peak:.4f}", "0.9 to 1.1", note, forecast=forecast, peak=peak, history=history)


def _largest(stages: tuple) -> str:
    """What the stages hold of each kind, together."""
    residuals, extra = sum(row.residuals * row.num_residuals for row in stages), max(row.temporaries for row in stages)
    sizes = f"all stages: {residuals / MIB:,.1f} MiB of residuals, temporaries of at most {extra / MIB:,.1f}"
    return f"{sizes}; microbatches in flight {[row.num_residuals for row in stages]}"
