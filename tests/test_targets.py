"""The table of GPUs keeps laws that hold of any GPU, and devices that only compile are made without one."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.targets import (
    TARGETS,
    Chip,
    LinkRates,
    Peaks,
    compiles_only,
    device_name,
    refuse_compile_only,
    stand_ins,
    target,
    target_of,
    target_table,
)

NAMES = [each.name for each in TARGETS]
each_target = pytest.mark.parametrize("one", TARGETS, ids=NAMES)


def numbers_of(value, path=""):
    """The numbers of a target by dotted field."""
    for field in dataclasses.fields(value):
        name, part = f"{path}{field.name}", getattr(value, field.name)
        if isinstance(part, Peaks | LinkRates | Chip):
            yield from numbers_of(part, f"{name}.")
        elif isinstance(part, int | float | tuple) and field.name != "aliases":
            yield name, part


# --- the table ---


@each_target
def test_every_number_is_positive_and_says_where_it_comes_from(one):
    found = dict(numbers_of(one))
    assert {"memory", "bandwidth", "peaks.bfloat16", "links.peer", "chip.capability"} <= set(found)
    for name, number in found.items():
        assert number > ((0, 0) if isinstance(number, tuple) else 0), name
        assert len(one.source(name)) > 10, name
    stray = [name for name in one.sources if name not in found and not any(each.startswith(f"{name}.") for each in found)]
    assert not stray, "sources of what is no number"


@each_target
def test_fewer_bits_are_not_slower(one):
    peaks = one.peaks
    assert peaks.bfloat16 >= peaks.tensorfloat32 >= peaks.float32 >= peaks.float64
    assert peaks.int8 >= (peaks.float8 or peaks.bfloat16) >= peaks.bfloat16


HALVED = ("rtx-3090", "rtx-4090", "rtx-5090", "a10g")
"""GPUs whose products with sums in float32 are half as fast as with sums in float16."""


@each_target
def test_rates_are_dense_and_follow_from_the_cores(one):
    peaks, chip = one.peaks, one.chip
    capability, cores = chip.capability, 2e9 * chip.cores * chip.clock
    assert peaks.vector == pytest.approx(cores * chip.lanes, rel=0.01)
    products = peaks.float16 / cores  # multiplications of a core in a clock, at the highest clock
    tensor_cores = {7: 512, 8: 1024 if chip.lanes == 64 else 512, 9: 2048, 10: 4096, 12: 512}[capability[0]]
    assert products == pytest.approx(tensor_cores / (1 + (one.name in HALVED)), rel=0.1)
    if capability < (8, 0):  # neither bfloat16 nor tensorfloat32
        assert peaks.bfloat16 == peaks.tensorfloat32 == peaks.float32
        return
    assert peaks.float16 == peaks.bfloat16
    assert peaks.bfloat16 / peaks.tensorfloat32 == pytest.approx(2, rel=0.02)
    assert (peaks.float8 is None) == (capability < (8, 9))
    bytes_only = peaks.float8 or peaks.int8 / (1 + (one.name == "rtx-3090"))
    assert bytes_only / peaks.bfloat16 == pytest.approx(2, rel=0.02)


@each_target
def test_links_are_slower_than_memory_and_the_network_is_the_slowest(one):
    assert one.bandwidth > one.links.peer >= one.links.network
    assert one.links.host >= one.links.network
    assert "assumed" in one.source("links.network")


@each_target
def test_cards_without_access_to_one_another_copy_at_half_of_their_link(one):
    passes = "pass the host's memory" in one.source("links") if "links" in one.sources else False
    assert passes == (one.shown in ("RTX-3090", "RTX-4090", "RTX-5090"))
    assert one.links.peer >= one.links.host if not passes else one.links.peer == one.links.host / 2


def test_names_kinds_and_spellings_are_of_one_target_each():
    for field in ("name", "shown", "kind"):
        assert len({getattr(each, field) for each in TARGETS}) == len(TARGETS)
    spelled = [re.sub("[^a-z0-9]", "", name.lower()) for each in TARGETS for name in {each.name, *each.aliases}]
    assert len(set(spelled)) == len(spelled)


def test_targets_are_values():
    assert len(set(TARGETS)) == len(TARGETS)
    assert TARGETS[0] == dataclasses.replace(TARGETS[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGETS[0].memory = 1


def test_the_table_has_a_row_for_each_target():
    head, *rows = target_table(200).splitlines()
    assert head.split() == ["name", "memory", "bandwidth", "bfloat16", "peer", "host", "network"]
    assert [row.split()[0] for row in rows] == NAMES
    assert re.search(r"^ +h100 +79.1 GiB +3352 GB/s +989 TFLOP/s +450 GB/s +64 GB/s +50 GB/s$", target_table(200), re.MULTILINE)


@each_target
def test_the_text_for_the_compiler_has_the_numbers_of_the_target(one):
    text = one.spec()
    assert text.count("{") == text.count("}")
    fields = dict(re.findall(r'(\w+): ("[^"]*"|\S+)', text))
    assert fields["device_description_str"] == fields["name"] == f'"{one.kind}"'
    assert int(fields["device_memory_size"]) == one.memory
    assert int(fields["memory_bandwidth"]) == one.bandwidth
    assert (int(fields["core_count"]), float(fields["clock_rate_ghz"])) == (one.chip.cores, one.chip.clock)
    reserved = int(fields["shared_memory_per_core"]) - int(fields["shared_memory_per_block_optin"])
    assert reserved >= 1024 if one.chip.capability >= (8, 0) else reserved == 0
    assert (fields["feature_extension"] == "ACCELERATED_FEATURES") == (one.chip.capability in ((9, 0), (10, 0)))


# --- a GPU of one's own ---


def test_a_gpu_is_described_by_what_differs_from_another():
    card = jaxpp.GPU.like("rtx-4090", "RTX 4080", memory=15 << 30, bandwidth=717e9, cores=76, clock=2.505, int8=390e12)
    known = next(each for each in TARGETS if each.name == "rtx-4090")
    faster = 76 * 2.505 / (128 * 2.52)
    assert (card.name, card.shown, card.kind, card.memory, card.aliases) == ("RTX 4080", "RTX-4080", "RTX 4080", 15 << 30, ())
    assert (card.chip.cores, card.chip.l2, card.links) == (76, known.chip.l2, known.links)
    assert card.peaks.int8 == 390e12
    assert card.peaks.bfloat16 == pytest.approx(known.peaks.bfloat16 * faster)
    assert card.source("links.host").startswith("that of rtx-4090: PCIe Gen4")
    assert card.source("memory") == card.source("peaks.bfloat16") == "said by whoever described this GPU"
    assert jaxpp.GPU.like(card, "slower", peer=1e9).links == dataclasses.replace(card.links, peer=1e9)
    assert jaxpp.GPU.like("a100-80gb", "older", float8=1.0).peaks.float8 == 1.0
    assert jaxpp.GPU.like("a100-80gb", "older").peaks.float8 is None


def test_what_is_no_number_of_a_gpu_is_refused():
    with pytest.raises(ArgumentError) as caught:
        jaxpp.GPU.like("h100", "mine", speed=2, bandwidth=1e12, vram=3)
    assert str(caught.value).splitlines()[:2] == [
        "GPU.like('h100', 'mine', ...): what differs is a number of a GPU.",
        "  Got: speed, vram.",
    ]
    with pytest.raises(ArgumentError, match="a target is a GPU that jaxpp has the numbers of"):
        jaxpp.GPU.like("h1000", "mine")


def test_devices_of_a_described_gpu_are_told_by_their_kind(monkeypatch):
    monkeypatch.setattr(jaxpp.targets, "_devices", lambda found, num_devices, hosts: (found, num_devices, hosts))
    monkeypatch.setattr(jaxpp.targets, "_DESCRIBED", {})
    first, other = (jaxpp.GPU.like("h100", "mine", memory=size << 30) for size in (40, 50))
    for gpu, kind in ((first, "mine"), (other, "mine (2)"), (first, "mine"), (TARGETS[0], TARGETS[0].kind)):
        found, num_devices, hosts = target(gpu, 8, hosts=2)
        assert (found.kind, num_devices, hosts) == (kind, 8, 2)
        assert target_of(types.SimpleNamespace(device_kind=kind)) == found == dataclasses.replace(gpu, kind=kind)
    taken = dataclasses.replace(first, kind=TARGETS[0].kind)
    assert target(taken)[0].kind == f"{TARGETS[0].kind} (2)"
    with pytest.raises(ArgumentError, match=r"target\('mine', 9, hosts=2\)"):
        target(first, 9, hosts=2)


# --- what a user can get wrong ---


def message(*arguments, **keywords):
    with pytest.raises(ArgumentError) as caught:
        jaxpp.target(*arguments, **keywords)
    return str(caught.value).splitlines()


def test_an_unknown_name_is_told_the_names_those_near_it_first():
    where, got, fix = message("a100")
    assert where == "target('a100'): a target is a GPU that jaxpp has the numbers of."
    assert got.startswith("  Got: 'a100'; near it: a100-40gb, a100-80gb")
    assert fix.startswith("  Fix: pass one of 'a100-40gb', 'a100-80gb', ")
    assert all(repr(name) in fix for name in NAMES)
    assert message(100)[:2] == ["target(100): a target is a GPU that jaxpp has the numbers of.", "  Got: 100; near it: none."]
    assert message("")[1] == "  Got: ''; near it: none."


def test_counts_are_whole_numbers_and_both_are_told():
    assert message("H100", 0) == [
        "target('H100'): counts are whole numbers of at least 1.",
        "  Got: num_devices=0.",
        "  Fix: pass num_devices=1 or more.",
    ]
    for wrong in (True, 2.0, "2", None, -1):
        assert f"num_devices={wrong!r}" in message("h100", wrong)[1]
    assert message("h100", 1.5, hosts=0)[1:3] == ["  Got: num_devices=1.5", "       hosts=0."]


def test_one_device_is_meant_unless_a_number_is_said(monkeypatch):
    monkeypatch.setattr(jaxpp.targets, "_devices", lambda found, num_devices, hosts: (found.name, num_devices, hosts))
    assert [jaxpp.targets.target(*given) for given in (["h100"], ["h100", 3])] == [("h100", 1, 1), ("h100", 3, 1)]


def test_hosts_share_the_devices_equally():
    assert message("h100", 8, hosts=3) == [
        "target('h100', 8, hosts=3): each host has the same number of devices.",
        "  Got: num_devices=8 and hosts=3.",
        "  Fix: pass num_devices=6 or num_devices=9.",
    ]
    assert message("h100", 1, hosts=2)[2] == "  Fix: pass num_devices=2."


def test_without_the_plug_in_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message("h100", 63) == [
        "target('h100'): to compile for a GPU that is not there, or to plan for it from shapes, JAX needs its CUDA plug-in, "
        "which describes it.",
        "  Got: neither jax-cuda12-plugin nor jax-cuda13-plugin is installed.",
        '  Fix: pip install -e ".[targets]" in the checkout of jaxpp.',
    ]


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_a_plug_in_of_another_version_is_refused_before_it_is_loaded(monkeypatch, cuda):
    versions = {"jaxlib": "0.10.2", f"jax-{cuda}-plugin": "0.10.1", f"jax-{cuda}-pjrt": "0.10.1"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name.endswith(cuda) else None)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert message("h100", 63) == [
        "target('h100'): JAX's CUDA plug-in is of the version of jaxlib.",
        "  Got: jaxlib 0.10.2",
        f"       jax-{cuda}-plugin 0.10.1",
        f"       jax-{cuda}-pjrt 0.10.1.",
        f'  Fix: pip install "jax-{cuda}-plugin==0.10.2" "jax-{cuda}-pjrt==0.10.2".',
    ]


# --- devices ---


def test_devices_that_hold_arrays_do_not_only_compile():
    for device in jax.devices():
        assert not compiles_only(device)
        assert device_name(device) == str(device)
        assert target_of(device) is None
    assert stand_ins(tuple(jax.devices()[2:4])) == tuple(jax.devices()[2:4])


def a_device(platform, **values):
    """A device that JAX does not list and that has no memory, as those of a topology are."""
    return mock.Mock(spec=jax.Device, platform=platform, addressable_memories=list, **values)


@pytest.mark.parametrize("platform", ["cpu", "no such platform"])
def test_devices_without_memory_that_jax_does_not_list_only_compile(platform):
    device = a_device(platform, device_kind="NVIDIA H100 80GB HBM3", id=3)
    assert compiles_only(device)
    assert device_name(device) == "H100:3"
    with pytest.raises(ArgumentError, match=r"(?s)Pipeline.init: it holds arrays, and these devices only .*Got: H100:3"):
        refuse_compile_only("Pipeline.init", [device])


def test_a_device_of_another_process_does_not_only_compile(monkeypatch):
    device = a_device("cpu")
    monkeypatch.setattr(jax, "devices", lambda platform: [device])
    assert not compiles_only(device)


def test_a_real_gpu_is_known_by_the_name_that_its_driver_gives_it():
    assert target_of(types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")).name == "h100"
    assert target_of(types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3 MIG 1g.10gb")) is None


@pytest.fixture
def plugin():
    """JAX's CUDA plug-in, or no test."""
    return pytest.importorskip("jax_plugins.xla_cuda12")


