"""A step whose state waits in host memory (``host=``), over the same step with everything on the device: time, peaks, bytes copied.

The GPT with a block a stage, all stages on one rank in the order looped-bfs, which turns to a stage for all microbatches at once.
What holds least comes first, since the peak that a device counts can only grow: each peak is then that of its own steps, unless
the compiler's trials of kernels were higher.
"""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import jaxpp
from experiments.gpu.bounds import find_bounds
from experiments.gpu.pipelines import OPTIMIZER, Ready, ready
from experiments.gpu.rows import Job, Row, first_line, spread
from experiments.plain import Runner

__all__ = ["rows"]

WAYS: Mapping[str, Mapping[str, Any]] = {
    "params, inputs too": {"host": "params", "remat": jaxpp.Offload(recompute=True)},
    "params": {"host": "params"},
    "optimizer": {"host": "optimizer"},
    "residuals": {"remat": "offload"},
    "nothing": {},
}
"""What waits in host memory, the least on the device first; the last is what the others are compared with."""
_MIB = 2**20


def rows(job: Job) -> Iterator[Row]:
    """One row a way, each timed alone and in turn, then its time over that of the last."""
    it, last = ready("gpt", job.sizes.models, "bfloat16"), list(WAYS)[-1]
    times: dict[str, list[float]] = {}
    for name, options in WAYS.items():
        try:
            pipe = _pipe(it, options)
            runner = Runner(lambda state, pipe=pipe: pipe.step(state, it.batch, it.key), it.init(pipe))
            runner.time(job.sizes.steps, warm_up=1, wait=False)
            peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
            times[name] = [runner.time(job.sizes.steps, wait=False)[0] / 1e6 for _ in range(job.sizes.rounds)]
            yield _held(job, it, name, pipe, peak, times[name])
            del pipe, runner
        except Exception as error:  # noqa: BLE001  (one way that fails does not stop the others)
            yield job.row(name, "failed", note=first_line(error))
        gc.collect()
    for name in [name for name in times if name != last] if last in times else ():
        low, ratio, high = spread([a / b for a, b in zip(times[name], times[last], strict=True)])
        yield job.row(f"{name} / {last}", f"{ratio:.3f}", note=f"{low:.3f} to {high:.3f}", ratio=ratio, seconds=times[name])


def _pipe(it: Ready, options: Mapping[str, Any]) -> jaxpp.Pipeline:
    models = it.models
    order = jaxpp.schedule.make("looped-bfs", 1, models.microbatches, stages_per_rank=models.gpt_depth)
    cuts = [f"h_{k}" for k in range(1, models.gpt_depth)]
    counts: dict[str, Any] = {"num_stages": models.gpt_depth, "num_microbatches": models.microbatches}
    return jaxpp.Pipeline(it.problem.loss_fn, OPTIMIZER, schedule=order, cuts=cuts, devices=jax.devices()[:1], **counts, **options)


def _held(job: Job, it: Ready, name: str, pipe: jaxpp.Pipeline, peak: int, seconds: list[float]) -> Row:
    shapes = jax.eval_shape(it.problem.init, it.key)
    forecast, (bound,) = pipe.forecast(shapes, it.batch, it.key), find_bounds({name: pipe}, it.batch, it.key).values()
    most, hosted = max(forecast.peaks.values()), sum(forecast.hosted.values())
    visits = forecast.liveness.visiting.values()
    brought, taken = sum(each.brought for each in visits), sum(each.taken for each in visits)
    step = float(np.median(seconds))
    note = f"{1e3 * step:.2f} ms; forecast {most / _MIB:,.0f} MiB on the device, {hosted / _MIB:,.0f} MiB on the host; "
    note += f"copies in and out {brought / _MIB:,.0f} and {taken / _MIB:,.0f} MiB, {(brought + taken) / step / 1e9:.1f} GB/s"
    if bound is not None and not isinstance(bound, str):
        note += f"; {bound.lines()[0]}; measured / bound {step / bound.seconds:.3f}"
    numbers = {"peak": peak, "forecast": most, "brought": brought, "taken": taken, "seconds": seconds}
    shown = f"forecast / counted {most / peak:.3f}" if peak else f"forecast {most / _MIB:,.1f} MiB"
    return job.row(f"{name} on the host", shown, "0.9 to 1.1", note, **numbers)
