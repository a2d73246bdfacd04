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
# # 8. Your own model
#
# So far the model was an MLP, a chain of layers that can be cut between any two. Your own model has attention, skip connections and
# an embedding that is used twice, and nobody wants to write it again as a list of stages. In this chapter a small GPT becomes a
# pipeline without a change to the model. On the way we meet the tools for everyday work: the table of stages, the forecast of
# memory, the profile, and the check that the pipeline computes what plain JAX computes.

# %%
import sysconfig
from functools import partial
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
# ## The model
#
# The model reads 32 characters and predicts, at each position, the next character. It has a residual stream (the sum `x` that all
# blocks read and add to), attention with a causal mask, and a **tied embedding**: the table that turns characters into vectors at
# the beginning also turns vectors into scores for the next character at the end. This is ordinary Flax. Nothing in it knows about
# pipelines.


# %%
Dense = partial(nn.Dense, use_bias=False)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = Dense(3 * width, name="qkv")(nn.RMSNorm(name="norm_1")(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, 4, -1), 3, axis=-1)  # four heads
        h = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
        x = x + Dense(width, name="out")(h.reshape(x.shape))
        h = nn.relu(Dense(2 * width, name="fc")(nn.RMSNorm(name="norm_2")(x)))
        return x + Dense(width, name="proj")(h)


# %%
class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(128, 64, name="embed")  # ASCII characters, 64 features
        x = embed(tokens) + nn.Embed(32, 64, name="positions")(jnp.arange(tokens.shape[1]))
        for k in range(2):
            x = Block(name=f"block_{k}")(x)
        return embed.attend(nn.RMSNorm(name="norm")(x))


def loss_fn(params, batch):
    logits = GPT().apply(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


# %% [markdown]
# Every Python comes with several megabytes of text: the source code of its standard library. A batch is 32 pieces of 33 characters,
# taken at random places.

# %%
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
text = text[text < 128].astype(np.int32)


def batch_of(step):
    starts = np.random.default_rng(step).integers(0, len(text) - 32, 32)
    return jnp.asarray(text[starts[:, None] + np.arange(33)])


batch = batch_of(0)
params = jax.jit(GPT().init)(jax.random.key(0), batch[:, :-1])
print(repr("".join(map(chr, np.asarray(batch[0])))))

# %% [markdown]
# ## The drop-in replacement
#
# The smallest step from plain JAX to a pipeline is to write `jaxpp.value_and_grad` instead of `jax.value_and_grad`. The parameters
# stay where they are, and the gradients come back to the same place. This is the right tool for code that has its own training
# loop.

# %%
plain = jax.jit(jax.value_and_grad(loss_fn))
plain_loss, plain_grads = plain(params, batch)
loss, grads = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4)(params, batch)


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


assert_same((loss, grads), (plain_loss, plain_grads))
print(f"loss: {plain_loss:.6f} plain, {loss:.6f} as a pipeline; the gradients agree")

# %% [markdown]
# ## The trainer
#
# With `jaxpp.value_and_grad` all parameters still have to fit on one device. `jaxpp.Pipeline` also takes the optimizer, and then
# each device keeps the parameters of its own stage, together with their gradients and optimizer state.
#
# We have parameters already, so we give them to `init`. For a model that does not fit on one device, write
# `pipe.init(init_fn, key, batch)` instead: each parameter is then created where it will live.

# %%
optimizer = optax.adam(3e-3)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=3, num_microbatches=8)
state = pipe.init(params, batch)
pipe.stages

# %% [markdown]
# This is the table of stages. Read it row by row:
#
# - `modules`: the first and the last module of the stage. Two blocks were cut into three stages, so the cuts lie inside the blocks.
# - `params`, `bytes`: the parameters that the stage owns. The last stage reads the table of the embedding too, so its row says
#   `+1 tied`. The first stage owns this table; it sends a copy once per step, and gets the gradient back once per step.
# - `F`, `B`, `share`: the floating-point operations of the forward and of the backward pass of a microbatch, and the stage's part
#   of the time of a step, as jaxpp estimates it.
# - `kept`: the residuals of one microbatch, and how large they would be if nothing were computed again in the backward pass.
#   By default jaxpp computes cheap operations again, such as `relu`, but no matrix product. Chapter 11 shows the alternatives.
# - `sends`: the shape of what goes to the next stage for each microbatch.
#
# ## How the cut is decided
#
# jaxpp **traces** the loss as `jax.jit` does: it runs `loss_fn` once on shapes and records every elementary operation, such as a
# matrix product or an addition. (The recording is called a jaxpr; `jax.make_jaxpr(loss_fn)(params, batch)` prints it.) A list of
# operations can be cut anywhere, and it does not matter from which Python function or Flax module they came. Three rules decide:
#
# 1. The step shall be as short as possible. What the forward and the backward of each operation take on these devices is estimated
#    from its FLOPs and bytes, and the clock of the schedule says how long the step is with each cut.
# 2. Every stage shall have real work to do, and none much more than the others.
# 3. Among steps that are at most 5% apart, take the one with the most even stages, and then the fewest bytes to send.
#
# Cheap operations that several stages need, such as the causal mask, are computed again on each stage and not sent.
#
# ## Layers that do not learn
#
# Why the costs of a *step*, and not those of the forward? For a layer that learns, the backward takes twice as long as the forward:
# once for the cotangent of its input (I), once for the gradients of its weights (W). A frozen layer has no W. And if nothing before
# it learns, nobody asks for the cotangent either: its backward takes no time at all, as in a frozen encoder, or in the teacher of a
# distillation. Here the first four of eight equal layers are frozen. `abstract_state` cuts the model without making a state:

