"""A bank saves and restores itself: each set in a folder of its own, and a manifest that says where each is."""

import contextlib
import errno
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxpp
from jaxpp.errors import BankError
from jaxpp.tasks import bank_files, host_store

ADAM = optax.adam(1e-2)
NOISY = optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.adamw(1e-2, mu_dtype=jnp.bfloat16))


def theta(seed, width=4, dtype="float32"):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(3, width)).astype(dtype), "b": [rng.normal(size=width).astype(jnp.bfloat16)], "none": None}


def bank_of(*names, optimizer=ADAM, **options):
    return jaxpp.Bank({name: theta(k) for k, name in enumerate(names)}, optimizer, **options)


def change(bank, name, by=1.0):
    with bank.use(name) as task:
        task.params = jax.tree.map(lambda leaf: leaf + by, task.params)


def bits(bank, names=None):
    """Structure, dtype, shape and bytes of all that the sets hold."""

    def of(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return {
        (type(name), name): (jax.tree.structure(trees), [of(leaf) for leaf in jax.tree.leaves(trees)])
        for name in (bank if names is None else names)
        for trees in [(bank.params(name), bank.opt_state(name))]
    }


def through_json(manifest):
    found = json.loads(json.dumps(manifest))
    assert found == manifest
    return found


def folder_of(manifest, name):
    return {tuple(key) if isinstance(key, list) else key: folder for key, folder, _ in manifest["sets"]}[name]


def folders(directory):
    return {child.name for child in pathlib.Path(directory).iterdir()}


def restored(directory, manifest, optimizer=ADAM):
    """A bank that had no sets, and that a manifest was restored into."""
    bank = jaxpp.Bank({}, optimizer)
    bank.restore(directory, manifest)
    return bank


def no_room_for(name, monkeypatch):
    """The sets of this name are not saved, for want of room."""
    save = ocp.Checkpointer.save

    def failing(self, path, *args, **options):
        if name in path.name:
            pathlib.Path(f"{path}.orbax-checkpoint-tmp").mkdir()
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, *args, **options)

    monkeypatch.setattr(ocp.Checkpointer, "save", failing)


def script(code, *arguments):
    """The command that runs a script, and where it finds jaxpp."""
    return [sys.executable, "-c", code, *arguments], {**os.environ, "PYTHONPATH": os.getcwd()}


def test_a_bank_comes_back_bit_for_bit_in_a_bank_that_has_never_seen_its_sets(tmp_path):
    bank = jaxpp.Bank({t: theta(t, 4 + t % 2) for t in range(12)}, NOISY)
    for t in range(0, 12, 5):
        with bank.use(t) as task:
            updates, task.opt_state = NOISY.update(jax.tree.map(jnp.ones_like, task.params), task.opt_state, task.params)
            task.params = optax.apply_updates(task.params, updates)
    manifest = through_json(bank.save(tmp_path))
    assert len(folders(tmp_path)) == 12
    again = restored(tmp_path, manifest, optimizer=NOISY)
    assert bits(again) == bits(bank)
    assert again.tasks == bank.tasks
    started = jaxpp.Bank({t: theta(99, 4 + t % 2) for t in range(12)}, NOISY)
    started.restore(tmp_path, manifest)
    assert bits(started) == bits(bank)


def test_saving_after_one_task_changed_writes_one_task(tmp_path):
    bank = bank_of(*range(12))
    first = bank.save(tmp_path)
    before, there = bits(bank), folders(tmp_path)
    change(bank, 7)
    second = bank.save(tmp_path)
    new = folders(tmp_path) - there
    assert new == {folder_of(second, 7)}
    assert {name for name in range(12) if folder_of(first, name) != folder_of(second, name)} == {7}
    assert folders(tmp_path) == there | new
    after = bits(bank)
    for manifest, expected in ((first, before), (second, after)):  # the earlier checkpoint stays whole
        again = restored(tmp_path, manifest)
        assert bits(again) == expected


