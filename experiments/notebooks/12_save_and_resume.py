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
# # 12. Save, resume, re-cut
#
# A training run takes days, and no process lives as long as one would like. The machine is needed by somebody else, somebody
# presses Ctrl-C, the power fails. Then the run continues somewhere else, perhaps with half as many devices. In this chapter a run
# is stopped in several ways. What must be written down so that it continues as if nothing had happened? And how can two stages
# continue what four stages began?

# %%
import os
import signal
import tempfile
import threading
from pathlib import Path

import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## What a step reads
#
# The model is an MLP for the handwritten digits. It has dropout: in each step, a random tenth of the features is set to zero. So a
# step reads a state, a batch and a key.


# %%
class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = nn.relu(nn.Dense(64, name=f"layer_{k}")(x))
            x = nn.Dropout(0.1, deterministic=False)(x)
        return nn.Dense(10, name="head")(x)


def loss_fn(params, batch, key):
    logits = MLP().apply(params, batch["x"], rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# %% [markdown]
# Batch and key could be saved too, but there is a simpler way. The state counts its steps: `state.step` is a plain number, 0 after
# `init`, and one more after each step. If the batch and the key are computed from this number, they need not be saved.

# %%
x, y = load_digits(return_X_y=True)
key = jax.random.key(7)


def batch_of(step):
    rows = np.random.default_rng(step).choice(len(y), 256)
    return {"x": x[rows].astype("float32") / 16, "y": y[rows].astype("int32")}


def train(pipe, state, until):
    losses = []
    while state.step < until:
        state, metrics = pipe.step(state, batch_of(state.step), jax.random.fold_in(key, state.step))
        losses.append(metrics.loss)
    return state, jax.device_get(losses)


# %% [markdown]
# First the run that nothing stops: 80 steps over four stages. Everything that follows is compared with it.

# %%
optimizer = optax.adam(3e-3)


def init_fn(key):
    return MLP().init({"params": key, "dropout": key}, batch_of(0)["x"])


def pipeline(num_stages, **options):
    return jaxpp.Pipeline(loss_fn, optimizer, num_stages=num_stages, num_microbatches=4, **options)


beginning = (init_fn, jax.random.key(0), batch_of(0))
four = pipeline(4)
wanted, losses = train(four, four.init(*beginning), until=80)
print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {wanted.step} steps")

# %% [markdown]
# ## A checkpoint
#
# A **checkpoint** is a state on a disk. (JAX also has a function `jax.checkpoint`, which writes nothing; that is remat, of
# chapter 1.) Checkpoints are written by Orbax, the library that Flax uses too. The run is stopped after 40 steps and saved:

# %%
folder = Path(tempfile.mkdtemp())
state, _ = train(four, four.init(*beginning), until=40)
with ocp.StandardCheckpointer() as checkpointer:  # waits at its end until everything is written
    checkpointer.save(folder / "40", state)
state

# %% [markdown]
# The table says what the state holds and where: every stage has its parameters and the optimizer's means of their gradients on its
# own device. What is in the checkpoint? Orbax can list it, without reading an array:

# %%
saved = ocp.StandardCheckpointer().metadata(folder / "40").item_metadata.tree
print("parts:", *saved)
for path, leaf in jax.tree.leaves_with_path(saved["params"]["params"])[:4]:
    print(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, leaf.dtype)

# %% [markdown]
# These are the names of the model, as Flax gave them. No stage is in the list: a stage is where a leaf happened to live. The
# checkpoint would look the same with one stage or eight, and everything else in this chapter follows from that.
#
# On the disk a checkpoint is a folder, named after its step. Orbax puts the arrays of all leaves into a few files, with names that
# say nothing, and describes in other files what is where. (`_sharding` notes on which device each leaf was. Orbax uses that only if
# nobody says where the leaves shall go.)

# %%
for path in sorted((folder / "40").rglob("*")):
    if path.is_file() and path.stat().st_size:
        name = path.relative_to(folder)
        print(f"{path.stat().st_size:9,} bytes  {str(name) if len(str(name)) < 50 else str(name)[:47] + '...'}")
print(f"{sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state))):9,} bytes in the arrays of the state")

# %% [markdown]
# While a checkpoint is being written, its folder has another name, `40.orbax-checkpoint-tmp`. Only when every file is complete is
# the folder renamed, and a file system renames a folder at once or not at all. So if the process is killed while it writes, the
# checkpoint before is the newest, and a half-written one is never read.
#
# ## The process dies
#
# We let go of everything that the process knew: the pipeline with its plan, and the state. (A process that is really killed also
# loses its compiled programs, and compiles again.)

# %%
del four, state, checkpointer

# %% [markdown]
# A new process makes a new pipeline. Where does each leaf of the checkpoint belong? That is known when the pipeline is cut, and for
# a cut shapes are enough. `pipe.abstract_state` takes what `init` takes, makes no array, and returns a state of shapes, each with
# the device of its owner. It is the **abstract state**. Orbax reads each leaf straight to that device.


# %%
def resume(pipe):
    return ocp.StandardCheckpointer().restore(folder / "40", pipe.abstract_state(*beginning))


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


again = pipeline(4)
state, after = train(again, resume(again), until=80)
assert_same_bits(state, wanted)
assert_same_bits(after, losses[40:])

# %% [markdown]
# Both assertions compare bits. The run of 80 steps and the run of 40 + 40 steps are the same run.
#
# ## What is lost if less is saved
#
# It is tempting to save the parameters alone. Many public checkpoints hold nothing else, and `init` takes parameters that exist.
# Then Adam begins anew: it has forgotten the running means of the gradients, and how many steps it has taken.

# %%
params_only = again.init(resume(again).params, batch_of(0))._replace(step=40)
_, forgetful = train(again, params_only, until=80)
print(f"step 42: loss {losses[41]:.3f} with the whole state, {forgetful[1]:.3f} with the parameters alone")

# %% [markdown]
# ## Re-cut
#
# Tomorrow only two devices are free, or three. Nothing needs to be converted. Make the pipeline that you want, and ask it where the
# leaves belong now.

# %%
by_stages = {}
for num_stages, options in {2: {}, 3: {"schedule": "gpipe"}}.items():
    pipe = pipeline(num_stages, **options)
    resumed = resume(pipe)
    devices = {leaf.device for leaf in jax.tree.leaves(resumed.params)}
    print(f"{num_stages} stages on {len(devices)} devices, step {resumed.step}")
    _, by_stages[num_stages] = train(pipe, resumed, until=80)
    np.testing.assert_allclose(by_stages[num_stages], losses[40:], rtol=1e-4)

# %% [markdown]
# And with no pipeline at all. A step of plain JAX is the loop of chapter 5: the gradients of the four microbatches are averaged.
# Microbatch i gets the key `jax.random.fold_in(key, i)`, in a pipeline too. The tree to restore to is a fresh state of plain Flax
# and optax, on one device.


# %%
grad_fn = jax.jit(jax.value_and_grad(loss_fn))


def plain_step(params, opt_state, batch, key):
    parts = [{name: leaf[64 * i : 64 * (i + 1)] for name, leaf in batch.items()} for i in range(4)]
    each = [grad_fn(params, part, jax.random.fold_in(key, i)) for i, part in enumerate(parts)]
    loss, grads = jax.tree.map(lambda *leaves: sum(leaves) / 4, *each)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


# %%
params = jax.jit(init_fn)(jax.random.key(0))
target = {"params": params, "opt_state": optimizer.init(params), "model_state": (), "loss_scale": (), "step": 0}
plain = ocp.StandardCheckpointer().restore(folder / "40", target)
params, opt_state, plain_losses = plain["params"], plain["opt_state"], []
for step in range(plain["step"], 80):
    params, opt_state, loss = plain_step(params, opt_state, batch_of(step), jax.random.fold_in(key, step))
    plain_losses.append(float(loss))
np.testing.assert_allclose(plain_losses, losses[40:], rtol=1e-4)

# %%
fig, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
axes.plot(range(1, 81), losses, color="#0072B2", linewidth=3, label="never stopped, 4 stages")
resumed = {"2 stages": by_stages[2], "3 stages": by_stages[3], "plain JAX, 1 device": plain_losses}
marks = zip(resumed.items(), ("o", "s", "^"), ("#E69F00", "#56B4E9", "#222222"), strict=True)
for k, ((name, found), mark, colour) in enumerate(marks):
    axes.plot(np.arange(41, 81)[k::3], found[k::3], mark, color=colour, markersize=4, label=f"resumed: {name}")
axes.plot(range(41, 81), forgetful, color="#D55E00", linewidth=1.2, label="resumed: parameters alone")
axes.axvline(40.5, color="#BBBBBB", linestyle="--", zorder=0)
axes.set(xlabel="step", ylabel="loss", title="saved by 4 stages after step 40", xlim=(25, 81), ylim=(0, 1))
fig.legend(frameon=False, loc="outside right upper")
plt.show()

# %% [markdown]
# Look to the right of the dashed line. Dots, squares and triangles lie on the blue line: whoever continues, it is the same run.
# Only the red line leaves it. It was given the parameters and not the state of the optimizer. Its loss jumps, and takes several
# steps to come back. With the same number of stages the bits are equal; with others, sums are done in another order, and the losses
# agree to a few roundings.
#
# ## Ctrl-C
#
# Most runs are not killed but stopped by hand: you press Ctrl-C, or Jupyter's stop button, look at something, and want to go on.
# The signal can come at any moment, also in the middle of a step, when the old parameters are already used up and the new ones are
# not there yet. Python then raises `KeyboardInterrupt`, and `state, metrics = pipe.step(...)` has assigned nothing. The name
# `state` stands for arrays that may be gone.
#
# The pipeline keeps what the line could not assign. `pipe.state` is the newest state: the old one if the update had not begun, the
# new one if it had, never half of each. Let us press Ctrl-C at random moments, again and again, until 80 steps are done:

# %%
random = np.random.default_rng(0)
again.init(*beginning)  # from the beginning; the state is again.state
stopped_after = []
while again.state.step < 80:
    press = threading.Timer(random.uniform(0.01, 0.2), os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    try:
        train(again, again.state, until=80)
        press.join()  # it comes for certain
    except KeyboardInterrupt:
        stopped_after.append(again.state.step)
print(f"Ctrl-C after steps {stopped_after}")
assert_same_bits(again.state, wanted)

# %% [markdown]
# No step was lost and none was done twice: the last line compares the bits with those of the run that nothing stopped.
#
# ## Takeaway
#
# A checkpoint holds the user's own tree and the number of steps, and nothing about stages. The abstract state of a pipeline says
# where each leaf belongs, so any number of stages, any schedule and plain JAX can continue the run. If batch and key are functions
# of `state.step`, the run that continues is the run that was stopped, to the bit. After Ctrl-C, continue from `pipe.state`.
#
# ## Questions
#
# **1.** A run saves every 100 steps and is killed after 250. How many steps are done again, and does the result differ?
#
# <details><summary>Answer</summary>
#
# 50: the newest checkpoint is that of step 200. The steps 201 to 250 read the same state, the same batches and the same keys as the
# first time, so they give the same bits.
#
# </details>
#
# **2.** Why does the checkpoint not hold the slices that each stage owns, one file for each stage? That would be simpler to write.
#
# <details><summary>Answer</summary>
#
# Only a pipeline with the same cuts could read it. With other cuts the leaves would have to be sorted anew, by a tool that knows
# both. A checkpoint of the user's own tree needs no tool, and plain Flax can open it.
#
# </details>
#
# **3.** Your data loader draws its batches from `np.random.default_rng(0)`, one after the other. What is wrong after a restart, and
# what are two ways out?
#
# <details><summary>Answer</summary>
#
# The loader begins with the first batch again, while the state is at step 200: some examples are seen more often than others, and
# the run is another one. Either make the batch a function of the step, as `batch_of` does with `default_rng(step)`, or draw and
# drop the first 200 batches. (A third way: save the state of the random generator beside the state.)
#
# </details>
#
# Two recipes continue this chapter: [Save and resume](../../docs/how-to/save_and_resume.py), a loop that resumes by itself and
# survives a full disk, and [Save a bank](../../docs/how-to/save_a_bank.py), for the parameters of tasks of chapter 10.
#
# Next: [13. One token at a time](13_one_token_at_a_time.ipynb)
