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
# # Find the best pipeline
#
# The number of microbatches and the schedule that train fastest are found by testing. `jaxpp.tune` does the testing: it measures
# the parts of a step on your devices, simulates all candidates with these numbers, and runs the best few.

# %%
import flax.linen as nn
import jax
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# A classifier of handwritten digits, and a batch of the size that a step will take.

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}
layers = [layer for _ in range(8) for layer in (nn.Dense(128), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])
optimizer = optax.adamw(1e-3)


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def init(key):
    return model.init(key, batch["x"])


# %% [markdown]
# ## Tune
#
# Two schedules and two numbers of microbatches keep this recipe short. Leave both arguments out to have all schedules looked at.

# %%
tuning = jaxpp.tune(loss_fn, optimizer, init, batch, schedules=("gpipe", "1f1b"), num_microbatches=(4, 8))
print(tuning)

# %%
tuning.figure()

# %% [markdown]
# ## Train
#
# `tuning.best` holds the options. Keep them in your script: the next run then needs no tuning.

# %%
print(tuning.best)
pipe = jaxpp.Pipeline(loss_fn, optimizer, **tuning.best)
state = pipe.init(init, jax.random.key(0), batch)
pipe.verify(state, batch)
first = float(pipe.evaluate(state, batch).loss)
for _ in range(10):
    state, metrics = pipe.step(state, batch)
print(f"loss: {first:.3f} before, {float(metrics.loss):.3f} after ten steps")
assert metrics.loss < first

# %% [markdown]
# ## With a limit on memory
#
# Candidates that do not fit are left out, and if the fastest does not fit, recomputing and offloading are tried as well.

# %%
lean = jaxpp.tune(loss_fn, optimizer, init, batch, schedules=("gpipe", "1f1b"), num_microbatches=(4, 8), hbm="2MiB")
peaks = lean.pipeline().forecast(jax.eval_shape(init, jax.random.key(0)), batch).peaks
print("fullest device:", max(peaks.values()), "bytes")
assert max(peaks.values()) <= 2 * 2**20

# %% [markdown]
# ## What to look out for
#
# - Tune on the devices that you train on, while nothing else runs there. Forced CPU devices share their cores, so on a laptop fewer
#   microbatches and fewer stages win than on GPUs.
# - What was measured is kept: the second call above measured little again.
# - `seconds=60` limits the search; `print(tuning)` says what was not looked at.
# - [The guide](../guide/tune.md) explains the table, the figure, and what is not looked at.
