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
# # 16. Why wait?
#
# Every schedule so far has the same end: the last backwards run, the optimizer updates the parameters, and only then the next
# step begins. So the pipeline empties once a step and fills again. This chapter does not wait. It begins the next step at once,
# asks what that changes, and finds for which optimizers the change matters.

# %%
import argparse
import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp
from jaxpp.schedule import flow, make, simulate

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## The bubble is between the steps
#
# Here is a step of 1F1B with four microbatches. Four ranks are busy together for a moment only.

# %%
one = make("1f1b", num_ranks=4, num_microbatches=4)
one.figure()

# %% [markdown]
# The first rank waits in the middle, and has no more forwards that it could run: there are only four microbatches. But the next
# step has four more. `flow` lets each rank take forwards of the next step as soon as it has run all of its own, as far as it
# has room for residuals. Microbatches 4 to 7 are those of the second step, and 8 to 11 those of the third.

# %%
flow(one, 3).figure()

# %% [markdown]
# The steady state does not end any more. The gaps are where the first step fills the pipeline and where the last one leaves it,
# and the more steps follow one another, the less they matter.

# %%
for steps in (1, 10, 100):
    idle = simulate(flow(one, steps), forward=1, input_grad=1, weight_grad=1).bubble_fraction
    print(f"{steps:3} steps: {idle:.1%} of the time is idle")
assert idle < 0.01

# %% [markdown]
# ## What it costs: a gradient that is late
#
# Look at microbatch 4 on the first rank. Its forward runs before the backward of microbatch 3 has come back, so before the
# optimizer knows the gradients of the first step. Which parameters does it read? The only ones that are there: those from
# *before* the update that is still to come. The rule of PipeDream-2BW (Narayanan et al., [arXiv
# 2006.09503](https://arxiv.org/abs/2006.09503)) is the same for every stage and microbatch: the gradients of a step are of the
# parameters before the last update. To keep an older version of the parameters for this is called **weight stashing**.
#
# As a loop it is hardly longer than a plain training loop. JAX arrays do not change, so to keep the older version is to keep a
# name for it. Nothing is copied.


# %%
def late_step(optimizer, loss_fn, params, before, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(before, batch)  # the parameters before the last update ...
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), params, opt_state, loss  # ... and the update is made to the newest


# %% [markdown]
# ## Does it still learn?
#
# A small GPT, that of chapter 13 without a cache, reads the source code of a module of the standard library.

# %%
WIDTH, LENGTH, BLOCKS, STEPS = 64, 32, 2, 150


def dense(features, name):
    return nn.Dense(features, use_bias=False, name=name)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(dense(3 * WIDTH, "qkv")(nn.RMSNorm(name="norm_1")(x)), 3, axis=-1)
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))  # a token sees itself and those before it
        weights = nn.softmax(jnp.where(seen, q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9))
        x = x + dense(WIDTH, "out")(weights @ v)
        return x + dense(WIDTH, "proj")(nn.relu(dense(4 * WIDTH, "fc")(nn.RMSNorm(name="norm_2")(x))))


# %%
class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(128, WIDTH, name="embed")
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH, name="embed_positions")(jnp.arange(LENGTH))
        for k in range(BLOCKS):
            x = Block(name=f"block_{k}")(x)
        return embed.attend(nn.RMSNorm(name="norm")(x))


# %%
text = np.frombuffer(inspect.getsource(argparse).encode("ascii", "replace"), np.uint8)
starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (STEPS, 8))
batches = jnp.asarray(text[starts[..., None] + np.arange(LENGTH + 1)], int)
model = GPT()
params = jax.jit(model.init)(jax.random.key(0), batches[0, :, :-1])["params"]


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


# %% [markdown]
# We train it with three optimizers of optax, with the delay and without. Muon makes the update of each matrix orthogonal, so
# that no direction is much longer than another (Jordan et al., [Muon](https://kellerjordan.github.io/posts/muon/), 2024). The
# embedding and the vectors are left to adam.


# %%
def matrix_or_not(path, leaf):
    is_matrix = leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path)
    return optax.contrib.MuonDimensionNumbers() if is_matrix else None


def make_muon(rate, adam_rate):
    matrices = functools.partial(jax.tree_util.tree_map_with_path, matrix_or_not)
    return optax.contrib.muon(rate, adam_learning_rate=adam_rate, muon_weight_dimension_numbers=matrices)


