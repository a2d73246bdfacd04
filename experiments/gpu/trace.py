"""A step as a Perfetto trace, and what looking at it costs: a traced step and a watched one over a step that nobody looks at."""

import gzip
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxpp
from experiments.gpu.pipelines import ready
from experiments.gpu.rows import Job, Row, spread
from jaxpp.observe.profile.record import Watch

__all__ = ["PERFETTO", "rows"]

PERFETTO = "step.perfetto.json.gz"


def rows(job: Job) -> Iterator[Row]:
    """The profile of a model, its trace, and the watcher's cost; the case is the model."""
    it = ready(job.case, job.sizes.models, "bfloat16")
    pipe = it.pipe("1f1b")
    state = it.init(pipe)
    yield _watcher(job, it.batch, it.key, pipe, state)
    profile = pipe.profile(state, it.batch, it.key, num_steps=max(3, job.sizes.steps), clock="trace")
    (job.out / PERFETTO).write_bytes(gzip.compress(jaxpp.observe.to_perfetto(profile).encode()))
    missing = f"the trace lacks: {profile.missing}; results were polled instead" if profile.missing else "from the profiler's trace"
    note = f"{PERFETTO}, for ui.perfetto.dev; {len(profile.spans)} instructions, {missing}"
    yield job.row("Perfetto trace", "written", note=note, missing=profile.missing)
    yield job.row("traced step / untraced", f"{profile.trace_cost:.3f}", note=f"a step takes {1e3 * profile.seconds:.2f} ms")
    shares = [sum(part) / profile.schedule.num_ranks / profile.seconds for part in zip(*profile.causes, strict=True)]
    causes = ", ".join(f"{name} {share:.1%}" for name, share in zip(profile.causes[0]._fields, shares, strict=True))
    note = f"{causes}; on the virtual clock {profile.simulated_bubble_fraction:.1%}"
    note += "; ranks share devices, so this is no bubble" * (len(set(profile.devices)) < len(profile.devices))
    yield job.row("idle time of the ranks", f"{profile.bubble_fraction:.1%}", note=note)


def _watcher(job: Job, batch: Any, key: Any, pipe: jaxpp.Pipeline, state: jaxpp.State) -> Row:
    """Interleaved steps whose results are polled (``Watch``) and steps that run alone."""
    engine = pipe.engine
    plan, _ = engine.plan("update", batch, key, watched=True)
    held = {"leaves": engine.copy(engine.leaves(state.held))}

    def step(*, watched: bool) -> float:
        begun, watch = time.perf_counter(), Watch(plan) if watched else None
        outcome = engine.run("update", held["leaves"], batch, key, observer=watch, watched=watched)
        if watch is not None:
            watch.stamps()
        held["leaves"] = jax.block_until_ready(outcome).state
        return time.perf_counter() - begun

    ways: dict[bool, Callable[[], float]] = {False: lambda: step(watched=False), True: lambda: step(watched=True)}
    times: dict[bool, list[float]] = {watched: [] for watched in ways}
    for way in ways.values():
        way()
    for _ in range(3 * job.sizes.rounds):
        for watched, way in ways.items():
            times[watched] += [way() for _ in range(2)][1:]  # the first after a step of the other kind finds cold caches
    low, ratio, high = spread(np.divide(times[True], times[False]).tolist())
    note = f"{low:.3f} to {high:.3f}; {1e3 * float(np.median(times[False])):.2f} ms unwatched"
    return job.row("watched step / unwatched", f"{ratio:.3f}", note=note, seconds={str(k): v for k, v in times.items()})
