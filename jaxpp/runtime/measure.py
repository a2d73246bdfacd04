"""How long stages, sends and copies of residuals really take: for cuts by time instead of FLOPs, and to choose remat.

In several processes, each measures its own stages, and tells the others: all of them cut by the same times.
"""

import itertools
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
from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.exchange import rows_of_all
from jaxpp.runtime.processes.here import is_here, processes_of
from jaxpp.runtime.transfer import copier, put
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import UNIT, Timing, makespan, replay
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.loss.traced_loss import key_implementation
from jaxpp.stages.program import Role
from jaxpp.types import Aval, Device

__all__ = ["action_times", "clock_of", "copy_times", "link_times", "stage_times", "waiting"]

_RUNS = 5
_LARGE = 1 << 20
"""Elements of the array whose send tells what a byte costs."""


def stage_times(cut: CutLoss, kinds: Collection[Kind], places: Sequence[Place], programs: Programs) -> list[float]:
    """Seconds that one microbatch takes on each stage, forward and backward; see ``action_times``."""
    times = action_times(cut, {Kind.F, *kinds}, places, programs, 'Pipeline(balance="time")')
    return [sum(own) for own in zip(*times.values(), strict=True)]


def action_times(
    cut: CutLoss, kinds: Collection[Kind], places: Sequence[Place], programs: Programs, where: str
) -> dict[Kind, list[float]]:
    """Seconds that each of these kinds of actions takes for one microbatch, on each stage.

    The programs run on zeros, one after another, so a stage whose work depends on values is measured as it is for those. Every
    process that has some of the places calls it, for the same reason ``where``.

    Raises:
        ProcessError: in several processes, which differ in what they would measure.
    """
    ordered, jobs = sorted(kinds), dict[tuple[int, Kind], PlacedProgram]()
    devices = [place.devices[0] for place in places]
    for stage, (code, device) in enumerate(zip(cut.stages, devices, strict=True)):
        for kind in ordered if is_here(device) else ():
            program = code.forward if kind == Kind.F else code.backward[kind].then if kind in code.backward else None
            if program is not None:
                jobs[stage, kind] = PlacedProgram(program, OneDevice(device), program.donated)
    with agreement(where, devices) as agree:
        agree(lambda: {"loss": listing(cut.loss.graph), "kinds of actions": " ".join(map(str, ordered))})
    programs.compile(jobs.values())
    found = np.zeros((len(ordered), len(places)), np.float32)
    for (stage, kind), job in jobs.items():
        found[ordered.index(kind), stage] = _seconds(programs[job], job)
    found = _of_all(found, devices)
    return {kind: times.tolist() for kind, times in zip(ordered, found, strict=True)}


def copy_times(cut: CutLoss, places: Sequence[Place]) -> tuple[list[float], list[float]]:
    """What the residuals of one microbatch take to pinned host memory, or back, whichever is longer; of each stage.

    Returns:
        seconds until they are there, and the seconds of them after which the process goes on.
    """
    devices = [place.devices[0] for place in places]
    found = np.zeros((2, len(places)), np.float32)
    for stage, (code, device) in enumerate(zip(cut.stages, devices, strict=True)):
        reads = {
            ref: aval
            for backward in code.backward.values()
            for ref, aval in zip(backward.then.inputs, backward.then.avals, strict=True)
            if ref.role in (Role.RESIDUAL, Role.ACTIVATION) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        }
        if is_here(device) and reads:
            found[:, stage] = _copy_seconds([put(_zeros(aval), device) for aval in reads.values()])
    seconds, handed = _of_all(found, devices).tolist()
    return seconds, handed


def _of_all(mine: np.ndarray, devices: Sequence[Device]) -> np.ndarray:
    """What each process has measured of its own stages, put together."""
    return rows_of_all(mine).sum(axis=0) if len(processes_of(devices)) > 1 else mine


def _copy_seconds(arrays: Sequence[jax.Array]) -> tuple[float, float]:
    """As ``copy_times``, of arrays on a device, with the copies that a plan makes."""
    homes = [array.sharding for array in arrays]
    ways = [copier(homes, to_host=to_host) for to_host in (True, False)]
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(_RUNS + 1):
        for copy, times in zip(ways, taken, strict=True):
            jax.block_until_ready(arrays)
            begun = time.perf_counter()
            arrays = copy(*arrays)
            handed = time.perf_counter()
            jax.block_until_ready(arrays)
            times.append((time.perf_counter() - begun, handed - begun))
    medians = [tuple(map(statistics.median, zip(*times[1:], strict=True))) for times in taken]
    return max(medians)


def _seconds(call: Compiled, job: PlacedProgram) -> float:
    taken = []
    for _ in range(_RUNS + 1):
        arguments = [put(_zeros(aval), job.place.devices[0]) for aval in job.program.avals]
        jax.block_until_ready(arguments)
        begun = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def link_times(places: Sequence[Place]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a send from each stage to the next, without its bytes and for each byte; nothing where both share a device.

    Sends are measured one at a time. In several processes every process calls it, and all get the same times.
    """
    devices = [place.devices[0] for place in places]
    pairs = list(itertools.pairwise(devices))
    several = len(processes_of(devices)) > 1
    found = np.zeros((len(pairs), 2), np.float32)
    known: dict[tuple[Device, Device], int] = {}
    for number, (source, target) in enumerate(pairs):
        first = known.setdefault((source, target), number)
        if source == target or first < number:
            found[number] = found[first]
            continue
        found[number] = [_send_seconds(source, target, size, several=several) for size in (1, _LARGE)]
    small, large = (rows_of_all(found).sum(axis=0) if several else found).T
    per_byte = np.maximum(large - small, 0.0) / (4 * (_LARGE - 1))
    return tuple(small.tolist()), tuple(per_byte.tolist())


def _send_seconds(source: Device, target: Device, size: int, *, several: bool) -> float:
    """What a send takes, where it arrives; 0 in the other processes."""
    aval = jax.ShapeDtypeStruct((size,), jnp.float32)
    crosses = source.process_index != target.process_index
    if not crosses and not is_here(source):
        return 0.0
    send = crosser(aval, source, target) if crosses else lambda value: (put(value, target),)
    taken = []
    for _ in range(_RUNS + 1):
        given = [jax.block_until_ready(put(jnp.zeros(size, jnp.float32), source))] if is_here(source) else []
        if crosses and several:
            rows_of_all(np.zeros(1, np.float32))  # all begin together
        begun = time.perf_counter()
        jax.block_until_ready(send(*given))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:]) if is_here(target) else 0.0


def waiting(schedule: Schedule) -> float:
    """Which part of a send across its boundaries a stage waits for at every microbatch, on the clock with equal stages.

    1F1B waits for most of it, because a rank has no other microbatch to work on; GPipe for nothing.

    Example:
        >>> from jaxpp.schedule.registry import make
        >>> [round(waiting(make(name, num_ranks=4, num_microbatches=16)), 1) for name in ("gpipe", "1f1b")]
        [0.0, 0.7]
    """
    durations = {action: UNIT[action.kind] for row in schedule.rows for action in row}
    hop, last = 2.0**-10, schedule.num_stages - 1  # a power of two, so that sums of it are exact
    owner = schedule.stage_to_rank
    hops = [hop * (a != b) for a, b in itertools.pairwise(owner)]
    ends = [makespan(replay(schedule.rows, owner, Timing(durations, times))) for times in ((), hops)]
    turns = schedule.num_microbatches * schedule.num_stages // schedule.num_ranks
    return float(min(1.0, max(0.0, ((ends[1] - ends[0]) / hop - 2 * last) / (2 * turns))))


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
