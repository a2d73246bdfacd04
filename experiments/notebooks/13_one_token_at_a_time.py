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
# # 13. One token at a time
#
# Twelve chapters trained models. This chapter and the next let a trained model write. A language model writes one token after
# another, and needs each token before it can begin with the next. What does that cost, and what happens if the layers of the model
# are on four devices?

# %%
import codecs
import this  # prints a short text

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The lines that were printed are all that our model will read. Its tokens are characters. It will know these lines by heart, so we
# shall see at once whether it writes what it should.
#
# ## Why each token costs so much
#
# To compute a token, attention looks at all tokens before it. From each of them it needs two vectors, the **key** and the
# **value**. A simple loop gives the whole text to the model for each new token, and so computes the keys and values of all earlier
# tokens again and again.
#
# They are the same every time: a token sees only the tokens before it, so its key and its value do not change when more tokens
# follow. They can be kept. The arrays in which a block keeps them are called its **cache** (others say KV cache). The cache has
# room for a fixed number of tokens, here 72.
#
# ## A model with a cache
#
# The model is the GPT of chapter 8, with four blocks. A block gets three things: the features `x` of the new tokens, its cache, and
# the positions `at` of the new tokens in the text. It writes the keys and values of the new tokens into the cache, attends to
# everything that is in there, and returns the cache with its result.

# %%
WIDTH, LENGTH = 64, 72  # features of a token; the most tokens that the cache has room for


def dense(features, name):
    return nn.Dense(features, use_bias=False, name=name)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, cache, at):
        q, k, v = jnp.split(dense(3 * WIDTH, "qkv")(nn.RMSNorm(name="norm_1")(x)), 3, axis=-1)
        keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], k, at[0], axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["values"], v, at[0], axis=1)
        seen = jnp.arange(keys.shape[1]) <= at[:, None]  # a token sees itself and those before it
        weights = nn.softmax(jnp.where(seen, q @ keys.swapaxes(1, 2) / WIDTH**0.5, -1e9))
        x = x + dense(WIDTH, "out")(weights @ values)
        h = nn.relu(dense(2 * WIDTH, "fc")(nn.RMSNorm(name="norm_2")(x)))
        return {"keys": keys, "values": values}, x + dense(WIDTH, "proj")(h)


# %% [markdown]
# The whole model has a cache too: those of its blocks, and the number of tokens that it has seen. From this number follow the
# positions of the new tokens. `empty` makes a cache without tokens.


# %%
class GPT(nn.Module):
    @nn.compact
    def __call__(self, cache, tokens):
        embed = nn.Embed(128, WIDTH, name="embed")
        at = cache["used"] + jnp.arange(tokens.shape[1])
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH, name="positions")(at)
        blocks = {}
        for name, old in cache["blocks"].items():
            blocks[name], x = Block(name=name)(x, old, at)
        return {"used": at[-1] + 1, "blocks": blocks}, embed.attend(nn.RMSNorm(name="norm")(x))


def empty(batch, length):
    room = {name: jnp.zeros((batch, length, WIDTH)) for name in ("keys", "values")}
    return {"used": jnp.int32(0), "blocks": {f"block_{k}": room for k in range(4)}}


# %% [markdown]
# ## Training
#
# In training, all tokens of a line are known, so the model gets them in one call, with an empty cache. Each line is filled up with
# line ends. Training is not the subject here, so plain JAX does it, on one device.

# %%
lines = [line for line in codecs.decode(this.s, "rot13").splitlines() if line]
batch = np.array([list(line.ljust(LENGTH + 1, "\n").encode()) for line in lines], np.int32)


