"""GPUs by their numbers, and devices that stand for them where there are none.

Programs for a GPU can be compiled on any machine: XLA asks the GPU for nothing but numbers (cores, shared memory, caches, ...). A
``GPU`` has the numbers of one GPU: those that XLA asks for, from which ``target`` makes devices that only compile, and those
that say how long a step takes: arithmetic by type, memory, and links.

All rates are the makers' peaks: dense (many data sheets print those of sparse matrices, twice as high), at the highest clock,
and of a link in one direction. ``GPU.source`` says where a number comes from, and which are assumptions.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
from jax.experimental import topologies

from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.tables import table_lines
from jaxpp.types import Device

__all__ = [
    "GPU",
    "TARGETS",
    "Chip",
    "LinkRates",
    "Peaks",
    "compiles_only",
    "device_name",
    "gpu_named",
    "refuse_compile_only",
    "stand_ins",
    "target",
    "target_of",
    "target_table",
]


@dataclass(frozen=True)
class Peaks:
    """Arithmetic in FLOP/s (int8: operations a second): of matrix products by the type of their operands, and of elementwise work.

    Sums are in float32, as JAX asks for: a GeForce is twice as fast with sums in float16, which is not counted.
    """

    bfloat16: float
    float16: float
    tensorfloat32: float  # a product of float32 arrays at JAX's default precision
    float32: float  # the same at precision "highest"
    float64: float
    float8: float | None  # None where the GPU has no such products
    int8: float
    vector: float  # elementwise work in float32


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second in one direction: between two GPUs of a host, to the host's memory, and to a GPU of another host."""

    peer: float
    host: float
    network: float


@dataclass(frozen=True)
class Chip:
    """What XLA asks about a GPU beside its memory. A core is a streaming multiprocessor."""

    capability: tuple[int, int]  # compute capability, major and minor
    cores: int
    lanes: int  # of float32 in a core
    clock: float  # GHz, the highest
    l2: int  # bytes of the cache that all cores share
    threads: int  # that a core holds
    shared: int  # bytes of shared memory in a core
    shared_optin: int  # bytes of it that a block may ask for


@dataclass(frozen=True)
class GPU:
    """One GPU by its numbers; ``GPU.like`` describes another one by what differs.

    Attributes:
        name: how ``target`` calls it.
        shown: the name of its devices in tables, before the colon and the number.
        kind: what ``device_kind`` says, the same on a real GPU as on a device that only compiles.
        memory: bytes that a process finds there, which are fewer than are sold.
        bandwidth: of this memory, bytes a second.
        peaks: arithmetic.
        links: between devices.
        chip: what the compiler asks for.
        sources: where numbers come from, by field (``"memory"``) or by dotted field (``"peaks.int8"``); see ``source``.
        aliases: other spellings that ``target`` takes.
    """

    name: str
    shown: str
    kind: str
    memory: int
    bandwidth: float
    peaks: Peaks
    links: LinkRates
    chip: Chip
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    aliases: tuple[str, ...] = field(default=(), repr=False)

    def source(self, number: str) -> str:
        """Where a number comes from: what is said of it, or else of the group that it stands in.

        Example:
            >>> target_of_name = {each.name: each for each in TARGETS}
            >>> target_of_name["h100"].source("links.network")
            'assumed: one 400 Gb/s network card for each GPU, as in a DGX H100'
        """
        return self.sources.get(number) or self.sources.get(number.partition(".")[0], "said by whoever described this GPU")

    @classmethod
    def like(cls, known: "str | GPU", name: str, **numbers: Any) -> "GPU":
        """A GPU that is like another one but for some numbers, for ``target(GPU.like(...), 8)``.

        Peaks that are not given follow from those of the other one by the number of cores and their clock.

        Args:
            known: the name of the other one, as ``target`` takes it, or its numbers. Of the same generation, so that programs are
                compiled for the same cores.
            name: of the new one. Its devices are called and are of a kind by this name, unless ``shown`` and ``kind`` are given.
            **numbers: what differs: ``memory`` and ``bandwidth``, and fields of ``Peaks``, ``LinkRates`` and ``Chip`` by their own
                names, as they stand there: ``bfloat16=97e12``, ``peer=16e9``, ``cores=76``.

        Returns:
            the numbers of the new GPU.

        Raises:
            ArgumentError: the other one, or a number, is not known.

        Example:
            >>> card = GPU.like("rtx-4090", "RTX 4080", memory=15 << 30, bandwidth=717e9, cores=76, clock=2.505, l2=64 << 20)
            >>> f"{card.peaks.bfloat16 / 1e12:.1f} TFLOP/s"
            '97.5 TFLOP/s'
        """
        other = known if isinstance(known, GPU) else gpu_named(known)
        groups = {part: {each.name for each in fields(getattr(other, part))} for part in ("peaks", "links", "chip")}
        own = {each.name for each in fields(cls)} - {"name", *groups}
        if wrong := sorted(set(numbers) - own.union(*groups.values())):
            rule, fix = "what differs is a number of a GPU", f"pass some of {', '.join(sorted(own.union(*groups.values())))}"
            raise ArgumentError(f"GPU.like({other.name!r}, {name!r}, ...)", rule, ", ".join(wrong), fix)
        made = {part: {key: numbers[key] for key in names & set(numbers)} for part, names in groups.items()}
        chip = replace(other.chip, **made["chip"])
        faster = chip.cores * chip.lanes * chip.clock / (other.chip.cores * other.chip.lanes * other.chip.clock)
        peaks = {each: rate and rate * faster for each, rate in vars(other.peaks).items()} | made["peaks"]
        said = {each: numbers[each] for each in own & set(numbers)}
        same = {f"{part}.{each}" for part in groups for each in groups[part] - set(numbers)} | own - set(numbers)
        sources = {
            each: f"that of {other.name}: {other.source(each)}" for each in same if not each.startswith("peaks") or faster == 1
        }
        links = replace(other.links, **made["links"])
        given = {"shown": name.replace(" ", "-"), "kind": name, "aliases": (), "sources": sources} | said
        return replace(other, name=name, peaks=Peaks(**peaks), links=links, chip=chip, **given)

    def spec(self) -> str:
        """The text from which XLA makes a device (a ``GpuTargetConfigProto``); it has the fewest fields that compiling needs.

        XLA's own texts also have the rates of scalar and matrix units. They are left out: with and without them, the optimised HLO
        of matrix products, of a softmax and of a transformer block's gradient is the same to the letter (for an H100, with JAX
        0.10.2). A field that the installed plug-in does not know would make the whole text unreadable.
        """
        chip, (major, minor) = self.chip, self.chip.capability
        features = "ACCELERATED_FEATURES" if major in (9, 10) else "NONE"
        return f"""
            gpu_device_info {{
              name: "{self.kind}"
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
              core_count: {chip.cores} fpus_per_core: {chip.lanes} clock_rate_ghz: {chip.clock}
              device_memory_size: {self.memory} memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {chip.l2}
              threads_per_core_limit: {chip.threads} threads_per_block_limit: 1024 threads_per_warp: 32
              shared_memory_per_core: {chip.shared} shared_memory_per_block: {48 << 10}
              shared_memory_per_block_optin: {chip.shared_optin}
              registers_per_core_limit: {1 << 16} registers_per_block_limit: {1 << 16}
              block_dim_limit_x: {(1 << 31) - 1} block_dim_limit_y: {(1 << 16) - 1} block_dim_limit_z: {(1 << 16) - 1}
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              device_address_bits: 64
              driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.kind}"
        """


