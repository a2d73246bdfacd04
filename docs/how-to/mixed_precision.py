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
# # Train in mixed precision
#
# In mixed precision, the model computes in 16 bits while parameters, gradients and optimizer stay in float32. Activations are
# half as large, so the stages send half as many bytes, and keep about half as many between the forward pass and the backward
# pass. In Flax, `dtype=` asks for it; jaxpp needs no option for bfloat16. float16 has a small range and also needs dynamic loss
# scaling.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The logits are cast back before the loss, because a softmax in 16 bits loses too many digits.

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}


def pipeline(dtype, **options):
    layers = [layer for _ in range(3) for layer in (nn.Dense(64, dtype=dtype), nn.tanh)]
    model = nn.Sequential([*layers, nn.Dense(10, dtype=dtype)])

    def loss_fn(params, batch):
        logits = model.apply(params, batch["x"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=2, num_microbatches=4, **options)
    return pipe, pipe.init(lambda key: model.init(key, batch["x"]), jax.random.key(0), batch)


# %% [markdown]
# ## bfloat16
#
# The table of stages shows what crosses: `bf16` instead of `f32`. Each stage casts its weights once in a step, not once in each
# microbatch.

# %%
pipe, state = pipeline(jnp.bfloat16)
print(pipe.stages)
for _ in range(30):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# `verify` raises an error unless a step equals the step of plain JAX, here up to a few roundings of bfloat16.

# %%
assert "bf16" in str(pipe.stages)
assert metrics.loss < 0.5
assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
pipe.verify(state, batch)

# %% [markdown]
# ## float16
#
# `loss_scale=DynamicScale()` multiplies the loss, so that small gradients do not become zero in float16, and divides the
# gradients by the same number. If a gradient overflows on any stage, all stages skip the step, and the scale is halved. Here the
# scale begins much too high on purpose:

# %%
pipe, state = pipeline(jnp.float16, loss_scale=DynamicScale(scale=2.0**24))
before = jax.device_get(state.params)
state, metrics = pipe.step(state, batch)
print("finite:", metrics.finite, " scale after the step:", state.loss_scale.scale)
assert not metrics.finite
for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
    np.testing.assert_array_equal(old, new)

# %%
skipped = 1
for _ in range(40):
    state, metrics = pipe.step(state, batch)
    skipped += not metrics.finite
print(f"skipped {skipped} steps; scale {state.loss_scale.scale}, loss {metrics.loss:.4f}")
assert metrics.finite
pipe.verify(state, batch)

# %% [markdown]
# ## What to look out for
#
# - `dtype=` is what a Flax layer computes in; `param_dtype=` is what it stores. Leave `param_dtype` at float32: updates of Adam
#   are often smaller than the last digit of a bfloat16 parameter.
# - A step that was skipped reports a loss all the same. Count `metrics.finite` if you log it, as above, and read it rarely:
#   reading waits for the step.
# - Without `loss_scale`, a float16 model does not fail. Its small gradients silently become zero.
