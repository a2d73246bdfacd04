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
# # Find where a NaN comes from
#
# With JAX's own switch, `jax.config.update("jax_debug_nans", True)`, jaxpp looks at the result of every program of a step. At the
# first NaN it says which stage made it, in which microbatch, in which module and on which line. The state stays whole, so that
# training can go on once the data or the model is mended.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The model divides every feature vector by its length. That is fine until a vector is zero. Here image 37 is empty, as after a
# failed download:


# %%
class Unit(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, use_bias=False)(x)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = nn.tanh(Unit(name=f"unit_{k}")(x))
        return nn.Dense(10, name="head")(x)


# %%
images, labels = load_digits(return_X_y=True)
good = {"x": images[:128].astype("f4") / 16, "y": labels[:128]}
bad = {"x": good["x"].copy(), "y": good["y"]}
bad["x"][37] = 0.0
model = Classifier()


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=4)
state = pipe.init(lambda key: model.init(key, good["x"]), jax.random.key(0), good)

# %% [markdown]
# Without the switch, one step is enough to make every parameter NaN, and the loss does not say why. (`donate=False` keeps the
# state from before this step.)

# %%
spoiled, metrics = pipe.step(state, bad, donate=False)
broken = [bool(jnp.isnan(leaf).any()) for leaf in jax.tree.leaves(spoiled.params)]
print(f"loss {metrics.loss}; {sum(broken)} of {len(broken)} parameter arrays contain NaN")

# %% [markdown]
# With the switch, the same step raises an error. Image 37 is in microbatch 1, because each of the four microbatches holds 32
# images. In a notebook the file in the message is the cell; in a script it is the script.

# %%
jax.config.update("jax_debug_nans", True)
try:
    state, metrics = pipe.step(state, bad)
except FloatingPointError as error:
    message = str(error)
print(message)

# %%
assert "stage 0, microbatch 1" in message
assert "unit_0" in message and "`div`" in message

# %% [markdown]
# The step that raised has changed nothing, and is not counted. The remedy in this model is to keep the divisor above zero, or to
# leave the empty image out:

# %%
assert pipe.state is state and state.step == 0
state, metrics = pipe.step(state, good)
jax.config.update("jax_debug_nans", False)
print("loss:", metrics.loss, "after step", metrics.step)
assert jnp.isfinite(jax.device_get(metrics.loss))

# %% [markdown]
# ## What to look out for
#
# - The switch costs time: each program is waited for, and no buffer is reused. Turn it on to find the cause, then off.
# - A NaN may first appear in a backward pass although the loss is finite, for instance the gradient of `jnp.linalg.norm` at zero,
#   or of `jnp.where(x > 0, jnp.sqrt(x), 0)`. jaxpp finds the line of the forward pass that it belongs to.
# - `jax_debug_infs` works in the same way for infinities.
# - For float16 with `loss_scale`, an overflow is expected now and then and only skips the step. `metrics.finite` reports it.
