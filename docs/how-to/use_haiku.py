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
# # Use a Haiku model
#
# `hk.transform` turns a Haiku function into a pair of pure functions, `init` and `apply`, and these are all that jaxpp needs.
# Here that function is a transformer with JAX's own `jax.nn.dot_product_attention`.
# Haiku's parameters are a dictionary by module name, and the table of stages shows the same names. (`pip install dm-haiku`)

# %%
import haiku as hk
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}


class Block(hk.Module):
    def __call__(self, x, is_training):
        y = hk.LayerNorm(-1, True, True, name="norm_0")(x)
        parts = (hk.Linear(32, name=name)(y).reshape(len(x), 8, 4, 8) for name in ("query", "key", "value"))
        x += hk.Linear(32, name="out")(jax.nn.dot_product_attention(*parts).reshape(x.shape))
        y = hk.LayerNorm(-1, True, True, name="norm_1")(x)
        y = hk.nets.MLP([64, 32], activation=jax.nn.gelu)(y)
        return x + (hk.dropout(hk.next_rng_key(), 0.1, y) if is_training else y)


def forward(x, is_training):
    x = hk.Linear(32, name="embed")(x.reshape(len(x), 8, 8))  # a digit is eight rows of eight pixels
    x += hk.get_parameter("places", (8, 32), init=hk.initializers.RandomNormal(0.25))
    for k in range(2):
        x = Block(name=f"block_{k}")(x, is_training)
    return hk.Linear(10, name="head")(x.mean(1))


model = hk.transform(forward)

# %% [markdown]
# The key of the loss goes to `apply`, which gives it to `hk.next_rng_key`. Microbatch i gets `jax.random.fold_in(key, i)`.


# %%
def loss_fn(params, batch, key):
    logits = model.apply(params, key, batch["x"], is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def eval_loss(params, batch):
    logits = model.apply(params, None, batch["x"], is_training=False)
    return (logits.argmax(-1) != batch["y"]).mean()


# %%
def init(key):
    return model.init(key, batch["x"], is_training=True)


optimizer = optax.sgd(0.05, momentum=0.9)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=4)
state = pipe.init(init, jax.random.key(0), batch)
print(pipe.stages)

# %%
first_key, key = jax.random.split(jax.random.key(1))
state, metrics = pipe.step(state, batch, first_key)
first = jax.device_get(state.params)
for k in range(30):
    state, metrics = pipe.step(state, batch, jax.random.fold_in(key, k))
errors = pipe.evaluate(state, batch, loss_fn=eval_loss).loss
print(f"loss {metrics.loss:.4f}, errors {errors:.1%}")
assert errors < 0.15

# %% [markdown]
# The first step again on one device, as a loop over four microbatches with the same keys. The parameters after the step are equal:

# %%
params, grads = init(jax.random.key(0)), []
grad_fn = jax.jit(jax.grad(loss_fn))
for i in range(4):
    part = {name: leaf[64 * i : 64 * (i + 1)] for name, leaf in batch.items()}
    grads.append(grad_fn(params, part, jax.random.fold_in(first_key, i)))

mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *grads)
updates, _ = optimizer.update(mean, optimizer.init(params), params)
plain = optax.apply_updates(params, updates)
for found, wanted in zip(jax.tree.leaves(first), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

# %% [markdown]
# ## What to look out for
#
# - Modules with state (`hk.BatchNorm`) need `hk.transform_with_state`. Use `has_state=True` and the loss
#   `loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))`.
# - Without a key, `hk.next_rng_key` raises an error. Losses for evaluation pass `None`, as above.
# - Haiku is in maintenance, and its authors recommend Flax for new code.