@pytest.mark.targets
def test_devices_are_made_of_every_target_and_programs_are_compiled_for_them(plugin):
    for one in TARGETS:
        (device,) = target(one.name)
        x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=SingleDeviceSharding(device))
        compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
        assert compiled.memory_analysis().output_size_in_bytes == 64 * 64 * 2, one.name
        assert target_of(device) is one


@pytest.mark.targets
def test_programs_are_compiled_for_a_described_gpu(plugin):
    card = jaxpp.GPU.like("rtx-4090", "RTX 4080", memory=15 << 30, bandwidth=717e9, cores=76, clock=2.505, l2=64 << 20)
    devices = target(card, 4, hosts=2)
    assert list(map(device_name, devices)) == [f"RTX-4080:{k}" for k in range(4)]
    assert target(card, 4, hosts=2) is devices
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=SingleDeviceSharding(devices[3]))
    assert jax.jit(lambda x: x @ x).lower(x).compile().as_text()
    assert target_of(devices[3]) == card
    assert stand_ins(devices[3:]) == target(card)


@pytest.mark.targets
def test_devices_have_hosts_and_names_and_only_compile(plugin):
    devices = jaxpp.target("h100", 4, hosts=2)
    assert [device.process_index for device in devices] == [0, 0, 1, 1]
    assert [device_name(device) for device in devices] == ["H100:0", "H100:1", "H100:2", "H100:3"]
    assert all(map(compiles_only, devices))
    assert not set(devices) & set(jax.devices())


