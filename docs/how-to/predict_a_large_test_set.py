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
# # Predict a large test set
#
# `pipe.stream` takes an iterator of batches and returns an iterator of outputs. It computes a few batches ahead, so the stages stay
# busy while you write outputs to a file, and it holds no more than these few, so a test set of any size needs no more memory.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The model is a small convolutional network for handwritten digits, trained for some steps.

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.reshape(-1, 8, 8, 1).astype("f4") / 16, "y": labels}


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Conv(16, (3, 3))(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_fn(params, batch):
    logits = CNN().apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# %%
train = {name: leaf[:512] for name, leaf in digits.items()}
pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=4, num_microbatches=4)
state = pipe.init(lambda key: CNN().init(key, train["x"]), jax.random.key(0), train)
for _ in range(30):
    state, metrics = pipe.step(state, train)

# %% [markdown]
# ## The outputs that you want
#
# A function of the parameters and a batch, which returns what you want to keep: here the digit, and how sure the model is. What it
# returns has one row for each image, so jaxpp joins the rows of the microbatches in order. The batches have no labels; the function
# reads what it needs.


# %%
def predict(params, batch):
    probabilities = nn.softmax(CNN().apply(params, batch["x"]))
    return {"digit": probabilities.argmax(-1), "sure": probabilities.max(-1)}


def batches(size=200):  # a data loader: any iterator will do
    for start in range(512, len(labels), size):
        yield {"x": digits["x"][start : start + size]}


# %%
found, sure = [], []
for outputs in pipe.stream(state, batches(), predict):
    found.append(np.asarray(outputs["digit"]))
    sure.append(np.asarray(outputs["sure"]))
digit = np.concatenate(found)
print("sizes of the outputs:", [len(each) for each in found])
print(f"right: {(digit == labels[512:]).mean():.1%}; least sure: {np.concatenate(sure).min():.2f}")

# %% [markdown]
# The same on one device:

# %%
wanted = jax.jit(predict)(jaxpp.gather(state.params), {"x": digits["x"][512:]})
np.testing.assert_allclose(np.concatenate(sure), wanted["sure"], atol=1e-5)
assert (digit == wanted["digit"]).all()

# %% [markdown]
# ## A batch that cannot be read
#
# A corrupt file in the middle of a long run need not end it. The exception comes out where the outputs of its batch would, and the
# stream goes on with the batch after it. (A generator that has raised has ended, in Python; so the loader below is an object.)


# %%
class Loader:
    """Raises at the third batch, and goes on."""

    def __init__(self):
        self.batches, self.number = list(batches()), -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == 2:
            raise OSError("cannot read batch 2")
        if self.number == len(self.batches):
            raise StopIteration
        return self.batches[self.number]


# %%
done = []
with pipe.stream(state, Loader(), predict) as stream:
    while True:
        try:
            outputs = next(stream)
        except StopIteration:
            break
        except OSError as error:
            print("left out:", error)
        else:
            done.append(outputs["digit"])
assert [len(each) for each in done] == [len(each) for k, each in enumerate(found) if k != 2]

# %% [markdown]
# ## What to look out for
#
# - Each new batch size is compiled once. Here that is the last batch, which is smaller. If compiling takes long, pad it and drop
#   the rows that are too many.
# - Outputs stay on the device of the last stage until you copy them: `np.asarray` above. Return `argmax` instead of all logits if
#   the logits are large.
# - `max_in_flight=2` is enough unless your loop takes long for some batches and not for others; then more of them even that out.
# - Define `predict` once, outside of loops. jaxpp knows a function by its identity, and traces a new one again.
# - If you need one number for the whole set and not a row for each example, `pipe.evaluate` counts for you ([Evaluate a test set
#   whose last batch is smaller](evaluate_a_ragged_test_set.py)).
