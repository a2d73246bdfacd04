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
# # 5. Microbatches: GPipe
#
# In the naive pipeline, each device waits while the whole batch passes through the others. The remedy is simple: do not send the
# batch in one piece. As soon as device 0 has finished the first part, device 1 begins with it, and device 0 goes on to the second
# part. This is what the GPipe paper proposed (Huang et al., [arXiv 1811.06965](https://arxiv.org/abs/1811.06965)).
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
# ## First of all: is the result still the same?
#
# A part of the batch is a microbatch, as chapter 4 said. Let us forget pipelines for a moment, and compute the gradient of each
# microbatch on one device, one after another, and add them up. This is called **gradient accumulation**. The loss is a mean over
# the examples. So the mean over the batch is the mean of the microbatches' means, if each is weighted with its number of
# examples.


# %%
def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


def accumulate(weights, sizes):
    total, start = jax.tree.map(jnp.zeros_like, (loss, grads)), 0
    for weight, size in zip(weights, sizes, strict=True):
        part = {"x": batch["x"][start : start + size], "y": batch["y"][start : start + size]}
        found = jax.value_and_grad(loss_fn)(params, part)
        total = jax.tree.map(lambda old, new, weight=weight: old + weight * new, total, found)
        start += size
    return total


# %%
sizes = [128] * 8
assert_same(accumulate([1 / 8] * 8, sizes), (loss, grads))
print("8 equal microbatches: the same loss and gradients")

sizes = [512, 256, 128, 128]
assert_same(accumulate([size / 1024 for size in sizes], sizes), (loss, grads))
wrong = accumulate([1 / 4] * 4, sizes)[0]
print(f"4 unequal microbatches: loss {loss:.5f} with weights, {wrong:.5f} as a plain mean, which is wrong")

# %% [markdown]
# Gradient accumulation is exact, up to the rounding of the last digits. It needs two conditions: the loss is a mean over the
# examples, and the layers treat every example alone. Batch normalisation does not; it computes statistics of the microbatch that
# it sees.
#
# ## The schedule
#
# GPipe does all forwards first, and then all backwards. Here it is with four ranks and eight microbatches; the numbers in the
# bars are the microbatches. Compare the grey with the picture of chapter 4.

# %%
gpipe = jaxpp.schedule.make("gpipe", num_ranks=4, num_microbatches=8)
gpipe.figure()

# %% [markdown]
# How large is the bubble for p ranks and m microbatches? Every rank works for 3 m units: a forward and a backward for each
# microbatch. And every rank waits for 3 (p - 1) units in total: before its first forward, between its forwards and its
# backwards, and after its last backward. Look at the two ends: rank 3 waits for 3 units at the beginning and 6 at the end, and
# rank 0 for 9 units in the middle. The bubble is 3 (p - 1) / (3 m + 3 (p - 1)), or
#
# `bubble = (p - 1) / (m + p - 1)`
#
# With one microbatch this is the naive bubble. With many microbatches, it goes to zero. The points in the figure are simulated,
# and the lines are the formula. Look at where each line crosses the dotted line, a bubble of 10%. That takes 9 microbatches for
# 2 ranks, 27 for 4 ranks, and 63 for 8 ranks: 9 (p - 1).

# %%
counts = [1, 2, 4, 8, 16, 32, 64, 128]
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for p, colour in ((8, "#D55E00"), (4, "#0072B2"), (2, "#009E73")):
    schedules = [jaxpp.schedule.make("gpipe", num_ranks=p, num_microbatches=m) for m in counts]
    bubbles = [jaxpp.schedule.simulate(schedule).bubble_fraction for schedule in schedules]
    formula = [(p - 1) / (m + p - 1) for m in counts]
    np.testing.assert_allclose(bubbles, formula)
    axes.plot(counts, bubbles, "o", color=colour)
    axes.plot(counts, formula, color=colour, label=f"{p} ranks")
    axes.text(9.9 * (p - 1), 0.12, f"{9 * (p - 1)}", color=colour)
axes.axhline(0.1, color="#999999", linestyle=":")
axes.set_xscale("log", base=2)
axes.set(xticks=counts, xticklabels=counts, xlabel="microbatches", ylabel="bubble", ylim=0)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Why not a thousand microbatches? Each becomes smaller, and a device computes small matrix products less efficiently than large
# ones. There is also a fixed cost for each action, for handing it to the device and for sending its result.
#
# ## GPipe by hand
#
# The loop of chapter 3, with a second loop around it. One Python thread hands out all the work. How can it keep four devices
# busy? By **asynchronous dispatch**: a call of a compiled function, or of `jax.device_put`, only puts the work into the queue
# of a device and returns at once. The arrays that it returns are promises. So Python runs ahead, and each device works through
# its queue. (Python must hand out four actions in the time in which a device runs one. Chapter 11 measures how long handing out
# takes.)

# %%
devices = [jax.devices()[s % len(jax.devices())] for s in range(4)]


def make_stage(first, last):
    return jax.jit(lambda params, x: MLP().apply({"params": params}, x, first, last))


def params_of(first, last):
    return {f"layers_{k}": params[f"layers_{k}"] for k in range(first, last)}


stages = [make_stage(2 * s, 2 * s + 2) for s in range(4)]
stage_params = [jax.device_put(params_of(2 * s, 2 * s + 2), devices[s]) for s in range(4)]


# %%
def forwards(xs):
    logits, pullbacks = [], {}
    for i, part in enumerate(xs):
        x = part
        for s in range(4):
            x, pullbacks[s, i] = jax.vjp(stages[s], stage_params[s], jax.device_put(x, devices[s]))
        logits.append(x)
    return logits, pullbacks