def test_what_is_read_used_without_assignment_or_packed_anew_is_not_written_again(tmp_path):
    bank = bank_of("cat", "dog")
    first = bank.save(tmp_path)
    with bank.use("cat"):
        pass
    with contextlib.suppress(ZeroDivisionError), bank.use("dog") as task:
        task.params = jax.tree.map(lambda leaf: leaf / 0 + 1 // 0, task.params)
    bank.params("cat"), bank.opt_state("dog")
    store, devices = bank.host_store, jax.devices()
    elsewhere = [jax.sharding.SingleDeviceSharding(devices[k % 2]) for k in range(len(store.held("cat").packing.shapes))]
    groups = store.held("cat").packing.groups
    store.keep("cat", store.fetch("cat", elsewhere, "a pipeline"), "a pipeline")
    assert store.held("cat").packing.groups != groups
    assert bank.save(tmp_path) == first
    assert len(folders(tmp_path)) == 2


def test_sets_restored_count_as_saved(tmp_path):
    manifest = bank_of("cat", "dog").save(tmp_path)
    bank = bank_of("cat")
    bank.restore(tmp_path, manifest)
    assert bank.save(tmp_path) == manifest
    change(bank, "dog")
    assert folder_of(bank.save(tmp_path), "cat") == folder_of(manifest, "cat")
    assert len(folders(tmp_path)) == 3


def test_a_restore_in_the_middle_of_a_run_takes_the_bank_back_on_the_devices_too(tmp_path):
    bank = bank_of("cat", "dog")
    manifest, before = bank.save(tmp_path), bits(bank)
    change(bank, "cat")
    bank.prefetch("cat")
    bank.restore(tmp_path, manifest)
    assert bits(bank) == before
    with bank.use("cat") as task:
        np.testing.assert_array_equal(task.params["w"], theta(0)["w"])
    assert bank.save(tmp_path) == manifest


def test_each_directory_has_its_own_account_however_it_is_written_and_what_somebody_deleted_is_written_again(tmp_path, monkeypatch):
    bank = bank_of("cat")
    first = bank.save(tmp_path / "a")
    bank.save(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert bank.save("a") == bank.save(f"{tmp_path}/b/../a/") == first
    assert len(folders("a")) == len(folders("b")) == 1
    bank = bank_of("cat", "dog")
    first = bank.save(tmp_path)
    shutil.rmtree(tmp_path / folder_of(first, "cat"))
    second = bank.save(tmp_path)
    assert folder_of(second, "dog") == folder_of(first, "dog")
    assert folder_of(second, "cat") in folders(tmp_path)


def test_a_set_in_use_is_saved_as_it_was_before_its_block(tmp_path):
    bank = bank_of("cat", "dog")
    with bank.use("cat") as task:
        task.params = jax.tree.map(lambda leaf: leaf + 1, task.params)
        first = bank.save(tmp_path)
        with pytest.raises(BankError, match=r"set 'cat': a set in use cannot be restored"):
            bank.restore(tmp_path, first)
    second = bank.save(tmp_path)
    again = restored(tmp_path, first)
    np.testing.assert_array_equal(again.params("cat")["w"], theta(0)["w"])
    again.restore(tmp_path, second)
    np.testing.assert_array_equal(again.params("cat")["w"], theta(0)["w"] + 1)


class Failing:
    """An array under way to the host whose copy fails."""

    def __init__(self, leaf):
        self.leaf = leaf
        self.nbytes, self.shape, self.dtype = leaf.nbytes, leaf.shape, leaf.dtype

    def is_ready(self):
        return False

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: the copy failed")


def test_a_write_back_that_failed_is_said_and_the_undone_set_is_no_change(tmp_path, monkeypatch):
    bank = bank_of("cat", "dog")
    first, before = bank.save(tmp_path), bits(bank)
    to_host = host_store.to_host
    monkeypatch.setattr(host_store, "to_host", lambda *args: tuple(map(Failing, to_host(*args))))
    change(bank, "cat")
    monkeypatch.undo()
    with pytest.raises(BankError, match="set 'cat': a write-back that fails leaves the set as it was before"):
        bank.save(tmp_path)
    assert bits(bank) == before
    assert bank.save(tmp_path) == first
    assert len(folders(tmp_path)) == 2


NAMES = [
    "cat",
    "",
    "ä/b c.d\n",
    "x" * 300,
    7,
    -3,
    2**70,
    0.1,
    -0.5,
    True,
    None,
    ("a", 1, (2.5, None, False)),
    (),
    "7",
    ("7",),
    "../up",
]


@pytest.mark.long
def test_names_of_all_kinds_come_back_exactly_and_numpy_scalars_find_their_sets_again(tmp_path):
    bank = bank_of(*NAMES)
    manifest = through_json(bank.save(tmp_path))
    again = restored(tmp_path, manifest)
    assert [(type(name), name) for name in again] == [(type(name), name) for name in NAMES]
    assert bits(again) == bits(bank)
    assert all(len(folder) < 80 for folder in folders(tmp_path))
    names = [np.int64(3), np.str_("cat"), np.float32(0.1)]
    bank = bank_of(*names)
    manifest = through_json(bank.save(tmp_path))
    for again in (bank_of(*names), jaxpp.Bank({}, ADAM)):
        again.restore(tmp_path, manifest)
        assert all(name in again for name in names)
        assert len(again) == 3


@pytest.mark.parametrize("name", [b"bytes", frozenset("a"), float("inf"), ("a", 1j), signal.SIGINT])
def test_other_names_are_refused_before_anything_is_written(name, tmp_path):
    bank = bank_of("cat", name)
    message = r"(?s)bank.save\('.*'\): the name of a set that is saved is a text, a number, a boolean, None or a tuple of these\..*"
    with pytest.raises(
        BankError, match=message + rf"a {type(name).__name__}\..*Fix: name the set otherwise: bank.add\(str\(name\)"
    ):
        bank.save(tmp_path / "sets")
    assert not (tmp_path / "sets").exists()


def trees():
    """Parameters of all kinds."""
    linear = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    yield "dict", {"a": {"w": np.ones((2, 2), "f"), "empty": {}}, 3: np.ones(2, "f")}["a"]
    yield "numbers", {0: np.ones(2, "f"), 10: np.zeros(1, "f"), 9: np.full(3, 2, "f")}
    yield "list", [np.ones(2, "f"), (np.zeros(1, np.float16), None), []]
    yield "slashes", {"mlp/~/linear_0": {"w": np.ones(2, "f")}, "mlp": {"w": np.zeros(2, "f")}}
    yield "zero size", {"w": np.zeros((0, 3), "f"), "v": np.ones((), "f")}
    yield "bits", {"w": np.array([0x7FA00001, 0xFFA12345, 0x80000000], np.uint32).view(np.float32)}
    yield "narrow", {"w": np.arange(256).astype(np.uint8).view(jnp.float8_e4m3fn), "c": np.ones(2, np.complex64)}
    yield "large", {"w": np.random.default_rng(0).normal(size=(200, 200)).astype("f")}
    yield "leaf", np.ones(3, "f")
    yield "frozen", flax.core.freeze({"w": np.ones((2, 2), "f")})
    yield "nnx", linear


TREES = dict(trees())
KNOWN = [name for name in TREES if name not in ("frozen", "nnx")]


@pytest.mark.parametrize("kind", TREES)
def test_trees_of_all_kinds_come_back(kind, tmp_path):
    bank = jaxpp.Bank({"a": TREES[kind], "b": TREES[kind]}, ADAM)
    manifest = through_json(bank.save(tmp_path))
    other = jaxpp.Bank({"a": jax.tree.map(jnp.zeros_like, TREES[kind])}, ADAM)
    other.restore(tmp_path, manifest)  # b has the tree of a
    assert bits(other) == bits(bank)
    empty = jaxpp.Bank({}, ADAM)
    if kind in KNOWN:
        empty.restore(tmp_path, manifest)
        assert bits(empty) == bits(bank)
    else:
        message = (
            r"(?s)added if its parameters are dicts, lists and tuples\..*Got: 'a', 'b'\..*Fix: bank.add\(name, params\) with any"
        )
        with pytest.raises(BankError, match=message):
            empty.restore(tmp_path, manifest)
        assert len(empty) == 0


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), NOISY, optax.multi_transform({"a": ADAM, "b": optax.set_to_zero()}, {"w": "a", "b": ["b"], "none": None})],
    ids=["sgd", "noisy", "multi_transform"],
)
def test_optimizer_states_of_all_kinds_come_back(optimizer, tmp_path):
    bank = bank_of("cat", optimizer=optimizer)
    again = restored(tmp_path, bank.save(tmp_path), optimizer=optimizer)
    assert bits(again) == bits(bank)
    with again.use("cat") as task:
        updates, task.opt_state = optimizer.update(jax.tree.map(jnp.ones_like, task.params), task.opt_state, task.params)
        task.params = optax.apply_updates(task.params, updates)
    assert not np.array_equal(again.params("cat")["w"], bank.params("cat")["w"])


