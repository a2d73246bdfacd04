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
# # 4. The naive pipeline and its bubble
#
# Chapter 3 divided the model among four devices. The memory was divided; the time was not. In this chapter we look at when each
# device works and when it waits, and learn the two pictures with which people talk about pipelines.
#
# First, the problem of the chapters before, with the loss and the gradients of the monolith.

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


# %%
class MLP(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(128) for _ in range(7)] + [nn.Dense(10)]

    def __call__(self, x, first=0, last=8):  # runs the layers first, ..., last - 1
        for k in range(first, last):
            x = self.layers[k](x)
            x = nn.relu(x) if k < 7 else x
        return x


# %%
digits = load_digits()
batch = {"x": jnp.asarray(digits.data[:1024] / 16, "float32"), "y": jnp.asarray(digits.target[:1024])}
params = MLP().init(jax.random.key(0), batch["x"])["params"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(params, batch):
    return cross_entropy(MLP().apply({"params": params}, batch["x"]), batch["y"])


loss, grads = jax.value_and_grad(loss_fn)(params, batch)

# %% [markdown]
# ## Who does what, and when
#
# - An **action** is what one stage does at one time. It is written `2F0`: stage 2, forward (`F`), part 0 of the batch. `2B0` is
#   the backward (`B`) of the same stage and part. A part of the batch is called a **microbatch**. In this chapter the whole batch
#   is one part, so the last number is always 0.
# - A **rank** is one of the devices that run the pipeline, and each rank owns one or more stages.
# - A **schedule** says which rank runs which actions, in which order. It is plain data: one row of actions for each rank.
#
# What we did in chapter 3 was a schedule too. It is called **naive**, and jaxpp can print it.

# %%
naive = jaxpp.schedule.make("naive", num_ranks=4, num_microbatches=1)
print(naive)

# %% [markdown]
# Time goes to the right, in units. A forward takes one unit and a backward two, because a backward computes two things: the
# gradients of the stage's parameters, and the cotangent of the stage's input. Each costs about as much as the forward.
#
# An action needs its input. `2F0` needs the activation that `1F0` sends, and `2B0` needs the cotangent that `3B0` sends. Here is
# the same schedule as a picture; look at the grey.

# %%
naive.figure()

# %% [markdown]
# ## The bubble
#
# The time from the first start to the last end is the **makespan**: 12 units. Four ranks have 4 x 12 = 48 units of time together,
# and work in 12 of them. The rest is the **bubble**, the part of ranks x makespan in which ranks are idle. `simulate` counts for
# us.

# %%
result = jaxpp.schedule.simulate(naive)
print("busy units of each rank:", *result.busy)
print("idle units of each rank:", *result.idle)
print("bubble:", sum(result.idle), "/", 4 * result.makespan, "=", result.bubble_fraction)

# %% [markdown]
# In general, with p ranks: at any moment exactly one rank works and p - 1 ranks wait. Therefore
#
# `bubble = (p - 1) / p`
#
# For four ranks that is 0.75. Each further device makes the pipeline hold a larger model, and makes none of it faster. Look at
# how little of each bar is blue.

# %%
sizes = range(1, 13)
schedules = [jaxpp.schedule.make("naive", num_ranks=p, num_microbatches=1) for p in sizes]
bubbles = [jaxpp.schedule.simulate(schedule).bubble_fraction for schedule in schedules]
np.testing.assert_allclose(bubbles, [(p - 1) / p for p in sizes])
fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.bar(sizes, 1 - np.array(bubbles), color="#0072B2", label="working")
axes.bar(sizes, bubbles, bottom=1 - np.array(bubbles), color="#EFEFEF", label="bubble")
axes.set(xticks=sizes, xlabel="ranks", ylabel="share of time")
fig.legend(frameon=False, loc="outside upper right", ncols=2)
plt.show()

# %% [markdown]
# Could we reduce the bubble by making the stages more equal? No. Whatever the stages cost, one works while the others wait. In
# the next cell, stage 1 costs five times as much as stage 0.

# %%
uneven = jaxpp.schedule.simulate(naive, forward=[1, 5, 2, 3], input_grad=[1, 5, 2, 3], weight_grad=[1, 5, 2, 3])
print("makespan:", uneven.makespan, " bubble:", uneven.bubble_fraction)
assert uneven.bubble_fraction == 0.75

# %% [markdown]
# ## The pebble graph: time and memory in one picture
#
# A timeline shows when ranks work. It does not show what they hold. The **pebble graph** shows both. It has one row for each
# stage's forward, from top to bottom as the data flows, and then one row for each stage's backward. Under each forward row lie
# pebbles. A pebble stands for the residuals of one microbatch on this stage: it is put down when the forward starts, and taken
# away when the backward ends. (The name comes from a game on graphs, in which a pebble on a node means that its value is in
# memory.)

# %%
naive.pebble_figure()

# %% [markdown]
# Look at the two ends. Stage 0 puts its pebble down first and takes it away last: its residuals lie there during the whole step,
# waiting for a cotangent that has to travel all the way to the loss and back. The residuals of stage 3 are used at once. The
# number on the right is the most pebbles that a stage ever holds, here one.
#
# ## Does it really look like that?
#
# Now the same schedule runs on this machine. `jaxpp.Pipeline` cuts the loss into four stages, and `pipe.profile` records one
# step.

# %%
pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=1, schedule="naive")
state = pipe.init(params, batch)
profile = pipe.profile(state, batch)
profile.figure()

