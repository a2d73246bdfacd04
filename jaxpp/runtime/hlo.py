"""What a compiled program runs on its device, read from its optimized HLO (``compiled.as_text()``).

What a step will cost on a GPU that is not at hand is known once its programs are compiled for that GPU: the compiler has fused the
operations, chosen who writes each matrix product, and bounded the loops. A program prints as computations, an instruction on each
line; an instruction of ENTRY is a kernel, and a fusion names the computation that it fuses::

    %fused (p: f32[8,512,64], i: s32[]) -> f32[1,512,64] {
      %slice = f32[1,512,64]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,512,64}
      ROOT %tanh = f32[1,512,64]{2,1,0} tanh(%slice)
    }
    ENTRY %main (param: f32[8,512,64], at: s32[]) -> f32[1,512,64] {
      ROOT %loop = f32[1,512,64]{2,1,0} fusion(%param, %at), kind=kLoop, calls=%fused
    }

Each kernel becomes a ``Kernel``. Its arithmetic is the sum over what it fuses. Its bytes are found from the result backwards: how
many elements of each value are needed by what uses it. The slice above needs one row of ``param``, not all eight.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter collective-permute all-to-all ragged-all-to-all collective-broadcast".split()
)

_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<sizes>[^\]]*)\](?P<layout>\{[^}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?P<root>ROOT\s+)?%?(?P<name>[\w.\-]+)\s+=\s+(?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_STATED = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_IOTA = re.compile(r"\[(?P<to>[\d,]+)\](?:<=\[(?P<of>[\d,]+)\])?(?:T\((?P<perm>[\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<sizes>[^\]]*)\](?:,\s*device_ids=\((?P<ids>[^()]*(?:\([^()]*\))?)\))?\s*\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'?(?P<name>[^':,]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?$")
_BRACKET = re.compile(r"[({\[\])}]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ROLES = "calls|called_computations|to_apply|body|condition|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"\b(?P<role>{_ROLES})=(?:\{{(?P<many>[^{{}}]*)\}}|%?(?P<one>[\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"(\d+)"')
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_HOST_MEMORY = "S(5)"
_PACKED = re.compile(r"E\((\d+)\)")
_ALIASED = re.compile(r"\((\d+),\s*\{")

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FUSED_BY = re.compile(r'"kind":"(__[^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s|ensions)"?[=:][{\[]([^}\]]*)[}\]]')
_BATCHED = re.compile(r'lhs_batch_dim(?:s|ensions)"?[=:][{\[]([^}\]]*)[}\]]')
_PRECISION = re.compile(r'operand_precision"?[=:][{\[]([^}\]]*)[}\]]')
_ALGORITHM = re.compile(r'algorithm(?:=|":")(?:alg_)?dot_(?:any_)?(?P<type>[a-z]+\d+)\w*?(?:_x(?P<times>\d))?\b', re.IGNORECASE)
_KERNEL_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":"(?:PADDING_)?CAUSAL"')
_ATTENDED = re.compile(r'"sliding_window_length":(\d+)')
_SPACED = re.compile(r"(?<=[:,]) +")
_TYPE = re.compile(r"(bf|tf|f|s|u)(\d+)")
_TYPES = {"bf": "bfloat", "tf": "tensorfloat", "f": "float", "s": "int", "u": "int"}
_COMPLEX = {"c64": "f32", "c128": "f64"}
_WRITERS = (("__triton", "Triton"), ("__cublas$", "cuBLAS"), ("__cudnn$", "cuDNN"), ("__cub$", "CUB"))
_ON_TENSOR_CORES = ("Triton", "cuBLAS", "cuDNN")

_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id replica-id opt-barrier domain".split()
)
_RUNS_OTHERS = ("while", "call", "async", "conditional")
_ARITHMETIC = frozenset(
    "abs acos acosh add and asin asinh atan2 atanh cbrt ceil clamp compare complex cosh cosine count-leading-zeros divide erf "
    "exponential exponential-minus-one floor is-finite log log-plus-one logistic map maximum minimum multiply negate not or popcnt "
    "power reduce-precision remainder rng rng-bit-generator round-nearest-afz round-nearest-even rsqrt select shift-left "
    "shift-right-arithmetic shift-right-logical sign sine sinh sqrt stochastic-convert subtract tan tanh xor".split()
)
_ONE_TO_ONE = _ARITHMETIC - {"rng", "rng-bit-generator"} | frozenset(
    "bitcast bitcast-convert broadcast convert copy get-tuple-element imag pad real reshape reverse transpose tuple".split()
)
_MOVES = _ONE_TO_ONE - _ARITHMETIC | frozenset("concatenate dynamic-slice dynamic-update-slice gather iota slice".split())
_PRODUCTS = ("dot", "ragged-dot", "scaled-dot")
_SHARES = ("concatenate", "reduce")
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_BYTES_A_FLOP = 64
"""Bytes that a kernel moves for each FLOP, from which its arithmetic is only that of indices."""
_FLOPS_A_BYTE = 100
"""FLOPs that take about as long as a byte, to tell which branch of a conditional is the dearest."""


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
    config: str  # what stands behind the operands; of JSON, in which JAX writes spaces and XLA none, without those spaces
    calls: tuple[Call, ...]
    is_root: bool

    @property
    def does(self) -> str:
        """The opcode; that of the whole operation if the instruction only starts it."""
        return self.opcode.removesuffix("-start")


Computations = Mapping[str, Sequence[HloInstruction]]


class Product(NamedTuple):
    """What is multiplied at once: ``batch`` products of m x k by k x n matrices; a convolution as the product that computes it.

    Of attention, m are the queries, n the keys and k the features of a head.
    """

    type: str  # that it is computed in: ``"bfloat16"``
    flops: int
    batch: int
    m: int
    n: int
    k: int
    attends: str = ""  # of attention ``"forward"`` or ``"backward"``
    causal: bool = False


@dataclass(frozen=True)
class Kernel:
    """Work that a program gives to its device at once; numbers are those of one run of the kernel.

    Attributes:
        name: the instruction in the text of the program.
        kind: ``"product"`` (matrix products and convolutions, whatever is fused to them), ``"collective"``, ``"sort"``,
            ``"scatter"``, ``"reduction"``, ``"elementwise"``, ``"copy"`` (moves, converts or fills memory, with no arithmetic
            but that of indices), ``"custom call"``, or ``"other"``.
        by: who wrote the code: ``"XLA"``, ``"Triton"``, ``"cuBLAS"``, ``"cuDNN"``, ``"CUB"``, or the target of a custom call.
        runs: how often the kernel runs in one run of the program.
        exact: whether ``runs`` is known. It is not in a loop whose number of trips is not in the program, which counts as one
            trip, and not in a conditional, which counts as its dearest branch.
        products: FLOPs of matrix products and convolutions (2 m n k) by the type that they are computed in: ``"bfloat16"``,
            ``"tensorfloat32"``, ``"float32"``, ``"float8"``, ``"int8"``, ... A product of three bfloat16 products counts thrice.
        flops: other arithmetic: one for each element of the result of an elementwise operation, or of what is reduced.
        bytes_read: bytes that the kernel needs of its operands in device memory.
        bytes_written: bytes of its results in device memory; of an update in place, those of the update.
        host_bytes: bytes that it reads or writes in host memory; they are in neither of the two above.
        collective: what devices do together, as XLA calls it: ``"all-reduce"``; empty of other kernels.
        groups: the positions in the mesh, row by row, of devices that do it with one another; or (source, target) pairs.
        sizes: each of its ``products`` by its sizes.
        again: of arrays in device memory that it reads and that were read or written before in the same computation, the bytes that
            it needs of each, and the bytes that all kernels have moved since: few enough for a cache, it may find them there.
    """

    name: str
    kind: str
    by: str
    runs: int
    exact: bool
    products: Mapping[str, int]
    flops: int
    bytes_read: int
    bytes_written: int
    host_bytes: int
    collective: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[Product, ...] = ()
    again: tuple[tuple[int, int], ...] = ()


def read_kernels(hlo_text: str) -> tuple[Kernel, ...]:
    """The kernels that a compiled program runs, in its order; those of a loop stand where the loop is, each once.

    Products by Triton, cuBLAS and cuDNN multiply float32 in tensorfloat32, unless the program asks for the highest precision or
    for an algorithm. Convolutions count what is padded or dilated as if it were multiplied. Attention by cuDNN counts no score that
    a causal mask or a window hides, and all that padding hides. Arithmetic counts as none where it is not known: of sorting, of
    Fourier transforms, of what a library fuses to a product, and of other custom calls. The workspace of a library is not memory
    that is written. A sort reads and writes once. A text without ENTRY has no kernels.
    """
    computations, entry = parse_hlo(hlo_text)
    return tuple(_kernels(computations, entry, num_devices_of(hlo_text) or 1)) if entry else ()


def num_devices_of(hlo_text: str) -> int | None:
    """For how many devices a program is compiled, as its header says; None if it does not."""
    stated = [int(number) for number in _STATED.findall(hlo_text.split("\n", 1)[0])]
    return math.prod(stated) if stated else None


def aliased(hlo_text: str) -> frozenset[int]:
    """The numbers of the parameters whose buffers a result takes over; arguments that the program does not use have no number."""
    header, mark = hlo_text.split("\n", 1)[0], "input_output_alias="
    at = header.find(mark)
    return frozenset() if at < 0 else frozenset(map(int, _ALIASED.findall(until_closed(header, at + len(mark)))))


def float64_in(hlo_text: str) -> bool:
    """Whether any value of the program is of double precision."""
    text = _STRING.sub("", hlo_text)
    return "f64[" in text or "c128[" in text


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


def parse_groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...] | None:
    """Which devices communicate with one another: ``replica_groups``, or ``source_target_pairs``; None if their form is not known.

    Four forms mean the same on a mesh of 2 x 2: ``{{0,2},{1,3}}``, ``[2,2]<=[2,2]T(1,0)`` (numbers in a row, reshaped and
    transposed), ``mesh['data'=2,'model'=2] {'data'}`` (an axis may be a part, ``'a':(2)4``), and for all devices ``{}``.
    """
    found = re.search(r"\b(?:replica_groups|source_target_pairs)=", attributes)
    text = attributes[found.end() :] if found else "{}"
    mesh, iota = _MESH.match(text), _IOTA.match(text)
    rows = _mesh_groups(mesh) if mesh else _iota(iota) if iota else None
    if rows is not None:
        return tuple(map(tuple, rows.tolist()))
    if not text.startswith("{"):
        return None
    inside = until_closed(text, 0)[1:-1]
    groups = tuple(_ints(group) for group in re.findall(r"\{([^{}]*)\}", inside)) or (_ints(inside),)
    return groups if any(groups) else (tuple(range(num_devices)),)


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
    matched = [_AXIS.match(part.strip()) for part in split_commas(found["axes"])]
    wanted = [(axis["name"], axis["before"], axis["size"]) for axis in matched if axis]
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
    bare, config = _STRING.sub('""', attributes), _SPACED.sub("", attributes.replace("\\", ""))
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


def _kernels(computations: Computations, name: str, num_devices: int) -> Iterator[Kernel]:
    """The kernels of a computation that runs once. XLA evaluates a loop's condition only if its number of trips is not known."""
    around = {instruction.name: instruction for instruction in computations.get(name, ())}
    finished = {each.names[0]: each.result for each in around.values() if each.opcode.endswith("-done") and each.names}
    moved, last = 0, dict[str, int]()  # bytes so far, and how many they were when a buffer was last touched
    for instruction in around.values():
        if instruction.opcode in _NOTHING or instruction.opcode.endswith(("-update", "-done")):
            continue
        if instruction.does not in _RUNS_OTHERS:
            kernel, read = _kernel(instruction, computations, around, finished, num_devices)
            again = tuple((num_bytes, moved - last[name]) for name, num_bytes in read.items() if name in last and num_bytes)
            moved += kernel.bytes_read + kernel.bytes_written
            last |= dict.fromkeys([*read, *_buffers_of(instruction)], moved)
            yield replace(kernel, again=again)
            continue
        calls = [call for call in instruction.calls if call.role != "condition" or call.times is None]
        inside = [[_repeated(kernel, call.times) for kernel in _kernels(computations, call.name, num_devices)] for call in calls]
        for kernels in [max(inside, key=_weight, default=[])] if instruction.opcode == "conditional" else inside:
            yield from kernels


