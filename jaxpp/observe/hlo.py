"""The text of a compiled program (``compiled.as_text()``), read into instructions.

A program prints as computations, an instruction on each line; an instruction names its operands, and the computations it runs::

    %body (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
      %psum = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    }
    ENTRY %main (param: f32[4,8]) -> f32[4,8] {
      %loop = (s32[], f32[4,8]{1,0}) while(%t), body=%body, condition=%cond, backend_config={"known_trip_count":{"n":"5"}}
    }
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter collective-permute all-to-all ragged-all-to-all collective-broadcast".split()
)

_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<sizes>[^\]]*)\](?P<layout>\{[^}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+)\s+=\s+(?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_BRACKET = re.compile(r"[({\[\])}]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ROLES = "calls|called_computations|to_apply|body|condition|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"\b(?P<role>{_ROLES})=(?:\{{(?P<many>[^{{}}]*)\}}|%?(?P<one>[\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"(\d+)"')
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_HOST_MEMORY = "S(5)"
_PACKED = re.compile(r"E\((\d+)\)")


class HloArray(NamedTuple):
    """An array on one device. It prints as ``f32[4,8]``."""

    type: str  # as HLO writes it: ``bf16``
    sizes: tuple[int, ...]
    num_bytes: int
    on_host: bool

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return f"{self.type}[{','.join(map(str, self.sizes))}]"


class Shape(NamedTuple):
    """The arrays of a value on one device: several if it is a tuple."""

    arrays: tuple[HloArray, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def size(self) -> int:
        """Elements of all arrays."""
        return sum(array.size for array in self.arrays)

    @property
    def on_host(self) -> bool:
        """Whether an array is in host memory."""
        return any(array.on_host for array in self.arrays)


class Call(NamedTuple):
    """A computation that an instruction runs, or applies to elements."""

    name: str
    role: str  # as HLO writes it: ``body``
    times: int | None  # how often it runs; None if that is not known
    in_loop: bool


class HloInstruction(NamedTuple):
    """A line of a computation."""

    name: str
    result: Shape
    opcode: str
    operands: tuple[Shape, ...]
    names: tuple[str, ...]  # of the operands; of a parameter, its number
    attributes: str  # what stands behind the operands, without quoted strings
    config: str  # what stands behind the operands
    calls: tuple[Call, ...]
    is_root: bool

    @property
    def does(self) -> str:
        """The opcode; that of the whole operation if the instruction only starts it."""
        return self.opcode.removesuffix("-start")


Computations = Mapping[str, Sequence[HloInstruction]]


def parse_hlo(text: str) -> tuple[dict[str, list[HloInstruction]], str | None]:
    """The instructions of each computation by its name, and the name of the one that is run; None if the text has none."""
    computations: dict[str, list[HloInstruction]] = {}
    known: dict[str, Shape] = {}
    entry, current = None, None
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            current.append(_instruction(found["name"], found["rest"], found["root"] is not None, known))
        elif found is None and (header := _HEADER.match(line)):
            current, known = computations.setdefault(header["name"], []), {}
            entry = header["name"] if header["entry"] else entry
        elif line.lstrip().startswith("}"):
            current = None
    return computations, entry


def parse_shape(text: str) -> Shape:
    """The shape at the beginning of a text such as ``(f32[], bf16[16,16]{1,0:S(5)})``; tuples are flattened."""
    arrays = []
    for found in _ARRAY.finditer(until_closed(text, 0) if text.startswith("(") else text.split(" ", 1)[0]):
        layout = found["layout"] or ""
        sizes = tuple(int(size.strip("<= ")) for size in found["sizes"].split(",") if size.strip())
        num_bytes = -(-math.prod(sizes) * _bits(found["type"], layout) // 8)
        arrays.append(HloArray(found["type"], sizes, num_bytes, _HOST_MEMORY in layout))
    return Shape(tuple(arrays))


def until_closed(text: str, start: int) -> str:
    """The text from an opening bracket to the one that closes it."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        depth += 1 if found[0] in "({[" else -1
        if depth == 0:
            return text[start : found.end()]
    return text[start:]


def split_commas(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in re.sub(r"/\*.*?\*/", "", text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _instruction(name: str, rest: str, is_root: bool, known: dict[str, Shape]) -> HloInstruction:
    result = known[name] = parse_shape(rest)
    behind = rest[len(until_closed(rest, 0)) :] if rest.startswith("(") else rest[len(rest.split(" ", 1)[0]) :]
    found = _OPCODE.match(behind)
    if found is None:
        return HloInstruction(name, result, "", (), (), "", "", (), is_root)
    inside = until_closed(behind, found.end() - 1)
    attributes = behind[found.end() - 1 + len(inside) :]
    opcode = found["opcode"]
    bare, config = _STRING.sub('""', attributes), attributes.replace("\\", "")
    texts = [part.strip() for part in split_commas(inside[1:-1])] if opcode != "constant" else ()
    names = tuple(text.split(" ")[-1].lstrip("%") for text in texts)
    operands = tuple(known.get(name) or parse_shape(text) for name, text in zip(names, texts, strict=True))
    return HloInstruction(name, result, opcode, operands, names, bare, config, tuple(_calls(opcode, bare, config)), is_root)


def _calls(opcode: str, bare: str, config: str) -> Iterator[Call]:
    if opcode.endswith(("-update", "-done")):
        return  # they name again what their start runs
    trips = _TRIPS.search(config)
    for found in _CALLED.finditer(bare):
        loops = opcode == "while"
        times = 1 if not loops else int(trips[1]) + (found["role"] == "condition") if trips else None
        times = None if found["role"] in _BRANCHES else times
        for name in split_commas(found["many"] or found["one"] or ""):
            yield Call(name.strip().lstrip("%"), found["role"], times, loops)


def _bits(kind: str, layout: str) -> int:
    """Bits of an element: types of less than a byte take one, unless their layout packs them."""
    digits, packed = re.search(r"\d+", kind), _PACKED.search(layout)
    if kind in ("token", "opaque"):
        return 0
    return int(packed[1]) if packed else max(8, int(digits[0])) if digits else 8
