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
# # Train on rewards with GRPO
#
# Group relative policy optimization (GRPO, [arXiv:2402.03300](https://arxiv.org/abs/2402.03300)) lets a language model answer each
# question several times, scores the answers, and makes those likelier that scored better than the others of their group. One
# pipeline does both here: it generates with the state that it trains, so no weight is copied and there is no second model. The task
# can be checked by anyone: additions of two digits.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from models.gpt import GPT

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## A model with a cache
#
# `decode=True` is a second way to call the GPT of `models/`: it keeps what it has read in the collection `cache`, as in
# [Generate text while you train](generate_text.py). A question is three tokens, `3 7 +`, and an answer two, `1 0`; 10 stands for
# the sign.

# %%
model = GPT(vocab_size=11, max_length=5, width=64, depth=1, dropout=0.0)
decoder = model.clone(decode=True)


def next_logits(params, cache, tokens):
    logits, new = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
    return new["cache"], logits


shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.ones((1, 5), int))["cache"]
empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

# %% [markdown]
# ## The loss
#
# Each sampled token has the advantage of its answer, and the log-probability with which it was drawn. The loss raises the ratio of
# the probabilities, new over old, where the advantage is positive, and not by more than a fifth.


# %%
def log_probs(params, tokens):
    logits = nn.log_softmax(model.apply({"params": params}, tokens[:, :-1]))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[:, 2:, 0]  # of the two tokens of the answer


def grpo_loss(params, batch):
    ratio = jnp.exp(log_probs(params, batch["tokens"]) - batch["old"])
    gain = batch["advantage"][:, None]
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()


# %% [markdown]
# ## Begin with a model that errs
#
# Any parameters will do, such as those of a checkpoint. Here a few steps on one device make them, from sums of which many are
# wrong.

# %%
GROUP, QUESTIONS = 8, 16
questions = [(a, b) for a in range(10) for b in range(10)]


def wrong_sums(step, count=128):
    rng = np.random.default_rng(step)
    a, b = rng.integers(0, 10, (2, count))
    total = np.where(rng.random(count) < 0.5, a + b, rng.integers(0, 19, count))
    return np.stack([a, b, np.full(count, 10), total // 10, total % 10], 1).astype("i4")


# %%
adam = optax.adam(2e-3)


@jax.jit
def supervised_step(params, opt_state, tokens):
    grads = jax.grad(lambda params: -log_probs(params, tokens).mean())(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


params = jax.jit(model.init)(jax.random.key(0), wrong_sums(0))["params"]
opt_state = adam.init(params)
for step in range(200):
    params, opt_state = supervised_step(params, opt_state, wrong_sums(step))

# %%
shape = {"tokens": np.zeros((GROUP * QUESTIONS, 5), "i4"), "old": np.zeros((GROUP * QUESTIONS, 2), "f4")}
shape["advantage"] = np.zeros(GROUP * QUESTIONS, "f4")
pipe = jaxpp.Pipeline(grpo_loss, optax.adam(4e-4), num_stages=2)
state = pipe.init(params, shape)
print(pipe.stages)


# %% [markdown]
# ## Ask, score, train
#
# `generate` takes the state, yields every token with its log-probability, and leaves the state as it is. The score is 1 for the
# right sum and 0 for any other, computed on the host.


# %%
def answers(state, asked, key):
    """The sampled answers, a row for each prompt, and the log-probability of each token."""
    tokens, old = np.zeros((len(asked), 2), "i4"), np.zeros((len(asked), 2), "f4")
    prompts = [[a, b, 10] for a, b in asked]
    options = {"num_tokens": 2, "sample": jaxpp.Sampling(temperature=1.0), "group_size": 16}
    for token in pipe.generate(state, next_logits, empty, prompts, key=key, **options):
        tokens[token.prompt, token.index], old[token.prompt, token.index] = token.token, token.logprob
    return tokens, old


# %%
def scored(asked, tokens):
    return np.array([10 * first + second == a + b for (a, b), (first, second) in zip(asked, tokens, strict=True)], "f4")


def experience(state, step):
    """A batch of answers and their advantages, and the mean score."""
    rows = np.random.default_rng(step).choice(len(questions), QUESTIONS, replace=False)
    asked = [questions[row] for row in rows for _ in range(GROUP)]
    tokens, old = answers(state, asked, jax.random.key(step))
    score = scored(asked, tokens)
    groups = score.reshape(QUESTIONS, GROUP)
    advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    prompts = np.array([[a, b, 10] for a, b in asked], "i4")
    return {"tokens": np.concatenate([prompts, tokens], 1), "old": old, "advantage": advantage.reshape(-1)}, score.mean()


# %%
scores = []
for step in range(20):
    batch, score = experience(state, step)
    scores.append(score)
    for _ in range(2):  # the second step is where the ratio differs from 1
        state, metrics = pipe.step(state, batch)
    if step % 5 == 4:
        print(f"step {step + 1}: right {np.mean(scores[-5:]):.0%}")
assert np.mean(scores[-5:]) > np.mean(scores[:5]) + 0.1

# %% [markdown]
# ## Check it
#
# A step equals the plain step on one device. The advantages of a group add up to 0, and so does the loss of answers that were just
# sampled, but for rounding; `verify` compares such a loss relative to the terms that cancel in it. And the log-probabilities that
# came with the tokens are those of the loss:

# %%
batch, _ = experience(state, 1000)
print(pipe.verify(state, batch))
again = pipe.apply(state, batch["tokens"], fn=log_probs)
np.testing.assert_allclose(again, batch["old"], rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## What to look out for
#
# - A step consumes its state, so read all tokens of a generation before the next step, as the loop above does.
# - Many sequences in flight keep the stages busy: `group_size` sequences are computed together, and as many groups go round as
#   there are stages.
# - A term that keeps the model near a reference needs the reference's log-probabilities: put them into the batch, or its parameters
#   beside the policy's, as in [Learn preferences with DPO](learn_preferences_with_dpo.py).
# - Another loss can train the same state in turn, such as a supervised one on answers that people wrote: `pipe.other(loss)` makes
#   its pipeline, as in [Train a GAN](train_a_gan.py). Both have one optimizer, whose count of steps goes on from loss to loss.