# %%
layers = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8


def chain(layers, x):
    for weights in layers:
        x = jnp.tanh(x @ weights)
    return jnp.mean(x**2)


half = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, ["freeze"] * 4 + ["train"] * 4)
for balance in ("flops", "cost"):
    cut = jaxpp.Pipeline(chain, half, num_stages=2, num_microbatches=8, balance=balance)
    cut.abstract_state(layers, jax.ShapeDtypeStruct((2048, 256), jnp.float32))
    shares = [f"{stage.seconds / sum(each.seconds for each in cut.stages):.0%}" for stage in cut.stages]
    print(f"{balance:5} layers {[len(stage.params) for stage in cut.stages]}, shares of the step {shares}", end=", ")
    print(f"{cut.stages.speed_up:.2f} times as fast as one device")

# %% [markdown]
# Cut by the FLOPs of the forward, each stage has four layers, and the second has almost three quarters of the work. Cut by the
# costs of the step, which is the default, the first stage takes a layer that learns as well.
#
# ## Your own cuts
#
# `cuts=` names the modules with which the second and all later stages begin. A person would perhaps cut this model between the
# blocks, and give the head (what comes after the blocks) a stage of its own:

# %%
sizes = {"num_stages": 3, "num_microbatches": 8}
by_name = jaxpp.Pipeline(loss_fn, optimizer, cuts=["block_1", "norm"], **sizes)
state_by_name = by_name.init(params, batch)

fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for k, (name, each) in enumerate({"cut by jaxpp": pipe, "cut by name": by_name}.items()):
    shares = [100 * stage.flops / sum(s.flops for s in each.stages) for stage in each.stages]
    bars = axes.bar(np.arange(3) + 0.4 * k, shares, 0.38, label=name, color=("#56B4E9", "#BBBBBB")[k])
    axes.bar_label(bars, fmt="%.0f%%", fontsize=9, label_type="center")
    print(name, "sends", ", ".join(send for stage in each.stages for send in stage.sends))
axes.axhline(100 / 3, color="#222222", linewidth=0.8, linestyle="--", zorder=0)
axes.set(xticks=np.arange(3) + 0.2, xticklabels=[f"stage {k}" for k in range(3)], ylabel="share of the FLOPs, %", ylim=(0, 60))
axes.legend(frameon=False, ncols=2, loc="upper center")
plt.show()

# %% [markdown]
# Look at the highest bar of each colour: this stage sets the pace, and the dashed line is the ideal. The named cuts leave the last
# device with little to do, while each of the two others carries almost half of the work. In return they send half as much, as the
# lines above the figure say: only the residual stream, 4 x 32 x 64 numbers, crosses each boundary. Where jaxpp has cut inside a
# block, the 128 features computed from the stream cross with it. So name the cuts if your links are slow, or if you want to rebuild
# the stages of another system.
#
# The results do not depend on the cuts. Both pipelines make the same steps:

# %%
for step in range(3):
    state, metrics = pipe.step(state, batch)
    state_by_name, metrics_by_name = by_name.step(state_by_name, batch)
    found, found_by_name = (metrics.loss, metrics.grad_norm), (metrics_by_name.loss, metrics_by_name.grad_norm)
    np.testing.assert_allclose(found, found_by_name, rtol=1e-5)
    print(f"step {step}: loss {metrics.loss:.5f} and {metrics_by_name.loss:.5f}")

# %% [markdown]
# ## Training, beside plain JAX
#
# Now 60 steps with the pipeline, and the same 60 steps in plain JAX on one device. The figure shows both losses. The orange dots
# must lie on the blue line, at every step.


# %%
@jax.jit
def update(params, opt_state, grads):
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


plain_params, opt_state, losses, plain_losses = params, optimizer.init(params), [], []
state = pipe.init(params, batch)  # from the beginning
for step in range(60):
    state, metrics = pipe.step(state, batch_of(step))
    loss, grads = plain(plain_params, batch_of(step))
    plain_params, opt_state = update(plain_params, opt_state, grads)
    losses.append(float(metrics.loss))
    plain_losses.append(float(loss))

