"""Do two cores show pipelining? Stages that are one thread wide, under several schedules and on one device."""

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jaxpp
from experiments.plain import Runner, plain_step
from experiments.speed.problems import one_thread

__all__ = ["OneThread", "ideal", "measure_one_thread"]

SCHEDULES = ("naive", "1f1b", "gpipe")


@dataclass(frozen=True)
class OneThread:
    """Stages that are one thread wide.

    Attributes:
        stages: one on each device.
        microbatches: parts of the batch.
        seconds: the median step of each schedule, and of the plain one.
        cores: how many cores each keeps busy: the process's CPU time over the step; the median.
        faster: how many times as fast as ``naive`` each is: the median of the rounds' ratios.
        quartiles: of these ratios.
        ideal: what ``faster`` would be for 1f1b and gpipe if nothing but the bubble cost anything.
    """

    stages: int
    microbatches: int
    seconds: dict[str, float]
    cores: dict[str, float]
    faster: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    ideal: float


def ideal(num_microbatches: int, num_ranks: int) -> float:
    """``naive`` over ``1f1b`` or ``gpipe`` if all stages are equal and only the bubble costs anything: m p / (m + p - 1).

    Example:
        >>> round(ideal(16, 2), 2)
        1.88
    """
    return num_microbatches * num_ranks / (num_microbatches + num_ranks - 1)


def measure_one_thread(num_stages: int, num_microbatches: int, num_steps: int, rounds: int, bar: Any) -> OneThread:
    """Time naive, 1f1b, gpipe and the plain step in interleaved rounds.

    Args:
        num_stages: one on each device.
        num_microbatches: parts of the batch.
        num_steps: matrix products in the forward of a stage.
        rounds: interleaved rounds.
        bar: counts the rounds.
    """
    problem, optimizer = one_thread(num_stages, num_steps, width=16, batch=4 * num_microbatches), optax.sgd(1e-6)
    batch, key = jax.tree.map(jax.numpy.asarray, problem.batch), jax.random.key(0)
    counts: dict[str, Any] = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    runners: dict[str, Runner] = {}
    for name in SCHEDULES:
        pipe = jaxpp.Pipeline(problem.loss_fn, optimizer, schedule=name, **counts)
        runners[name] = Runner(lambda state, pipe=pipe: pipe.step(state, batch), pipe.init(problem.init, key, batch))
    step, params = plain_step(problem.loss_fn, optimizer, num_microbatches), jax.jit(problem.init)(key)
    runners["plain"] = Runner(lambda state: step(state, batch), (params, optimizer.init(params)))
    rows: list[dict[str, float]] = []
    busy: list[dict[str, float]] = []
    for runner in runners.values():
        runner.time(1)
    for _ in range(rounds):
        rows.append({})
        busy.append({})
        for name, runner in runners.items():
            begun = time.process_time()
            rows[-1][name] = runner.time(1)[0] / 1e6
            busy[-1][name] = (time.process_time() - begun) / rows[-1][name]
        bar.update()
    ratios = {name: np.quantile([row["naive"] / row[name] for row in rows], (0.25, 0.5, 0.75)) for name in runners}
    return OneThread(
        stages=num_stages,
        microbatches=num_microbatches,
        seconds={name: float(np.median([row[name] for row in rows])) for name in runners},
        cores={name: float(np.median([row[name] for row in busy])) for name in runners},
        faster={name: float(found[1]) for name, found in ratios.items()},
        quartiles={name: (float(found[0]), float(found[2])) for name, found in ratios.items()},
        ideal=ideal(num_microbatches, num_stages),
    )
