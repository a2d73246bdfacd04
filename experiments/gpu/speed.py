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
APART = ("1f1b, fuse=False", "gpipe, fuse=False")
"""Two orders of the same programs: what they differ by, orders cost."""
PLAIN = ("scan", "whole batch", "unrolled")
TURNS = (("1f1b", "scan", "whole batch"), ("zb-h1", "unrolled"), APART)
"""Steps that are made and timed together; what matters least comes last, where there may be no time left for it."""
AIMS = {("gpt", "1f1b"): "at most 1.03"}
_SHARE = 0.5  # of the job's time that may be gone before the unrolled loop is not tried


def rows(job: Job) -> Iterator[Row]:
    """The ratios of a model; the case is the model."""
    began, it = time.perf_counter(), ready(job.case, job.sizes.models, "bfloat16")
    pipes = {name: it.pipe(name) for name in SCHEDULES}
    pipes |= {name: it.pipe(name.partition(",")[0], fuse=False) for name in APART}
    makers, best, runners, made = _makers(it, pipes), "", dict[str, Runner](), dict[str, float]()
    for names in TURNS:
        for name in names:
            try:
                if name == "unrolled" and (left_out := _too_long(job, it, runners, time.perf_counter() - began)):
                    yield job.row(name, "left out", note=left_out)
                    continue
                start = time.perf_counter()
                runners[name] = makers[name]()
                made[name] = time.perf_counter() - start
                yield job.row(f"{name}, first step", f"{made[name]:.1f} s", note="made, compiled and run once", seconds=made[name])
            except Exception as error:  # noqa: BLE001  (out of memory, say; the others may run)
                yield job.row(name, "failed", note=first_line(error))
        times: dict[str, list[float]] = {name: [] for name in (*names, best) if name in runners}
        for _ in range(job.sizes.rounds):
            for name in list(times):
                try:
                    times[name].append(runners[name].time(job.sizes.steps, warm_up=1, wait=False)[0] / 1e6)
                except Exception as error:  # noqa: BLE001
                    del runners[name], times[name]
                    yield job.row(name, "failed", note=first_line(error))
            if time.perf_counter() - began > 0.8 * job.seconds:
                break
        best = min((name for name in PLAIN if times.get(name)), key=lambda name: float(np.median(times[name])), default=best)
        yield from _report(job, it, times, best)
        asked = {name: pipes[name] for name in names if name in pipes and times.get(name)}
        yield from over_bounds(job, jax.devices()[0].device_kind, times, find_bounds(asked, it.batch, it.key))


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

    return {name: lambda name=name: pipelined(name) for name in pipes} | {name: lambda name=name: plain(name) for name in PLAIN}


def _too_long(job: Job, it: Ready, runners: Mapping[str, Runner], gone: float) -> str:
    """Why the unrolled loop is not tried; empty if it is. It is as many copies of the loss as there are microbatches."""
    wait = it.models.microbatches * runners["scan"].compile_seconds if "scan" in runners else 0.0
    if gone + wait < _SHARE * job.seconds:
        return ""
    return f"its first step may take {wait:.0f} s to compile, {gone:.0f} s of {job.seconds:.0f} are gone"


def _report(job: Job, it: Ready, times: Mapping[str, list[float]], best: str) -> Iterator[Row]:
    medians = {name: float(np.median(taken)) for name, taken in times.items() if taken}
    for name in (name for name in PLAIN if name in medians):
        yield job.row(f"plain, {name}", f"{1e3 * medians[name]:.2f} ms", seconds=times[name])
    if best not in medians:
        return
    work, (examples, unit) = _flops(it), count_of(job.case, it.batch)
    for name in (name for name in (*SCHEDULES, *APART) if name in medians):
        low, ratio, high = spread([a / b for a, b in zip(times[name], times[best], strict=False)])
        rate = examples / medians[name]
        note = f"{low:.3f} to {high:.3f}; {1e3 * medians[name]:.2f} ms; {rate:,.0f} {unit}/s; "
        note += f"{work / medians[name] / 1e12:.3g} TFLOP/s"
        what, aim = f"{name} / plain ({best})", AIMS.get((job.case, name), "")
        yield job.row(what, f"{ratio:.3f}", aim, note, seconds=times[name], ratio=ratio, flops=work, rate=rate)


def _flops(it: Ready) -> float:
    """FLOPs of the loss and its gradients on the whole batch, with nothing computed twice: counted from the shapes of the trace."""
    traced = jax.make_jaxpr(jax.value_and_grad(it.problem.loss_fn))(jax.eval_shape(it.problem.init, it.key), it.batch, it.key)
    return sum(map(count_flops, traced.jaxpr.eqns))
