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
# Eleven chapters trained models. This one uses a model that is trained. There is no backward, so a pipeline seems to have an easy
# life: examples enter at one end, predictions leave at the other. That is so as long as the examples are there when they are
# needed. A language model writes its own input, one token after another, and a pipeline that has to wait for its own output runs
# empty. How are four devices kept busy then?

# %%
import argparse
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## A model with a memory
#
# The model is the small GPT of chapter 8, with four blocks and one head in each. Its tokens are characters. One thing is new. To
# compute a token, attention needs two vectors of every token before it, a key and a value. They do not change when more tokens
# come, so a block can keep them. What it keeps is called the **cache** (also KV cache). A block is given the cache and the
# positions `at` of the tokens that are new; it writes their keys and values into the cache, and returns it.

# %%
WIDTH, LENGTH = 64, 64  # features of a token; the most tokens that there is room for
Dense = functools.partial(nn.Dense, use_bias=False)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, cache, at):
        q, k, v = jnp.split(Dense(3 * WIDTH, name="qkv")(nn.RMSNorm(name="norm_1")(x)), 3, axis=-1)
        keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], k, at[0], axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(cache["values"], v, at[0], axis=1)
        seen = jnp.arange(keys.shape[1]) <= at[:, None]  # a token sees itself and those before it
        weights = nn.softmax(jnp.where(seen, q @ keys.swapaxes(1, 2) / WIDTH**0.5, -1e9))
        x = x + Dense(WIDTH, name="out")(weights @ values)
        h = nn.relu(Dense(2 * WIDTH, name="fc")(nn.RMSNorm(name="norm_2")(x)))
        return {"keys": keys, "values": values}, x + Dense(WIDTH, name="proj")(h)


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
# To train, all tokens of a text are given at once, with an empty cache that is as long as the text. The text is the source code
# of one of Python's modules.


# %%
def loss_fn(params, batch):
    _, logits = GPT().apply(params, empty(len(batch), LENGTH), batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)
text = text[text < 128]


def batch_of(step):
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, 8)
    return text[starts[:, None] + np.arange(LENGTH + 1)]


# %%
def init_fn(key):
    return GPT().init(key, empty(1, LENGTH), jnp.zeros((1, 1), int))


optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 5e-3, warmup_steps=30, decay_steps=250))
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, num_microbatches=4)
state = pipe.init(init_fn, jax.random.key(0), batch_of(0))
for step in range(250):
    state, metrics = pipe.step(state, batch_of(step))
print(f"loss {metrics.loss:.2f} after {state.step} steps")

# %% [markdown]
# ## Many examples at once
#
# The easy half first. `pipe.apply` runs any function of the parameters through the stages, forward only, and returns what the
# function returns. Here it is how surprised the model is by each character of a text:


