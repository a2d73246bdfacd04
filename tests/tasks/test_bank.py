"""theta[t]: one parameter set on the device, all others on the host and untouched. Rows D1, D3, D4, D5 of the acceptance table."""

import contextlib
import functools
import inspect
import weakref

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, BankError
from jaxpp.tasks import host_store
from jaxpp.tasks.bank import insert

WIDTH = 8
DEVICE = jax.devices()[0]
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
MOMENTUM = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, momentum=0.9))
BATCHES = [np.random.default_rng(k).normal(size=(4, WIDTH)).astype("f") for k in range(4)]


def theta(seed: int, width: int = WIDTH):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(WIDTH, width)).astype("f"), "b": np.zeros(width, "f")}


def loss_fn(params, task_params, batch):
    hidden = jnp.tanh(batch @ params["w"] + params["b"])
    return jnp.mean((hidden @ task_params["w"] + task_params["b"] - 1) ** 2)


class Step:
    """A plain jitted step that gives up all it is given but the batch, and counts how often it is traced."""

    def __init__(self, optimizer, loss=loss_fn, donate=(0, 1, 2, 3)):
        self.traces = 0

        @functools.partial(jax.jit, donate_argnums=donate)
        def step(params, opt_state, task_params, task_opt_state, batch):
            self.traces += 1
            loss_value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, task_params, batch)
            updates, opt_state = optimizer.update(grads[0], opt_state, params)
            task_updates, task_opt_state = optimizer.update(grads[1], task_opt_state, task_params)
            params, task_params = optax.apply_updates(params, updates), optax.apply_updates(task_params, task_updates)
            return params, opt_state, task_params, task_opt_state, loss_value

        self.step = step

    def __call__(self, *args):
        return self.step(*args)


def shared(optimizer, seed: int = 1000):
    params = jaxpp.gather(theta(seed), DEVICE)
    return params, jaxpp.gather(optimizer.init(params), DEVICE)


def train(bank, step, state, name, batch, then=None):
    with bank.use(name) as task:
        if then is not None:
            bank.prefetch(then)
        *state, task.params, task.opt_state, _ = step(*state, task.params, task.opt_state, batch)
    return state


def device_bytes() -> int:
    """Bytes in the first device's own memory, each buffer once."""
    kind, found = DEVICE.default_memory().kind, {}
    for array in jax.live_arrays():
        if not array.is_deleted() and array.sharding.memory_kind == kind:
            for shard in array.addressable_shards:
                if shard.device == DEVICE:
                    found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


def size(*trees) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))


def snapshot(bank, names):
    return {name: jax.tree.map(lambda leaf: leaf.tobytes(), (bank.params(name), bank.opt_state(name))) for name in names}


@pytest.fixture
def bank():
    return jaxpp.Bank({"cat": theta(0), "dog": theta(1), "wide": theta(2, 16)}, ADAMW)


