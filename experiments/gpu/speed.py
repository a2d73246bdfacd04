"""A pipelined step over the fastest plain step and over its bound, tokens a second, model FLOP/s: medians with their quartiles.

There are three plain steps: one loop over the microbatches that is unrolled, one that is a ``lax.scan``, and the whole batch at
once. Each kind of step that cannot be had (it takes too long to compile, or more memory than there is) is a row that says so.
Steps are handed over in a row and only the last of them is waited for, as in training.
"""

import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

import jaxpp
from experiments.gpu.bounds import find_bounds, over_bounds
from experiments.gpu.models import count_of
from experiments.gpu.pipelines import OPTIMIZER, Ready, ready
from experiments.gpu.rows import Job, Row, first_line, spread
from experiments.plain import Runner, plain_step
from jaxpp.stages.cost import count_flops

__all__ = ["rows"]

SCHEDULES = ("1f1b", "zb-h1")
PLAIN = ("scan", "whole batch", "unrolled")
AIMS = {("gpt", "1f1b"): "at most 1.03"}
_SHARE = 0.5  # of the job's time that may be gone before the unrolled loop is not tried


def rows(job: Job) -> Iterator[Row]:
    """The ratios of a model; the case is the model."""
    began, it = time.perf_counter(), ready(job.case, job.sizes.models, "bfloat16")
    runners: dict[str, Runner] = {}
    made: dict[str, float] = {}
    pipes = {name: it.pipe(name) for name in SCHEDULES}
    for name, make in _makers(it, pipes).items():
        try:
            if name == "unrolled" and (left_out := _too_long(job, it, runners, time.perf_counter() - began)):
                yield job.row(name, "left out", note=left_out)
                continue
            start = time.perf_counter()
            runners[name] = make()
            made[name] = time.perf_counter() - start
        except Exception as error:  # noqa: BLE001  (out of memory, say; the others may run)
            yield job.row(name, "failed", note=first_line(error))
    times: dict[str, list[float]] = {name: [] for name in runners}
    pipes = {name: pipe for name, pipe in pipes.items() if name in runners}
    for _ in range(job.sizes.rounds):
        for name in list(runners):
            try:
                times[name].append(runners[name].time(job.sizes.steps, warm_up=1, wait=False)[0] / 1e6)
            except Exception as error:  # noqa: BLE001
                del runners[name], times[name]
                yield job.row(name, "failed", note=first_line(error))
        if time.perf_counter() - began > 0.8 * job.seconds:
            break
    yield from _report(job, it, times, made)
    yield from over_bounds(job, jax.devices()[0].device_kind, times, find_bounds(pipes, it.batch, it.key))


def _makers(it: Ready, pipes: Mapping[str, jaxpp.Pipeline]) -> Mapping[str, Callable[[], Runner]]:
    """What makes each kind of step, and runs it once."""

    def pipelined(name: str) -> Runner:
        pipe = pipes[name]
        return Runner(lambda state: pipe.step(state, it.batch, it.key), it.init(pipe))

    def plain(name: str) -> Runner:
        count = 1 if name == "whole batch" else it.models.microbatches
        step = plain_step(it.problem.loss_fn, OPTIMIZER, count, scan=name == "scan")
        params = jax.jit(it.problem.init)(it.key)
        return Runner(lambda state: step(state, it.batch, it.key), (params, jax.jit(OPTIMIZER.init)(params)))

    return {name: lambda name=name: pipelined(name) for name in SCHEDULES} | {name: lambda name=name: plain(name) for name in PLAIN}


def _too_long(job: Job, it: Ready, runners: Mapping[str, Runner], gone: float) -> str:
    """Why the unrolled loop is not tried; empty if it is. It is as many copies of the loss as there are microbatches."""
    wait = it.models.microbatches * runners["scan"].compile_seconds if "scan" in runners else 0.0
    if gone + wait < _SHARE * job.seconds:
        return ""
    return f"its first step may take {wait:.0f} s to compile, {gone:.0f} s of {job.seconds:.0f} are gone"


def _report(job: Job, it: Ready, times: Mapping[str, list[float]], made: Mapping[str, float]) -> Iterator[Row]:
    medians = {name: float(np.median(taken)) for name, taken in times.items() if taken}
    plain = [name for name in PLAIN if name in medians]
    for name in plain:
        note = f"made, compiled and run once in {made[name]:.1f} s"
        yield job.row(f"plain, {name}", f"{1e3 * medians[name]:.2f} ms", note=note, seconds=times[name])
    if not plain:
        return
    best, work = min(plain, key=medians.__getitem__), _flops(it)
    examples, unit = count_of(job.case, it.batch)
    for name in (name for name in SCHEDULES if name in medians):
        low, ratio, high = spread([a / b for a, b in zip(times[name], times[best], strict=False)])
        rate = examples / medians[name]
        note = f"{low:.3f} to {high:.3f}; {1e3 * medians[name]:.2f} ms; {rate:,.0f} {unit}/s; "
        note += f"{work / medians[name] / 1e12:.3g} TFLOP/s; made, compiled and run once in {made[name]:.1f} s"
        what, aim = f"{name} / plain ({best})", AIMS.get((job.case, name), "")
        yield job.row(what, f"{ratio:.3f}", aim, note, seconds=times[name], ratio=ratio, flops=work, rate=rate, made=made[name])


def _flops(it: Ready) -> float:
    """FLOPs of the loss and its gradients on the whole batch, with nothing computed twice: counted from the shapes of the trace."""
    traced = jax.make_jaxpr(jax.value_and_grad(it.problem.loss_fn))(jax.eval_shape(it.problem.init, it.key), it.batch, it.key)
    return sum(map(count_flops, traced.jaxpr.eqns))
