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
# # Learn preferences with DPO
#
# Direct preference optimization (DPO, [arXiv:2305.18290](https://arxiv.org/abs/2305.18290)) has pairs of answers, of which people
# prefer one. The model, called the policy, learns to make the preferred answer likelier than the other, compared with what a frozen
# copy of it, the reference, thinks of the two. Policy and reference run in one loss. This recipe has a small language model that
# answers four digits with the same digits in some order, and prefers them sorted. At the end the same model learns from answers
# without pairs, with the loss of KTO.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any


# %%
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        query, key, value = jnp.split(nn.Dense(3 * 64, use_bias=False)(x), 3, axis=-1)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), query @ key.mT / 8, -1e9)
        x = x + nn.Dense(64, use_bias=False)(nn.softmax(scores) @ value)
        return x + nn.Dense(64)(nn.relu(nn.Dense(128)(x)))


class LM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 64)(tokens) + self.param("positions", nn.initializers.normal(0.1), (9, 64))[: tokens.shape[1]]
        return nn.Dense(11)(Block()(x))


model = LM()

# %% [markdown]
# ## A model that knows both answers
#
# A sequence is four digits, a separator (10) and four digits. The first model has seen digits in rising and in falling order,
# equally often. Any parameters will do, such as those of a checkpoint; here a few steps on one device make them.


# %%
def pairs_of(step, count=64):
    prompts = np.random.default_rng(step).integers(0, 10, (count, 4))
    rising, separator = np.sort(prompts, 1), np.full((count, 1), 10)
    answers = {"chosen": rising, "rejected": rising[:, ::-1]}
    return {name: np.concatenate([prompts, separator, answer], 1).astype("i4") for name, answer in answers.items()}


# %%
def log_likelihood(params, tokens):
    """The logarithm of the probability of each answer, given its prompt: a number for each sequence."""
    logits = model.apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return -losses[:, 4:].sum(1)  # the answer begins behind the separator


# %%
adam = optax.adam(3e-3)


