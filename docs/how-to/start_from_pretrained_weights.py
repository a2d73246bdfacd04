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
# # Start from pretrained weights
#
# `pipe.init(params, batch)` takes parameters that exist, from any source, and copies every leaf to the device of the stage that
# uses it. If the parameters are NumPy arrays, as `flax.serialization` restores them, the model is never whole on any device. This
# recipe writes a Flax checkpoint of a classifier of the digits 0 to 4, and fine-tunes it on all ten digits.

# %%
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import serialization
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
small = {name: leaf[labels < 5] for name, leaf in digits.items()}


class Classifier(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        for k in range(3):
            x = nn.tanh(nn.Dense(64, name=f"body_{k}")(x))
        return nn.Dense(self.num_classes, name="head")(x)


# %%
def make_loss(model):
    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn


# %% [markdown]
# ## The checkpoint
#
# It is made with plain JAX on one device, as most public checkpoints are.

# %%
model, optimizer = Classifier(5), optax.adam(3e-3)
loss_fn = make_loss(model)
params = model.init(jax.random.key(0), small["x"])["params"]
opt_state = optimizer.init(params)
grad_fn = jax.jit(jax.grad(loss_fn))
for _ in range(40):
    updates, opt_state = optimizer.update(grad_fn(params, small), opt_state)
    params = optax.apply_updates(params, updates)

path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.msgpack"
path.write_bytes(serialization.msgpack_serialize(serialization.to_state_dict(params)))
print(path.stat().st_size, "bytes; loss", loss_fn(params, small))

# %% [markdown]
# ## The pipeline
#
# `msgpack_restore` gives a tree of NumPy arrays. First, the same model as before: through the pipeline it has the same loss.

# %%
restored = serialization.msgpack_restore(path.read_bytes())
pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=4)
state = pipe.init(restored, small)
np.testing.assert_allclose(pipe.evaluate(state, small).loss, loss_fn(params, small), rtol=1e-5)

# %% [markdown]
# Then the body of that model under a new head for ten classes. Only the head is initialised; `jax.eval_shape` says what shape
# each parameter must have, without making any.

# %%
wide = Classifier(10)
shapes = jax.eval_shape(wide.init, jax.random.key(1), digits["x"])["params"]
head = nn.Dense(10).init(jax.random.key(1), np.zeros((1, 64), "f4"))["params"]
mixed = {**restored, "head": head}
assert jax.tree.map(np.shape, mixed) == jax.tree.map(np.shape, shapes)

fine_tuned = jaxpp.Pipeline(make_loss(wide), optax.adam(3e-3), num_stages=2, num_microbatches=4)
state = fine_tuned.init(mixed, digits)
print("loss before:", fine_tuned.evaluate(state, digits).loss)
for _ in range(40):
    state, metrics = fine_tuned.step(state, digits)
print("loss after: ", metrics.loss)

# %%
assert metrics.loss < 0.5
np.testing.assert_array_equal(restored["body_0"]["kernel"], params["body_0"]["kernel"])

# %% [markdown]
# ## What to look out for
#
# - `pipe.init` copies the parameters that it is given. Training does not change `restored`, as the last line checks.
# - Only the parameters come from the checkpoint; the optimizer starts anew. To go on with a run that was interrupted, save and
#   restore the whole `state`.
# - The names in the tree must be those of the model. If a checkpoint calls its layers differently, rename the keys of the
#   dictionary before `init`.
# - A checkpoint in 16 bits makes parameters in 16 bits, and their updates lose digits. Convert it first, with
#   `optax.tree.cast(restored, "float32")`.
