"""Small arrays travel as few vectors, and come back with the bits, the homes and the buffers that they should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.runtime.edges import HOST_MEMORY, to_device, to_host
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.stacked import Slices
from jaxpp.tasks.host_store import LARGEST_PACKED, SetPacking

DEVICES = jax.devices()
ONE, TWO = SingleDeviceSharding(DEVICES[0]), SingleDeviceSharding(DEVICES[1])
ROW = Mesh(np.array(DEVICES[2:4]).reshape(1, 2), ("data", "model"))
WHOLE, SPLIT = NamedSharding(ROW, PartitionSpec()), NamedSharding(ROW, PartitionSpec("model"))
ALONE = NamedSharding(Mesh(np.array(DEVICES[4:5]).reshape(1, 1), ("data", "model")), PartitionSpec("model"))
HOMES = (ONE, TWO, WHOLE, SPLIT, ALONE)
PACKED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint16", "bool")
LOOSE = ("complex64", "int4")
SHAPES = ((), (1,), (2,), (4, 3), (0,), (2, 0), (2, 3, 2), (LARGEST_PACKED + 2,))


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


@settings(max_examples=15, deadline=None)
@given(sets())
def test_every_set_comes_and_goes_with_all_its_bits_at_its_homes(case):
    leaves, homes = case
    packing = SetPacking(shapes_of(leaves), homes)
    put = packing.on_host(to_host(leaves, homes))
    same(put.leaves, leaves)
    assert {array.sharding for array in put.arrays} == {place.with_memory_kind(HOST_MEMORY) for place in packing.places}
    lent = packing.unpack(to_device(put.arrays, packing.places))
    same(lent, leaves)
    assert all(leaf.committed and leaf.sharding == home for leaf, home in zip(lent, homes, strict=True))
    back = to_host(packing.pack(lent))
    same(packing.views(back), leaves)
    assert [array.sharding for array in back] == [array.sharding for array in put.arrays]
    pieces = [shard.data for leaf in lent if leaf.size for shard in leaf.addressable_shards]
    assert len({piece.unsafe_buffer_pointer() for piece in pieces}) == len(pieces)  # each may be given up


@pytest.mark.parametrize("rows", [6, LARGEST_PACKED])
def test_a_leaf_whose_rows_live_in_several_places_travels_as_slices(rows):
    leaves = [leaf_of((rows, 3), "float32", 0), leaf_of((5,), "float32", 1), leaf_of((2,), "bfloat16", 2)]
    divided = [Slices([ONE, TWO], [2, rows - 2]), TWO, Slices([WHOLE, ONE], [1, 1])]
    packing = SetPacking(shapes_of(leaves), divided)
    lent = packing.unpack(to_device(packing.on_host(to_host(leaves, [ONE] * 3)).arrays, packing.places))
    same(lent, [leaves[0][:2], leaves[0][2:], leaves[1], leaves[2][:1], leaves[2][1:]])
    assert [leaf.sharding for leaf in lent] == [ONE, TWO, TWO, WHOLE, ONE]
    same(packing.views(to_host(packing.pack(lent))), leaves)
    whole = packing.at([ONE] * 3)
    assert whole.at(divided) is packing
    assert not whole.travels_as(packing)
    assert packing.travels_as(packing.at([Slices([ONE, TWO], [2, rows - 2]), TWO, Slices([WHOLE, ONE], [1, 1])]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"])
def test_every_bit_pattern_of_a_narrow_float_survives(dtype):
    size = jnp.dtype(dtype).itemsize
    patterns = np.arange(1 << 8 * size).astype(f"uint{8 * size}").view(dtype).reshape(8, -1)
    packing = SetPacking(shapes_of(patterns), [ONE] * 8)
    assert len(packing.groups) == 1
    lent = packing.unpack(to_device(packing.on_host(to_host(list(patterns), [ONE] * 8)).arrays, packing.places))
    same(packing.views(to_host(packing.pack(lent))), list(patterns))


def test_signalling_nans_and_minus_zero_of_float32_survive():
    bits = np.array([0x7FA00001, 0xFFA12345, 0x80000000, 0x7FC0BEEF, 0x00000001], np.uint32).view(np.float32)
    packing = SetPacking(shapes_of([bits, bits]), [ONE] * 2)
    lent = packing.unpack(to_device(packing.on_host(to_host([bits, bits], [ONE] * 2)).arrays, packing.places))
    same(packing.views(to_host(packing.pack(lent))), [bits, bits])


def test_small_leaves_of_one_place_and_width_are_one_vector_and_all_others_travel_alone():
    f32, i32, bf16 = (np.zeros(3, dtype) for dtype in (np.float32, np.int32, jnp.bfloat16))
    large, empty = np.zeros(LARGEST_PACKED // 4 + 1, np.float32), np.zeros((0, 2), np.float32)
    key = jax.random.key(0)
    leaves = [f32, large, i32, bf16, f32, bf16, f32, empty, key, f32, f32, f32]
    homes = [ONE, ONE, ONE, ONE, TWO, ONE, ONE, ONE, ONE, WHOLE, WHOLE, NamedSharding(ROW, PartitionSpec(None))]
    packing = SetPacking(shapes_of(leaves), homes)
    assert packing.groups == ((0, 2, 6), (3, 5), (9, 10, 11), (1,), (4,), (7,), (8,))
    assert packing.places == (ONE, ONE, WHOLE, ONE, TWO, ONE, ONE)
    split = SetPacking(shapes_of([np.zeros(4, "f")] * 3), [SPLIT, SPLIT, WHOLE])
    assert split.groups == ((0,), (1,), (2,))
    just = SetPacking(shapes_of([np.zeros(LARGEST_PACKED // 4, "f")] * 2), [ONE] * 2)
    assert just.groups == ((0, 1),)


def test_views_of_what_was_packed_cannot_be_written_to():
    leaves = [np.ones(3, np.float32), np.ones((), np.int32)]
    found = SetPacking(shapes_of(leaves), [ONE] * 2).on_host(leaves).leaves
    assert not any(view.flags.writeable for view in found)


def test_a_packing_is_made_once_for_the_same_homes():
    shapes = shapes_of([np.ones(3, np.float32)] * 2)
    packing = SetPacking(shapes, [ONE] * 2)
    other = packing.at([TWO] * 2)
    assert other is not packing
    assert packing.at([ONE] * 2) is packing
    assert packing.at((TWO, TWO)) is other
    assert other.at([ONE] * 2) is packing
    assert (other.homes, other.groups) == ((TWO, TWO), packing.groups)


def test_leaves_of_other_shapes_are_our_bug():
    packing = SetPacking(shapes_of([np.ones(3, np.float32)] * 2), [ONE] * 2)
    with pytest.raises(AssertionError):
        packing.pack([jnp.ones(3), jnp.ones(4)])
