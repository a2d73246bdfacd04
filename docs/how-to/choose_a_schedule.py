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
# # Choose a schedule
#
# A schedule says in which order the devices run the forwards and backwards of the microbatches. All schedules compute the same
# gradients; they differ in idle time (the bubble) and in memory. `jaxpp.schedule.simulate` runs a schedule on a virtual clock,
# without a model or a device, so all of them can be compared in a loop before anything is trained.

# %%
import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp
from jaxpp.schedule import SCHEDULES, make, simulate

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## Compare
#
# The setting: four devices, and eight microbatches in a step. Some schedules run two stages on each device. Their stages are half
# as long, so their costs are halved to keep the comparison fair. Memory is counted in residuals (what a forward keeps for its
# backward) of one microbatch on a whole device.

# %%
results = {}
for name, recipe in SCHEDULES.items():
    part = 1 / recipe.stages_per_rank
    schedule = make(name, num_ranks=4, num_microbatches=8)
    result = simulate(schedule, forward=part, input_grad=part, weight_grad=part, transfer=0.1)
    results[name] = (result.bubble_fraction, max(result.peak_residuals) * part)
    print(f"{name:12} bubble {results[name][0]:6.1%}   residuals {results[name][1]:4.1f}")

# %%
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name, (bubble, memory) in results.items():
    ax.scatter(memory, bubble)
    ax.annotate(name, (memory, bubble), xytext=(6, 4), textcoords="offset points")
ax.set(xlabel="residuals on the fullest device", xlim=(0, 9.5), ylabel="bubble", ylim=(0, 0.85))
ax.yaxis.set_major_formatter("{x:.0%}")

# %% [markdown]
# Down and left is better. The choice depends on the memory that is there: say, for four microbatches on each device.

# %%
fitting = {name: bubble for name, (bubble, memory) in results.items() if memory <= 4}
best = min(fitting, key=fitting.get)
print("smallest bubble with at most four residuals:", best)
make(best, num_ranks=4, num_microbatches=8).figure()

# %% [markdown]
# ## Use it
#
# A schedule with two stages on each device needs twice as many stages. The gradients are those of any other schedule.

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}
layers = [layer for _ in range(8) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


params = jax.jit(model.init)(jax.random.key(0), batch["x"])
num_stages = 4 * SCHEDULES[best].stages_per_rank
grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=num_stages, num_microbatches=8, schedule=best)
loss, grads = grad_fn(params, batch)
print("loss:", loss)

# %%
wanted_loss, wanted = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
for found, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(found, leaf, rtol=1e-5, atol=1e-7)

# %% [markdown]
# ## What to look out for
#
# - More microbatches shrink the bubble of every schedule but `naive`, until the microbatches are too small to keep a device busy.
# - The costs here are a guess. `pipe.profile(state, batch)` measures the real ones on your devices and says why each device was
#   idle.
# - `forward`, `input_grad` and `weight_grad` take one number for each stage too, and `transfer` one number for each boundary, for
#   stages that are not equal.
# - Schedules that split the backward into two halves (`zb-h1`, `zb-h2` and the schedules in the shape of a V) pay for it with
#   more programs in a step. If the stages are very small, the host is the limit, and `1f1b` may be faster.
