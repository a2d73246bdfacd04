"""Small arrays travel as few vectors, and come back with the bits, the homes and the buffers that they should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.runtime.transfer import HOST, to_device, to_host
from jaxpp.tasks.packed import SMALL, Crate, boxed, shapes_of

DEVICES = jax.devices()
ONE, TWO = SingleDeviceSharding(DEVICES[0]), SingleDeviceSharding(DEVICES[1])
ROW = Mesh(np.array(DEVICES[2:4]).reshape(1, 2), ("data", "model"))
WHOLE, SPLIT = NamedSharding(ROW, PartitionSpec()), NamedSharding(ROW, PartitionSpec("model"))
ALONE = NamedSharding(Mesh(np.array(DEVICES[4:5]).reshape(1, 1), ("data", "model")), PartitionSpec("model"))
HOMES = (ONE, TWO, WHOLE, SPLIT, ALONE)
PACKED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint16", "bool")
LOOSE = ("complex64", "int4")
SHAPES = ((), (1,), (2,), (4, 3), (0,), (2, 0), (2, 3, 2), (SMALL + 2,))


def leaf_of(shape, dtype, seed: int) -> np.ndarray:
    """Any bits that a value of this dtype may have, NaNs of all kinds among them."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype.name in ("bool", "int4"):
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@st.composite
def sets(draw):
    leaves, homes = [], []
    for seed in range(draw(st.integers(1, 9))):
        shape, home = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(HOMES))
        leaves.append(leaf_of(shape, draw(st.sampled_from(PACKED + LOOSE)), seed))
        fits = not home.spec or (shape and shape[0] % 2 == 0) if isinstance(home, NamedSharding) else True
        homes.append(home if fits else WHOLE)
    return leaves, homes


@settings(max_examples=40, deadline=None)
@given(sets())
def test_every_set_comes_and_goes_with_all_its_bits_at_its_homes(case):
    leaves, homes = case
    crate = Crate(shapes_of(leaves), homes)
    put = boxed(crate, to_host(leaves, homes))
    same(put.leaves, leaves)
    assert {array.sharding for array in put.arrays} == {place.with_memory_kind(HOST) for place in crate.places}
    lent = crate.unpack(to_device(put.arrays, crate.places))
    same(lent, leaves)
    assert all(leaf.committed and leaf.sharding == home for leaf, home in zip(lent, homes, strict=True))
    back = to_host(crate.pack(lent))
    same(crate.views(back), leaves)
    assert [array.sharding for array in back] == [array.sharding for array in put.arrays]
    pieces = [shard.data for leaf in lent if leaf.size for shard in leaf.addressable_shards]
    assert len({piece.unsafe_buffer_pointer() for piece in pieces}) == len(pieces)  # each may be given up


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"])
def test_every_bit_pattern_of_a_narrow_float_survives(dtype):
    size = jnp.dtype(dtype).itemsize
    patterns = np.arange(1 << 8 * size).astype(f"uint{8 * size}").view(dtype).reshape(8, -1)
    crate = Crate(shapes_of(patterns), [ONE] * 8)
    assert len(crate.groups) == 1
    lent = crate.unpack(to_device(boxed(crate, to_host(list(patterns), [ONE] * 8)).arrays, crate.places))
    same(crate.views(to_host(crate.pack(lent))), list(patterns))


def test_signalling_nans_and_minus_zero_of_float32_survive():
    bits = np.array([0x7FA00001, 0xFFA12345, 0x80000000, 0x7FC0BEEF, 0x00000001], np.uint32).view(np.float32)
    crate = Crate(shapes_of([bits, bits]), [ONE] * 2)
    lent = crate.unpack(to_device(boxed(crate, to_host([bits, bits], [ONE] * 2)).arrays, crate.places))
    same(crate.views(to_host(crate.pack(lent))), [bits, bits])


def test_small_leaves_of_one_place_and_width_are_one_vector_and_all_others_travel_alone():
    f32, i32, bf16 = (np.zeros(3, dtype) for dtype in (np.float32, np.int32, jnp.bfloat16))
    large, empty = np.zeros(SMALL // 4 + 1, np.float32), np.zeros((0, 2), np.float32)
    key = jax.random.key(0)
    leaves = [f32, large, i32, bf16, f32, bf16, f32, empty, key, f32, f32, f32]
    homes = [ONE, ONE, ONE, ONE, TWO, ONE, ONE, ONE, ONE, WHOLE, WHOLE, NamedSharding(ROW, PartitionSpec(None))]
    crate = Crate(shapes_of(leaves), homes)
    assert crate.groups == ((0, 2, 6), (3, 5), (9, 10, 11), (1,), (4,), (7,), (8,))
    assert crate.places == (ONE, ONE, WHOLE, ONE, TWO, ONE, ONE)
    split = Crate(shapes_of([np.zeros(4, "f")] * 3), [SPLIT, SPLIT, WHOLE])
    assert split.groups == ((0,), (1,), (2,))
    just = Crate(shapes_of([np.zeros(SMALL // 4, "f")] * 2), [ONE] * 2)
    assert just.groups == ((0, 1),)


def test_views_of_what_was_packed_cannot_be_written_to():
    leaves = [np.ones(3, np.float32), np.ones((), np.int32)]
    found = boxed(Crate(shapes_of(leaves), [ONE] * 2), leaves).leaves
    assert not any(view.flags.writeable for view in found)


def test_a_crate_is_made_once_for_the_same_homes():
    shapes = shapes_of([np.ones(3, np.float32)] * 2)
    crate = Crate(shapes, [ONE] * 2)
    other = crate.at([TWO] * 2)
    assert other is not crate
    assert crate.at([ONE] * 2) is crate
    assert crate.at((TWO, TWO)) is other
    assert other.at([ONE] * 2) is crate
    assert (other.homes, other.groups) == ((TWO, TWO), crate.groups)


def test_leaves_of_other_shapes_are_our_bug():
    crate = Crate(shapes_of([np.ones(3, np.float32)] * 2), [ONE] * 2)
    with pytest.raises(AssertionError):
        crate.pack([jnp.ones(3), jnp.ones(4)])
