# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [BatchNorm, batch normalisation, batch_stats, running statistics, model state, has_state, mutable]
# ---

# %% [markdown]
# # Train a model with BatchNorm
#
# Flax's `BatchNorm` keeps running statistics, which training updates without a gradient. With `has_state=True` the loss takes them
# as its second argument and returns the new ones. This recipe trains such a model in Flax Linen, and then evaluates it with its
# running statistics.

# %%
import warnings

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
batch, test = {name: leaf[:1280] for name, leaf in digits.items()}, {name: leaf[1280:] for name, leaf in digits.items()}


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for _ in range(4):
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


# %% [markdown]
# The loss returns a pair: the loss, and the new model state with an `aux`, which is empty here. The statistics are not parameters:
# as parameters the optimizer would train them.

# %%
model = Classifier()


def loss_fn(params, model_state, batch):
    logits, new_state = model.apply({"params": params, **model_state}, batch["x"], train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, (new_state, {})


# %% [markdown]
# Each microbatch is normalised with its own statistics, and jaxpp says so in a `MicrobatchWarning`. That is what we want here: a
# microbatch of 320 examples has statistics that are good enough. `num_microbatches=1` would take those of the whole batch.
#
# `init` takes the pair of parameters and model state, or a function of a key that makes this pair.

# %%
warnings.filterwarnings("ignore", category=jaxpp.MicrobatchWarning)


def init_fn(key):
    variables = model.init(key, batch["x"], train=True)
    return variables["params"], {"batch_stats": variables["batch_stats"]}


pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=4, num_microbatches=4, has_state=True)
state = pipe.init(init_fn, jax.random.key(0), batch)
pipe.verify(state, batch)  # raises unless a step equals plain JAX on one device, running statistics included
for _ in range(30):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# `state.model_state` holds the running statistics, each on the device of the stage that updates it. Evaluation uses them and
# changes nothing. Here it takes place on one device:

# %%
params, model_state = jaxpp.gather((state.params, state.model_state))
logits = model.apply({"params": params, **model_state}, test["x"], train=False)
accuracy = np.mean(logits.argmax(-1) == test["y"])
print(f"accuracy on examples that were not trained on: {accuracy:.1%}")
assert accuracy > 0.85

# %% [markdown]
# ## What to look out for
#
# - Microbatches pass the statistics on, in order. With four microbatches a step updates the running statistics four times, so a
#   `momentum` of 0.9 forgets as fast as 0.9 ** 4 would in a step on the whole batch.
# - Without `has_state`, a loss that takes all variables as its parameters would train the running statistics.
# - With `data_parallel`, each replica has running statistics of its own during a step, and after it all have their mean. With
#   `nn.BatchNorm(axis_name="data")` the examples of all replicas are normalised together, as with `pmap` or `shard_map`.
# - For NNX see [Use an NNX model](use_nnx.ipynb), for Equinox [Use an Equinox model](use_equinox.ipynb), for Haiku
#   [Use a Haiku model](use_haiku.ipynb).
