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
# # 3. Split by hand
#
# Chapter 1 had the idea to divide the layers among devices. In this chapter we do that by hand, in about fifteen lines of
# plain JAX. Then we break it in the two ways in which people break it, and watch what happens.
#
# First, the problem of chapter 1, with the loss and the gradients of the monolith. Everything that follows must reproduce them.

# %%
import warnings

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
# ## One function, one pullback
#
# In chapter 1, `jax.vjp` returned the pullback of a whole loss. It works for any function. Here is the smallest example, a
# product.

# %%
product, pullback = jax.vjp(lambda w, x: w * x, 3.0, 4.0)
print("product:", product)
print("pullback(1.0):", *map(float, pullback(1.0)))
print("pullback(0.5):", *map(float, pullback(0.5)))

# %% [markdown]
# The number that goes into a pullback is called a **cotangent**. It says how much the loss changes if the *result* of the
# function changes a little. The pullback answers how much the loss changes if each *argument* changes a little: with `w * x`, the
# cotangent times `x`, and the cotangent times `w`. That is the chain rule. A cotangent always has the shape of the value that it
# belongs to.
#
# ## Four stages
#
# A **stage** is a contiguous slice of the model that lives on one device. We make four stages of two layers each, and put the
# parameters of each stage on a device of its own. (If there are fewer devices, they are reused.) Each stage is compiled by
# `jax.jit`, which also makes sure that whatever a stage makes is made on its own device.

# %%
devices = [jax.devices()[s % len(jax.devices())] for s in range(4)]


def make_stage(first, last):
    return jax.jit(lambda params, x: MLP().apply({"params": params}, x, first, last))


def params_of(first, last):
    return {f"layers_{k}": params[f"layers_{k}"] for k in range(first, last)}


stages = [make_stage(2 * s, 2 * s + 2) for s in range(4)]
stage_params = [jax.device_put(params_of(2 * s, 2 * s + 2), devices[s]) for s in range(4)]
for s in range(4):
    print(f"stage {s} on {devices[s]}: {', '.join(stage_params[s])}")

# %% [markdown]
# ## Activations go forward, cotangents go backward
#
# Each stage runs on its own device. Between two stages, `jax.device_put` moves the activation to the next device. Every stage
# keeps its own pullback, and the residuals in it stay where they were made. On the way back, each pullback takes the cotangent of
# its stage's output. It returns two things: the gradients of the stage's parameters, which stay on the device, and the cotangent
# of the stage's input, which is what the stage before needs.
#
# While this runs, we note how many bytes are alive on each device.


# %%
def live_bytes(device):
    arrays = [array for array in jax.live_arrays() if array.devices() == {device}]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())


def forward(x, note):
    pullbacks = []
    for s in range(4):
        x, pullback = jax.vjp(stages[s], stage_params[s], jax.device_put(x, devices[s]))
        pullbacks.append(pullback)
        note()
    return x, pullbacks


# %%
def backward(pullbacks, cotangent, note):
    grads = {}
    for s in reversed(range(4)):
        stage_grads, cotangent = pullbacks.pop()(jax.device_put(cotangent, devices[s]))
        grads |= stage_grads
        note()
    return grads


# %%
before = np.array([live_bytes(device) for device in devices])
held = [np.zeros(4)]


def note():
    held.append(np.array([live_bytes(device) for device in devices]) - before)


logits, pullbacks = forward(batch["x"], note)
labels = jax.device_put(batch["y"], devices[3])
split_loss, cotangent = jax.value_and_grad(cross_entropy)(logits, labels)
split_grads = backward(pullbacks, cotangent, note)

# %% [markdown]
# `jax.value_and_grad` of the cross entropy gave the loss, and the first cotangent, which is that of the logits. Now the proof.
# The gradients of the four stages together are one tree, and it must be the tree of the monolith.


# %%
def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


assert_same((split_loss, split_grads), (loss, grads))
print(f"loss {split_loss:.6f}, the monolith's {loss:.6f}; the gradients are the same")

