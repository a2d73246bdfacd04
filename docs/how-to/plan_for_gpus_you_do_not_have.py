# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   needs: targets
# ---

# %% [markdown]
# # Plan for GPUs you do not have
#
# Which GPUs should a model be trained on, and with which options? Both can be compared on a laptop before any GPU is rented:
# `jaxpp.target("h100", 4)` makes four devices that compile programs and hold no arrays. This recipe asks whether a language model
# of 800 million parameters fits on four GPUs of two kinds, what the least time of a step is on each, and what its programs waste.
#
# Compiling for a GPU needs JAX's CUDA plug-in and NVIDIA's assembler, but no GPU and no driver: `pip install -e ".[targets]"`
# installs both. On a machine without a GPU, start Python with `JAX_PLATFORMS=cpu`. This page shows no output, because the recipe
# runs where the plug-in is installed; [the guide](../guide/targets.md) shows what such tables look like.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 1)  # nothing runs here: all programs are compiled for GPUs
HALF = {"dtype": "bfloat16"}

# %% [markdown]
# The model and its loss are what you would train. Parameters and batch are needed as shapes only, so nothing large is ever in
# memory. Planning takes as long as its programs take to compile: layers that a `lax.scan` runs are compiled once for each stage,
# and layers that are written one by one are compiled one by one, so that twice as many of these take twice as long.


# %%
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4096, **HALF)(nn.gelu(nn.Dense(16384, **HALF)(nn.LayerNorm(**HALF)(x))))


blocks = [Block() for _ in range(4)]
model = nn.Sequential([nn.Embed(32000, 4096, **HALF), *blocks, nn.LayerNorm(**HALF), nn.Dense(32000, **HALF)])


def loss_fn(params, batch):
    logits = model.apply(params, batch[:, :-1]).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), int))
tokens = jax.ShapeDtypeStruct((384, 1025), "int32")
print(f"{sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6:.0f} million parameters")

# %% [markdown]
# A pipeline for such devices is a pipeline like any other, with `devices=`. Its forecast compiles every program of the step.


# %%
def planned(gpu):
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(3e-4), num_stages=4, num_microbatches=8, devices=jaxpp.target(gpu, 4))
    return pipe, pipe.forecast(shapes, tokens)


pipe, forecast = planned("h100")
print(forecast)
assert forecast.fits

# %% [markdown]
# The last lines are the bound: no run of these programs on these GPUs is faster, and real runs are slower. The second kind of GPU
# has less memory. Where a step does not fit, the forecast says what to change.

# %%
_, smaller = planned("rtx-4090")
print(smaller)
assert not smaller.fits

# %% [markdown]
# The first line of that advice is what to try next: more and smaller microbatches. The bounds tell how far apart the two kinds of
# GPUs are.

# %%
for name, plan in {"4 x H100": forecast, "4 x RTX 4090": smaller}.items():
    least, idle = 1e3 * plan.bound.seconds, plan.bound.bubble_fraction
    fullest = max(stage.num_bytes for stage in plan.stages) / 2**30
    print(f"{name:>12}: {fullest:4.1f} GiB; a step takes at least {least:4.0f} ms, {idle:.0%} idle")
assert forecast.bound.seconds < smaller.bound.seconds

# %% [markdown]
# ## What the programs do
#
# Each row is a compiled program: how many kernels it has, what they read and write, and whether its arithmetic or the memory limits
# it. Below the table stands what is wasteful. Here all matrix products are of bfloat16, as the model asks.

# %%
programs = pipe.programs(shapes, tokens)
print(programs)
assert not any(row.has_float64 for row in programs)
assert set(programs.of("F").products) == {"bfloat16"}

# %% [markdown]
# The same as a roofline with a dot for each program, and the step on the timeline of the bound:

# %%
programs.figure()

# %%
forecast.bound.figure()

# %% [markdown]
# ## What to look out for
#
# - A bound says which plan cannot be fast. What a plan likely takes, with its range, is `forecast.bound.predicted`.
# - Compare plans with the same batch: `tokens` is the batch of a whole step, whatever `num_microbatches` is.
# - Several hosts are `jaxpp.target("h100", 16, hosts=2)`; a mesh is made of these devices like any other mesh.
# - [`jaxpp.tune`](../guide/tune.md) searches schedules, microbatches and cuts by the same predictions.
# - When the GPUs are there, leave `devices=` out: the same lines then print a forecast for them, and `pipe.step` runs.
