"""How long each stage really takes, measured once, so that the loss can be cut for equal times rather than equal FLOPs.

In several processes, each measures its own stages, and tells the others: all of them cut by the same times.
"""

import statistics
import time
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from jaxpp.runtime.agreement.listing import listing
from jaxpp.runtime.agreement.meeting import agreement
from jaxpp.runtime.compile import PlacedProgram, Programs
from jaxpp.runtime.place import OneDevice, Place
from jaxpp.runtime.processes.exchange import rows_of_all
from jaxpp.runtime.processes.here import is_here, processes_of
from jaxpp.runtime.transfer import put
from jaxpp.schedule.action import Kind
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.loss.trace import key_implementation
from jaxpp.types import Aval

__all__ = ["clock_of", "stage_times"]

_RUNS = 5


def stage_times(cut: CutLoss, kinds: Collection[Kind], places: Sequence[Place], programs: Programs) -> list[float]:
    """Seconds that one microbatch takes on each stage, forward and backward.

    The programs run on zeros, one after another, so a stage whose work depends on values is measured as it is for those. Every
    process that has some of the places calls it.

    Raises:
        ProcessError: in several processes, which differ in what they would measure.
    """
    jobs: list[list[PlacedProgram]] = []
    devices = [place.devices[0] for place in places]
    for code, device in zip(cut.stages, devices, strict=True):
        mine = [code.forward, *(backward.then for kind, backward in code.backward.items() if kind in kinds)]
        jobs.append([PlacedProgram(program, OneDevice(device), program.donated) for program in mine if is_here(device)])
    several = len(processes_of(devices)) > 1
    with agreement('Pipeline(balance="time")', devices) as agree:
        agree(lambda: {"loss": listing(cut.loss.graph), "kinds of actions": " ".join(sorted(map(str, kinds)))})
    programs.compile(job for stage in jobs for job in stage)
    found = np.array([sum(_seconds(programs[job], job) for job in stage) for stage in jobs], np.float32)
    return (rows_of_all(found).sum(axis=0) if several else found).tolist()


def _seconds(call: Compiled, job: PlacedProgram) -> float:
    taken = []
    for _ in range(_RUNS + 1):
        arguments = [put(_zeros(aval), job.place.devices[0]) for aval in job.program.avals]
        jax.block_until_ready(arguments)
        begun = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def _zeros(aval: Aval) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=key_implementation(aval))
    return jnp.zeros(aval.shape, aval.dtype)


def clock_of(flops: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Time over work: after which part of the FLOPs which part of the time has passed."""
    points, work, passed = [(0.0, 0.0)], 0.0, 0.0
    for own, taken in zip(flops, seconds, strict=True):
        work, passed = work + own, passed + taken
        points.append((work / max(sum(flops), 1.0), passed / sum(seconds)))
    return tuple(points)
