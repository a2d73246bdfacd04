# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   tags: [checkpoint, restore, Orbax]
# ---

# %% [markdown]
# # Save and resume
#
# A long run is interrupted sooner or later, and comes back on other devices. jaxpp leaves checkpoints to
# [Orbax](https://orbax.readthedocs.io), the library that Flax uses (`pip install -e ".[checkpoint]"`). This recipe writes a
# training loop that continues from its newest checkpoint whenever it is started again, with the same bits as if it had never
# stopped. Then it opens the same checkpoint with other numbers of stages and in plain JAX.

# %%
import logging
import pathlib
import tempfile
import time
import warnings

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## What a step reads
#
# A step reads the state, a batch and a key. The state is what the checkpoint holds: parameters, optimizer state, model state, loss
# scale, and `state.step`, the number of steps taken. If the batch and the key are functions of `state.step`, then nothing else
# needs to be saved. The key of a step is `jax.random.fold_in(key, state.step)`, and the batch is:

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}


def batch_of(step):
    """The batch with this number: epoch by epoch, each epoch in an order of its own."""
    epoch, position = divmod(step, len(labels) // 128)
    order = np.random.default_rng(epoch).permutation(len(labels))
    rows = order[128 * position : 128 * (position + 1)]
    return {name: leaf[rows] for name, leaf in digits.items()}


# %% [markdown]
# The model is a small classifier of handwritten digits with dropout, so that the key matters.


# %%
class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


model, optimizer, key = Classifier(), optax.adamw(3e-3), jax.random.key(1)


def loss_fn(params, batch, key):
    logits = model.apply(params, batch["x"], rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def init_fn(key):
    return model.init({"params": key, "dropout": key}, digits["x"][:128])


# %% [markdown]
# ## Begin, or continue
#
# `pipe.abstract_state` takes the same arguments as `pipe.init`. It makes no array. It returns the shapes of the state and where
# each leaf lives, and Orbax brings each leaf of the checkpoint straight there. If there is no checkpoint yet, the run begins.


# %%
def begin_or_continue(pipe, manager):
    arguments = (init_fn, jax.random.key(0), batch_of(0))
    newest = manager.latest_step()
    if newest is None:
        return pipe.init(*arguments)
    print("continues after step", newest)
    return manager.restore(newest, args=ocp.args.StandardRestore(pipe.abstract_state(*arguments)))


# %% [markdown]
# Orbax's `CheckpointManager` decides when to save and what to keep: here it saves every fifth step and keeps the three newest
# checkpoints. `manager.save` returns as soon as the arrays are copied to the host, and a thread writes them while training goes on.
# A run that was killed while writing leaves a folder whose name ends in `.orbax-checkpoint-tmp`. Orbax never takes such a folder
# for a checkpoint, and `cleanup_tmp_directories` removes it at the next start.


# %%
def open_manager(folder):
    options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=3, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder, options=options)


def train(pipe, folder, until):
    with open_manager(folder) as manager:  # waits at the end until the last save is written
        state = begin_or_continue(pipe, manager)
        while state.step < until:
            state, _ = pipe.step(state, batch_of(state.step), jax.random.fold_in(key, state.step))
            manager.save(state.step, args=ocp.args.StandardSave(state))
    return state


# %% [markdown]
# Take a folder that stays in place of the temporary one. Run these cells again, in this process or in a new one, and training
# continues where it was. Here the run stops after 13 steps; the newest checkpoint is that of step 10.

# %%
options = {"num_stages": 4, "num_microbatches": 4}
folder = pathlib.Path(tempfile.mkdtemp())  # yours: pathlib.Path("runs/digits").absolute()
state = train(jaxpp.Pipeline(loss_fn, optimizer, **options), folder, until=13)
state

# %%
state = train(jaxpp.Pipeline(loss_fn, optimizer, **options), folder, until=20)
print("checkpoints:", *sorted(int(path.name) for path in folder.iterdir()))

# %% [markdown]
# Steps 11 to 13 were done twice. The result has the same bits as a run of 20 steps that nothing stopped:


# %%
def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


wanted = train(jaxpp.Pipeline(loss_fn, optimizer, **options), pathlib.Path(tempfile.mkdtemp()), until=20)
assert state.step == wanted.step == 20
assert_same_bits(state, wanted)

# %% [markdown]
# ## Continue with other stages
#
# A checkpoint holds your own tree, with whole leaves, and says nothing about stages. So it opens with any number of stages and any
# schedule. The state that comes back is the same to the bit. From there on, other stages may add in another order, so the results
# agree to about 1e-5 in float32.

# %%
with open_manager(folder) as manager:
    for name, num_stages in {"gpipe": 1, "1f1b": 2, "zb-v": 4}.items():  # zb-v: two stages on each of two devices
        given = {"num_stages": num_stages, "num_microbatches": 4, "schedule": name, "devices": jax.devices()[:2]}
        pipe = jaxpp.Pipeline(loss_fn, optimizer, **given)
        resumed = begin_or_continue(pipe, manager)
        assert_same_bits(resumed, state)
        resumed, metrics = pipe.step(resumed, batch_of(20), jax.random.fold_in(key, 20))
        print(f"step {metrics.step} with {name} and {num_stages} stages: loss {metrics.loss:.6f}")

# %% [markdown]
# ## Open it without jaxpp
#
# The checkpoint of step 20 is a dictionary with the parts of the state. Orbax needs a tree of the same form as the target, and its
# arrays say where to restore to. In plain Flax and optax that is a fresh state, here on the first device:

# %%
params = jax.jit(init_fn)(jax.random.key(0))
target = {"params": params, "opt_state": optimizer.init(params), "model_state": (), "loss_scale": (), "step": 0}
plain = ocp.StandardCheckpointer().restore(folder / "20" / "default", target)
assert_same_bits((plain["params"], plain["opt_state"]), (state.params, state.opt_state))
assert plain["step"] == 20 and {leaf.device for leaf in jax.tree.leaves(plain["params"])} == {jax.devices()[0]}

# %% [markdown]
# The other way round, a checkpoint of a plain training loop opens in a pipeline. Take the parts that it has from
# `pipe.abstract_state`, and make a `jaxpp.State` of them:

# %%
path = pathlib.Path(tempfile.mkdtemp()) / "plain"
with ocp.StandardCheckpointer() as checkpointer:  # waits until it is written
    checkpointer.save(path, {name: plain[name] for name in ("params", "opt_state", "step")})

pipe = jaxpp.Pipeline(loss_fn, optimizer, **options)
target = pipe.abstract_state(init_fn, jax.random.key(0), batch_of(0))
parts = {name: getattr(target, name) for name in ("params", "opt_state", "step")}
from_plain = jaxpp.State(**ocp.StandardCheckpointer().restore(path, parts))
assert_same_bits(from_plain, state)
from_plain, metrics = pipe.step(from_plain, batch_of(20), jax.random.fold_in(key, 20))
print(f"step {metrics.step}: loss {metrics.loss:.6f}")

# %% [markdown]
# ## A loader that cannot jump
#
# `batch_of(step)` finds its batch at once. An iterator has to be moved forward after a restart, by taking the batches of the steps
# that were done:

# %%
loader = map(batch_of, range(1000))  # any iterator that gives the same batches in each run
for _ in range(state.step):
    next(loader)
assert_same_bits(next(loader), batch_of(20))

# %% [markdown]
# ## When a save fails
#
# The disk may be full, or not there. Orbax writes in a thread, so the error of a save arrives with a later call: with
# `manager.wait_until_finished`, or with the next `manager.save`, which then saves nothing itself. The function below waits for the
# save before and reports its error, and the run goes on. Without the `try` the run stops there. In both cases the checkpoints
# that were complete stay.


# %%
def save(manager, state):
    if manager.should_save(state.step):
        try:
            manager.wait_until_finished()  # costs nothing: manager.save waits for the save before, too
        except (OSError, ValueError) as error:
            print(f"step {state.step}: the save before has failed: {error.args[-1][:33]}")
        manager.save(state.step, args=ocp.args.StandardSave(state))


# %% [markdown]
# To see this, the folder is moved away while step 25 is saved, as if its disk had been unmounted. Orbax logs the tracebacks of all
# its threads, which is pages of text, so the log is kept out of this notebook.

# %%
logging.getLogger("absl").setLevel("CRITICAL")
warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # what the threads of the failed save leave behind
manager, elsewhere = open_manager(folder), folder.with_suffix(".elsewhere")
while state.step < 32:
    state, metrics = pipe.step(state, batch_of(state.step), jax.random.fold_in(key, state.step))
    if state.step == 25:
        folder.rename(elsewhere)
        folder.touch()
    save(manager, state)
    while state.step == 25 and manager.is_saving_in_progress():
        time.sleep(0.01)
    if state.step == 25:
        folder.unlink()
        elsewhere.rename(folder)

manager.close()

# %% [markdown]
# Step 25 is missing, and the run has continued. A folder that a killed run has left over would not count either:

# %%
(folder / "40.orbax-checkpoint-tmp").mkdir()
with open_manager(folder) as manager:
    print("checkpoints:", *manager.all_steps())
    resumed = begin_or_continue(pipe, manager)
assert resumed.step == 30 and not list(folder.glob("40*"))

# %% [markdown]
# ## What to look out for
#
# - `manager.save` follows `save_interval_steps`. `manager.save(..., force=True)` saves at any step that is not saved yet, for
#   instance `pipe.state` after [Ctrl-C](interrupt_and_go_on.py).
# - Save a state before the next step, as above, because a step reuses the buffers of the state that it is given. When
#   `manager.save` returns, the state is copied, and the next step may have it.
# - If Ctrl-C arrives inside `manager.save`, this save is lost, Orbax logs a traceback, and the manager may raise at a later save.
#   The checkpoints from before are whole. `train` opens a new manager whenever it is called, so call it again. (If a thread of the
#   manager before is still writing, opening can fail with an `OSError`; a moment later it works.)
# - To predict, the parameters are enough: [Open a training checkpoint for predictions](predict_from_a_checkpoint.py).
# - With a bank, the state holds the shared parameters alone. [Save a bank](save_a_bank.py) saves the sets of the tasks too.
# - Data loaders such as grain have a position of their own that Orbax can save in the same checkpoint, with
#   `ocp.args.Composite(state=..., data=...)`. That is faster than skipping batches if the run is long.
# - Orbax keeps no checksums of arrays, and converts leaves to the dtype of the target, both without a word:
#   [What nobody checks](../guide/save.md#what-nobody-checks).
# - A checkpoint opens only with an optimizer whose state has the same form. To begin anew with the parameters alone, restore
#   `params` and give them to `pipe.init(params, batch)`.
# - Orbax logs through the logger `absl`: warnings and errors by default. `logging.getLogger("absl").setLevel("ERROR")` silences the
#   warnings.
