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
# # 7. Interleaving, zero bubble, and a schedule of your own
#
# 1F1B solved the problem of memory and left the bubble as it was. This chapter makes the bubble smaller, in two ways: with
# smaller pieces of the model, and with smaller pieces of the backward. Then you write a schedule yourself.
#
# First, the problem of the chapters before, with the loss and the gradients of the monolith.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any


# %%
class MLP(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(128) for _ in range(7)] + [nn.Dense(10)]

    def __call__(self, x, first=0, last=8):  # runs the layers first, ..., last - 1
        for k in range(first, last):
            x = self.layers[k](x)
            x = nn.relu(x) if k < 7 else x
        return x


# %%
digits = load_digits()
batch = {"x": jnp.asarray(digits.data[:1024] / 16, "float32"), "y": jnp.asarray(digits.target[:1024])}
params = MLP().init(jax.random.key(0), batch["x"])["params"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(params, batch):
    return cross_entropy(MLP().apply({"params": params}, batch["x"]), batch["y"])


loss, grads = jax.value_and_grad(loss_fn)(params, batch)

# %% [markdown]
# ## Smaller pieces of the model: interleaving
#
# The bubble comes from filling and draining the pipeline. To fill it, the first microbatch has to pass p - 1 stages. If stages
# were half as long, filling would take half the time. **Interleaving** makes them half as long without more devices: the model is
# cut into twice as many stages, and each rank owns two of them (the same paper as 1F1B, [arXiv
# 2104.04473](https://arxiv.org/abs/2104.04473), section 2.2.2).
#
# The model goes around twice: stages 0 to 3 are on ranks 0 to 3, and stages 4 to 7 on ranks 0 to 3 again. In the picture, the
# second stage of each rank is paler and underlined. A stage is now half as large, so a forward takes half as long as before:
# a unit of this picture is half a unit of the pictures before. Look at rank 3: it begins after three such units.

# %%
interleaved = jaxpp.schedule.make("interleaved", num_ranks=4, num_microbatches=8)
print("the ranks of stages 0 to 7:", *interleaved.stage_to_rank)
interleaved.figure()

# %% [markdown]
# With v stages on each rank, an action takes 1 / v of the time, and so does filling. The idle time of a rank is divided by v.
# The work stays the same, so the bubble, which is the idle part of the whole time, shrinks a little less:
#
# `bubble = (p - 1) / (v m + p - 1)`

# %%
for v in (1, 2, 4):
    schedule = jaxpp.schedule.make("interleaved", num_ranks=4, num_microbatches=8, stages_per_rank=v)
    costs = {"forward": 1 / v, "input_grad": 1 / v, "weight_grad": 1 / v}
    free, costly = (jaxpp.schedule.simulate(schedule, **costs, transfer=transfer) for transfer in (0, 0.25))
    np.testing.assert_allclose(free.bubble_fraction, (4 - 1) / (v * 8 + 4 - 1))
    print(f"stages on each rank: {v}, makespan {float(free.makespan)}, bubble {free.bubble_fraction:.1%}", end="; ")
    print(f"with slow links: makespan {costly.makespan}")

# %% [markdown]
# The price is in the last column. Every boundary between stages costs a transfer, and there are about v times as many boundaries.
# If a transfer takes a quarter of a forward of the whole rank, two stages on each rank still help, and four are worse than two.
# (The ranks also hold a few more residuals.)
#
# ## Smaller pieces of the backward: I and W
#
# Chapter 4 said that a backward computes two things. They are not equally urgent.
#
# - The cotangent of the stage's input. The stage before waits for it. This part is called **I**.
# - The gradients of the stage's parameters. Nobody needs them before the optimizer runs. This part is called **W**.
#
# JAX shows that the two are separate: differentiate with respect to the input alone, and with respect to the parameters alone.

# %%
own = {name: params[name] for name in ("layers_2", "layers_3")}
x = MLP().apply({"params": params}, batch["x"], 0, 2)


def stage(own, x):
    return MLP().apply({"params": own}, x, 2, 4)


y, b = jax.vjp(stage, own, x)
_, i = jax.vjp(lambda x: stage(own, x), x)
_, w = jax.vjp(lambda own: stage(own, x), own)
cotangent = jnp.ones_like(y)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), b(cotangent), (*w(cotangent), *i(cotangent)))
print("I and W together return what B returns")

