"""Sets of arrays on the host, a few of them on the device: what is lent, kept, written back and undone."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.errors import BankError
from jaxpp.runtime.edges import to_device, to_host
from jaxpp.tasks import host_store as module
from jaxpp.tasks.host_store import LARGEST_PACKED, HostStore, SetPacking

HOME = SingleDeviceSharding(jax.devices()[0])
HOMES = (HOME, HOME, HOME)
BIG = LARGEST_PACKED // 4 + 1
BYTES = 4 * 6 + 4 * 3 + 4 * BIG


def values(seed: int) -> list[np.ndarray]:
    """Two leaves that travel as one, and one that is too large."""
    return [np.full((2, 3), seed, np.float32), np.arange(3, dtype=np.int32) + seed, np.full(BIG, seed, np.float32)]


def arrays(seed: int) -> list[jax.Array]:
    return list(to_device(values(seed), HOMES))


def store_of(*names: str, slots: int = 2) -> HostStore:
    store = HostStore(slots)
    for k, name in enumerate(names):
        store.put(name, values(k), HOMES)
    return store


def check(leaves, seed: int):
    for leaf, expected in zip(leaves, values(seed), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), expected)


give_up = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)


def test_the_host_copies_are_in_pinned_memory_and_the_lent_ones_in_the_devices_own():
    store = store_of("a")
    lent = store.fetch("a", HOMES)
    assert {leaf.sharding.memory_kind for leaf in lent} == {jax.devices()[0].default_memory().kind}
    store.write_back("a", give_up(lent))
    assert {leaf.sharding.memory_kind for leaf in store.held("a").arrays} == {"pinned_host"}


def test_what_is_put_is_a_copy_that_its_owner_may_overwrite_or_give_up():
    theirs, store = [*values(1), np.zeros(1 << 20, np.float32)], HostStore()
    store.put("numpy", theirs, (HOME,) * len(theirs))
    for array in theirs:
        array[:] = 99
    given_up = arrays(2)
    store.put("device", given_up, HOMES)
    give_up(given_up)
    check(store.held("numpy").leaves[:3], 1)
    assert store.held("numpy").leaves[3].max() == 0
    check(store.held("device").leaves, 2)


def test_a_step_that_gives_up_a_lent_copy_leaves_the_host_copy_whole():
    store = store_of("a", "b")
    lent = store.fetch("b", HOMES)
    changed = give_up(lent)
    assert all(leaf.is_deleted() for leaf in lent)
    np.testing.assert_array_equal(changed[0], values(2)[0])
    check(store.held("b").leaves, 1)


def test_a_write_back_is_a_copy_so_the_next_step_may_give_up_what_was_written():
    store = store_of("a")
    leaves = give_up(store.fetch("a", HOMES))
    store.write_back("a", leaves)
    give_up(leaves)
    give_up(arrays(7))  # might be given the same buffers
    check(store.held("a").leaves, 1)
    places = {leaf.unsafe_buffer_pointer() for leaf in leaves if not leaf.is_deleted()}
    assert not places & {leaf.unsafe_buffer_pointer() for leaf in store.held("a").arrays}


def test_the_store_holds_nothing_of_what_it_lends():
    store = store_of("a", "b")
    store.prefetch("a", HOMES)
    lent = store.fetch("a", HOMES)
    alive = [weakref.ref(leaf) for leaf in lent]
    assert (store.in_use(), store.resident()) == (("a",), ())
    del lent
    assert not any(ref() for ref in alive)


def test_loads_hits_and_bytes_are_counted():
    store = store_of("a", "b", "c")
    store.write_back("a", give_up(store.fetch("a", HOMES)))
    store.keep("a", store.fetch("a", HOMES))
    store.prefetch("b", HOMES)
    store.prefetch("b", HOMES)
    store.keep("b", store.fetch("b", HOMES))
    store.keep("b", store.fetch("b", HOMES))
    assert store.traffic == (2, 3, 1, 2 * BYTES, BYTES)
    store.prefetch("c", HOMES)  # a, the least recently used, makes room
    assert store.resident() == ("b", "c")
    assert store.traffic.loads == 3


def test_the_set_in_use_is_never_the_one_that_makes_room():
    store = store_of("a", "b", "c")
    lent = store.fetch("a", HOMES)
    store.prefetch("b", HOMES)
    store.prefetch("c", HOMES)
    assert (store.in_use(), store.resident()) == (("a",), ("c",))
    store.prefetch("a", HOMES)  # it is here
    assert store.traffic.loads == 3
    check(lent, 0)


def test_with_every_slot_in_use_nothing_is_brought():
    store = store_of("a", "b", slots=1)
    store.prefetch("b", HOMES)
    lent = store.fetch("a", HOMES)
    for bring in (store.fetch, store.prefetch):
        with pytest.raises(BankError, match=r"where a slot is free(.|\n)*slots=1, in use: 'a'(.|\n)*slots=2"):
            bring("b", HOMES)
    store.keep("a", lent)
    assert store.resident() == ("a",)


def test_each_row_has_slots_and_copies_of_its_own_and_a_write_back_drops_those_out_of_date():
    rows = [(SingleDeviceSharding(device),) * 3 for device in jax.devices()[:3]]
    store = store_of("a", "b")
    for row, homes in enumerate(rows):
        store.keep("a", store.fetch("a", homes, row), row)
    assert store.traffic.loads == 3
    lent = [store.fetch("a", homes, row) for row, homes in enumerate(rows[:2])]
    assert [next(iter(leaves[0].devices())) for leaves in lent] == jax.devices()[:2]
    changed = [give_up(leaves) for leaves in lent]
    with pytest.raises(BankError, match="in use elsewhere as well"):
        store.write_back("a", changed[0])
    store.write_back("a", changed[0], rows=(0, 1), resident=changed)
    assert [store.resident(row) for row in range(3)] == [("a",), ("a",), ()]
    for row, homes in enumerate(rows):
        np.testing.assert_array_equal(store.fetch("a", homes, row)[0], values(1)[0])
    assert store.traffic.loads == 4


def test_sets_may_differ_in_shape_and_be_spread_over_devices():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[2:4])
    home = NamedSharding(mesh, PartitionSpec("data"))
    store = HostStore()
    store.put("small", [np.ones(2, np.float32)], [home])
    store.put(3, [np.ones((4, 5), np.float32)], [HOME])
    (lent,) = store.fetch("small", [home])
    assert lent.sharding == home
    store.write_back("small", [lent * 2])
    assert store.held("small").leaves[0].sharding == home.with_memory_kind("pinned_host")
    assert store.fetch(3, [HOME])[0].shape == (4, 5)
    assert store.sizes == {"small": 8, 3: 80}


def test_a_store_refuses_what_it_does_not_have_and_what_is_in_use():
    store = store_of("a")
    for call in (store.held, store.remove, lambda name: store.fetch(name, HOMES), lambda name: store.prefetch(name, HOMES)):
        with pytest.raises(BankError, match="'z'; the sets are 'a'"):
            call("z")
    store.fetch("a", HOMES)
    for call in (store.remove, lambda name: store.fetch(name, HOMES), lambda name: store.put(name, values(0), HOMES)):
        with pytest.raises(BankError, match="'a' is in use"):
            call("a")
    for slots in (0, -1, 1.5, True):
        with pytest.raises(BankError, match="a slot for the set in use"):
            HostStore(slots)


class Late:
    """A host copy whose arrival the test decides."""

    def __init__(self, leaf):
        self.leaf, self.nbytes, self.sharding, self.ready, self.fails = leaf, leaf.nbytes, leaf.sharding, False, False

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.leaf)

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        self.ready = True
        if self.fails:
            raise jax.errors.JaxRuntimeError("INTERNAL: the copy failed\nat some place")
        return self


@pytest.fixture
def late(monkeypatch):
    """Write-backs under way, a list of copies each."""
    under_way = []

    def copy(leaves, homes=None):
        under_way.append([Late(leaf) for leaf in to_host(leaves, homes)])
        return tuple(under_way[-1])

    def begin():
        monkeypatch.setattr(module, "to_host", copy)
        monkeypatch.setattr(module, "to_device", lambda leaves, homes: to_device([getattr(x, "leaf", x) for x in leaves], homes))
        return under_way

    return begin


def test_a_write_back_that_fails_puts_the_old_values_back_and_says_so(late):
    store = store_of("a", "b")
    under_way = late()
    store.write_back("a", give_up(store.fetch("a", HOMES)))
    store.write_back("b", give_up(store.fetch("b", HOMES)))
    under_way[0][1].fails = True
    with pytest.raises(
        BankError, match=r"set 'a': a write-back that fails(.|\n)*JaxRuntimeError: INTERNAL: the copy failed"
    ) as caught:
        store.wait()
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    check(store.held("a").leaves, 0)
    assert store.resident() == ("b",)
    store.wait()
    assert all(copy.ready for copies in under_way[1:] for copy in copies)


def test_a_failure_between_two_write_backs_of_a_set_goes_back_to_the_last_whole_one(late):
    store = store_of("a")
    under_way = late()
    for _ in range(2):
        store.write_back("a", give_up(store.fetch("a", HOMES)))
    for copies in under_way:
        copies[0].fails = True
    for _ in range(2):
        with pytest.raises(BankError, match="write-back"):
            store.wait()
    check(store.held("a").leaves, 0)


def test_a_failure_of_what_was_removed_or_replaced_meanwhile_is_nobodys(late, monkeypatch):
    store = store_of("a", "b")
    under_way = late()
    for name in "ab":
        store.write_back(name, give_up(store.fetch(name, HOMES)))
    monkeypatch.setattr(module, "to_host", to_host)
    store.remove("a")
    store.put("b", values(5), HOMES)
    for copies in under_way:
        copies[0].fails = True
    store.wait()
    assert tuple(store.sizes) == ("b",)
    check(store.held("b").leaves, 5)


def test_a_failure_is_noticed_at_the_next_operation_and_never_loses_the_set_given_back_then(late):
    store = store_of("a", "b")
    under_way = late()
    store.write_back("a", give_up(store.fetch("a", HOMES)))
    changed = give_up(store.fetch("b", HOMES))
    under_way[0][0].fails = under_way[0][0].ready = under_way[0][1].ready = True
    store.write_back("b", changed)
    with pytest.raises(BankError, match="set 'a'"):
        store.prefetch("b", HOMES)
    check(store.held("a").leaves, 0)
    np.testing.assert_array_equal(store.held("b").leaves[0], values(2)[0])


def test_nothing_waits_until_the_third_write_back_waits_for_the_first(late):
    store = store_of(*"abcd")
    under_way = late()
    for name in "ab":
        store.write_back(name, give_up(store.fetch(name, HOMES)))
    assert not any(copy.ready for copies in under_way for copy in copies)
    store.prefetch("c", HOMES)
    store.write_back("c", give_up(store.fetch("c", HOMES)))
    assert [all(copy.ready for copy in copies) for copies in under_way] == [True, False, False]


def test_a_write_back_that_cannot_begin_leaves_the_set_as_it_was(monkeypatch):
    store = store_of("a")
    changed = give_up(store.fetch("a", HOMES))

    def no_memory(leaves, homes=None):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: host")

    monkeypatch.setattr(module, "to_host", no_memory)
    with pytest.raises(BankError, match="RESOURCE_EXHAUSTED: host"):
        store.write_back("a", changed)
    assert (store.in_use(), store.resident()) == ((), ())
    check(store.held("a").leaves, 0)


def test_a_device_without_room_is_tried_again_once_what_waits_there_is_gone(monkeypatch):
    store = store_of("a", "b")
    store.keep("a", store.fetch("a", HOMES))
    tries = []

    def full(leaves, homes):
        tries.append(store.resident())
        if len(tries) in (1, 3):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return to_device(leaves, homes)

    monkeypatch.setattr(module, "to_device", full)
    store.release("b", [0])
    check(store.fetch("b", HOMES), 1)
    assert tries == [("a",), ()]
    with pytest.raises(
        BankError, match=rf"set 'a': a set in use fits(.|\n)*no room for its {BYTES:,} bytes \(2 slots\)(.|\n)*slots=1"
    ):
        store.prefetch("a", HOMES)
    assert len(tries) == 3
    check(store.held("a").leaves, 0)


def test_a_device_without_room_is_tried_again_once_all_write_backs_have_arrived(late, monkeypatch):
    store = store_of("a", "b")
    under_way = late()
    store.write_back("a", give_up(store.fetch("a", HOMES)))
    tries, bring = [], module.to_device

    def full(leaves, homes):
        tries.append(all(copy.ready for copy in under_way[0]))
        if not tries[-1]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return bring(leaves, homes)

    monkeypatch.setattr(module, "to_device", full)
    check(store.fetch("b", HOMES), 1)
    assert tries == [False, True]


def test_copies_share_no_buffer_even_where_nothing_has_to_move():
    host = to_host(arrays(1))
    for again in (to_host(host), to_device(host, [leaf.sharding for leaf in host])):
        assert all(a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer() for a, b in zip(again, host, strict=True))


class Model:
    """A store beside a plain dict of what its sets should hold, and a list of which should wait on the device."""

    def __init__(self, slots):
        self.store, self.slots, self.held, self.lent, self.waiting = HostStore(slots), slots, {}, {}, []

    def put(self, name, seed):
        self.store.put(name, values(seed), HOMES)
        self.held[name] = seed
        self.waiting = [other for other in self.waiting if other != name]

    def bring(self, act, name):
        if name not in self.waiting and len(self.lent) == self.slots:
            with pytest.raises(BankError):
                getattr(self.store, act)(name, HOMES)
            return
        found = getattr(self.store, act)(name, HOMES)
        if name in self.waiting:
            self.waiting.remove(name)
        room = self.slots - len(self.lent) - 1
        self.waiting = self.waiting[max(0, len(self.waiting) - room) :] + [name] * (act == "prefetch")
        if act == "fetch":
            self.lent[name] = found
            check(found, self.held[name])

    def give_back(self, act, name):
        leaves = self.lent.pop(name)
        if act == "write_back":
            self.held[name] += 1
            self.store.write_back(name, give_up(leaves))
        elif act == "keep":
            self.store.keep(name, leaves)
        else:
            self.store.release(name)
        self.waiting += [name] * (act != "release")

    def remove(self, name):
        self.store.remove(name)
        del self.held[name]
        self.waiting = [other for other in self.waiting if other != name]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_agrees_with_a_plain_dict(data):
    check_sequence(data)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_many_sequences_of_operations_agree_with_a_plain_dict(data):
    check_sequence(data)


def check_sequence(data):
    model = Model(data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from("abcd"))
        if name in model.lent:
            model.give_back(data.draw(st.sampled_from(["write_back", "keep", "release"])), name)
        elif name not in model.held:
            model.put(name, data.draw(st.integers(0, 99)))
        else:
            act = data.draw(st.sampled_from(["fetch", "fetch", "prefetch", "prefetch", "put", "remove"]))
            if act in ("fetch", "prefetch"):
                model.bring(act, name)
            elif act == "put":
                model.put(name, data.draw(st.integers(0, 99)))
            else:
                model.remove(name)
        assert set(model.store.sizes) == set(model.held)
        assert set(model.store.in_use()) == set(model.lent)
        assert model.store.resident() == tuple(model.waiting)
        assert len(model.waiting) + len(model.lent) <= model.slots
    model.store.wait()
    for name, seed in model.held.items():
        check(model.store.held(name).leaves, seed)


def test_prng_keys_are_leaves_like_others():
    store = HostStore()
    store.put("a", [jax.random.key(3), jnp.ones(2)], HOMES[:2])
    key, ones = store.fetch("a", HOMES[:2])
    store.write_back("a", [jax.random.fold_in(key, 1), ones])
    store.wait()
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(3), 1))
    np.testing.assert_array_equal(jax.random.key_data(to_device(store.held("a").leaves, HOMES[:2])[0]), expected)


SMALLS = [((64, 16), (16,), (16, 64), (64,))[k % 4] for k in range(14)]


def adapters(seed: int) -> list[np.ndarray]:
    """Fourteen parameters, their moments, and a step count."""
    rng = np.random.default_rng(seed)
    return [*(rng.normal(size=shape).astype("f") for shape in SMALLS * 3), np.asarray(seed, np.int32)]


def same(leaves, expected):
    for leaf, value in zip(leaves, expected, strict=True):
        assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), value)


@pytest.fixture
def moved(monkeypatch):
    """How many arrays each transfer moved, by its direction."""
    found = {"to_host": [], "to_device": []}

    def count(way, move):
        def counted(leaves, homes=None):
            found[way].append(len(leaves))
            return move(leaves, homes)

        return counted

    for way, move in (("to_host", to_host), ("to_device", to_device)):
        monkeypatch.setattr(module, way, count(way, move))
    return found


def test_forty_three_small_leaves_travel_as_one_each_way(moved):
    store, homes = HostStore(), (HOME,) * 43
    for k in range(3):
        store.put(k, adapters(k), homes)
    moved["to_host"].clear()
    for k in range(3):
        lent = store.fetch(k, homes)
        store.prefetch((k + 1) % 3, homes)
        store.write_back(k, give_up(lent))
    assert (moved["to_host"], moved["to_device"]) == ([1] * 3, [1] * 4)
    for k in range(3):
        same(store.held(k).leaves, [leaf + 1 for leaf in adapters(k)])
        assert [leaf.sharding.memory_kind for leaf in store.held(k).arrays] == ["pinned_host"]
    assert store.held(0).packing.shapes == tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in adapters(0))
    assert store.sizes[0] == sum(leaf.nbytes for leaf in adapters(0))


def test_sets_at_several_places_travel_as_a_vector_a_place(moved):
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[2:4])
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "model")))
    places = [SingleDeviceSharding(jax.devices()[1]), whole]
    homes = [split if leaf.ndim == 2 and k < 8 else places[k % 2] for k, leaf in enumerate(adapters(0))]
    store = HostStore()
    store.put("a", adapters(0), homes)
    lent = store.fetch("a", homes)
    assert [leaf.sharding for leaf in lent] == homes
    moved["to_host"].clear()
    store.write_back("a", [leaf + 1 for leaf in lent])
    assert (moved["to_host"], moved["to_device"]) == ([2 + 4], [2 + 4])
    same(store.held("a").leaves, [leaf + 1 for leaf in adapters(0)])


def test_what_was_prefetched_waits_as_it_came_and_is_taken_apart_where_it_is_fetched(monkeypatch):
    store, homes = HostStore(), (HOME,) * 43
    store.put("a", adapters(1), homes)
    apart, unpack = [], SetPacking.unpack

    def counted(packing, arrays):
        apart.append([weakref.ref(array) for array in arrays])
        return unpack(packing, arrays)

    monkeypatch.setattr(SetPacking, "unpack", counted)
    gc.collect()  # of what tests before this have left
    before = len(jax.live_arrays())
    store.prefetch("a", homes)
    assert (len(jax.live_arrays()) - before, apart) == (1, [])
    lent = store.fetch("a", homes)
    assert len(jax.live_arrays()) - before == 43
    assert not any(ref() for ref in apart[0])
    assert all(leaf.sharding == HOME and leaf.committed for leaf in lent)
    same(lent, adapters(1))
    store.keep("a", lent)
    assert all(a is b for a, b in zip(store.fetch("a", homes), lent, strict=True))
    assert len(apart) == 1


def test_a_set_is_packed_anew_when_its_leaves_share_homes_otherwise_even_behind_a_write_back(moved):
    other = SingleDeviceSharding(jax.devices()[1])
    together, divided = (HOME,) * 43, tuple((HOME, other)[k % 2] for k in range(43))
    store, expected = HostStore(), adapters(5)
    store.put("a", expected, together)
    for homes in (divided, together, divided):
        lent = store.fetch("a", homes, row=homes)
        assert tuple(leaf.sharding for leaf in lent) == homes
        same(lent, expected)
        expected = [leaf + 1 for leaf in expected]
        store.write_back("a", [leaf + 1 for leaf in lent], rows=[homes])
        assert len(store.held("a").arrays) == len(set(homes))
    same(store.held("a").leaves, expected)
    assert moved["to_device"] == [2, 1, 2]


def test_all_names_share_the_programs_that_pack_and_take_apart():
    store, homes, programs = HostStore(), (HOME,) * 43, []

    def listen(event, duration, **_):
        programs.append(event) if event == "/jax/core/compile/backend_compile_duration" else None

    change = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)
    for k in range(16):
        store.put(k, adapters(k), homes)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for k in range(16):
            store.write_back(k, change(store.fetch(k, homes)))
            assert len(programs) == 3
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_device_without_room_for_a_vector_is_tried_again_without_what_waits_there(monkeypatch):
    store = store_of("a", "b")
    tries, work = [], {name: getattr(SetPacking, name) for name in ("pack", "unpack")}

    def full(name):
        def once(packing, arrays):
            tries.append((name, store.resident()))
            if store.resident():
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return work[name](packing, arrays)

        return once

    for name in work:
        monkeypatch.setattr(SetPacking, name, full(name))
    store.prefetch("b", HOMES)
    lent = store.fetch("a", HOMES)
    store.prefetch("b", HOMES)
    store.write_back("a", give_up(lent))
    assert tries == [(name, there) for name in ("unpack", "pack") for there in (("b",), ())]
    check(store.held("a").leaves, 1)
    check(store.held("b").leaves, 1)


def test_a_set_that_cannot_be_packed_as_an_earlier_write_back_fails_stays_as_it_was_and_so_does_the_other(late, monkeypatch):
    store = store_of("a", "b")
    under_way = late()
    store.write_back("a", give_up(store.fetch("a", HOMES)))
    changed = give_up(store.fetch("b", HOMES))
    under_way[0][0].fails = True

    def full(packing, leaves):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(SetPacking, "pack", full)
    with pytest.raises(BankError, match=r"set 'b': a write-back that fails(.|\n)*set 'a'"):
        store.write_back("b", changed)
    assert (store.in_use(), store.resident()) == ((), ())
    check(store.held("a").leaves, 0)
    check(store.held("b").leaves, 1)
