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
# # Interrupt training and go on
#
# You stop a cell that trains, look at something, and want to go on. Or the batch system says that the job is about to end. In both
# cases a signal arrives at a random moment, most often inside `pipe.step`. `pipe.state` is then the newest state: the state before
# the step that was interrupted, or the state after it, and never half of each.

# %%
import os
import signal
import tempfile
import threading

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
batches = [{name: leaf[k : k + 128] for name, leaf in digits.items()} for k in range(0, 1280, 128)]
layers = [layer for _ in range(4) for layer in (nn.Dense(64), nn.tanh, nn.Dropout(0.1, deterministic=False))]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch, key):
    logits = model.apply(params, batch["x"], rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def init_params(key):
    return model.init({"params": key, "dropout": key}, batches[0]["x"])


pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4)
state = pipe.init(init_params, jax.random.key(0), batches[0])

# %% [markdown]
# ## A cell that can be run again
#
# The loop takes the batch and the key from the number of the step, `state.step`, and begins with `pipe.state`. So the same cell
# goes on where it stopped, and sees the same batches and keys as a run without interruptions. Keep `pipe.init` in another cell,
# because it starts from the beginning.

# %%
num_steps = 100


def train(state):
    while state.step < num_steps:
        batch = batches[state.step % len(batches)]
        key = jax.random.fold_in(jax.random.key(1), state.step)
        state, _ = pipe.step(state, batch, key)
    return state


# %% [markdown]
# Here a timer sends what Ctrl-C and the stop button send, until all steps are done. In a notebook you write only
# `state = train(pipe.state)`, and run the cell again.

# %%
while pipe.state.step < num_steps:
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        ctrl_c.start()
        state = train(pipe.state)
        ctrl_c.cancel()
        ctrl_c.join()
    except KeyboardInterrupt:
        print(f"interrupted after {pipe.state.step} steps")
print(f"{pipe.state.step} steps")

# %% [markdown]
# A run that nobody interrupts ends with the same bits:


# %%
def same_bits(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(one), jax.device_get(other)))


interrupted = jax.device_get(pipe.state)
state = train(pipe.init(init_params, jax.random.key(0), batches[0]))
assert same_bits(interrupted, state)

# %% [markdown]
# ## If the variable names an old state
#
# When `state, metrics = pipe.step(state, batch, key)` is interrupted, nothing is assigned. If the step was completed all the same,
# `state` still names the state before the step, whose buffers the step has reused. The message says what to do:

# %%
old = pipe.state
pipe.step(old, batches[0], jax.random.key(2))  # as if the result had been lost
try:
    pipe.step(old, batches[0], jax.random.key(2))
except ValueError as error:
    print(error)

# %%
state = pipe.state
assert state.step == num_steps + 1

# %% [markdown]
# ## SIGTERM, the notice of a batch system
#
# Most batch systems send SIGTERM some time before they end a job. Without a handler it ends Python at once. With a handler that
# raises `SystemExit`, the step is undone or completed first, and then there is time to save.


# %%
def stop(number, _):
    raise SystemExit(f"stopped by signal {number}")


signal.signal(signal.SIGTERM, stop)
notice = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
path = os.path.join(tempfile.mkdtemp(), "state.npz")
state = pipe.init(init_params, jax.random.key(0), batches[0])
try:
    notice.start()
    train(state)
    notice.join()
except SystemExit as error:  # in a script: save, then `raise`
    np.savez(path, *jax.tree.leaves(pipe.state))
    print(f"{error}, saved after {pipe.state.step} steps")
_ = signal.signal(signal.SIGTERM, signal.SIG_DFL)

# %% [markdown]
# The next job reads the file and goes on from there. (NumPy keeps this recipe short. A large state is saved with Orbax, which
# writes and restores each device's part by itself.)

# %%
with np.load(path) as file:
    saved = jax.tree.unflatten(jax.tree.structure(pipe.state), list(file.values()))
state = train(saved)
assert same_bits(interrupted, state)

# %% [markdown]
# ## What to look out for
#
# - During the few milliseconds in which an update is handed to the devices, signals wait. If a device hangs just then, press Ctrl-C
#   again after a second: the step is broken off, and you go on from a checkpoint, because the state may be lost.
# - A step that raises is undone as well, up to the optimizer: a wrong batch, an error in the loss or in a host callback. If the
#   update itself fails in part, which takes a device without memory, reading `pipe.state` says so.
# - Ctrl-C during `pipe.init` leaves no state. Run the cell of `pipe.init` again; what was compiled before is not compiled again.
# - After Ctrl-C in `generation.collect()` call it again: it gives the tokens of both calls. In a stream, `next` goes on.
# - On CPU devices a host callback (`jax.debug.callback`) may run in the main thread. If Ctrl-C arrives inside the callback, JAX
#   makes it a `JaxRuntimeError`. The step is undone.
# - With a bank, the parameters that all tasks share and the set of the step's task change together or not at all.
# - Signals arrive in the main thread, and only steps in the main thread are protected. Notebook cells run there.