def _repeated(kernel: Kernel, times: int | None) -> Kernel:
    """The kernel of a loop of so many trips, or of one that counts as one trip."""
    return replace(kernel, runs=kernel.runs * (1 if times is None else times), exact=kernel.exact and times is not None)


def _weight(kernels: Sequence[Kernel]) -> float:
    """What a branch costs, roughly and in bytes."""
    moved = sum(each.runs * (each.bytes_read + each.bytes_written + each.host_bytes) for each in kernels)
    return moved + sum(each.runs * (each.flops + sum(each.products.values())) for each in kernels) / _FLOPS_A_BYTE


def _kernel(
    instruction: HloInstruction,
    computations: Computations,
    around: Mapping[str, HloInstruction],
    finished: Mapping[str, Shape],
    num_devices: int,
) -> tuple[Kernel, dict[str, int]]:
    """What an instruction runs, and what it reads of each buffer; ``finished`` are the results of what it starts."""
    body = _body(instruction, computations)
    parts = list(_fused(body, computations))
    by = _writer(instruction, parts)
    sizes = tuple(product for part in parts if (product := _product_of(part, by)) is not None)
    products: Counter[str] = Counter()
    for product in sizes:
        products[product.type] += product.flops
    flops = sum(_flops(part, computations) for part in parts)
    taken_over = _taken_over(body)
    read = _read(instruction, around, _needed(body, taken_over, computations))
    written = _written(instruction, body, taken_over, by, finished)
    host = sum(num_bytes for num_bytes, on_host in (*read.values(), *written) if on_host)
    reads, writes = (sum(num_bytes for num_bytes, on_host in each if not on_host) for each in (read.values(), written))
    by_buffer = {name: num_bytes for name, (num_bytes, on_host) in read.items() if not on_host}
    kind = _kind({part.does for part in parts}, products, by, flops * _BYTES_A_FLOP < reads + writes + host)
    made = Kernel(instruction.name, kind, by, 1, True, dict(products), flops, reads, writes, host, sizes=sizes)
    together = next((part for part in parts if part.does in COLLECTIVES), None)
    if together is not None:
        made = replace(made, collective=together.does, groups=parse_groups(together.attributes, num_devices) or ())
    return made, by_buffer


