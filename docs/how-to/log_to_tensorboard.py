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
# # Log to TensorBoard or Weights & Biases
#
# A training loop with jaxpp is a Python loop in one process, so any logger works. This recipe writes the loss, the norm of the
# gradient and a histogram of the weights to TensorBoard with `tensorboardX`, a small package that needs neither TensorFlow nor
# PyTorch (`pip install tensorboardX`).

# %%
import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:512].astype("f4") / 16, "y": labels[:512]}
layers = [layer for _ in range(3) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(3e-3), num_stages=2, num_microbatches=4)
state = pipe.init(lambda key: model.init(key, batch["x"]), jax.random.key(0), batch)

# %% [markdown]
# A step returns before the devices have finished it. To read a metric waits, so the loop writes the metrics of the step before
# while the devices work on the present step. `metrics.step` says which step they belong to, also after a run was resumed.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
writer = SummaryWriter(folder)


def log(metrics):
    for name in ("loss", "grad_norm"):
        writer.add_scalar(name, float(metrics[name]), metrics.step)


state, metrics = pipe.step(state, batch)
losses = [metrics.loss]
while state.step < 30:
    before = metrics
    state, metrics = pipe.step(state, batch)
    log(before)
    losses.append(metrics.loss)

# %% [markdown]
# Parameters are read on the host with `jax.device_get`. Their paths make good names. `tensorboard --logdir` and the name of the
# folder show the result.

# %%
log(metrics)
for path, leaf in jax.tree.leaves_with_path(jax.device_get(state.params)):
    writer.add_histogram(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, state.step)
writer.close()

# %% [markdown]
# The file of events holds what was logged. Each record has its length in the first 8 bytes, 4 bytes of checksum, the event, and 4
# more bytes of checksum.

# %%
data, events = next(folder.iterdir()).read_bytes(), []
while data:
    size = int.from_bytes(data[:8], "little")
    events.append(Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
values = [value for event in events for value in event.summary.value]
found = [value.simple_value for value in values if value.tag == "loss"]
assert [event.step for event in events if any(value.tag == "loss" for value in event.summary.value)] == list(range(1, 31))
np.testing.assert_allclose(found, losses, rtol=1e-6)
print(*sorted({value.tag for value in values}), sep="\n")

# %% [markdown]
# ## Weights & Biases
#
# The loop is the same; only the writer differs:
#
# ```python
# import wandb
#
# run = wandb.init(project="digits", mode="offline", config={"num_stages": 2})
# while state.step < 30:
#     state, metrics = pipe.step(state, batch)
#     run.log({"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm)}, step=metrics.step)
# run.finish()
# ```
#
# `mode="offline"` writes to the folder `wandb`, and `wandb sync` uploads it later.
#
# ## What to look out for
#
# - `float(metrics.loss)` right after `pipe.step` waits for the step. Log the step before, as above, or only every tenth step.
# - `dict(metrics)` has whatever the step reports: `loss`, `grad_norm`, `step`, `aux` if the loss has aux, and `finite` with a loss
#   scale.
# - With several hosts the same script runs on every host. Let one host write: `if jax.process_index() == 0`.
