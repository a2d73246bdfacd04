"""How long stages, sends and copies of residuals really take: for cuts by time, and to choose remat.

In several processes, each measures its own stages, and tells the others: all of them cut by the same times. On devices that only
compile, each time is predicted from the numbers of the GPU (``roofline.py``).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxpp.efficiency import as_linked
from jaxpp.errors import ArgumentError
from jaxpp.runtime.compile import PlacedProgram, Programs
from jaxpp.runtime.edges import put
from jaxpp.runtime.hlo import read_kernels
from jaxpp.runtime.place import OneDevice, Place
from jaxpp.runtime.processes.channel import agreement, begin_together, rows_of_all
from jaxpp.runtime.processes.here import is_here, processes_of
from jaxpp.runtime.processes.texts import listing
from jaxpp.runtime.roofline import copy_seconds, likely_seconds, send_seconds
from jaxpp.runtime.send import Send, memory_copies
from jaxpp.schedule.action import Kind
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.loss.traced_loss import key_implementation
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.stages.stage import StageCode
from jaxpp.targets import GPU, compiles_only, device_name, target_of
from jaxpp.types import Aval, Device, Home

_RUNS = 5
_LARGE = 1 << 20  # elements of the array whose send tells what a byte costs
_Job = tuple[PlacedProgram, tuple[Sharding, ...]]  # and how the compiler shards those of its arguments for which it decides that
_Times = tuple[float, float]  # of one run: seconds until its results are there, and until the process goes on


def stage_times(cut: CutLoss, kinds: Collection[Kind], places: Sequence[Place], programs: Programs) -> list[float]:
    """Seconds that one microbatch takes on each stage, forward and backward; see ``action_times``."""
    times = action_times(cut, {Kind.F, *kinds}, places, programs, 'Pipeline(balance="time")')
    return [sum(own) for own in zip(*times.values(), strict=True)]


def action_times(
    cut: CutLoss, kinds: Collection[Kind], places: Sequence[Place], programs: Programs, where: str
) -> dict[Kind, list[float]]:
    """Seconds that each kind of action takes for a microbatch of zeros, on each stage; every process that has a place calls it."""
    ordered, jobs = sorted(kinds, key=lambda kind: (kind != Kind.F, kind)), dict[tuple[int, Kind], _Job]()
    devices = [place.devices[0] for place in places]
    with agreement(where, devices) as agree:
        agree(lambda: {"loss": listing(cut.loss.graph), "kinds of actions": " ".join(map(str, ordered))})
    for stage, (code, device) in enumerate(zip(cut.stages, devices, strict=True)):
        if is_here(device):
            made = {
                kind: code.forward if kind == Kind.F else code.backward[kind].then
                for kind in ordered
                if kind in (Kind.F, *code.backward)
            }
            found = _placed(code, list(made.values()), _measured(places[stage]), programs)
            jobs |= {(stage, kind): job for kind, job in zip(made, found, strict=True)}
    programs.compile([job for job, _ in jobs.values()], [given for _, given in jobs.values()])
    times = np.zeros((len(ordered), len(places)), np.float32)
    for (stage, kind), (job, given) in jobs.items():
        call = programs.get(job, given).call
        if compiles_only(devices[stage]):
            kernels = read_kernels(call.as_text() or "")
            times[ordered.index(kind), stage] = likely_seconds(kernels, _numbers(devices[stage], where), job.place.devices)
            continue
        chosen = dict(zip(job.free_inputs, given, strict=True))
        pairs = zip(job.program.inputs, job.program.avals, strict=True)
        wanted = [(job.place.aval(ref, aval), chosen.get(k) or job.place.home(ref)) for k, (ref, aval) in enumerate(pairs)]
        runs = [_timed(call, [_zeros(*each) for each in wanted])[0] for _ in range(_RUNS + 1)]
        times[ordered.index(kind), stage] = _median(runs)[0]
    return {kind: own.tolist() for kind, own in zip(ordered, _of_all(times, devices), strict=True)}


def _measured(place: Place) -> Place:
    """Where the programs of a place are measured: there, but where it spans processes on its first device."""
    return place.compiled_at if len(processes_of(place.devices)) == 1 else OneDevice(place.devices[0]).compiled_at


def _placed(code: StageCode, found: Sequence[Program], place: Place, programs: Programs) -> list[_Job]:
    """Programs of a stage at a place, in order, and how the compiler shards what those before make for them."""
    chosen, jobs = dict[Ref, Sharding](), list[_Job]()
    for program in (code.statics, *found):
        job = PlacedProgram(program, place, program.donated)
        jobs.append((job, tuple(chosen[program.inputs[k]] for k in job.free_inputs)))
        free = [place.is_free(ref) for ref in program.outputs]
        if any(free):
            programs.compile([job], [jobs[-1][1]])
            shardings = programs.get(*jobs[-1]).call.output_shardings
            chosen |= {ref: sharding for ref, sharding, one in zip(program.outputs, shardings, free, strict=True) if one}
    return jobs[1:]


def copy_times(cut: CutLoss, places: Sequence[Place]) -> tuple[list[float], list[float]]:
    """Seconds that each stage's residuals of a microbatch take to host memory or back, the longer of both; and to dispatch that."""
    devices = [place.devices[0] for place in places]
    times = np.zeros((2, len(places)), np.float32)
    for stage, (code, device) in enumerate(zip(cut.stages, devices, strict=True)):
        programs = [backward.then for backward in code.backward.values()]
        reads = {ref: aval for each in programs for ref, aval in zip(each.inputs, each.avals, strict=True)}
        kept = [aval for ref, aval in reads.items() if ref.role in (Role.RESIDUAL, Role.ACTIVATION)]
        moved = [aval for aval in kept if not jnp.issubdtype(aval.dtype, jax.dtypes.extended)]
        if moved and compiles_only(device):
            times[0, stage] = copy_seconds(sum(map(count_bytes, moved)), _linked(device, "copies to host memory"))
        elif is_here(device) and moved:
            arrays = [_zeros(aval, device) for aval in moved]
            homes = [array.sharding for array in arrays]
            ways = [memory_copies(homes, to_host=to_host) for to_host in (True, False)]  # the copies that a plan makes
            runs: tuple[list[_Times], ...] = ([], [])
            for _ in range(_RUNS + 1):
                for copy, own in zip(ways, runs, strict=True):
                    taken, arrays = _timed(copy, arrays)
                    own.append(taken)
            times[:, stage] = max(map(_median, runs))
    seconds, handed = _of_all(times, devices).tolist()
    return seconds, handed


