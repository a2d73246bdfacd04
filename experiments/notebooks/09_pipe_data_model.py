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
# # 9. Pipe x data x model
#
# A pipeline divides the layers among devices. There are two other ways to divide the work of a training step: by examples and by
# the entries of each matrix. Large models are trained with all three at once. In this chapter eight devices are used as 2 x 2 x 2,
# and we count what each way makes the devices say to one another.

# %%
import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 8)  # for a laptop; eight GPUs are used if there are
devices = jax.devices()[:8] if len(jax.devices()) >= 8 else jax.devices("cpu")

# %% [markdown]
# ## The model
#
# Handwritten digits again. The model has four blocks. Each widens its input to 256 features, applies `relu`, goes back to 64
# features, and adds the result to its input.


# %%
class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(4):
            wide = nn.relu(nn.Dense(256, name=f"up_{k}")(x))
            x = x + nn.Dense(64, name=f"down_{k}")(wide)
        return nn.Dense(10, name="head")(x)


def loss_fn(params, batch):
    logits = Blocks().apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


x, y = load_digits(return_X_y=True)
batch = {"x": x[:256].astype("float32") / 16, "y": y[:256].astype("int32")}
params = jax.jit(Blocks().init)(jax.random.key(0), batch["x"])

# %% [markdown]
# ## Dividing the examples: data
#
# In **data parallelism** each device has a copy of the model, a **replica**, and computes the gradient of its part of the examples.
# The mean of these gradients is the gradient of the whole batch. Chapter 5 used the same fact for microbatches.
#
# Computing a sum over several devices, so that all of them have it in the end, is called an **all-reduce**. It is one of the
# **collectives**: operations in which all devices of a group take part. Data parallelism needs one all-reduce of all gradients per
# step.


# %%
def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


halves = [jax.tree.map(lambda leaf, k=k: leaf[128 * k :][:128], batch) for k in range(2)]
parts = [jax.grad(loss_fn)(params, half) for half in halves]  # on two devices, say
reduced = jax.tree.map(lambda *grads: sum(grads) / 2, *parts)  # the all-reduce

grads = jax.grad(loss_fn)(params, batch)
assert_same(reduced, grads)
print("the mean of the replicas' gradients is the gradient of the batch")

# %% [markdown]
# ## Dividing the matrices: model
#
# In **tensor parallelism** each device holds a part of every matrix, a **shard**. Take one block, `relu(x @ up) @ down`. Cut `up`
# between columns and `down` between rows. Each device then computes half of the wide features, and needs nothing of the other half:
# `relu` looks at one feature at a time. At the end each device has a sum over its own features, and one all-reduce adds the sums.

# %%
up, down = (params["params"][name]["kernel"] for name in ("up_0", "down_0"))
x = batch["x"]
first = nn.relu(x @ up[:, :128]) @ down[:128]  # on one device: left columns, upper rows
second = nn.relu(x @ up[:, 128:]) @ down[128:]  # on the other: right columns, lower rows
np.testing.assert_allclose(first + second, nn.relu(x @ up) @ down, rtol=1e-4, atol=1e-5)
print("the sum of the shards' results is the result of the block")

# %% [markdown]
# This all-reduce has the size of an activation, and it happens in every block, for every microbatch, forward and backward. The
# devices wait for it each time. Tensor parallelism therefore needs fast links.
#
# ## A mesh
#
# A **mesh** arranges devices in an array whose axes have names. jaxpp knows three names: `pipe` for the ranks of the pipeline,
# `data` for replicas and `model` for shards. A rank is no longer one device. Here it is a group of four.

# %%
mesh = jax.make_mesh((2, 2, 2), ("pipe", "data", "model"), devices=devices)
fig, all_axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
for rank, axes in enumerate(all_axes):
    colour = ("#CFE3F2", "#FBE3B8")[rank]
    for (replica, shard), device in np.ndenumerate(mesh.devices[rank]):
        axes.add_patch(plt.Rectangle((shard, replica), 0.94, 0.9, color=colour))
        axes.text(shard + 0.47, replica + 0.45, device, ha="center", va="center")
    axes.set(title=f"rank {rank} (pipe)", xlabel="shard (model)", ylabel="replica (data)")
    axes.set(xlim=(0, 2), ylim=(2, 0))
    axes.set_xticks([0.47, 1.47], [0, 1])
    axes.set_yticks([0.45, 1.45], [0, 1])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