@pytest.fixture
def compiles():
    """How many programs XLA compiled since."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count[0]
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("num_tasks", [2, 16, pytest.param(64, marks=pytest.mark.long)])
def test_device_bytes_are_those_of_one_set_a_slot_whatever_the_number_of_tasks(num_tasks, slots):
    others = jax.live_arrays()  # what other tests left, which would otherwise be let go at some moment of this one
    before = device_bytes()
    bank = jaxpp.Bank({t: theta(t) for t in range(num_tasks)}, ADAMW, slots=slots)
    assert device_bytes() == before
    step, state = Step(ADAMW), shared(ADAMW)
    one = size(bank.params(0), bank.opt_state(0))
    order = np.random.default_rng(0).permutation(np.arange(12) % num_tasks)
    for now, then in zip(order, [*order[1:], order[0]], strict=True):
        with bank.use(now) as task:
            if slots == 2 and then != now:
                bank.prefetch(then)
            *state, task.params, task.opt_state, loss = step(*state, task.params, task.opt_state, BATCHES[0])
            del loss
            assert device_bytes() - before <= size(state) + slots * one
    bank.wait()
    assert device_bytes() - before == size(state) + slots * one
    assert bank.nbytes == num_tasks * one
    del others


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_after_random_tasks_every_set_equals_the_all_resident_oracle_bit_for_bit(optimizer):
    sets = {t: theta(t) for t in range(5)}
    bank, step, state = jaxpp.Bank(sets, optimizer), Step(optimizer), shared(optimizer)
    resident = {t: jaxpp.gather(params, DEVICE) for t, params in sets.items()}
    resident = {t: (params, jax.jit(optimizer.init)(params)) for t, params in resident.items()}
    expected = shared(optimizer)
    order = np.random.default_rng(0).integers(0, 5, 40)
    for k, now in enumerate(order):
        batch, then = BATCHES[k % 4], int(order[k + 1]) if k + 1 < 40 and k % 3 else None
        state = train(bank, step, state, int(now), batch, then)
        *expected, params, opt_state, _ = step(*expected, *resident[now], batch)
        resident[now] = params, opt_state
    chex.assert_trees_all_equal(state, expected)
    for t in sets:
        chex.assert_trees_all_equal((bank.params(t), bank.opt_state(t)), resident[t])
    assert bank.host_store.traffic.prefetch_hits > 3
    assert {leaf.sharding.memory_kind for t in sets for leaf in bank.host_store.held(t).arrays} == {"pinned_host"}


def test_sixty_four_tasks_are_one_compilation_on_a_miss_a_hit_and_a_prefetched_copy(compiles):
    bank, step, state = jaxpp.Bank({t: theta(t) for t in range(64)}, ADAMW), Step(ADAMW), shared(ADAMW)
    batch = jaxpp.gather(BATCHES[0], DEVICE)
    state = train(bank, step, state, 0, batch)
    before = compiles()
    for t in range(64):
        state = train(bank, step, state, t, batch, then=(t + 1) % 64 if t % 2 else None)
    state = train(bank, step, state, 63, batch)
    bank.wait()
    assert (step.traces, compiles() - before) == (1, 0)
    traffic = bank.host_store.traffic
    assert traffic.prefetch_hits == 31
    assert traffic.hits > traffic.prefetch_hits
    assert traffic.loads > 32


def test_tasks_of_other_shapes_are_one_compilation_a_shape():
    sets = {t: theta(t, (1, WIDTH, 16)[t % 3]) for t in range(12)}
    bank, step, state = jaxpp.Bank(sets, ADAMW), Step(ADAMW), shared(ADAMW)
    for t in [*range(12), *range(12)]:
        state = train(bank, step, state, t, BATCHES[0], then=(t + 1) % 12)
    assert step.traces == 3


class Net(nn.Module):
    """A body with an adapter inside a block, and a head."""

    classes: int = 3

    @nn.compact
    def __call__(self, x):
        for k in range(2):
            x = Block(name=f"block_{k}")(x)
        return nn.Dense(self.classes, name="head")(x)


class Block(nn.Module):
    """A layer and an adapter beside it."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(WIDTH, name="dense")(x)) + nn.Dense(WIDTH, name="adapter")(x)


@pytest.mark.parametrize("path", ["head", *(pytest.param(path, marks=pytest.mark.long) for path in ("block_1/adapter", "block_0"))])
def test_one_module_serves_all_sets_without_being_edited(path):
    net = Net()
    whole = {t: net.init(jax.random.key(t), BATCHES[0])["params"] for t in range(4)}

    def whole_loss(params, batch):
        return jnp.mean(net.apply({"params": params}, batch) ** 2)

    rest, _ = jaxpp.Bank.take(whole[0], path)
    bank = jaxpp.Bank({t: jaxpp.Bank.take(params, path)[1] for t, params in whole.items()}, ADAMW)
    step = Step(ADAMW, bank.bind(whole_loss, path))
    for t in whole:
        params = jaxpp.gather(rest, DEVICE)
        expected = insert(rest, bank.params(t), path)
        with bank.use(t) as task:
            *_, task.params, task.opt_state, loss = step(
                params, jax.jit(ADAMW.init)(params), task.params, task.opt_state, BATCHES[0]
            )
        np.testing.assert_array_equal(loss, jax.jit(whole_loss)(expected, BATCHES[0]))
    assert step.traces == 1


def test_a_bound_loss_takes_a_key_and_replaces_what_is_there():
    loss = jaxpp.Bank.bind(lambda params, batch, key: (params["head"]["w"] * batch, key), "head/w")
    params = {"head": {"w": 1.0, "b": 2.0}}
    assert loss(params, 5.0, 3.0, "key") == (15.0, "key")
    assert loss(params, 5.0, batch=3.0, key="key") == (15.0, "key")
    assert params == {"head": {"w": 1.0, "b": 2.0}}


