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
# answers four digits with the same digits in some order, and prefers them sorted.

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
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))


class LM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 64)(tokens) + self.param("positions", nn.initializers.normal(0.1), (9, 64))[: tokens.shape[1]]
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(11)(nn.LayerNorm()(x))


model = LM()

# %% [markdown]
# ## A model that knows both answers
#
# A sequence is four digits, a separator (10) and four digits. The first model has seen digits in rising and in falling order,
# equally often.


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


def likelihood_loss(params, batch):
    return -log_likelihood(params, jnp.concatenate([batch["chosen"], batch["rejected"]])).mean()


first = jaxpp.Pipeline(likelihood_loss, optax.adam(3e-3), num_stages=2)
tuned = first.init(lambda key: model.init(key, pairs_of(0)["chosen"])["params"], jax.random.key(0), pairs_of(0))
for step in range(200):
    tuned, metrics = first.step(tuned, pairs_of(step))
print(f"loss of the first model: {metrics.loss:.2f}")

# %% [markdown]
# ## Policy and reference in one loss
#
# Both answers go through a model as one batch. `optax.set_to_zero` says that the reference does not change; jaxpp then computes no
# gradient for it, keeps nothing for its backward, and holds no optimizer state for it. The loss needs no `stop_gradient`.

# %%
BETA = 0.1


def dpo_loss(params, batch):
    both = jnp.concatenate([batch["chosen"], batch["rejected"]])
    gains = log_likelihood(params["policy"], both) - log_likelihood(params["reference"], both)
    chosen, rejected = jnp.split(gains, 2)
    margin = BETA * (chosen - rejected)
    return -nn.log_sigmoid(margin).mean(), {"prefers": (margin > 0).mean(), "margin": margin.mean()}


optimizer = optax.multi_transform(
    {"policy": optax.adam(3e-4), "reference": optax.set_to_zero()}, lambda params: {name: name for name in params}
)
pipe = jaxpp.Pipeline(dpo_loss, optimizer, num_stages=4, has_aux=True)
reference = jaxpp.gather(tuned.params)
state = pipe.init({"policy": reference, "reference": reference}, pairs_of(0))
print(pipe.stages)

# %% [markdown]
# The reference has no backward, so a stage takes more of its layers than of the policy's, and all stages cost about the same.

# %%
for step in range(100):
    state, metrics = pipe.step(state, pairs_of(1000 + step))
    if step % 25 == 24:
        print(f"step {step + 1}: loss {metrics.loss:.3f}, prefers the chosen answer {metrics.aux['prefers']:.0%}")
assert metrics.aux["prefers"] > 0.95

# %% [markdown]
# The policy now finds sorted answers likelier, by what it says of pairs that it has not seen:


# %%
def likelihoods(params, batch):
    return {name: jnp.exp(log_likelihood(params["policy"], batch[name])) for name in ("chosen", "rejected")}


found = pipe.apply(state, pairs_of(5000), fn=likelihoods)
print({name: f"{float(np.mean(each)):.2f}" for name, each in found.items()})

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
# ## What to look out for
#
# - Another preference loss, such as that of IPO or KTO, is another function of the same log-likelihoods.
# - A reference that is asked for the same pairs in every epoch can be asked once: put its log-likelihoods into the batch, from
#   `jaxpp.Forward`, and leave it out of the loss.
# - With [LoRA](fine_tune_with_lora.py) the reference is the policy without its thin matrices, so no copy is needed.
# - Answers of different lengths are padded, with a mask in `log_likelihood`. The loss is a mean over pairs, so no `weight` is
#   needed.