# %%
def surprise(params, batch):
    _, logits = GPT().apply(params, empty(len(batch), LENGTH), batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


params = jaxpp.gather(state.params)  # on one device, for comparison
found = pipe.apply(state, batch_of(250), surprise)
np.testing.assert_allclose(found, jax.jit(surprise)(params, batch_of(250)), atol=1e-4)
print(f"{found.shape[0]} texts, {found.shape[1]} characters each, on {found.device}: the device of the last stage")

# %% [markdown]
# With m microbatches and p stages this takes m + p - 1 forwards of a stage, so the bubble is (p - 1) / (m + p - 1). If there are
# many batches, it can be smaller. Nothing has to be waited for between two batches: the first microbatch of the next batch enters
# while the last one of this batch is still on its way. `pipe.stream` does that. A stream of k batches fills the pipeline once and
# drains it once.

# %%
for num_batches in (1, 10):
    order = jaxpp.schedule.forward(num_ranks=4, num_microbatches=4 * num_batches)
    print(f"{num_batches} batches: bubble {jaxpp.schedule.simulate(order).bubble_fraction:.1%}")
means = [each.mean() for each in pipe.stream(state, map(batch_of, range(250, 260)), surprise)]
print("surprise of ten batches:", *(f"{mean:.2f}" for mean in means))

# %% [markdown]
# ## One token at a time
#
# Now the model is to write. It is given the beginning of a text, the prompt. Its last logits say which character is likely to come
# next; we always take the likeliest (this is called **greedy**). The character is appended, and the model is asked again. Without
# a cache all tokens are computed again for each new one. With a cache the model computes the new token alone, and what it costs
# does not grow. We count the floating-point operations (FLOPs) of both:


# %%
@jax.jit
def decode(params, cache, tokens):
    return GPT().apply(params, cache, tokens)


def flops(length, new):
    compiled = decode.lower(params, empty(1, length), jnp.zeros((1, new), int)).compile()
    return compiled.cost_analysis()["flops"]


lengths = [8, 16, 32, 64]
again, cached = [flops(n, n) for n in lengths], [flops(LENGTH, 1) for _ in lengths]
fig, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(lengths, again, "o-", color="#D55E00", label="all tokens again")
axes.plot(lengths, cached, "s-", color="#0072B2", label="with a cache")
axes.set(xlabel="tokens so far", ylabel="FLOPs for the next token", ylim=(0, None))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# This is the loop on one device. The whole prompt goes through the model in one call, which is called **prefill**: its tokens are
# all known, so they can be computed side by side. Then each call takes one token. The loop stops at the end of a line.


# %%
def write(prompt, most):
    cache, logits = decode(params, empty(1, LENGTH), np.array([encode(prompt)]))
    written = [int(logits[0, -1].argmax())]
    while len(written) < most and written[-1] != END:
        cache, logits = decode(params, cache, np.array([written[-1:]]))
        written.append(int(logits[0, -1].argmax()))
    return written


encode, END = lambda words: list(words.encode()), ord("\n")
prompts = ["def ", "import ", "        self", "for ", "class A", "        if a", "self", "raise V", "    "]
plain = [write(prompt, most=24) for prompt in prompts]
for prompt, written in zip(prompts[:4], plain, strict=False):
    print(prompt + bytes(written).decode().rstrip())

# %% [markdown]
# ## Over four devices, by hand
#
# Each device gets one block, and the block's cache with it. The cache is made on that device, and stays there: it is read and
# written by this block and by no other. Device 0 also embeds the token, and device 3 chooses the next one. (The embedding is
# needed by both, so each has a copy.) Chapter 3 sent activations from stage to stage in the same way.

# %%
devices, inner = jax.devices()[:4], params["params"]
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
# A pass takes one token through all stages and gives the next one. `donate_argnums` above lets a block write into the cache that it
# was given, instead of a copy.


# %%
def one_pass(caches, token, at):
    x = enter(first, jax.device_put(token, devices[0]), at)
    for k, device in enumerate(devices):
        caches[k], x = block(own[k], caches[k], jax.device_put(x, device), at)
    return choose(last, x)


def new_caches():
    return [jax.device_put(empty(1, LENGTH)["blocks"]["block_0"], device) for device in devices]


caches, token = new_caches(), np.array([encode("i")])
for index in range(8):
    token = one_pass(caches, token, np.array([index]))
    print(chr(token.item()), end="")
kept, sent = sum(leaf.nbytes for leaf in caches[0].values()), WIDTH * 4
print(f"\na block's cache stays on its device: {kept:,} bytes; what crosses a boundary: {sent} bytes for a token")

# %% [markdown]
# It works, and three of four devices wait at any time. The next pass cannot begin before this one has ended, because it needs its
# token. Microbatches do not help: there is only one token.
#
# ## The ring
#
# One text cannot keep four devices busy, but four texts can. While the token of the first text is in stage 1, stage 0 takes that
# of the second text. When the fourth text has left stage 0, the first one has passed the last stage, and its next token comes back
# to stage 0 just in time. The texts go round in a **ring**. Texts that go through the stages together are a group; below, each
# group is one text. One round, a pass for each group, is a turn. These are rings of one, two and four groups:

# %%
for num_groups in (1, 2, 4):
    ring = jaxpp.schedule.ring(num_ranks=4, num_groups=num_groups, num_turns=16 // num_groups)
    simulated = jaxpp.schedule.simulate(ring)
    print(f"{num_groups} in flight: 16 tokens in {simulated.makespan}, bubble {simulated.bubble_fraction:.0%}")
ring.figure()

# %% [markdown]
# The picture is the ring of four groups, with a colour for each group. Between its first pass and its last, no stage waits. With g
# groups and p stages that is so if g is at least p: g passes then take as long as a token needs to come back.
#
# The program is short. The host hands over the passes of all groups, turn after turn, and never looks at a token in between. This
# is the asynchronous dispatch of chapter 5: the devices' queues hold what was handed over, each device takes the next program when
# its input is there, and that makes the ring.

# %%
groups = [(new_caches(), [np.array([encode(letter)])]) for letter in "idfc"]
for index in range(16):  # the turns
    for caches, tokens in groups:
        tokens.append(one_pass(caches, tokens[-1], np.array([index])))
for letter, (_, tokens) in zip("idfc", groups, strict=True):
    written = [token.item() for token in tokens[1:]]
    wanted = write(letter, most=16)
    assert written[: len(wanted)] == wanted
    print(repr(letter + bytes(written).decode()))

# %% [markdown]
# ## The same with jaxpp
#
# What is missing in our ring? Prompts of different lengths need a prefill. Texts end at different times, and then a new text should
# take the free place. And tokens should come out while others are being made. `pipe.generate` does all that. It takes the function
# `decode` without a change, and the empty cache of one text: a cache is one kind of *carry*, which is what a text hands from one
# call to the next. Every stage keeps the part of the carry that belongs to its own part of the model.

# %%
tokens = list(pipe.generate(state, decode, empty(1, LENGTH), map(encode, prompts), num_tokens=24, stop=END))
generated = [[each.token for each in tokens if each.prompt == number] for number in range(len(prompts))]
assert generated == plain
print(tokens[0])
print(tokens[-1])

# %% [markdown]
# Nine texts, four devices, the same tokens as the loop on one device.
#
# A prompt is prefilled in passes of 64, 8 and 1 tokens, as they fit: a prompt of 15 tokens takes one pass of 8 and seven of 1. So
# three programs for each stage serve prompts of all lengths, and nothing is padded.
#
# ## Draw instead of choose
#
# The likeliest character is often dull. Instead, the next one can be drawn from the model's probabilities, made sharper or flatter
# by a **temperature**. The token at position q of text i is drawn with a key of its own, `fold_in(fold_in(key, i), q)`. So what is
# written does not depend on what else is in flight. We check that with one group and with four.

# %%
drawn, sampling = {}, jaxpp.Sampling(temperature=0.7, top_k=20)
for num_groups in (1, 4):
    options = {"sample": sampling, "key": jax.random.key(1), "stop": END, "num_groups": num_groups}
    drawn[num_groups] = list(pipe.generate(state, decode, empty(1, LENGTH), map(encode, prompts), num_tokens=40, **options))
alone, ring = ({(each.prompt, each.index): each.token for each in drawn[num_groups]} for num_groups in (1, 4))
assert alone == ring
for number, prompt in enumerate(prompts[:6]):
    print(prompt + "".join(chr(token) for (which, _), token in ring.items() if which == number).rstrip())

# %% [markdown]
# The tokens are the same, but they came in another order. Each dot below is a token; a red dot is the last token of its text.

# %%
fig, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
colours = ["#D55E00" if each.last else "#56B4E9" for each in drawn[4]]
axes.scatter(range(len(ring)), [each.prompt for each in drawn[4]], c=colours, s=9)
axes.set(xlabel="tokens in the order in which they came, four groups", ylabel="prompt", yticks=range(len(prompts)))
axes.invert_yaxis()
plt.show()

# %% [markdown]
# At first prompts 0 to 3 take turns: these are the four groups of the ring. When one of them ends, the next prompt takes its place
# while the others go on, and nobody waits until all four have ended. Others call this continuous batching.
#
# ## Takeaway
#
# Predictions flow through a pipeline without a barrier, so a stream of batches has one fill and one drain. A text is written one
# token at a time, so as many texts as there are stages go round in a ring, and the token of each comes back while the others
# compute. Caches stay on their stages and change in place; between stages travels one activation for each token. The tokens are
# those of the loop on one device.
#
# ## Questions
#
# **1.** A ring has four stages and two groups. Which part of the time does a stage wait, apart from fill and drain? And with eight
# groups?
#
# <details><summary>Answer</summary>
#
# Half of it. A token needs four units to come back, and a stage has two passes to do meanwhile. With eight groups a stage never
# waits, as with four. But each text gets its next token only every eight units instead of every four, and twice as many caches need
# room. More groups than stages help only if transfers take time, or if a pass is too short for the host.
#
# </details>
#
# **2.** A prompt has 100 tokens. How many passes does its prefill take? Why is it not padded to 128 tokens, which would be two
# passes of 64?
#
# <details><summary>Answer</summary>
#
# Nine: one of 64, four of 8, four of 1. Padding would write keys and values of tokens that are not there into the cache, and move
# the counter of used places. Every model would then need a mask for them. Without padding, any model works as it is.
#
# </details>
#
# **3.** One device writes a text with a batch of four texts instead of one in nearly the same time, since it reads its weights only
# once for all four. Does that make the ring superfluous?
#
# <details><summary>Answer</summary>
#
# No, the two go together. `group_size=4` puts four texts into each group, so each pass does the work of four in little more time.
# The ring is about something else: a group is in one stage at a time, however large it is, so p stages need p groups.
#
# </details>
#
# The guide [Predict, stream and generate](../../docs/guide/predict.md) goes on from here, with the caches of Flax models and with
# models that are not trained in jaxpp.
#
# Next: [15. Measured, not guessed](15_measured_not_guessed.ipynb)
