"""One thread that hands over a step to all GPUs, and a thread for each rank: how long a step takes, and how long its call does.

XLA can hand launches to a thread for each device itself: with ``PJRT_GPU_ENABLE_ASYNC_DISPATCH=1`` in the environment before JAX is
used, run this part again and compare the rows of one thread.
"""

import os
import time
from collections.abc import Iterator

import jax
import numpy as np

from experiments.gpu.pipelines import ready
from experiments.gpu.rows import Job, Row, spread

__all__ = ["rows"]

SCHEDULES = ("1f1b", "zb-h1")
THREADS = {"one": "one thread", "ranks": "a thread for each rank"}


def rows(job: Job) -> Iterator[Row]:
    """Steps in turns; all of them have the same bits."""
    it, by_xla = ready(job.case, job.sizes.models, "bfloat16"), os.environ.get("PJRT_GPU_ENABLE_ASYNC_DISPATCH", "not set")
    for schedule in SCHEDULES:
        pipes = {threads: it.pipe(schedule, threads=threads) for threads in THREADS}
        states = {threads: it.init(pipe) for threads, pipe in pipes.items()}
        if len(set(pipes["one"].engine.placement.places)) == 1:
            yield job.row(schedule, "left out", note="all ranks share one device: a thread for each needs several")
            return
        calls, steps = ({threads: list[float]() for threads in THREADS} for _ in range(2))
        for number in range(job.sizes.rounds * job.sizes.steps + 1):
            for threads, pipe in pipes.items():
                begun = time.perf_counter()
                states[threads], _ = pipe.step(states[threads], it.batch, it.key)
                called = time.perf_counter()
                jax.block_until_ready(states[threads])
                if number:  # the first compiles
                    calls[threads].append(called - begun)
                    steps[threads].append(time.perf_counter() - begun)
        for threads, said in THREADS.items():
            low, median, high = spread(steps[threads])
            note = f"{1e3 * low:.2f} to {1e3 * high:.2f}; the call returns after {1e3 * np.median(calls[threads]):.2f} ms"
            what = f"{schedule}, {said}"
            yield job.row(what, f"{1e3 * median:.2f} ms", note=note, seconds=steps[threads], calls=calls[threads], by_xla=by_xla)
        low, ratio, high = spread([a / b for a, b in zip(steps["ranks"], steps["one"], strict=True)])
        yield job.row(f"{schedule}, threads / one", f"{ratio:.3f}", note=f"{low:.3f} to {high:.3f}", ratio=ratio)
        one, ranks = (list(map(np.asarray, jax.tree.leaves(states[threads]))) for threads in THREADS)
        same = all(a.tobytes() == b.tobytes() for a, b in zip(one, ranks, strict=True))
        yield job.row(f"{schedule}, bits", "the same" if same else "differ", "the same")
