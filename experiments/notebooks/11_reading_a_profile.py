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
# # 11. Reading a profile
#
# Why is my pipeline slow? A pipeline has few ways to be slow, and a profile tells them apart. In this chapter we make a pipeline
# slow on purpose, read its profile, and mend it. Then we look at two choices that are independent of the cuts: how many
# microbatches there are, and what is kept for the backward.

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
# The model is an MLP of nine layers for the handwritten digits. The first layer is narrow, because an image has only 64 pixels; the
# others have 384 x 384 weights each.


# %%
class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(9):
            x = nn.gelu(nn.Dense(384, name=f"layer_{k}")(x))
        return nn.Dense(10, name="head")(x)


def loss_fn(params, batch):
    logits = MLP().apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


x, y = load_digits(return_X_y=True)
batch = {"x": x[:1024].astype("float32") / 16, "y": y[:1024].astype("int32")}
params = jax.jit(MLP().init)(jax.random.key(0), batch["x"])
loss = loss_fn(params, batch)

# %% [markdown]
# Every pipeline of this chapter goes through one function. It makes the pipeline, checks that the loss of a step is that of plain
# JAX, and returns the profile.


# %%
def profile_of(**options):
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=4, **{"num_microbatches": 16, **options})
    state, metrics = pipe.step(pipe.init(params, batch), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    return pipe, state, pipe.profile(state, batch)


# %% [markdown]
# ## A slow pipeline
#
# Someone gave the last device five of the nine layers, and the four others to the first three devices.

# %%
_, _, uneven = profile_of(cuts=["layer_2", "layer_3", "layer_4"])
uneven.figure()

# %% [markdown]
# Look at the second timeline first. Rank 3 has no gap: it works all the time. The others work a little, and wait for it. In the
# first timeline you see the same order of actions, as they really ran. Why the two differ comes further below.
#
# ## Idle time by causes
#
# How much is lost, and why? The profile divides the idle time of each rank by cause. It simulates the schedule with the measured
# times, as `jaxpp.schedule.simulate` does (chapter 4), and takes away one cause after another:
#
# - **fill and drain**: what the schedule costs even if all stages are equal: waiting for the first microbatch, and at the end.
# - **imbalance**: what is added because some stages take longer than others.
# - **transfer**: waiting for activations and cotangents on their way that nothing hides.
# - **dispatch**: waiting for the host to hand over the next action. The second timeline has none of it, because its programs were
#   timed alone.
# - **optimizer**: what the update adds to the step. A rank that is done early updates its parameters while others still run
#   backwards. Therefore a grey bar of the timeline may be longer than this part.
# - **other**: what remains: splitting the batch, and whatever happened on this computer that none of the above explains.


# %%
def draw(axes, profile, title):
    parts = np.column_stack([profile.busy, profile.causes]).T / profile.seconds
    names = ("busy", "fill and drain", "imbalance", "transfer", "dispatch", "optimizer", "other")
    colours = ("#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#009E73", "#BBBBBB")
    left = np.zeros(4)
    for name, part, colour in zip(names, parts, colours, strict=True):
        axes.barh(range(4), 100 * part, left=left, color=colour, label=name)
        left += 100 * part
    axes.set_yticks(range(4), [f"rank {k}" for k in range(4)])
    axes.set(title=title, ylim=(3.5, -0.5), xlabel="part of the step, %")


fig, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
draw(axes, uneven, f"cuts by hand: {uneven.bubble_fraction:.0%} of the time is idle")
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Look at the red parts. The first three ranks lose most of their time to imbalance, and rank 3 loses none. So the schedule is not
# to blame, and a cleverer schedule would not help. The stages must be made equal.
#
# ## Mended
#
# Without `cuts=` jaxpp cuts for the shortest step, by estimated costs. (If estimates mislead, because two layers with the same
# FLOPs and bytes take different times on your device, `balance="time"` measures the stages once and cuts again.)

# %%
pipe, state, even = profile_of()
fig, all_axes = plt.subplots(2, figsize=(7, 4.4), sharex=True, layout="constrained")
draw(all_axes[0], uneven, f"cuts by hand: {uneven.bubble_fraction:.0%} of the time is idle")
draw(all_axes[1], even, f"cuts by jaxpp: {even.bubble_fraction:.0%} of the time is idle")
all_axes[0].set_xlabel("")
fig.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# The whole step is shorter, and most of the imbalance is gone. (Some remains, because estimates are not quite the times.) What
# the schedule itself costs, fill and drain, remains, and now a schedule can help: more microbatches, or one of the schedules of
# chapter 7. The order is always this: first balance, then the schedule.
#
# The result must be the same, whatever the cuts. `pipe.verify` compares a whole step with plain JAX, and raises no error:

# %%
pipe.verify(state, batch)

# %% [markdown]
# ## Two clocks
#
# A profile has two timelines because forced CPU devices are not like GPUs: all of them share the cores of this computer.
#
# - `"trace"`: what JAX's profiler recorded. If two actions run at the same time on too few cores, both take longer.
# - `"isolated"`: each program is run alone and timed, and the schedule is simulated with these times. This is
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
# and that takes it some time (tens of microseconds, if the host has nothing else to do), however small the microbatch is. One host
# serves all ranks. As long as the actions take long enough, the host is ahead, and nobody notices. If they are too short, the
# devices wait for the host: this is the cause "dispatch".
#
# A simulation shows it without the noise of this computer. A batch that keeps each rank busy for 12 ms is divided into more
# and more microbatches, and the host takes 0.04 ms for each action.

# %%
counts = [4, 8, 16, 32, 64, 128]
found = {"busy": [], "fill and drain": [], "dispatch": []}
for m in counts:
    schedule = jaxpp.schedule.make("1f1b", num_ranks=4, num_microbatches=m)
    times = {"forward": 4 / m, "input_grad": 4 / m, "weight_grad": 4 / m, "dispatch": 0.04}
    run = jaxpp.schedule.simulate(schedule, **times)
    found["busy"].append(np.mean(run.busy))
    found["fill and drain"].append(np.mean([causes.fill_drain for causes in run.causes]))
    found["dispatch"].append(np.mean([causes.dispatch for causes in run.causes]))

# %%
fig, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
bottom = np.zeros(len(counts))
colours = {"busy": "#0072B2", "fill and drain": "#E69F00", "dispatch": "#56B4E9"}
for cause, times in found.items():
    axes.bar(range(len(counts)), times, bottom=bottom, color=colours[cause], label=cause)
    bottom += times
axes.set_xticks(range(len(counts)), counts)
axes.set(xlabel="microbatches", ylabel="time of the step, ms")
fig.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Look for the lowest bar. To the left of it the bubble costs more, to the right of it the host does. On devices of your own,
# compare `profile.host_seconds` (the host's time for one action) times the number of ranks with the length of an action. If the
# action is several times as long, you may take more microbatches. With forced CPU devices the number means little: the host then
# shares its cores with the devices, and waits for them.
#
# ## What memory does during a step
#
# The last part of the profile's figure shows what each device holds. Let us draw a part of one row larger: the residuals on the
# second device, and the messages on their way to it or from it, for three ways to choose the residuals. The argument is
# called `remat`, the short word for rematerialisation that chapter 1 introduced.
#
# - `"keep"` keeps everything that the backward reads.
# - `"least"`, the default, keeps as little as possible without doing a matrix product twice. Cheap arithmetic is done again: here
#   the inside of `gelu`.
# - `"recompute"` keeps the input of the stage only, and the backward begins by running the forward of the stage again.


# %%
def held(profile, rank):
    curve = profile.memory[rank]  # levels: bytes of each kind, from each moment on
    kinds = list(profile.ledger.samples[0].by_kind)
    columns = [kinds.index("residuals"), kinds.index("messages")]
    size = np.array(curve.levels)[:, columns].sum(axis=1)
    return np.array(curve.times) / max(curve.times), size / 2**20


runs = {"least": (pipe, state, even)} | {remat: profile_of(remat=remat) for remat in ("keep", "recompute")}
fig, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for remat, colour in {"keep": "#BBBBBB", "least": "#0072B2", "recompute": "#E69F00"}.items():
    axes.step(*held(runs[remat][-1], rank=1), where="post", color=colour, label=f'remat="{remat}"')
axes.set(xlabel="part of the step", ylabel="MiB")
fig.legend(loc="outside right upper", frameon=False, title="remat")
plt.show()

# %% [markdown]
# Look at the shape first. The bytes rise until three microbatches are on their way. From then on every backward frees what one
# microbatch has kept, and the next forward keeps as much for another. At the end all is gone. Then compare the heights. `"least"`
# repeats arithmetic that takes next to no time. `"recompute"` runs each forward twice, so it is for models that would not fit
# otherwise. A list such as `remat=["recompute", "least", "least", "least"]` chooses for each stage.

# %%
kept = {remat: sum(stage.kept for stage in other.stages) for remat, (other, *_) in runs.items()}
for remat, size in kept.items():
    print(f"{remat:10} {size / 2**10:6,.0f} KiB kept for each microbatch, on all stages together")
assert kept["recompute"] < kept["least"] < kept["keep"]

# %% [markdown]
# ## Checklist
#
# | what the profile shows | what it means | what helps |
# |---|---|---|
# | one rank without gaps, the others wait | imbalance | leave `cuts=` out; `balance="time"`; another number of stages |
# | much fill and drain on all ranks | too few microbatches for so many ranks | more microbatches; `interleaved`, `zb-h1`, `zb-v` |
# | dispatch, short bars with gaps | actions too short for the host | fewer microbatches, fewer stages, larger batches |
# | transfer | the links are slow for what crosses | other cuts, more work for each microbatch |
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
# **1.** All ranks of a pipeline of 4 ranks and 4 microbatches are idle for 43% of the time, and all of it is fill and drain. What
# would you change?
#
# <details><summary>Answer</summary>
#
# The number of microbatches. The bubble of 1F1B is (p - 1) / (m + p - 1) = 3 / 7 = 43%, so this pipeline does what its schedule
# says. With 16 microbatches the bubble is 3 / 19 = 16%. If the batch cannot be split further, use `interleaved` or a zero-bubble
# schedule.
#
# </details>
#
# **2.** The traced timeline of a step on your laptop is three times as long as the isolated one. Is the pipeline badly made?
#
# <details><summary>Answer</summary>
#
# Not necessarily. Four forced devices on two cores can at best run two actions at once, and JAX and the host need cores, too. The
# isolated timeline says what the pipeline would do with devices of their own. Judge balance and schedule by that one.
#
# </details>
#
# **3.** In the uneven pipeline, would `schedule="zb-h1"` have helped more than better cuts?
#
# <details><summary>Answer</summary>
#
# No. The last rank had no gap, so no schedule can make it finish earlier: it has more than half of all the work. A schedule moves
# work in time. Only the cuts move work from one rank to another.
#
# </details>
#
# Next: [12. Save, resume, re-cut](12_save_and_resume.ipynb)