def test_a_task_may_have_parameters_in_several_places():
    whole = {"body": {"adapter": 1.0, "dense": 2.0}, "head": 3.0}
    paths = ["body/adapter", "head"]
    rest, own = jaxpp.Bank.take(whole, paths)
    assert rest == {"body": {"dense": 2.0}} and own == {"body/adapter": 1.0, "head": 3.0}
    assert insert(rest, own, paths) == whole
    loss = jaxpp.Bank.bind(lambda params, batch: params["body"]["adapter"] * batch + params["head"], paths)
    assert loss(rest, {"body/adapter": 5.0, "head": 7.0}, 2.0) == 17.0
    assert list(inspect.signature(loss).parameters) == ["params", "task_params", "batch"]
    for wrong in ([], 3, ["head", ""]):
        with pytest.raises(BankError, match="path"):
            jaxpp.Bank.bind(lambda params, batch: batch, wrong)


def test_take_and_insert_are_inverse_and_name_what_is_not_there():
    whole = Net().init(jax.random.key(0), BATCHES[0])["params"]
    for path in ("head", "block_1/adapter", "block_1/adapter/kernel"):
        chex.assert_trees_all_equal(insert(*jaxpp.Bank.take(whole, path), path), whole)
    with pytest.raises(BankError, match=r"params is or has no 'blok_1'(.|\n)*one of 'block_1'"):
        insert(whole, {}, "blok_1/adapter")
    with pytest.raises(BankError, match=r"params\[block_1\] is or has no 'adaptor'(.|\n)*'adapter'"):
        jaxpp.Bank.take(whole, "block_1/adaptor")
    with pytest.raises(BankError, match=r"params\[head/bias\] is or has"):
        jaxpp.Bank.take(whole, "head/bias/x")
    for path in ("", "a//b"):
        with pytest.raises(BankError, match="keys down to a subtree"):
            jaxpp.Bank.bind(loss_fn, path)


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_sets_that_are_not_used_stay_byte_identical(optimizer):
    bank, step, state = jaxpp.Bank({t: theta(t) for t in range(6)}, optimizer), Step(optimizer), shared(optimizer)
    for k in range(6):  # moments and counts that decay would change
        state = train(bank, step, state, k, BATCHES[k % 4])
    idle, before = (1, 3, 5), snapshot(bank, range(6))
    for k in range(9):
        state = train(bank, step, state, (0, 2, 4)[k % 3], BATCHES[k % 4], then=idle[k % 3])
    after = snapshot(bank, range(6))
    for t in idle:
        assert after[t] == before[t]
    for t in (0, 2, 4):
        assert all(a != b for a, b in zip(jax.tree.leaves(after[t]), jax.tree.leaves(before[t]), strict=True))


def test_a_bank_made_of_keys_has_the_parameters_that_init_makes_of_each():
    net = Net()

    def init(key):
        return net.init(key, BATCHES[0])["params"]

    keys = {f"user {k}": jax.random.key(k) for k in range(3)}
    bank = jaxpp.Bank.make(init, keys, ADAMW, device=jax.devices()[3])
    for name, key in keys.items():
        chex.assert_trees_all_equal(bank.params(name), jax.jit(init)(key))
        chex.assert_trees_all_equal(bank.opt_state(name), jax.jit(ADAMW.init)(init(key)))
    with bank.use("user 1") as task:
        assert {next(iter(leaf.devices())) for leaf in jax.tree.leaves((task.params, task.opt_state))} == {jax.devices()[3]}


def test_sets_come_and_go_and_a_set_goes_through_a_file_and_back(bank):
    step = Step(ADAMW)
    train(bank, step, shared(ADAMW), "cat", BATCHES[0])
    params, opt_state = bank.params("cat"), bank.opt_state("cat")
    bank.add(7, jax.tree.map(np.copy, params), opt_state=opt_state)
    chex.assert_trees_all_equal((bank.params(7), bank.opt_state(7)), (params, opt_state))
    assert opt_state[0].count == 1
    bank.remove("cat")
    assert (bank.tasks, list(bank), len(bank), "cat" in bank, 7 in bank) == (("dog", "wide", 7), ["dog", "wide", 7], 3, False, True)
    chex.assert_trees_all_equal(params, bank.params(7))
    train(bank, step, shared(ADAMW), 7, BATCHES[0])
    assert step.traces == 1