def _body(instruction: HloInstruction, computations: Computations) -> Sequence[HloInstruction]:
    """The computation of a fusion; an instruction that fuses nothing is a computation of its own, with its operands."""
    if instruction.does == "fusion" and instruction.calls:
        return computations.get(instruction.calls[0].name, ())
    pairs = enumerate(zip(instruction.names, instruction.operands, strict=True))
    operands = [HloInstruction(name, shape, "parameter", (), (str(at),), "", "", (), False) for at, (name, shape) in pairs]
    return [*operands, instruction._replace(is_root=True)]


def _fused(body: Sequence[HloInstruction], computations: Computations) -> Iterator[HloInstruction]:
    """The instructions of a body that do something, and those of what is fused or called in it."""
    for instruction in body:
        if instruction.does in ("fusion", "call"):
            for call in instruction.calls:
                yield from _fused(computations.get(call.name, ()), computations)
        elif instruction.opcode not in _NOTHING:
            yield instruction


def _writer(instruction: HloInstruction, parts: Sequence[HloInstruction]) -> str:
    """Who wrote the code of a kernel: a library that is called, a compiler that is named, or else XLA."""
    fused_by = _FUSED_BY.search(instruction.config) if instruction.does == "fusion" else None
    targets = [target[1] for part in parts if part.does == "custom-call" and (target := _TARGET.search(part.config))]
    for name in [fused_by[1] if fused_by else "", *targets]:
        for prefix, writer in _WRITERS:
            if name.startswith(prefix):
                return writer
    return targets[0] if targets else "XLA"


