"""The bound of a step counts every device and its products, on devices that are taken for GPUs of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.observe import bound as bounds
from jaxpp.targets import TARGETS

H100 = next(target for target in TARGETS if target.name == "h100")
SHAPES, BATCH = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2, jax.ShapeDtypeStruct((16, 8), "float32")


def loss_fn(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


@pytest.mark.parametrize(("replicas", "devices", "num_devices"), [(1, 2, 2), (1, 1, 1), (2, 4, 4)])
def test_all_devices_count_once_and_so_does_each_product_on_them(monkeypatch, replicas, devices, num_devices):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)
    given = {"devices": jax.devices()[:devices], "data_parallel": replicas}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, **given)
    pipe.abstract_state(SHAPES, BATCH)
    bound = bounds.bound_of(pipe.engine, BATCH, None)
    assert bound.num_devices == num_devices
    assert f"on {num_devices} x H100" in str(bound)
    products = 5 * 2 * 16 * 8 * 8  # three a layer, and no cotangent of the batch
    assert sum(bound.products.values()) == products
    (kind,) = bound.products
    peak = getattr(H100.peaks, kind)
    assert bound.peak_fraction == pytest.approx(products / peak / num_devices / bound.seconds)
    assert np.isfinite(bound.seconds)
