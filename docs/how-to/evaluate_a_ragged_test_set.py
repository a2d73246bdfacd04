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
# # Evaluate a test set whose last batch is smaller
#
# A test set rarely divides into equal batches. `pipe.evaluate` takes a batch of any size, and `reduce_aux={"name": "sum"}` makes
# it count instead of averaging. Counts can be added up over the batches, and one division at the end gives the exact mean over
# the whole set.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The loss function returns what is to be counted as aux: the sum of the losses, the number of right answers, and the number of
# examples.

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
layers = [layer for _ in range(3) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    correct = logits.argmax(-1) == batch["y"]
    return losses.mean(), {"loss": losses.sum(), "correct": correct.sum(), "examples": correct.size}


# %%
train = {name: leaf[:1024] for name, leaf in digits.items()}
test = {name: leaf[1024:] for name, leaf in digits.items()}
options = {"num_stages": 2, "num_microbatches": 4, "has_aux": True}
count = {"loss": "sum", "correct": "sum", "examples": "sum"}
pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), **options, reduce_aux=count)
state = pipe.init(lambda key: model.init(key, train["x"]), jax.random.key(0), train)
for _ in range(30):
    state, metrics = pipe.step(state, train)

# %% [markdown]
# The test set has 773 examples: seven batches of 100, and one of 73.

# %%
total = dict.fromkeys(count, 0.0)
batch_losses = []
for start in range(0, 773, 100):
    batch = {name: leaf[start : start + 100] for name, leaf in test.items()}
    metrics = pipe.evaluate(state, batch)
    batch_losses.append(metrics.loss)
    total = {name: total[name] + float(metrics.aux[name]) for name in total}

mean_loss, accuracy = (total[name] / total["examples"] for name in ("loss", "correct"))
print(f"loss {mean_loss:.6f}, accuracy {accuracy:.2%}")
print(f"mean of the losses of the batches: {np.mean(batch_losses):.6f}, which is another number")

# %% [markdown]
# The same on one device, with the whole test set as one batch:

# %%
loss, wanted = loss_fn(jax.device_get(state.params), test)
assert total["examples"] == 773 and total["correct"] == wanted["correct"]
np.testing.assert_allclose(mean_loss, loss, rtol=1e-5)
assert not np.isclose(np.mean(batch_losses), loss, rtol=1e-5)

# %% [markdown]
# ## Fewer examples than microbatches
#
# `evaluate` also takes fewer examples than there are microbatches. It then makes fewer microbatches, of one example each, and the
# mean is exact here too. A training step does not take so few, because a batch that small is usually a mistake:

# %%
three = {name: leaf[:3] for name, leaf in test.items()}
metrics = pipe.evaluate(state, three)
loss, wanted = loss_fn(jax.device_get(state.params), three)
np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
assert metrics.aux["examples"] == 3 and metrics.aux["correct"] == wanted["correct"]
try:
    pipe.step(state, three)
except ValueError as error:
    print(error)

# %% [markdown]
# ## What to look out for
#
# - Inside one batch, `metrics.loss` is already exact: the microbatches of a batch of 73 hold 19, 18, 18 and 18 examples, and are
#   weighted by these sizes.
# - Each new batch size is compiled once. If compiling takes long, pad the last batch to the full size and let the loss count with
#   a mask: `(losses * batch["mask"]).sum()`, `batch["mask"].sum()`.
# - For the outputs of each example instead of sums, use `pipe.stream` ([Predict a large test set](predict_a_large_test_set.py)).
# - `float(...)` waits for the devices. With a large test set, collect the metrics in a list and add them up at the end.
# - Aux values that have one row for each example, such as predictions, are joined in the order of the batch if `reduce_aux` does
#   not say otherwise.
