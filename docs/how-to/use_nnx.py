# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [NNX, BatchNorm, dropout]
# ---

# %% [markdown]
# # Use an NNX model
#
# Flax NNX models are Python objects that hold their parameters. `nnx.split` divides such an object into a description of the
# model and its arrays. The arrays of type `nnx.Param` are the parameters of the pipeline, and `nnx.merge` makes the model again
# inside the loss. This recipe trains a model with batch normalisation and dropout, whose other arrays (running statistics, random
# keys) are model state.

# %%
import warnings

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.gelu(self.norm(self.linear(x))))


# %%
class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(64, rngs) for _ in range(4)])
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# %% [markdown]
# `rest` holds everything that is not a parameter. `copy=True` makes the merged model independent of the trees that it is made
# from, so the loss does not change its arguments.

# %%
graphdef, params, rest = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param, ...)


def loss_fn(params, rest, batch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, (nnx.state(model, nnx.Not(nnx.Param)), {})


# %% [markdown]
# Each microbatch is normalised with its own statistics, and jaxpp says so. That is what we want here.

# %%
warnings.filterwarnings("ignore", category=jaxpp.MicrobatchWarning)
pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=4, has_state=True)
state = pipe.init((params, rest), batch)
print(pipe.stages)

# %%
for _ in range(30):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# The trained model, as an NNX object again. `model.eval()` makes it use the running statistics and no dropout.

# %%
trained = nnx.merge(graphdef, *jaxpp.gather((state.params, state.model_state)))
trained.eval()
accuracy = (trained(batch["x"]).argmax(-1) == batch["y"]).mean()
print(f"accuracy: {accuracy:.1%}")
assert accuracy > 0.9

# %% [markdown]
# `verify` raises an error unless the step equals plain JAX on one device, running statistics included. The statistics have indeed
# moved:

# %%
pipe.verify(state, batch)
before, after = rest["blocks"][0]["norm"]["mean"], state.model_state["blocks"][0]["norm"]["mean"]
assert not np.allclose(before[...], after[...])

# %% [markdown]
# ## What to look out for
#
# - A model without dropout and statistics has an empty `rest`. Leave `has_state` out, and close over `rest` in the loss.
# - The random keys of dropout are model state too: NNX counts how often each was used. The loss therefore takes no key here.
# - Microbatches pass the model state on, in order. With four microbatches the running statistics are updated four times in a
#   step, with the statistics of a quarter of the batch each.
# - With `data_parallel`, each replica has statistics of its own during a step, and after it all have their mean. Counters and keys
#   are the same on all replicas, so dropout draws the same masks there; a key that the loss takes differs.