# %%
def rate(highest):  # warms up, then falls to a tenth
    return optax.warmup_cosine_decay_schedule(0, highest, STEPS // 10, STEPS, highest / 10)


optimizers = {
    "sgd": optax.sgd(rate(0.3), momentum=0.9),
    "adam": optax.adam(rate(6e-3)),
    "muon": make_muon(rate(0.03), rate(6e-3)),
}
optimizers = {name: optax.chain(optax.clip_by_global_norm(1.0), optimizer) for name, optimizer in optimizers.items()}

# %% [markdown]
# Both trainings of an optimizer are one program: `late` says which parameters the gradients are of.


# %%
def train(optimizer):
    def step(late, carry, batch):
        params, before, opt_state = carry
        chosen = jax.tree.map(lambda old, new: jnp.where(late, old, new), before, params)
        *carry, loss = late_step(optimizer, loss_fn, params, chosen, opt_state, batch)
        return tuple(carry), loss

    first = params, params, optimizer.init(params)
    return jax.jit(lambda late: jax.lax.scan(functools.partial(step, late), first, batches)[1])


# %%
def mean_of_last(losses):
    return float(losses[-20:].mean())


losses = {}
for name, optimizer in optimizers.items():
    run = train(optimizer)
    losses[name] = {"no delay": run(False), "delay": run(True)}
    waits, late = map(mean_of_last, losses[name].values())
    print(f"{name:5} loss at the end: {waits:.3f} without delay, {late:.3f} with it")

# %%
fig, panels = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
for axes, (name, found) in zip(panels, losses.items(), strict=True):
    for (how, values), colour in zip(found.items(), ("#0072B2", "#D55E00"), strict=True):
        axes.plot(np.convolve(values, np.ones(10) / 10, "valid"), color=colour, label=how)
    axes.set(title=name, xlabel="step", ylim=(0, 5))
panels[0].set_ylabel("loss, mean of 10 steps")
panels[-1].legend(frameon=False)
plt.show()

# %% [markdown]
# The delay costs each of them something, and not the same. With sgd the loss is far higher, with adam a good deal, with muon a
# little. A late gradient is a gradient for parameters that have moved on meanwhile: what matters is how far one update moves
# them where the loss is curved. Muon makes the large directions of an update no longer than the small ones, and so moves least
# there. On language models of up to 10 billion parameters the same order was found, with a loss 0.2 higher for AdamW and 0.01
# for Muon (Zmushko et al., [arXiv 2606.30634](https://arxiv.org/abs/2606.30634)).
#
# ## A correction
#
# The parameters have moved on by an update that resembles the one before it. So let us keep them ahead: add to each update how
# much it differs from the last one. The sum of all updates is then what it was, plus the last update once more. So the
# parameters stand where the next update is expected to lead, and a gradient taken there is about the one that is wanted a step
# later. Corrections of this kind are known as error feedback, weight prediction and optimism. optax has one for gradients;
# here it is chained behind the optimizer, so that it sees updates.

# %%
corrected = optax.chain(optimizers["adam"], optax.scale_by_optimistic_gradient(alpha=1.0, beta=1.0))
losses["adam"]["delay, corrected"] = train(corrected)(True)
found = {how: mean_of_last(values) for how, values in losses["adam"].items()}
print("adam, loss at the end:", *(f"{loss:.3f} ({how})" for how, loss in found.items()))
assert found["no delay"] < found["delay, corrected"] < found["delay"]

# %% [markdown]
# ## With jaxpp
#
# `delay=1` makes a pipeline of this kind. The step is the loop above and no approximation of it: `verify` runs that loop on one
# device and compares.

# %%
pipe = jaxpp.Pipeline(loss_fn, corrected, num_stages=2, num_microbatches=4, delay=1)
state = pipe.init(params, batches[0])
pipe.verify(state, batches[0])
for batch in batches[:8]:
    state, metrics = pipe.step(state, batch)
np.testing.assert_allclose(metrics.loss, losses["adam"]["delay, corrected"][7], rtol=1e-4)
print(f"step {metrics.step}: loss {metrics.loss:.4f}, on one device {losses['adam']['delay, corrected'][7]:.4f}")

# %% [markdown]
# When `step` returns, the end of that step has not been handed to the devices: it runs between the actions of the next one, as
# in the figure. Whoever looks at the state gets the whole of it, since looking hands over the rest. So log `metrics.loss`,
# which does not look, and save and evaluate as always. The state holds both versions of the parameters, and what the optimizer
# keeps once.

# %%
print(state)

# %% [markdown]
# ## When not to do it
#
# - If the bubble is small already. With 4 ranks and 32 microbatches it is 9% of a step; a zero-bubble schedule (chapter 7)
#   brings it close to nothing, and its gradients are not late.
# - If the parameters fit once and not twice.
# - If the optimizer suffers, as sgd and adam do above, and you cannot try whether a smaller learning rate or the correction
#   helps.
# - If others should get your numbers with another framework: the training is another one, if only by a step.
#
# ## Takeaway
#
# A pipeline that does not wait for the optimizer has next to no bubble, and its gradients are late by one step. The price is a
# second version of the parameters, and a training that is no longer the same. How much that matters depends on the optimizer:
# much for sgd and adam, little for muon, and a correction gives part of it back.
#
# ## Questions
#
# **1.** Why does the second version of the parameters not double the memory of training with adam?
#
# <details><summary>Answer</summary>
#
# In float32 adam holds 16 bytes for each parameter during a step: the parameter, its gradient, and two averages. The older
# version adds 4, a quarter. The residuals are not doubled either, since a rank begins no forward for which it has no room.
#
# </details>
#
# **2.** Clipping needs the norm of all gradients of a step. Does it bring the waiting back?
#
# <details><summary>Answer</summary>
#
# No. The update waits for the last gradient, but the forwards of the next step do not wait for the update: they read parameters
# that are there. Only the step after the next needs the result.
#
# </details>
#
# **3.** In the first form of PipeDream each stage updated its parameters after every microbatch, so that the first stage of
# four had gradients late by three updates and the last by none. What is lost there that the loop above keeps?
#
# <details><summary>Answer</summary>
#
# One loss whose gradient is taken. With the same age of the parameters on all stages, a late gradient is the gradient of the
# loss at parameters that the model once had. With ages that differ it is a gradient at a mixture that the model never was.
#
# </details>
#
# This is the last chapter. The guide [Train](../../docs/guide/train.md) has what else a step can do.
