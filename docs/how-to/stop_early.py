# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Stop early
#
# Training is stopped when the loss on held-out data has not improved for some time, and the best parameters are kept. Flax has a
# small class for the first part, `EarlyStopping`. For the second part, copy the parameters to the host, because a training step
# reuses the buffers of the state that it is given; or let Orbax keep the best state on the disk.

# %%
import pathlib
import tempfile

import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.early_stopping import EarlyStopping
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# With only 128 examples to learn from, the model soon overfits:

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
train = {name: leaf[:128] for name, leaf in digits.items()}
held_out = {name: leaf[1024:] for name, leaf in digits.items()}
layers = [layer for _ in range(3) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=2, num_microbatches=4)
state = pipe.init(lambda key: model.init(key, train["x"]), jax.random.key(0), train)

# %% [markdown]
# `min_delta` says by how much the loss must improve, and `patience` after how many evaluations without improvement training
# stops.

# %%
early_stop = EarlyStopping(min_delta=1e-3, patience=5)
losses = []
while state.step < 200:
    state, metrics = pipe.step(state, train)
    losses.append(float(pipe.evaluate(state, held_out).loss))
    early_stop = early_stop.update(losses[-1])
    if early_stop.has_improved:
        best = jax.device_get(state)  # a copy on the host
    if early_stop.should_stop:
        break
print(f"stopped after {state.step} steps")
print(f"best loss {early_stop.best_metric:.4f} after step {best.step}, last loss {losses[-1]:.4f}")

# %%
fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.plot(range(1, state.step + 1), losses, label="held-out loss")
ax.plot(best.step, early_stop.best_metric, "o", color="gray", label="best")
ax.set(xlabel="step")
_ = ax.legend()

# %% [markdown]
# The best state has the best loss again. `evaluate` and `step` take it as it is, from the host:

# %%
np.testing.assert_allclose(pipe.evaluate(best, held_out).loss, early_stop.best_metric, rtol=1e-6)
assert state.step < 200 and early_stop.best_metric < losses[-1]

# %% [markdown]
# ## The best state on the disk
#
# Orbax keeps the best checkpoint instead of the newest if it is told how to compare them. `metrics=` stands beside each
# checkpoint, and `best_fn` makes a number of them.

# %%
best_first = {"max_to_keep": 1, "best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
folder = pathlib.Path(tempfile.mkdtemp())  # in a real run, a folder that stays
state = pipe.init(lambda key: model.init(key, train["x"]), jax.random.key(0), train)
with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**best_first)) as manager:
    while state.step < len(losses):
        state, metrics = pipe.step(state, train)
        loss = float(pipe.evaluate(state, held_out).loss)
        manager.save(state.step, args=ocp.args.StandardSave(state), metrics={"loss": loss})

# %%
with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**best_first)) as manager:
    target = pipe.abstract_state(lambda key: model.init(key, train["x"]), jax.random.key(0), train)
    restored = manager.restore(manager.best_step(), args=ocp.args.StandardRestore(target))
    print("kept:", *manager.all_steps(), "with", manager.metrics(manager.best_step()))
assert restored.step == 1 + np.argmin(losses)
np.testing.assert_allclose(pipe.evaluate(restored, held_out).loss, min(losses), rtol=1e-6)

# %% [markdown]
# ## What to look out for
#
# - `best = state` without a copy is gone after the next step. `jax.device_get` copies to the memory of the host. If the devices
#   have room, `jax.tree.map(jnp.copy, state)` is faster: every leaf stays on its device.
# - `jax.device_get(state.params)` takes a third of the memory if only the parameters are of use afterwards; put them in the place
#   of the last ones with `state._replace(params=best)`.
# - With `min_delta`, the step that `EarlyStopping` calls best may be earlier than the step with the very smallest loss, which is
#   the one that Orbax keeps.
# - To resume as well as keep the best, use one manager for the newest checkpoints and one for the best, in two folders.
# - Here every step is evaluated, which waits for the devices. In a real run, evaluate once in an epoch.
