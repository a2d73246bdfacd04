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
# # 1. The monolith, and where its memory goes
#
# This course builds **pipeline parallelism** from the ground up: one model is trained by several devices, and each device holds
# only some of the layers. You should know JAX and Flax; you need to know nothing about parallel training. Every chapter adds
# one idea to the chapter before it, and checks that the loss and the gradients have not changed. We build most things by hand
# first. Then **jaxpp** does the same: it is the library that this course belongs to, and trains a JAX model on several devices
# from one Python process.
#
# We begin without any parallelism. The whole model is on one device; let us call it the **monolith**. What fills the memory of
# this device while the model is trained?

# %%
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## A small real problem
#
# One problem runs through the whole course: the handwritten digits of scikit-learn, each of 8 x 8 pixels, and a multilayer
# perceptron of 8 layers that tells which digit it sees. The arguments `first` and `last` run only a part of the layers. Chapter 3
# will need them; until then, all 8 layers run.


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
x, y = jnp.asarray(digits.data / 16, "float32"), jnp.asarray(digits.target)
batch, test = {"x": x[:1024], "y": y[:1024]}, {"x": x[1024:], "y": y[1024:]}
params = MLP().init(jax.random.key(0), batch["x"])["params"]


def loss_fn(params, batch):
    logits = MLP().apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


loss, grads = jax.value_and_grad(loss_fn)(params, batch)
print(f"loss before training: {loss:.4f} (guessing one of ten digits costs ln 10 = {np.log(10):.4f})")

# %% [markdown]
# A training **step** computes the loss and the gradients, and lets an optimizer change the parameters. A hundred steps on the
# same 1,024 digits are enough to read digits that the model has never seen.

# %%
optimizer = optax.adam(1e-3)


@jax.jit
def step(params, optimizer_state):
    grads = jax.grad(loss_fn)(params, batch)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state


trained, optimizer_state = params, optimizer.init(params)
for _ in range(100):
    trained, optimizer_state = step(trained, optimizer_state)
right = MLP().apply({"params": trained}, test["x"]).argmax(-1) == test["y"]
print(f"digits of the test set that are read correctly: {right.mean():.1%}")

# %% [markdown]
# ## Three things that are as large as the model
#
# - The **parameters**: the weights and biases.
# - The **gradients**: one number for each parameter.
# - The **optimizer state**: Adam keeps two running means for each parameter.
#
# Their sizes can be known before any of them exists. `jax.eval_shape` runs a function on shapes alone, without computing a number
# or allocating a byte. Models far too large for this machine can be measured in the same way.


# %%
def num_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def init(key):
    return MLP().init(key, batch["x"])["params"]


shapes = jax.eval_shape(init, jax.random.key(0))
sizes = {
    "parameters": num_bytes(shapes),
    "gradients": num_bytes(shapes),
    "optimizer state": num_bytes(jax.eval_shape(optimizer.init, shapes)),
}
for name, size in sizes.items():
    print(f"{name:16} {size / 2**10:6.0f} KiB")

# %% [markdown]
# ## The fourth: what the forward pass keeps for the backward pass
#
# Gradients are computed in two passes. The **forward pass** goes through the layers from first to last, and ends with the loss.
# The **backward pass** goes through the layers from last to first. At each layer it needs values that the forward pass has
# computed there. To get the gradient of a weight matrix, for instance, it needs the input of that layer.
#
# The output of a layer is called an **activation**. The values that are kept from forward to backward are called **residuals**.
# Most of them are activations, and that is why people speak of "activation memory".
#
# JAX lets us hold the residuals in our hands. `jax.vjp(f, params)` runs the forward pass of `f`. It returns the result, and a
# function that runs the backward pass: the **pullback**. A pullback is a tree whose leaves are the residuals, so we can count
# them.

# %%
loss, pullback = jax.vjp(lambda params: loss_fn(params, batch), params)
kinds = Counter(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(pullback))
for kind, count in kinds.most_common(4):
    print(f"{count:2} x {kind}")

# %% [markdown]
# The first two lines are the price of seven hidden layers and 1,024 digits. For each of these layers, the pullback keeps the
# layer's output, which is the input of the next layer. For the derivative of `relu`, it keeps a mask that says which outputs
# were positive, and an array of zeros for the outputs that were not. (If forward and backward were compiled as one function,
# the compiler would not store these zeros.) Then come the weights of the layers 1 to 7, through which the gradients travel
# backward. This cell ran uncompiled and made copies of them, 389 KiB in all. (In chapter 3, the functions are compiled, and a
# pullback refers to the parameters themselves.)
#
# ## Is that what the device really holds?
#
# `jax.live_arrays()` lists every array that is alive. Two arrays may share a buffer, so we count each buffer once. The memory
# before and after `jax.vjp` must differ by what `jax.eval_shape` says about the pullback, without the batch, which was there
# before.


# %%
def live_bytes():
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def pullback_of(params, batch):
    return jax.vjp(lambda params: loss_fn(params, batch), params)[1]


