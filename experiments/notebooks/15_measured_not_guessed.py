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
# # 15. Measured, not guessed
#
# Chapter 5 said that more microbatches make the bubble smaller. So why not have as many microbatches as there are examples? Because
# each action also has costs that do not shrink with its microbatch. Somewhere between is a best number, and no formula knows it: it
# depends on the model, on the devices, and on the process that hands the actions over. This chapter finds it by measuring.

# %%
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp
from jaxpp.schedule import make, simulate

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## Two costs
#
# Say that a stage takes `fixed + work / m` for the forward of one of m microbatches, and twice that for the backward. `work` is
# what the whole batch takes; `fixed` is what every action takes, however small it is. The virtual clock adds it up for four
# ranks:

# %%
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def step_time(m, fixed, work, **more):
    action = fixed + work / m
    schedule = make("1f1b", num_ranks=4, num_microbatches=m)
    return simulate(schedule, forward=action, input_grad=action, weight_grad=action, **more).makespan


for fixed in (0.0, 0.01, 0.1):
    times = [step_time(m, fixed, work=1.0) for m in COUNTS]
    print(f"fixed {fixed:4}: best with {COUNTS[int(np.argmin(times))]:2} microbatches", np.round(times, 2))

# %%
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for fixed in (0.0, 0.01, 0.1):
    axes.plot(COUNTS, [step_time(m, fixed, work=1.0) for m in COUNTS], marker="o", label=f"fixed {fixed}")
axes.set(xlabel="microbatches", ylabel="step", xscale="log", ylim=(0, None))
axes.set_xticks(COUNTS, COUNTS)
axes.legend()
plt.show()

# %% [markdown]
# Without a fixed cost more is always better. With one, the curve turns round, and it turns earlier the higher that cost is.
#
# ## Measure
#
# What are the two numbers here? The model is a stack of layers; a stage has two of them. We run the forward and the backward of a
# stage on microbatches of several sizes, take the median of some runs, and lay a straight line through the times.

# %%
WIDTH, BATCH = 128, 256
layers = [layer for _ in range(8) for layer in (nn.Dense(WIDTH), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])
stage = nn.Sequential(layers[:4])
weights = jax.jit(stage.init)(jax.random.key(0), jnp.ones((1, WIDTH)))


# %%
@jax.jit
def forward_and_backward(weights, x):
    y, pullback = jax.vjp(stage.apply, weights, x)
    return pullback(y)


def seconds(call, *args):
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        jax.block_until_ready(call(*args))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[5:])


# %%
sizes = (4, 16, 64, 256)
measured = [seconds(forward_and_backward, weights, jnp.ones((size, WIDTH))) for size in sizes]
per_example, fixed = np.polyfit(sizes, measured, 1)
print("milliseconds:", np.round(np.array(measured) * 1e3, 3))
print(f"a microbatch takes {max(fixed, 0) * 1e6:.0f} microseconds, and {per_example * 1e6:.2f} more for each example")

# %% [markdown]
# These few numbers, and the rules by which they add up, are a **cost model**: it predicts a step that has not been run. A forward
# is a third of what was measured, as a backward does twice the work.

# %%
predicted = {m: step_time(m, max(fixed, 0) / 3, per_example * BATCH / 3) for m in (2, 8, 16)}
for m, guess in predicted.items():
    print(f"{m:2} microbatches: {guess * 1e3:.2f} ms predicted")

# %% [markdown]
# ## What really happens
#
# Now the steps themselves, on the devices.


# %%
def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


rng = np.random.default_rng(0)
batch = {"x": jnp.asarray(rng.normal(size=(BATCH, WIDTH)), "float32"), "y": jnp.asarray(rng.integers(0, 10, BATCH))}
params, optimizer = jax.jit(model.init)(jax.random.key(0), batch["x"]), optax.adam(1e-3)
real = {}
for m, guess in predicted.items():
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, num_microbatches=m)
    state = pipe.init(params, batch)
    real[m] = seconds(lambda pipe, state: pipe.step(state, batch, donate=False), pipe, state)
    print(f"{m:2} microbatches: {guess * 1e3:.2f} ms predicted, {real[m] * 1e3:.2f} ms measured")

# %% [markdown]
# On forced CPU devices the prediction is far too low, and it may even prefer another number of microbatches. A model that is wrong
# is repaired by asking what it leaves out. We find three things, measure each, and put them into the model one after another.
#
# ## First repair: one process hands everything over
#
# The model lets every device begin as soon as its input is there. But one Python process hands over the actions of all four
# devices, one after the other (chapter 5). How long does it take for one action? We hand over fifty calls that compute next to
# nothing, together with the transfers of their results, and divide by fifty. This time was part of `fixed`, where all devices
# spent it side by side. It leaves `fixed`, and goes to `dispatch`, which the virtual clock lets the process spend.

# %%
devices = [jax.devices()[k % len(jax.devices())] for k in range(4)]
tiny = jax.jit(lambda x: x + 1)
handing = seconds(lambda x: [jax.device_put(tiny(x), devices[1]) for _ in range(50)], jnp.ones(4)) / 50
print(f"handing over one action: {handing * 1e6:.0f} microseconds")
costs = {"fixed": max(fixed - 2 * handing, 0) / 3, "work": per_example * BATCH / 3, "dispatch": handing}
repaired = {"first model": predicted, "+ handing over": {m: step_time(m, **costs) for m in predicted}}