# %% [markdown]
# And the memory? Each colour is a device. Look at how the curves rise one after another in the forward pass, and fall in the
# reverse order in the backward pass. The residuals of the monolith were 8.3 MiB; no device ever holds more than about a third
# of that. (It is not a quarter, because the inner stages of this model are larger than the outer stages.) A curve falls a
# little when the output of its stage has moved on. What is left at the end are the gradients. Device 3 also holds the logits,
# their cotangent and the labels, and device 0 the cotangent of the digits, 0.25 MiB that nobody uses.

# %%
colours = ["#0072B2", "#56B4E9", "#009E73", "#E69F00"]
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for s, curve in enumerate(zip(*held, strict=True)):
    axes.plot(np.array(curve) / 2**20, "o-", color=colours[s], label=f"device of stage {s}")
names = ["start", *(f"forward {s}" for s in range(4)), *(f"backward {s}" for s in reversed(range(4)))]
axes.set(xticks=range(9), ylabel="MiB alive", ylim=(0, 3.9))
axes.set_xticklabels(names, rotation=30, ha="right")
axes.legend(frameon=False, ncols=2, loc="upper left")
plt.show()

# %% [markdown]
# ## What `requires_grad` means in JAX
#
# In PyTorch, a tensor has a flag `requires_grad`, and operations on flagged tensors are recorded. A move to another device,
# `tensor.to(device)`, is recorded like any other operation, as long as one process owns both devices. But PyTorch's pipelines
# usually run each stage in a process of its own. A tensor that arrives from another process is new: it has no flag and no record.
# If nobody sets the flag, the stage computes no gradient for the activation, and has nothing to send back.
#
# JAX has no flag and no recording. **What you pass as an argument to the differentiated function is differentiated; everything
# else is a constant.** So the same mistake looks like this in JAX: the pullback is taken with respect to the parameters alone.

# %%
x = jax.device_put(batch["x"], devices[0])
both = jax.vjp(stages[0], stage_params[0], x)[1]
alone = jax.vjp(lambda own: stages[0](own, x), stage_params[0])[1]
ones = jnp.ones((1024, 128), device=devices[0])
print("with respect to parameters and input:", len(both(ones)), "results")
print("with respect to the parameters alone:", len(alone(ones)), "result, and no cotangent for the stage before")

# %% [markdown]
# For the first stage that is even right: nothing comes before it, and the cotangent of the digits themselves is of no use. For
# any other stage, there would be nothing to send back. In JAX you notice, because there is no value to pass on.
#
# ## What `detach` means in JAX: watch half of the model not learn
#
# `tensor.detach()` of PyTorch is `jax.lax.stop_gradient` in JAX. It passes the value on, and lets no cotangent through. A
# `stop_gradient` between stages 1 and 2 changes neither the loss nor the shape of anything. No error is raised.


# %%
def detached_loss(params, batch):
    x = MLP().apply({"params": params}, batch["x"], 0, 4)
    logits = MLP().apply({"params": params}, jax.lax.stop_gradient(x), 4, 8)
    return cross_entropy(logits, batch["y"])


detached, detached_grads = jax.value_and_grad(detached_loss)(params, batch)
print(f"loss {detached:.6f}, as before")
for name in sorted(params):
    print(f"{name}: largest gradient {abs(grads[name]['kernel']).max():.4f}", end=", ")
    print(f"with stop_gradient {abs(detached_grads[name]['kernel']).max():.4f}")

# %% [markdown]
# What does training look like with this mistake? Let us train the model twice for 30 steps. This time jaxpp, the library that
# chapter 1 introduced, runs the stages: it cuts `loss_fn` into four stages by itself and does what we did by hand above.
# (Chapter 5 is about `num_microbatches`.) Its option `cut_gradient=[1]` puts the same `stop_gradient` behind stage 1, to show
# what happens.


# %%
def train(**options):
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=1, **options)
    state, losses = pipe.init(params, batch), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            state, metrics = pipe.step(state, batch)
            losses.append(float(metrics.loss))
    return losses, jax.device_get(state.params), [str(warning.message) for warning in caught]


losses, trained, messages = train()
cut_losses, cut_trained, cut_messages = train(cut_gradient=[1])
assert_same(losses[0], loss)
print(f"warnings without the mistake: {len(messages)}, with it: {len(cut_messages)}\n")
print(*cut_messages)

