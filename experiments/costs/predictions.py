"""Does a step take what the estimated costs say? Predicted over measured, on the clock of devices with cores of their own.

Estimates are of what a device could do, so one factor for each model makes them seconds of this machine: all programs of a step,
measured, over all of them, estimated. What is left to compare is how the work is divided among stages, forwards and backwards.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import check_batch, check_names, check_numbers, check_writable
from experiments.results import Findings, columns, command, noted
from experiments.zoo.case import Case
from experiments.zoo.main import CASES
from jaxpp.schedule import Simulation, make, simulate
from jaxpp.schedule.action import Kind

__all__ = ["Config", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Predict the step of each model by estimated costs, and measure it on the clock of devices of their own."


@dataclass(frozen=True)
class Row:
    """One model: seconds of a step, predicted and measured, and how many times as fast as one device it is.

    Attributes:
        name: of the model.
        predicted: by the costs.
        measured: on the isolated clock.
        said: how many times as fast as one device it is, says ``print(pipe.stages)``.
        speed: the same, measured: all work over the length of the step.
    """

    name: str
    predicted: float
    measured: float
    said: float
    speed: float


@dataclass(frozen=True)
class Config:
    """The models and how they run.

    Attributes:
        models: names of models of the zoo, or cnn, autoencoder, mixer, encoder; all unless given.
        stages: pipeline stages.
        microbatches: parts of a batch.
        batch: examples a step.
        steps: of which each program's time is the median.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ()
    stages: int = 4
    microbatches: int = 8
    batch: int = 256
    steps: int = 7
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, {**CASES, **_OTHERS})
        check_numbers(self)
        check_batch(self)


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model.
    """

    config: Config
    rows: tuple[Row, ...]


def run(config: Config) -> Result:
    """A row for each model.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a model that cannot be cut into so many stages.
    """
    check_writable("--json", config.json)
    ensure_devices(config.stages)
    cases: Mapping[str, Callable[[int, int], Case]] = {**CASES, **_OTHERS}
    rows = []
    for name in config.models or cases:
        with noted(f"This was the model {name}."):
            rows.append(_row(name, cases[name](config.batch, 0), config.stages, config.microbatches, config.steps))
    return Result(config, tuple(rows))


def table(result: Result) -> str:
    """The result as text: a row a model."""
    cells = [["model", "predicted, ms", "measured, ms", "ratio", "times one device, predicted", "measured"]]
    for row in result.rows:
        seconds = [f"{1e3 * row.predicted:.2f}", f"{1e3 * row.measured:.2f}", f"{row.predicted / row.measured:.2f}"]
        cells.append([row.name, *seconds, f"{row.said:.2f}", f"{row.speed:.2f}"])
    return "\n".join(columns(cells))


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("costs.predictions", Config, DESCRIPTION, run, table)


def _row(name: str, case: Case, num_stages: int, num_microbatches: int, steps: int) -> Row:
    pipe = jaxpp.Pipeline(
        case.loss_fn,
        optax.adam(case.rate),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        has_state=case.has_state,
        weight=case.weight,
    )
    batch, key = case.batch(0), jax.random.key(1) if case.takes_key else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that normalise by the microbatch, or whose stages are uneven
        state = pipe.init(case.init, jax.random.key(0), batch)
    profile = pipe.profile(state, batch, key, num_steps=steps, clock="isolated")
    schedule = make("1f1b", num_ranks=num_stages, num_microbatches=num_microbatches)
    costs = [(stage.costs["F"], stage.costs["B"]) for stage in pipe.stages]
    times = {kind: [_seconds(profile, kind, stage) for stage in range(num_stages)] for kind in (Kind.F, Kind.B)}
    factor = sum(map(sum, times.values())) / sum(map(sum, costs))
    predicted = _simulated(schedule, *([factor * cost[k] for cost in costs] for k in (0, 1)))
    measured = _simulated(schedule, times[Kind.F], times[Kind.B])
    speed = float(sum(measured.busy) / measured.makespan)
    return Row(name, float(predicted.makespan), float(measured.makespan), pipe.stages.speed_up, speed)


def _seconds(profile: Any, kind: Kind, stage: int) -> float:
    own = [span for span in profile.isolated if span.action and span.action[:2] == (stage, kind) and not span.sends]
    return float(np.median([span.end - span.start for span in own]))


def _simulated(schedule: Any, forward: list[float], backward: list[float]) -> Simulation:
    return simulate(schedule, forward=forward, input_grad=backward, weight_grad=0)


class _CNN(nn.Module):
    """The network of Flax's MNIST example, four convolutions deep."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32, 32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


class _Autoencoder(nn.Module):
    """That of Flax's VAE example, without the noise."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (512, 256, 16, 256, 512):
            x = nn.gelu(nn.Dense(features)(x))
        return nn.sigmoid(nn.Dense(64)(x))


class _Mixer(nn.Module):
    """An MLP-Mixer over the rows of an image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x[..., 0])
        for _ in range(6):
            tokens = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(32)(tokens))).swapaxes(1, 2)
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


class _Encoder(nn.Module):
    """A transformer over the rows of an image, as in Flax's examples of natural language."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x[..., 0])
        for _ in range(6):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


def _classifier(model: nn.Module) -> Callable[[int, int], Case]:
    def case(size: int, seed: int) -> Case:
        rng = np.random.default_rng(seed)
        batch = {"x": rng.normal(size=(size, 8, 8, 1)).astype("float32"), "y": rng.integers(0, 10, size, "int32")}

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            logits: Any = model.apply(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        return Case("", loss_fn, loss_fn, lambda key: model.init(key, batch["x"][:1]), lambda _: batch, (), rate=1e-3)

    return case


def _reconstruction(size: int, seed: int) -> Case:
    model, batch = _Autoencoder(), np.random.default_rng(seed).uniform(size=(size, 64)).astype("float32")

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((model.apply(params, batch) - batch) ** 2)

    return Case("", loss_fn, loss_fn, lambda key: model.init(key, batch[:1]), lambda _: batch, (), rate=1e-3)


_OTHERS: dict[str, Callable[[int, int], Case]] = {
    "cnn": _classifier(_CNN()),
    "autoencoder": _reconstruction,
    "mixer": _classifier(_Mixer()),
    "encoder": _classifier(_Encoder()),
}


if __name__ == "__main__":
    main()
