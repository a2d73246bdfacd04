"""Where the host's time goes: instruction by instruction, and as a plan grows.

``pipe.profile`` also says what an instruction costs the host, but in steps that are traced. Here nothing else runs: an observer of
the plan notes the time after each instruction. The loop itself is the same plan with its programs and sends replaced by functions
that return at once.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jaxpp
from experiments.problems import Problem, mlp
from experiments.speed.steps import optimizer
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.lowering.plan import Instruction, Plan
from jaxpp.options import Options
from jaxpp.runtime.bind import compile_plan
from jaxpp.runtime.execute import execute
from jaxpp.schedule import Schedule

__all__ = ["GrowthRow", "HostRow", "Lowering", "grow", "lowering", "split_host_time"]

_WIDTH, _DEPTH = 8, 16


@dataclass(frozen=True)
class HostRow:
    """The instructions of one kind in a step, or what is no instruction.

    Attributes:
        what: the kind.
        count: how many there are in a step; 0 for what is no instruction.
        each: microseconds of one, on average over a step.
        total: microseconds of a step; the median.
    """

    what: str
    count: int
    each: float
    total: float


@dataclass(frozen=True)
class GrowthRow:
    """The host time of a plan.

    Attributes:
        stages: of the pipeline, one on each device.
        microbatches: parts of the batch.
        instructions: of the plan.
        host: microseconds an instruction until ``pipe.step`` returns; the median step.
        cpu: microseconds of these in which the host's thread ran; the rest it waited for a core.
    """

    stages: int
    microbatches: int
    instructions: int
    host: float
    cpu: float


@dataclass(frozen=True)
class Lowering:
    """The time from a schedule to a plan.

    Attributes:
        stages: of the pipeline.
        microbatches: parts of the batch.
        instructions: of the plan.
        lines: seconds in which a schedule becomes lines that have their places.
        slots: seconds in which the lines become instructions over slots, their programs compiled already.
    """

    stages: int
    microbatches: int
    instructions: int
    lines: float
    slots: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.lines + self.slots


class _Watch:
    """An observer: the time between the end of one instruction and the end of the next."""

    def __init__(self):
        self.times: list[float] = []
        self._last = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Any]) -> None:
        del instruction, slots
        now = time.perf_counter()
        self.times.append(now - self._last)
        self._last = time.perf_counter()


def split_host_time(problem: Problem, schedule: Schedule, steps: int) -> tuple[HostRow, ...]:
    """What each kind of instruction costs the host in a step, the loop, and what is around it.

    Args:
        problem: the model and its batch.
        schedule: of its steps.
        steps: to take medians of.

    Returns:
        a row for each kind of instruction; the loop, which is a part of these; what ``pipe.step`` does around the instructions;
        and the whole call.
    """
    batch = jax.tree.map(jax.numpy.asarray, problem.batch)
    counts: dict[str, Any] = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
    pipe = jaxpp.Pipeline(problem.loss_fn, optimizer(), schedule=schedule, **counts)
    state = pipe.init(problem.init, jax.random.key(0), batch)
    engine, whole, watched = pipe.engine, [], []
    plan, _ = engine.plan("update", batch, None)
    leaves = engine.leaves(jax.tree.map(jax.numpy.copy, state))
    for _ in range(20 + steps):  # steps of both kinds in turn, so that what else the machine does falls on both
        begun = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        whole.append(time.perf_counter() - begun)
        jax.block_until_ready((state, metrics))
        watch = _Watch()
        leaves = jax.block_until_ready(engine.run("update", leaves, batch, None, observer=watch)).state
        watched.append(watch.times)
    times = 1e6 * np.array(watched[20:])
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for number, instruction in enumerate(plan.instructions):
        kinds[_kind(instruction)].append(number)
    call, inside = 1e6 * float(np.median(whole[20:])), float(np.median(times.sum(axis=1)))
    totals = {kind: float(np.median(times[:, numbers].sum(axis=1))) for kind, numbers in kinds.items()}
    rows = [HostRow(kind, len(numbers), totals[kind] / len(numbers), totals[kind]) for kind, numbers in kinds.items()]
    count, loop = len(plan.instructions), _loop(plan, steps)
    rows.append(HostRow("the loop, in these", count, loop / count, loop))
    rows.append(HostRow("around the instructions", 0, 0.0, call - inside))
    return (*rows, HostRow("pipe.step", count, call / count, call))


def _kind(instruction: Instruction) -> str:
    """What an instruction is: a send, a kind of action, or the first word of its label."""
    if instruction.about.sends:
        return "send"
    action = instruction.about.action
    return instruction.label.split()[0] if action is None else str(getattr(action, "kind", action))


def _loop(plan: Plan, steps: int) -> float:
    """Microseconds of the loop alone: the plan with every call replaced by one that returns at once."""
    quick = tuple(line._replace(call=_returning(len(line.outputs))) for line in plan.instructions)
    empty, arguments, taken = dataclasses.replace(plan, instructions=quick), [None] * len(plan.inputs), []
    for _ in range(20 + steps):
        begun = time.perf_counter()
        execute(empty, arguments)
        taken.append(time.perf_counter() - begun)
    return 1e6 * float(np.median(taken[20:]))


def _returning(count: int) -> Callable[..., Sequence[Any]]:
    """A function that returns so many values at once."""
    made = (None,) * count
    return lambda *_: made


def grow(num_stages: int, num_microbatches: int, schedule: str, steps: int) -> GrowthRow:
    """The host time an instruction of a pipeline whose stages do next to nothing.

    Args:
        num_stages: one on each device.
        num_microbatches: of one example each.
        schedule: its name.
        steps: to take medians of.
    """
    problem = mlp(_WIDTH, max(_DEPTH, num_stages), num_microbatches)
    batch = jax.tree.map(jax.numpy.asarray, problem.batch)
    counts: dict[str, Any] = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    pipe = jaxpp.Pipeline(problem.loss_fn, optax.sgd(1e-6), schedule=schedule, **counts)
    state = pipe.init(problem.init, jax.random.key(0), batch)
    plan, _ = pipe.engine.plan("update", batch, None)
    walls, cpus = [], []
    for _ in range(3 + steps):
        wall, cpu = time.perf_counter(), time.thread_time()
        state, metrics = pipe.step(state, batch)
        cpus.append(time.thread_time() - cpu)
        walls.append(time.perf_counter() - wall)
        jax.block_until_ready((state, metrics))
    count = len(plan.instructions)
    host, ran = (1e6 * float(np.median(times[3:])) / count for times in (walls, cpus))
    return GrowthRow(num_stages, num_microbatches, count, host, ran)


def lowering(num_stages: int, num_microbatches: int, schedule: str) -> Lowering:
    """The time to lower a plan whose loss is traced and cut already; the second time, in which nothing is imported or compiled."""
    problem = mlp(_WIDTH, max(_DEPTH, num_stages), num_microbatches)
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    made = jaxpp.schedule.make(schedule, num_ranks=num_stages, num_microbatches=num_microbatches)
    options = Options.of(problem.loss_fn, num_stages=num_stages, num_microbatches=num_microbatches, schedule=made)

    def engine() -> Engine:
        return open_engine(options, optax.adam(1e-3), (shapes,), problem.batch, None)

    first = engine()
    first.plan("update", problem.batch, None)
    second = engine()
    begun = time.perf_counter()
    second.lower("update", problem.batch, None)
    lines = time.perf_counter() - begun
    known = first.lower("update", problem.batch, None)
    begun = time.perf_counter()
    plan, _ = compile_plan(known.bound, first.programs, first.preparer.groups)
    slots = time.perf_counter() - begun
    return Lowering(num_stages, num_microbatches, len(plan.instructions), lines, slots)