plt.show()

# %% [markdown]
# Look at the directions. Activations go from a box of rank 0 to the box at the same place in rank 1. Inside a rank, gradients are
# summed over the boxes of a column, and partial results over the boxes of a row.
#
# The pipeline takes the mesh, and rules that say how each parameter is sharded. `"column"` cuts a layer between its columns, and
# `"row"` between its rows. A parameter that no rule names is whole on every shard.

# %%
optimizer = optax.sgd(0.1, momentum=0.9)
rules = {"*/up_*": "column", "*/down_*": "row"}
sizes = {"num_stages": 2, "num_microbatches": 4}
pipe = jaxpp.Pipeline(loss_fn, optimizer, mesh=mesh, shardings=rules, **sizes)
state = pipe.init(params, batch)
pipe.stages

# %% [markdown]
# The last line of the table compares with a single rank, a group of four devices that runs all the blocks.
#
# Where is a parameter now? A sharding says over which axes an array is divided (`PartitionSpec`) and on which devices it lives.

# %%
for name in ("up_0", "down_0", "up_3"):
    kernel = state.params["params"][name]["kernel"]
    shard = kernel.addressable_shards[0].data
    here = ", ".join(sorted(str(device) for device in kernel.devices()))
    print(f"{name:7} {kernel.shape} {kernel.sharding.spec!s:27} {shard.shape} on each of {here}")

# %% [markdown]
# ## Still the same step
#
# Each replica splits its half of the batch into 4 microbatches, so this step is a gradient accumulation over 8 microbatches.
# Without randomness in the loss this is the ordinary step of plain JAX with the whole batch.

# %%
pipe.verify(state, batch)  # every gradient and updated parameter, against one device

state, metrics = pipe.step(state, batch)
loss = loss_fn(params, batch)
updates, _ = optimizer.update(grads, optimizer.init(params))
expected = optax.apply_updates(params, updates)
np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
assert_same(jax.device_get(state.params), expected)
print(f"loss {metrics.loss:.6f} on eight devices, {loss:.6f} on one; the parameters agree")

# %% [markdown]
# ## What the devices say to one another
#
# In plain JAX with shardings, the compiler decides which collectives to insert. jaxpp leaves this to the compiler too, and
# `pipe.collectives` reads from the compiled programs what it has decided. "F of stage 0" is the forward of one microbatch; the
# column `times` says how often the collective runs in a step.

# %%
found = pipe.collectives(batch)
found

# %% [markdown]
# Find three things in this table:
#
# - One all-reduce over `data` for each stage, once per step, as large as the parameters of the stage on one device.
# - In each forward one all-reduce over `model` for each of the two blocks, for each of the 4 microbatches: 8. There are as many in
#   the backward of stage 1. The backward of stage 0 has half as many, because nobody needs the gradient of the images. (The few
#   bytes at the end are for the norm of the gradient, `metrics.grad_norm`. `level 0` is the first part of the update; some
#   optimizers need further parts, which wait for numbers from other stages.)
# - The last line: every parameter is reduced over `data` exactly once.
#
# What the pipeline sends from rank to rank is no collective, so it is not in this table. `pipe.stages` has it in the column
# `sends`.

# %%
assert found.count("all-reduce", axes="data") == 2
assert found.count("all-reduce", axes="model", program="F of stage 0") == 8

# %% [markdown]
# ## Which axis for what?
#
# Let us keep the two replicas, and give the four devices of each replica to the pipeline, to the shards, or to both. For replicas
# without shards you need no mesh: `data_parallel=2` makes one. For each arrangement we check the loss and count the bytes of the
# arrays that a device sends or reduces in one step, on average: gradients over `data`, partial results over `model`, activations
# and cotangents over `pipe`. (The traffic of a reduction depends on the number n of its devices as well: with the usual algorithms
# each device sends 2 (n - 1) / n times the size of the array, so once its size for n = 2, and 1.5 times its size for n = 4.)

