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
# # 10. theta[t] on the host
#
# This chapter is for models with many sets of parameters, of which a step needs only one. If yours has a single set, go on with
# chapter 11: nothing later needs this one.
#
# Some models serve many tasks at once: one network with a head for each customer, one language model with an adapter for each
# language. Their parameters come in two kinds. All tasks share **Theta** (the trunk). Each task t has its own **theta[t]** (the
# head), and a training step uses only one of them.
#
# A thousand heads with their optimizer states need not fit on the device, since 999 of them have nothing to do. In this chapter
# they live in the memory of the host (the computer that the devices are plugged into), and visit the device for one step at a time.

# %%
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## Forty-five tasks
#
# Ten digits make 45 pairs, and each pair is a task: "is this a 3 or a 5?" A batch of the task `"3-5"` contains threes and fives
# only.

# %%
digits = load_digits()
tasks = [f"{a}-{b}" for a, b in itertools.combinations(range(10), 2)]


def batch_of(task, step, size=64):
    pair = [int(digit) for digit in task.split("-")]
    rows = np.flatnonzero(np.isin(digits.target, pair))
    rows = np.random.default_rng(step).choice(rows, size)
    is_second = digits.target[rows] == pair[1]
    return {"x": digits.data[rows].astype("float32") / 16, "y": is_second.astype("int32")}


# %% [markdown]
# The trunk and the head are two Flax modules. The loss takes the parameters of both: first Theta, then the theta[t] of whichever
# task the batch belongs to.


# %%
class Trunk(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(128)(x))
        return x


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(2)(x)