# --- the numbers ---

_TERA = 1e12
_GIGA = 1e9
_PCIE_3, _PCIE_4, _PCIE_5 = 16 * _GIGA, 32 * _GIGA, 64 * _GIGA  # sixteen lanes, one direction
_DENSE = ", which prints the rates of sparse matrices: halved"
_FULL_RATE = "no product of matrices in float32: the rate of elementwise work, as printed"
_SIXTY_FOURTH = "one sixty-fourth of float32, as the Ampere (GA102), Ada and Blackwell white papers say; no data sheet prints it"
_SINGLE = "no such products on this GPU, for which XLA converts to float32: the rate of float32"
_LIMITS = "the limits of a core are those of compute capability {} in CUDA's programming guide"
_BRIDGE = "the NVLink bridge is sold apart and joins two cards only, so it is not counted"
_PASSES = "PCIe Gen{} x16, {} GB/s in both directions; copies between two such cards pass the host's memory"
_HALF = (
    "half of the link: without access to one another, a card's link carries a copy to the host and another from it. "
    "p2pBandwidthLatencyTest without peer access (NVIDIA/nccl issue 814) shows 30 of 64 GB/s in both directions together"
)


def _gib(number: float) -> int:
    return int(number * (1 << 30))


def _peaks(
    bfloat16: float,
    tensorfloat32: float,
    float32: float,
    float64: float,
    float8: float | None,
    int8: float,
    float16: float | None = None,
) -> Peaks:
    """Peaks from TFLOP/s; float16 is as fast as bfloat16 unless given, and elementwise work as products in float32."""
    return Peaks(
        bfloat16=bfloat16 * _TERA,
        float16=(float16 or bfloat16) * _TERA,
        tensorfloat32=tensorfloat32 * _TERA,
        float32=float32 * _TERA,
        float64=float64 * _TERA,
        float8=None if float8 is None else float8 * _TERA,
        int8=int8 * _TERA,
        vector=float32 * _TERA,
    )


def _xla(spec: str) -> str:
    return f"XLA's target_config/specs/{spec}"


def _network(gigabits: int, why: str) -> str:
    return f"assumed: one {gigabits} Gb/s network card for each GPU{why}"