def _kind(does: set[str], products: Mapping[str, int], by: str, only_moves: bool) -> str:
    if products:
        return "product"
    if does & (COLLECTIVES | {"send", "recv"}):
        return "collective"
    if "sort" in does or by == "CUB" or by.lower().endswith("topk"):
        return "sort"
    if "custom-call" in does:
        return "custom call"
    for opcode, kind in (("scatter", "scatter"), ("reduce", "reduction"), ("reduce-window", "reduction")):
        if opcode in does:
            return kind
    known = does <= _MOVES | _ARITHMETIC
    return "copy" if does <= _MOVES or (known and only_moves) else "elementwise" if known else "other"


def _flops(instruction: HloInstruction, computations: Computations) -> int:
    """Arithmetic of an instruction other than products."""
    first = instruction.result.arrays[0].size if instruction.result.arrays else 0
    if instruction.opcode in _ARITHMETIC:
        return first
    if instruction.opcode in ("reduce", "select-and-scatter"):
        return sum(shape.size for shape in instruction.operands[:1])
    if instruction.opcode == "reduce-window":
        return first * _window(instruction)
    if instruction.opcode == "scatter" and _combines(instruction, computations):
        return sum(shape.size for shape in _updates(instruction))
    return 0


def _product_of(instruction: HloInstruction, by: str) -> Product | None:
    """A matrix product or convolution, in the type that it is computed in; None of other instructions."""
    target = _TARGET.search(instruction.config)
    called = target[1] if target and instruction.does == "custom-call" else ""
    if instruction.opcode in _PRODUCTS or called.startswith("__cublas$"):
        found = _product(instruction)
    elif instruction.opcode == "convolution" or called.startswith("__cudnn$conv"):
        found = _convolution(instruction, called)
    elif called.startswith("__cudnn$fmha"):
        found = _attention(instruction, called)
    else:
        return None
    kinds = [shape.arrays[0].type for shape in instruction.operands[:2] if shape.arrays]
    kind = max(kinds, key=lambda kind: _bits(kind, ""), default="")
    times = 4 if kind in _COMPLEX else 1
    kind = _COMPLEX.get(kind, kind)
    algorithm, precision = _ALGORITHM.search(instruction.config), _PRECISION.search(instruction.config)
    if algorithm:
        kind, times = algorithm["type"].lower(), times * int(algorithm["times"] or 1)
    elif kind == "f32" and by in _ON_TENSOR_CORES and not (precision and "highest" in precision[1].lower()):
        kind = "tf32"
    named = _TYPE.match(kind)
    return found._replace(type=_TYPES[named[1]] + named[2] if named else kind, flops=times * found.flops, k=times * found.k)