# %%
def loss_fn(params, task_params, batch):
    logits = Head().apply(task_params, Trunk().apply(params, batch["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@jax.jit
def make_head(key):
    return Head().init(key, jnp.zeros((1, 128)))


params = jax.jit(Trunk().init)(jax.random.key(0), jnp.zeros((1, 64)))
heads = {task: make_head(jax.random.key(k)) for k, task in enumerate(tasks)}
params, heads = jax.device_get((params, heads))  # as NumPy arrays

# %% [markdown]
# ## A bank
#
# A `jaxpp.Bank` holds the parameter sets of all tasks by name, each with its own optimizer state. It keeps them in **pinned** host
# memory. The operating system cannot move pinned memory, so a GPU can copy it at full speed while it computes. We begin with two
# tasks.

# %%
optimizer = optax.adam(1e-3)
bank = jaxpp.Bank({task: heads[task] for task in tasks[:2]}, optimizer)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=4, bank=bank)
state = pipe.init(params, batch_of("0-1", 0))
pipe.stages

# %% [markdown]
# The pipeline is cut as always; each array of theta[t] belongs to the stage that uses it. The state holds Theta alone, and every
# step says which task it is for. After the step, the changed set is written back to the host while the device goes on.

# %%
for step in range(4):
    task = tasks[step % 2]
    state, metrics = pipe.step(state, batch_of(task, step), task=task)
    print(f"step {step}, task {task}: loss {metrics.loss:.4f}")
bank.params("0-1")["params"]["Dense_1"]["bias"]  # a NumPy array, read from the host

# %% [markdown]
# ## The same as plain JAX
#
# In plain JAX one would keep all heads in a dictionary and update the head of the step's task. We do this for the same four steps,
# and compare Theta and both heads.


# %%
@jax.jit
def plain_step(params, opt_state, head, head_opt_state, batch):
    grads, head_grads = jax.grad(loss_fn, argnums=(0, 1))(params, head, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    head_updates, head_opt_state = optimizer.update(head_grads, head_opt_state)
    params, head = optax.apply_updates((params, head), (updates, head_updates))
    return params, opt_state, head, head_opt_state


def assert_same(one, other):
    # 1e-5 is a hundredth of what one step of Adam changes
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, other)


# %%
theta, opt_state = params, optimizer.init(params)
sets = {task: (heads[task], optimizer.init(heads[task])) for task in tasks[:2]}
for step in range(4):
    task = tasks[step % 2]
    batch = batch_of(task, step)
    theta, opt_state, *sets[task] = plain_step(theta, opt_state, *sets[task], batch)

assert_same(jax.device_get(state.params), theta)
for task in tasks[:2]:
    assert_same((bank.params(task), bank.opt_state(task)), tuple(sets[task]))
print("Theta, both heads and their optimizer states are those of plain JAX.")

# %% [markdown]
# ## A task that is not used does not change
#
# This sounds obvious, but a common way to write many heads breaks it. If all heads are stacked into one array, and the loss picks
# row t, then the gradients of the other rows are zero. Adam updates a row with a zero gradient all the same: its running mean still
# remembers earlier steps. Below, one step for task `"0-1"` is followed by one step for task `"0-2"`. How far does the head of
# `"0-1"` move in each of them?


# %%
def stacked_loss(both, batch, t):
    return loss_fn(both["theta"], jax.tree.map(lambda leaf: leaf[t], both["heads"]), batch)


@jax.jit
def stacked_step(both, opt_state, batch, t):
    updates, opt_state = optimizer.update(jax.grad(stacked_loss)(both, batch, t), opt_state)
    return optax.apply_updates(both, updates), opt_state


stacked = jax.tree.map(lambda *rows: jnp.stack(rows), heads["0-1"], heads["0-2"])
both = {"theta": params, "heads": stacked}
once, opt_state = stacked_step(both, optimizer.init(both), batch_of("0-1", 0), 0)
twice, opt_state = stacked_step(once, opt_state, batch_of("0-2", 1), 1)


# %%
def furthest(before, after):  # of all parameters of the first head
    pairs = zip(jax.tree.leaves(before["heads"]), jax.tree.leaves(after["heads"]), strict=True)
    return max(jnp.abs(new[0] - old[0]).max() for old, new in pairs)


print(f"stacked heads: in its own step the head moves by up to {furthest(both, once):.5f},")
print(f"               in the step of the other task by up to {furthest(once, twice):.5f}")
assert furthest(once, twice) > 0

# %%
before = jax.tree.map(np.copy, (bank.params("0-1"), bank.opt_state("0-1")))
state, metrics = pipe.step(state, batch_of("0-2", 4), task="0-2")
jax.tree.map(np.testing.assert_array_equal, (bank.params("0-1"), bank.opt_state("0-1")), before)
print("bank: not one bit of the idle set has changed, its optimizer state included")

# %% [markdown]
# ## What the devices hold
#
# Let the number of tasks T grow from 2 to 8 and to 32. `bank.add` takes in new tasks while training goes on. After some steps we
# count the bytes of all arrays that are in the memory of the devices. Arrays in pinned host memory do not count.
#
# (Forced CPU devices have no memory of their own: all of this is in the memory of one computer. But JAX treats pinned host memory
# and device memory as two places there too, with copies between them, so the count is what it would be with GPUs.)


# %%
def device_bytes():
    found = {}
    for array in jax.live_arrays():
        if array.sharding.memory_kind != "pinned_host":
            for shard in array.addressable_shards:
                found[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


del theta, opt_state, sets, both, once, twice  # what the comparisons above left on the devices
counts, held, all_there = [2, 8, 32], [], []
theta_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))

# %%
for count in counts:
    for task in tasks[len(bank) : count]:
        bank.add(task, heads[task])
    for step in range(count):
        state, metrics = pipe.step(state, batch_of(tasks[step], step), task=tasks[step])
        pipe.prefetch(tasks[(step + 1) % count])
    bank.wait()
    held.append(device_bytes())
    all_there.append(theta_bytes + bank.nbytes)
assert max(held) - min(held) < 64  # bytes
bank

# %%
fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
places = np.arange(len(counts))
labels = ("measured, with the bank", "if all sets were on the devices")
colours = ("#0072B2", "#BBBBBB")
for k, found in enumerate((np.array(held) / 2**20, np.array(all_there) / 2**20)):
    bars = axes.bar(places + 0.4 * k, found, 0.38, label=labels[k], color=colours[k])
    axes.bar_label(bars, fmt="%.1f", fontsize=9)
axes.set(xticks=places + 0.2, xticklabels=counts, xlabel="tasks T")
axes.set(ylabel="MiB on the devices", ylim=(0, 15))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Look at the blue bars: they do not grow. The devices hold Theta with its optimizer state and two sets, whatever T is. The grey
# bars grow with every task.
#
# ## Why two sets: prefetch
#
# Bringing a set to the device takes time. If the device has room for two sets, it can compute with one of them while the next one
# arrives. This is called **prefetch**, and each room is a **slot** (`Bank(..., slots=2)` is the default). `pipe.prefetch(task)`
# starts the copy and returns at once. The last line of the table above counts since the bank was made: a **load** copies a set to
# its device, a **hit** finds it there already. In brackets are the hits on sets that were there because of a prefetch. The line
# above it names two devices, because a set is divided as the stages are: all of a head is on the second device, except the number
# of steps that its optimizer counts, which is on the first.
#
# What prefetch hides can be simulated, as schedules can (chapter 4). The time in such a simulation is not measured; jaxpp calls it
# the **virtual clock**. Here a step takes 4 units of time, and each copy takes 2. In the upper half there is one slot, and the
# device waits for every copy. In the lower half there are two slots, and the blue bars follow one another without a gap.

# %%
fig, all_axes = plt.subplots(2, figsize=(7, 3.4), sharex=True, layout="constrained")
colours = ("#BBBBBB", "#56B4E9", "#E69F00")
for axes, slots in zip(all_axes, (1, 2), strict=True):
    clock = jaxpp.schedule.simulate_prefetch(6, compute=4, load=2, store=2, slots=slots)
    for row, spans in enumerate((clock.stores, clock.steps, clock.loads)):
        for step, (start, end) in enumerate(spans):
            axes.barh(row, end - start, left=start, color=colours[row], edgecolor="white")
            axes.text((start + end) / 2, row, step, ha="center", va="center")
    axes.set(yticks=range(3), yticklabels=["store", "compute", "load"], xlim=(0, 50))
    axes.set_title(f"slots={slots}: the last step ends at {clock.makespan}")
plt.show()

# %% [markdown]
# ## One task for each replica
#
# The replicas of chapter 9 work on different examples, and add up their gradients. With a bank, each replica may work on a task of
# its own: here two replicas of two stages run the tasks `"3-5"` and `"4-9"`. The first half of the batch belongs to the first
# replica, the second half to the second.

# %%
pair = ["3-5", "4-9"]
small_bank = jaxpp.Bank({task: heads[task] for task in pair}, optimizer)
sizes = {"num_stages": 2, "num_microbatches": 2, "data_parallel": 2}
replicated = jaxpp.Pipeline(loss_fn, optimizer, bank=small_bank, **sizes)
halves = [batch_of(task, 0) for task in pair]
batch = jax.tree.map(lambda *parts: np.concatenate(parts), *halves)
state = replicated.init(params, batch)
state, metrics = replicated.step(state, batch, task=pair)

# %% [markdown]
# What should come out? Theta is shared, so its gradient is the mean over both halves. A head sees its own half only, and nothing of
# the other task. In plain JAX:

# %%
grad_fn = jax.grad(loss_fn, argnums=(0, 1))
grads = [grad_fn(params, heads[task], half) for task, half in zip(pair, halves, strict=True)]
mean = jax.tree.map(lambda one, other: (one + other) / 2, grads[0][0], grads[1][0])
updates, _ = optimizer.update(mean, optimizer.init(params))
assert_same(jax.device_get(state.params), optax.apply_updates(params, updates))
for task, (_, head_grads) in zip(pair, grads, strict=True):
    updates, _ = optimizer.update(head_grads, optimizer.init(heads[task]))
    assert_same(small_bank.params(task), optax.apply_updates(heads[task], updates))
print("Theta has the mean gradient of both tasks, each head the gradient of its own.")

# %% [markdown]
# The replicas have to exchange the gradient of Theta. The gradients of the heads stay where they are, because jaxpp knows which
# replica ran which task. `pipe.collectives` reads from the compiled programs what replicas exchange. There are two sums over the
# replicas, called `all-reduce` as in chapter 9. `total stage 0` sums the gradients of Theta, which is on stage 0, and
# `total stage 1` the loss, 4 bytes. The last line compares: 423.5 KiB are Theta and both heads, and 161.5 KiB of that is Theta.

# %%
found = replicated.collectives(batch, task=pair)
assert found.communicated < 1.01 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
found

# %% [markdown]
# ## Takeaway
#
# Parameters that few steps use belong on the host. A `jaxpp.Bank` brings the set of one task to the device for a step, fetches the
# next set meanwhile, and writes the changed set back. What the devices hold does not depend on the number of tasks, and a task that
# is not used does not change.
#
# ## Questions
#
# **1.** There are 1,000 tasks, and a head has 10 MB of parameters. You train with Adam in float32. How many bytes of heads are on
# the host, and how many on the devices?
#
# <details><summary>Answer</summary>
#
# Adam keeps two numbers for each parameter, so a set has 30 MB. On the host there are 1,000 sets: 30 GB. On the devices there are
# at most two sets (two slots): 60 MB.
#
# </details>
#
# **2.** You stack all heads in one array and use `optax.sgd` without momentum, with a zero gradient for the heads that are not
# used. Do they move? And with `optax.adamw`?
#
# <details><summary>Answer</summary>
#
# Plain gradient descent leaves them where they are: the update is the gradient times the learning rate, and that is zero. AdamW
# moves them, by its running means and also by weight decay, which pulls every parameter towards zero at every step.
#
# </details>
#
# **3.** In the figure of the virtual clock a step takes 4 units and each copy takes 2. Would prefetch with two slots still hide
# copies of 3 units?
#
# <details><summary>Answer</summary>
#
# No. A slot is loaded, computed with and stored before the next set can come in: 3 + 4 + 3 = 10 units. Two slots take turns, so a
# step takes 5 units in the long run, of which 4 are computing. Three slots would hide the copies: 10 / 3 is less than 4. Replace
# the numbers in `simulate_prefetch` and try it.
#
# </details>
#
# Next: [11. Reading a profile](11_reading_a_profile.ipynb)
