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
# # Forecast a step on several hosts
#
# Before you ask for more hosts, one host can tell what they would do. This recipe measures the stages of a pipeline on the devices
# that are here, and asks the virtual clock what a step would take on more hosts of the same kind, over a link that you assume.

# %%
import itertools
import statistics

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp
from jaxpp.schedule import SCHEDULES, make, simulate

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## Measure one host
#
# `pipe.profile` runs a few steps and says how long every action took. The backward is split into I and W here (`zb-h1`), so that
# schedules with and without split backwards can be compared.

# %%
WIDTH, EXAMPLES, MICROBATCHES, RANKS = 256, 512, 8, 4
layers = [layer for _ in range(12) for layer in (nn.Dense(WIDTH), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])
batch = {"x": jnp.ones((EXAMPLES, WIDTH)), "y": jnp.zeros(EXAMPLES, int)}


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=RANKS, num_microbatches=MICROBATCHES, schedule="zb-h1")
state = pipe.init(lambda key: model.init(key, batch["x"]), jax.random.key(0), batch)
profile = pipe.profile(state, batch)

# %%
seconds = {
    kind: statistics.median(span.end - span.start for action, span in profile.actions.items() if action.kind == kind)
    for kind in "FIW"
}
for kind, time in seconds.items():
    print(f"{kind}: {1e6 * time:.0f} us")
print(f"host: {1e6 * profile.host_seconds:.0f} us for an action and its sends")

# %% [markdown]
# ## Assume a link
#
# What crosses a boundary is the activation of a microbatch: examples x width x 4 bytes. Inside a host we take the transfers that
# were measured; between hosts we assume 10 Gbit/s and a latency of 50 microseconds.

# %%
activation = EXAMPLES // MICROBATCHES * WIDTH * 4
inside = statistics.median(span.end - span.start for span in profile.transfers)
between = 50e-6 + activation / (10e9 / 8)
print(f"{activation / 1024:.0f} KiB: {1e6 * inside:.0f} us inside a host, {1e6 * between:.0f} us between hosts")


# %% [markdown]
# ## Ask the clock
#
# Every host has four ranks like those that were measured, so the model grows with the hosts. `transfer` takes one time for each
# boundary between two stages, and `rank_to_process` says that every process hands over the actions of its own ranks.


# %%
def forecast(name, hosts, num_microbatches, inside=inside, between=between, dispatch=profile.host_seconds):
    """A step on so many hosts."""
    schedule = make(name, num_ranks=hosts * RANKS, num_microbatches=num_microbatches)
    host = [rank // RANKS for rank in range(schedule.num_ranks)]
    stages = [host[rank] for rank in schedule.stage_to_rank]
    forward, input_grad, weight_grad = (seconds[kind] / SCHEDULES[name].stages_per_rank for kind in "FIW")
    costs = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "dispatch": dispatch}
    transfer = [inside if here == there else between for here, there in itertools.pairwise(stages)]
    return simulate(schedule, **costs, transfer=transfer, rank_to_process=host)


# %%
print(forecast("1f1b", hosts=2, num_microbatches=32))

# %%
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
    hosts = [1, 2, 4, 8]
    ax.plot(hosts, [forecast(name, count, 64).bubble_fraction for count in hosts], marker="o", label=name)
ax.set(xscale="log", xlabel="hosts, with four ranks each", ylabel="bubble of a step of 64 microbatches", ylim=(0, 1))
ax.set_xticks(hosts, map(str, hosts))
ax.minorticks_off()
ax.legend()
ax.yaxis.set_major_formatter("{x:.0%}")

# %% [markdown]
# Where the bubble grows with the hosts, it is the pipeline that fills and drains. A line that stays level waits for the host: each
# process hands over as many actions as before, and schedules with more and shorter actions need more of its time. Larger stages
# help there.
#
# The clock agrees with the formula where there is one: without transfers and dispatch, m microbatches on p ranks take m + p - 1
# times what one takes on a rank. A slower link never makes a step shorter.

# %%
whole = forecast("1f1b", hosts=4, num_microbatches=64, inside=0, between=0, dispatch=0).makespan
np.testing.assert_allclose(whole, (64 + 16 - 1) * sum(seconds.values()), rtol=1e-9)
times = [forecast("zb-h1", hosts=4, num_microbatches=64, between=slower * between).makespan for slower in (1, 10, 100)]
assert times == sorted(times) and times[0] < times[2]

# %% [markdown]
# ## What to look out for
#
# - The stages of forced CPU devices share the cores of one machine, so the times here are those of the recipe. On GPUs measure a
#   host as it will be used, with stages as large as they will be.
# - Transfers that share a link slow each other down, which the clock does not know. Compare the bytes that cross a link in a step
#   with the time of the step.
# - If a host is one rank (`jax.make_mesh((hosts, 4), ("pipe", "model"))`), there are fewer ranks and so a smaller bubble; each
#   device then sends a whole activation to the next host. `python -m experiments.hosts.on_paper` compares both ways for up to
#   64 hosts.