# %% [markdown]
# (What was measured is a forward and a backward, so two actions were handed over: hence `2 * handing`.)
#
# ## Second repair: the devices share the cores
#
# The times of a stage were measured while nothing else ran. In a step, four devices compute at the same time, on the cores of one
# computer. We let four devices run the same stage at once, and compare with one. If four take as long as one, they share nothing.
# If they take four times as long, only one of them runs at full speed at a time. This number of devices that run at full speed is
# the `capacity`.

# %%
copies = [jax.device_put((weights, jnp.ones((64, WIDTH))), device) for device in devices]
one = seconds(forward_and_backward, *copies[0])
four = seconds(lambda: [forward_and_backward(*copy) for copy in copies])
costs["capacity"] = min(max(4 * one / four, 1), 4)
print(f"one device {one * 1e3:.2f} ms, four at once {four * 1e3:.2f} ms")
print(f"as fast as {costs['capacity']:.1f} devices of their own")
repaired["+ shared cores"] = {m: step_time(m, **costs) for m in predicted}

# %% [markdown]
# ## Third repair: a step is more than its actions
#
# Before its first action a step splits the batch, and after its last one each stage updates its parameters. This takes equally long
# for any number of microbatches. To measure it, we run a step that has next to nothing else to do: one microbatch of four examples.
# What it takes beyond the prediction for its eight actions is the time around them.

# %%
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, num_microbatches=1)
few = jax.tree.map(lambda rows: rows[:4], batch)
state = pipe.init(params, few)
short = seconds(lambda pipe, state: pipe.step(state, few, donate=False), pipe, state)
around = max(short - step_time(1, **(costs | {"work": per_example * 4 / 3})), 0)
print(f"a step with next to no work takes {short * 1e3:.2f} ms, {around * 1e3:.2f} of them around its actions")

# %%
repaired["+ update"] = {m: time + around for m, time in repaired["+ shared cores"].items()}
print("microbatches   ", *(f"{m:6}" for m in predicted))
for name, times in (repaired | {"measured": real}).items():
    print(f"{name:15}", *(f"{time * 1e3:6.2f}" for time in times.values()), "ms")

# %%
fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for (name, times), colour in zip(repaired.items(), ("#BBBBBB", "#56B4E9", "#0072B2", "#009E73"), strict=True):
    axes.plot(list(times), [1e3 * time for time in times.values()], ".-", color=colour, label=name)
axes.plot(list(real), [1e3 * time for time in real.values()], "o", color="#D55E00", label="measured")
axes.set(xlabel="microbatches", ylabel="ms", xscale="log", ylim=(0, None))
axes.set_xticks(list(real), list(real))
axes.minorticks_off()
fig.legend(frameon=False, loc="outside right upper")
plt.show()

# %% [markdown]
# Look at the lowest line and at the highest. The first model was several times too low, and the repaired one comes near the dots.
# Each repair has its own shape: handing over grows with the number of microbatches, so it turns the line upwards, and the update
# lifts all of it. What still lies between the last line and the dots? An action of jaxpp is not our `tiny` call: it has several
# arguments and results, keeps residuals, and adds up gradients. And the computer may have been busy with something else while one
# of the numbers was measured. If yours are far apart, run the chapter again when the computer is quiet.
#
# ## Let jaxpp measure
#
# `jaxpp.tune` does what we did, with the same three things in its model. It measures the real programs, for a few numbers of
# microbatches, simulates every schedule with these costs, and runs the best few. Here it looks at two schedules.

# %%
tuning = jaxpp.tune(loss_fn, optimizer, params, batch, schedules=("gpipe", "1f1b"), num_microbatches=(2, 4, 8))
print(tuning)

# %% [markdown]
# Each row is one pipeline, and `>` marks the choice: the fastest of those that ran. Below the table stands why. The figure shows
# time against memory; a pipeline on the frontier is beaten by no other in both.

# %%
tuning.figure()

# %% [markdown]
# Whatever it chose, the results are those of one device:

# %%
pipe = tuning.pipeline()
state = pipe.init(params, batch)
pipe.verify(state, batch)
print(tuning.best)

# %% [markdown]
# ## Takeaway
#
# More microbatches make the bubble smaller, and cost more actions; the best number depends on what an action costs beside its
# work. A few measured numbers and the virtual clock predict every schedule at once, without compiling each. A prediction that is
# wrong is repaired by measuring what it left out. It never knows everything, so the best few are run before one is chosen.
#
# ## Questions
#
# **1.** With a fixed cost of 0.1 and work of 1.0, which number of microbatches would you try on eight ranks instead of four:
# more, or fewer?
#
# <details><summary>Answer</summary>
#
# Hardly more. A step takes 3 (m + p - 1) (fixed + work / m), which is least at the square root of (p - 1) work / fixed: 5.5 for
# four ranks. Eight ranks have a longer fill and drain, but each stage has half of the work: 5.9.
#
# </details>
#
# **2.** Why does `tune` compile two schedules with equal cuts and equal microbatches only once?
#
# <details><summary>Answer</summary>
#
# A schedule changes the order of the actions and nothing in them. The programs of the stages are the same, and so are their
# times. An exception are schedules that split the backward in two: they run other programs.
#
# </details>
#
# **3.** A prediction says that two schedules differ by 2%, and it was 10% off for those that ran. Is the first one better?
#
# <details><summary>Answer</summary>
#
# Nobody knows from the prediction. Where its error is the same for both, as that of a cost which both share, the order may still be
# right. That is why several are run, and why the table shows both numbers.
#
# </details>
#
# The guide [Find the best pipeline](../../docs/guide/tune.md) goes on from here, with limits on memory, and with several hosts.
#
# Next: [16. Why wait?](16_why_wait.ipynb)
