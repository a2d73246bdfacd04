"""What does the Python scheduler cost? A pipelined step against a plain ``jax.jit`` step, in one run.

Every figure is a median over interleaved rounds, so that what else the machine does falls on both sides. See README.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.plain import Runner, plain_step
from experiments.problems import mlp
from experiments.results import Findings, command
from jaxpp.runtime.progress import progress

__all__ = ["Config", "Result", "main", "run", "summary"]


@dataclass(frozen=True)
class Config:
    """The MLP and how it is run.

    Attributes:
        width: features of each hidden layer, and of the input.
        depth: hidden layers.
        batch: examples a step; a multiple of the microbatches.
        stages: pipeline stages.
        microbatches: parts of the batch.
        schedule: order of the actions.
        optimizer: sgd, the least work, or adam, with two moments a parameter and a count.
        rounds: interleaved rounds.
        steps: steps of each kind timed in a round.
        warm_up: steps before those, not timed: the other kind has emptied the caches, which training never does.
        json: file to add the line of results to.
    """

    width: int = 128
    depth: int = 16
    batch: int = 32
    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    optimizer: Literal["sgd", "adam"] = "adam"
    rounds: int = 20
    steps: int = 30
    warm_up: int = 20
    json: Path | None = None


@dataclass(frozen=True)
class Result(Findings):
    """Medians over the rounds; times in microseconds, compile times in seconds.

    Attributes:
        config: what was run.
        pipelined: one pipelined step.
        plain: one plain step, the faster of the two kinds.
        plain_kind: ``unrolled`` or ``scan``.
        ratio: pipelined / plain, the median of the rounds' ratios.
        host_per_action: host time of a pipelined step, divided by its actions.
        compile_pipelined: tracing, compiling and running the first step.
        compile_plain: the same of the plain step.
    """

    config: Config
    pipelined: float
    plain: float
    plain_kind: str
    ratio: float
    host_per_action: float
    compile_pipelined: float
    compile_plain: float


def make_runners(config: Config) -> dict[str, Runner]:
    """The pipelined step and the two plain ones, compiled and warm."""
    problem = mlp(config.width, config.depth, config.batch)
    batch, loss_fn = jax.tree.map(jax.numpy.asarray, problem.batch), problem.loss_fn
    optimizer = {"sgd": optax.sgd, "adam": optax.adam}[config.optimizer](1e-3)
    key, count = jax.random.key(0), config.microbatches
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=config.stages, num_microbatches=count, schedule=config.schedule)
    runners = {"pipelined": Runner(lambda state: pipe.step(state, batch), pipe.init(problem.init, key, batch))}
    for kind, scan in (("unrolled", False), ("scan", True)):
        step, params = plain_step(loss_fn, optimizer, count, scan=scan), jax.jit(problem.init)(key)
        runners[kind] = Runner(lambda state, step=step: step(state, batch), (params, optimizer.init(params)))
    return runners


def run(config: Config) -> Result:
    """Measure, in interleaved rounds."""
    ensure_devices(config.stages)
    runners = make_runners(config)
    rows = [
        {name: runner.time(config.steps, config.warm_up) for name, runner in runners.items()}
        for _ in progress(range(config.rounds), desc="rounds")
    ]
    medians = {name: float(np.median([row[name][0] for row in rows])) for name in runners}
    kind = min(("unrolled", "scan"), key=lambda name: medians[name])
    host = float(np.median([row["pipelined"][1] for row in rows]))
    return Result(
        config=config,
        pipelined=medians["pipelined"],
        plain=medians[kind],
        plain_kind=kind,
        ratio=float(np.median([row["pipelined"][0] / row[kind][0] for row in rows])),
        host_per_action=host / (2 * config.stages * config.microbatches),
        compile_pipelined=runners["pipelined"].compile_seconds,
        compile_plain=runners[kind].compile_seconds,
    )


def summary(result: Result) -> str:
    """The result as four lines."""
    return "\n".join(
        [
            f"pipelined step  {result.pipelined:10.0f} us   compile {result.compile_pipelined:.1f} s",
            f"plain step      {result.plain:10.0f} us   compile {result.compile_plain:.1f} s   ({result.plain_kind})",
            f"ratio           {result.ratio:10.2f}",
            f"host per action {result.host_per_action:10.1f} us",
        ]
    )


def main() -> None:
    """Read the command line, run, print a summary, and write the line of JSON."""
    command("overhead", Config, "What does the Python scheduler cost?", run, summary)
