# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [sequence parallelism, tensor parallelism, with_sharding_constraint, activations, mesh, model axis]
# ---

# %% [markdown]
# # Shard the sequence between tensor-parallel layers
#
# With tensor parallelism, the devices along `model` share the work of each matrix product. What lies between the products (norms,
# residuals, dropout) is little work on large arrays, and each device does all of it and holds all of them. Sequence parallelism
# divides these arrays too: between the products, each device has a part of every sequence
# ([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198)). A model says so itself, with `jax.lax.with_sharding_constraint`,
# and a pipeline passes it on to the devices of each stage.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpp

jax.config.update("jax_num_cpu_devices", 8)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## The model
#
# Activations have the shape `[examples, positions, width]`. A block gathers the positions before its products, of which each device
# computes some heads or some hidden units, and divides the positions again where the products end.


# %%
def between(x):
    return jax.lax.with_sharding_constraint(x, P(None, "model", None))


def whole(x):
    return jax.lax.with_sharding_constraint(x, P(None, None, None))


# %%
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        causal = nn.make_causal_mask(x[..., 0])
        h = whole(nn.LayerNorm()(x))
        x = between(x + nn.MultiHeadDotProductAttention(4, name="attn")(h, mask=causal))
        h = nn.gelu(nn.Dense(64, name="up")(whole(nn.LayerNorm()(x))))
        return between(x + nn.Dense(16, name="down")(h))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = between(x)
        for _ in range(2):
            x = Block()(x)
        return x


# %% [markdown]
# ## The pipeline
#
# The mesh has two stages, each with two replicas of two devices. The rules divide heads and hidden units over `model`.

# %%
mesh = jax.make_mesh((2, 2, 2), ("pipe", "data", "model"))
rules = {"*/attn": "heads", "*/up": "column", "*/down": "row"}
model = Model()


def loss_fn(params, batch):
    return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)


keys = jax.random.split(jax.random.key(0), 3)
batch = {name: jax.random.normal(key, (8, 32, 16)) for name, key in zip("xy", keys[:2], strict=True)}
optimizer = optax.sgd(0.1, momentum=0.9)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=2, mesh=mesh, shardings=rules)
state = pipe.init(lambda key: model.init(key, batch["x"]), keys[2], batch)
pipe.verify(state, batch)  # raises unless a step equals plain JAX

# %% [markdown]
# ## What it communicates
#
# Each block gathers its positions twice (`all-gather`). A product of which each device has a part ends in a sum that each device
# needs for its own positions only: GPUs run one `reduce-scatter`, and CPUs an `all-reduce`, of which each takes its part.

# %%
communicated = pipe.collectives(batch)
print(communicated)
assert communicated.count("all-gather", "model") > 0

# %%
for _ in range(10):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)
assert np.isfinite(metrics.loss)

# %% [markdown]
# ## What to look out for
#
# - `P(None, "model", None)` says nothing of replicas: inside a stage, values are those of one replica.
# - The number of positions is a multiple of the devices along `model`.
# - Norms and dropout then hold and compute a share of their activations. What crosses between stages is whole on each device.
# - If the sequence is too long for attention itself, see [Run ring attention](ring_attention.ipynb).
