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
# # 14. Many sequences at once
#
# Chapter 13 ended with one text that is written over four devices: one device works, and three wait. The remedy is more work. In
# this chapter the work is first a large number of texts that are already there, which is easy. Then it is several texts that the
# model writes at the same time. They go round the devices one behind the other, and nobody waits.
#
# First, the model of chapter 13, which learns the same twenty lines.

# %%
import codecs
import this  # prints the lines

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

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


# %%
lines = [line for line in codecs.decode(this.s, "rot13").splitlines() if line]
batch = np.array([list(line.ljust(LENGTH + 1, "\n").encode()) for line in lines], np.int32)


def surprise(params, batch):  # for each character, how unexpected it is after those before it
    _, logits = GPT().apply(params, empty(len(batch), LENGTH), batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


def init_fn(key):
    return GPT().init(key, empty(1, LENGTH), jnp.zeros((1, 1), int))


# %%
optimizer = optax.adam(3e-3)


@jax.jit
def step(params, optimizer_state):
    loss, grads = jax.value_and_grad(lambda params: surprise(params, batch).mean())(params)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, loss


params = jax.jit(init_fn)(jax.random.key(0))
optimizer_state = optimizer.init(params)
for _ in range(150):
    params, optimizer_state, loss = step(params, optimizer_state)
print(f"loss {loss:.3f}")

# %% [markdown]
# ## Texts that are known
#
# How surprising is each character of the twenty lines to the model? All characters are known, and no line waits for another. So
# this is a training step without the backward pass: the lines are split into microbatches, and these go through the stages one
# behind the other. `jaxpp.Forward` does that with any function of the parameters. It needs no optimizer. `init` brings the
# parameters of each stage to its device.

# %%
forward = jaxpp.Forward(surprise, num_stages=4, num_microbatches=4)
spread = forward.init(params, batch)
found = forward.apply(spread, batch)
np.testing.assert_allclose(found, jax.jit(surprise)(params, batch), atol=1e-4)
for line in (2, 17):
    place = int(found[line].argmax())
    print(f"the most surprising character after {lines[line][: place + 1]!r}: {lines[line][place + 1]!r}")

# %% [markdown]
# That is as it should be. Two lines begin with `E`, and two with the same half sentence. Nobody can know which of the two it is.

# %% [markdown]
# With m microbatches and p stages this takes m + p - 1 forwards of a stage, so the bubble is (p - 1) / (m + p - 1). If there are
# many batches, it can be smaller still. Nothing has to be waited for between two batches: the first microbatch of the next one
# enters while the last one of this batch is still under way. `stream` does that. Ten batches then fill the pipeline once and
# drain it once.

# %%
for num_batches in (1, 10):
    order = jaxpp.schedule.forward(num_ranks=4, num_microbatches=4 * num_batches)
    print(f"{num_batches:2} batches: bubble {jaxpp.schedule.simulate(order).bubble_fraction:.1%}")
means = [float(each.mean()) for each in forward.stream(spread, [batch] * 10)]
np.testing.assert_allclose(means, loss, atol=0.02)

# %% [markdown]
# ## Texts that the model writes
#
# Now each text needs its own last token before it can go on. One text keeps one device busy. Four texts keep four devices busy:
#
# - The token of text 0 goes through stage 0, and moves on to stage 1. Stage 0 is free, and takes the token of text 1.
# - When text 3 has left stage 0, text 0 has just left the last stage, which has chosen its next token. That token is sent to
#   stage 0, which is free again. Text 0 begins its second round.
#
# The texts go round in a **ring**. Here are rings with one, two and four texts, each simulated for 16 tokens:

# %%
for num_texts in (1, 2, 4):
    ring = jaxpp.schedule.ring(num_ranks=4, num_groups=num_texts, num_turns=16 // num_texts)
    simulated = jaxpp.schedule.simulate(ring)
    print(f"{num_texts} texts: 16 tokens take {simulated.makespan} units, bubble {simulated.bubble_fraction:.0%}")
ring.figure()

# %% [markdown]
# The picture is the ring with four texts. Each text has a colour. (The legend says "group", since a place in the ring may hold a
# group of texts, which go through the stages together.) The numbers count the rounds, which are called turns. Follow the blue 0: it
# goes down the four stages, and at once the blue 1 begins in the first row. Between its first and its last action no stage waits.
# With p stages this takes p texts.
#
# ## The ring by hand
#
# These are the blocks on four devices, and the pass of one token through them, as in chapter 13.

# %%
devices, inner = [jax.devices()[k % len(jax.devices())] for k in range(4)], params["params"]
own = [jax.device_put(inner[f"block_{k}"], device) for k, device in enumerate(devices)]
first = jax.device_put({"embed": inner["embed"], "positions": inner["positions"]}, devices[0])
last = jax.device_put({"embed": inner["embed"], "norm": inner["norm"]}, devices[3])
block = jax.jit(lambda own, cache, x, at: Block().apply({"params": own}, x, cache, at), donate_argnums=1)


@jax.jit
def enter(first, token, at):
    return first["embed"]["embedding"][token] + first["positions"]["embedding"][at]


@jax.jit
def choose(last, x):
    return (nn.RMSNorm().apply({"params": last["norm"]}, x) @ last["embed"]["embedding"].T).argmax(-1)


# %%
def one_pass(caches, token, at):
    x = enter(first, jax.device_put(token, devices[0]), at)
    for k, device in enumerate(devices):
        caches[k], x = block(own[k], caches[k], jax.device_put(x, device), at)
    return choose(last, x)


def new_caches():
    return [jax.device_put(empty(1, LENGTH)["blocks"]["block_0"], device) for device in devices]


# %% [markdown]
# The loop over four texts is short. In each turn it hands out one pass for every text. It never looks at a token, so it never
# waits: this is the asynchronous dispatch of chapter 5. Every device has a queue of what it shall do, and begins with the next
# thing as soon as its input is there. The ring forms by itself.

# %%
letters = "BERN"  # the first letters of four lines
texts = [(new_caches(), [np.array([[ord(letter)]])]) for letter in letters]
for index in range(40):  # the turns
    for caches, tokens in texts:
        tokens.append(one_pass(caches, tokens[-1], np.array([index])))
for letter, (_, tokens) in zip(letters, texts, strict=True):
    written = bytes(token.item() for token in tokens[1:]).decode()
    print(letter + written.partition("\n")[0])
    assert any(line.startswith((letter + written).partition("\n")[0]) for line in lines)

# %% [markdown]
# ## The same with jaxpp
#
# Our ring lacks three things. Prompts have more than one token, and different lengths. Texts end at different times, and the next
# text should then take the place that is free. And we want to read tokens while others are being written. `generate` does all that.
#
# It takes a function of the parameters, the cache and the new tokens, and the empty cache of one text. (It calls the cache a
# *carry*: whatever a text hands from one pass to the next, also in models that have no attention.) The prompts are lists of tokens.
# What comes out is an iterator of tokens, each with the number of its prompt.


# %%
def decode(params, cache, tokens):
    return GPT().apply(params, cache, tokens)


def write(prompts, **options):
    coded = [list(prompt.encode()) for prompt in prompts]
    most = [LENGTH - len(prompt) for prompt in prompts]  # as many tokens as there is room for
    tokens = list(forward.generate(spread, decode, empty(1, LENGTH), coded, most, stop=ord("\n"), **options))
    texts = list(prompts)
    for each in tokens:
        texts[each.prompt] += chr(each.token)
    return tokens, [text.rstrip() for text in texts]


prompts = ["Beautiful", "Explicit", "Simple", "Complex", "Flat", "Sparse", "Read", "Errors", "Now"]
tokens, texts = write(prompts)
print(*texts, sep="\n")
assert set(texts) < set(lines)

# %% [markdown]
# Nine texts over four devices, each of which ends where its line ends. In which order did the tokens come? Each dot below is a
# token, and a red dot is the last token of its text.

# %%
fig, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
colours = ["#D55E00" if each.last else "#56B4E9" for each in tokens]
axes.scatter(range(len(tokens)), [each.prompt for each in tokens], c=colours, s=9)
axes.set(xlabel="tokens in the order in which they came", yticks=range(len(prompts)), yticklabels=prompts)
axes.invert_yaxis()
plt.show()

# %% [markdown]
# At first the texts 0 to 3 take turns: they are the ring. When one of them ends, the next prompt takes its place in the ring, while
# the others go on. Nobody waits until all four have ended. This is called **continuous batching**.
#
# How does a prompt of nine tokens enter? `generate` prefills it in passes of 64, 8 and 1 tokens, as they fit: here one of 8 and one
# of 1. So three programs for each stage serve prompts of all lengths, and nothing is filled up.
#
# ## Draw instead of choose
#
# A model that always takes the most likely token writes the same text every time. Instead, the next token can be drawn at random,
# with the probabilities that the model gives. A **temperature** makes them sharper (below 1) or flatter (above 1). Three lines
# begin with "Although", and two with "If the implementation is". So we give each of these prompts three times:

# %%
prompts, drawn = ["Although "] * 3 + ["If the implementation is "] * 3, {}
for num_groups in (1, 4):
    sample = jaxpp.Sampling(temperature=1.0, top_k=10)
    _, drawn[num_groups] = write(prompts, sample=sample, key=jax.random.key(2), num_groups=num_groups)
print(*drawn[4], sep="\n")
assert drawn[1] == drawn[4]

# %% [markdown]
# The last line of the cell compares: one text after another (`num_groups=1`) and four texts in a ring draw the same tokens. The
# token at position q of text i is drawn with a key of its own, `fold_in(fold_in(key, i), q)`, so what is written does not depend
# on which other texts are under way.
#
# (Was an unlikely character drawn somewhere? Then the model is in a text that it has never seen, and does not find back.)
#
# ## Takeaway
#
# Texts that are known flow through a pipeline like the microbatches of a training step, and a stream of batches fills and drains
# it once. Texts that are being written go round in a ring, as many as there are stages, so that a text's next token is needed
# just when it is there. When a text ends, another takes its place. What is written is what one device would write.
#
# ## Questions
#
# **1.** A ring has four stages and two texts. Which part of the time does a stage wait, apart from fill and drain? And with eight
# texts?
#
# <details><summary>Answer</summary>
#
# Half of it. A token needs four units to come back, and a stage has two passes to do meanwhile. With eight texts a stage never
# waits, as with four. But each text gets its next token only every eight units instead of every four, and twice as many caches need
# room. More texts than stages help only if transfers take time, or if a pass is too short for the host.
#
# </details>
#
# **2.** A prompt has 100 tokens. How many passes does its prefill take? Why is it not filled up to 128 tokens, which would be two
# passes of 64?
#
# <details><summary>Answer</summary>
#
# Nine: one of 64, four of 8, four of 1. Filling up would write keys and values of tokens that are not there into the cache, and
# move the counter of used places. Every model would then need a mask for them. Without it, any model works as it is.
#
# </details>
#
# **3.** One device writes four texts in one batch in nearly the same time as one text, since it reads its weights only once for all
# four. Does that make the ring superfluous?
#
# <details><summary>Answer</summary>
#
# No, the two go together. With `group_size=4`, each of the four places in the ring holds a group of four texts, which go through
# the stages together: 16 texts in all, and each pass does the work of four in little more time. But a group is in one stage at a
# time, however large it is, so p stages still need p groups.
#
# </details>
#
# The guide [Predict, stream and generate](../../docs/guide/predict.md) goes on from here, with the caches of Flax models and with
# models that are being trained.
#
# Next: [15. Measured, not guessed](15_measured_not_guessed.ipynb)