# %% [markdown]
# (This ran the forward three times. jaxpp traces it once and divides the backward, so that nothing is computed twice: I keeps for
# W what both need.)
#
# ## Zero bubble
#
# If W can wait, it can wait for a moment in which its rank would be idle. That is the idea of the **zero-bubble** schedules (Qi
# et al., [arXiv 2401.10241](https://arxiv.org/abs/2401.10241)). Look at the yellow bars: in the cool-down, where 1F1B has grey,
# ranks catch up on their W.

# %%
zero_bubble = jaxpp.schedule.make("zb-h1", num_ranks=4, num_microbatches=8)
zero_bubble.figure()

# %% [markdown]
# A rank of `zb-h1` is idle for a third of the time for which it is idle in 1F1B: the cotangents travel through I alone, which
# is half of B, and W fills gaps. The first rank needs no more pebbles than before. (A pebble now lies until its W ends, so here
# the other ranks hold four as well.) Other schedules go further. `zb-v` gives each rank two stages, placed in a V: going down the
# V, stages 0 to 3 are on ranks 0 to 3, and going up, stages 4 to 7 are on ranks 3 to 0. So the first rank has the first and the
# last stage, and the loss comes back to where the digits went in. (A unit is again half as long.) Look for grey inside the rows.
# There is none: after its first action, a rank of `zb-v` works without a pause.

# %%
zb_v = jaxpp.schedule.make("zb-v", num_ranks=4, num_microbatches=8)
print("the ranks of stages 0 to 7:", *zb_v.stage_to_rank)
zb_v.figure()

# %% [markdown]
# ## The V, and how much it holds
#
# Why a V? In 1F1B the first rank holds the most, because its residuals wait for the whole way of a microbatch to the loss and back,
# while those of the last rank are used at once. In a V, each rank has a stage near the beginning and a stage near the loss: one
# keeps residuals for long, the other for a short time. The two times together are the same on every rank, and so is the memory.
#
# How large is it? In the steady state every rank does six actions for each microbatch: F, I and W of two stages. So one microbatch
# follows another at a distance of six units. If a stage keeps the residuals of a microbatch for 12 units, there are 12 / 6 = 2
# microbatches in flight on it. **To hold less, let each microbatch pass faster.** That is the idea of two more schedules (Qi et
# al., [arXiv 2405.15362](https://arxiv.org/abs/2405.15362)). Each fixes the way of one microbatch, and repeats it every six units.
#
# - `v-min` lets a microbatch move on after every unit, without a pause: it is as fast as can be. With many ranks it holds about a
#   third of what the first rank of 1F1B holds.
# - `v-half` lets it take two units for each stage on the way down, and one on the way up, in the forward and in the backward. With
#   many ranks it holds about a half.
#
# (`zb-v` lets each microbatch take its time, and holds as much as 1F1B.) In the figure, follow one microbatch from the middle of a
# step through the ranks. Its forward goes down the V and up again, in blue; then its I does the same, in pink; the W, in yellow,
# wait for a gap. The shorter the way, the fewer microbatches are in flight. The titles say how many a rank holds. (Each pebble
# counts half, as it is that of half a rank.)


# %%
colours = {"F": "#0072B2", "I": "#CC79A7", "W": "#F0E442"}
fig, all_axes = plt.subplots(1, 3, figsize=(7, 2.4), layout="constrained", sharey=True)
for axes, name in zip(all_axes, ("zb-v", "v-half", "v-min"), strict=True):
    schedule = jaxpp.schedule.make(name, num_ranks=4, num_microbatches=16)
    result = jaxpp.schedule.simulate(schedule)
    way = {action: start for action, start in result.starts.items() if action.microbatch == 7}
    for action, start in way.items():
        rank = schedule.stage_to_rank[action.stage]
        axes.barh(rank, 1, left=start - min(way.values()), color=colours[action.kind], align="center")
    held = max(result.peak_residuals) / 2
    axes.set(title=f"{name}: {held:g} on a rank", xlabel="units", ylim=(3.5, -0.5), xlim=(0, 51))
all_axes[0].set(ylabel="rank", yticks=range(4))
plt.show()

# %% [markdown]
# What is the price? In `v-min` and `v-half` each action is fixed to the moment at which the microbatch comes by, and the W fill
# what is left. At the beginning and the end of a step nothing else can fill the gaps, so their bubbles are larger than that of
# `zb-v`. They also count on F, I and W taking equally long. In the next cell I takes a quarter longer than the others:

