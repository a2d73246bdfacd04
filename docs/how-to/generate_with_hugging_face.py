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
import numpy as np
import transformers

import jaxpp

transformers.logging.set_verbosity_error()
jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
config = transformers.GPT2Config(**sizes, eos_token_id=299, bos_token_id=299, tie_word_embeddings=False)
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
# `jaxpp.decoder` makes what `generate` asks for: a function of one sequence, and its cache without tokens, here with room for 64.
# It tells the model the positions of the new tokens and which places of the cache count. (It takes models of Linen and NNX too. For
# others, write the function yourself: [Generate text](generate_text.md) shows one.)

# %%
next_logits, carry = jaxpp.decoder(model, max_length=64)

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
# `model.generate` on one device makes the same tokens. It takes prompts of one length, so we fill the shorter ones up on the left,
# and a mask says which tokens count:

# %%
longest = max(map(len, prompts))
padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
mask = np.stack([np.arange(longest) >= longest - len(prompt) for prompt in prompts]).astype(int)
options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
wanted = model.generate(padded, attention_mask=mask, params=jaxpp.gather(params), **options).sequences[:, longest:]
for made, row in zip(written, wanted, strict=True):
    np.testing.assert_array_equal(made, row[: len(made)])

# %% [markdown]
# To sample, pass `sample=jaxpp.Sampling(temperature=0.8, top_k=50, top_p=0.95)` and a key. `model.generate` draws other tokens,
# because it has other keys: jaxpp gives every sequence and every position a key of its own, so what is drawn does not depend on the
# other sequences.
#
# ## What to look out for
#
# - Encode first, decode after: prompts are token numbers, `tokenizer(text)["input_ids"]`, and `tokenizer.decode(made)` makes text.
# - All tokens are in the vocabulary that the model has. A vocabulary that was padded to a multiple of 64 has numbers that the
#   tokenizer does not know; wrap `next_logits` in a function that returns `logits[..., :tokenizer.vocab_size]`.
# - The cache counts `max_length` places for each sequence in flight, and one sequence more: make it as long as prompts and answers
#   are.
