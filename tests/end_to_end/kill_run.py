"""A training run that test_kill.py kills: a plain loop, a CheckpointManager, and a line for each thing it finds."""

import hashlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.dynamic_scale import DynamicScale

import jaxpp

WIDTH, LAYERS, BATCH = 32, 5, 8


def loss_fn(params, model_state, batch, key):
    """Five layers on two stages, so that the slices of ``w`` differ in size; the largest activation is the model state."""
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["w"])
    x = x * jax.random.bernoulli(key, 0.9, x.shape)
    return ((x @ params["out"]) ** 2).mean(), ({"top": jnp.maximum(0.99 * model_state["top"], jax.lax.stop_gradient(x.max()))}, {})


def init(key):
    w = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    return {"w": w, "out": jnp.ones((WIDTH, 2))}, {"top": jnp.zeros(())}


def batch_of(step):
    return np.random.default_rng((7, step)).normal(size=(BATCH, WIDTH)).astype("float32")


def digest(state):
    """The bits of every leaf, and the number of steps."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
        found.update(f"{jax.tree_util.keystr(path)}{np.asarray(leaf).dtype}{np.shape(leaf)}".encode() + np.asarray(leaf).tobytes())
    return found.hexdigest()


def train(folder: Path, steps: int, every: int, *, told: bool, host: str | None):
    """Train; with ``told`` the bits of every state that is saved are printed too."""
    scale = None if host else DynamicScale(scale=1024.0, growth_interval=5)  # that would make all updates wait for all stages
    options = {"num_stages": 2, "num_microbatches": 4, "has_state": True, "loss_scale": scale, "host": host}
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), **options)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        newest = manager.latest_step()
        if newest is None:
            state = pipe.init(init, jax.random.key(0), batch_of(0))
        else:
            target = pipe.abstract_state(init, jax.random.key(0), batch_of(0))
            state = manager.restore(newest, args=ocp.args.StandardRestore(target))
        print("found", newest, digest(state), flush=True)
        while state.step < steps:
            key = jax.random.fold_in(jax.random.key(1), state.step)
            state, _ = pipe.step(state, batch_of(state.step), key)
            if state.step % every == 0:
                manager.save(state.step, args=ocp.args.StandardSave(state))
                if told:
                    print("saved", state.step, digest(state), flush=True)
    print("done", state.step, digest(state), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    train(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        told="told" in sys.argv,
        host="params" if "params" in sys.argv else None,
    )
