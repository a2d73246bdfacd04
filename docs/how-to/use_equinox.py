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
# # Use an Equinox model
#
# An Equinox model is one tree that holds its arrays and everything else, such as activation functions. Divide it once:
# `eqx.partition(model, eqx.is_inexact_array)` gives the arrays that are trained, and the rest. The arrays are the parameters of
# the pipeline, and the loss puts both together again. (`pip install equinox`)

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


# %% [markdown]
# A transformer reads the digit row by row: eight rows, of eight pixels each.


# %%
class Classifier(eqx.Module):
    embed: eqx.nn.Linear
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second, *keys, last = jax.random.split(key, 7)
        self.embed = eqx.nn.Linear(8, 32, key=first)
        self.places = jax.random.normal(second, (8, 32)) / 4
        self.blocks = [Block(32, key) for key in keys]
        self.head = eqx.nn.Linear(32, 10, key=last)

    def __call__(self, x):
        x = jax.vmap(self.embed)(x.reshape(8, 8)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


# %% [markdown]
# An Equinox model computes one example, so the loss maps it over the batch with `jax.vmap`.

# %%
model = Classifier(jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)


def loss_fn(params, batch):
    logits = jax.vmap(eqx.combine(params, static))(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# %%
pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=4, num_microbatches=8)
state = pipe.init(params, batch)
print(pipe.stages)

# %%
for _ in range(40):
    state, metrics = pipe.step(state, batch)
print("loss:", metrics.loss)

# %% [markdown]
# `state.params` is an Equinox tree again. Gathered on one device and combined with the rest, it is a model like any other:

# %%
trained = eqx.combine(jaxpp.gather(state.params), static)
logits = jax.vmap(trained)(jnp.asarray(batch["x"]))
accuracy = (logits.argmax(-1) == batch["y"]).mean()
print(f"accuracy of the trained model: {accuracy:.1%}")

# %% [markdown]
# A step equals that of plain JAX on one device, leaf by leaf:

# %%
print(pipe.verify(state, batch))
assert accuracy > 0.9

# %% [markdown]
# ## What to look out for
#
# - Use `eqx.is_inexact_array` to divide the model, not `eqx.is_array`: integer arrays (a table of indices, a counter) have no
#   gradient.
# - `pipe.init(params, batch)` copies a model that exists. If the model does not fit on one device, use
#   `pipe.init(init_fn, key, batch)` with a function that returns `eqx.filter(Classifier(key), eqx.is_inexact_array)`; every leaf
#   is then made on its own device.
# - Dropout takes a key for each example: `loss_fn(params, batch, key)` with `jax.random.split(key, len(batch["x"]))`.
# - `eqx.nn.BatchNorm` keeps its statistics in an `eqx.nn.State`, made by `eqx.nn.make_with_state`. Pass that as model state, with
#   `has_state=True` and `pipe.init((params, state_of_the_model), batch)`.
