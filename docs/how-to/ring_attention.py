# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [context parallelism, sequence parallelism, long context, shard_map, ppermute, flash attention, model axis]
# ---

# %% [markdown]
# # Run ring attention over long sequences
#
# Attention over a long sequence needs more memory than a device has, even with a single example. Context parallelism divides the
# positions of a sequence over the devices along `model`. Each device keeps its queries; keys and values go round from device to
# device, and after one round every query has seen every key ([Liu et al., 2023](https://arxiv.org/abs/2310.01889)). In JAX this is
# a `jax.shard_map` with `ppermute`; inside a pipeline it runs as it is, on the devices of each stage.

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
# ## The ring
#
# Queries, keys and values have the shape `[examples, positions, heads, features]`; a device has its part of the positions. It takes
# the softmax over one part of the keys after another: `top` is the largest score so far, `total` the sum of the exponentials, and
# `out` the sum of the values that these weight.


# %%
def seen(carry, k, v, q, mask):
    """Take one part of the keys and values in."""
    top, total, out = carry
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores, -1e9)
    new = jnp.maximum(top, scores.max(-1))
    weights, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
    total = total * old + weights.sum(-1)
    out = out * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
    return new, total, out


# %% [markdown]
# Own keys come first, so that each query has seen at least itself. In turn `i`, a device holds the keys of the device `i` places
# before it.


# %%
def ring(q, k, v):
    size, mine, length = jax.lax.axis_size("model"), jax.lax.axis_index("model"), q.shape[1]
    place, after = jnp.arange(length), [(a, (a + 1) % size) for a in range(size)]
    out = jnp.zeros_like(q).swapaxes(1, 2)
    carry = out[..., 0] - 1e9, out[..., 0], out
    for turn in range(size):
        keys = (mine - turn) % size * length + place
        carry = seen(carry, k, v, q, (mine * length + place)[:, None] >= keys)
        if turn + 1 < size:
            k, v = jax.lax.ppermute((k, v), "model", after)
    _, total, out = carry
    return (out / total[..., None]).swapaxes(1, 2)


# %%
def ring_attention(q, k, v):
    parts = P(None, "model")  # positions are divided, examples are not
    return jax.shard_map(ring, in_specs=parts, out_specs=parts, axis_names={"model"})(q, k, v)


# %% [markdown]
# ## The pipeline
#
# The same model with plain attention shows that nothing else changes.


# %%
def plain_attention(q, k, v):
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(q[..., 0, 0]))


class Model(nn.Module):
    attend: callable

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            q, k, v = (nn.DenseGeneral((2, 8))(nn.LayerNorm()(x)) for _ in range(3))
            x = x + nn.DenseGeneral(16, axis=(-2, -1))(self.attend(q, k, v))
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return x


# %%
def loss_with(attend):
    model = Model(attend)
    return lambda params, batch: jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)


mesh = jax.make_mesh((2, 1, 4), ("pipe", "data", "model"))
keys = jax.random.split(jax.random.key(0), 3)
batch = {name: jax.random.normal(key, (4, 64, 16)) for name, key in zip("xy", keys[:2], strict=True)}
params = Model(plain_attention).init(keys[2], batch["x"])

# %%
optimizer = optax.sgd(0.1, momentum=0.9)
loss_fn = loss_with(ring_attention)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=2, mesh=mesh)
state = pipe.init(params, batch)
expected = jax.jit(loss_with(plain_attention))(params, batch)
_, metrics = pipe.step(state, batch, donate=False)
np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
pipe.verify(state, batch)  # and the gradients of the step equal those of plain JAX

# %% [markdown]
# ## What it communicates
#
# `ppermute` is a `collective-permute`: each layer sends keys and values three times in the forward, and the backward sends them and
# their cotangents. Everything but attention works position by position, and needs no communication.

# %%
communicated = pipe.collectives(batch)
print(communicated)
assert communicated.count("collective-permute", "model") > 0

# %% [markdown]
# ## What to look out for
#
# - Parameters are whole on each device here, and their gradients are summed over `model` once a microbatch. `shardings=` divides
#   parameters as well, where the model is large too.
# - With a causal mask, the first device has the least to do, since half of the parts are masked. Give each device one part of the
#   beginning and one of the end, as ring attention is usually balanced.
# - On GPUs, replace `seen` by a kernel that returns its `top` and `total`, as flash attention does.
