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
# # Train adapters on an int8 base
#
# The weights of a trained model are rounded to int8, with one scale for each output channel, and stay as they are. What learns is
# a pair of thin matrices beside each weight (LoRA). The int8 weights are parameters like others: they lie on the stages that use
# them, in one byte each. jaxpp sees by their type that they have no gradient, and the optimizer is not given them.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# First a model with floating weights, which learns to tell upright digits apart. A few steps on one device are enough here.

# %%
images, labels = load_digits(return_X_y=True)
batch = {"x": images[:256].astype("f4") / 16, "y": labels[:256]}


# %%
class Classifier(nn.Module):
    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = self.dense(256, name="in")(x)
        for k in range(4):
            x = x + self.dense(256, name=f"h_{k}")(nn.gelu(x))
        return self.dense(10, name="out")(x)


def loss_of(model):
    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn


# %%
plain, adam = Classifier(), optax.adam(1e-3)
base = jax.jit(plain.init)(jax.random.key(0), batch["x"])["params"]
opt_state, grad_fn = adam.init(base), jax.jit(jax.grad(loss_of(plain)))
for _ in range(30):
    updates, opt_state = adam.update(grad_fn(base, batch), opt_state)
    base = optax.apply_updates(base, updates)
print("upright:", loss_of(plain)(base, batch))

# %% [markdown]
# The same model with rounded weights. `lora_b` begins as zeros, so at first the adapters change nothing.


# %%
def quantised(kernel):
    """The weights rounded to whole numbers from -127 to 127, and the scale of each output channel."""
    scale = jnp.abs(kernel).max(axis=0) / 127
    return jnp.round(kernel / scale).astype(jnp.int8), scale


# %%
class AdaptedDense(nn.Module):
    features: int
    rank: int = 4

    @nn.compact
    def __call__(self, x):
        shape = x.shape[-1], self.features
        q = self.param("q", nn.initializers.zeros, shape, jnp.int8)
        scale = self.param("scale", nn.initializers.ones, (self.features,))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        a = self.param("lora_a", nn.initializers.lecun_normal(), (shape[0], self.rank))
        b = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return x @ (q.astype(x.dtype) * scale) + (x @ a) @ b + bias


# %%
model = Classifier(AdaptedDense)
params = jax.jit(model.init)(jax.random.key(1), batch["x"])["params"]
for name, layer in base.items():
    q, scale = quantised(layer["kernel"])
    params[name] |= {"q": q, "scale": scale, "bias": layer["bias"]}

# %% [markdown]
# A task that the base has not seen: digits lying on their side. Scales and biases are of floating type, and would learn. So they
# get `optax.set_to_zero()`, as in [Freeze parameters](freeze_parameters.py). With plain `optax.adam(3e-3)` they would learn along
# with the adapters; the int8 weights need no word in either case.

# %%
turned = np.rot90(images[:256].reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
batch = {"x": turned.astype("f4") / 16, "y": labels[:256]}


def label(path, _):
    return "adapter" if path[-1].key in ("lora_a", "lora_b") else "base"


optimizer = optax.partition(
    {"adapter": optax.adam(3e-3), "base": optax.set_to_zero()},
    jax.tree_util.tree_map_with_path(label, params),
)
pipe = jaxpp.Pipeline(loss_of(model), optimizer, num_stages=4, num_microbatches=4)
state = pipe.init(params, batch)
print(pipe.stages)

# %%
losses = []
for _ in range(20):
    state, metrics = pipe.step(state, batch)
    losses.append(float(metrics.loss))
print("lying:", losses[0], "->", losses[-1])
assert losses[-1] < losses[0] / 2

# %% [markdown]
# The forecast shows what a device holds. The base takes a byte for each weight among the parameters, and has no gradients, no
# moments and no residuals. Weights in floating type are made where a product reads them, in the forward and again in the backward,
# and are temporaries there.

# %%
print(pipe.forecast(params, batch))
int8_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if leaf.dtype == jnp.int8)
moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
print(f"int8 base: {int8_bytes / 1024:.0f} KiB; moments of all stages: {moments / 1024:.0f} KiB")
assert moments < int8_bytes / 2

# %% [markdown]
# One device comes to the same adapters. In plain JAX the int8 weights are kept out of what is differentiated:

# %%
trained = {name: {key: layer[key] for key in ("lora_a", "lora_b")} for name, layer in params.items()}
adam = optax.adam(3e-3)


def adapter_loss(trained, batch):
    return loss_of(model)({name: params[name] | trained[name] for name in params}, batch)


opt_state, grad_fn = adam.init(trained), jax.jit(jax.grad(adapter_loss))
for _ in range(20):
    updates, opt_state = adam.update(grad_fn(trained, batch), opt_state)
    trained = optax.apply_updates(trained, updates)

for name, layer in trained.items():
    np.testing.assert_array_equal(state.params[name]["q"], params[name]["q"])
    for key, wanted in layer.items():
        np.testing.assert_allclose(state.params[name][key], wanted, rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## What to look out for
#
# - `state.opt_state` has `optax.MaskedNode()` in place of the moments of int8 weights, as `optax.masked` leaves them. Checkpoints,
#   `jaxpp.gather`, sharding and replicas treat int8 weights like other parameters.
# - `jaxpp.value_and_grad` takes them with `allow_int=True`, and returns `float0` for them, both as in JAX.
# - Weights in floating type are temporaries of a forward or a backward, which no other program reads, where cheap operations make
#   them: casts, scales, shifts, and look-ups in a table of at most 256 numbers (NF4). A product of adapters, `a @ b`, is made once
#   a step and kept as long: write `(x @ a) @ b`.
# - `jnp.int4` is refused, for JAX cannot pass it to programs that are compiled ahead of time. Keep two numbers in a `uint8`, and
#   take them apart with `q & 0xF` and `q >> 4`.
# - The same holds in an NNX model: let the base hold `nnx.Param(q)`, wrap it in `nnx.LoRA(..., base_module=base)`, and split the
#   model with `nnx.split(model, nnx.Param)`, which finds `nnx.LoRAParam` too.
