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
# # Generate with a Hugging Face model
#
# The Flax models of Hugging Face's `transformers` have a cache, `past_key_values`, and jaxpp generates with them as they are. This
# recipe makes a small GPT-2 from a configuration, without downloading weights, and compares its tokens with those of
# `model.generate`. (Version 5 of `transformers` has removed the Flax models: `pip install "transformers<5"`.)

# %%
import jax
import jax.numpy as jnp
import numpy as np
import transformers

import jaxpp

transformers.logging.set_verbosity_error()
jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=4, n_head=4, tie_word_embeddings=False)
model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
# With weights: model, params = transformers.FlaxGPT2LMHeadModel.from_pretrained("gpt2", _do_init=False)

# %% [markdown]
# ## Over four devices
#
# `jaxpp.Forward` takes any function of the parameters; it decides where each parameter lives. `forward.init` makes the parameters
# there, or copies those that you have: `forward.init(params, tokens)`.


# %%
def logits_of(params, tokens):
    return model(tokens, params=params).logits


tokens = np.zeros((4, 64), np.int32)
forward = jaxpp.Forward(logits_of, num_stages=4)
params = forward.init(lambda key: model.init_weights(key, (1, 64)), jax.random.key(0), tokens)
print(forward.stages)

# %% [markdown]
# ## The cache
#
# `model.init_cache(1, length)` makes an empty cache for one sequence. These models also want to be told the positions of the new
# tokens and which places of the cache count. Both follow from the number of tokens so far, so it is kept beside the cache.

# %%
LENGTH = 64
shapes = jax.eval_shape(lambda: model.init_cache(1, LENGTH))
cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
carry = {"cache": cache, "used": jnp.int32(0)}


def next_logits(params, carry, tokens):
    positions = carry["used"] + jnp.arange(tokens.shape[1])[None]
    given = {"past_key_values": carry["cache"], "position_ids": positions, "attention_mask": jnp.ones((1, LENGTH), int)}
    output = model(tokens, params=params, **given)
    return {"cache": output.past_key_values, "used": carry["used"] + tokens.shape[1]}, output.logits


# %% [markdown]
# ## Generate
#
# The prompts may have any lengths. `eos_token_id` ends a sequence.

# %%
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 300, length) for length in (3, 12, 7, 20, 1, 9)]
written = forward.generate(params, next_logits, carry, prompts, num_tokens=16, stop=config.eos_token_id).collect()
for made in written[:3]:
    print(made)

# %% [markdown]
# `model.generate` on one device makes the same tokens:

# %%
whole = jaxpp.gather(params)
for prompt, made in zip(prompts, written, strict=True):
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt[None], params=whole, **options).sequences[0, len(prompt) :]
    np.testing.assert_array_equal(made, wanted[: len(made)])

# %% [markdown]
# To sample, pass `sample=jaxpp.Sampling(temperature=0.8, top_k=50, top_p=0.95)` and a key. `model.generate` draws other tokens,
# because it has other keys: jaxpp gives every sequence and every position a key of its own, so what is drawn does not depend on the
# other sequences.
#
# ## What to look out for
#
# - Encode first, decode after: prompts are token numbers, `tokenizer(text)["input_ids"]`, and `tokenizer.decode(made)` makes text.
# - All tokens are in the vocabulary that the model has. A vocabulary that was padded to a multiple of 64 has numbers that the
#   tokenizer does not know; let `next_logits` return `logits[..., :tokenizer.vocab_size]`.
# - `attention_mask` covers the whole cache. Which places were written already, the model's cache knows itself.
# - The cache counts `LENGTH` places for each sequence in flight, and one sequence more: make it as long as prompts and answers are.