def _data_center(sheet: str, spec: str, nvlink: str, pcie: str, network: str, **others: str) -> dict[str, str]:
    """The sources of a GPU whose text XLA has."""
    chip = _xla(spec)
    links = {"links.peer": f"{sheet}: {nvlink}", "links.host": f"{sheet}: {pcie}", "links.network": network}
    found = {"memory": chip, "bandwidth": chip, "chip": chip, "peaks": sheet, "peaks.float32": f"{sheet}; {_FULL_RATE}", **links}
    return found | others


def _card(sheet: str, printed: str, **others: str) -> dict[str, str]:
    """The sources of a card that has no NVLink, and its memory as is ``printed``; of an Ada card, unless ``others`` says so."""
    found = {
        "memory": f"{printed}, which PyTorch and other programs print on this GPU in public reports",
        "bandwidth": sheet,
        "chip": f"cores and clock: NVIDIA's, from which the printed float32 rate follows; {_LIMITS.format(8.9)}",
        "chip.l2": "NVIDIA's Ada white paper",
        "peaks": sheet,
        "peaks.float32": f"{sheet}; {_FULL_RATE}",
        "peaks.float64": _SIXTY_FOURTH,
        "links": "PCIe Gen4 x16, 64 GB/s in both directions; there is no NVLink",
        "links.network": _network(100, ""),
    }
    return found | others


_A100 = _peaks(312, 156, 19.5, 19.5, None, 624)
_A100_LINKS = LinkRates(peer=300 * _GIGA, host=_PCIE_4, network=25 * _GIGA)
_A100_NETWORK = _network(200, ", as in a DGX A100")
_A100_SHEET = "NVIDIA's A100 data sheet"
_BOTH_A100 = "NVLink 600 GB/s in both directions", "PCIe Gen4 64 GB/s in both directions", _A100_NETWORK
_HOPPER = _peaks(989.4, 494.7, 66.9, 66.9, 1978.9, 1978.9)
_HOPPER_LINKS = LinkRates(peer=450 * _GIGA, host=_PCIE_5, network=50 * _GIGA)
_BOTH_HOPPER = "NVLink 900 GB/s in both directions", "PCIe Gen5 128 GB/s in both directions"
_B200_LINKS = LinkRates(peer=900 * _GIGA, host=_PCIE_5, network=50 * _GIGA)
_PCIE_3_CARD, _PCIE_4_CARD, _PCIE_5_CARD = (LinkRates(rate, rate, 12.5 * _GIGA) for rate in (_PCIE_3, _PCIE_4, _PCIE_5))
_PCIE_4_ALONE, _PCIE_5_ALONE = (LinkRates(rate / 2, rate, 12.5 * _GIGA) for rate in (_PCIE_4, _PCIE_5))
_A100_CHIP = Chip((8, 0), 108, 64, 1.41, 40 << 20, 2048, 167_936, 166_912)
_B200_CHIP = Chip((10, 0), 148, 128, 1.965, 132_644_864, 2048, 233_472, 232_448)
_GB200_CHIP = Chip((10, 0), 152, 128, 2.062, 135_528_448, 2048, 233_472, 232_448)
_PRO_CHIP = Chip((12, 0), 188, 128, 2.6, 128 << 20, 1536, 131_072, 101_376)
_5090_CHIP = Chip((12, 0), 170, 128, 2.407, 96 << 20, 1536, 131_072, 101_376)
_T4_CHIP = Chip((7, 5), 40, 64, 1.59, 4 << 20, 1024, 65_536, 65_536)
_V100 = _peaks(15.7, 15.7, 15.7, 7.8, None, 62.8, float16=125)
_V100_LINKS = LinkRates(peer=150 * _GIGA, host=_PCIE_3, network=6.25 * _GIGA)
_V100_CHIP = Chip((7, 0), 80, 64, 1.53, 6 << 20, 2048, 98_304, 98_304)
_GH200_LINKS = LinkRates(peer=450 * _GIGA, host=450 * _GIGA, network=50 * _GIGA)
_GB200_LINKS = LinkRates(peer=900 * _GIGA, host=225 * _GIGA, network=50 * _GIGA)


def _hopper(cores: int, clock: float) -> Chip:
    return Chip((9, 0), cores, 128, clock, 50 << 20, 2048, 233_472, 232_448)


def _ampere(cores: int, clock: float) -> Chip:
    return Chip((8, 6), cores, 128, clock, 6 << 20, 1536, 102_400, 101_376)


def _ada(cores: int, clock: float, l2_mib: int) -> Chip:
    return Chip((8, 9), cores, 128, clock, l2_mib << 20, 1536, 102_400, 101_376)


