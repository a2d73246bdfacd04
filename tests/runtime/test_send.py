"""A send is ``jax.device_put``, whichever of the two routes it takes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp.runtime import not_public, send
from jaxpp.runtime.send import Send

VALUES = {
    "float32": lambda: jnp.arange(6.0).reshape(2, 3),
    "bfloat16": lambda: jnp.ones((3,), jnp.bfloat16),
    "int8": lambda: jnp.arange(5, dtype=jnp.int8),
    "bool": lambda: jnp.asarray([True, False]),
    "scalar": lambda: jnp.asarray(2),
    "weakly typed": lambda: jnp.asarray(2.0),
    "empty": lambda: jnp.zeros((0, 3)),
    "key": lambda: jax.random.key(3),
    "keys": lambda: jax.random.split(jax.random.key(3), 4),
    "large": lambda: jnp.arange(2**18, dtype=jnp.float32),
}


@pytest.fixture(params=["direct", "public"])
def route(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr(send, "direct_copy", lambda home: (None, frozenset()))
    return request.param


def facts(array):
    raw = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return array.aval, array.sharding, array.committed, array.devices(), np.asarray(raw).tolist()


@pytest.mark.parametrize("home", [lambda device: device, SingleDeviceSharding], ids=["device", "sharding"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("committed", [True, False])
def test_a_send_gives_what_device_put_gives_and_leaves_the_source(route, home, name, committed):
    value = jax.device_put(VALUES[name](), jax.devices()[0]) if committed else VALUES[name]()
    target = home(jax.devices()[3])
    before = facts(value)
    (sent,) = Send(target).bind()(value)
    assert facts(sent) == facts(jax.device_put(value, target))
    assert not value.is_deleted()
    assert facts(value) == before


def test_a_sent_array_may_be_donated_without_harm_to_its_source(route):
    value = jax.device_put(jnp.arange(1000.0), jax.devices()[0])
    (sent,) = Send(jax.devices()[1]).bind()(value)
    jax.block_until_ready(jax.jit(lambda a: a * 0, donate_argnums=0)(sent))
    np.testing.assert_array_equal(value, np.arange(1000.0))


def test_a_value_that_is_sharded_takes_the_public_route(route):
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    value = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model")))
    (sent,) = Send(jax.devices()[5]).bind()(value)
    assert facts(sent) == facts(jax.device_put(value, jax.devices()[5]))


@pytest.mark.parametrize("name", ["float32", "keys"])
@pytest.mark.parametrize("taken", [True, False])
def test_the_way_between_processes_gives_the_same_where_both_ends_are_here(name, taken):
    source, target = jax.devices()[0], jax.devices()[3]
    value = jax.device_put(VALUES[name](), source)
    move = Send(target, source, jax.ShapeDtypeStruct(value.shape, value.dtype), taken)
    (sent,) = move.bind()(value)
    assert facts(sent) == facts(jax.device_put(value, target))
    assert move.num_bytes == value.nbytes


def untried(device):
    """The sources of ``direct_copy``, without what it remembers."""
    return not_public.direct_copy.__wrapped__(device)[1]


def test_the_direct_copy_is_used_where_jax_has_it():
    assert {next(iter(source.device_set)) for source in untried(jax.devices()[1])} == {*jax.devices()} - {jax.devices()[1]}


def test_a_value_in_host_memory_was_not_tried_and_takes_the_public_route(monkeypatch):
    host = jax.device_put(jnp.arange(4.0), SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    calls, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **options: calls.append(args) or put(*args, **options))
    move = Send(jax.devices()[1]).bind()
    calls.clear()
    move(put(jnp.arange(4.0), jax.devices()[0]))
    assert not calls
    (sent,) = move(host)
    assert len(calls) == 1
    assert facts(sent) == facts(put(host, jax.devices()[1]))


def test_what_programs_made_on_a_device_that_was_tried_is_copied_without_another_look():
    first, second = jax.devices()[:2]
    copy, _ = not_public.direct_copy(second)
    assert Send(second, first).bind() is copy
    assert Send(second, second).bind() is not copy, "it was not tried from there"
    value = jax.device_put(jnp.arange(4.0), first)
    (sent,) = Send(second, first).bind()(value)
    assert facts(sent) == facts(jax.device_put(value, second))


class Wrong(types.SimpleNamespace):
    DeviceList = not_public.xla_client.DeviceList
    ArrayCopySemantics = not_public.xla_client.ArrayCopySemantics


def stays(arrays, devices, shardings, semantics):
    return list(arrays)


def other_values(arrays, devices, shardings, semantics):
    return [jax.device_put(array + 1, sharding) for array, sharding in zip(arrays, shardings, strict=True)]


def takes_over(arrays, devices, shardings, semantics):
    copies = [jax.device_put(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
    for array in arrays:
        array.delete()
    return copies


def raises(arrays):
    raise AssertionError("not called with four arguments")


def doing(copy):
    return Wrong(batched_copy_array_to_devices_with_sharding=copy)


@pytest.mark.parametrize(
    "client",
    [
        None,
        types.SimpleNamespace(),
        *(Wrong(batched_copy_array_to_devices_with_sharding=f) for f in (stays, other_values, takes_over, raises)),
    ],
    ids=["no module", "no function", "stays", "other values", "takes over", "other signature"],
)
def test_a_direct_copy_that_is_missing_or_does_anything_else_is_not_used(client, monkeypatch):
    monkeypatch.setattr(not_public, "xla_client", client)
    assert not untried(jax.devices()[1])
