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
# # Save and resume a bank of tasks
#
# A run with a bank trains Theta, which is in the state of the pipeline, and theta[t] of many tasks, which the bank holds. A
# checkpoint of the run needs both, of the same step. `bank.save` writes each set that has changed into a folder of its own and
# returns a manifest, a small dictionary that says where each set is. The manifest is saved with the state, by Orbax.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The model is a small network whose first layer and head belong to the task. A step uses the sets of one task.

# %%
TASKS = [f"user {k}" for k in range(16)]
key = jax.random.key(0)
params = {"w": jax.random.normal(key, (32, 32)) / 6}
batch = {"x": np.asarray(jax.random.normal(key, (64, 32)))}


def init_set(key):
    return {"adapter": jax.random.normal(key, (32, 32)) / 6, "head": jax.random.normal(key, (32, 1)) / 6}


def loss_of_task(params, task_params, batch):
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ task_params["adapter"]) @ params["w"])
    return jnp.mean((hidden @ task_params["head"] - batch["x"][:, :1]) ** 2)


# %%
def make_pipeline(bank):
    return jaxpp.Pipeline(loss_of_task, optax.adam(1e-2), num_stages=2, num_microbatches=4, bank=bank)


def train(pipe, state, until):
    while state.step < until:
        state, _ = pipe.step(state, batch, task=TASKS[state.step % 6])
    return state


# %% [markdown]
# ## Save
#
# The steps of the checkpoint manager and the sets of the bank have a directory each. `Composite` puts the state and the manifest
# into one step, which Orbax makes visible at once, when it is complete. So a checkpoint that can be seen is a whole one: the sets
# are on the disk before the manifest that names them.

# %%
folder = pathlib.Path(tempfile.mkdtemp())  # in a real run a directory that stays


def save(manager, state, bank):
    items = {"state": ocp.args.StandardSave(state), "bank": ocp.args.JsonSave(bank.save(folder / "sets"))}
    manager.save(state.step, args=ocp.args.Composite(**items))


bank = jaxpp.Bank.make(init_set, dict(zip(TASKS, jax.random.split(key, 16), strict=True)), optax.adam(1e-2))
pipe = make_pipeline(bank)
state = pipe.init(params, batch)
options = ocp.CheckpointManagerOptions(max_to_keep=2)
with ocp.CheckpointManager(folder / "steps", options=options) as manager:
    for until in (4, 8, 12):
        state = train(pipe, state, until=until)
        save(manager, state, bank)
        print(f"step {state.step}: {len(list((folder / 'sets').iterdir()))} folders")
bank

# %% [markdown]
# The first save wrote all 16 sets. A later save writes only the sets that steps have changed meanwhile, so a bank of thousands of
# sets may be saved often. Sets that were only evaluated are not written again.
#
# ## Resume
#
# In a new process, an empty bank takes all sets from the manifest: names, parameters and optimizer states. The bank comes first,
# because a pipeline is cut at the shapes of its sets. Then the state is restored as without a bank: `abstract_state` takes what
# `init` takes and says where each leaf goes.

# %%
resumed_bank = jaxpp.Bank({}, optax.adam(1e-2))
with ocp.CheckpointManager(folder / "steps") as manager:
    step = manager.latest_step()
    manifest = manager.restore(step, args=ocp.args.Composite(bank=ocp.args.JsonRestore())).bank
    resumed_bank.restore(folder / "sets", manifest)
    resumed_pipe = make_pipeline(resumed_bank)
    target = resumed_pipe.abstract_state(params, batch)
    resumed_state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))).state

# %% [markdown]
# The resumed run ends with the same bits as the run that was not interrupted:

# %%
state = train(pipe, state, until=20)
resumed_state = train(resumed_pipe, resumed_state, until=20)


def everything(state, bank):
    return jax.device_get((state, [(bank.params(name), bank.opt_state(name)) for name in bank]))


jax.tree.map(np.testing.assert_array_equal, everything(resumed_state, resumed_bank), everything(state, bank))
print("resumed at step", step, "with the same bits at step 20")

# %% [markdown]
# ## Delete what is no longer needed
#
# The manager above keeps two checkpoints and deletes older ones. The bank cannot know of that, so it keeps every folder until it is
# told which manifests still count:

# %%
with ocp.CheckpointManager(folder / "steps") as manager:
    steps = manager.all_steps()
    manifests = [manager.restore(step, args=ocp.args.Composite(bank=ocp.args.JsonRestore())).bank for step in steps]
deleted = resumed_bank.prune(folder / "sets", manifests)
left = {child.name for child in (folder / "sets").iterdir()}
print(f"checkpoints {steps}: {len(deleted)} folders deleted, {len(left)} left")
assert left == {name for manifest in manifests for _, name, _ in manifest["sets"]}

# %% [markdown]
# ## Read one set
#
# Each folder is a checkpoint that Orbax opens without jaxpp. Its tree is `{"params": ..., "opt_state": ...}`. So one user's set can
# be copied or published without the others:

# %%
name_of_folder = {name: name_of_folder for name, name_of_folder, _ in manifest["sets"]}["user 1"]
shapes, opt_shapes = resumed_bank.shapes("user 1")
with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(folder / "sets" / name_of_folder, {"params": shapes, "opt_state": opt_shapes})
print(name_of_folder, jax.tree.map(jnp.shape, found["params"]))

# %% [markdown]
# ## What to look out for
#
# - `bank.save` returns when the sets are on the disk, and waits for the write-backs of earlier steps. Orbax may write the state in
#   the background meanwhile.
# - Names may be texts, numbers, booleans, `None` and tuples of these. The manifest keeps them exactly; it can also be saved with
#   `json`.
# - A save that fails (no room, no permission) raises an error that says what has been written. The bank stays as it is, the earlier
#   checkpoints stay whole, and the next `bank.save` writes what is missing.
# - `bank.restore` reads and checks all sets before it changes the first. A bank that is not empty must have the same shapes and the
#   same optimizer, and no set that the manifest does not name: add new tasks after the restore.
# - An empty bank can only take sets whose parameters are dicts, lists and tuples of arrays. For other trees (an `nnx.State`, a Flax
#   `FrozenDict`), make the bank with at least one set of the kind, then restore.