# %%
one_rank = jax.make_mesh((1, 2, 4), ("pipe", "data", "model"), devices=devices)
arrangements = {
    (4, 2, 1): {"num_stages": 4, "data_parallel": 2, "devices": devices},
    (2, 2, 2): {"num_stages": 2, "mesh": mesh, "shardings": rules},
    (1, 2, 4): {"num_stages": 1, "mesh": one_rank, "shardings": rules},
}

# %%
rows = []
for (num_ranks, _, _), options in arrangements.items():
    other = jaxpp.Pipeline(loss_fn, optimizer, num_microbatches=4, **options)
    _, metrics = other.step(other.init(params, batch), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    sends = [send.split()[0] for stage in other.stages for send in stage.sends]
    assert sends == ["f32[32,64]"] * (num_ranks - 1)  # one microbatch: 32 examples, 64 features
    sent = 2 * len(sends) * 4 * (32 * 64 * 4)  # there and back, 4 microbatches, bytes of each
    over = {axis: other.collectives(batch).num_bytes(axes=axis) for axis in ("data", "model")}
    rows.append([sent / num_ranks, over["data"] / num_ranks, over["model"] / num_ranks])

# %%
fig, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
left, colours = np.zeros(3), {"pipe": "#0072B2", "data": "#BBBBBB", "model": "#E69F00"}
for (axis, colour), found in zip(colours.items(), np.transpose(rows) / 2**10, strict=True):
    axes.barh(range(3), found, left=left, color=colour, label=axis)
    left += found
names = [" x ".join(map(str, shape)) for shape in arrangements]
axes.set(yticks=range(3), yticklabels=names, ylabel="pipe x data x model", ylim=(2.6, -0.6))
axes.set_xlabel("KiB of arrays for each device and step")
fig.legend(loc="outside right upper", frameon=False, title="over")
plt.show()

# %% [markdown]
# Look at the orange parts. A device adds up an activation for each block that it runs, forward and backward. With a single rank
# every device runs all four blocks, so the last bar has most of it; and the devices wait for each of these sums. The blue parts are
# smaller, and these transfers can be hidden behind computation. The grey parts are nearly equal: each device holds a quarter of the
# parameters, whichever way they are divided.
#
# From this follows how large models are arranged: `model` inside a computer, where links are fastest; `pipe` between computers;
# `data` with what is left. The price of `pipe` is the bubble, which this figure does not show. If your model fits on one device,
# use `data` alone.
#
# ## Takeaway
#
# A mesh gives each device a rank, a replica and a shard. Replicas exchange gradients once per step. Shards exchange partial results
# in every block. Ranks send activations and cotangents for every microbatch. None of the three changes the result.
#
# ## Questions
#
# **1.** You have 2 x 2 x 2 devices, and `num_microbatches=4`. How many examples of a batch of 256 are in one microbatch on one
# replica?
#
# <details><summary>Answer</summary>
#
# Each of the two replicas gets 128 examples and splits them into 4 microbatches of 32. The shards of a replica all work on the same
# 32 examples, each with its part of the matrices.
#
# </details>
#
# **2.** You double the batch and leave the model as it is. Which of the three parts of the figure grow?
#
# <details><summary>Answer</summary>
#
# `pipe` and `model` double, because they carry activations, which have a row for each example. `data` stays, because it carries
# gradients, which have the size of the parameters.
#
# </details>
#
# **3.** Why is `up` cut between its columns and `down` between its rows, and not both between their columns?
#
# <details><summary>Answer</summary>
#
# After a cut between columns, each device has some of the wide features, all of them complete, and `relu` can be applied at once.
# If `down` were cut between its columns too, each device would need all wide features as its input, so they would have to be
# collected first. That is a second collective for each block, and of the wide activation. Cut between its rows, `down` needs only
# the features that the device already has.
#
# </details>
#
# Next: [10. theta[t] on the host](10_task_parameters.ipynb)
