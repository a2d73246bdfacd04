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
# # 6. 1F1B: the same bubble, less memory
#
# GPipe holds the residuals of every microbatch, because all backwards come after all forwards. Chapter 5 found that nothing
# demands this order. A backward may run as soon as the cotangent of its microbatch is there. **1F1B** uses this freedom: one
# forward, one backward, in turn (Narayanan et al., [arXiv 2104.04473](https://arxiv.org/abs/2104.04473), section 2.2.1).
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
# ## The schedule
#
# Stage s of p may hold the residuals of at most p - s microbatches: one for each stage from it to the loss, itself included.
# Below this limit, the rank does a forward. At the limit, it does a backward, and waits for the cotangent if need be. So each
# row has three phases:
#
# - **warm-up**: p - s - 1 forwards, one fewer than the limit. Rank 3 has none, and rank 0 has three.
# - **steady state**: one forward and one backward in turn. Its first forward follows the warm-up at once and reaches the limit;
#   then the rank waits for its first cotangent. So rank 0 has four blue bars before its first gap: three of the warm-up and one
#   of the steady state.
# - **cool-down**: backwards only, as many as there were forwards in the warm-up.

# %%
one_f_one_b = jaxpp.schedule.make("1f1b", num_ranks=4, num_microbatches=8)
one_f_one_b.figure()

# %% [markdown]
# Is it faster than GPipe? Compare the makespan and the bubble. They are equal: the first microbatch still has to travel down to
# rank 3 and back. What differs is the number of pebbles.

# %%
gpipe = jaxpp.schedule.make("gpipe", num_ranks=4, num_microbatches=8)
for schedule in (gpipe, one_f_one_b):
    result = jaxpp.schedule.simulate(schedule)
    print(f"{schedule.name:6} makespan {result.makespan}, bubble {result.bubble_fraction:.1%}", end=", ")
    print("most pebbles on each rank:", *result.peak_residuals)
    assert result.bubble_fraction == (4 - 1) / (8 + 4 - 1)

# %% [markdown]
# A microbatch is **in flight** on a stage from the start of its forward to the end of its backward. In 1F1B, stage s of p has
# at most p - s microbatches in flight. In the pebble graph, look at the rows of pebbles. They fill up during the warm-up and then
# stay at the same height, however long the steady state lasts.

# %%
one_f_one_b.pebble_figure()

# %% [markdown]
# This is what makes many microbatches affordable. With GPipe the pebbles on the first rank grow with the number of microbatches;
# with 1F1B they never exceed the number of ranks.

# %%
counts = range(1, 25)
fig, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for name, colour in (("gpipe", "#D55E00"), ("1f1b", "#0072B2")):
    schedules = [jaxpp.schedule.make(name, num_ranks=4, num_microbatches=m) for m in counts]
    peaks = [max(jaxpp.schedule.simulate(schedule).peak_residuals) for schedule in schedules]
    assert peaks == [m if name == "gpipe" else min(m, 4) for m in counts]
    axes.plot(counts, peaks, ".-", color=colour, label=name)
axes.set(xlabel="microbatches", ylabel="pebbles on rank 0", ylim=0)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 1F1B by hand
#
# First the rows. Each is a list of actions (stage, kind, microbatch), in the three phases. Note the `min`: we shall come back to
# it.