# %%
for name in ("1f1b", "zb-v", "v-half", "v-min"):
    v = jaxpp.schedule.SCHEDULES[name].stages_per_rank
    schedule = jaxpp.schedule.make(name, num_ranks=4, num_microbatches=16)
    equal = jaxpp.schedule.simulate(schedule, forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
    unequal = jaxpp.schedule.simulate(schedule, forward=1 / v, input_grad=1.25 / v, weight_grad=1 / v)
    print(f"{name:6} bubble {equal.bubble_fraction:5.1%}, with a longer I {unequal.bubble_fraction:5.1%}", end="; ")
    print(f"most residuals on a rank: {max(equal.peak_residuals) / v:g} microbatches")

# %% [markdown]
# `dualpipe-v` is a V for another purpose. In a model with experts, a stage spends much of its time in messages to other devices
# (not those of the pipeline). A rank that has two independent actions at hand can compute one while the other sends. So in the
# steady state of `dualpipe-v`, each forward of one stage of a rank stands beside a backward of its other stage, for another
# microbatch. Look at the middle of the picture: the four actions of such two pairs, in turn. On our clock nothing is gained by
# it, because our clock has no such messages.
#
# (DualPipe is the schedule of DeepSeek-V3, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437). It sends microbatches in from both
# ends, and holds every stage twice. Sea AI Lab then cut it in half and folded it into a V, which needs each stage only once:
# ["DualPipe could be better without the Dual"](https://huggingface.co/blog/ufotalent/cut-in-half).)

# %%
dualpipe_v = jaxpp.schedule.make("dualpipe-v", num_ranks=4, num_microbatches=10)
row = [str(action) for action in dualpipe_v.rows[0]]
print("rank 0, the middle of the step:", *row[17:25])
dualpipe_v.figure()

# %% [markdown]
# ## All schedules side by side
#
# The bubble and the memory of the schedules that jaxpp knows, for 4 ranks and 16 microbatches. Memory is counted in
# microbatches of a whole rank: where a rank has two stages, each pebble counts half. (`naive` is left out. Its bubble of 75%
# would make the other bars tiny.) Two names are new:
#
# - `looped-bfs` is GPipe with two stages on each rank ([arXiv 2211.05953](https://arxiv.org/abs/2211.05953)).
# - `zb-h2`, of the same paper as `zb-h1`, does more forwards in the warm-up, so that no rank pauses between its first and its
#   last action. Its ranks are idle at other times than those of `zb-h1`, and equally long; it pays off where transfers are slow.
#
# Look for bars that are short on both sides.

# %%
names = [name for name in jaxpp.schedule.SCHEDULES if name != "naive"]
bubbles, pebbles = [], []
for name in names:
    v = jaxpp.schedule.SCHEDULES[name].stages_per_rank
    schedule = jaxpp.schedule.make(name, num_ranks=4, num_microbatches=16)
    result = jaxpp.schedule.simulate(schedule, forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
    bubbles.append(100 * result.bubble_fraction)
    pebbles.append(max(result.peak_residuals) / v)
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained", sharey=True)
left.barh(names, bubbles, color="#999999")
right.barh(names, pebbles, color="#222222")
left.set(xlabel="bubble, %")
right.set(xlabel="most residuals on a rank, microbatches")
left.invert_yaxis()
plt.show()

# %% [markdown]
# No schedule is best at everything. `v-min` needs the least memory. `zb-v` and `dualpipe-v` have the smallest bubble, and send
# about twice as many messages as `1f1b`, which is the simplest that is lean in memory.
#
# ## A schedule of your own
#
# A schedule is data, so you can write one. A good reason: links that are slow. Suppose that a transfer takes as long as half a
# forward. In the steady state of 1F1B, each rank then waits for messages that are still on their way. The remedy is to have more
# microbatches in flight. We take the rows of chapter 6 and change one thing, the warm-up: twice as many forwards.


# %%
def make_row(s, m, warm_up):
    warm_up = min(warm_up, m)
    row = [f"{s}F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        row += [f"{s}F{warm_up + i}", f"{s}B{i}"]
    return row + [f"{s}B{i}" for i in range(m - warm_up, m)]


one_f_one_b = jaxpp.schedule.make("1f1b", num_ranks=4, num_microbatches=8)
mine = jaxpp.schedule.Schedule("mine", [make_row(s, 8, warm_up=2 * (3 - s)) for s in range(4)])
for schedule in (one_f_one_b, mine):
    result = jaxpp.schedule.simulate(schedule, transfer=0.5)
    print(f"{schedule.name:5} makespan {result.makespan}, bubble {result.bubble_fraction:.1%}", end=", ")
    print("most pebbles on each rank:", *result.peak_residuals)

# %% [markdown]
# Here are the two on the clock with slow links, 1F1B first. Look at rank 3: in 1F1B it pauses again and again, and in `mine` it
# works without a pause. The price is three more pebbles on rank 0.

# %%
jaxpp.schedule.simulate(one_f_one_b, transfer=0.5).figure()

# %%
jaxpp.schedule.simulate(mine, transfer=0.5).figure()

# %% [markdown]
# Every schedule can be stored as CSV, a line for each rank, in the format that PyTorch uses for its schedules. You can write one
# in an editor or a spreadsheet, and read it.

# %%
text = mine.to_csv()
print(text.splitlines()[3])
assert jaxpp.schedule.from_csv(text) == mine

# %% [markdown]
# ## A schedule made to measure
#
# All these schedules are made for stages that take equally long. Real stages do not: the head of a language model may be larger
# than the other stages, and the first stage may have frozen layers. `jaxpp.schedule.synthesise` searches for an order for the costs
# of your stages, in as much memory as you allow. Here stage 2 takes twice as long as the others, and each rank may hold four
# microbatches, as many as the first rank of 1F1B does:

# %%
costs = {"forward": [1, 1, 2, 1], "input_grad": [1, 1, 2, 1], "weight_grad": [1, 1, 2, 1], "transfer": 0.25}
made = jaxpp.schedule.synthesise(4, 8, room=4, **costs)
for schedule in (one_f_one_b, zero_bubble, made):
    result = jaxpp.schedule.simulate(schedule, **costs)
    print(f"{schedule.name:5} makespan {result.makespan}, idle on each rank:", *(float(idle) for idle in result.idle))
jaxpp.schedule.simulate(made, **costs).figure()

# %% [markdown]
# Look at rank 2. Eight microbatches take it 48 units, and the first of them arrives after 2.5, so no step is shorter than 50.5. The
# schedule made to measure reaches that: rank 2 works without a pause to the end. In a pipeline, `schedule="auto"` makes such an
# order for the stages that were cut.
#
# ## A schedule that cannot run
#
# Not every order is possible. If rows wait for one another in a circle, nothing can ever run again; that is a **deadlock**. On a
# real machine it looks like a program that hangs. jaxpp checks a schedule when it is made, and shows the circle. In these rows,
# rank 1 wants to begin with microbatch 1, and rank 0 wants to finish microbatch 0 first.

# %%
try:
    jaxpp.schedule.Schedule("stuck", ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
except ValueError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# Read the lines under "Got" as a chain; its end is its beginning. The marked actions in the last two lines are the same circle in
# the rows. To mend the schedule, swap the microbatches in one of the rows.
#
# ## Run them
#
# Does a schedule of your own train the same model? The order of the actions does not change what they compute, so every schedule
# must give the loss and the gradients of the monolith. `num_stages` is the number of ranks times the stages on each rank.


# %%
def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


for schedule, num_stages in (("interleaved", 8), ("zb-h1", 4), (mine, 4)):
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=num_stages, num_microbatches=8, schedule=schedule)
    assert_same(grad_fn(params, batch), (loss, grads))
    print(f"{getattr(schedule, 'name', schedule):11} equals the monolith")

# %% [markdown]
# ## Takeaway
#
# Interleaving divides the idle time by the number of stages on each rank, and multiplies the transfers. Splitting B into I and
# W lets the weight gradients fill what is left of the bubble. In a V, all ranks hold equally much, and the faster a microbatch
# passes, the less that is. A schedule is data: write one, let it be checked and simulated, and run it; the result stays the same.
#
# ## Questions
#
# **1.** 8 ranks, 16 microbatches. What is the bubble of 1F1B, and of interleaving with 2 and with 4 stages on each rank?
#
# <details><summary>Answer</summary>
#
# 7 / (16 + 7) = 30%; 7 / (32 + 7) = 18%; 7 / (64 + 7) = 10%. To reach 10% without interleaving, 1F1B would need 63 microbatches.
#
# </details>
#
# **2.** Why can I not wait as W can?
#
# <details><summary>Answer</summary>
#
# The stage before needs the result of I, a cotangent, to begin its own backward, and the stage before that needs the next, down
# to stage 0. A delay of I delays all of them. The result of W goes to the optimizer only, at the end of the step.
#
# </details>
#
# **3.** The loop of chapter 6 goes around the ranks and runs what can run. What would it do with the rows of `stuck`, and how
# would you make it say so?
#
# <details><summary>Answer</summary>
#
# It would run `0F0` and then go around forever, because no mail arrives for any rank. If one round over all ranks runs no action,
# none ever will: count the actions of a round, and raise an error if there were none. jaxpp finds the circle before anything
# runs.
#
# </details>
#
# Next: [8. Your own model](08_your_own_model.ipynb)
