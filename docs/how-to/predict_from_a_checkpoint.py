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
# # Open a training checkpoint for predictions
#
# A checkpoint of a training run holds parameters, optimizer state and more. To predict, the parameters are enough, and perhaps
# there are fewer devices than in training. `jaxpp.Forward` says on which device each leaf belongs, and Orbax reads the parameters
# straight there: neither the host nor one device ever holds all of them, and the optimizer state is not read at all.

# %%
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## A run has written a checkpoint
#
# The run has four stages. It saves its state, as in [Save and resume](save_and_resume.py).

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
model = nn.Sequential([*(layer for _ in range(6) for layer in (nn.Dense(64), nn.relu)), nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def init_fn(key):
    return model.init(key, digits["x"][:1])


pipe = jaxpp.Pipeline(loss_fn, optax.adamw(3e-3), num_stages=4, num_microbatches=8)
state = pipe.init(init_fn, jax.random.key(0), digits)
for _ in range(20):
    state, metrics = pipe.step(state, digits)
path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
with ocp.StandardCheckpointer() as checkpointer:  # waits at its end until everything is written
    checkpointer.save(path, state)

# %% [markdown]
# ## Open it for predictions, over two devices
#
# `forward.abstract_params` takes the arguments of `forward.init` and makes no array: it returns shapes, each with the device of its
# owner. Orbax takes the part of the checkpoint that it is asked for, `params`, and leaves the rest (`partial_restore=True`).


# %%
def predict(params, x):
    return nn.softmax(model.apply(params, x))


forward = jaxpp.Forward(predict, num_stages=2)
target = {"params": forward.abstract_params(init_fn, jax.random.key(0), digits["x"])}
where = ocp.checkpoint_utils.construct_restore_args(target)
with ocp.PyTreeCheckpointer() as checkpointer:
    options = ocp.args.PyTreeRestore(item=target, restore_args=where, partial_restore=True)
    params = checkpointer.restore(path, args=options)["params"]
print(forward.stages)

# %%
probabilities = forward.apply(params, digits["x"])
np.testing.assert_allclose(probabilities, pipe.apply(state, digits["x"], predict), atol=1e-5)
print("devices:", sorted(str(leaf.device) for leaf in jax.tree.leaves(params)))
print(f"right: {(np.asarray(probabilities.argmax(-1)) == labels).mean():.1%}")

# %% [markdown]
# The optimizer's means of the gradients, twice as many numbers as the parameters, were never read.
#
# ## Parameters from elsewhere
#
# Parameters that are in memory already, from a file of another library, say, go to their owners with
# `forward.init(params, batch)`. They may have any type. Integers are parameters like others here, since nothing is differentiated:

# %%
quantised = jax.tree.map(lambda leaf: np.asarray(leaf * 64).round().clip(-127, 127).astype(np.int8), jaxpp.gather(params))


def predict_quantised(params, x):
    return predict(jax.tree.map(lambda leaf: leaf.astype("float32") / 64, params), x)


small = jaxpp.Forward(predict_quantised, num_stages=2)
rough = small.apply(small.init(quantised, digits["x"]), digits["x"])
same = np.asarray(rough.argmax(-1) == probabilities.argmax(-1)).mean()
print(f"{sum(leaf.nbytes for leaf in jax.tree.leaves(quantised)):,} bytes of int8; {same:.1%} of the digits are the same")
assert same > 0.9

# %% [markdown]
# ## What to look out for
#
# - A checkpoint that `CheckpointManager` wrote lies one folder deeper: `folder / "20" / "default"`.
# - `num_stages`, `cuts` and `devices` of the `Forward` are its own. They need not be those of the training run.
# - With `has_state=True` in training, the checkpoint has `model_state` too. Give both to the function as one tree:
#   `predict(variables, x)` with `variables = {"params": ..., "model_state": ...}`, and ask Orbax for both parts.