def _product(instruction: HloInstruction) -> Product:
    left = _sizes(instruction.operands, 0)
    contracted, shared = (
        math.prod(left[dim] for dim in map(int, re.findall(r"\d+", found[1])) if dim < len(left)) if found else 1
        for found in (pattern.search(instruction.config) for pattern in (_CONTRACTED, _BATCHED))
    )
    result = instruction.result.arrays[0].size if instruction.result.arrays else 0
    rows = math.prod(left) // max(1, shared * contracted)
    return Product("", 2 * result * contracted, shared, rows, result // max(1, shared * rows), contracted)


def _convolution(instruction: HloInstruction, called: str) -> Product:
    """Of a gradient by cuDNN, the numbers of the convolution that it is the gradient of."""
    values = [instruction.result, *instruction.operands]
    result, kernel = {"__cudnn$convBackwardInput": (1, 2), "__cudnn$convBackwardFilter": (2, 0)}.get(called, (0, 2))
    sizes, labels = _sizes(values, kernel), _KERNEL_LABELS.search(instruction.attributes)
    features = sizes[labels[1].index("o")] if labels and "o" in labels[1] and len(sizes) == len(labels[1]) else 1
    whole, window, features = math.prod(_sizes(values, result)), math.prod(sizes), max(1, features)
    pixels, terms = whole // features, window // features
    by_gradient = {"__cudnn$convBackwardInput": (pixels, terms, features), "__cudnn$convBackwardFilter": (terms, features, pixels)}
    return Product("", 2 * whole * window // features, 1, *by_gradient.get(called, (pixels, features, terms)))


def _attention(instruction: HloInstruction, called: str) -> Product:
    """The products of attention that cuDNN computes, those that the backward pass repeats included.

    Forward, each score that no causal mask hides is a product over the features of a head, and it weighs a value; the backward has
    the scores again, the gradients of queries and keys, and two products over the features of a value. Padding hides nothing here:
    how long sequences are, only the data says.
    """
    found = _SCORES.search(instruction.config)
    heads, values = (_sizes(instruction.operands, position)[-1:] for position in (0, 2))
    if not found or not heads or not values:
        return Product("", 0, 0, 0, 0, 0)
    *many, queries, keys = map(int, re.findall(r"\d+", found[1]))
    window, causal = _ATTENDED.search(instruction.config), _CAUSAL.search(instruction.config) is not None
    scores = _scores(queries, keys, int(window[1]) if window else 0) if causal else queries * keys
    backward = "Backward" in called
    over_heads, over_values = (3, 2) if backward else (1, 1)
    flops = 2 * math.prod(many) * scores * (over_heads * heads[0] + over_values * values[0])
    return Product("", flops, math.prod(many), queries, keys, heads[0], "backward" if backward else "forward", causal)


def _scores(queries: int, keys: int, window: int) -> int:
    """How many scores a causal mask leaves: query i sees the keys up to i, with a window the last so many of them."""
    return sum(max(0, min(i, keys) - (max(0, i - window) if window else 0)) for i in range(1, queries + 1))


def _window(instruction: HloInstruction) -> int:
    """Elements of the window of a reduce-window."""
    found = _WINDOW.search(instruction.attributes)
    return math.prod(map(int, found[1].split("x"))) if found else 1


def _sizes(shapes: Sequence[Shape], position: int) -> tuple[int, ...]:
    """Sizes of the first array of one of the values; none if there is no such array."""
    arrays = shapes[position].arrays if position < len(shapes) else ()
    return arrays[0].sizes if arrays else ()


def _updates(instruction: HloInstruction) -> tuple[Shape, ...]:
    """What an update in place writes: of a dynamic-update-slice its second operand, of a scatter the last third of its operands."""
    operands = instruction.operands
    return operands[1:2] if instruction.opcode == "dynamic-update-slice" else operands[len(operands) // 2 + 1 :]


def _combines(instruction: HloInstruction, computations: Computations) -> bool:
    """Whether a scatter adds to what is there, or the like, rather than replacing it."""
    return any(one.is_root and one.opcode != "parameter" for call in instruction.calls for one in computations.get(call.name, ()))


def _taken_over(body: Sequence[HloInstruction]) -> dict[str, list[HloInstruction]]:
    """The results of a body that take over the buffer of an operand, and the updates that they write into it.

    XLA copies the operand before the kernel if it is needed afterwards, so such a result always takes it over.
    """
    values = {instruction.name: instruction for instruction in body}
    found = {}
    for result in _results(body):
        updates, at = [], values.get(result)
        while at is not None and at.opcode in (*_UPDATES, "bitcast"):
            updates += [at] if at.opcode in _UPDATES else []
            at = values.get(at.names[0]) if at.names else None
        if updates and at is not None and at.opcode == "parameter":
            found[result] = updates
    return found


def _results(body: Sequence[HloInstruction]) -> tuple[str, ...]:
    root = next((instruction for instruction in body if instruction.is_root), None)
    if root is None:
        return ()
    return root.names if root.opcode == "tuple" else (root.name,)


def _needed(
    body: Sequence[HloInstruction], taken_over: Mapping[str, Sequence[HloInstruction]], computations: Computations
) -> dict[int, float]:
    """The part of each operand that a kernel needs, from 0 to 1, by the operand's number."""
    in_place = {update.name for updates in taken_over.values() for update in updates}
    values = {instruction.name: instruction for instruction in body}
    needed: dict[str, float] = {name: values[name].result.size for name in {*_results(body), *in_place} if name in values}
    parts: dict[int, float] = {}
    for instruction in reversed(body):
        wanted = needed.get(instruction.name, 0)
        size = instruction.result.size
        if instruction.opcode == "parameter":
            parts |= {int(number): wanted / size if size else 0 for number in instruction.names if number.isdigit()}
        elif wanted:
            for position, (name, operand) in enumerate(zip(instruction.names, instruction.operands, strict=True)):
                asked = _asked(instruction, position, wanted)
                if instruction.name in in_place and position < len(_updates(instruction)):
                    combines = instruction.opcode == "scatter" and _combines(instruction, computations)
                    asked = sum(shape.size for shape in _updates(instruction)) if combines else 0
                needed[name] = min(operand.size, needed.get(name, 0) + asked)
    return parts


def _asked(instruction: HloInstruction, position: int, wanted: float) -> float:
    """How many elements of an operand an instruction needs for so many elements of its result."""
    whole, size = instruction.operands[position].size, math.prod(_sizes([instruction.result], 0))
    if instruction.opcode in _ONE_TO_ONE or (instruction.opcode in _SLICES and position == 0):
        return min(whole, wanted)
    if instruction.opcode in _SHARES and size:
        return min(whole, max(1, whole * wanted / size))
    if instruction.opcode == "reduce-window":
        return min(whole, wanted * _window(instruction))
    if instruction.opcode == "dynamic-update-slice" and position == 0:
        return max(0, wanted - sum(shape.size for shape in _updates(instruction)))
    return whole


def _read(
    instruction: HloInstruction, around: Mapping[str, HloInstruction], needed: Mapping[int, float]
) -> dict[str, tuple[int, bool]]:
    """Bytes that are read of each buffer, and whether it is in host memory; a buffer that is passed twice is read once."""
    buffers: dict[str, tuple[float, bool]] = {}
    for position, (name, shape) in enumerate(zip(instruction.names, instruction.operands, strict=True)):
        buffer = _buffer(name, around)
        num_bytes = buffers.get(buffer, (0, False))[0] + shape.num_bytes * needed.get(position, 0)
        buffers[buffer] = min(shape.num_bytes, num_bytes), shape.on_host
    return {buffer: (round(num_bytes), on_host) for buffer, (num_bytes, on_host) in buffers.items()}


def _buffers_of(instruction: HloInstruction) -> list[str]:
    """The values whose memory an instruction writes, as ``_buffer`` calls them."""
    count = len(instruction.result.arrays)
    return [instruction.name, *(f"{instruction.name} {k}" for k in range(count if count > 1 else 0))]


def _buffer(name: str, around: Mapping[str, HloInstruction]) -> str:
    """The value whose memory an operand is, behind bitcasts; elements of a tuple are told apart by their number."""
    at = around.get(name)
    while at is not None and at.opcode == "bitcast" and at.names:
        name, at = at.names[0], around.get(at.names[0])
    if at is not None and at.opcode == "get-tuple-element":
        return f"{at.names[0]} {at.attributes.split('index=')[-1].split(',')[0]}"
    return name


def _written(
    instruction: HloInstruction,
    body: Sequence[HloInstruction],
    taken_over: Mapping[str, Sequence[HloInstruction]],
    by: str,
    finished: Mapping[str, Shape],
) -> list[tuple[int, bool]]:
    """Bytes that are written of each result, and whether it is in host memory."""
    arrays, results = finished.get(instruction.name, instruction.result).arrays, _results(body)
    if len(results) != len(arrays):
        results = ("",) * len(arrays)
    if by in ("cuBLAS", "cuDNN") and len(arrays) > 1 and arrays[-1].type in ("s8", "u8") and len(arrays[-1].sizes) == 1:
        arrays, results = arrays[:-1], results[:-1]  # without the workspace of the library
    updated = {name: sum(shape.num_bytes for each in updates for shape in _updates(each)) for name, updates in taken_over.items()}
    return [(updated.get(name, array.num_bytes), array.on_host) for name, array in zip(results, arrays, strict=True)]
