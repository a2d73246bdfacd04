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
# # Train a model larger than its GPUs
#
# A card of 24 GB cannot hold a model of 8 billion parameters: in float32 they are 33 GB, and with gradients and Adam's two moments
# four times that. The memory of the host can. With `host="params"` the state lives there, and the stages of the model visit the
# card one after the other: each brings its parameters in while the stage before it works. This recipe trains a small model so,
# checks the bytes that travel, and then does the arithmetic for 8 and 32 billion parameters.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from jaxpp.targets import TARGETS

jax.config.update("jax_num_cpu_devices", 1)  # one device; leave it out where there is a GPU

# %% [markdown]
# ## A model of 16 blocks on a device that has room for two
#
# A block is a stage. `looped-bfs` runs all microbatches of a stage before it turns to the next stage, so each stage comes to the
# device twice in a step: for the forwards, and for the backwards and the update.

# %%
WIDTH, DEPTH, MICROBATCHES = 64, 16, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(WIDTH)(x)))


model = nn.Sequential([Block() for _ in range(DEPTH)])
x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("float32")
batch = {"x": x, "y": np.sin(x[:, ::-1])}

# %% [markdown]
# Of a microbatch, a stage keeps its input alone, which waits in host memory too (`jaxpp.Offload(recompute=True)`).


# %%
def loss_fn(params, batch):
    return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)


def pipeline(**options):
    order = jaxpp.schedule.make("looped-bfs", num_ranks=1, num_microbatches=MICROBATCHES, stages_per_rank=DEPTH)
    cuts = [f"layers_{k}" for k in range(1, DEPTH)]
    sizes = {"num_stages": DEPTH, "num_microbatches": MICROBATCHES, "schedule": order, "cuts": cuts}
    return jaxpp.Pipeline(loss_fn, optax.adam(1e-3), remat=jaxpp.Offload(recompute=True), **sizes, **options)


def init(key):
    return model.init(key, x)


# %% [markdown]
# With `hbm=`, jaxpp finds out by itself that the state has to wait in host memory, and prints why. `host="params"` asks for it.

# %%
params = jax.eval_shape(init, jax.random.key(0))
size = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
room = size // 2
pipe = pipeline(hbm=room)
state = pipe.init(init, jax.random.key(0), batch)
forecast = pipe.forecast(params, batch)
most = max(forecast.peaks.values())
print(f"state: {4 * size / 2**20:.2f} MiB with gradients; the device holds {most / 2**20:.2f} MiB at most")
assert forecast.fits and 4 * size >= 8 * room

# %% [markdown]
# It trains, and each step has the bits of a step whose state lives on the device.

# %%
plain = pipeline()
resident = plain.init(init, jax.random.key(0), batch)
losses = []
for _ in range(5):
    state, metrics = pipe.step(state, batch)
    resident, _ = plain.step(resident, batch)
    losses.append(float(metrics.loss))
print("losses:", ", ".join(f"{loss:.4f}" for loss in losses))
pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(resident.params), strict=True)
assert all(np.array_equal(a, b) for a, b in pairs) and losses[-1] < losses[0]

# %% [markdown]
# ## What travels
#
# For P bytes of parameters and an Adam with two moments, a step brings P for the forwards, and P and 2P for the backwards and the
# updates. The last stage goes forward and back in one visit, so its parameters come once. P and 2P go back. Gradients never travel:
# the update of a stage runs in the visit that completes them.

# %%
(moved,) = forecast.liveness.visiting.values()
last = size // DEPTH
print(f"in: {moved.brought:,} bytes; out: {moved.taken:,} bytes")
assert (moved.brought, moved.taken) == (4 * size - last, 3 * size)

# %% [markdown]
# ## When the copies cost nothing
#
# In a visit for the forwards, T tokens take 2T operations for each parameter, and meanwhile the link brings 4 bytes for each
# parameter of the next stage. With F operations a second and L bytes a second, the copy is hidden if 2T / F is at least 4 / L: from
# 2F / L tokens in a step, whatever the size of the model. A visit for the backwards works three times as long (twice the forward,
# and the forward again, as only the inputs of a stage are kept) and brings three times as much.

# %%
card = next(each for each in TARGETS if each.name == "rtx-4090")
peak, link = card.peaks.bfloat16, card.links.host
print(f"{card.shown}: copies hide from {2 * peak / link:,.0f} tokens in a step, at the makers' peaks")
print(f"{card.shown}: copies hide from {2 * 0.5 * peak / (0.8 * link):,.0f} tokens, at half of the one and 0.8 of the other")

# %% [markdown]
# ## 8 and 32 billion parameters
#
# The same arithmetic for decoders with the shapes of `models/gpt.py`: a block of width w has 12 w² parameters. A card holds, of the
# stage that works, parameters, gradients and two moments (16 bytes a parameter) and a copy in bfloat16 (2 bytes), of the next stage
# the parameters (4 bytes), and some inputs of a microbatch. The host holds the state (12 bytes a parameter), the new values of one
# stage beside it, and the input of every stage for every microbatch, in bfloat16.


# %%
def planned(width, depth, cards, tokens=32 * 1024):
    block, params = 12 * width**2, 12 * width**2 * depth + 50257 * width
    on_card, inputs = (16 + 2 + 4) * block, 2 * tokens * width * depth
    seconds = 8 * params * tokens / peak / cards  # 2 for the forward, 4 for the backward, 2 for the forward again
    copies = (4 * 4 * params + inputs) / link / cards
    return params, on_card, 12 * (params + block) + inputs, seconds, copies


print("parameters  cards  on a card   on the host    a step  its copies   tokens/s")
for width, depth in ((4096, 40), (6656, 60)):
    for cards in (1, 2, 8):
        params, on_card, on_host, seconds, copies = planned(width, depth, cards)
        line = f"{params / 1e9:8.1f} B  {cards:5}  {on_card / 2**30:5.1f} GiB  {on_host / 2**30:8.0f} GiB"
        print(f"{line}  {max(seconds, copies):6.1f} s  {copies:8.1f} s  {32 * 1024 / max(seconds, copies):9,.0f}")
        assert copies < seconds and on_card < 0.75 * card.memory

# %% [markdown]
# These are the peaks of the maker, and no card reaches them. A card also holds about twice as much as this, as the stage with the
# head has the embedding too and its programs need temporaries: the forecast is 9 GiB for 8 billion parameters and 19 GiB for 32
# billion, for which JAX must be given more of the card than its usual three quarters.
#
# `jaxpp.target("rtx-4090", 2)` makes devices that compile the real
# programs, and `pipe.forecast(shapes, batch)` then prints the bytes on each card and on the host, the least time of a step, and
# whether the copies hide, without a card: [the experiment](../../experiments/visits/README.md) has the table for these models.
#
# ## What to look out for
#
# - **Host memory** is what limits the model: 12 bytes a parameter, and the inputs of the stages. A box of 256 GB trains up to
#   18 billion parameters this way, and 32 billion need 420 GB.
# - **Tokens in a step**: below the number above, a step takes what the link takes. Accumulate more microbatches.
# - **Cards that share a link**: the copies of all cards run at once. Where two cards share the lanes of one slot, or the memory of
#   the host is slower than all links together, divide the rate of the link.
# - **A norm over all stages** (`optax.clip_by_global_norm`) makes every update wait for all stages: gradients go out and come back,
#   and parameters come once more.
# - With one stage on a rank, `host="params"` saves no more than `host="optimizer"` does. Cut the model into many stages.
