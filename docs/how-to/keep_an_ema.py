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
# # Keep an EMA of the parameters
#
# An exponential moving average (EMA) of the parameters often evaluates better than the parameters themselves. The average is a
# second tree that follows `state.params` after every step. With jaxpp the average needs no code for several devices: each of its
# leaves lives beside the parameter that it follows.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
batches = [{name: leaf[k : k + 128] for name, leaf in digits.items()} for k in range(0, 1280, 128)]
test = {name: leaf[1280:] for name, leaf in digits.items()}
layers = [layer for _ in range(4) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=4)
init_params = jax.jit(model.init)(jax.random.key(0), batches[0]["x"])
state = pipe.init(init_params, batches[0])

# %% [markdown]
# `pipe.step` reuses the buffers of the state that it is given. A second name for `state.params` is therefore gone after the next
# step:

# %%
old_params = state.params  # a second name, not a copy
state, metrics = pipe.step(state, batches[0])
try:
    pipe.evaluate(state._replace(params=old_params), test)
except ValueError as error:
    print(error)

# %% [markdown]
# `jax.tree.map(jnp.copy, ...)` makes the copy that lives on. After that, `optax.incremental_update` makes a new tree in each
# step, `step_size * new + (1 - step_size) * old`, leaf by leaf on the device of the leaf.

# %%
state = pipe.init(init_params, batches[0])
ema = jax.tree.map(jnp.copy, state.params)
for batch in 6 * batches:
    state, metrics = pipe.step(state, batch)
    ema = optax.incremental_update(state.params, ema, step_size=0.1)

# %% [markdown]
# To evaluate the average, put it in the place of the parameters. `evaluate` leaves the state as it is, so training can go on.

# %%
last = pipe.evaluate(state, test).loss
averaged = pipe.evaluate(state._replace(params=ema), test).loss
print(f"test loss: {last:.4f} with the last parameters, {averaged:.4f} with their average")
assert averaged < last

# %% [markdown]
# The same loop in plain JAX, on one device, gives the same average:

# %%
optimizer = optax.adam(1e-2)
params, opt_state, plain_ema = init_params, optimizer.init(init_params), init_params
grad_fn = jax.jit(jax.grad(loss_fn))
for batch in 6 * batches:
    updates, opt_state = optimizer.update(grad_fn(params, batch), opt_state, params)
    params = optax.apply_updates(params, updates)
    plain_ema = optax.incremental_update(params, plain_ema, step_size=0.1)

for found, wanted in zip(jax.tree.leaves(ema), jax.tree.leaves(plain_ema), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
print("devices of the average:", *sorted({str(leaf.device) for leaf in jax.tree.leaves(ema)}))

# %% [markdown]
# ## What to look out for
#
# - The average costs the memory of the parameters once more, on each device for its own stages.
# - Do not wrap the update in one `jax.jit` over the whole tree: the leaves live on different devices, and JAX refuses to mix
#   them. A `jax.jit` around the function of one leaf, given to `jax.tree.map`, works.
# - `optax.ema` is something else: it averages the *updates* inside an optimizer.
# - To save the average with the state, give Orbax `{"state": state, "ema": ema}`, and restore to `{"state": target, "ema":
#   target.params}`, where `target` is from `pipe.abstract_state`; see [Save and resume](save_and_resume.py).
# - Alternatively, `pipe.step(..., donate=False)` keeps the whole old state alive, with its optimizer state.