# %%
np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)
fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.plot(losses, color="#0072B2", linewidth=4, label="pipeline of three stages")
axes.plot(plain_losses, "o", color="#E69F00", markersize=3, label="plain JAX, one device")
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# You need not write the plain loop to be sure. `pipe.verify` makes one step both ways, compares the loss, every gradient, every
# updated parameter and the optimizer state, and raises an error that names the first leaf that differs. It returns what it
# compared, and the state stays as it is. It is the first thing to call with a model of your own. The whole model has to fit on one
# device for that, so verify a small version of a large model.

# %%
pipe.verify(state, batch)

# %% [markdown]
# ## Will it fit?
#
# `pipe.forecast` says what each device will hold at the moment at which it holds most. It needs shapes only, and runs nothing.
# `hbm=` is the memory of your device (high-bandwidth memory, as on GPUs). This model is tiny, so we ask for a tiny device.

# %%
shapes = jax.eval_shape(lambda: params)
forecast = pipe.forecast(shapes, batch, hbm="1.75 MiB")
forecast

# %% [markdown]
# You know parameters, optimizer state, gradients and residuals from chapter 1. The other columns are:
#
# - `statics`: values that are computed from parameters once per step, and the copy of the tied embedding.
# - `messages`: activations and cotangents that were sent and are not used yet.
# - `batch`: the examples and labels; `rest`: small values such as the loss.
# - `temporaries`: what a compiled program needs for itself while it runs.
# - `at`: the action that runs when the device holds most. `0B1` is the backward of microbatch 1 on stage 0.
#
# The last lines are advice. They name other pipelines that would fit, and estimate how much longer or shorter a step would be.
# (`naive` with several microbatches takes one after another through all stages and back, as chapter 4 did with its single one.)
# Neither the table nor the advice needs the devices, so ask before you rent them.

# %% [markdown]
# ## What really happened
#
# `pipe.profile` runs a few steps under JAX's profiler, and some more in which each program runs alone. The figure has three parts:
#
# - The first timeline is the step as it ran, the second is how long it would take if every device had cores of its own. On a laptop
#   all forced CPU devices share the same few cores; that is why the first timeline is longer. Chapter 11 looks at this more
#   closely.
# - The last part is the memory of arrays: for each device a row, and in it the bytes by kind. Find the residuals: device 0 holds
#   those of three microbatches at once, the last device those of one, as chapter 6 showed for 1F1B.

# %%
profile = pipe.profile(state, batch)
profile.figure()

# %% [markdown]
# Was the forecast right? The peaks in the figure are smaller, because temporaries are inside the programs and no arrays. Arrays
# alone may also be largest at another moment than arrays and temporaries together. `profile.ledger.peaks` has the latter: all
# arrays alive at that moment, and the temporaries as the compiler states them. The sums are those of the forecast, to the byte.

# %%
for device, predicted in forecast.peaks.items():
    sample = profile.ledger.peaks[device]
    measured = sum(sample.kinds) + sample.temporaries
    print(f"{device}: {predicted:,} bytes forecast, {measured:,} bytes measured")
    assert measured == predicted

# %% [markdown]
# ## When something is wrong
#
# Errors come before any device works. They say where, what the rule is, what was found, and what to write instead. Here a name is
# misspelt:

# %%
try:
    wrong = jaxpp.Pipeline(loss_fn, optimizer, cuts=["blok_1", "norm"], **sizes)
    wrong.init(params, batch)
except ValueError as error:
    print(type(error).__name__ + ":", error)

# %% [markdown]
# ## Takeaway
#
# A pipeline is made from the trace of a loss, so the model need not be written for it. The automatic cut makes the step short,
# and then the messages small. `pipe.stages` shows the cut, `pipe.forecast` the memory before, `pipe.profile` time and memory
# after, and `pipe.verify` proves on your own model that nothing else has changed.
#
# ## Questions
#
# **1.** The first stage owns the table of the embedding and the last stage needs it too. Why is it sent once per step, and not once
# for each microbatch?
#
# <details><summary>Answer</summary>
#
# Parameters do not change during a step, so one copy serves all microbatches. The last stage adds up its part of the gradient over
# the microbatches, and sends the sum back once.
#
# </details>
#
# **2.** You ask for four stages, and one layer of your model has 40% of all FLOPs. What is the best speed-up that four devices can
# give?
#
# <details><summary>Answer</summary>
#
# If the layer is one operation (one huge matrix product), its stage has at least 40% of the work, so four devices are at most 1 /
# 0.4 = 2.5 times as fast as one; jaxpp warns of this and names the module. If the layer consists of several operations, it can be
# cut inside.
#
# </details>
#
# **3.** `pipe.forecast` says that residuals take most of the memory, and offers twice as many microbatches. Why does that help,
# although the batch stays the same?
#
# <details><summary>Answer</summary>
#
# With 1F1B a device holds the residuals of a fixed number of microbatches (at most as many as there are stages, see chapter 6).
# Twice as many microbatches of half the size make these residuals half as large.
#
# </details>
#
# Next: [9. Pipe x data x model](09_pipe_data_model.ipynb)
