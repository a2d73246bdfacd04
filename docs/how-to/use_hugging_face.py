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
# # Use a Hugging Face model
#
# The Flax models of Hugging Face's `transformers` are Flax modules with a friendlier face, and jaxpp cuts them as they are. This
# recipe makes a small GPT-2 from a configuration, without downloading weights, and trains it on the source code of a module of
# Python.
#
# Version 5 of `transformers` has removed the Flax models. The last version that has them is 4.57
# (`pip install "transformers<5"`); it works with the JAX and Flax releases that jaxpp needs. It announces the removal in a
# message, which `set_verbosity_error` silences.

# %%
import argparse
import pathlib

import jax
import numpy as np
import optax
import transformers

import jaxpp

transformers.logging.set_verbosity_error()
jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# Each token is one byte of the text, so no tokenizer is needed.

# %%
text = pathlib.Path(argparse.__file__).read_bytes()
tokens = np.frombuffer(text, np.uint8)[: 32 * 33].reshape(32, 33).astype("i4")
batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2)
model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)

# %% [markdown]
# `_do_init=False` leaves the parameters out of the model. `model.init_weights` makes them, and `pipe.init` traces it, so that
# every leaf is made on the device that owns it. `cuts` says that the second stage begins with the second block; without it, jaxpp
# cuts for the shortest step, which in a model of two blocks is inside a block.


# %%
def loss_fn(params, batch, key):
    logits = model(batch["inputs"], params=params, dropout_rng=key, train=True).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def init(key):
    return model.init_weights(key, (1, 32))


cuts = ["transformer/h/1"]
pipe = jaxpp.Pipeline(loss_fn, optax.adamw(3e-3), num_stages=2, num_microbatches=4, cuts=cuts)
state = pipe.init(init, jax.random.key(0), batch)
print(pipe.stages)

# %%
key, losses = jax.random.key(1), []
for k in range(20):
    state, metrics = pipe.step(state, batch, jax.random.fold_in(key, k))
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# `verify` compares a step with the step of plain JAX on one device: the loss, every gradient and every updated parameter, with
# the same dropout masks. It raises an error if a leaf differs.

# %%
pipe.verify(state, batch, key)
assert losses[-1] < 0.7 * losses[0]

# %% [markdown]
# ## Weights from the hub
#
# A model with its weights is loaded in the same two parts. The arrays go to their stages from the host:
#
# ```python
# model, params = transformers.FlaxGPT2LMHeadModel.from_pretrained("gpt2", _do_init=False)
# state = pipe.init(params, batch)
# ```
#
# ## What to look out for
#
# - `dropout_rng` and `train=True` belong together. For evaluation, write a second loss with `train=False` and pass it as
#   `pipe.evaluate(state, batch, loss_fn=eval_loss)`.
# - The first and the last stage share the embedding (`wte` is also the output layer). The table of stages shows it with its
#   owner, the first stage; the last stage gets a copy once in a step.
# - To let the model write, see [Generate with a Hugging Face model](generate_with_hugging_face.py).
# - `dtype=jax.numpy.bfloat16` as an argument of the model makes it compute in bfloat16, as in [Train in mixed
#   precision](mixed_precision.py).
