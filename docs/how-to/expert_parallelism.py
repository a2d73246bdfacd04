# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [mixture of experts, MoE, all-to-all, expert parallel, router, shard_map, model axis]
# ---

# %% [markdown]
# # Divide experts over devices
#
# A mixture of experts has many feed-forward layers side by side, and a router that sends each token to one of them. Expert
# parallelism puts the experts on different devices: tokens travel to their expert and back, by two `all_to_all`s. In JAX this is a
# `jax.shard_map`; inside a pipeline it runs as it is, on the devices of each stage.

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
# ## Experts
#
# Each device has the tokens of its part of every sequence, and two of four experts. `slots[b, t, e, s]` is 1 where token `t` of
# example `b` is the token number `s` that the device sends to expert `e`.


# %%
def experts(x, choice, up, down):
    num_experts, num_slots = up.shape[0] * jax.lax.axis_size("model"), x.shape[1]
    chosen = jax.nn.one_hot(choice, num_experts, dtype=x.dtype)
    number = (jnp.cumsum(chosen, 1) - 1).astype(int)
    slots = chosen[..., None] * jax.nn.one_hot(number, num_slots, dtype=x.dtype)
    sent = jnp.einsum("btes,btw->ebsw", slots, x)
    here = jax.lax.all_to_all(sent, "model", split_axis=0, concat_axis=2, tiled=True)
    done = jnp.einsum("ebsh,ehw->ebsw", nn.gelu(jnp.einsum("ebsw,ewh->ebsh", here, up)), down)
    back = jax.lax.all_to_all(done, "model", split_axis=2, concat_axis=0, tiled=True)
    return jnp.einsum("btes,ebsw->btw", slots, back)


# %% [markdown]
# The same in plain JAX: every expert computes all tokens, and each token takes what its expert made.


# %%
def divided(*operands):
    tokens, own = P(None, "model"), P("model")
    specs = (tokens, tokens, own, own)
    return jax.shard_map(experts, in_specs=specs, out_specs=tokens, axis_names={"model"})(*operands)


def plain(x, choice, up, down):
    every = jnp.einsum("bteh,ehw->btew", nn.gelu(jnp.einsum("btw,ewh->bteh", x, up)), down)
    return jnp.take_along_axis(every, choice[..., None, None], 2)[..., 0, :]


# %%
class Experts(nn.Module):
    run: callable

    @nn.compact
    def __call__(self, x):
        scores = nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = self.param("up", init, (4, 16, 32)), self.param("down", init, (4, 32, 16))
        return scores.max(-1, keepdims=True) * self.run(x, scores.argmax(-1), up, down)


class Model(nn.Module):
    run: callable

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + Experts(self.run)(nn.LayerNorm()(x))
        return x


# %% [markdown]
# ## The pipeline
#
# Experts are divided over `model`, with their gradients and their optimizer state.


# %%
def loss_with(run):
    model = Model(run)
    return lambda params, batch: jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)


mesh = jax.make_mesh((2, 2, 2), ("pipe", "data", "model"))
rules = {"*/up": P("model"), "*/down": P("model")}
keys = jax.random.split(jax.random.key(0), 3)
batch = {name: jax.random.normal(key, (8, 32, 16)) for name, key in zip("xy", keys[:2], strict=True)}
params = Model(plain).init(keys[2], batch["x"])

# %%
optimizer = optax.sgd(0.1, momentum=0.9)
loss_fn = loss_with(divided)
options = {"num_stages": 2, "num_microbatches": 2, "mesh": mesh, "shardings": rules}
pipe = jaxpp.Pipeline(loss_fn, optimizer, **options)
state = pipe.init(params, batch)
expected = jax.jit(loss_with(plain))(params, batch)
np.testing.assert_allclose(pipe.evaluate(state, batch).loss, expected, rtol=1e-5)
pipe.verify(state, batch)  # and a step equals plain JAX, gradients included

# %% [markdown]
# ## What it communicates

# %%
communicated = pipe.collectives(batch)
print(communicated)
assert communicated.count("all-to-all", "model") > 0

# %% [markdown]
# ## What to look out for
#
# - There is a slot for every token here, so that none is dropped whatever the router says. Large models have fewer
#   (`num_slots = 2 * length // num_experts`, for example), and `jax.nn.one_hot` drops the tokens that have none: these keep their
#   residual alone.
# - Slots are counted for each example, so examples do not mix. If the tokens of a microbatch compete for slots, results depend on
#   the microbatches, and jaxpp says so in a `MicrobatchWarning`.
# - A loss that balances the load is a mean over tokens: return it beside the activations and add it to the loss.
