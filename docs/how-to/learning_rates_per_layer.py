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
# # Set a learning rate for each layer
#
# Fine-tuning often works better if early layers learn more slowly than late ones. `optax.partition` gives every group of
# parameters its own optimizer. jaxpp traces the optimizer as a whole and runs each part where its parameters live, so the groups
# do not have to agree with the stages.

# %%
import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}
layers = [layer for _ in range(5) for layer in (nn.Dense(48), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


init_params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
print(*init_params)

# %% [markdown]
# The label of a parameter is the name of its layer, and each layer learns 0.6 times as fast as the layer after it. The order of
# the layers is written out, because JAX sorts the keys of dictionaries: `layers_10` comes before `layers_2`. Weight decay leaves
# the biases alone: `mask` says which parameters it changes.

# %%
names = ["layers_0", "layers_2", "layers_4", "layers_6", "layers_8", "layers_10"]
rates = {name: 1e-2 * 0.6**k for k, name in enumerate(reversed(names))}


def by_layer(params):
    return {name: name for name in params}


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


adams = {name: optax.adamw(rate, mask=is_matrix) for name, rate in rates.items()}
optimizer = optax.partition(adams, by_layer)
for name in names:
    print(f"{name:10} {rates[name]:.5f}")

# %%
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=4)
state = pipe.init(init_params, batch)
for _ in range(20):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# The same in plain JAX, and how far each layer has moved:

# %%
params, opt_state = init_params, optimizer.init(init_params)
grad_fn = jax.jit(jax.grad(loss_fn))
for _ in range(20):
    updates, opt_state = optimizer.update(grad_fn(params, batch), opt_state, params)
    params = optax.apply_updates(params, updates)

for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

# %%
last = jax.device_get(state.params)
moved = [np.abs(last[name]["kernel"] - init_params[name]["kernel"]).mean() for name in names]
fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.bar(names, moved)
ax.set(ylabel="mean change of a weight", title="Early layers move less")
assert moved == sorted(moved)

# %% [markdown]
# ## What to look out for
#
# - Each group counts its own steps, so each may have a schedule of its own instead of a number.
# - `optax.clip_by_global_norm` inside a group clips by the norm of that group. To clip by the norm of all gradients, put it in
#   front: `optax.chain(optax.clip_by_global_norm(1.0), optax.partition(...))`.
# - For parameters that shall not learn at all, use `optax.set_to_zero()`, as in [Freeze parameters](freeze_parameters.py), rather
#   than a learning rate of zero: a gradient that is multiplied by zero must still be computed.