def loss_fn(params, batch):
    _, logits = GPT().apply(params, empty(len(batch), LENGTH), batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def init_fn(key):
    return GPT().init(key, empty(1, LENGTH), jnp.zeros((1, 1), int))


# %%
optimizer = optax.adam(3e-3)


@jax.jit
def step(params, optimizer_state):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, loss


params = jax.jit(init_fn)(jax.random.key(0))
optimizer_state = optimizer.init(params)
for _ in range(150):
    params, optimizer_state, loss = step(params, optimizer_state)
print(f"{len(lines)} lines, loss {loss:.3f} after 150 steps")

# %% [markdown]
# ## Writing, on one device
#
# First the plain loop on one device. It is given the beginning of a line, the **prompt**. The whole prompt goes through the model
# in one call, because all its tokens are known. This call is called the **prefill**: it fills the cache. From its last logits we
# take the most likely character; always to take the most likely one is called **greedy**. From then on each call gets a single
# token, the one that was just chosen, and the cache. The loop stops at the end of a line.


# %%
@jax.jit
def decode(params, cache, tokens):
    return GPT().apply(params, cache, tokens)


def write(prompt, most):
    cache, logits = decode(params, empty(1, LENGTH), np.array([list(prompt.encode())]))
    written = [int(logits[0, -1].argmax())]
    while len(written) < most and written[-1] != ord("\n"):
        cache, logits = decode(params, cache, np.array([written[-1:]]))
        written.append(int(logits[0, -1].argmax()))
    return bytes(written).decode()


for prompt in ("Beautiful", "Errors", "Now", "If"):
    print(prompt + write(prompt, most=60).rstrip())

# %% [markdown]
# With the cache the model must write what it writes without one. Without a cache, each token is computed from the whole text so
# far, with an empty cache every time:


# %%
def write_again(prompt, most):
    tokens = list(prompt.encode())
    for _ in range(most):
        _, logits = decode(params, empty(1, LENGTH), np.array([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[-most:]).decode()


assert write("Beautiful", most=4) == write_again("Beautiful", most=4)

# %% [markdown]
# ## What a token costs
#
# The compiler counts the floating-point operations (FLOPs) of a call. We compare the next token after n tokens: all n of them
# again, or the last of them alone with a cache that has room for n.


# %%
def flops(length, new):
    compiled = decode.lower(params, empty(1, length), jnp.zeros((1, new), int)).compile()
    return compiled.cost_analysis()["flops"]


lengths = [16, 32, 64]
again, cached = [flops(n, n) for n in lengths], [flops(n, 1) for n in lengths]
for n, without, with_cache in zip(lengths, again, cached, strict=True):
    print(f"{n:2} tokens: {without / 1e6:6.2f} million FLOPs without a cache, {with_cache / 1e6:.2f} with one")

# %%
fig, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(lengths, again, "o-", color="#D55E00", label="all tokens again")
axes.plot(lengths, cached, "s-", color="#0072B2", label="the last token, with a cache")
axes.set(xlabel="tokens so far", ylabel="FLOPs for the next token", ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Without a cache the cost grows with the number of tokens, and somewhat faster. With a cache it grows slowly: the products with the
# weights are those of one token, however long the text is. Only attention has more to look at.
#
# (In our loop the cache always has room for 72 tokens, and attention computes with all of the room, also where it is still empty.
# So each call costs a little more than the last point of the blue line says.)
#
# ## Over four devices, by hand
#
# Now the blocks are on four devices, one on each. The cache of a block is on the device of the block. It is made there, and it
# stays there, because no other block reads or writes it. Device 0 also embeds the token, and device 3 chooses the next one. (Both
# need the table of the embedding, so each has a copy.)

# %%
devices, inner = [jax.devices()[k % len(jax.devices())] for k in range(4)], params["params"]
own = [jax.device_put(inner[f"block_{k}"], device) for k, device in enumerate(devices)]
first = jax.device_put({"embed": inner["embed"], "positions": inner["positions"]}, devices[0])
last = jax.device_put({"embed": inner["embed"], "norm": inner["norm"]}, devices[3])


@jax.jit
def enter(first, token, at):
    return first["embed"]["embedding"][token] + first["positions"]["embedding"][at]


@jax.jit
def choose(last, x):
    return (nn.RMSNorm().apply({"params": last["norm"]}, x) @ last["embed"]["embedding"].T).argmax(-1)


block = jax.jit(lambda own, cache, x, at: Block().apply({"params": own}, x, cache, at), donate_argnums=1)


# %% [markdown]
# One token on its way through the four devices, with the next token as the result, is called a **pass**. Between two devices
# travels one activation, as in chapter 3. (`donate_argnums` above lets a block write into the cache that it was given. Otherwise
# each call would make a copy of the cache.)


# %%
def one_pass(caches, token, at):
    x = enter(first, jax.device_put(token, devices[0]), at)
    for k, device in enumerate(devices):
        caches[k], x = block(own[k], caches[k], jax.device_put(x, device), at)
    return choose(last, x)


def new_caches():
    return [jax.device_put(empty(1, LENGTH)["blocks"]["block_0"], device) for device in devices]


# %%
caches, prompt, written = new_caches(), list(b"Flat"), []
for index in range(30):  # the prompt too goes through token by token
    token = [prompt[index]] if index < len(prompt) else [written[-1]]
    found = one_pass(caches, np.array([token]), np.array([index])).item()
    if index + 1 >= len(prompt):
        written.append(found)
print("Flat" + bytes(written).decode().partition("\n")[0])
assert bytes(written).decode().startswith(write("Flat", most=20))
size = sum(leaf.nbytes for leaf in caches[0].values())
print(f"a block's cache: {size:,} bytes, which stay; an activation: {WIDTH * 4} bytes, which travel")

# %% [markdown]
# It writes the same line. But how busy are the devices? While device 2 computes, device 3 waits for its result. Device 1 has
# nothing to do before the next token comes, and device 0 waits for device 3, which chooses that token. At any time a single device
# works, as in the naive pipeline of chapter 4. This is its picture. The numbers are tokens, each of which needs the one before.

# %%
alone = jaxpp.schedule.ring(num_ranks=4, num_groups=1, num_turns=8)
print(f"bubble {jaxpp.schedule.simulate(alone).bubble_fraction:.0%}")
alone.figure()

# %% [markdown]
# In training, microbatches were the remedy: several parts of the batch were on their way at the same time. Here there is one token,
# which cannot be divided. So a pipeline does not make one text faster, however many devices it has. What four devices can do is to
# hold a model that one device cannot hold, and to write several texts at once. That is the next chapter.
#
# ## Takeaway
#
# A cache keeps the keys and values of earlier tokens, so a pass computes one new token only. In a pipeline each block's cache stays
# on its device, and one small activation travels. But a token needs the token before it, so with one text a single device works at
# any time.
#
# ## Questions
#
# **1.** Why is the prompt given to the model in one call, and the tokens after it one by one?
#
# <details><summary>Answer</summary>
#
# All tokens of the prompt are known, so they can be computed side by side, like the tokens of a batch in training. A token that the
# model writes is known only when the call before has ended.
#
# </details>
#
# **2.** A model of 32 blocks of width 4,096 (that of chapter 2) keeps its cache in bfloat16. How large is the cache of one text of
# 2,048 tokens, and how much of it does each of eight devices hold?
#
# <details><summary>Answer</summary>
#
# Each block keeps two vectors of 4,096 numbers for each token: 2 x 4,096 x 2 bytes = 16 KiB. For 2,048 tokens that is 32 MiB in
# each block, and 1 GiB in all 32. Each device holds the caches of its own four blocks, 128 MiB.
#
# </details>
#
# **3.** A colleague moves the caches along with the activation from device to device, since "the model needs its cache". What is
# wrong?
#
# <details><summary>Answer</summary>
#
# The result is right, but only block k needs the cache of block k, and block k never moves. In this chapter it would send 36 KiB
# where 256 bytes are enough, and the more so the longer the text is.
#
# </details>
#
# Next: [14. Many sequences at once](14_many_sequences_at_once.ipynb)
