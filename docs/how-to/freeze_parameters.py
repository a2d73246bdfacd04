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
# # Freeze parameters
#
# To train only the last layers of a model, give the others the optimizer `optax.set_to_zero()`. jaxpp sees that their gradients
# are used for nothing. It does not compute them, keeps no optimizer state for them, and runs no backward pass in stages that come
# before the first trained layer.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}
layers = [layer for _ in range(3) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


init_params = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
print(*init_params)

# %% [markdown]
# `optax.partition` (also called `optax.multi_transform`) has an optimizer for each label. A function gives every parameter its
# label; here a label stands for a whole layer.

# %%
trained_layers = {"layers_4", "layers_6"}


def label(params):
    return {name: "trained" if name in trained_layers else "frozen" for name in params}


optimizer = optax.partition({"trained": optax.adam(3e-3), "frozen": optax.set_to_zero()}, label)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=4)
state = pipe.init(init_params, batch)
for _ in range(20):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# The frozen layers keep their bits, and the trained layers learn as in plain JAX:

# %%
params, opt_state = init_params, optimizer.init(init_params)
grad_fn = jax.jit(jax.grad(loss_fn))
for _ in range(20):
    updates, opt_state = optimizer.update(grad_fn(params, batch), opt_state, params)
    params = optax.apply_updates(params, updates)

for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
for name in params.keys() - trained_layers:
    np.testing.assert_array_equal(state.params[name]["kernel"], init_params[name]["kernel"])

# %% [markdown]
# The forecast of the memory shows what freezing saves, compared with the same pipeline that trains everything:

# %%
everything = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=2, num_microbatches=4)
forecasts = pipe.forecast(params, batch), everything.forecast(params, batch)
for frozen, trained in zip(*(forecast.stages for forecast in forecasts), strict=True):
    sizes = f"{frozen.num_bytes / 1024:.0f} KiB, or {trained.num_bytes / 1024:.0f} KiB"
    print(f"stage {frozen.stage}: {sizes} if everything is trained")
    assert frozen.num_bytes < trained.num_bytes

# %% [markdown]
# ## What to look out for
#
# - `metrics.grad_norm` is the norm over the trained parameters, because only their gradients are computed.
# - `optax.chain(optax.adam(...), optax.masked(optax.set_to_zero(), ...))` gives the same updates, but Adam then holds its two
#   moments for the frozen parameters too.
# - Weight decay changes parameters without a gradient. Keep it in the optimizer of the trained label.
# - A frozen layer costs less than one that learns, and nothing goes back to layers before the first that learns. The model is cut
#   by what its layers cost in a step, so the stages of a frozen half have more layers.
