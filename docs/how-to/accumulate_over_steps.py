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
# # Accumulate gradients over several steps
#
# A pipeline accumulates gradients already: `num_microbatches=16` splits one batch into sixteen parts, and the optimizer sees
# their mean. That is usually the answer to "the batch does not fit". `optax.MultiSteps` accumulates over several calls of
# `pipe.step` instead, and updates the parameters at every k-th call. It helps if the parts of a large batch do not arrive at the
# same time. This recipe shows that both give the same parameters, and what the difference costs.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp
from jaxpp.schedule import make, simulate

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:512].astype("f4") / 16, "y": labels[:512]}
layers = [layer for _ in range(4) for layer in (nn.Dense(64), nn.tanh)]
model = nn.Sequential([*layers, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


init_params = jax.jit(model.init)(jax.random.key(0), batch["x"])

# %% [markdown]
# **One step over the whole batch**, in 16 microbatches of 32 examples:

# %%
pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1, momentum=0.9), num_stages=4, num_microbatches=16)
state = pipe.init(init_params, batch)
for _ in range(3):
    state, metrics = pipe.step(state, batch)

# %% [markdown]
# **Four calls over quarters of the batch**, in 4 microbatches of 32 examples each. `MultiSteps` keeps the running mean of the
# gradients in the optimizer state. Its `gradient_step` counts updates, while `state.step` of jaxpp counts calls.

# %%
optimizer = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=4)
quarters = [jax.tree.map(lambda leaf, k=k: leaf[128 * k : 128 * (k + 1)], batch) for k in range(4)]
by_parts = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, num_microbatches=4)
other = by_parts.init(init_params, quarters[0])
for _ in range(3):
    for quarter in quarters:
        other, metrics = by_parts.step(other, quarter)
    assert optimizer.has_updated(other.opt_state)
print("calls:", other.step, "updates:", other.opt_state.gradient_step)
assert (other.step, other.opt_state.gradient_step, state.step) == (12, 3, 3)

# %%
for found, wanted in zip(jax.tree.leaves(other.params), jax.tree.leaves(state.params), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

# %% [markdown]
# The parameters are equal. The costs are not: the pipeline fills and drains at every call, and `MultiSteps` keeps an array for
# each gradient between the calls.

# %%
whole = simulate(make("1f1b", num_ranks=4, num_microbatches=16))
part = simulate(make("1f1b", num_ranks=4, num_microbatches=4))
print(f"one step:   time {whole.makespan}, bubble {whole.bubble_fraction:.1%}")
print(f"four calls: time {4 * part.makespan}, bubble {part.bubble_fraction:.1%}")
for name, found in (("one step:  ", state), ("four calls:", other)):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(found.opt_state))
    print(f"{name} optimizer state of {size / 1024:.0f} KiB")

# %% [markdown]
# ## What to look out for
#
# - More microbatches do not need more memory for activations under `1f1b`: each stage holds residuals for at most `num_stages`
#   microbatches, however many there are. Under `gpipe` a stage holds residuals for all microbatches. (Residuals are what a
#   forward pass keeps for its backward pass.)
# - `metrics.loss` and `metrics.grad_norm` are those of one call. The gradient that the optimizer uses at the k-th call is the
#   mean over k calls, and its norm is smaller in general.
# - `MultiSteps` averages calls with equal weight. If the last part has fewer examples, the result is not the mean over all
#   examples.
# - A learning rate schedule inside `MultiSteps` counts updates, not calls.
