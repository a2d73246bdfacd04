"""What XLA logs of its CUDA graphs, counted by the steps in which it was logged.

XLA calls a CUDA graph a command buffer. With ``LOGGED`` in the environment before JAX is imported, XLA writes a line to stderr
whenever it launches a graph, records it, or updates it because a buffer has moved. Whoever runs steps writes a line of
``step_line`` before each, so that a line of XLA's belongs to the step above it. The texts differ from version to version of XLA
(known here are those of jaxlib 0.10.2 and of XLA's sources up to August 2026). So what is not understood is kept and shown.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["LOGGED", "GraphCounts", "counts_of", "graphs_made", "step_line"]

LOGGED: Mapping[str, str] = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "command_buffer_thunk=3,command_executor=1,traced_command_buffer=6,command_buffer_conversion_pass=2",
}
"""Variables with which XLA logs its graphs, and when it compiles or loads a program, of what it makes them."""

_MADE = re.compile(r"^[IW]\S* \S+ +(\d+) command_buffer_conversion_pass\.cc:\d+\] (.*)")  # the thread, the text
_MODULE = re.compile(r"Module (?:jit_)?(\S+) CommandBufferConfig")
_OF = "Creating command buffer thunk with the following thunks: "
_STEP = "graphs of a step: "
_LINE = re.compile(r"(?:\w*/)*(\w+)\.cc:\d+\]\s*(?:\[\d+\]\s*)?(.*)")  # the file, the device in brackets, the text
_FILES = ("command_buffer_thunk", "command_executor", "traced_command_buffer", "command_buffer_cmd")
_EXAMPLES = 3

_KNOWN: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("launched", re.compile(r"Execute command buffer(?! thunk)")),
    ("refused", re.compile(r"(?:Prepare|Initialize|Execute) command buffer thunk as a regular thunk sequence")),
    ("warmed up", re.compile(r"Executing warm up iteration")),
    ("recorded", re.compile(r"Create/Update command buffer .*is_first_record=(?:1|true)|Initialize command buffer on ")),
    ("updated", re.compile(r"(?:Create/)?Update command buffer\b")),
    ("handed", re.compile(r"(?:Updated|Recorded|Initialized|Created/Updated) command buffer\b")),
    ("begins", re.compile(r"Record (?:create|update) \d+ commands")),
    ("commands created", re.compile(r"Created (\d+) commands in ")),
    ("commands updated", re.compile(r"Updated (\d+) commands in ")),
    ("traced again", re.compile(r"Command buffer trace cache (?:create|does replacement)")),
    ("trace found", re.compile(r"Command buffer trace cache hit")),
    ("trace dropped", re.compile(r"Command buffer trace cache evict")),
    ("found", re.compile(r"Command buffer cache hit")),
    ("not found", re.compile(r"Command buffer cache miss")),
    ("evicted", re.compile(r"Evict(?:ed)? .*command buffer")),
)
"""What a line says, by how it begins; the first that fits."""

_MOVED = re.compile(r"updated_allocs=(\d+)")
_MICROSECONDS = re.compile(r" in (\d+) \S{1,3}s\b")
_SKIPPED = re.compile(r"skipped (\d+) command")
_COMMANDS = re.compile(r"num_commands=(\d+)")


@dataclass
class GraphCounts:
    """What was logged in some steps of one way.

    Attributes:
        steps: how many.
        lines: of each kind: ``launched``, ``updated`` (its buffers had moved), ``recorded`` (for the first time), ``traced again``
            (a library's kernels, captured anew), ``refused`` (a profiler was on), and others.
        moved: buffers that had moved, of all updates.
        kernels: of the graphs that were updated.
        rewritten: kernels that were written anew by updates: those that read or write a buffer that had moved.
        microseconds: of the host in which graphs were updated or recorded.
        unknown: lines of XLA's graphs that are not understood; the first few, with how many there were.
    """

    steps: int = 0
    lines: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    kernels: int = 0
    rewritten: int = 0
    microseconds: int = 0
    unknown: dict[str, int] = field(default_factory=dict)

    def a_step(self, kind: str) -> float:
        """Lines of a kind in a step."""
        return self.lines.get(kind, 0) / self.steps if self.steps else 0.0

    def said(self) -> str:
        """In words, for a note."""
        if not self.lines and not self.unknown:
            return "nothing was logged of graphs: there are none, or XLA calls them something else"
        updates = self.lines.get("updated", 0)
        words = list[str]()
        if updates:
            words.append(f"{self.moved / updates:.1f} moved buffers an update, of {self.kernels / updates:.0f} kernels")
        if self.rewritten:
            words.append(f"{self.rewritten / max(1, self.steps):.0f} kernels written anew a step")
        kinds = ("recorded", "traced again", "refused", "evicted")
        words += [f"{self.a_step(kind):.1f} {kind} a step" for kind in kinds if kind in self.lines]
        if self.microseconds:
            words.append(f"{self.microseconds / 1e3 / max(1, self.steps):.2f} ms a step to record and update")
        if self.unknown:
            first = "; ".join(list(self.unknown)[:_EXAMPLES])
            words.append(f"NOT UNDERSTOOD, {sum(self.unknown.values())} lines such as: {first}")
        return "; ".join(words)


def step_line(way: str, number: int) -> str:
    """The line to write to stderr before a step; the steps of a way count from 0."""
    return f"{_STEP}{number} of {way}"


def counts_of(log: Iterable[str], first: int = 0) -> dict[str, GraphCounts]:
    """What was logged, by way.

    Args:
        log: the lines of stderr.
        first: number of the first step that counts; earlier ones find graphs that are not recorded yet.

    Example:
        >>> text = "I0101 00:00:00.000000  7 command_buffer_thunk.cc:9] [0] Execute command buffer; num_executions=1"
        >>> counts_of([step_line("one program", 0), text, text])["one program"].a_step("launched")
        2.0
    """
    found: dict[str, GraphCounts] = {}
    here: GraphCounts | None = None
    for line in log:
        if line.startswith(_STEP):
            number, way = line.removeprefix(_STEP).strip().split(" of ", 1)
            here = found.setdefault(way, GraphCounts()) if int(number) >= first else None
            if here is not None:
                here.steps += 1
        elif here is not None and (match := _LINE.search(line)) and match[1] in _FILES:
            _count(here, match[2].strip())
    return found


def graphs_made(log: Iterable[str]) -> dict[str, list[int]]:
    """Of how many pieces of work XLA has made each graph of a program, by the program; a piece is a kernel, as a rule.

    This is known where a program is compiled, also for a GPU that is not there. Several threads compile, so a line is of the
    program that its thread has named last. Of a program that is made again, the last time counts.

    Example:
        >>> head = "I0101 00:00:00.000000  7 command_buffer_conversion_pass.cc:9] "
        >>> found = [head + "Module jit_f CommandBufferConfig: enabled_commands: [FUSION]", head + _OF + "dot, fusion, fusion.1"]
        >>> graphs_made(found)
        {'f': [3]}
    """
    found: dict[str, list[int]] = {}
    here: dict[str, list[int]] = {}
    for line in log:
        if (match := _MADE.match(line)) is None:
            continue
        thread, text = match.groups()
        if (module := _MODULE.match(text)) is not None:
            here[thread] = found[module[1]] = []
        elif text.startswith(_OF) and thread in here:
            here[thread].append(text.removeprefix(_OF).count(",") + 1)
    return found


def _count(counts: GraphCounts, text: str) -> None:
    kind = next((kind for kind, pattern in _KNOWN if pattern.match(text)), None)
    if kind is None:
        text = re.sub(r"0x[0-9a-f]+|\d+", "#", text)[:120]
        counts.unknown[text] = counts.unknown.get(text, 0) + 1
        return
    counts.lines[kind] = counts.lines.get(kind, 0) + 1
    if kind == "updated":
        counts.moved += _number(_MOVED, text)
        counts.kernels += _number(_COMMANDS, text)
    elif kind == "handed":
        counts.microseconds += _number(_MICROSECONDS, text)
    elif kind == "commands updated":
        counts.rewritten += int(text.split()[1]) - _number(_SKIPPED, text)


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0