# %%
def make_row(s, num_stages, m):
    warm_up = min(num_stages - s - 1, m)
    row = [(s, "F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        row += [(s, "F", warm_up + i), (s, "B", i)]
    return row + [(s, "B", i) for i in range(m - warm_up, m)]


rows = [make_row(s, 4, 8) for s in range(4)]
print("rank 2:", *(f"{s}{kind}{i}" for s, kind, i in rows[2]))
assert jaxpp.schedule.Schedule("mine", [" ".join(f"{s}{kind}{i}" for s, kind, i in row) for row in rows]) == one_f_one_b

# %% [markdown]
# The last line compares our rows with jaxpp's. Next, the parts of the model: for each stage its function, its parameters and its
# device.


# %%
def make_part(first, last, device):
    own = {f"layers_{k}": params[f"layers_{k}"] for k in range(first, last)}
    return jax.jit(lambda own, x: MLP().apply({"params": own}, x, first, last)), jax.device_put(own, device), device


def split(num_stages):
    bounds = [round(8 * s / num_stages) for s in range(num_stages + 1)]
    homes = [jax.devices()[s % len(jax.devices())] for s in range(num_stages)]
    return [make_part(*bounds[s : s + 2], homes[s]) for s in range(num_stages)]


# %% [markdown]
# What an action does is what it did in chapter 3. A forward runs `jax.vjp` and keeps the pullback; a backward calls it. Results
# go into the mail of the neighbour. The last stage has no neighbour: it computes the loss, and sends the cotangent to itself.


# %%
def run_forward(parts, s, i, x, labels, mail, kept):
    stage, own, device = parts[s]
    y, kept[s, i] = jax.vjp(stage, own, jax.device_put(x, device))
    if s + 1 < len(parts):
        mail[s + 1, "F", i] = y
        return 0.0
    value, mail[s, "B", i] = jax.value_and_grad(cross_entropy)(y, jax.device_put(labels, device))
    return value


def run_backward(parts, s, i, cotangent, mail, kept):
    grads, cotangent = kept.pop((s, i))(jax.device_put(cotangent, parts[s][2]))
    if s > 0:
        mail[s - 1, "B", i] = cotangent
    return grads


# %% [markdown]
# And here is the loop. It goes around the ranks. If the mail holds what a rank's next action needs, the action runs; otherwise
# the rank is passed over, as it would wait. This loop knows nothing of 1F1B. It runs any rows whose microbatches have equal size.


# %%
def run(rows, parts, watch=lambda: None):
    rows, m, kept, loss = [list(row) for row in rows], 1 + max(i for _, _, i in rows[0]), {}, 0.0
    xs, ys = jnp.split(batch["x"], m), jnp.split(batch["y"], m)
    mail = {(0, "F", i): x for i, x in enumerate(xs)}
    total = [jax.tree.map(jnp.zeros_like, own) for _, own, _ in parts]
    while any(rows):
        for s, row in enumerate(rows):
            if row and row[0] in mail:
                _, kind, i = action = row.pop(0)
                if kind == "F":
                    loss += run_forward(parts, s, i, mail.pop(action), ys[i], mail, kept) / m
                else:
                    total[s] = jax.tree.map(jnp.add, total[s], run_backward(parts, s, i, mail.pop(action), mail, kept))
                watch()
    return loss, {name: jax.tree.map(lambda g: g / m, layer) for own in total for name, layer in own.items()}


# %% [markdown]
# We run it twice, with the rows of 1F1B and with the rows of GPipe, and note the most bytes that each device held. Both results
# must be those of the monolith.


# %%
def live_bytes(device):
    arrays = [array for array in jax.live_arrays() if array.devices() == {device}]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one, other)


# %%
parts, peaks = split(4), {}
for name, chosen in (("gpipe", gpipe.rows), ("1f1b", rows)):
    before, seen = np.array([live_bytes(device) for _, _, device in parts]), []
    result = run(chosen, parts, lambda seen=seen: seen.append([live_bytes(device) for _, _, device in parts]))
    peaks[name] = (np.max(seen, axis=0) - before) / 2**20
    assert_same(result, (loss, grads))
    del result
    print(f"{name:6} equals the monolith; most MiB on each device:", *peaks[name].round(2))

# %% [markdown]
# In the figure, look at the blue bars: they go down from device to device, as the pebbles did, 4, 3, 2, 1. The bars hold
# somewhat more than residuals: the gradients, and what is in the mail. On device 0 there are also all eight microbatches of the
# digits, 0.25 MiB.

# %%
fig, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.bar(np.arange(4) - 0.2, peaks["gpipe"], 0.4, color="#D55E00", label="gpipe")
axes.bar(np.arange(4) + 0.2, peaks["1f1b"], 0.4, color="#0072B2", label="1f1b")
axes.set(xticks=range(4), xlabel="device", ylabel="MiB more than before")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Two cases that break such a loop
#
# Before you use a loop like ours, try it on two cases.
#
# **Fewer microbatches than stages.** The warm-up of rank 0 has three forwards. With two microbatches there is no third. Without
# the `min` in `make_row`, the row would ask for a microbatch that does not exist, and the loop would wait for it forever.

# %%
short = [make_row(s, 4, 2) for s in range(4)]
print("rank 0 with 2 microbatches:", *(f"{s}{kind}{i}" for s, kind, i in short[0]))
assert_same(run(short, parts), (loss, grads))
print("equals the monolith")

# %% [markdown]
# **Layers that do not divide.** Eight layers for three stages: with `8 // 3` layers for each stage, two layers are left over, and
# a loop that does not notice trains a model without them. It is a different model, with a different loss, and nothing complains.
# (The labels 0 to 9 are valid for 128 outputs too.) `split` rounds the boundaries instead, and every layer has a stage.

# %%
six_layers = cross_entropy(MLP().apply({"params": params}, batch["x"], 0, 3 * (8 // 3)), batch["y"])
print(f"loss of all 8 layers {loss:.3f}, of the first 6 layers {six_layers:.3f}")
three = split(3)
print("layers on each of 3 stages:", *(len(own) for _, own, _ in three))
assert_same(run([make_row(s, 3, 8) for s in range(3)], three), (loss, grads))
print("equals the monolith")

# %% [markdown]
# ## The same with jaxpp
#
# In jaxpp, `1f1b` is the default schedule. `pipe.forecast` says what each device will hold when it holds most, before any step
# has run. The pebbles are there again, and their size. The pebbles of our loop were at least twice as large: for a microbatch
# of 128 examples, an inner stage kept 288 KiB. jaxpp does not store the zeros of chapter 1. And by default it does not keep
# what is cheap to compute again, such as a mask of `relu`: that is a mild kind of remat, which never repeats a matrix product.
# Chapter 11 compares the choices.

# %%
grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=4, num_microbatches=8)
assert_same(grad_fn(params, batch), (loss, grads))
print(f"loss {grad_fn(params, batch)[0]:.6f}, the monolith's {loss:.6f}; the gradients are the same")

pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=8)
for row in pipe.forecast(params, batch).stages:
    print(f"stage {row.stage}: microbatches in flight {row.num_residuals}, residuals of each {row.residuals / 2**10:.0f} KiB")

# %% [markdown]
# ## Takeaway
#
# 1F1B has the bubble of GPipe, and at most p microbatches in flight, however many there are. The order of the actions decides how
# much memory a pipeline needs; the result does not depend on it.
#
# ## Questions
#
# **1.** Four ranks, 64 microbatches. By which factor does 1F1B reduce the residuals on rank 0, compared with GPipe? And on rank
# 3?
#
# <details><summary>Answer</summary>
#
# Rank 0 holds 4 pebbles instead of 64, a factor of 16. Rank 3 holds 1 instead of 64.
#
# </details>
#
# **2.** The first rank holds four times the residuals of the last rank. What would you change in the cuts, if memory is what
# limits you?
#
# <details><summary>Answer</summary>
#
# Give the first stage fewer layers and the last stage more. It costs time, since the slowest stage sets the pace. Some schedules
# of chapter 7 instead hold equally much on every rank.
#
# </details>
#
# **3.** In our loop, where would Python wait if `run_forward` called `float(value)` to print each loss?
#
# <details><summary>Answer</summary>
#
# At every forward of the last stage, until that microbatch has passed through all stages. Meanwhile nothing is handed out, so the
# queues of the other devices run empty: the pipeline becomes naive. Collect the values, and read them after the step.
#
# </details>
#
# Next: [7. Interleaving, zero bubble, and a schedule of your own](07_more_schedules.ipynb)
