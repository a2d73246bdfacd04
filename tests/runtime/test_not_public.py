"""Attention by cuDNN is traced for GPUs that only compile, on a machine without cuDNN, and JAX is left as it was."""

import threading
from contextlib import suppress
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxpp.errors import ArgumentError
from jaxpp.runtime import not_public
from jaxpp.runtime.not_public import cudnn_of

H100, A100, OLDER = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4"


def devices_of(kind):
    """A GPU that JAX does not list and that has no memory, as those of a topology."""
    return (mock.Mock(spec=jax.Device, platform="gpu", addressable_memories=list, device_kind=kind),)


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def traced(function, *given):
    """The shapes of a function's results, traced anew: JAX remembers those of a function that it has seen."""
    return jax.eval_shape(partial(function), *given)


def shapes(head, length=128):
    return [jax.ShapeDtypeStruct((2, length, 4, head), jnp.bfloat16)] * 3


def gradients(*given):
    return jax.grad(lambda *given: attend(*given).sum().astype("float32"), (0, 1, 2))(*given)


@pytest.mark.parametrize(("kind", "head"), [(H100, 64), (H100, 256), (A100, 128)])
def test_attention_by_cudnn_and_its_gradients_are_traced_for_gpus_that_only_compile(kind, head):
    with cudnn_of(devices_of(kind)):
        assert traced(attend, *shapes(head)).shape == (2, 128, 4, head)
        assert [leaf.shape for leaf in traced(gradients, *shapes(head))] == [(2, 128, 4, head)] * 3


def test_what_such_a_gpu_cannot_do_is_refused_as_on_that_gpu():
    with cudnn_of(devices_of(A100)), pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        traced(attend, *shapes(256))
    with cudnn_of(devices_of(OLDER)), pytest.raises(ArgumentError) as caught:
        traced(attend, *shapes(64))
    assert str(caught.value).splitlines() == [
        'implementation="cudnn": attention by cuDNN is for GPUs of compute capability 8.0 and above.',
        "  Got: Tesla T4, of 7.5.",
        '  Fix: pass implementation="xla", or leave it out.',
    ]


def asked():
    return [getattr(not_public.attention, name) for name in not_public._ANSWERS]


def test_jax_is_as_it_was_afterwards_also_where_tracing_fails_and_inside_of_another():
    before = asked()
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with suppress(error), cudnn_of(devices_of(H100)), cudnn_of(devices_of(A100)):
            assert asked() != before
            raise error
        assert asked() == before
    with cudnn_of(devices_of(H100)):
        with cudnn_of(devices_of(A100)):
            pass
        traced(attend, *shapes(256))


def test_devices_that_hold_arrays_and_other_threads_are_answered_as_ever():
    before, found = asked(), []
    with cudnn_of(jax.devices()):
        assert asked() == before

    def ask():
        try:
            found.append(not_public.attention.check_cudnn_version())
        except Exception as error:  # noqa: BLE001  (whatever JAX says without cuDNN)
            found.append(error)

    with cudnn_of(devices_of(H100)):
        assert not_public.attention.check_cudnn_version() == 91090
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found != [91090]


def test_where_jax_has_none_of_these_names_nothing_happens(monkeypatch):
    for module in (None, object()):
        monkeypatch.setattr(not_public, "attention", module)
        with cudnn_of(devices_of(H100)):
            pass