# name: shown, kind, aliases
_NAMES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "a100-40gb": ("A100-40GB", "NVIDIA A100-SXM4-40GB", ("a100-sxm-40gb", "a100-40gb-sxm")),
    "a100-80gb": ("A100-80GB", "NVIDIA A100-SXM4-80GB", ("a100-sxm-80gb", "a100-80gb-sxm")),
    "h100": ("H100", "NVIDIA H100 80GB HBM3", ("h100-sxm", "h100-sxm5", "h100-80gb", "h100-sxm-80gb", "h100-80gb-sxm")),
    "h100-pcie": ("H100-PCIe", "NVIDIA H100 PCIe", ("h100-pcie-80gb", "h100-80gb-pcie")),
    "h200": ("H200", "NVIDIA H200", ("h200-sxm", "h200-141gb")),
    "gh200": ("GH200", "NVIDIA GH200 480GB", ("gh200-96gb",)),
    "b200": ("B200", "NVIDIA B200", ("b200-sxm", "b200-180gb")),
    "gb200": ("GB200", "NVIDIA GB200", ("gb200-nvl72", "gb200-nvl4")),
    "v100-16gb": ("V100-16GB", "Tesla V100-SXM2-16GB", ("v100-sxm2-16gb", "v100-sxm-16gb")),
    "v100-32gb": ("V100-32GB", "Tesla V100-SXM2-32GB", ("v100-sxm2-32gb", "v100-sxm-32gb")),
    "t4": ("T4", "Tesla T4", ("tesla-t4", "t4-16gb")),
    "a10g": ("A10G", "NVIDIA A10G", ("a10g-24gb",)),
    "l4": ("L4", "NVIDIA L4", ("l4-24gb",)),
    "l40s": ("L40S", "NVIDIA L40S", ("l40s-48gb",)),
    "rtx-a6000": ("RTX-A6000", "NVIDIA RTX A6000", ("a6000", "rtx-a6000-48gb")),
    "rtx-3090": ("RTX-3090", "NVIDIA GeForce RTX 3090", ("3090", "geforce-3090")),
    "rtx-4090": ("RTX-4090", "NVIDIA GeForce RTX 4090", ("4090", "geforce-4090")),
    "rtx-5090": ("RTX-5090", "NVIDIA GeForce RTX 5090", ("5090", "geforce-5090")),
    "rtx-6000-ada": ("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", ("6000-ada", "rtx-6000-ada-48gb")),
    "rtx-pro-6000": (
        "RTX-PRO-6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        ("rtx-pro-6000-blackwell", "rtx-6000-pro", "pro-6000"),
    ),
}

# name: memory, its bandwidth, peaks, links, what the compiler asks for
_NUMBERS: Mapping[str, tuple[int, float, Peaks, LinkRates, Chip]] = {
    "a100-40gb": (42_331_013_120, 1_555_200_000_000, _A100, _A100_LINKS, _A100_CHIP),
    "a100-80gb": (85_100_068_864, 2_039_040_000_000, _A100, _A100_LINKS, _A100_CHIP),
    "h100": (84_942_979_072, 3_352_320_000_000, _HOPPER, _HOPPER_LINKS, _hopper(132, 1.98)),
    "h100-pcie": (84_942_979_072, 2_039_040_000_000, _peaks(756, 378, 51.2, 51.2, 1513, 1513), _PCIE_5_CARD, _hopper(114, 1.755)),
    "h200": (_gib(139.81), 4_800_000_000_000, _HOPPER, _HOPPER_LINKS, _hopper(132, 1.98)),
    "gh200": (_gib(94.88), 4_000 * _GIGA, _HOPPER, _GH200_LINKS, _hopper(132, 1.98)),
    "gb200": (197_897_748_480, 7_928_064_000_000, _peaks(2500, 1250, 80, 40, 5000, 5000), _GB200_LINKS, _GB200_CHIP),
    "v100-16gb": (16_935_682_048, 898_048_000_000, _V100, _V100_LINKS, _V100_CHIP),
    "v100-32gb": (_gib(31.74), 898_048_000_000, _V100, _V100_LINKS, _V100_CHIP),
    "t4": (_gib(14.75), 320 * _GIGA, _peaks(8.1, 8.1, 8.1, 8.1 / 32, None, 130, float16=65), _PCIE_3_CARD, _T4_CHIP),
    "a10g": (_gib(22.19), 600 * _GIGA, _peaks(70, 35, 35, 35 / 64, None, 140), _PCIE_4_CARD, _ampere(80, 1.71)),
    "rtx-a6000": (
        51_041_271_808,
        768_096_000_000,
        _peaks(154.8, 77.4, 38.7, 38.7 / 64, None, 309.7),
        _PCIE_4_CARD,
        _ampere(84, 1.8),
    ),
    "rtx-3090": (_gib(23.69), 936.2 * _GIGA, _peaks(71, 35.6, 35.6, 35.6 / 64, None, 284), _PCIE_4_ALONE, _ampere(82, 1.695)),
    "rtx-5090": (_gib(31.36), 1792 * _GIGA, _peaks(209.5, 104.8, 104.8, 104.8 / 64, 419, 838), _PCIE_5_ALONE, _5090_CHIP),
    "b200": (191_514_411_008, 7_672_320_000_000, _peaks(2250, 1125, 75, 37, 4500, 4500), _B200_LINKS, _B200_CHIP),
    "l4": (_gib(22.03), 300 * _GIGA, _peaks(121, 60, 30.3, 30.3 / 64, 242.5, 242.5), _PCIE_4_CARD, _ada(58, 2.04, 48)),
    "l40s": (_gib(44.42), 864 * _GIGA, _peaks(362.05, 183, 91.6, 91.6 / 64, 733, 733), _PCIE_4_CARD, _ada(142, 2.52, 96)),
    "rtx-4090": (_gib(23.64), 1008 * _GIGA, _peaks(165.2, 82.6, 82.6, 82.6 / 64, 330.3, 660.6), _PCIE_4_ALONE, _ada(128, 2.52, 72)),
    "rtx-6000-ada": (
        _gib(47.5),
        960 * _GIGA,
        _peaks(364.2, 182.1, 91.1, 91.1 / 64, 728.5, 728.5),
        _PCIE_4_CARD,
        _ada(142, 2.505, 96),
    ),
    "rtx-pro-6000": (_gib(94.97), 1_792_000_000_000, _peaks(503.8, 251.9, 125, 125 / 64, 1007.6, 1007.6), _PCIE_5_CARD, _PRO_CHIP),
}

