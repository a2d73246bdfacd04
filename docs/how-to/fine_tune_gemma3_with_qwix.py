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
# # Fine-tune Gemma 3 with qwix
#
# [qwix](https://github.com/google/qwix) adds low-rank adapters (LoRA) to an NNX model that exists, by the names of its modules.
# Here the model is tunix's Gemma 3, made small. To jaxpp the adapters are more parameters, and `trains` names them: the weights of
# the model get no gradient and no optimizer state. (`pip install google-tunix qwix`)

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.gemma3.model import Gemma3, ModelConfig

import jaxpp

jax.config.update("jax_num_cpu_devices", 2)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## The model with adapters
#
# The pattern names the modules that get an adapter. Both matrices of each are parameters, whose names end in `_lora_a` and
# `_lora_b`.

# %%
config = ModelConfig(
    num_layers=2,
    num_embed=128,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=1,
    sliding_window_size=16,
    param_dtype=jnp.float32,
)
base = Gemma3(config, rngs=nnx.Rngs(0))
lora = qwix.LoraProvider(module_path=".*(q_einsum|kv_einsum|gate_proj|up_proj|down_proj)", rank=4, alpha=8.0)
model = qwix.apply_lora_to_model(base, lora, **base.get_model_input(), rngs=nnx.Rngs(1))
graphdef, params, rest = nnx.split(model, nnx.Param, ...)

# %% [markdown]
# ## The loss
#
# The first tokens of each example are real, and the others are padding: the loss is the mean over the real ones, and `weight` is
# their number. What the model holds besides its parameters (`rest`) does not change, so the loss closes over it.

# %%
text = np.frombuffer(b"what one program writes to a pipe, another one reads. " * 50, "u1").astype("i4")


def batch_of(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(text) - 32, 16)[:, None] + np.arange(32)
    mask = np.arange(32) < rng.integers(8, 33, 16)[:, None]
    return {"tokens": text[rows] * mask, "mask": mask.astype("f4")}


def loss_fn(params, batch):
    tokens, mask = batch["tokens"], batch["mask"]
    positions = jnp.broadcast_to(jnp.arange(32), tokens.shape)
    causal = jnp.tril(jnp.ones((32, 32), bool))
    logits, _ = nnx.merge(graphdef, params, rest)(tokens, positions, None, causal & (mask[:, None] > 0))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def weight(batch):
    return batch["mask"][:, 1:].sum()


# %% [markdown]
# ## Train the adapters alone
#
# `trains` says which parameters a step changes, and `optax.multi_transform` gives the others an optimizer that holds nothing. With
# plain Adam in its place, `init` refuses and prints the function `label`.


# %%
def label(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "lora" if "_lora_" in jax.tree_util.keystr(path) else "base", params)


optimizer = optax.multi_transform({"lora": optax.adam(3e-2), "base": optax.set_to_zero()}, label)
pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=2, num_microbatches=4, weight=weight, trains="*_lora_*")
state = pipe.init(params, batch_of(0))
print(pipe.stages)

# %%
print(pipe.verify(state, batch_of(0)))
kernel = state.params["embedder"]["input_embedding"][...]
before = pipe.evaluate(state, batch_of(0)).loss
for step in range(200):
    state, metrics = pipe.step(state, batch_of(step))
after = pipe.evaluate(state, batch_of(0)).loss
held = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
print(f"loss {before:.3f}, and after 200 steps {after:.3f}; the optimizer holds {held:,} numbers")
assert after < before - 0.25
assert (state.params["embedder"]["input_embedding"][...] == kernel).all()

# %% [markdown]
# ## What to look out for
#
# - Here the model was never trained, so that the recipe needs no download, and its head cannot learn: with pretrained weights, the
#   adapters start from a model that writes.
# - Gemma's `param_dtype` is bfloat16 unless given. Adapters in bfloat16 lose small updates, so keep them in float32.
# - [Fine-tune with LoRA](fine_tune_with_lora.py) writes the adapters by hand, and says what a step with them costs;
#   [Train adapters on an int8 base](train_adapters_on_an_int8_base.py) has a base of eight bits.
