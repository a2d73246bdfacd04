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
# # 10. Reading a profile
#
# Why is my pipeline slow? A pipeline has few ways to be slow, and a profile tells them apart. In this chapter we make a pipeline
# slow on purpose, read its profile, and mend it. Then we look at two mistakes that no picture of stages shows: microbatches that
# are too small, and residuals that are too large.

# %%
import dataclasses
import os

import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# The model is an MLP of eight layers for the handwritten digits, wide enough that an action takes longer than handing it to a
# device.


# %%
class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(8):
            x = nn.gelu(nn.Dense(384, name=f"layer_{k}")(x))
        return nn.Dense(10, name="head")(x)


def loss_fn(params, batch):
    logits = MLP().apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


digits = load_digits()
batch = {"x": digits.data[:1024].astype("float32") / 16, "y": digits.target[:1024].astype("int32")}
params = jax.jit(MLP().init)(jax.random.key(0), batch["x"])
loss = loss_fn(params, batch)

# %% [markdown]
# Every pipeline of this chapter goes through one function. It makes the pipeline, checks that the loss of a step is that of plain
# JAX, and returns the profile.


# %%
def profile_of(**options):
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4, **{"num_microbatches": 16, **options})
    state, metrics = pipe.step(pipe.init(params, batch), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    return pipe, pipe.profile(state, batch)


# %% [markdown]
# ## A slow pipeline
#
# Someone gave the first three devices one layer each, and the last device the other five.

# %%
uneven_pipe, uneven = profile_of(cuts=["layer_1", "layer_2", "layer_3"])
uneven.figure()

# %% [markdown]
# Look at the second timeline first. Rank 3 has no gap: it works all the time. The others work a little, and wait for it. In the
# first timeline you see the same order of actions, as they really ran. Why the two differ comes further below.
#
# ## Idle time by causes
#
# How much is lost, and why? The profile divides the idle time of each rank by running the schedule again on the virtual clock of
# chapter 6, with one cause after another taken away:
#
# - **fill and drain**: what the schedule costs even if all stages are equal: waiting for the first microbatch, and at the end.
# - **imbalance**: what is added because some stages take longer than others.
# - **transfer**: waiting for activations and cotangents on their way that nothing hides.
# - **dispatch**: waiting for the host to hand over the next action.
# - **optimizer**: the rest of the step: splitting the batch at its beginning, and the update at its end.


# %%
def draw(axes, profile, title):
    parts = {"busy": profile.busy} | {name: [getattr(c, name) for c in profile.causes] for name in profile.causes[0]._fields}
    colours = ("#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#BBBBBB")
    left = np.zeros(len(profile.busy))
    for (name, seconds), colour in zip(parts.items(), colours, strict=True):
        axes.barh(range(len(left)), 1e3 * np.array(seconds), left=left, color=colour, label=name.replace("_", " and "))
        left += 1e3 * np.array(seconds)
    ranks = [f"rank {k}" for k in range(len(left))]
    axes.set(title=title, yticks=range(len(left)), yticklabels=ranks, ylim=(len(left) - 0.5, -0.5), xlabel="ms")


fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
draw(axes, uneven, f"cuts by hand: {uneven.bubble_fraction:.0%} of the time is idle")
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Look at the red parts. The three fast ranks lose most of their time to imbalance, and rank 3 loses none. So the schedule is not to
# blame, and a cleverer schedule would not help. The stages must be made equal.
#
# ## Mended
#
# Without `cuts=` jaxpp divides the FLOPs evenly. (If FLOPs mislead, because two layers with the same FLOPs take different times on
# your device, `balance="time"` measures the stages once and cuts again.)

# %%
pipe, even = profile_of()
fig, all_axes = plt.subplots(2, figsize=(7, 4.4), sharex=True, layout="constrained")
draw(all_axes[0], uneven, f"cuts by hand: {uneven.bubble_fraction:.0%} of the time is idle")
draw(all_axes[1], even, f"cuts by jaxpp: {even.bubble_fraction:.0%} of the time is idle")
all_axes[0].set_xlabel("")
fig.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# The whole step is shorter, and what remains of the idle time is mostly fill and drain. Now a schedule can help: more microbatches,
# or one of the schedules of chapter 6. The order is always this: first balance, then the schedule.
#
# Nothing was asked about the result, which must not change. `verify` says that it did not:

# %%
uneven_pipe.verify(uneven_pipe.state, batch)
pipe.verify(pipe.state, batch)

# %% [markdown]
# ## Two clocks
#
# A profile has two timelines because forced CPU devices are not like GPUs: all of them share the cores of this computer.
#
# - `"trace"`: what JAX's profiler recorded. If two actions run at the same time on too few cores, both take longer.
# - `"isolated"`: each program is run alone and timed, and the actions are laid out on the virtual clock with these times. This is
#   what devices of their own would do. It is the default on CPU; on GPUs the default is the trace.
#
# All numbers of a profile are those of its clock. The same profile can be read by the other one:

# %%
traced = dataclasses.replace(even, clock="trace")
print(f"{os.cpu_count()} cores for {len(set(even.devices))} devices")
print(f"as it ran:           {1e3 * traced.seconds:6.1f} ms, {traced.bubble_fraction:4.0%} idle")
print(f"each program alone:  {1e3 * even.seconds:6.1f} ms, {even.bubble_fraction:4.0%} idle")

# %% [markdown]
# If a laptop has fewer cores than devices, a pipeline cannot be fast on it. Use forced CPU devices to learn, to test, and to see
# the order, the memory and the balance. Measure speed on the devices that you will train on.
#
# ## Too many microbatches
#
# More microbatches make fill and drain smaller. Why not always take a thousand? Because the host hands every action to its device,
# and that takes it some tens of microseconds, however small the microbatch is. As long as actions take long enough, the host is
# ahead, and nobody notices. If they are shorter, the devices wait for the host: this is the cause "dispatch".
#
# One host serves all four ranks. So the comparison is between the time of an action on its device, and the time that the host
# needs to hand over four actions, one for each rank.

# %%
counts = [4, 16, 64]
profiles = [profile_of(num_microbatches=4)[1], even, profile_of(num_microbatches=64)[1]]
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.plot(counts, [100 * 3 / (m + 3) for m in counts], "o-", color="#E69F00")  # (p - 1) / (m + p - 1) for p = 4 ranks
left.set(ylabel="bubble of 1F1B, %", ylim=(0, 50))
right.plot(counts, [1e6 * sum(p.busy) / len(p.actions) for p in profiles], "o-", color="#0072B2", label="an action, alone")
right.plot(counts, [4e6 * p.host_seconds for p in profiles], "s--", color="#D55E00", label="the host, for four actions")
right.set(yscale="log", ylabel="microseconds")
right.legend(frameon=False)
for axes in (left, right):
    axes.set_xscale("log", base=4)
    axes.set(xlabel="microbatches", xticks=counts, xticklabels=counts)
plt.show()

# %% [markdown]
# On the left the bubble falls, and soon there is little left to win. On the right the blue line falls towards the red one, which
# does not fall. Choose the number of microbatches so that the blue line stays well above the red one. With larger models the blue
# line is far above, and you may take more. (On forced CPU devices the host shares its cores with the devices, so the red line lies
# higher than beside GPUs.)
#
# ## What memory does during a step
#
# The last part of the profile's figure shows what each device holds. Let us draw one curve of it larger: the bytes on the first
# device while the step runs, for three ways to choose the residuals. The argument is called `remat`, for rematerialisation: to
# compute again instead of keeping.
#
# - `"keep"` keeps everything that the backward reads.
# - `"least"`, the default, keeps as little as possible without doing a matrix product twice. Cheap arithmetic is done again: here
#   the inside of `gelu`.
# - `"recompute"` keeps the input of the stage only, and runs the forward of the stage a second time.


# %%
def residual_bytes(profile):
    curve = profile.memory[0]  # of the first device: bytes of each kind, from each moment on
    kind = list(profile.ledger.samples[0].by_kind).index("residuals")
    return curve.times / np.max(curve.times), [level[kind] / 2**20 for level in curve.levels]


pipes = {"least": (pipe, even)} | {remat: profile_of(remat=remat) for remat in ("keep", "recompute")}
fig, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for remat, colour in {"keep": "#BBBBBB", "least": "#0072B2", "recompute": "#E69F00"}.items():
    axes.step(*residual_bytes(pipes[remat][1]), where="post", color=colour, label=remat)
axes.set(xlabel="part of the step", ylabel="residuals, MiB")
axes.legend(frameon=False, title="remat")
plt.show()

# %% [markdown]
# Look at the shape first: residuals rise until four microbatches are on their way, then every backward frees the residuals of one
# microbatch and the next forward keeps those of another, and at the end they are gone. A curve that kept rising from step to step
# would be a leak. Then compare the heights. The price is in the time of the backward:

# %%
for remat, (other, profile) in pipes.items():
    kept = sum(stage.kept for stage in other.stages) / 2**10
    backward = [1e3 * (span.end - span.start) for action, span in profile.actions.items() if action.kind.name == "B"]
    print(f"{remat:10} {kept:6,.0f} KiB kept for a microbatch on all stages; a backward takes {np.median(backward):.2f} ms")
kept = {remat: sum(stage.kept for stage in other.stages) for remat, (other, _) in pipes.items()}
assert kept["recompute"] < kept["least"] < kept["keep"]

# %% [markdown]
# ## A list for the wall
#
# | what the profile shows | what it means | what helps |
# |---|---|---|
# | one rank without gaps, the others wait | imbalance | leave `cuts=` out; `balance="time"`; another number of stages |
# | much fill and drain on all ranks | too few microbatches for so many ranks | more microbatches; `interleaved`, `zb-h1`, `zb-v` |
# | dispatch, short bars with gaps | actions too short for the host | fewer microbatches, fewer stages, larger batches |
# | transfer, or a warning about a boundary | the links are slow for what crosses | other cuts, more work for each microbatch |
# | a long grey end | the update is long beside few microbatches | more microbatches in a step, a simpler optimizer |
# | residuals fill the memory | too much is kept | `1f1b` instead of `gpipe`; smaller microbatches; `remat="recompute"` |
#
# ## Takeaway
#
# Idle time has five causes, and each has its own remedy. Balance comes first, then the schedule, then the number of microbatches.
# Forced CPU devices show order, balance and memory truthfully; speed is measured on the devices that you train on.
#
# ## Questions
#
# 1. All ranks of a pipeline of 4 ranks and 4 microbatches are idle for 43% of the time, and all of it is fill and drain. What would
#    you change?
#
# <details><summary>Answer</summary>
#
# The number of microbatches. The bubble of 1F1B is (p - 1) / (m + p - 1) = 3 / 7 = 43%, so this pipeline does what its schedule
# says. With 16 microbatches the bubble is 3 / 19 = 16%. If the batch cannot be split further, use `interleaved` or a zero-bubble
# schedule.
#
# </details>
#
# 2. The traced timeline of a step on your laptop is three times as long as the isolated one. Is the pipeline badly made?
#
# <details><summary>Answer</summary>
#
# Not necessarily. Four forced devices on two cores can at best run two actions at once, and JAX and the host need cores, too. The
# isolated timeline says what the pipeline would do with devices of their own. Judge balance and schedule by that one.
#
# </details>
#
# 3. In the uneven pipeline, would `schedule="zb-h1"` have helped more than better cuts?
#
# <details><summary>Answer</summary>
#
# No. The last rank had no gap, so no schedule can make it finish earlier: it has five eighths of all the work. A schedule moves
# work in time. Only the cuts move work from one rank to another.
#
# </details>
