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
# # 2. Do I need a pipeline?
#
# Chapter 1 ended with four ways to train a model that does not fit on one device. This chapter chooses between two of them for a
# language model of 7 billion parameters on eight GPUs. Three sizes decide: the parameters, the activations, and the speed of the
# links between the devices. All three are known before anything is rented. At the end you have a calculator for your own model,
# and perhaps the answer that you need no pipeline.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 2)  # for a laptop; nothing in this chapter runs on them

# %% [markdown]
# ## The model
#
# A plain GPT: 32 blocks of width 4,096 with 32 heads, texts of 2,048 tokens, a vocabulary of 32,000. It keeps its parameters in
# float32, and computes in bfloat16, a format of two bytes.

# %%
WIDTH, BLOCKS, LENGTH, WORDS = 4096, 32, 2048, 32_000


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(features):
            return nn.Dense(features, use_bias=False, dtype=jnp.bfloat16)

        q, k, v = jnp.split(dense(3 * WIDTH)(nn.RMSNorm(dtype=jnp.bfloat16)(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], 32, -1) for part in (q, k, v))
        h = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
        x = x + dense(WIDTH)(h.reshape(x.shape))
        return x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(nn.RMSNorm(dtype=jnp.bfloat16)(x))))


# %%
class GPT(nn.Module):
    num_blocks: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, name="embed")(tokens)
        for k in range(self.num_blocks):
            x = Block(name=f"block_{k}")(x)
        return nn.Dense(WORDS, use_bias=False, dtype=jnp.bfloat16, name="head")(x)


def shapes_of(num_blocks):
    init = GPT(num_blocks).init
    return jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct((1, LENGTH), int))["params"]


# %% [markdown]
# `jax.eval_shape` allocates nothing, so a laptop can count the parameters. Chapter 1 said what each of them needs with Adam: 16
# bytes. To these come 2 bytes for its copy in bfloat16.


# %%
def count(shapes):
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


shapes = shapes_of(BLOCKS)
params, block_params = count(shapes), count(shapes["block_0"])
print(f"parameters: {params / 1e9:.2f} billion, {block_params / 1e6:.0f} million in each block")
print(f"with gradients, Adam and the copy: {18 * params / 2**30:.0f} GiB")

# %% [markdown]
# ## What a block keeps
#
# The residuals depend on the details of the block, so we do not guess. jaxpp can say what a device will hold, from shapes alone.
# We ask it about a small part of the model at its full width: two blocks, on two devices. Two words are needed for that. The part
# of the model that a device runs is called a **stage**. The batch is split into parts, which pass through the stages one after
# another; such a part is called a **microbatch**. Here a microbatch is one text.


# %%
def loss_fn(params, tokens):
    logits = GPT(2).apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


texts = jax.ShapeDtypeStruct((4, LENGTH + 1), "int32")
pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-4), num_stages=2, num_microbatches=4, cuts=["block_1"])
forecast = pipe.forecast(shapes_of(2), texts)
forecast

# %% [markdown]
# Each row is a device at the moment at which it holds most. You know parameters, optimizer state, gradients and residuals;
# `statics` are the copies in bfloat16. `messages` are activations on their way, and `temporaries` is what a compiled program needs
# for itself. The number in brackets says how many microbatches have residuals on the device. The first stage is the embedding and
# a block, so it tells what one block keeps for one text:

# %%
stage = forecast.stages[0]
kept, temporaries = stage.residuals, stage.temporaries
scores = 32 * LENGTH * LENGTH * 2  # each head has a number for each pair of tokens
print(f"a block keeps {kept / 2**20:.0f} MiB for each text; {scores / 2**20:.0f} MiB of that are attention weights")
own = count({name: shapes[name] for name in ("embed", "block_0")})
estimate = 18 * own + stage.num_residuals * kept + temporaries
print(f"18 bytes for each parameter, residuals and temporaries: {estimate / 2**30:.2f} GiB")
print(f"the forecast of the first stage:                        {stage.num_bytes / 2**30:.2f} GiB")
assert abs(estimate / stage.num_bytes - 1) < 0.02

# %% [markdown]
# So a sum of three terms is the forecast, but for the messages. (An attention that never writes its weights to memory, such as
# `jax.nn.dot_product_attention` with `implementation="cudnn"`, would keep far less.)
#
# ## Does it fit?
#
# Now the whole model, on D = 8 devices, with one text at a time on each device.
#
# - **Data parallelism**: each device has the whole model.
# - **FSDP** (fully sharded data parallelism): each device has an eighth of every array, and gathers the bfloat16 copy of a block
#   just before it computes with it. It keeps the residuals of its own text for all 32 blocks.
# - **A pipeline**: each device has an eighth of the blocks. While the first text is on its way to the last device and back, the
#   first device has begun with D - 1 further texts. So it keeps the residuals of 8 texts, each for 4 blocks. That is as much as
#   one text for 32 blocks.