# %% [markdown]
# The warning (its class is `jaxpp.DeadStageWarning`) names the boundary. Without it, would you have noticed? On the left are the
# two losses. Both fall, because the second half of the model learns alone. On the right is how far each layer has moved from its
# first values. Layers 0 to 3 of the detached model have not moved at all.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
for values, moved, name, colour in (
    (losses, trained, "whole", "#0072B2"),
    (cut_losses, cut_trained, "detached after layer 3", "#E69F00"),
):
    left.plot(values, color=colour, label=name)
    norms = [np.linalg.norm(moved[f"layers_{k}"]["kernel"] - params[f"layers_{k}"]["kernel"]) for k in range(8)]
    right.bar(np.arange(8) + (0.2 if "after" in name else -0.2), norms, 0.4, color=colour)
left.set(xlabel="step", ylabel="loss", ylim=0)
left.legend(frameon=False, loc="lower left")
right.set(xlabel="layer", ylabel="distance moved", xticks=range(8))
plt.show()

# %% [markdown]
# ## Keep a reference and watch memory grow
#
# The other classic mistake is to keep something alive by accident. In PyTorch, a loss refers to the recorded graph of its step.
# `loss.backward()` frees the residuals in this graph. A loss for which nobody calls `backward()`, such as one that is computed
# only to be printed, keeps all of them, so `losses.append(loss)` keeps the residuals of every step. That is why people write
# `loss.detach()` there, or compute such losses under `torch.no_grad()`.
#
# A JAX array records nothing, so a list of losses costs a few bytes. What holds the residuals is the *pullback*. Whoever keeps
# pullbacks, or a variable that still refers to one, keeps their memory. Let us do six forward passes twice, and keep the losses
# the first time and the pullbacks the second time.

# %%
grown = {}
del logits, pullbacks
for keep in ("losses", "pullbacks"):
    kept, start, grown[keep] = [], sum(map(live_bytes, set(devices))), [0]
    for _ in range(6):
        logits, pullbacks = forward(batch["x"], lambda: None)
        kept.append(pullbacks if keep == "pullbacks" else cross_entropy(logits, labels))
        del logits, pullbacks
        grown[keep].append(sum(map(live_bytes, set(devices))) - start)
    kept.clear()
    print(f"{keep:9} kept: {grown[keep][-1] / 2**20:5.1f} MiB more after 6 forward passes")

# %%
fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for keep, colour in (("pullbacks", "#D55E00"), ("losses", "#0072B2")):
    axes.plot(np.array(grown[keep]) / 2**20, "o-", color=colour, label=f"keeping the {keep}")
axes.set(xlabel="forward passes", ylabel="MiB more than before")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Keep this picture in mind. A pipeline *has* to keep pullbacks for a while, from a forward pass to its backward pass. Chapters 5
# and 6 are about how many, and for how long.
#
# ## Takeaway
#
# A split model is a chain of `jax.vjp`: activations travel forward with `jax.device_put`, cotangents travel backward, and
# residuals and gradients stay at home. A gradient that is cut raises no error, so measure whether every stage learns. The
# pullback is what holds memory: drop it as soon as it has been called.
#
# ## Questions
#
# **1.** Which arrays cross from device 1 to device 2, and which cross back? How large is each, compared with the batch?
#
# <details><summary>Answer</summary>
#
# Forward, one activation: the output of layer 3 for all 1,024 digits, 1,024 x 128 numbers. Backward, one cotangent of the same
# shape. No parameter, no gradient and no residual crosses. The digits themselves are smaller, 1,024 x 64.
#
# </details>
#
# **2.** In the table of gradients, layers 4 to 7 have the same gradients with and without `stop_gradient`. Why?
#
# <details><summary>Answer</summary>
#
# The forward values are the same, and the backward pass comes from the loss: it reaches layers 7, 6, 5 and 4 before it comes to
# the `stop_gradient`. Only what lies further back loses its cotangent.
#
# </details>
#
# **3.** All four devices have something to do during a step. Does the split model run four times as fast as the monolith?
#
# <details><summary>Answer</summary>
#
# No. Stage 1 waits for the activation of stage 0, stage 2 for stage 1, and so on, and backward again. At any time a single device
# works. So far we have divided the memory and not the time. How bad this is, and what can be done about it, is what chapter 4
# begins with.
#
# </details>
#
# Next: [4. The naive pipeline and its bubble](04_naive_pipeline.ipynb)
