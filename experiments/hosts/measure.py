"""What one of several processes does: trains, is timed, and counts what it dispatches and what crosses to other processes.

The batch is the same in every process. Process 0 is told the numbers of all.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxpp
from experiments.problems import mlp
from jaxpp.lowering.builder import CALLER
from jaxpp.lowering.plan import Instruction
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.runtime.place import devices_of
from jaxpp.stages.program import Role

__all__ = ["Crossing", "Sizes", "Told", "crossings", "measure", "worker"]

_WARM_UP = 10


@dataclass(frozen=True)
class Sizes:
    """The pipeline, and how long it is looked at.

    Attributes:
        width: features of a layer.
        depth: layers.
        batch: examples of a step.
        stages: of the pipeline.
        microbatches: parts of the batch.
        schedule: order of the actions.
        losses: steps whose losses are compared.
        steps: steps that are timed.
    """

    width: int
    depth: int
    batch: int
    stages: int
    microbatches: int
    schedule: str
    losses: int
    steps: int


class Crossing(NamedTuple):
    """What one process sends another in a step.

    Attributes:
        source: the process that has it.
        target: the process that gets it.
        kind: ``activations``, ``cotangents``, ``tied`` or ``scalars``.
        times: how many sends.
        num_bytes: of all of them.
    """

    source: int
    target: int
    kind: str
    times: int
    num_bytes: int


class Told(NamedTuple):
    """What all processes found together.

    Attributes:
        losses: of the first steps, of every process.
        seconds: of a step, the median; of every process.
        host: seconds until ``pipe.step`` returns, the median; of every process.
        cpu: seconds of these in which the thread that called it ran.
        crossing: seconds of these in which it handed over sends between processes, those of others included; of every process.
        instructions: that a process dispatches in a step.
        programs: that a process has compiled for its steps.
        crossings: from each process to each other.
    """

    losses: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    host: tuple[float, ...]
    cpu: tuple[float, ...]
    crossing: tuple[float, ...]
    instructions: tuple[int, ...]
    programs: tuple[int, ...]
    crossings: tuple[Crossing, ...]


def measure(sizes: Sizes) -> Told:
    """Train over all devices of all processes; every process calls it."""
    problem = mlp(sizes.width, sizes.depth, sizes.batch)
    counts: dict[str, Any] = {"num_stages": sizes.stages, "num_microbatches": sizes.microbatches, "schedule": sizes.schedule}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))
    pipe = jaxpp.Pipeline(problem.loss_fn, optimizer, **counts)
    state = pipe.init(problem.init, jax.random.key(0), problem.batch)
    losses = []
    for _ in range(sizes.losses):
        state, metrics = pipe.step(state, problem.batch)
        losses.append(float(metrics.loss))
    times = []
    for _ in range(_WARM_UP + sizes.steps):
        begun, ran = time.perf_counter(), time.thread_time()
        state, metrics = pipe.step(state, problem.batch)
        host, cpu = time.perf_counter() - begun, time.thread_time() - ran
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begun, host, cpu))
    plan, _ = pipe.engine.plan("update", problem.batch, None)
    crossing = _in_crossings(pipe, state, problem.batch, sizes.steps)
    own = [*np.median(times[_WARM_UP:], axis=0), crossing, len(plan.instructions), pipe.engine.programs.num_compiled, *losses]
    seconds, host, cpu, crossing, instructions, programs, *found = _from_all(own).T
    return Told(
        losses=tuple(map(tuple, np.transpose(found).tolist())),
        seconds=tuple(seconds.tolist()),
        host=tuple(host.tolist()),
        cpu=tuple(cpu.tolist()),
        crossing=tuple(crossing.tolist()),
        instructions=tuple(map(int, instructions)),
        programs=tuple(map(int, programs)),
        crossings=crossings(pipe, problem.batch),
    )


class _Clock:
    """An observer: the time of this thread after each instruction."""

    def __init__(self):
        self.times = [time.thread_time()]

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        del instruction, slots
        self.times.append(time.thread_time())


def _in_crossings(pipe: jaxpp.Pipeline, state: jaxpp.State, batch: Any, steps: int) -> float:
    """Seconds of a step in which this thread hands over sends between processes; the median step. The state is left as it is."""
    engine, taken = pipe.engine, []
    _, lowered = engine.plan("update", batch, None, donate=False)
    crosses = np.array([line.crossing is not None for line in lowered.bound.lines])
    for _ in range(steps):
        clock = _Clock()
        engine.run("update", engine.leaves(state.held), batch, None, donate=False, observer=clock)
        taken.append(float(np.diff(clock.times)[crosses].sum()))
    return float(np.median(taken))


def _from_all(numbers: Sequence[float]) -> np.ndarray:
    """The numbers of all processes, a row each. They travel as 32 bits at a time, which JAX changes nothing of."""
    words = np.array(numbers, np.float64).view(np.int32)
    found = np.asarray(multihost_utils.process_allgather(words)) if jax.process_count() > 1 else words
    return found.reshape(jax.process_count(), -1).view(np.float64)


def crossings(pipe: jaxpp.Pipeline, batch: Any) -> tuple[Crossing, ...]:
    """What crosses between processes in a step, counted from its lines; no array is looked at."""
    lowered = pipe.engine.lower("update", batch, None)
    sizes = {life.name: life.num_bytes for life in step_liveness(pipe.engine, lowered).lives}
    found: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    for line in lowered.bound.lines:
        if line.is_send and line.inputs[0].stage != CALLER:
            source, target = (devices_of(place.shown)[0] for place in (lowered.bound.placement[line.inputs[0].stage], line.place))
            if source.process_index != target.process_index:
                kind = _KINDS.get(line.inputs[0].ref.role, "scalars")
                found[source.process_index, target.process_index, kind].append(sizes[line.outputs[0]])
    return tuple(Crossing(*key, len(sent), sum(sent)) for key, sent in sorted(found.items()))


_KINDS = {Role.ACTIVATION: "activations", Role.COTANGENT: "cotangents", Role.PARAM: "tied", Role.GRAD: "tied"}


def worker(sizes: dict[str, Any], file: str) -> None:
    """Measure in one of the processes that ``experiments.hosts`` has started; process 0 writes what all found."""
    told = measure(Sizes(**sizes))
    if jax.process_index() == 0:
        Path(file).write_text(json.dumps(told._asdict()))
