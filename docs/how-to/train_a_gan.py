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
# # Train a GAN
#
# A generative adversarial network has two players with a loss each: a generator makes images, a discriminator tells them from
# real ones, and they learn in turn. With jaxpp each player is a pipeline, and both pipelines train one state: the parameters of
# both networks lie on the devices once, whoever's turn it is. What is shown here for a GAN serves an actor and a critic too, or any
# losses with optimizers of their own.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
digits = load_digits().data[:1536].astype("f4") / 8 - 1  # images of 8 x 8, from -1 to 1


def batch_of(step):
    rng = np.random.default_rng(step)
    return {"real": digits[rng.choice(len(digits), 128)], "noise": rng.normal(size=(128, 32)).astype("f4")}


def network(width, num_outputs, activation):
    return nn.Sequential([*(layer for _ in range(3) for layer in (nn.Dense(width), activation)), nn.Dense(num_outputs)])


generator = network(128, 64, nn.relu)
discriminator = network(128, 1, nn.leaky_relu)
init_params = {
    "discriminator": jax.jit(discriminator.init)(jax.random.key(0), jnp.ones((1, 64))),
    "generator": jax.jit(generator.init)(jax.random.key(1), jnp.ones((1, 32))),
}

# %% [markdown]
# ## Two losses
#
# Each is a function of all parameters. The first asks the discriminator to take what is made for real, the second to tell the two
# apart.


# %%
def made(params, noise):
    return jnp.tanh(generator.apply(params["generator"], noise))


def generator_loss(params, batch):
    logits = discriminator.apply(params["discriminator"], made(params, batch["noise"]))
    return optax.sigmoid_binary_cross_entropy(logits, 1.0).mean()


def discriminator_loss(params, batch):
    real = discriminator.apply(params["discriminator"], batch["real"])
    fake = discriminator.apply(params["discriminator"], made(params, batch["noise"]))
    losses = optax.sigmoid_binary_cross_entropy(real, 0.9) + optax.sigmoid_binary_cross_entropy(fake, 0.0)
    return losses.mean(), {"told apart": ((real > 0) & (fake < 0)).mean()}


# %% [markdown]
# ## One optimizer, two pipelines
#
# `optax.multi_transform` has an optimizer for each player. `trains` says which parameters a pipeline's step changes; the others,
# and what the optimizer holds for them, are the same arrays before and after it. `other` makes the pipeline of the second loss. Its
# `init` takes the state of the first, and cuts the second loss so that every parameter stays where it is.

# %%
optimizer = optax.multi_transform(
    {"generator": optax.adam(1e-3, b1=0.5), "discriminator": optax.adam(1e-3, b1=0.5)},
    lambda params: {name: name for name in params},
)
gen = jaxpp.Pipeline(generator_loss, optimizer, trains="generator", num_stages=4)
disc = gen.other(discriminator_loss, trains="discriminator", has_aux=True)

state = gen.init(init_params, batch_of(0))
state = disc.init(state, batch_of(0))
print(gen.stages)
print(disc.stages)

# %% [markdown]
# In the second table the generator's stages have no backward and keep nothing for one. The discriminator judges real and made
# images on the same stages, though its loss asks for the real ones first.
#
# ## Take turns

# %%
for step in range(400):
    state, told = disc.step(state, batch_of(step))
    state, metrics = gen.step(state, batch_of(step))
    if step % 100 == 99:
        apart = f"discriminator {told.loss:.2f}, told apart {told.aux['told apart']:.0%}"
        print(f"step {step + 1}: {apart}; generator {metrics.loss:.2f}")

# %% [markdown]
# What the generator makes, and how far it is from the nearest real image, compared with noise of the same mean and variance:

# %%
noise = batch_of(1000)["noise"]
images = np.asarray(gen.apply(state, noise, fn=made))
random = np.random.default_rng(0).normal(digits.mean(0), digits.std(0), images.shape)
for row in images[:3].reshape(3, 8, 8).transpose(1, 0, 2):
    print("   ".join("".join(" .:-=+*#%@"[int(4.99 * (pixel + 1))] for pixel in line) for line in row))
far = [np.linalg.norm(found[:, None] - digits, axis=-1).min(1).mean() for found in (images, random)]
print(f"distance to the nearest digit: {far[0]:.2f}; of noise: {far[1]:.2f}")
assert far[0] < 0.9 * far[1]

# %% [markdown]
# ## Check it
#
# Both pipelines equal the plain step on one device:

# %%
print(gen.verify(state, batch_of(400)))
print(disc.verify(state, batch_of(400)))

# %% [markdown]
# And so do the turns. In plain JAX each player keeps what its own step made, and the other's parameters and moments stay:

# %%
params, opt_state = init_params, optimizer.init(init_params)
grads_of = {
    "discriminator": jax.jit(jax.grad(discriminator_loss, has_aux=True)),
    "generator": jax.jit(lambda params, batch: (jax.grad(generator_loss)(params, batch), {})),
}
state = disc.init(gen.init(init_params, batch_of(0)), batch_of(0))
for step in range(5):
    for name, pipe in (("discriminator", disc), ("generator", gen)):
        state, _ = pipe.step(state, batch_of(step))
        updates, new = optimizer.update(grads_of[name](params, batch_of(step))[0], opt_state, params)
        params = params | {name: optax.apply_updates(params, updates)[name]}
        opt_state = opt_state._replace(inner_states=opt_state.inner_states | {name: new.inner_states[name]})

for found, wanted in zip(jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((params, opt_state)), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## What to look out for
#
# - The first pipeline decides where the parameters live, so let it be that of the loss that costs most.
# - A step consumes the state that it is given. Go on with the state that it returns; `gen.state` and
#   `disc.state` are the newest state of both.
# - An optimizer that holds one number for all parameters, such as the count of a single `optax.adam`, is refused: it would count
#   the steps of both players.
# - Several steps of the discriminator for one of the generator are several calls of `disc.step`.
# - Labels and paths need not be whole networks: `trains=("*/bias", "generator/params/layers_6")` names parameters by pattern.