@jax.jit
def supervised_step(params, opt_state, batch):
    both = jnp.concatenate([batch["chosen"], batch["rejected"]])
    loss, grads = jax.value_and_grad(lambda params: -log_likelihood(params, both).mean())(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


reference = jax.jit(model.init)(jax.random.key(0), pairs_of(0)["chosen"])["params"]
opt_state = adam.init(reference)
for step in range(200):
    reference, opt_state, loss = supervised_step(reference, opt_state, pairs_of(step))
print(f"loss of the first model: {loss:.2f}")

# %% [markdown]
# ## Policy and reference in one loss
#
# Both answers go through a model as one batch. `optax.set_to_zero` says that the reference does not change; jaxpp then computes no
# gradient for it, keeps nothing for its backward, and holds no optimizer state for it. The loss needs no `stop_gradient`.

# %%
BETA = 0.5


def dpo_loss(params, batch):
    both = jnp.concatenate([batch["chosen"], batch["rejected"]])
    gains = log_likelihood(params["policy"], both) - log_likelihood(params["reference"], both)
    chosen, rejected = jnp.split(gains, 2)
    margin = BETA * (chosen - rejected)
    return -nn.log_sigmoid(margin).mean(), {"prefers": (margin > 0).mean(), "margin": margin.mean()}


optimizer = optax.multi_transform(
    {"policy": optax.adam(1e-4), "reference": optax.set_to_zero()}, lambda params: {name: name for name in params}
)
pipe = jaxpp.Pipeline(dpo_loss, optimizer, num_stages=4, has_aux=True)
state = pipe.init({"policy": reference, "reference": reference}, pairs_of(0))
print(pipe.stages)

# %% [markdown]
# The reference has no backward, so a stage takes more of its layers than of the policy's, and all stages cost about the same.

# %%
for step in range(40):
    state, metrics = pipe.step(state, pairs_of(1000 + step))
    if step % 20 == 19:
        print(f"step {step + 1}: loss {metrics.loss:.3f}, prefers the chosen answer {metrics.aux['prefers']:.0%}")
assert metrics.aux["prefers"] > 0.95

# %% [markdown]
# The policy now finds sorted answers likelier, by what it says of pairs that it has not seen:


# %%
def of_both(params, tokens):
    return {name: log_likelihood(params[name], tokens) for name in ("policy", "reference")}


def shown(state, pairs):
    found = pipe.apply(state, np.concatenate([pairs["chosen"], pairs["rejected"]]), fn=of_both)
    chances = {name: np.exp(each).reshape(2, -1).mean(1) for name, each in found.items()}
    for name, (chosen, rejected) in chances.items():
        print(f"{name}: probability of sorted answers {chosen:.2f}, of reversed answers {rejected:.2f}")
    return chances["policy"] / chances["reference"]


more, less = shown(state, pairs_of(5000))
assert more > 1 > 10 * less

# %% [markdown]
# ## Check it
#
# A step equals the plain step on one device, and the reference has the bits that it came with. The optimizer holds two moments of
# the policy, and nothing of the reference:

# %%
print(pipe.verify(state, pairs_of(2000)))
jax.tree.map(np.testing.assert_array_equal, jaxpp.gather(state.params["reference"]), reference)
count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
assert count(state.opt_state) == 2 * count(reference) + 1

# %% [markdown]
# ## Answers without pairs: KTO
#
# KTO ([arXiv:2402.01306](https://arxiv.org/abs/2402.01306)) has single answers, each desirable or not. An answer counts by how far
# its gain over the reference lies above a reference point, or below it. The reference point is the divergence of the policy from
# the reference, estimated with answers that belong to other prompts; no gradient goes through it.
#
# This estimate is a mean over the batch. Inside the loss it would be a mean over a microbatch, another number for each, and jaxpp
# would warn that the loss compares examples with each other. So it is computed before the step, from all answers, and is a number
# in the batch that every microbatch gets. The same forward gives the reference's log-likelihoods, so the loss runs the policy
# alone.


# %%
def kto_loss(params, batch):
    gain = log_likelihood(params["policy"], batch["tokens"]) - batch["reference"]
    above = jnp.where(batch["desirable"], gain - batch["divergence"], batch["divergence"] - gain)
    return (1 - nn.sigmoid(BETA * above)).mean()


# %%
def answers_of(state, step):
    pairs, desirable = pairs_of(step), np.random.default_rng(step).random(64) < 0.5
    tokens = np.where(desirable[:, None], pairs["chosen"], pairs["rejected"])
    others = np.concatenate([tokens[:, :5], np.roll(tokens[:, 5:], 1, axis=0)], 1)  # answers to other prompts
    found = pipe.apply(state, np.concatenate([tokens, others]), fn=of_both)
    divergence = np.mean(found["policy"][64:] - found["reference"][64:]).clip(0)
    return {"tokens": tokens, "desirable": desirable, "reference": found["reference"][:64], "divergence": divergence}


# %%
state = pipe.init({"policy": reference, "reference": reference}, pairs_of(0))
kto = pipe.other(kto_loss)
state = kto.init(state, answers_of(state, 0))
for step in range(40):
    state, metrics = kto.step(state, answers_of(state, step))
print(f"loss {metrics.loss:.3f}")
more, less = shown(state, pairs_of(5000))
assert more > 1 > 10 * less
print(kto.verify(state, answers_of(state, 2000)))

# %% [markdown]
# ## What to look out for
#
# - Another preference loss, such as that of IPO, is another function of the same log-likelihoods.
# - A reference that is asked for the same pairs in every epoch can be asked once: put its log-likelihoods into the batch, as for
#   KTO, and leave it out of the loss.
# - With [LoRA](fine_tune_with_lora.py) the reference is the policy without its thin matrices, so no copy is needed.
# - Answers of different lengths are padded, with a mask in `log_likelihood`. The loss is a mean over answers or pairs, so no
#   `weight` is needed.