# %%
def memory(devices):
    activations = BLOCKS * kept + temporaries
    return {
        "one device": 18 * params + activations,
        f"data parallelism, {devices}": 18 * params + activations,
        f"FSDP, {devices}": 16 * params / devices + 2 * 2 * block_params + activations,  # a block in use, and the next
        f"pipeline, {devices}": 18 * params / devices + activations,
    }


fig, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
bars = axes.barh(list(memory(8)), [size / 2**30 for size in memory(8).values()], color="#0072B2")
axes.bar_label(bars, fmt=" %.0f")
axes.axvline(80, color="#D55E00", linestyle="--")
axes.set(xlabel="GiB on the fullest device; the dashed line is a GPU with 80 GiB", xlim=(0, 160))
axes.invert_yaxis()
plt.show()

# %% [markdown]
# The first two do not fit. The last two do, with nearly equal bars. So memory says that one device is not enough; it does not say
# which of the two ways to take. (Asked about the whole model, `pipe.forecast` compiles for a few minutes, and says 37 GiB for the
# fullest of eight devices. The programs for four blocks have more temporaries than those for one, in FSDP too.)
#
# ## What crosses the links
#
# A step shall read 64 texts. How many bytes does each device send in a step?
#
# - **FSDP** gathers the bfloat16 parameters twice, for the forward pass and for the backward pass, and sends their gradients once:
#   three times the size of the parameters, whatever the batch is.
# - **A pipeline** sends, for each token, one activation to the next device, and in the backward pass its gradient to the device
#   before: two vectors of 4,096 numbers, whatever the number of parameters is.

# %%
TEXTS, D = 64, 8
tokens = TEXTS * LENGTH
sent = {"FSDP": 3 * 2 * params * (D - 1) / D, "pipeline": 2 * 2 * WIDTH * tokens}
for way, size in sent.items():
    print(f"{way:8} sends {size / 1e9:5.1f} GB from each device in a step")
even = sent["FSDP"] / (2 * 2 * WIDTH)
print(f"equal at {even / 1e6:.1f} million tokens in a step")

# %% [markdown]
# FSDP pays by the parameter, a pipeline by the token. With the usual batches of a large model, the pipeline sends much less.
#
# ## How long a step takes
#
# A step does about 6 floating-point operations for each parameter and token: 2 in the forward pass and 4 in the backward pass. We
# assume that a GPU does 400 million million of them in a second, which is about 40% of what the data sheet of an H100 promises.
# For the links we take four round numbers.
#
# Both ways are treated kindly. FSDP hides all that it sends behind the computation, so its step takes the longer of the two. A
# pipeline has another loss, the **bubble**: the time in which devices wait because the first text has not reached them yet, or
# the last one has left them. `jaxpp.schedule.simulate` computes when each device would work, transfers included. (Chapter 4
# explains what it does.)


# %%
def seconds(link, texts=TEXTS, devices=D):
    tokens = texts * LENGTH
    compute = 6 * params * tokens / (devices * 400e12)
    fsdp = max(compute, 3 * 2 * params * (devices - 1) / devices / link)
    order = jaxpp.schedule.make("1f1b", num_ranks=devices, num_microbatches=texts)
    third = compute / texts / 3  # a forward of a stage; the two halves of its backward take as long each
    message = 2 * WIDTH * LENGTH / link
    step = jaxpp.schedule.simulate(order, forward=third, input_grad=third, weight_grad=third, transfer=message)
    return compute, fsdp, step.makespan


links = {"NVLink": 450e9, "PCIe 4.0 x16": 32e9, "Ethernet, 100 Gbit/s": 12.5e9, "Ethernet, 10 Gbit/s": 1.25e9}
for name, link in links.items():
    compute, fsdp, pipeline = seconds(link)
    print(f"{name:21} computing alone {compute:.2f} s, FSDP {fsdp:5.2f} s, pipeline {pipeline:5.2f} s")