_V100_SHEET = "NVIDIA's V100 data sheet (SXM2)"
_V100_SOURCES = _data_center(
    _V100_SHEET,
    "v100",
    "NVLink 300 GB/s in both directions",
    "PCIe Gen3 32 GB/s in both directions",
    "assumed: one 100 Gb/s network card for two GPUs, as in a DGX-1",
    **{
        "peaks.bfloat16": _SINGLE,
        "peaks.tensorfloat32": _SINGLE,
        "peaks.int8": "four times that of float32, by instructions on four bytes; there are no such products of matrices",
    },
)

_SOURCES: Mapping[str, Mapping[str, str]] = {
    "v100-16gb": _V100_SOURCES,
    "v100-32gb": _V100_SOURCES | {"memory": "31.74 GiB, which PyTorch prints on this GPU in public reports"},
    "t4": _card(
        "NVIDIA's T4 data sheet",
        "14.75 GiB",
        bandwidth="NVIDIA's T4 data sheet, which prints 320+ GB/s",
        chip=f"NVIDIA's Turing white paper; {_LIMITS.format(7.5)}",
        links="PCIe Gen3 x16, 32 GB/s in both directions; there is no NVLink",
        **{
            "chip.l2": "NVIDIA's Turing white paper",
            "peaks.bfloat16": _SINGLE,
            "peaks.tensorfloat32": _SINGLE,
            "peaks.float64": "one thirty-second of float32, as the Turing white paper says",
        },
    ),
    "a10g": _card(
        "NVIDIA's A10G data sheet (of AWS's G5 instances), whose rates are dense",
        "22.19 GiB",
        chip=f"80 cores and 1.71 GHz, which CUDA prints on this GPU and the float32 rate follows from; {_LIMITS.format(8.6)}",
        **{"chip.l2": "NVIDIA's Ampere GA102 white paper"},
    ),
    "rtx-a6000": _card(
        "NVIDIA's RTX A6000 data sheet, which prints 309.7 for sparse products and 38.7 for float32; the other types follow",
        _xla("a6000"),
        **dict.fromkeys(("memory", "bandwidth", "chip", "chip.l2"), _xla("a6000")),
        links=f"PCIe Gen4 x16, 64 GB/s in both directions; {_BRIDGE}",
    ),
    "rtx-3090": _card(
        "NVIDIA's Ampere GA102 white paper, with sums in float32",
        "23.69 GiB",
        chip=f"NVIDIA's Ampere GA102 white paper; {_LIMITS.format(8.6)}",
        links=f"{_PASSES.format(4, 64)}; {_BRIDGE}",
        **{"chip.l2": "NVIDIA's Ampere GA102 white paper", "links.peer": _HALF},
    ),
    "rtx-5090": _card(
        "NVIDIA's RTX Blackwell white paper, with sums in float32",
        "31.36 GiB",
        chip="NVIDIA's RTX Blackwell white paper; the limits of a core are those of XLA's target_config/specs/rtx6000pro",
        links=_PASSES.format(5, 128),
        **{"chip.l2": "NVIDIA's RTX Blackwell white paper", "links.peer": _HALF},
    ),
    "gh200": _data_center(
        "NVIDIA's GH200 data sheet (96 GB of HBM3), and the H100 white paper for the same chip",
        "h100_sxm",
        "NVLink 900 GB/s in both directions, where GPUs are joined by it",
        "NVLink-C2C 900 GB/s in both directions",
        _network(400, ""),
        memory="94.88 GiB, which PyTorch prints on this GPU (Lightning-AI/litgpt issue 1892)",
        bandwidth="NVIDIA's GH200 data sheet, 4 TB/s",
    ),
    "gb200": _data_center(
        f"NVIDIA's GB200 NVL72 data sheet, half of a superchip{_DENSE}",
        "gb200",
        "NVLink 1.8 TB/s in both directions",
        "assumed: half of a superchip's NVLink-C2C, 900 GB/s in both directions",
        _network(400, ", as in a GB200 NVL72"),
        **{"peaks.float32": "NVIDIA's GB200 NVL72 data sheet, half of 160 TFLOP/s", "peaks.float64": "half of float32"},
    ),
    "a100-40gb": _data_center(_A100_SHEET, "a100_sxm_40", *_BOTH_A100),
    "a100-80gb": _data_center(_A100_SHEET, "a100_sxm_80", *_BOTH_A100),
    "h100": _data_center("NVIDIA's H100 white paper (SXM5)", "h100_sxm", *_BOTH_HOPPER, _network(400, ", as in a DGX H100")),
    "h100-pcie": _data_center(
        f"NVIDIA's H100 data sheet (PCIe){_DENSE}",
        "h100_pcie",
        "PCIe; the NVLink bridge (600 GB/s in both directions) is sold apart and joins two cards only, so it is not counted",
        _BOTH_HOPPER[1],
        _network(100, ""),
    ),
    "h200": _data_center(
        "NVIDIA's H200 data sheet, and the H100 white paper for the same chip",
        "h200",
        *_BOTH_HOPPER,
        _network(400, ", as in a DGX H200"),
        memory="139.81 GiB, which PyTorch prints on this GPU in public reports; XLA's text has the 141 that are sold",
    ),
    "b200": _data_center(
        f"NVIDIA's HGX B200 data sheet{_DENSE}",
        "b200",
        "NVLink 1.8 TB/s in both directions",
        "PCIe Gen5 128 GB/s in both directions, which a DGX B200 uses",
        _network(400, ", as in a DGX B200"),
        **{
            "peaks.float32": "NVIDIA's HGX B200 data sheet, an eighth of 600 TFLOP/s; earlier sheets print 80 for one GPU",
            "peaks.float64": "NVIDIA's HGX B200 data sheet, an eighth of 296 TFLOP/s; earlier sheets print 40 for one GPU",
        },
    ),
    "l4": _card(f"NVIDIA's L4 data sheet{_DENSE}", "22.03 GiB"),
    "l40s": _card(
        "NVIDIA's L40S data sheet, which prints dense rates too",
        "44.42 GiB (in some reports 44.53)",
        **{
            "peaks.bfloat16": "NVIDIA's L40S data sheet prints 362.05 dense and 733 sparse; half of the latter would be 366.5",
            "chip.l2": "assumed: as on the L40, of which NVIDIA's Ada white paper says it; some lists say half of it",
        },
    ),
    "rtx-4090": _card(
        "NVIDIA's Ada white paper, with sums in float32",
        "23.64 GiB",
        links=_PASSES.format(4, 64),
        **{"links.peer": _HALF},
    ),
    "rtx-6000-ada": _card(
        "NVIDIA's RTX 6000 Ada data sheet, which prints 1457 for sparse float8 and 91.1 for float32; the other types follow",
        "47.5 GiB (44.4 where error correction is on)",
    ),
    "rtx-pro-6000": _card(
        "NVIDIA's RTX PRO 6000 data sheet, which prints 4000 for sparse float4 and 125 for float32; the other types follow",
        "94.97 GiB",
        links="PCIe Gen5 x16, 128 GB/s in both directions; there is no NVLink",
        **dict.fromkeys(("bandwidth", "chip", "chip.l2"), _xla("rtx6000pro")),
    ),
}

