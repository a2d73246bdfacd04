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
# # Fine-tune with LoRA
#
# Low-rank adaptation (LoRA, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685)) leaves the weights of a trained model as they are
# and learns for each matrix the product of two thin ones, which is added to it. In jaxpp that is a model with more parameters, of
# which the optimizer trains the thin ones: the large ones have no gradient and no optimizer state.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any


# %%
class LoRADense(nn.Module):
    """A dense layer, and a product of two matrices of a small rank beside it; the second begins as zeros."""

    features: int
    rank: int = 4

    @nn.compact
    def __call__(self, x):
        base = nn.Dense(self.features, name="base")(x)
        down = self.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], self.rank))
        up = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return base + x @ down @ up


def network(dense):
    return nn.Sequential([*(layer for _ in range(6) for layer in (dense(128), nn.relu)), dense(10)])


adapted = network(LoRADense)

# %% [markdown]
# ## A model that exists
#
# It knows the digits 0 to 4. With the thin matrices at zero, the adapted model is that model.

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}


def batch_of(step, classes):
    rows = np.random.default_rng(step).choice(np.flatnonzero(np.isin(labels, classes)), 128)
    return {name: leaf[rows] for name, leaf in digits.items()}


def loss_fn(params, batch):
    logits = adapted.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


few, all_digits = range(5), range(10)
whole = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4)
trained = whole.init(lambda key: adapted.init(key, digits["x"][:1])["params"], jax.random.key(0), batch_of(0, few))
for step in range(100):
    trained, metrics = whole.step(trained, batch_of(step, few))
print(f"loss on the digits 0 to 4: {metrics.loss:.3f}")
print(f"loss on all digits: {whole.evaluate(trained, batch_of(0, all_digits)).loss:.3f}")

# %% [markdown]
# ## Train the thin matrices alone
#
# A function gives each parameter a label by its path, and `optax.multi_transform` each label an optimizer. `trains` says the same
# to jaxpp by pattern: leaves that it does not name are the same arrays after every step.


# %%
def label(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "lora" if "lora" in path[-1].key else "base", params)


optimizer = optax.multi_transform({"lora": optax.adam(1e-2), "base": optax.set_to_zero()}, label)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=4, trains="*/lora_?")
params = jaxpp.gather(trained.params)
state = pipe.init(params, batch_of(0, all_digits))
base = state.params["layers_0"]["base"]["kernel"]
for step in range(200):
    state, metrics = pipe.step(state, batch_of(step, all_digits))
print(f"loss on all digits: {metrics.loss:.3f}")
assert metrics.loss < 0.2
assert state.params["layers_0"]["base"]["kernel"] is base

# %% [markdown]
# ## What it costs
#
# The forecast of the step, beside the same pipeline that trains everything. The optimizer holds two moments of the thin matrices:

# %%
forecasts = pipe.forecast(params, batch_of(0, all_digits)), whole.forecast(params, batch_of(0, all_digits))
for thin, full in zip(*(forecast.stages for forecast in forecasts), strict=True):
    print(f"stage {thin.stage}: {thin.num_bytes / 1024:.0f} KiB, or {full.num_bytes / 1024:.0f} KiB if everything is trained")

sizes = {"lora": 0, "base": 0}
for name, leaf in zip(jax.tree.leaves(label(params)), jax.tree.leaves(params), strict=True):
    sizes[name] += leaf.size
held = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
print(f"parameters: {sizes}; numbers that the optimizer holds: {held:,}")
assert held == 2 * sizes["lora"] + 1

# %% [markdown]
# ## Check it, and take it along
#
# A step equals the plain step on one device. After the training the product can be added to the matrix, and the model has its old
# form:

# %%
print(pipe.verify(state, batch_of(1000, all_digits)))


def merged(layer):
    return {"kernel": layer["base"]["kernel"] + layer["lora_a"] @ layer["lora_b"], "bias": layer["base"]["bias"]}


plain = {name: merged(layer) for name, layer in jaxpp.gather(state.params).items()}
rows = digits["x"][:64]
found = pipe.apply(state, rows, fn=lambda params, x: adapted.apply({"params": params}, x))
np.testing.assert_allclose(found, network(nn.Dense).apply({"params": plain}, rows), rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## What to look out for
#
# - Before the first adapter nothing goes backward. An adapter in every layer needs a backward of the activations through all of
#   them; what is saved is the gradients of the large matrices, a third of the FLOPs of a step, and their optimizer state.
# - Give Orbax `{"lora": ...}` with the thin leaves alone for a small checkpoint, or the whole state as in
#   [Save and resume](save_and_resume.py).
# - Several tasks with adapters of their own are a bank: [Save a bank](save_a_bank.py).