# %%
speeds = np.geomspace(1e9, 1e12, 40)
times = np.array([seconds(speed) for speed in speeds])
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.loglog(speeds / 1e9, times[:, 1], color="#E69F00", label="FSDP")
axes.loglog(speeds / 1e9, times[:, 2], color="#0072B2", label="pipeline, 64 microbatches")
axes.axhline(times[0, 0], color="#999999", linestyle="--", label="computing alone")
for name, link in links.items():
    axes.axvline(link / 1e9, color="#DDDDDD", zorder=0)
    axes.text(link / 1e9, axes.get_ylim()[1], f" {name}", rotation=90, ha="right", va="top", fontsize=8)
axes.set(xlabel="speed of each device's link, GB/s", ylabel="seconds for a step")
axes.set_yticks([2, 5, 10, 20], [2, 5, 10, 20], minor=False)
axes.set_yticks([], minor=True)
axes.legend(frameon=False, loc="center right")
plt.show()
assert times[-1, 1] < times[-1, 2] and times[0, 1] > times[0, 2]

# %% [markdown]
# Look where the lines cross. To the right of that, FSDP hides what it sends, and the pipeline still has its bubble. To the left,
# FSDP waits for its parameters, and the pipeline goes on computing.
#
# The bubble depends on the number of microbatches. With 8 texts in a step instead of 64, it is almost half of the pipeline's time.
# But then FSDP has an eighth of the computation to hide the same bytes behind:

# %%
for texts in (8, 16, 64, 256):
    compute, fsdp, pipeline = seconds(links["PCIe 4.0 x16"], texts)
    print(f"{texts:3} texts over PCIe: computing alone {compute:.2f} s, FSDP {fsdp:.2f} s, pipeline {pipeline:.2f} s")

# %% [markdown]
# ## So, do you need a pipeline?
#
# Go down the list, and stop at the first line that is true.
#
# 1. The model fits on one device: no. On one device use `jax.jit`; on several, data parallelism.
# 2. It almost fits: no. Remat, smaller microbatches or an optimizer with a smaller state cost less than a second device.
# 3. It does not fit, and fast links join all devices: no, use FSDP.
# 4. It does not fit, and the links are slow, all of them or those between the computers: yes. FSDP inside each computer and a
#    pipeline between them is a good combination, too.
# 5. Its parts are unlike (a huge embedding, an encoder and a decoder), or you want to understand pipelines: yes.
# 6. It fits on all your devices together in no way, and the memory of the host is large: yes. Its stages then
#    [visit the devices](../../docs/how-to/train_a_model_larger_than_its_gpus.py), one after the other.
#
# The calculator leaves out a lot: the time that a message takes to begin, computation and transfers that slow each other down,
# stages that are not equal, the work of attention itself. Take it for a first answer, to within a factor of two, and measure where
# the two ways are close. [When to use something else](../../docs/alternatives.md) has more cases, and code for FSDP.
#
# ## Takeaway
#
# FSDP and a pipeline divide the memory equally well. FSDP sends the parameters three times in each step, and a pipeline two
# vectors for each token. A pipeline pays with its bubble, which many microbatches make small. So fast links ask for FSDP, and
# slow links for a pipeline.
#
# ## Questions
#
# **1.** The eight GPUs have links of 1.25 GB/s. Somebody proposes to make the batch of FSDP 16 times as large, 1,024 texts. Does it
# help?
#
# <details><summary>Answer</summary>
#
# It does: the bytes stay the same, and there is 16 times as much computation to hide them behind. At 64 texts FSDP sends for 28
# seconds and computes for 1.6; at 1,024 texts it computes for 26 seconds and hides almost everything. But not every model learns as
# well from so large a batch.
#
# </details>
#
# **2.** What happens to the two bars of FSDP and the pipeline if the model is trained on texts that are twice as long?
#
# <details><summary>Answer</summary>
#
# Both grow by the same amount. The residuals of a text double, apart from the attention weights, which become four times as large.
# Both ways keep as much as one text for all blocks. Neither of them divides the residuals of a single text: remat, or another
# attention, makes them smaller.
#
# </details>
#
# **3.** From 100 to 10 Gbit/s the links become ten times as slow. Why does a step of the pipeline take only about 1.8 times as
# long?
#
# <details><summary>Answer</summary>
#
# A message is the activation of one text, 16.8 MB. It takes 1.3 ms on the fast link and 13 ms on the slow one. A stage computes for
# 26 ms on each text, and while a message travels, the device works on other texts. So a large part of the transfers is hidden. What
# remains are waits for answers that are still on their way; chapter 7 shows how another order hides them, too.
#
# </details>
#
# Next: [3. Split by hand](03_split_by_hand.ipynb)