def test_two_leaves_that_orbax_would_take_for_one_are_refused(tmp_path):
    bank = jaxpp.Bank({"cat": {"a.b": np.ones(3, "f"), "a": {"b": np.zeros(3, "f")}}}, optax.sgd(0.1))
    message = r"(?s)joins the keys of a leaf with dots.*'cat' has \['params'\]\['a'\]\['b'\] and \['params'\]\['a.b'\]"
    with pytest.raises(BankError, match=message):
        bank.save(tmp_path)
    assert not folders(tmp_path)


def test_plain_orbax_opens_the_folder_of_a_set_and_a_key_in_it_can_be_used_at_once(tmp_path):
    bank = bank_of("cat")
    change(bank, "cat")
    folder = tmp_path / folder_of(bank.save(tmp_path), "cat")
    with ocp.StandardCheckpointer() as checkpointer:
        params = theta(9)
        target = {"params": params, "opt_state": jax.jit(ADAM.init)(params)}
        found = checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, target))
    expected = {"params": bank.params("cat"), "opt_state": bank.opt_state("cat")}
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(found)] == [x.tobytes() for x in jax.tree.leaves(expected)]
    bank = bank_of("cat", optimizer=NOISY)
    folder = tmp_path / folder_of(bank.save(tmp_path), "cat")
    with ocp.StandardCheckpointer() as checkpointer:
        key = checkpointer.restore(folder)["opt_state"][0]["rng_key"]
    assert key == jax.random.key(3)  # which JAX refuses if one of them is in pinned memory


def refused(bank, directory, manifest, message):
    """A restore that is refused leaves the bank as it was."""
    before = bits(bank)
    with pytest.raises(BankError, match="(?s)" + message):
        bank.restore(directory, manifest)
    assert bits(bank) == before