def link_times(places: Sequence[Place]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a send from each stage to the next, without its bytes and for each byte; every process with a place calls it."""
    devices = [place.devices[0] for place in places]
    pairs = list(itertools.pairwise(devices))
    times = np.zeros((len(pairs), 2), np.float32)
    for number, (source, target) in enumerate(pairs):
        first = pairs.index((source, target))
        if first < number:
            times[number] = times[first]
        elif source != target and compiles_only(source):
            times[number] = [send_seconds(4 * size, source, target, _linked(source, "sends")) for size in (1, _LARGE)]
        elif source != target:
            times[number] = [_send_seconds(source, target, size) for size in (1, _LARGE)]
    small, large = _of_all(times, devices).T
    per_byte = np.maximum(large - small, 0.0) / (4 * (_LARGE - 1))
    return tuple(small.tolist()), tuple(per_byte.tolist())


def host_times(places: Sequence[Place]) -> tuple[float, ...]:
    """Seconds of a byte from host memory to each stage; every process with a place calls it."""
    devices = [place.devices[0] for place in places]
    times = np.zeros(len(devices), np.float32)
    for number, device in enumerate(devices):
        if devices.index(device) < number:
            times[number] = times[devices.index(device)]
        elif compiles_only(device):
            times[number] = copy_seconds(1, _linked(device, "copies from host memory"))
        elif is_here(device):
            array = put(jnp.zeros(_LARGE, jnp.float32), device)
            there, back = (memory_copies([array.sharding], to_host=to_host) for to_host in (True, False))
            hosted = there(array)
            times[number] = _median([_timed(back, hosted)[0] for _ in range(_RUNS + 1)])[0] / array.nbytes
    return tuple(_of_all(times, devices).tolist())


def _numbers(device: Device, where: str) -> GPU:
    """The numbers of a device that only compiles: what it would take is predicted by them, as nothing can be measured there."""
    numbers = target_of(device)
    if numbers is None:
        rule = "on devices that only compile, times are predicted from the numbers of the GPU"
        got = f"{device_name(device)}, {device.device_kind!r}, whose numbers are not known"
        raise ArgumentError(where, rule, got, "pass devices=jaxpp.target(...)")
    return numbers


def _linked(device: Device, where: str) -> GPU:
    """The same numbers, with what its links are likely to reach."""
    return as_linked(_numbers(device, where))


def _send_seconds(source: Device, target: Device, size: int) -> float:
    aval = jax.ShapeDtypeStruct((size,), jnp.float32)
    crosses = source.process_index != target.process_index
    if not crosses and not is_here(source):
        return 0.0
    send = Send(target, source, aval).bind() if crosses else lambda value: (put(value, target),)
    runs = []
    for _ in range(_RUNS + 1):
        arguments = [jax.block_until_ready(_zeros(aval, source))] if is_here(source) else []
        if crosses:
            begin_together()
        runs.append(_timed(send, arguments)[0])
    return _median(runs)[0] if is_here(target) else 0.0


def _timed(call: Callable[..., Sequence[jax.Array]], arguments: Sequence[jax.Array]) -> tuple[_Times, Sequence[jax.Array]]:
    jax.block_until_ready(arguments)
    begun = time.perf_counter()
    results = call(*arguments)
    handed = time.perf_counter()
    jax.block_until_ready(results)
    return (time.perf_counter() - begun, handed - begun), results


def _median(runs: Sequence[_Times]) -> _Times:
    seconds, handed = map(statistics.median, zip(*runs[1:], strict=True))
    return seconds, handed


def _of_all(mine: np.ndarray, devices: Sequence[Device]) -> np.ndarray:
    return rows_of_all(mine).sum(axis=0) if len(processes_of(devices)) > 1 else mine


def _zeros(aval: Aval, home: Home) -> jax.Array:
    """Made where they are to be: a stage may be too large for one device."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, aval)
        return put(jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=key_implementation(aval)), home)
    return jnp.zeros(aval.shape, aval.dtype, device=home)


def clock_of(costs: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Time over cost: after which part of the costs which part of the time has passed."""
    work, passed = (itertools.accumulate(values, initial=0.0) for values in (costs, seconds))
    return tuple((done / (sum(costs) or 1.0), at / sum(seconds)) for done, at in zip(work, passed, strict=True))