@pytest.mark.targets
def test_equal_calls_return_the_same_devices(plugin):
    devices = target("h100", 4, hosts=2)
    for spelling in ("H100", "h100-sxm", "H100 SXM", "nvidia h100 80gb hbm3"):
        assert target(spelling, np.int64(4), hosts=np.int32(2)) is devices
    assert target("rtx4090") is target("RTX 4090") is target("GeForce RTX 4090") is target("4090")
    assert target("h100", 4) is not devices


@pytest.mark.targets
def test_devices_for_which_the_compiler_does_the_same_share_what_is_compiled(plugin):
    devices, hosts = target("h100", 4), target("h100", 4, hosts=2)
    (alone,) = target("h100")
    assert {stand_ins((device,)) for device in (*devices, *hosts, alone)} == {(alone,)}
    assert stand_ins(target("h200", 2)[1:]) == target("h200")
    assert stand_ins(devices[2:]) == stand_ins(devices[:2]) == devices[:2]
    assert stand_ins((devices[1], devices[3])) == (devices[0], devices[2])
    assert stand_ins(hosts[2:]) == hosts[:2]
    assert stand_ins(hosts[1:3]) == hosts[1:3]  # of two hosts
    text = TARGETS[0].spec().replace("core_count: 1", "core_count: 2")  # other numbers under the same name
    topology = jax.experimental.topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x2")
    assert target_of(topology.devices[1]) is TARGETS[0]
    assert stand_ins((topology.devices[1],)) == (topology.devices[0],)


