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
# # Divide a large vocabulary among stages
#
# The head of a language model multiplies by a row for each word of its vocabulary. With 50,257 words and a width of 768, that one
# product is half of the work of a model of four blocks, and no cut divides it: four devices are then at most twice as fast as one.
# `jaxpp.linear_cross_entropy` computes the product and the loss in a loop over slices of the vocabulary, which is cut like a loop
# over layers. The logits are never in memory as a whole.

# %%
import warnings

import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any
VOCAB, WIDTH = 8000, 128

# %% [markdown]
# The embedding is the table of the head, too. `__call__` stops before the head, and `logits` is for the plain loss.


# %%
class Model(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.inner = [nn.Dense(4 * WIDTH) for _ in range(8)]
        self.outer = [nn.Dense(WIDTH) for _ in range(8)]

    def __call__(self, tokens):
        x = self.embed(tokens)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(nn.gelu(inner(x)))
        return x

    def logits(self, tokens):
        return self.embed.attend(self(tokens))


model = Model()
batch = np.random.default_rng(0).integers(0, VOCAB, (16, 33))
params = jax.jit(model.init)(jax.random.key(0), batch[:1])["params"]

# %% [markdown]
# With the loss as most people write it, jaxpp warns that the stages are uneven. The warning names the head, the line to write, and
# what it would gain.


# %%
def plain_loss(params, batch):
    logits = model.apply({"params": params}, batch[:, :-1], method="logits")
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


plain = jaxpp.Pipeline(plain_loss, optax.adamw(1e-3), num_stages=4, num_microbatches=4)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    plain.init(params, batch)
print(found[-1].message)


# %% [markdown]
# The same loss without logits. The table needs no preparation: it stays one array of `[vocab, width]` in `state.params` and in
# checkpoints, whatever the cuts.


# %%
def loss_fn(params, batch):
    hidden = model.apply({"params": params}, batch[:, :-1])
    table = params["embed"]["embedding"]
    return jaxpp.linear_cross_entropy(hidden, table, batch[:, 1:], num_slices=32).mean()


pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=4, num_microbatches=4)
state = pipe.init(params, batch)
print(pipe.stages)

# %%
wanted = plain_loss(params, batch)
for _ in range(10):
    state, metrics = pipe.step(state, batch)
    print(f"{metrics.loss:.3f}", end="  ")
np.testing.assert_allclose(jax.jit(loss_fn)(params, batch), wanted, rtol=1e-5)
assert metrics.loss < wanted

# %% [markdown]
# The share of each stage in the estimated time of a step, before and after, and the most that a stage holds while it computes:

# %%
work = {name: np.array([stage.seconds for stage in p.stages]) for name, p in (("plain", plain), ("divided", pipe))}
fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
for k, (name, seconds) in enumerate(work.items()):
    ax.bar(np.arange(4) + 0.4 * k, seconds / seconds.sum(), 0.4, label=name)
ax.set(xlabel="stage", ylabel="share of the time", xticks=range(4), title="The head is divided")
ax.legend()
assert work["divided"].max() < 1.1 * work["divided"].mean()

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore", jaxpp.UnevenStagesWarning)
    held = [max(stage.temporaries for stage in p.forecast(params, batch).stages) for p in (plain, pipe)]
for name, temporaries in zip(work, held, strict=True):
    print(f"{name}: {temporaries / 2**20:.1f} MiB of temporaries")
assert held[1] < held[0]

# %% [markdown]
# ## What to look out for
#
# - The table has one row for each word, as `nn.Embed` keeps it. A head of its own (not tied) is a parameter of that shape,
#   `self.param("head", nn.initializers.normal(0.02), (VOCAB, WIDTH))`, not the kernel of an `nn.Dense`, which is the transpose.
# - A tied table lives with its optimizer state on the first stage, where the embedding reads it. Each stage of the head receives
#   the rows of its slices once a step, and sends their gradients back once a step.
# - The backward makes the logits of each slice again: a fourth more work in the head than with logits that are kept.
# - More slices (`num_slices`) can be cut more evenly and take less memory; very small products make poor use of a GPU.
# - `label_smoothing`, `z_loss` and `ignore_index` are terms of the loss. A loss that counts tokens divides by their number:
#   `loss.sum() / jnp.sum(labels != -100)`, with `weight="auto"` in the pipeline.