TARGETS: tuple[GPU, ...] = tuple(
    GPU(name, shown, kind, *_NUMBERS[name], _SOURCES[name], aliases) for name, (shown, kind, aliases) in _NAMES.items()
)
"""The GPUs that jaxpp has the numbers of."""


def target_table(width: int | None = None) -> str:
    r"""The targets as a table: memory, its bandwidth, the peak of bfloat16 products, and the links in one direction.

    Args:
        width: characters in a line; None for what the terminal has.

    Example:
        >>> print("\n".join(target_table(120).splitlines()[:4]))
                name     memory  bandwidth      bfloat16      peer      host    network
           a100-40gb   39.4 GiB  1555 GB/s   312 TFLOP/s  300 GB/s   32 GB/s    25 GB/s
           a100-80gb   79.3 GiB  2039 GB/s   312 TFLOP/s  300 GB/s   32 GB/s    25 GB/s
                h100   79.1 GiB  3352 GB/s   989 TFLOP/s  450 GB/s   64 GB/s    50 GB/s
    """
    head = ["name", "memory", "bandwidth", "bfloat16", "peer", "host", "network"]
    rows = [
        [
            each.name,
            f"{each.memory / (1 << 30):.1f} GiB",
            f"{each.bandwidth / _GIGA:.0f} GB/s",
            f"{each.peaks.bfloat16 / _TERA:.0f} TFLOP/s",
            *(f"{rate / _GIGA:g} GB/s" for rate in (each.links.peer, each.links.host, each.links.network)),
        ]
        for each in TARGETS
    ]
    return "\n".join(table_lines([head, *rows], width=width))


