"""The ways compared at one number of tasks: trained, looked at, and timed by turns."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.tasks.measure import compilations, device_bytes, seconds_a_step, seconds_to_move
from experiments.tasks.problem import Problem
from experiments.tasks.ways import Banked, Pipelined, Resident, Stages, Way, make_step
from jaxpp.errors import VerifyError
from jaxpp.schedule import simulate_prefetch

__all__ = ["WAYS", "Group", "Plan", "Row", "check_equal", "compare"]

WAYS = ("all resident", "bank", "bank, prefetch", "bank, pipeline")
RESIDENT, *BANKS, PIPELINE = WAYS
_LOOKS = 8  # times that live bytes are counted in a training
_LONG = 1000  # steps on the virtual clock


@dataclass(frozen=True)
class Plan:
    """How long the ways are trained and timed.

    Attributes:
        steps: to train.
        rounds: timed, by turns.
        timed: steps of each way in a round.
        warm_up: steps before those.
        wait: whether each timed step is waited for before the next.
    """

    steps: int
    rounds: int
    timed: int
    warm_up: int
    wait: bool


@dataclass(frozen=True)
class Row:
    """One way to train T tasks.

    Attributes:
        way: its name.
        device_bytes: live on each device, the most between two steps.
        host_bytes: of the sets on the host.
        seconds: median of a step.
        host: median of the host's part of it, from the call to its return.
        ratio: to ``all resident`` in the same round, the median over the rounds.
        accuracies: of each task on held-out digits.
        compiled: programs: to make what is trained (a pipeline's ``init`` compiles its step), by the first step, by all others.
        equal: whether Theta, every theta[t] and their moments are those of ``all resident`` bit for bit, where the step is the
            same; never False: a difference ends the run.
    """

    way: str
    device_bytes: tuple[int, ...]
    host_bytes: int
    seconds: float
    host: float
    ratio: float
    accuracies: tuple[float, ...]
    compiled: tuple[int, int, int]
    equal: bool | None


@dataclass(frozen=True)
class Group:
    """All ways at one T.

    Attributes:
        num_tasks: T.
        set_bytes: of theta[t] with its moments.
        load: seconds to bring a set to an idle device.
        store: seconds to write one back.
        clock: ratio of a step with prefetch to one with everything resident, on the virtual clock with these times.
        rows: one a way.
    """

    num_tasks: int
    set_bytes: int
    load: float
    store: float
    clock: float
    rows: tuple[Row, ...]


def compare(problem: Problem, optimizer: Any, stages: Stages, plan: Plan, bar: Any) -> Group:
    """Train every way, then time all of them.

    Args:
        problem: what is trained.
        optimizer: of Theta and every theta[t].
        stages: of the pipeline.
        plan: for how long.
        bar: counts the steps of the trainings and the rounds.

    Raises:
        VerifyError: a bank ends with other parameters than ``all resident``.
        JaxppError: the model cannot be cut so, or the batch split.
    """
    device, step = jax.devices()[0], make_step(problem, optimizer)
    makers: dict[str, Callable[[], Way]] = {
        RESIDENT: lambda: Resident(problem, optimizer, step, device),
        BANKS[0]: lambda: Banked(problem, optimizer, step, device, prefetch=False),
        BANKS[1]: lambda: Banked(problem, optimizer, step, device, prefetch=True),
        PIPELINE: lambda: Pipelined(problem, optimizer, device, stages),
    }
    predict, ways, found = jax.jit(problem.predict), {}, {}
    for name, make in makers.items():
        bar.set_description(f"T={len(problem.keys)}, {name}")
        ways[name], looks, compiled = _train(make, problem, plan.steps, bar)
        if name in BANKS:
            check_equal(name, ways[name], ways[RESIDENT], problem.keys)
        found[name] = looks, compiled, tuple(_accuracies(ways[name], predict, problem))
    timed = _time(ways, problem, plan, bar)
    params, opt_state = ways[RESIDENT].own(0)
    load, store = seconds_to_move(params, optimizer, device, plan.rounds * plan.timed)
    medians = {name: tuple(map(float, np.median(seconds, axis=0))) for name, seconds in timed.items()}
    clock = simulate_prefetch(_LONG, medians[RESIDENT][0], load, store)
    rows = (
        Row(
            way=name,
            device_bytes=looks,
            host_bytes=ways[name].host_bytes,
            seconds=medians[name][0],
            host=medians[name][1],
            ratio=float(np.median(np.divide(timed[name], timed[RESIDENT])[:, 0])),
            accuracies=accuracies,
            compiled=compiled,
            equal=True if name in BANKS else None,
        )
        for name, (looks, compiled, accuracies) in found.items()
    )
    set_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    return Group(len(problem.keys), set_bytes, load, store, clock.makespan / clock.busy, tuple(rows))


def check_equal(name: str, way: Way, other: Way, tasks: Any) -> None:
    """Refuse a difference of one bit in Theta, a theta[t], or a moment.

    Args:
        name: of the way.
        way: looked at.
        other: what it has to equal.
        tasks: all of them.

    Raises:
        VerifyError: naming the first leaves that differ, with their values.
    """
    wrong = []
    for what, mine, right in [("Theta", way.shared(), other.shared())] + [(f"theta[{t}]", way.own(t), other.own(t)) for t in tasks]:
        pairs = zip(jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(right), strict=True)
        for (path, leaf), expected in pairs:
            a, b = np.asarray(leaf), np.asarray(expected)
            if a.tobytes() != b.tobytes():
                k = np.argmax(a.ravel() != b.ravel())
                wrong.append(f"{what}{jax.tree_util.keystr(path)}: {a.flat[k]!r} instead of {b.flat[k]!r}")
    if wrong:
        rule = "the same jitted step gives the same bits, wherever theta[t] waits"
        raise VerifyError(f"{name}, T={len(tasks)}", rule, wrong[:4], "report it: a set was lost, or written twice")


def _train(make: Callable[[], Way], problem: Problem, steps: int, bar: Any) -> tuple[Way, tuple[int, ...], tuple[int, int, int]]:
    """A way, trained; the most bytes on each device between two steps, and the programs compiled."""
    gc.collect()  # what went before
    before, looks, marks = device_bytes(), [], []
    with compilations() as compiled:
        way = make()
        marks.append(len(compiled))
        for step in range(steps):
            way.step(*_step(problem, step))
            if step == 0:
                marks.append(len(compiled))
            way.wait()  # what only a step in flight holds is not what a way needs
            if step % max(1, steps // _LOOKS) == 0 or step == steps - 1:
                looks.append(device_bytes())
            bar.update()
        made, first = marks
        programs = made, first - made, len(compiled) - first
    most = tuple(max(column) - old for column, old in zip(zip(*looks, strict=True), before, strict=True))
    return way, most, programs


def _step(problem: Problem, step: int) -> tuple[int, Any, int]:
    """Task and batch of a step, and the task after it."""
    return problem.task(step), problem.batch(step), problem.task(step + 1)


def _time(ways: Mapping[str, Way], problem: Problem, plan: Plan, bar: Any) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step of each way, and of the host's part, in each round."""
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    bar.set_description(f"T={len(problem.keys)}, timed")
    length = plan.warm_up + plan.timed
    for k in range(plan.rounds):
        chain = [_step(problem, plan.steps + step) for step in range(k * length, (k + 1) * length)]
        names = list(ways)
        names = names[k % len(names) :] + names[: k % len(names)]  # who comes first changes
        for name, seconds in seconds_a_step({name: ways[name] for name in names}, chain, plan.warm_up, wait=plan.wait).items():
            timed[name].append(seconds)
        bar.update()
    return timed


def _accuracies(way: Way, predict: Callable[..., Any], problem: Problem) -> Iterator[float]:
    """Of each task, on digits by other people."""
    params, _ = way.shared()
    for t in problem.keys:
        held_out = problem.held_out(t)
        yield float(np.mean(np.asarray(predict(params, way.own(t)[0], held_out["image"])) == held_out["label"]))
