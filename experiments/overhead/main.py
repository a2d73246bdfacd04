"""What does the Python scheduler cost? See README.md beside this file."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

import jaxpp
from experiments.devices import ensure_devices
from jaxpp.verify import oracle  # noqa: F401
from models.mlp import MLP


@dataclass(frozen=True)
class Config:
    """The MLP and how it is run.

    Attributes:
        width: features of each hidden layer, and of the input.
        depth: hidden layers.
        batch: examples a step.
        stages: pipeline stages.
        microbatches: parts of the batch.
        schedule: order of the actions.
        repeats: interleaved pairs of measurements.
    """

    width: int = 128
    depth: int = 16
    batch: int = 32
    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    repeats: int = 100


def plain_step(loss_fn, optimizer, num_microbatches: int, *, scan: bool) -> Callable[..., Any]:
    grad = jax.value_and_grad(loss_fn)

    def step(params, opt_state, batch):
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

        def add(total, piece):
            return jax.tree.map(lambda a, b: a + b / num_microbatches, total, grad(params, piece)), None

        if scan:
            (loss, grads), _ = jax.lax.scan(add, zero, pieces)
        else:
            loss, grads = zero
            for i in range(num_microbatches):
                (loss, grads), _ = add((loss, grads), jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    return jax.jit(step, donate_argnums=(0, 1))


def run(config: Config):
    model = MLP(width=config.width, depth=config.depth)
    x = np.random.default_rng(0).normal(size=(config.batch, config.width)).astype(np.float32)
    y = np.arange(config.batch) % 2
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def init(key):
        return model.init(key, jnp.zeros((1, config.width)))["params"]

    optimizer = optax.adam(1e-3)
    pipe = jaxpp.Pipeline(
        loss_fn, optimizer, num_stages=config.stages, num_microbatches=config.microbatches, schedule=config.schedule
    )
    t = time.perf_counter()
    state = pipe.init(init, jax.random.key(0), batch)
    state, m = pipe.step(state, batch)
    jax.block_until_ready(m.loss)
    print("compile pipe", time.perf_counter() - t)
    print(pipe.stages)
    plains = {}
    for scan in (False, True):
        t = time.perf_counter()
        params = jax.jit(init)(jax.random.key(0))
        carry = (params, optimizer.init(params))
        step = plain_step(loss_fn, optimizer, config.microbatches, scan=scan)
        *carry, loss, _ = step(*carry, batch)
        jax.block_until_ready(loss)
        print("compile plain", scan, time.perf_counter() - t)
        plains[scan] = [step, carry]
    times = {"pipe": [], False: [], True: [], "host": []}
    for _ in tqdm(range(config.repeats)):
        t = time.perf_counter()
        state, m = pipe.step(state, batch)
        t2 = time.perf_counter()
        jax.block_until_ready(state)
        times["pipe"].append(time.perf_counter() - t)
        times["host"].append(t2 - t)
        for scan in (False, True):
            step, carry = plains[scan]
            t = time.perf_counter()
            *carry, loss, _ = step(*carry, batch)
            jax.block_until_ready(carry)
            times[scan].append(time.perf_counter() - t)
            plains[scan][1] = carry
    med = {k: float(np.median(v)) * 1e6 for k, v in times.items()}
    print(
        med,
        "ratio",
        med["pipe"] / min(med[True], med[False]),
        "host per action",
        med["host"] / (2 * config.stages * config.microbatches),
    )
    return pipe, state, batch


if __name__ == "__main__":
    config = tyro.cli(Config)
    ensure_devices(config.stages)
    run(config)