def test_what_does_not_fit_is_refused_by_set_and_leaf(tmp_path):
    manifest = bank_of("cat", "dog").save(tmp_path)
    wide = jaxpp.Bank({"cat": theta(0), "dog": theta(1, 5)}, ADAM)
    message = (
        r"leaves that it was saved with\.\n  Got: 'dog': params\['b'\]\[0\] is bf16\[4\] in the manifest, bf16\[5\] in the bank\n"
    )
    refused(wide, tmp_path, manifest, message)
    other = bank_of("cat", "dog", optimizer=optax.sgd(0.1))
    refused(other, tmp_path, manifest, r"'cat': opt_state\[0\]\.count is i32\[\] in the manifest, missing in the bank")
    refused(
        jaxpp.Bank({}, optax.sgd(0.1)),
        tmp_path,
        manifest,
        r"'dog': opt_state\[0\]\.mu\['w'\] is f32\[3,4\] in the manifest, missing",
    )
    more = bank_of("cat", "dog", "owl")
    refused(
        more, tmp_path, manifest, r"names all its sets\.\n  Got: sets that the manifest does not name: 'owl'\..*bank.remove\(name\)"
    )


def test_float64_is_not_made_float32_in_silence(tmp_path):
    with jax.enable_x64(True):
        bank = jaxpp.Bank({"cat": theta(0, dtype="float64")}, optax.sgd(0.1))
        manifest = bank.save(tmp_path)
        again = jaxpp.Bank({}, optax.sgd(0.1))
        again.restore(tmp_path, manifest)
        assert bits(again) == bits(bank)
    refused(
        jaxpp.Bank({}, optax.sgd(0.1)),
        tmp_path,
        manifest,
        r"float64, and x64 is off\.\n  Fix: jax.config.update\(\"jax_enable_x64\", True\)",
    )


@pytest.mark.parametrize("manifest", [None, {}, [], {"jaxpp_bank": 1}, {"jaxpp_bank": 1, "forms": [], "sets": [["cat", "x", 0]]}])
def test_what_is_no_manifest_is_refused(manifest, tmp_path):
    refused(bank_of("cat"), tmp_path, manifest, "a manifest says where the sets of a bank are.*Fix: pass what bank.save returned")


def damaged(part, junk):
    """Copies of a manifest with one part replaced by junk."""
    yield junk
    children = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, child in children:
        for other in damaged(child, junk):
            copy = part.copy()
            copy[key] = other
            yield copy


@pytest.mark.parametrize("junk", [None, -1, 1.5, True, "x", [], {}, [[]], {"a": 1}, 10**30], ids=repr)
def test_a_damaged_manifest_is_refused_and_the_bank_is_as_before(junk, tmp_path):
    manifest = jaxpp.Bank({"cat": {"w": [np.ones(2, "f")]}}, optax.sgd(0.1)).save(tmp_path)
    for wrong in damaged(manifest, junk):
        bank = jaxpp.Bank({}, optax.sgd(0.1))
        with contextlib.suppress(BankError):  # a set of another name, say, is no damage that can be seen
            bank.restore(tmp_path, wrong)
            continue
        assert len(bank) == 0


JUNK = [None, True, -1, 2**70, 1e300, "", "leaf", "key<fry>", "V8", "float64", [], {}, [[]], {"a": 1}, [2**40, 0], [0, 2**62]]


def places(part, way=()):
    """The way to each part of a manifest."""
    yield way
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield from places(part[key], (*way, key))


def random_damage(manifest, seed):
    """A manifest of which one place is lost, doubled, replaced, put elsewhere or nested, or whose text has other bits or an end."""
    rng, text = np.random.default_rng(seed), bytearray(json.dumps(manifest).encode())
    how = rng.choice(["lost", "doubled", "junk", "elsewhere", "nested", "bits", "bits", "end"])
    if how in ("bits", "end"):
        for _ in range(1000):  # until the text is JSON again, for what is none never comes to a bank
            with contextlib.suppress(ValueError):
                text[rng.integers(len(text))] ^= 1 << rng.integers(8)
                return json.loads(text if how == "bits" else text[: rng.integers(len(text))] + b"]" * rng.integers(5) + b"}")
            text = bytearray(json.dumps(manifest).encode())
        return None
    wrong = json.loads(text)
    ways = [way for way in places(wrong) if way]
    *way, last = ways[rng.integers(len(ways))]
    node = functools.reduce(lambda part, key: part[key], way, wrong)
    if how == "lost":
        del node[last]
    elif how == "doubled" and isinstance(node, list):
        node.append(node[last])
    elif how == "elsewhere":
        node[last] = functools.reduce(lambda part, key: part[key], ways[rng.integers(len(ways))], json.loads(text))
    elif how == "nested":
        for _ in range(rng.choice([1, 50, 300, 450, 900, 50_000])):
            node[last] = rng.choice(["list", "tuple"]).item(), [node[last]]
    else:
        node[last] = JUNK[rng.integers(len(JUNK))]
    return wrong