# %%
def backwards(cotangents, pullbacks, order):
    total = [jax.tree.map(jnp.zeros_like, own) for own in stage_params]
    for i in order:
        cotangent = cotangents[i]
        for s in reversed(range(4)):
            stage_grads, cotangent = pullbacks.pop((s, i))(jax.device_put(cotangent, devices[s]))
            total[s] = jax.tree.map(jnp.add, total[s], stage_grads)
    return {name: layer for own in total for name, layer in own.items()}


# %% [markdown]
# `order` says in which order the backwards are handed out. It is an argument, because it is worth a look. GPipe is often drawn
# with the backward of the last microbatch first. That is only an order that one may choose. The backward of a microbatch needs
# its own residuals, and the cotangent of the same microbatch from the stage behind it. Let us ask jaxpp what `1B3` waits for, and
# then try three orders.

# %%
actions = frozenset(gpipe.order)  # which actions there are: other schedules have I and W (chapter 7) in place of B
needed = jaxpp.schedule.dependencies(jaxpp.schedule.parse("1B3"), num_stages=4, present=actions)
print("1B3 waits for", " and ".join(map(str, needed)))
xs, ys = jnp.split(batch["x"], 8), jnp.split(jax.device_put(batch["y"], devices[3]), 8)
for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 2, 5, 4]):
    logits, pullbacks = forwards(xs)
    found = [jax.value_and_grad(lambda z, y: cross_entropy(z, y) / 8)(*pair) for pair in zip(logits, ys, strict=True)]
    losses, cotangents = zip(*found, strict=True)
    assert_same((sum(losses), backwards(cotangents, pullbacks, order)), (loss, grads))
    print("backwards in the order", *order, "give the gradients of the monolith")

# %% [markdown]
# Each loss is divided by 8, so that the sum over the microbatches is the mean over the batch, and so are its cotangents and
# gradients.
#
# ## The price: memory
#
# The pebble graph shows what the timeline hides. When the forwards are done, *every* stage holds the residuals of *all* eight
# microbatches. Look at the middle of the picture.

# %%
gpipe.pebble_figure()

# %% [markdown]
# What does that mean in bytes? It depends on what you hold fixed.
#
# - **The batch is fixed**, and is split into more microbatches. Each pebble becomes smaller. All of them together weigh what the
#   residuals of the whole batch weigh: GPipe costs no more memory than the naive pipeline, and saves none.
# - **The microbatch is fixed**, and more of them are used, to make the bubble smaller. Now each of them adds a pebble of the same
#   size, and memory grows with their number.
#
# We measure both: the bytes that the residuals add on the device of stage 1, after all forwards.


# %%
def residual_bytes(xs):
    def live():
        arrays = [array for array in jax.live_arrays() if array.devices() == {devices[1]}]
        return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())

    before = live()
    kept = forwards(xs)[1]
    after = live()
    del kept
    return after - before


counts = [1, 2, 4, 8]
fixed_batch = [residual_bytes(jnp.split(batch["x"], m)) / 2**20 for m in counts]
fixed_microbatch = [residual_bytes(jnp.split(batch["x"][: 128 * m], m)) / 2**20 for m in counts]

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained", sharey=True)
left.bar(range(4), fixed_batch, color="#0072B2")
right.bar(range(4), fixed_microbatch, color="#D55E00")
left.set(title="1,024 examples in m parts", xlabel="m", ylabel="MiB of residuals", xticks=range(4), xticklabels=counts)
right.set(title="m parts of 128 examples", xlabel="m", xticks=range(4), xticklabels=counts)
plt.show()

# %% [markdown]
# GPipe's own answer to the price is remat: keep only the input of each stage, and run the forward a second time in the backward.
# That costs a third more work. Chapter 6 has an answer that costs nothing.
#
# ## The same with jaxpp
#
# In our loop, `jax.vjp` derived the backward of every stage anew for each microbatch, though the stages themselves were
# compiled only once. jaxpp derives and compiles each forward and each backward once, and takes care of the weights, of batches
# that do not divide evenly, and of everything else.

# %%
grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=4, num_microbatches=8, schedule="gpipe")
assert_same(grad_fn(params, batch), (loss, grads))
print(f"loss {grad_fn(params, batch)[0]:.6f}, the monolith's {loss:.6f}; the gradients are the same")

# %% [markdown]
# ## Takeaway
#
# Microbatches let the stages work at the same time, and gradient accumulation makes the result exact. The bubble falls from (p -
# 1) / p to (p - 1) / (m + p - 1). In GPipe every stage holds the residuals of all m microbatches before the first of them is
# used.
#
# ## Questions
#
# **1.** Eight ranks shall have a bubble of at most 10%. How many microbatches does GPipe need?
#
# <details><summary>Answer</summary>
#
# 7 / (m + 7) is at most 0.1 if m + 7 is at least 70, so m is at least 63. (With four ranks: 27.)
#
# </details>
#
# **2.** A colleague sums the gradients of 8 microbatches and forgets the weights. The loss looks 8 times as large as before. What
# happens to training with SGD, and with Adam?
#
# <details><summary>Answer</summary>
#
# The gradients are 8 times as large too. With SGD that is a learning rate 8 times as large, and training may diverge. Adam
# divides by the size of the gradients, so it hardly notices, unless gradients are clipped before.
#
# </details>
#
# **3.** In GPipe, `3B0` could run as soon as `3F0` is done, at time 4. What would have to happen to the forwards that are waiting
# then?
#
# <details><summary>Answer</summary>
#
# Rank 3 would put off `3F1` and run `3B0` first. Nothing forbids that: a backward needs only its own microbatch. The pebble of
# microbatch 0 could be taken away long before the last forward. Exactly this is the idea of the next chapter.
#
# </details>
#
# Next: [6. 1F1B: the same bubble, less memory](06_one_f_one_b.ipynb)