@pytest.mark.targets
def test_a_device_whose_numbers_are_not_known_is_a_gpu(plugin):
    text = TARGETS[0].spec().replace(TARGETS[0].kind, "NVIDIA of tomorrow")
    topology = jax.experimental.topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x2")
    assert compiles_only(topology.devices[1])
    assert device_name(topology.devices[1]) == "gpu:1"


ORDERS = {
    "target first": "devices = target('h100', 2); here = jax.devices()",
    "jax first": "here = jax.devices(); devices = target('h100', 2)",
}
AFTER = """
assert [device.platform for device in here] == ["cpu"], here
assert all(map(compiles_only, devices)) and not compiles_only(here[0])
assert float(jax.numpy.ones(3).sum()) == 3 and jax.default_backend() == "cpu"
assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "3"
"""
TOO_LARGE = """
import jax
from jax.sharding import SingleDeviceSharding
from jaxpp.targets import target

home = SingleDeviceSharding(*target("rtx-4090"))
x = jax.ShapeDtypeStruct((1 << 17, 1 << 16), "float32", sharding=home)
jax.jit(lambda x: jax.numpy.sort(x @ x.T)).lower(x).compile()
"""


@pytest.mark.targets
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a GPU, which JAX takes")
@pytest.mark.parametrize("platforms", ["cpu", ""])
@pytest.mark.parametrize("order", ORDERS)
def test_jax_keeps_its_devices_whichever_comes_first(plugin, order, platforms):
    code = f"import os, jax\nfrom jaxpp.targets import compiles_only, target\n{ORDERS[order]}\n{AFTER}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": platforms}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.targets
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is a GPU, whose errors XLA is to log")
def test_xla_logs_nothing_of_a_program_that_does_not_fit(plugin):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", TOO_LARGE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if re.match(r"[WE]\d{4} ", line)]
    assert said == []