def test_shapes_are_those_of_the_leaves_in_the_store_in_order(bank):
    shapes = bank.shapes("wide")
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, (theta(2, 16), jax.eval_shape(ADAMW.init, theta(2, 16))))
    leaves = [(leaf.shape, leaf.dtype) for leaf in bank.host_store.held("wide").leaves]
    assert leaves == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
    assert isinstance(bank.params("wide")["w"], np.ndarray)
    assert bank.optimizer is ADAMW


def test_reading_a_set_or_assigning_its_own_arrays_writes_nothing(bank):
    host = bank.host_store.held("cat").arrays
    with bank.use("cat") as task:
        jax.block_until_ready(loss_fn(shared(ADAMW)[0], task.params, BATCHES[0]))
        task.params = dict(task.params)
    assert bank.host_store.held("cat").arrays is host
    assert bank.host_store.traffic.bytes_to_host == 0
    with bank.use("cat") as task:
        task.params["b"] = task.params["b"] + 1  # in place
    assert bank.host_store.traffic[:2] == (1, 1)
    np.testing.assert_array_equal(bank.params("cat")["b"], np.ones(WIDTH))


def test_arrays_from_elsewhere_are_taken_and_placed_as_a_step_would_have(bank, compiles):
    step, state = Step(ADAMW), shared(ADAMW)
    state = train(bank, step, state, "cat", BATCHES[0])
    with bank.use("cat") as task:
        twice, loose = jaxpp.gather(jnp.ones(WIDTH), DEVICE), jnp.ones((WIDTH, WIDTH))
        task.params = {"w": np.ones((WIDTH, WIDTH), "f"), "b": jax.device_put(twice, jax.devices()[1])}
        moments = task.opt_state[0]
        task.opt_state = (moments._replace(mu=moments.mu | {"b": twice}, nu={"b": twice, "w": loose}), *task.opt_state[1:])
    before = compiles()
    state = train(bank, step, state, "cat", BATCHES[0])
    assert (step.traces, compiles() - before) == (1, 0)
    assert bank.opt_state("cat")[0].count == 2


STRONG = (lambda: jnp.asarray(0.1), lambda rate: rate * np.float32(1))
WEAK = (lambda: jnp.asarray(0.1, jnp.float32), lambda rate: jnp.asarray(0.1))


@pytest.mark.parametrize(("first", "later"), [STRONG, WEAK], ids=["weak, then strong", "strong, then weak"])
def test_weakly_typed_leaves_and_prng_keys_in_an_optimizer_state_are_no_second_compilation(first, later):
    def update(updates, state, params=None):
        rate, key = state
        return jax.tree.map(lambda g: -g * rate, updates), (later(rate), jax.random.fold_in(key, 1))

    optimizer = optax.GradientTransformation(lambda _: (first(), jax.random.key(0)), update)
    bank, step = jaxpp.Bank({"a": theta(0), "b": theta(1)}, optimizer), Step(optimizer)
    params = jaxpp.gather(theta(5), DEVICE)
    for name in "aabba":
        with bank.use(name) as task:
            rate = jaxpp.gather((np.float32(0.1), jax.random.key(0)), DEVICE)
            params, _, task.params, task.opt_state, _ = step(params, rate, task.params, task.opt_state, BATCHES[0])
    assert step.traces == 1
    rate, key = bank.opt_state("b")
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 1)
    np.testing.assert_array_equal(jax.random.key_data(jaxpp.gather(key)), jax.random.key_data(expected))
    bank.add("c", theta(2), opt_state=(rate, key))


def test_the_task_alone_holds_its_arrays_so_a_step_that_keeps_its_arguments_holds_them_no_longer_than_needed(bank):
    step = Step(ADAMW, donate=())
    with bank.use("cat") as task:
        alive = [weakref.ref(leaf) for leaf in jax.tree.leaves((task.params, task.opt_state))]
        *_, task.params, task.opt_state, _ = step(*shared(ADAMW), task.params, task.opt_state, BATCHES[0])
        assert not any(ref() for ref in alive)


