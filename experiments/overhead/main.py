"""What does the Python scheduler cost? A pipelined step against a plain ``jax.jit`` step, in one run.

Every figure is a median over interleaved rounds, so that what else the machine does falls on both sides. See README.md.
"""

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxpp
from experiments.devices import ensure_devices
from experiments.results import ConfigError, check_writable, report
from jaxpp.errors import JaxppError
from jaxpp.runtime.progress import progress
from models.mlp import MLP

__all__ = ["Config", "Result", "main", "plain_step", "run"]


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
class Result:
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
        devices: what it ran on.
        versions: of Python and JAX.
    """

    config: Config
    pipelined: float
    plain: float
    plain_kind: str
    ratio: float
    host_per_action: float
    compile_pipelined: float
    compile_plain: float
    devices: str
    versions: dict[str, str]


def plain_step(loss_fn: Any, optimizer: optax.GradientTransformation, num_microbatches: int, *, scan: bool) -> Callable[..., Any]:
    """The same step on one device: one ``jax.jit`` over the loop of microbatches, unrolled or as ``lax.scan``."""
    grad = jax.value_and_grad(loss_fn)

    def add(params: Any, total: Any, piece: Any) -> Any:
        return jax.tree.map(lambda a, b: a + b / num_microbatches, total, grad(params, piece))

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)
        total = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        if scan:
            total, _ = jax.lax.scan(lambda total, piece: (add(params, total, piece), None), total, pieces)
        else:
            for i in range(num_microbatches):
                total = add(params, total, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        loss, grads = total
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(grads))

    return jax.jit(step, donate_argnums=(0, 1))


@dataclass
class Runner:
    """A kind of step and its state; ``time`` runs some and says how long one took."""

    step: Callable[[Any], tuple[Any, Any]]
    state: Any
    compile_seconds: float = 0.0

    def __post_init__(self):
        start = time.perf_counter()
        self.time(1)
        self.compile_seconds = time.perf_counter() - start

    def time(self, steps: int, warm_up: int = 0) -> tuple[float, float]:
        """Microseconds of a step, and of the host's part of it."""
        if warm_up:
            self.time(warm_up)
        host, start = 0.0, time.perf_counter()
        for _ in range(steps):
            begun = time.perf_counter()
            self.state, reported = self.step(self.state)
            host += time.perf_counter() - begun
            jax.block_until_ready((self.state, reported))
        return (time.perf_counter() - start) / steps * 1e6, host / steps * 1e6


def make_runners(config: Config) -> dict[str, Runner]:
    """The pipelined step and the two plain ones, compiled and warm."""
    model = MLP(width=config.width, depth=config.depth)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(config.batch, config.width)), rng.integers(0, 2, config.batch)
    batch = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, config.width)))["params"]

    optimizer = {"sgd": optax.sgd, "adam": optax.adam}[config.optimizer](1e-3)
    key, count = jax.random.key(0), config.microbatches
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=config.stages, num_microbatches=count, schedule=config.schedule)
    runners = {"pipelined": Runner(lambda state: pipe.step(state, batch), pipe.init(init, key, batch))}
    for kind, scan in (("unrolled", False), ("scan", True)):
        step, params = plain_step(loss_fn, optimizer, count, scan=scan), jax.jit(init)(key)
        runners[kind] = Runner(lambda state, step=step: step(*state, batch), (params, optimizer.init(params)))
    return runners


def run(config: Config) -> Result:
    """Measure, in interleaved rounds."""
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
        devices=f"{len(jax.devices())} {jax.devices()[0].device_kind}",
        versions={"python": platform.python_version(), "jax": jax.__version__},
    )


def main() -> None:
    """Read the command line, run, print a summary, and write the line of JSON."""
    config = tyro.cli(Config, description="What does the Python scheduler cost?")
    ensure_devices(config.stages)
    try:
        check_writable("--json", config.json)
        result = run(config)
    except (ConfigError, JaxppError) as error:
        raise SystemExit(f"overhead: {error}") from None
    lines = [
        f"pipelined step  {result.pipelined:10.0f} us   compile {result.compile_pipelined:.1f} s",
        f"plain step      {result.plain:10.0f} us   compile {result.compile_plain:.1f} s   ({result.plain_kind})",
        f"ratio           {result.ratio:10.2f}",
        f"host per action {result.host_per_action:10.1f} us",
    ]
    report("\n".join(lines), json.dumps(dataclasses.asdict(result), default=str), config.json)