# --- devices ---


def target(gpu: str | GPU, num_devices: int = 1, *, hosts: int = 1) -> tuple[Device, ...]:
    """Devices that stand for GPUs which this machine does not have: programs are compiled for them, and cannot run.

    JAX compiles for them with its CUDA plug-in and NVIDIA's assembler (``ptxas``), which ``pip install -e ".[targets]"`` adds;
    neither a GPU nor NVIDIA's driver is needed. ``jax.devices()`` stays as it is. Two equal calls return the same devices, so that
    what was compiled is found again.

    Where the plug-in is installed and there is no GPU, JAX itself logs an error when it starts and goes on with the CPU; with the
    environment variable ``JAX_PLATFORMS=cpu`` it does not.

    Args:
        gpu: its name, such as ``"h100"`` or ``"rtx-4090"``; ``jaxpp.targets.target_table()`` has all. Case, spaces and hyphens
            do not matter, and the name that the driver gives to the GPU is understood too. Or the numbers of one that is not there:
            a ``jaxpp.GPU``, as ``jaxpp.GPU.like`` makes it.
        num_devices: how many GPUs there are on all hosts together.
        hosts: how many machines they are on, as many on each. ``device.process_index`` is the number of the host.

    Returns:
        The devices, those of the first host first.

    Raises:
        ArgumentError: an unknown name; a count that is no whole number of at least 1; devices that the hosts cannot share
            equally; JAX's CUDA plug-in is missing, or not of the version of jaxlib.

    Example:
        >>> target("h100", 4, hosts=3)
        Traceback (most recent call last):
        jaxpp.errors.ArgumentError: target('h100', 4, hosts=3): each host has the same number of devices.
          Got: num_devices=4 and hosts=3.
          Fix: pass num_devices=3 or num_devices=6.
    """
    found = _known_as(gpu) if isinstance(gpu, GPU) else gpu_named(gpu)
    where = f"target({found.name if isinstance(gpu, GPU) else gpu!r}"
    counts = {"num_devices": num_devices, "hosts": hosts}
    if wrong := [f"{key}={shown(value)}" for key, value in counts.items() if not is_count(value, least=1)]:
        fix = "; ".join(f"pass {each.partition('=')[0]}=1 or more" for each in wrong)
        raise ArgumentError(f"{where})", "counts are whole numbers of at least 1", wrong, fix)
    if left := num_devices % hosts:
        where, rule = f"{where}, {num_devices}, hosts={hosts})", "each host has the same number of devices"
        near = [n for n in (num_devices - left, num_devices - left + hosts) if n]
        fix = "pass " + " or ".join(f"num_devices={n}" for n in near)
        raise ArgumentError(where, rule, f"num_devices={num_devices} and hosts={hosts}", fix)
    return _devices(found, int(num_devices), int(hosts))


_DESCRIBED: dict[str, GPU] = {}
"""The GPUs that callers have described, by the kind of their devices, by which alone a device can be told."""


def _known_as(gpu: GPU) -> GPU:
    """A GPU of a caller's, whose kind is that of no other one: another number is added to it where need be."""
    known = {each.kind: each for each in TARGETS} | _DESCRIBED
    own, number = gpu, 1
    while known.get(own.kind, own) != own:
        number += 1
        own = replace(gpu, kind=f"{gpu.kind} ({number})")
    return own if own in TARGETS else _DESCRIBED.setdefault(own.kind, own)


