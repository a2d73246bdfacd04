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
# small class for the first part, `EarlyStopping`. For the second part, copy the parameters to the host: a training step reuses
# the buffers of the state that it is given.

# %%
import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
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
for _ in range(200):
    state, metrics = pipe.step(state, train)
    losses.append(float(pipe.evaluate(state, held_out).loss))
    early_stop = early_stop.update(losses[-1])
    if early_stop.has_improved:
        best = jax.device_get(state.params)  # a copy on the host
    if early_stop.should_stop:
        break
print(f"stopped after {len(losses)} steps")
print(f"best loss {early_stop.best_metric:.4f}, last loss {losses[-1]:.4f}")

# %%
fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.plot(losses, label="held-out loss")
ax.axhline(early_stop.best_metric, color="gray", linestyle="dotted", label="best")
ax.set(xlabel="step", xticks=range(0, len(losses), 5))
_ = ax.legend()

# %% [markdown]
# The best parameters, put in the place of the last ones, have the best loss again:

# %%
restored = state._replace(params=best)
loss = pipe.evaluate(restored, held_out).loss
np.testing.assert_allclose(loss, early_stop.best_metric, rtol=1e-6)
assert len(losses) < 200 and early_stop.best_metric < losses[-1]

# %% [markdown]
# ## What to look out for
#
# - `best = state.params` without a copy is gone after the next step. `jax.device_get` copies to the memory of the host. If the
#   devices have room, `jax.tree.map(jnp.copy, state.params)` is faster: every leaf stays on its device.
# - To continue training from the best parameters, keep the optimizer state too: `best = jax.device_get(state)`, and later
#   `pipe.step(best, batch)`.
# - Here every step is evaluated, which waits for the devices. In a real run, evaluate once in an epoch.
