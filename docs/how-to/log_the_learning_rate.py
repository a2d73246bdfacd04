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
# # Log the learning rate
#
# A training curve is hard to read without the learning rate and the norm of the gradient beside it. The norm of the gradient
# comes with every step, as `metrics.grad_norm`. The learning rate is kept in the optimizer state if the optimizer is made with
# `optax.inject_hyperparams`. This recipe logs both without making the devices wait.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# A small classifier of handwritten digits, to have something to train:

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:512].astype("f4") / 16, "y": labels[:512]}
layers = [layer for _ in range(4) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# %% [markdown]
# `inject_hyperparams` wraps the function that makes the optimizer. Its hyperparameters, the learning rate among them, then become
# entries of the optimizer state.

# %%
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=10, decay_steps=60)
optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4)
init_params = jax.jit(model.init)(jax.random.key(0), batch["x"])
state = pipe.init(init_params, batch)

# %% [markdown]
# `metrics.step` is the number of the step, which the host counts: reading it does not wait. It is also in `state.step`, and is
# saved and restored with the state. After a step, the optimizer state holds the learning rate that this step used. The next step
# reuses the buffers of the state, so the loop keeps a copy; `jnp.copy` does not wait for the device. Metrics are never reused and
# need no copy.

# %%
history = []
while state.step < 60:
    state, metrics = pipe.step(state, batch)
    learning_rate = jnp.copy(state.opt_state.hyperparams["learning_rate"])
    history.append((metrics.step, metrics.loss, metrics.grad_norm, learning_rate))

steps, loss, grad_norm, learning_rate = np.array(jax.device_get(history)).T
print(f"last step: loss {loss[-1]:.4f}, learning rate {learning_rate[-1]:.2e}")

# %%
curves = {"loss": loss, "norm of the gradient": grad_norm, "learning rate": learning_rate}
fig, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
for ax, (name, values) in zip(axes, curves.items(), strict=True):
    ax.plot(steps, values)
    ax.set(title=name, xlabel="step")

# %% [markdown]
# The logged values are those of plain JAX: the schedule at each step, and the norm of the gradient on one device.

# %%
np.testing.assert_allclose(learning_rate, [schedule(step - 1) for step in steps], rtol=1e-5)
grads = jax.grad(loss_fn)(init_params, batch)
np.testing.assert_allclose(grad_norm[0], optax.tree.norm(grads), rtol=1e-5)

# %% [markdown]
# ## What to look out for
#
# - `float(metrics.loss)` waits until the step is done. Read metrics at the end, as above, or every so many steps; if you read
#   them after each step, the host cannot prepare the next step while the devices work.
# - `metrics.grad_norm` is the norm before the optimizer clips the gradient. Parameters that the optimizer freezes are left out,
#   because their gradients are not computed.
# - If the learning rate is a schedule of the step alone, `schedule(metrics.step - 1)` on the host gives the same number, and
#   `inject_hyperparams` is not needed. (With `loss_scale`, steps that were skipped count in `metrics.step` and not in optax.)
# - Inside an `optax.chain` the hyperparameters are at the position of the wrapped optimizer:
#   `state.opt_state[1].hyperparams["learning_rate"]` if it is the second in the chain.