def _letters(name: str) -> str:
    """What is left of a name when spelling is not looked at."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", name.lower())


@functools.cache
def _spellings() -> dict[str, GPU]:
    return {_letters(name): each for each in TARGETS for name in (each.name, each.shown, each.kind, *each.aliases)}


def gpu_named(name: object) -> GPU:
    """The GPU that ``target`` knows by this name, however it is spelt; an ArgumentError with those near it if there is none."""
    letters = _letters(name) if isinstance(name, str) else ""
    if letters in _spellings():
        return _spellings()[letters]
    close = difflib.get_close_matches(letters, _spellings(), n=5, cutoff=0.5)
    begin = [spelling for spelling in _spellings() if letters and spelling.startswith(letters)]
    near = list(dict.fromkeys(_spellings()[spelling].name for spelling in [*begin, *close]))
    names = list(dict.fromkeys([*near, *(each.name for each in TARGETS)]))
    got = f"{shown(name)}; near it: {', '.join(near) or 'none'}"
    rule = "a target is a GPU that jaxpp has the numbers of"
    raise ArgumentError(f"target({shown(name)})", rule, got, f"pass one of {', '.join(map(repr, names))}")


@functools.cache
def _devices(found: GPU, num_devices: int, hosts: int) -> tuple[Device, ...]:
    plugin = _plugin(found)
    with _no_driver_needed():
        arguments = {"target_config": found.spec(), "topology": f"1x{hosts}x{num_devices // hosts}"}
        try:
            topology = topologies.get_topology_desc(platform="cuda", **arguments)
        except NotImplementedError:  # JAX has started, and left the plug-in out because there is no driver
            importlib.import_module(plugin).initialize()
            topology = topologies.get_topology_desc(platform="cuda", **arguments)
    return tuple(topology.devices)


def _plugin(found: GPU) -> str:
    """The module of JAX's CUDA plug-in, which is there and fits."""
    modules = [f"jax_plugins.xla_cuda{version}" for version in (12, 13) if _is_installed(f"jax_plugins.xla_cuda{version}")]
    where = f"target({found.name!r})"
    if not modules:
        rule = (
            "to compile for a GPU that is not there, or to plan for it from shapes, JAX needs its CUDA plug-in, which describes it"
        )
        got = "neither jax-cuda12-plugin nor jax-cuda13-plugin is installed"
        raise ArgumentError(where, rule, got, 'pip install -e ".[targets]" in the checkout of jaxpp')
    packages = [f"jax-{modules[0].rpartition('_')[2]}-{part}" for part in ("plugin", "pjrt")]
    versions = {package: _version_of(package) for package in ("jaxlib", *packages)}
    wanted = versions["jaxlib"]
    if wanted and any(version not in (None, wanted) for version in versions.values()):
        got = [f"{package} {version}" for package, version in versions.items() if version]
        fix = "pip install " + " ".join(f'"{package}=={wanted}"' for package in packages)
        raise ArgumentError(where, "JAX's CUDA plug-in is of the version of jaxlib", got, fix)
    return modules[0]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # there is no plug-in at all
        return False


def _version_of(package: str) -> str | None:
    """None if it was installed without pip, which then says no version."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


_WITHOUT_DRIVER = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@contextlib.contextmanager
def _no_driver_needed() -> Iterator[None]:
    """Let JAX's plug-in load without NVIDIA's driver, which it asks for its version; a driver that is there is asked as ever.

    A plug-in that only compiles logs nothing, of which XLA has many lines where a program does not fit the GPU: a forecast says so.
    """
    changed = {} if pathlib.Path("/proc/driver/nvidia").exists() else _WITHOUT_DRIVER
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def target_of(device: Device) -> GPU | None:
    """The numbers of a device, real or not; None if it is no GPU that jaxpp knows, or was told of."""
    known = next((each for each in TARGETS if each.kind == device.device_kind), None)
    return known or _DESCRIBED.get(device.device_kind)


@functools.cache
def compiles_only(device: Device) -> bool:
    """Whether a device only compiles: it holds no array, and JAX does not list it. A device of another process is listed."""
    if not isinstance(device, jax.Device) or device.addressable_memories():
        return False
    try:
        return device not in jax.devices(device.platform)
    except RuntimeError:  # JAX has no devices of this platform
        return True


@functools.cache
def stand_ins(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Devices for which XLA compiles a program to the same as for these, so that equal stages share what is compiled.

    Of devices that only compile, they are the first of the topology that lie as these do on its hosts; of a single GPU of
    ``target``, whatever the topology, always the same one. Devices that hold arrays stand in for nothing: a compiled program runs
    only on those that it was compiled for.
    """
    if not all(map(compiles_only, devices)):
        return devices
    whole, numbers = tuple(devices[0].client.devices()), target_of(devices[0])
    hosts = len({device.process_index for device in whole})
    if len(devices) == 1 and numbers is not None and whole == _devices(numbers, len(whole), hosts):
        return _devices(numbers, 1, 1)
    by_id = {device.id: device for device in whole}
    first, host = (min(getattr(device, name) for device in devices) for name in ("id", "process_index"))
    found = tuple(by_id.get(device.id - first, device) for device in devices)
    alike = [device.process_index - host for device in devices] == [device.process_index for device in found]
    return found if alike else devices


def refuse_compile_only(
    where: str, devices: Iterable[Device], fix: str = "pass devices=jax.devices(), or leave devices out"
) -> None:
    """Refuse what holds arrays, on devices that only compile."""
    found = dict.fromkeys(devices)
    if any(map(compiles_only, found)):
        names = list(map(device_name, found))
        got = ", ".join(names if len(names) <= 8 else [*names[:7], f"... ({len(names)})"])
        raise ArgumentError(where, "it holds arrays, and these devices only compile programs", got, fix)


def device_name(device: Device) -> str:
    """How tables call a device: ``H100:2`` if it only compiles (``gpu:2`` if its numbers are not known), else as JAX does."""
    if not isinstance(device, jax.Device) or not compiles_only(device):
        return str(device)
    known = target_of(device)
    return f"{known.shown if known else device.platform}:{device.id}"
