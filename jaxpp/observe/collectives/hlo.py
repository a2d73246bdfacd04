"""A parser of optimized HLO text, for as much of it as says what a program communicates.

A compiled program prints as computations, an instruction on each line (``compiled.as_text()``)::

    %body (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
      %psum = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    }
    ENTRY %main (param: f32[4,8]) -> f32[4,8] {
      %loop = (s32[], f32[4,8]{1,0}) while(%t), body=%body, condition=%cond, backend_config={"known_trip_count":{"n":"5"}}
    }

The text is parsed into names, shapes, operands and calls; what an instruction computes is ignored. This works across versions of
XLA, some of which print shapes beside operands, and which write groups of devices in any of four forms (``parse_groups``).
"""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

__all__ = ["Call", "HloInstruction", "Shape", "parse_groups", "parse_hlo", "parse_shape"]

_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<sizes>[^\]]*)\](?P<layout>\{[^}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s+=\s+(?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_ROLES = "calls|called_computations|to_apply|body|condition|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"\b(?P<role>{_ROLES})=(?:\{{(?P<many>[^{{}}]*)\}}|%?(?P<one>[\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"(\d+)"')
_IOTA = re.compile(r"\[(?P<to>[\d,]+)\](?:<=\[(?P<of>[\d,]+)\])?(?:T\((?P<perm>[\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<sizes>[^\]]*)\](?:,\s*device_ids=\((?P<ids>[^()]*(?:\([^()]*\))?)\))?\s*\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'?(?P<name>[^':,]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?$")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_WITHOUT_BITS = ("token", "opaque")
_HOST_MEMORY = "S(5)"
_PACKED = re.compile(r"E\((\d+)\)")


class Shape(NamedTuple):
    """The arrays of a value on one device, as ``f32[4,8]``, several if it is a tuple; and the bytes of all of them."""

    arrays: tuple[str, ...]
    num_bytes: int
    on_host: bool


class Call(NamedTuple):
    """A computation that an instruction runs, how often (None if that is not known), and whether the instruction is a loop."""

    computation: str
    times: int | None
    in_loop: bool


class HloInstruction(NamedTuple):
    """A line of a computation; its attributes are what stands behind the operands, without quoted strings."""

    name: str
    result: Shape
    opcode: str
    operands: tuple[Shape, ...]
    attributes: str
    calls: tuple[Call, ...]


def parse_hlo(text: str) -> tuple[dict[str, list[HloInstruction]], str | None]:
    """The instructions of each computation by its name, and the name of the one that is run; None if the text has none."""
    computations: dict[str, list[HloInstruction]] = {}
    known: dict[str, Shape] = {}
    entry, current = None, None
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            current.append(_instruction(found["name"], found["rest"], known))
        elif found is None and (header := _HEADER.match(line)):
            current, known = computations.setdefault(header["name"], []), {}
            entry = header["name"] if header["entry"] else entry
        elif line.lstrip().startswith("}"):
            current = None
    return computations, entry


def parse_shape(text: str) -> Shape:
    """The shape at the beginning of a text such as ``(f32[], bf16[16,16]{1,0:S(5)})``; tuples are flattened."""
    arrays, num_bytes, on_host = [], 0, False
    for found in _ARRAY.finditer(_until(text, 0) if text.startswith("(") else text.split(" ", 1)[0]):
        layout = found["layout"] or ""
        sizes = [int(size.strip("<= ")) for size in found["sizes"].split(",") if size.strip()]
        arrays.append(f"{found['type']}[{found['sizes']}]")
        num_bytes += -(-math.prod(sizes) * _bits(found["type"], layout) // 8)
        on_host |= _HOST_MEMORY in layout
    return Shape(tuple(arrays), num_bytes, on_host)


def parse_groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Which devices communicate with one another: ``replica_groups``, or ``source_target_pairs``.

    Four forms mean the same on a mesh of 2 x 2: ``{{0,2},{1,3}}``, ``[2,2]<=[2,2]T(1,0)`` (numbers in a row, reshaped and
    transposed), ``mesh['data'=2,'model'=2] {'data'}`` (which the partitioner of JAX 0.10 writes, and all of 0.11; an axis may be a
    part, ``'a':(2)4``), and for all devices ``{}``. The result is None if the groups are written in none of these forms.
    """
    found = re.search(r"\b(?:replica_groups|source_target_pairs)=", attributes)
    text = attributes[found.end() :] if found else "{}"
    mesh, iota = _MESH.match(text), _IOTA.match(text)
    rows = _mesh_groups(mesh) if mesh else _iota(iota) if iota else None
    if rows is not None:
        return tuple(map(tuple, rows.tolist()))
    if not text.startswith("{"):
        return None
    inside = _until(text, 0)[1:-1]
    groups = tuple(_ints(group) for group in re.findall(r"\{([^{}]*)\}", inside)) or (_ints(inside),)
    return groups if any(groups) else (tuple(range(num_devices)),)


def _instruction(name: str, rest: str, known: dict[str, Shape]) -> HloInstruction:
    result = known[name] = parse_shape(rest)
    behind = rest[len(_until(rest, 0)) :] if rest.startswith("(") else rest[len(rest.split(" ", 1)[0]) :]
    found = _OPCODE.match(behind)
    if found is None:
        return HloInstruction(name, result, "", (), "", ())
    inside = _until(behind, found.end() - 1)
    attributes = behind[found.end() - 1 + len(inside) :]
    opcode = found["opcode"]
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', attributes)
    texts = map(str.strip, _split(inside[1:-1])) if opcode != "constant" else ()
    operands = tuple(known.get(text.split(" ")[-1].lstrip("%")) or parse_shape(text) for text in texts)
    return HloInstruction(name, result, opcode, operands, bare, tuple(_calls(opcode, bare, attributes)))


def _calls(opcode: str, bare: str, attributes: str) -> Iterator[Call]:
    if opcode in ("async-update", "async-done"):
        return  # they name again what their start runs
    trips = _TRIPS.search(attributes.replace("\\", ""))
    for found in _CALLED.finditer(bare):
        loops = opcode == "while"
        times = 1 if not loops else int(trips[1]) + (found["role"] == "condition") if trips else None
        times = None if found["role"] in _BRANCHES else times
        for name in _split(found["many"] or found["one"] or ""):
            yield Call(name.strip().lstrip("%"), times, loops)


def _bits(kind: str, layout: str) -> int:
    """Bits of an element: types of less than a byte take one, unless their layout packs them."""
    if kind in _WITHOUT_BITS:
        return 0
    digits = re.search(r"\d+", kind)
    packed = _PACKED.search(layout)
    return int(packed[1]) if packed else max(8, int(digits[0])) if digits else 8


def _until(text: str, start: int) -> str:
    """From the bracket at ``start`` to the one that closes it."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({[") - (text[at] in ")}]")
        if depth == 0:
            return text[start : at + 1]
    return text[start:]


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in re.sub(r"/\*.*?\*/", "", text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _iota(found: re.Match[str]) -> np.ndarray:
    """``[2,2]<=[2,2]T(1,0)``: numbers in a row, shaped, transposed, shaped again."""
    sizes = _ints(found["of"] or found["to"])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if found["perm"]:
        numbers = numbers.transpose(_ints(found["perm"]))
    return numbers.reshape(_ints(found["to"])) if found["of"] else numbers


def _mesh_groups(found: re.Match[str]) -> np.ndarray:
    """The groups along axes of a mesh, each axis whole or the part ``:(before)size`` of it."""
    pairs = [part.strip().rsplit("=", 1) for part in found["sizes"].split(",")]
    sizes = {name.strip("'"): int(size) for name, size in pairs}
    ids = found["ids"] or ""
    iota = _IOTA.match(ids)
    devices = _iota(iota).ravel() if iota else np.array(_ints(ids) or range(math.prod(sizes.values())))
    wanted = [(axis["name"], axis["before"], axis["size"]) for part in _split(found["axes"]) if (axis := _AXIS.match(part.strip()))]
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in wanted:
        cuts[name] |= {int(before), int(before) * int(size)} if before else set()
    parts = [(name, low, high // low) for name in sizes for low, high in itertools.pairwise(sorted(cuts[name]))]
    along = [
        number
        for name, before, size in wanted
        for number, (axis, low, length) in enumerate(parts)
        if axis == name and (not before or int(before) <= low < int(before) * int(size)) and length > 1
    ]
    rest = [number for number in range(len(parts)) if number not in along]
    grid = devices.reshape([length for _, _, length in parts]).transpose(*rest, *along)
    return grid.reshape(-1, math.prod(parts[number][2] for number in along))
