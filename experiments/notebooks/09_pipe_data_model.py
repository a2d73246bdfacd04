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
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 8)  # for a laptop; GPUs are used where there are at least eight
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


digits = load_digits()
batch = {"x": digits.data[:256].astype("float32") / 16, "y": digits.target[:256].astype("int32")}
params = jax.jit(Blocks().init)(jax.random.key(0), batch["x"])

# %% [markdown]
# ## Dividing the examples: data
#
# In **data parallelism** each device has a copy of the model, a **replica**, and computes the gradient of its part of the examples.
# The mean of these gradients is the gradient of the whole batch. Chapter 4 used the same fact for microbatches.
#
# Computing a sum over several devices, so that all of them have it in the end, is called an **all-reduce**. It is one of the
# **collectives**: operations in which all devices of a group take part. Data parallelism needs one all-reduce of all gradients per
# step.

# %%
halves = [jax.tree.map(lambda leaf, k=k: leaf[128 * k : 128 * (k + 1)], batch) for k in range(2)]
parts = [jax.grad(loss_fn)(params, half) for half in halves]  # each could be on a device of its own
reduced = jax.tree.map(lambda *grads: sum(grads) / 2, *parts)  # the all-reduce

grads = jax.grad(loss_fn)(params, batch)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), reduced, grads)
print("the mean of the replicas' gradients is the gradient of the batch")

# %% [markdown]
# ## Dividing the matrices: model
#
# In **tensor parallelism** each device holds a part of every matrix, a **shard**. Take one block, `relu(x @ up) @ down`. Cut `up`
# between columns and `down` between rows. Each device then computes half of the wide features, and needs nothing of the other half:
# `relu` looks at one feature at a time. At the end each device has a sum over its own features, and one all-reduce adds the sums.

# %%
x, up, down = batch["x"], params["params"]["up_0"]["kernel"], params["params"]["down_0"]["kernel"]
first = nn.relu(x @ up[:, :128]) @ down[:128]  # on one device: the left columns of up, the upper rows of down
second = nn.relu(x @ up[:, 128:]) @ down[128:]  # on the other device
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
    axes.set(title=f"rank {rank} (pipe)", xlabel="shard (model)", ylabel="replica (data)", xlim=(0, 2), ylim=(2, 0))
    axes.set(xticks=[0.47, 1.47], xticklabels=[0, 1], yticks=[0.45, 1.45], yticklabels=[0, 1])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
plt.show()

# %% [markdown]
# Look at the directions. Activations go from a box on the left to the box at the same place on the right. Gradients are summed up
# and down inside a rank, and partial results are summed between left and right inside a rank.
#
# The pipeline takes the mesh, and rules that say how each parameter is sharded. `"column"` cuts a layer between its columns, and
# `"row"` between its rows. A parameter that no rule names is whole on every shard.

# %%
optimizer = optax.adam(1e-3)
rules = {"*/up_*": "column", "*/down_*": "row"}
options = {"num_stages": 2, "num_microbatches": 4, "mesh": mesh, "shardings": rules}
pipe = jaxpp.Pipeline(loss_fn, optimizer, **options)
state = pipe.init(params, batch)
pipe.stages

# %% [markdown]
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
pipe.verify(state, batch)  # each gradient, updated parameter and optimizer leaf, against one device

state, metrics = pipe.step(state, batch)
loss = loss_fn(params, batch)
updates, _ = optimizer.update(grads, optimizer.init(params))
expected = optax.apply_updates(params, updates)
np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.device_get(state.params), expected)
print(f"loss {metrics.loss:.6f} on eight devices, {loss:.6f} on one; the updated parameters agree")

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
# - One all-reduce over `data` for each stage, once per step, as large as the stage's parameters on a device.
# - In each forward one all-reduce over `model` for each block, and the same number in the backward of stage 1. The backward of
#   stage 0 has one less: nobody needs the gradient of the images.
# - The last line: every parameter is reduced over `data` exactly once. (The loss rides along in the same all-reduce.)
#
# What the pipeline sends from rank to rank is no collective and is not in this table. It is in `pipe.stages`, in the column
# `sends`.

# %%
assert found.count("all-reduce", axes=("data",)) == 2

# %% [markdown]
# ## Which axis for what?
#
# The same eight devices can be arranged in other ways. For each arrangement we make the pipeline, check its loss, and count bytes
# per device and step: the gradients over `data`, the partial results over `model`, and the activations and their cotangents that
# a device sends or receives over `pipe`.


# %%
def count_bytes(pipe_size, data_size, model_size):
    mesh = jax.make_mesh((pipe_size, data_size, model_size), ("pipe", "data", "model"), devices=devices)
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=pipe_size, num_microbatches=4, mesh=mesh, shardings=rules)
    _, metrics = pipe.step(pipe.init(params, batch), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    found = pipe.collectives(batch)
    activations = 256 // data_size * 64 * 4  # bytes: the examples of a replica x 64 features x 4
    sent = 2 * activations * (pipe_size - 1)  # there and back
    return [found.num_bytes(axes="data") / pipe_size, found.num_bytes(axes="model") / pipe_size, sent / pipe_size]


shapes = [(4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)]
counted = np.array([count_bytes(*shape) for shape in shapes]) / 2**10
# %%