def test_what_is_added_may_be_overwritten_at_once():
    params = {"w": np.zeros((512, 512), "f")}
    bank = jaxpp.Bank({"a": params}, ADAMW)
    params["w"][:] = 7
    assert bank.params("a")["w"].max() == 0


def test_sets_are_made_on_the_banks_own_device(monkeypatch):
    seen, put = [], host_store.HostStore.put
    monkeypatch.setattr(
        host_store.HostStore, "put", lambda self, name, leaves, homes: (seen.extend(leaves), put(self, name, leaves, homes))
    )
    jaxpp.Bank.make(lambda key: {"w": jnp.zeros(3)}, {"a": jax.random.key(0)}, ADAMW, device=jax.devices()[3])
    assert [leaf.devices() for leaf in seen] == [{jax.devices()[3]}] * 4
    monkeypatch.setattr(jaxpp.Bank, "add", lambda self, name, params: seen.append(params["w"]))
    jaxpp.Bank.make(lambda key: {"w": jnp.zeros(3)}, {"a": jax.random.key(0)}, ADAMW, device=jax.devices()[3])
    assert seen[-1].devices() == {jax.devices()[3]}


def test_after_an_exception_nothing_is_written_and_the_copy_on_the_device_is_dropped(bank):
    before, step = snapshot(bank, bank), Step(ADAMW)

    def fail():
        with bank.use("cat") as task:
            *_, task.params, task.opt_state, _ = step(*shared(ADAMW), task.params, task.opt_state, BATCHES[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (bank.host_store.resident(), bank.host_store.in_use(), snapshot(bank, bank)) == ((), (), before)
    train(bank, step, shared(ADAMW), "cat", BATCHES[0])
    assert bank.host_store.traffic.loads == 2


def test_a_task_given_back_holds_nothing_and_says_where_its_set_is(bank):
    with bank.use("cat") as task:
        pass
    assert task.name == "cat"
    with pytest.raises(BankError, match=r"task\.params(.|\n)*given back(.|\n)*bank\.params\('cat'\)"):
        _ = task.params
    with pytest.raises(AttributeError):
        _ = task.weights


WRONG = {
    r"params\['b'\] is missing": lambda task: {"params": {"w": task.params["w"]}},
    r"params\['c'\] is not expected": lambda task: {"params": task.params | {"c": task.params["w"]}},
    r"params\['b'\]: f32\[2\] instead of f32\[8\]": lambda task: {"params": task.params | {"b": np.ones(2, "f")}},
    r"params\['b'\]: f16\[8\] instead of f32\[8\]": lambda task: {"params": task.params | {"b": np.ones(8, np.float16)}},
    r"params\['b'\]: float instead of f32\[8\]": lambda task: {"params": task.params | {"b": 1.0}},
    "opt_state: a dict of 2 instead of a tuple of 3": lambda task: {"opt_state": task.params},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_the_set_is_refused_and_the_set_stays_as_it_was(bank, message):
    before = snapshot(bank, bank)

    def assign():
        with bank.use("cat") as task:
            for field, value in WRONG[message](task).items():
                setattr(task, field, value)

    with pytest.raises(BankError, match=rf"with bank.use\('cat'\): a set keeps its trees(.|\n)*{message}"):
        assign()
    assert (snapshot(bank, bank), bank.host_store.resident(), bank.host_store.in_use()) == (before, (), ())
    with bank.use("cat"):
        pass


def test_arrays_given_up_and_not_assigned_are_named_and_the_set_stays_as_it_was(bank):
    before = snapshot(bank, bank)

    def forget():
        with bank.use("cat") as task:
            Step(ADAMW)(*shared(ADAMW), task.params, task.opt_state, BATCHES[0])

    with pytest.raises(BankError, match=r"7 of 7 arrays are gone(.|\n)*assign what the step returned"):
        forget()
    assert snapshot(bank, bank) == before


def test_one_set_is_in_use_at_a_time(bank):
    for other in ("cat", "dog"):
        with bank.use("cat"), pytest.raises(BankError, match="'cat' is in use"), bank.use(other):
            pass
    with bank.use("cat"), pytest.raises(BankError, match="cannot be removed"):
        bank.remove("cat")
    assert bank.tasks == ("cat", "dog", "wide")


def test_with_one_slot_there_is_none_to_prefetch_into():
    bank = jaxpp.Bank({"cat": theta(0), "dog": theta(1)}, ADAMW, slots=1)
    with bank.use("cat"), pytest.raises(BankError, match=r"slots=1, in use: 'cat'(.|\n)*slots=2"):
        bank.prefetch("dog")
    bank.prefetch("dog")
    with bank.use("dog"):
        pass
    assert bank.host_store.traffic == (2, 1, 1, *bank.host_store.traffic[3:])


@pytest.mark.parametrize("call", ["params", "opt_state", "shapes", "remove", "prefetch", "use"])
def test_an_unknown_name_is_refused_with_those_near_it(bank, call):
    with pytest.raises(BankError, match=r"bank\.\w+\('dgo'\): a name(.|\n)*'dgo'; the bank has cat, dog, wide(.|\n)*is it dog\?"):
        contextlib.ExitStack().enter_context(bank.use("dgo")) if call == "use" else getattr(bank, call)("dgo")
    with pytest.raises(BankError, match=r"99(.|\n)*bank\.add\(99, params\) first"):
        bank.prefetch(99)


REFUSED = {
    r"a tree without leaves": {},
    r"params\['w'\] is a float": {"w": 1.0},
    r"params\['w'\] is i64\[3\](.|\n)*params\['x'\] is a str": {"w": np.arange(3), "x": "y"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_a_set_is_refused_before_any_device_work(bank, message, monkeypatch):
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(BankError, match=message):
        bank.add("new", REFUSED[message])
    with pytest.raises(BankError, match="a second 'cat'"):
        bank.add("cat", theta(0))
    with pytest.raises(BankError, match=r"one that the optimizer made(.|\n)*opt_state"):
        bank.add("new", theta(0), opt_state=MOMENTUM.init(theta(0)))
    assert bank.tasks == ("cat", "dog", "wide")


def test_a_bank_needs_a_device_with_pinned_host_memory():
    class Bare:
        process_index = 0

        def addressable_memories(self):
            return []

        def __str__(self):
            return "bare:0"

    with pytest.raises(BankError, match=r"the device can reach pinned_host memory(.|\n)*bare:0 with none"):
        jaxpp.Bank({}, ADAMW, device=Bare())


def test_a_device_too_small_for_a_set_is_said_with_its_bytes_and_the_host_copy_is_whole(bank, monkeypatch):
    before, one = snapshot(bank, bank), size(bank.params("cat"), bank.opt_state("cat"))

    def full(leaves, homes):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    with monkeypatch.context() as patch, bank.use("dog"):
        patch.setattr(host_store, "to_device", full)
        with pytest.raises(
            BankError, match=rf"set 'cat'(.|\n)*no room for its {one:,} bytes \(2 slots\)(.|\n)*smaller batch"
        ) as caught:
            bank.prefetch("cat")
    assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)
    assert snapshot(bank, bank) == before
    with bank.use("cat"):
        pass


def test_the_table_says_what_is_where_and_what_moved(bank):
    train(bank, Step(ADAMW), shared(ADAMW), "cat", BATCHES[0], then="dog")
    lines = str(bank).splitlines()
    assert lines[0].split() == "tasks sets bytes a set on the host on the device".split()
    assert lines[1].split() == "cat, dog 2 868 B 1.695 KiB cat, dog".split()
    assert lines[2].split()[-1] == "none"
    assert lines[-2].startswith("3 sets, 3.387 KiB on the host, 2 slots on")
    assert lines[-1] == "2 loads, 0 hits (0 prefetched), 1.695 KiB to the device, 868 B to the host"
    page = bank._repr_html_()
    assert page.count("<tr>") == 3 and "cat, dog" in page and lines[-1] in page


@pytest.mark.parametrize(
    ("init", "keys", "got"),
    [
        (3, {"a": jax.random.key(0)}, "Got: 3."),
        (lambda key: {"w": jnp.zeros(3)}, [jax.random.key(0)], "Got: [Array"),
        (lambda key: {"w": jnp.zeros(3)}, {"a": 3}, "Got: int 3."),
        (lambda key: {"w": jnp.zeros(3)}, {"a": jnp.ones(3)}, "Got: f32[3]."),
    ],
)
def test_sets_are_made_by_a_function_from_keys(init, keys, got):
    with pytest.raises(ArgumentError) as caught:
        jaxpp.Bank.make(init, keys, ADAMW)
    assert got in str(caught.value), str(caught.value)