# %% [markdown]
# How to read it, from top to bottom:
#
# - The first timeline is what was traced in a real step, on a machine whose cores the devices may have to share.
# - The second timeline is computed. jaxpp has also run steps in which only one program runs at a time, and has measured how
#   long each takes alone. Here every device has cores of its own. The title's numbers are of this timeline.
# - An orange line under a row (`arrives`) is a message on its way to this rank: an activation, a cotangent, or something small
#   such as the labels.
# - Dark grey bars are not actions, but what a step needs around them: at its beginning the batch is split (`begin`), and at its
#   end the gradients are collected (`sums`) and the optimizer changes the parameters (`update`). An update needs the gradients
#   of its stage, and may begin some time after them, since no other rank waits for it.
#
# Both timelines show the staircase of the schedule. Only one device works at a time, so sharing the cores costs little here,
# and on a quiet computer the two take about equally long. But they come from different steps. If the computer is busy with
# other things during some of them, either timeline may be the longer.
#
# Below the timelines is the memory of each device during the first of them. What stays is grey; what comes and goes is green.
# Look at the full green of `residuals`: these are the pebbles, in bytes. They last from a stage's forward to its backward. The
# palest green, `messages`, is memory for messages. Python hands out the work of a step far ahead, and the memory for a message
# is counted from the moment at which its transfer is handed out. So the first device has memory for its cotangent from the end
# of its forward on, long before the cotangent is sent.

# %%
print(f"bubble with equal stages:              {result.bubble_fraction:.1%}")
print(f"bubble with the times of this machine: {profile.bubble_fraction:.1%}")

# %% [markdown]
# The second number is that of the figure's title. The two differ, because transfers and the optimizer take time too, and
# because measured times vary from run to run. And the result is still that of the monolith. `jaxpp.value_and_grad` is called
# like `jax.value_and_grad`, and returns the same loss and gradients.


# %%
def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=4, num_microbatches=1, schedule="naive")
assert_same(grad_fn(params, batch), (loss, grads))
print(f"loss {grad_fn(params, batch)[0]:.6f}, the monolith's {loss:.6f}; the gradients are the same")

# %% [markdown]
# ## Takeaway
#
# A schedule is a row of actions for each rank. In the naive schedule one rank works and all others wait, so the bubble is (p - 1)
# / p, whatever the stages cost. The pebble graph shows what waits with them: residuals, longest on the first stage.
#
# ## Questions
#
# **1.** A model is trained naively on 10 devices. How much faster would it be if all devices could work all the time?
#
# <details><summary>Answer</summary>
#
# Ten times. The bubble is 9/10, so a tenth of ranks x makespan is work. Without the bubble, the same work would take a tenth of
# the time.
#
# </details>
#
# **2.** In the pebble graph, for how many units of time does stage 1 hold its pebble? Count them, then find a formula for stage s
# of p.
#
# <details><summary>Answer</summary>
#
# Nine units: from time 1, when `1F0` starts, to time 10, when `1B0` ends. Stage s holds its pebble during the forwards and
# backwards of the stages s, ..., p - 1. Each stage takes 3 units for both together, so the formula is 3 (p - s).
#
# </details>
#
# **3.** Suppose that sending an activation or a cotangent to the next rank takes one unit of time. What happens to the makespan
# and the bubble for four ranks?
#
# <details><summary>Answer</summary>
#
# Three transfers forward and three backward make the makespan 12 + 6 = 18. The work is still 12 of now 4 x 18 = 72 units, so the
# bubble is 60 / 72 = 83%. Try it: `jaxpp.schedule.simulate(naive, transfer=1)`.
#
# </details>
#
# Next: [5. Microbatches: GPipe](05_gpipe.ipynb)
