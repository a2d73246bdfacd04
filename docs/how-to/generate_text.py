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
# # Generate text while you train
#
# You train a language model over several devices and want to see now and then what it writes. The pipeline can generate with the
# state that it trains: no copy of the parameters, no second model, each stage with its part of the cache. This recipe has a Flax
# transformer with a cache, trains it, and lets it write after every 100 steps.

# %%
import argparse
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 2)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## A cache, as Flax users write it
#
# `decode=True` is a second way to call the same module, with the same parameters. It keeps keys and values in the collection
# `cache`, and goes on where the last call ended. (`nn.MultiHeadDotProductAttention(decode=True)` has such a cache too. It takes one
# token a call, so prompts go in token by token.)


# %%
class WithCache(nn.Module):
    decode: bool

    def cached(self, k, v):
        """All keys and values so far, and how many there were before these."""
        keys, values = (self.variable("cache", name, jnp.zeros, k.shape) for name in ("keys", "values"))
        index = self.variable("cache", "index", jnp.zeros, (), int)
        start = index.value
        if not self.is_initializing():
            keys.value = jax.lax.dynamic_update_slice_in_dim(keys.value, k, start, axis=1)
            values.value = jax.lax.dynamic_update_slice_in_dim(values.value, v, start, axis=1)
            index.value = start + k.shape[1]
        return keys.value, values.value, start


# %%
class Attention(WithCache):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(nn.Dense(3 * x.shape[-1], name="qkv")(x), 3, axis=-1)
        k, v, start = self.cached(k, v) if self.decode else (k, v, 0)
        seen = jnp.arange(k.shape[1]) <= start + jnp.arange(x.shape[1])[:, None]
        return nn.softmax(jnp.where(seen, q @ k.swapaxes(1, 2) / x.shape[-1] ** 0.5, -1e9)) @ v


# %%
class LM(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(128, 64, name="embed")
        x = embed(tokens)
        for k in range(2):
            h = Attention(self.decode, name=f"attention_{k}")(nn.LayerNorm(name=f"norm_{k}")(x))
            x = x + nn.Dense(64, name=f"out_{k}")(h)
            x = x + nn.Dense(64, name=f"down_{k}")(nn.gelu(nn.Dense(128, name=f"up_{k}")(x)))
        return embed.attend(nn.LayerNorm(name="norm")(x))


# %% [markdown]
# ## Train
#
# Tokens are the characters of a Python module.

# %%
text = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8).astype("i4") % 128


def batch_of(step):
    starts = np.random.default_rng(step).integers(0, len(text) - 48, 16)
    return text[starts[:, None] + np.arange(49)]


def loss_fn(params, batch):
    logits = LM().apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=2, num_microbatches=4)
state = pipe.init(lambda key: LM().init(key, batch_of(0))["params"], jax.random.key(0), batch_of(0))

# %% [markdown]
# ## What generates
#
# A function for one sequence, from the carry and some tokens to the new carry and the logits; and the carry of a sequence that has
# had no token. The carry is the cache that the model makes for a batch of one. It is as long as the tokens that `init` is given,
# here 96.


# %%
def next_logits(params, cache, tokens):
    logits, new = LM(decode=True).apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
    return new["cache"], logits


shapes = jax.eval_shape(LM(decode=True).init, jax.random.key(0), jnp.ones((1, 96), int))["cache"]
empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
prompts = [list(words.encode()) for words in ("def ", "    if ", "        self.", "import ", "raise ")]
options = {"num_tokens": 40, "stop": ord("\n"), "sample": jaxpp.Sampling(temperature=0.6, top_k=20)}

# %%
for step in range(200):
    state, metrics = pipe.step(state, batch_of(step))
    if step % 100 == 99:
        print(f"after {step + 1} steps, loss {metrics.loss:.2f}:")
        written = pipe.generate(state, next_logits, empty, prompts, key=jax.random.key(step), **options).collect()
        for prompt, made in zip(prompts, written, strict=True):
            print("  " + bytes(prompt + made.tolist()).decode().rstrip())

# %% [markdown]
# ## Check it
#
# The same on one device: a plain loop. The token at index q of sequence i is drawn with `fold_in(fold_in(key, i), q)`.


# %%
def plain(params, number, prompt, key):
    cache, logits = decode(params, empty, np.array([prompt]))
    made = []
    while len(made) < 40:
        own = jax.random.fold_in(jax.random.fold_in(key, number), len(prompt) + len(made))
        made.append(int(options["sample"](logits[0, -1], own)))
        if made[-1] == options["stop"]:
            break
        cache, logits = decode(params, cache, np.array([made[-1:]]))
    return made


decode, params = jax.jit(next_logits), jaxpp.gather(state.params)
for number, (prompt, made) in enumerate(zip(prompts, written, strict=True)):
    assert plain(params, number, prompt, jax.random.key(199)) == made.tolist()

# %% [markdown]
# ## Tokens as they come
#
# `generate` returns an iterator. Tokens of one prompt come in order, those of several prompts mixed. `logprob` is the logarithm of
# the probability that the model gave the token.

# %%
likely = 0.0
with pipe.generate(state, next_logits, empty, prompts[:2], num_tokens=5, num_groups=2) as tokens:
    for token in tokens:
        likely += token.logprob
        print(token.prompt, token.index, repr(chr(token.token)), "last" if token.last else "")
print(f"log-probability of both: {likely:.2f}")

# %% [markdown]
# A prompt for which the cache has no room is refused before anything runs:

# %%
try:
    pipe.generate(state, next_logits, empty, prompts, num_tokens=100)
except ValueError as error:
    print(error)

# %% [markdown]
# ## What to look out for
#
# - A step consumes its state, so finish the generation before the next step, or leave the `with` block, which drops the caches.
# - Define the function once. A new function object is traced and compiled again, also if its text is the same.
# - With as many prompts as stages, or more, no stage waits. `group_size=8` makes each group eight sequences, for more tokens in
#   nearly the same time; the caches of all of them need room.
# - For one token a call, as in `nn.MultiHeadDotProductAttention(decode=True)`, nothing changes but the time that prompts take.