@pytest.mark.parametrize("start", [0, 20, 320, 620, 920])
@pytest.mark.long
def test_random_damage_of_a_manifest_is_one_clear_error_and_the_bank_is_as_before(start, tmp_path):
    dog = {"a": (np.ones(4, "f"), [np.ones(1, "f")])}
    trees = {"cat": {"w": np.ones((2, 3), "f"), "none": np.zeros((0, 2), "f")}, ("dog", 1): dog}
    manifest, refused, changed = jaxpp.Bank(trees, SGD).save(tmp_path), list[str](), list[int]()
    for seed in range(start, start + (300 if start else 20)):
        bank = jaxpp.Bank({name: trees[name] for name in list(trees)[: seed % 3]}, SGD)
        before = bits(bank)
        try:
            bank.restore(tmp_path, random_damage(manifest, seed))
        except BankError as error:
            refused.append(str(error))
            changed += [seed] * (bits(bank) != before)
    assert not changed
    assert len(refused) > 10
    for message in refused:
        assert re.fullmatch(rf"bank\.restore\('{tmp_path}', \.\.\.\): .*\.\n  Got: .*\.\n  Fix: .*\.", message, re.DOTALL), message


def test_a_manifest_that_is_nested_too_deeply_is_refused(tmp_path):
    manifest = bank_of("cat").save(tmp_path)
    for _ in range(3000):
        manifest["forms"][0]["params"] = ["list", [manifest["forms"][0]["params"]]]
    refused(bank_of("cat"), tmp_path, manifest, "a manifest says where the sets of a bank are")


def test_a_manifest_that_gives_a_set_the_values_of_another_is_refused(tmp_path):
    manifest = bank_of("cat", "dog").save(tmp_path)
    (cat, folder, form), (dog, *_) = manifest["sets"]
    one = manifest | {"sets": [[cat, folder, form], [dog, folder, form]]}
    refused(bank_of("cat", "dog"), tmp_path, one, f"each set has a folder of its own.*'cat': {folder}.*'dog': {folder}")
    damage = "a manifest says where the sets of a bank are"
    refused(bank_of("cat"), tmp_path, manifest | {"sets": [[cat, *row[1:]] for row in manifest["sets"]]}, damage)  # one name twice
    refused(bank_of("cat"), tmp_path, manifest | {"sets": [[cat, folder, False]]}, damage)  # which Python takes for 0
    refused(bank_of("cat", "dog"), tmp_path, {name: manifest[name] for name in ("sets", "forms")}, damage)
    for version in (2, True):
        refused(
            bank_of("cat", "dog"), tmp_path, manifest | {"jaxpp_bank": version}, f"version {version}; this jaxpp reads version 1"
        )


