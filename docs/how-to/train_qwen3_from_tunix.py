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
# # Train tunix's Qwen3 on padded text
#
# [tunix](https://github.com/google/tunix) has the language models that people fine-tune now as NNX modules. This recipe trains its
# Qwen3, made small, on the help texts of Python: a tokenizer of Hugging Face's `tokenizers` cuts them into numbers, and
# [grain](https://google-grain.readthedocs.io) shuffles and batches them. Texts have different lengths, so the loss is a mean over
# the tokens that are no padding, and `weight` tells jaxpp so. (`pip install google-tunix grain tokenizers`)

# %%
import pydoc_data.topics

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tunix.models.qwen3.model import ModelConfig, Qwen3

import jaxpp

jax.config.update("jax_num_cpu_devices", 2)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## The data
#
# The tokenizer learns from the texts, so nothing is downloaded. It pads each text to 48 tokens.

# %%
topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
texts = [part.strip() for text in topics for part in text.split("\n\n") if len(part.strip()) > 30]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["[PAD]"], initial_alphabet=alphabet, show_progress=False)
)
tokenizer.enable_padding(pad_id=0, length=48)
tokenizer.enable_truncation(48)


def encode(text):
    found = tokenizer.encode(text)
    return {"tokens": np.array(found.ids, "i4"), "mask": np.array(found.attention_mask, "f4")}


batches = iter(grain.MapDataset.source(texts).seed(0).shuffle().repeat().map(encode).batch(32))
batch = next(batches)
print(f"{len(texts)} texts; of the first batch {batch['mask'].mean():.0%} are tokens, and the rest is padding")

# %% [markdown]
# ## The loss
#
# `nnx.split` divides the model into its description and its parameters, as in [Use an NNX model](use_nnx.py). The loss divides by
# the number of tokens of its microbatch. The mean over a step weights each microbatch by that number,
# and is the mean over all tokens.

# %%
config = ModelConfig(
    num_layers=2,
    vocab_size=tokenizer.get_vocab_size(),
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
)
graphdef, params = nnx.split(Qwen3(config, rngs=nnx.Rngs(0)))


def loss_fn(params, batch):
    tokens, mask = batch["tokens"], batch["mask"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    logits, _ = nnx.merge(graphdef, params)(tokens, positions, None, causal & (mask[:, None] > 0))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def weight(batch):
    return batch["mask"][:, 1:].sum()


# %% [markdown]
# ## Train
#
# `verify` compares the step with plain JAX on one device, leaf by leaf.

# %%
pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), num_stages=2, num_microbatches=4, weight=weight)
state = pipe.init(params, batch)
print(pipe.stages)

# %%
print(pipe.verify(state, batch))
before = pipe.evaluate(state, batch).loss
for _ in range(60):
    state, metrics = pipe.step(state, next(batches))
after = pipe.evaluate(state, batch).loss
print(f"loss of the first batch: {before:.3f}, and after 60 steps {after:.3f}")
assert after < before - 1.0

# %% [markdown]
# The loss of the batch is the mean over all its tokens, as if it had never been divided:

# %%
np.testing.assert_allclose(after, jax.jit(loss_fn)(jaxpp.gather(state.params), batch), rtol=1e-5)

# %% [markdown]
# ## What to look out for
#
# - Without `weight`, a microbatch with little text would count as much as one with much.
# - tunix's Gemma 3, Llama 3 and Qwen2 train in the same way, by `tunix.models`; the next recipe does it with Gemma 3,
#   [Fine-tune Gemma 3 with qwix](fine_tune_gemma3_with_qwix.py).
# - `ModelConfig.qwen3_0p6b()` and its neighbours have the real sizes. Make them where they belong: `pipe.init(init_fn, key, batch)`
#   with a function that returns `nnx.split(Qwen3(config, rngs=nnx.Rngs(key)))[1]`.
