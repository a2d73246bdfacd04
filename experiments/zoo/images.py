"""The models of images, on handwritten digits: which digit it is, and what it was before noise was added."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.problems import cross_entropy
from experiments.zoo.case import Case
from experiments.zoo.data import digits, held_out_batches, sampler
from models.mlp import MLP
from models.resnet import ResNet
from models.unet import UNet

__all__ = ["mlp", "resnet", "unet"]

NOISE = 0.5  # standard deviation, of pixels from 0 to 1


def mlp(size: int, seed: int) -> Case:
    """A multilayer perceptron that names the digit.

    Args:
        size: examples of a batch.
        seed: of the batches.
    """
    model = MLP(width=64, depth=7, num_classes=10)
    data = digits()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch["image"].reshape(-1, 64)), batch["label"])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 64)))["params"]

    batches = sampler(data.train, size, seed), held_out_batches(data.held_out, size)
    return Case("which digit", loss_fn, loss_fn, init, *batches, rate=3e-3)


def resnet(size: int, seed: int) -> Case:
    """A residual network that names the digit; its running averages are model state.

    Args:
        size: examples of a batch.
        seed: of the batches.
    """
    model = ResNet(width=8, groups=(1, 2, 1), momentum=0.95)
    data = digits()

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, tuple[Any, dict]]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), (changed["batch_stats"], {})

    def eval_loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, tuple[Any, dict]]:
        logits = model.apply({"params": params, "batch_stats": batch_stats}, batch["image"], train=False)
        return cross_entropy(logits, batch["label"]), (batch_stats, {})

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)))
        return variables["params"], variables["batch_stats"]

    batches = sampler(data.train, size, seed), held_out_batches(data.held_out, size)
    return Case("which digit", loss_fn, eval_loss, init, *batches, rate=3e-3, has_state=True)


def unet(size: int, seed: int) -> Case:
    """A U-Net that takes the noise off a digit; the loss is the mean square of what remains.

    Args:
        size: examples of a batch.
        seed: of the batches, and of the noise of those trained on.
    """
    model = UNet(width=8)
    data = digits()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((model.apply({"params": params}, batch["noisy"]) - batch["clean"]) ** 2)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]

    clean = sampler(data.train["image"], size, seed)
    held_out = held_out_batches(data.held_out["image"], size)
    return Case(
        "clean digits from noisy ones",
        loss_fn,
        loss_fn,
        init,
        lambda step: _noisy(clean(step), (seed, step, 1)),
        tuple(_noisy(images, (k,)) for k, images in enumerate(held_out)),
        rate=3e-3,
    )


def _noisy(images: np.ndarray, seed: tuple[int, ...]) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed).normal(0, NOISE, images.shape)
    return {"noisy": images + noise.astype("float32"), "clean": images}
