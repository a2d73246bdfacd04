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
# # Use your own stages
#
# jaxpp normally cuts a loss into stages by itself. `Pipeline.from_stages` takes stages that you write as functions
# `stage_k(params_k, x) -> x` instead. This is useful to decide what each device does, or to see how a pipeline works: each stage
# can be run by hand, forward and backward.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# Two convolutions and a classifier make three stages. What one stage returns, the next one takes; the shapes may be anything.

# %%
conv_0, conv_1 = nn.Conv(8, (3, 3)), nn.Conv(8, (3, 3), strides=2)
classifier = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(10)])


def stage_0(params, images):
    return nn.gelu(conv_0.apply(params, images[..., None]))


def stage_1(params, x):
    return nn.gelu(conv_1.apply(params, x))


def stage_2(params, x):
    return classifier.apply(params, x.reshape(len(x), -1))


def loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


# %% [markdown]
# The parameters are a list with one tree for each stage, and the batch is a pair of inputs and targets.

# %%
images, targets = load_digits(return_X_y=True)
batch = images[:256].reshape(-1, 8, 8).astype("f4") / 16, targets[:256]
keys = jax.random.split(jax.random.key(0), 3)
shapes = (1, 8, 8, 1), (1, 8, 8, 8), (1, 128)
modules = zip((conv_0, conv_1, classifier), keys, shapes, strict=True)
params = [module.init(key, jnp.ones(shape)) for module, key, shape in modules]

stages = [stage_0, stage_1, stage_2]
pipe = jaxpp.Pipeline.from_stages(stages, loss=loss, optimizer=optax.adam(3e-3), num_microbatches=4)
state = pipe.init(params, batch)
print(pipe.stages)

# %%
for _ in range(30):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)
assert metrics.loss < 0.5

# %% [markdown]
# ## Forward and backward by hand
#
# `pipe.stages[k].forward` runs one stage on its device. It returns the activation and a pullback. The pullback is the backward of
# the stage: it takes the gradient of the loss with respect to the activation (the cotangent), and returns the gradients of the
# parameters and the cotangent of the input, which belongs to the stage before.

# %%
x, pullbacks = batch[0], []
for stage, own in zip(pipe.stages, params, strict=True):
    x, pullback = stage.forward(own, x)  # on the device of the stage
    pullbacks.append(pullback)

cotangent = jax.grad(loss)(x, jax.device_put(batch[1], x.device))
grads = []
for pullback in reversed(pullbacks):
    own_grads, cotangent = pullback(cotangent)  # on the device of the stage
    grads.insert(0, own_grads)

# %% [markdown]
# Plain JAX, on one device, has the same gradients:


# %%
def whole_loss(params, batch):
    x, targets = batch
    for stage, own in zip(stages, params, strict=True):
        x = stage(own, x)
    return loss(x, targets)


plain_grads = jax.jit(jax.grad(whole_loss))(params, batch)
for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
pipe.verify(state, batch)

# %% [markdown]
# ## What to look out for
#
# - A pullback runs once, because it gives its residuals back. Run the stage forward again for a new one.
# - Stages by hand take no key and no aux. With dropout, aux values or model state, write one loss function and name the places to
#   cut: `jaxpp.Pipeline(loss_fn, ..., cuts=["hidden", "output"])`.
# - jaxpp does not balance stages that you write. The column `share` of the table says how the work is divided; the stage with the
#   largest share has most to do with how fast a step can be.
