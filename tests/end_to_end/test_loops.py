"""Training loops of their own kind: a variational autoencoder with its random codes, and an actor and critic of one body (PPO)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import jaxpp
from jaxpp.verify import compare

pytestmark = pytest.mark.usefixtures("x64")

DIGITS = (load_digits().images / 16).reshape(-1, 64)


class Autoencoder(nn.Module):
    """Codes drawn from the normal distributions that an encoder gives, and the pixels that a decoder makes of them."""

    num_codes: int = 4

    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(32, param_dtype=x.dtype)(x))
        mean, log_var = nn.Dense(self.num_codes, param_dtype=x.dtype)(h), nn.Dense(self.num_codes, param_dtype=x.dtype)(h)
        codes = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape, x.dtype)
        h = nn.relu(nn.Dense(32, param_dtype=x.dtype)(codes))
        return nn.Dense(64, param_dtype=x.dtype)(h), mean, log_var


def evidence_loss(params, batch, key):
    logits, mean, log_var = Autoencoder().apply(params, batch, key)
    pixels = optax.sigmoid_binary_cross_entropy(logits, batch).sum(-1)
    divergence = (mean**2 + jnp.exp(log_var) - 1 - log_var).sum(-1) / 2
    return (pixels + divergence).mean(), {"pixels": pixels.mean(), "divergence": divergence.mean()}


@pytest.mark.long
def test_a_variational_autoencoder_learns_and_equals_one_device():
    batch, key = jnp.asarray(DIGITS[:128]), jax.random.key(0)
    pipe = jaxpp.Pipeline(evidence_loss, optax.adam(1e-2), num_stages=3, num_microbatches=4, has_aux=True)
    state = pipe.init(lambda key: Autoencoder().init(key, batch, key), key, batch)
    pipe.verify(state, batch, key)
    told = []
    for step in range(30):
        state, metrics = pipe.step(state, batch, jax.random.fold_in(key, step))
        told.append(float(metrics.loss))
    assert np.mean(told[-3:]) < np.mean(told[:3]) - 10
    np.testing.assert_allclose(metrics.loss, metrics.aux["pixels"] + metrics.aux["divergence"], rtol=1e-12)


class Agent(nn.Module):
    """The log-probabilities of two actions, and the value of a state; both heads have one body."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(16, param_dtype=x.dtype)(x))
        return nn.log_softmax(nn.Dense(2, param_dtype=x.dtype)(x)), nn.Dense(1, param_dtype=x.dtype)(x)[:, 0]


def policy_loss(params, batch):
    """The clipped ratio of probabilities, the error of the values, and a reward for keeping actions open."""
    log_probs, values = Agent().apply(params, batch["seen"])
    taken = jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0]
    ratio, gain = jnp.exp(taken - batch["log_prob"]), batch["advantage"]
    policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return policy + 0.5 * ((values - batch["return"]) ** 2).mean() - 0.01 * entropy


def play(predict, rng, num_states=64):
    """Bandits: action 1 is right where the first number is positive; what was seen, done and gained."""
    seen = rng.normal(size=(num_states, 4))
    log_probs, values = map(np.asarray, predict(jnp.asarray(seen)))
    action = (rng.uniform(size=num_states) < np.exp(log_probs[:, 1])).astype(int)
    reward = np.where((seen[:, 0] > 0) == action, 1.0, 0.0)
    return {
        "seen": seen,
        "action": action,
        "log_prob": log_probs[np.arange(num_states), action],
        "advantage": reward - values,
        "return": reward,
    }


@pytest.mark.long
def test_an_actor_and_a_critic_of_one_body_learn_from_what_the_pipeline_plays():
    rng, agent = np.random.default_rng(0), Agent()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    pipe = jaxpp.Pipeline(policy_loss, optimizer, num_stages=3, num_microbatches=2)
    params = agent.init(jax.random.key(0), jnp.zeros((1, 4)))
    first = play(lambda seen: agent.apply(params, seen), rng)
    state, rewards = pipe.init(params, first), []

    def predict(params, seen):
        return agent.apply(params, seen)

    for _ in range(40):
        batch = play(functools.partial(pipe.apply, state, fn=predict), rng)  # with the newest parameters, where they are
        rewards.append(batch["return"].mean())
        for _ in range(3):
            state, _ = pipe.step(state, batch)
    pipe.verify(state, batch)
    compare("values", pipe.apply(state, batch["seen"], predict)[1], agent.apply(jaxpp.gather(state.params), batch["seen"])[1])
    assert np.mean(rewards[:2]) < 0.7 and np.mean(rewards[-5:]) > 0.8