del pullback
before = live_bytes()
pullback = pullback_of(params, batch)
measured = live_bytes() - before
expected = num_bytes(jax.eval_shape(pullback_of, params, batch)) - num_bytes(batch["x"])
print(f"residuals: {measured / 2**10:,.0f} KiB measured, {expected / 2**10:,.0f} KiB expected from shapes")
assert abs(measured - expected) < 0.1 * expected

# %% [markdown]
# The residuals of this small model are twenty times as large as its parameters. Calling the pullback gives the gradients. They
# are what `jax.value_and_grad` gave, because `jax.value_and_grad` does the same two things.

# %%
(same_grads,) = pullback(jnp.ones_like(loss))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), same_grads, grads)
del pullback, same_grads
print("The pullback returns the gradients of jax.value_and_grad.")

# %% [markdown]
# ## What grows with what
#
# Parameters, gradients and optimizer state do not depend on the batch. Residuals do: every example adds the same number of
# bytes, about 8 KiB, to the copies of the weights, which do not grow. The figure needs no device at all, since every bar comes
# from `jax.eval_shape`. Look at the blue part, which is the only part that grows.

# %%
colours = {"residuals": "#0072B2", "optimizer state": "#999999", "gradients": "#E69F00", "parameters": "#222222"}
batch_sizes = [64, 128, 256, 512, 1024]
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for k, size in enumerate(batch_sizes):
    part = {"x": batch["x"][:size], "y": batch["y"][:size]}
    held = {**sizes, "residuals": num_bytes(jax.eval_shape(pullback_of, params, part))}
    left = 0
    for name in ("parameters", "gradients", "optimizer state", "residuals"):
        axes.barh(k, held[name] / 2**20, left=left, color=colours[name], label=name if k == 0 else None)
        left += held[name] / 2**20
axes.set(yticks=range(5), yticklabels=batch_sizes, ylabel="examples in the batch", xlabel="MiB")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Why one device is not enough
#
# Now models of the size that people want. With Adam in float32, every parameter needs 16 bytes: 4 for itself, 4 for its
# gradient, and 8 for the optimizer state. The dashed line is a GPU with 80 GiB; the size of a model is its number of
# parameters. A model of 7 billion parameters does not fit, even before the first example.

# %%
billions = np.array([1, 3, 7, 13])
fig, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
left = np.zeros(4)
for name, each in {"parameters": 4, "gradients": 4, "optimizer state": 8}.items():
    width = billions * 1e9 * each / 2**30
    axes.barh(range(4), width, left=left, color=colours[name], label=name)
    left += width
axes.axvline(80, color="#D55E00", linestyle="--")
axes.text(82, -0.1, "80 GiB", color="#D55E00", va="center")
axes.set(yticks=range(4), yticklabels=[f"{n} billion" for n in billions], ylabel="model size", xlabel="GiB")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# What can be done?
#
# - **Compute again instead of keeping.** `jax.checkpoint` drops residuals and recomputes them in the backward pass; people call
#   this **remat**, short for rematerialisation. It makes the blue part smaller, and leaves the three others as they are.
# - **Several devices with a copy of the model each** (data parallelism). The batch is divided, and every device still needs all
#   16 bytes for every parameter.
# - **Divide each array among several devices** (fully sharded data parallelism, tensor parallelism). Every device holds a slice
#   of every layer. The devices exchange slices or partial results in every layer, so the links between them must be fast.
# - **Divide the layers among the devices.** Each device then holds the parameters, the gradients, the optimizer state and the
#   residuals of its own layers, and nothing of the others. Everything in both figures is divided.
#
# The last way is the one that this course follows. Chapter 2 asks when it is the right one.
#
# ## Takeaway
#
# Training keeps parameters, gradients and optimizer state, which grow with the model, and residuals, which also grow with the
# batch. Residuals are what the forward pass keeps for the backward pass, and in JAX they are the leaves of a pullback. Dividing
# the layers among devices divides all four.
#
# ## Questions
#
# **1.** The batch is doubled. Which of the four parts of the memory grow?
#
# <details><summary>Answer</summary>
#
# Only the residuals: they hold one row for each example (apart from the copies of the weights). Parameters, gradients and
# optimizer state have the shapes of the model.
#
# </details>
#
# **2.** You replace Adam by plain gradient descent, `optax.sgd(0.1)`. What happens to the 16 bytes for each parameter?
#
# <details><summary>Answer</summary>
#
# They become 8: 4 for the parameter and 4 for its gradient. Plain gradient descent keeps nothing from one step to the next. With
# momentum there would be 4 bytes more.
#
# </details>
#
# **3.** During evaluation (the loss of a test set, without gradients), the same model needs far less memory. Why?
#
# <details><summary>Answer</summary>
#
# There is no backward pass, so nothing has to be kept for it. An activation can be freed as soon as the next layer has read it.
# Only the parameters and one or two activations are alive at the same time.
#
# </details>
#
# Next: [2. Do I need a pipeline?](02_do_i_need_a_pipeline.ipynb)