SGD = optax.sgd(0.1)
LATE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Where Orbax fails at one array, others come back to an event loop that it has closed; so these tests have sets of one array."""


def one_array(seed, width=200):
    return {"w": np.random.default_rng(seed).normal(size=(300, width)).astype("f")}


@LATE
def test_missing_and_torn_folders_are_refused_and_the_bank_is_as_before(tmp_path):
    bank = jaxpp.Bank({"cat": one_array(0), "dog": one_array(1)}, SGD)
    manifest = bank.save(tmp_path)
    change(bank, "cat"), change(bank, "dog")
    refused(bank, tmp_path / "elsewhere", manifest, r"'cat': set-cat-\w+ is not there\n.*'dog': set-dog")
    dog = tmp_path / folder_of(manifest, "dog")
    torn = dog.rename(tmp_path / f"{dog.name}.orbax-checkpoint-tmp")  # as a save leaves it that is killed half-way
    refused(bank, tmp_path, manifest, rf"'dog': {dog.name} is not there")
    torn.rename(dog)
    for file in [file for file in dog.rglob("*") if file.is_file() and file.stat().st_size > 10_000]:
        file.write_bytes(file.read_bytes()[:50])
    refused(bank, tmp_path, manifest, rf"a set's folder is as it was saved\.\n  Got: 'dog', in .*{dog.name}: ")


@LATE
def test_a_folder_with_other_shapes_than_its_manifest_is_refused(tmp_path):
    bank = jaxpp.Bank({"cat": one_array(0), "dog": one_array(1)}, SGD)
    manifest = bank.save(tmp_path)
    folder = tmp_path / folder_of(manifest, "dog")
    folder.rename(tmp_path / "x")
    jaxpp.Bank({"owl": one_array(1, 100)}, SGD).save(tmp_path)
    next(tmp_path.glob("set-owl-*")).rename(folder)
    change(bank, "cat")
    refused(bank, tmp_path, manifest, r"a set's folder is as it was saved\.\n  Got: 'dog'")


def test_a_save_that_fails_in_the_middle_says_what_is_written_and_the_next_one_writes_the_rest(tmp_path, monkeypatch):
    bank = bank_of("cat", "dog", "owl", "fox")
    first, before = bank.save(tmp_path), bits(bank)
    there = folders(tmp_path)
    for name in ("cat", "dog", "owl"):
        change(bank, name)
    changed = bits(bank)
    no_room_for("dog", monkeypatch)
    message = r"(?s)stays whole if a save fails.*Got: OSError: \[Errno 28\] No space left on device\n"
    with pytest.raises(
        BankError, match=message + ".*1 of the 3 sets that changed are saved, 'dog' is not.*Fix: free room"
    ) as caught:
        bank.save(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    assert bits(bank) == changed
    one = folders(tmp_path) - there
    assert len(one) == 1 and next(iter(one)).startswith("set-cat-")
    again = restored(tmp_path, first)
    assert bits(again) == before
    second = bank.save(tmp_path)
    assert folder_of(second, "cat") in one
    assert folder_of(second, "fox") == folder_of(first, "fox")
    assert len(folders(tmp_path)) == 4 + 3
    again.restore(tmp_path, second)
    assert bits(again) == changed


def test_an_interrupt_comes_out_as_it_is_and_leaves_no_half(tmp_path, monkeypatch):
    bank = bank_of("cat")

    def interrupted(self, path, *args, **options):
        pathlib.Path(f"{path}.orbax-checkpoint-tmp").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.Checkpointer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bank.save(tmp_path)
    assert not folders(tmp_path)
    monkeypatch.undo()
    assert folders(tmp_path) == set() and len(bank.save(tmp_path)["sets"]) == 1


@LATE
def test_a_file_that_may_not_grow_is_an_error_that_says_so(tmp_path):
    bank = jaxpp.Bank({"cat": one_array(0)}, SGD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            BankError, match=r"(?s)stays whole if a save fails.*0 of the 1 sets that changed are saved, 'cat' is not"
        ):
            bank.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not folders(tmp_path)
    again = restored(tmp_path, bank.save(tmp_path), optimizer=SGD)
    assert bits(again) == bits(bank)


def test_a_directory_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            BankError, match=r"(?s)sets are in a directory of their own.*Fix: pass a directory that this process may"
        ):
            bank_of("cat").save(directory)
    for directory in ("", 3, None):
        with pytest.raises(BankError, match="a directory is a path"):
            bank_of("cat").save(directory)


KILLED = """
import sys
import jax, numpy as np, optax, jaxpp
bank = jaxpp.Bank({t: {"w": np.full((64, 64), t, "f")} for t in range(40)}, optax.adam(1e-2))
bank.save(sys.argv[1])
"""


@pytest.mark.long
def test_a_save_that_is_killed_leaves_earlier_sets_whole_and_prune_deletes_what_it_left(tmp_path):
    bank = jaxpp.Bank({t: {"w": np.full((64, 64), -t, "f")} for t in range(3)}, ADAM)
    manifest = bank.save(tmp_path)
    command, environment = script(KILLED, tmp_path)
    with subprocess.Popen(command, env=environment) as process:
        try:
            while len(folders(tmp_path)) < 3 + 5:  # it is in the middle
                assert process.poll() is None
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    again = restored(tmp_path, manifest)
    assert bits(again) == bits(bank)
    gone = again.prune(tmp_path, [manifest])
    assert len(gone) >= 5
    assert folders(tmp_path) == {folder for _, folder, _ in manifest["sets"]}


def test_prune_deletes_what_no_manifest_names_and_nothing_else(tmp_path):
    bank = bank_of("cat", "dog")
    manifests = [bank.save(tmp_path)]
    for _ in range(3):
        change(bank, "cat")
        manifests.append(through_json(bank.save(tmp_path)))
    others = ["set-cat-short", "set-cat-0123456789abcdef.bak", "0", "notes"]
    for other in others:
        (tmp_path / other).mkdir()
    (tmp_path / "set-owl-0123456789abcdef.orbax-checkpoint-tmp").mkdir()
    links = ["set-a-0123456789abcdef", "set-b-0123456789abcdef", "set-c-0123456789abcdef"]  # no folders: nothing that a save made
    (tmp_path / links[0]).symlink_to(tmp_path / "notes")
    (tmp_path / links[1]).symlink_to(tmp_path / "gone")
    (tmp_path / links[2]).touch()
    named = [{folder_of(manifest, name) for name in ("cat", "dog")} for manifest in manifests]
    fresh = jaxpp.Bank({}, ADAM)
    gone = fresh.prune(tmp_path, manifests[1:3])
    expected = {*(named[0] | named[3]) - named[1] - named[2], "set-owl-0123456789abcdef.orbax-checkpoint-tmp"}
    assert set(gone) == expected and len(gone) == 3
    assert {path.name for path in tmp_path.iterdir()} == named[1] | named[2] | {*others, *links}
    fresh.restore(tmp_path, manifests[1])
    assert fresh.prune(tmp_path, manifests[1:3]) == ()
    assert fresh.prune(tmp_path / "nowhere", []) == ()


def test_prune_keeps_what_the_bank_saved_last_because_its_checkpoint_may_not_be_complete_yet(tmp_path):
    bank = bank_of("cat", "dog")
    bank.save(tmp_path)
    change(bank, "cat")
    newest = bank.save(tmp_path)
    assert len(bank.prune(tmp_path, [])) == 1
    assert folders(tmp_path) == {folder for _, folder, _ in newest["sets"]}
    assert bank.save(tmp_path) == newest


def test_prune_keeps_what_the_last_manifest_names_after_a_save_that_failed(tmp_path, monkeypatch):
    bank = bank_of("cat", "dog", "owl")
    bank.save(tmp_path)
    bank.remove("owl")
    named = {folder for _, folder, _ in bank.save(tmp_path)["sets"]}
    assert len(bank.prune(tmp_path, [])) == 1
    change(bank, "cat"), change(bank, "dog")
    no_room_for("dog", monkeypatch)
    with pytest.raises(BankError, match="1 of the 2 sets that changed are saved, 'dog' is not"):
        bank.save(tmp_path)
    assert bank.prune(tmp_path, []) == ()
    assert named < folders(tmp_path) and len(folders(tmp_path)) == 3


def test_prune_wants_a_list_of_manifests(tmp_path):
    bank = bank_of("cat")
    manifest = bank.save(tmp_path)
    with pytest.raises(BankError, match=r"(?s)manifests are given as a list.*Fix: pass \[manifest\]"):
        bank.prune(tmp_path, manifest)
    with pytest.raises(BankError, match="a manifest says where the sets of a bank are"):
        bank.prune(tmp_path, [None])
    assert folder_of(manifest, "cat") in folders(tmp_path)


def test_without_orbax_the_error_names_the_extra(tmp_path, monkeypatch):
    bank = bank_of("cat")

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(bank_files, "importlib", type("importlib", (), {"import_module": staticmethod(missing)}))
    calls = [lambda: bank.save(tmp_path), lambda: bank.restore(tmp_path, {}), lambda: bank.prune(tmp_path, [])]
    for call in calls:
        with pytest.raises(
            BankError, match=r'(?s)Orbax, which is not installed.*Fix: pip install -e "\.\[checkpoint\]" in the checkout of jaxpp\.'
        ):
            call()


def test_a_bank_says_how_much_changed_since_it_was_saved(tmp_path):
    bank = bank_of("cat", "dog", "owl")
    bank.prune(tmp_path, [])
    assert "save" not in repr(bank) + str(bank)
    bank.save(tmp_path)
    assert repr(bank).endswith("all saved)") and str(bank).endswith("\nall saved") and "all saved" in bank._repr_html_()
    change(bank, "cat")
    assert repr(bank).endswith(", 1 set changed since the last save)")
    bank.add("new", theta(7))
    assert str(bank).endswith("\n2 sets changed since the last save")
    bank.save(tmp_path)
    bank.remove("dog")
    assert repr(bank).endswith("all saved)")


WIDTH = 6


def joint_loss(params, task, batch, key):
    x = jnp.tanh(batch @ params["w0"]) * jax.random.bernoulli(key, 0.9, batch.shape)
    return jnp.mean((jnp.tanh(x @ task["adapter"]) @ params["w1"] @ task["head"]) ** 2)


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


THETA = {"w0": numbers(0, WIDTH, WIDTH), "w1": numbers(1, WIDTH, WIDTH)}


def opened(bank, *, restore=False, **options):
    """A pipeline, its first state (or what a checkpoint is restored to), and a batch."""
    pipe = jaxpp.Pipeline(joint_loss, optax.adamw(1e-2), num_stages=2, num_microbatches=2, bank=bank, **options)
    batch = numbers(5, 8, WIDTH)
    return pipe, (pipe.abstract_state if restore else pipe.init)(THETA, batch), batch


def a_set(seed):
    return {"adapter": numbers(10 + seed, WIDTH, WIDTH), "head": numbers(20 + seed, WIDTH, 2)}


RUNS = {
    "one replica": ({}, [f"t{k % 5}" for k in range(12)]),
    "replicas": ({"data_parallel": 2}, [[f"t{k % 5}", f"t{(k + 1) % 3}"] for k in range(12)]),
}


@pytest.mark.parametrize("kind", ["one replica", pytest.param("replicas", marks=pytest.mark.long)])
@pytest.mark.long
def test_a_run_that_is_saved_and_resumed_in_one_step_of_a_manager_ends_with_the_bits_of_a_run_that_is_not(kind, tmp_path):
    options, tasks = RUNS[kind]

    def run(pipe, state, batch, begin, end):
        for k in range(begin, end):
            state, _ = pipe.step(state, batch, jax.random.key(k), task=tasks[k])
        return state

    sets = {f"t{k}": a_set(k) for k in range(6)}
    whole = jaxpp.Bank(sets, NOISY)
    pipe, state, batch = opened(whole, **options)
    expected = run(pipe, state, batch, 0, 12)

    bank = jaxpp.Bank(sets, NOISY)
    pipe, state, batch = opened(bank, **options)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        for end in (4, 7):
            state = run(pipe, state, batch, {4: 0, 7: 4}[end], end)
            items = {"state": ocp.args.StandardSave(state), "bank": ocp.args.JsonSave(bank.save(tmp_path / "sets"))}
            manager.save(end, args=ocp.args.Composite(**items))
    run(pipe, state, batch, 7, 9)  # lost
    del pipe, state, bank

    bank = jaxpp.Bank({}, NOISY)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manifest = manager.restore(manager.latest_step(), args=ocp.args.Composite(bank=ocp.args.JsonRestore())).bank
        bank.restore(tmp_path / "sets", manifest)
        pipe, target, batch = opened(bank, restore=True, **options)
        state = manager.restore(7, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))).state
        manifests = [
            manager.restore(step, args=ocp.args.Composite(bank=ocp.args.JsonRestore())).bank for step in manager.all_steps()
        ]
    assert manifest == manifests[1]
    assert not bank.prune(tmp_path / "sets", manifests)
    assert state.step == 7
    state = run(pipe, state, batch, 7, 12)
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    assert bits(bank) == bits(whole)


@pytest.mark.long
def test_evaluating_changes_no_set_and_a_step_changes_those_of_its_tasks(tmp_path):
    bank = jaxpp.Bank({f"t{k}": a_set(k) for k in range(4)}, ADAM)
    pipe, state, batch = opened(bank, data_parallel=2)
    first = bank.save(tmp_path)
    pipe.evaluate(state, batch, jax.random.key(0), task=["t0", "t1"])
    assert bank.save(tmp_path) == first
    pipe.step(state, batch, jax.random.key(0), task=["t1", "t3"])
    second = bank.save(tmp_path)
    assert {name for name in bank if folder_of(first, name) != folder_of(second, name)} == {"t1", "t3"}


def test_a_pipeline_goes_on_with_a_bank_that_was_taken_back(tmp_path):
    bank = jaxpp.Bank({f"t{k}": a_set(k) for k in range(2)}, ADAM)
    pipe, state, batch = opened(bank)
    kept, manifest = jax.device_get(state), bank.save(tmp_path)
    found = []
    for _ in range(2):
        state = kept
        for k in range(3):
            state, _ = pipe.step(state, batch, jax.random.key(k), task="t1")
        found.append((bits(bank), [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(state.params))]))
        homes = bank.host_store.held("t1").packing.homes
        bank.restore(tmp_path, manifest)
        assert bank.host_store.held("t1").packing.homes == homes  # packed for the pipeline, as before
    assert found[0] == found[1]


def test_a_set_that_a_step_could_not_give_back_is_said_before_anything_is_saved(tmp_path, monkeypatch):
    bank = jaxpp.Bank({f"t{k}": a_set(k) for k in range(2)}, ADAM)
    pipe, state, batch = opened(bank)
    pipe.evaluate(state, batch, jax.random.key(0), task="t1")

    def no_room(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room on the host")

    monkeypatch.setattr(host_store, "to_host", no_room)
    pipe.step(state, batch, jax.random.key(0), task="t1")  # whose new state must not be lost
    monkeypatch.undo()
    with pytest.raises(
        BankError, match=r"(?s)set 't1': a write-back that fails leaves the set as it was before.*no room on the host"
    ):
        bank.save(tmp_path / "sets")
    assert not (tmp_path / "sets").exists()
    assert len(bank.save(tmp_path / "sets")["sets"]) == 2


def test_an_interrupt_while_sets_are_replaced_comes_after_the_last_of_them(tmp_path, monkeypatch):
    bank = bank_of("cat", "dog")
    manifest, before = bank.save(tmp_path), bits(bank)
    change(bank, "cat"), change(bank, "dog")
    drop = host_store.HostStore._drop

    def interrupted(self, name):
        signal.raise_signal(signal.SIGINT)
        drop(self, name)

    monkeypatch.setattr(host_store.HostStore, "_drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bank.restore(tmp_path, manifest)
    monkeypatch.undo()
    assert bits(bank) == before
    assert bank.save(tmp_path) == manifest


QUIET = """
import sys, numpy as np, optax, jax, jaxpp
assert not [name for name in sys.modules if name.startswith("orbax")]
bank = jaxpp.Bank({"cat": {"w": np.ones(3, "f")}}, optax.adam(.1))
manifest = bank.save(sys.argv[1])
bank.restore(sys.argv[1], manifest)
jaxpp.Bank({}, optax.adam(.1)).restore(sys.argv[1], manifest)
bank.prune(sys.argv[1], [manifest])
"""


@pytest.mark.long
def test_jaxpp_does_not_import_orbax_and_writes_nothing_to_standard_error(tmp_path):
    command, environment = script(QUIET, tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
