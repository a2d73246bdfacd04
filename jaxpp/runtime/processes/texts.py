"""The texts that the processes of a run compare, and the error message that shows where they differ.

The text of a jaxpr has addresses of functions, and sets in an order of the process; ``listing`` is the same in every process.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jaxpp.errors import ProcessError
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import Atom, aval_of, describe, kind_of

_PACKAGES = ("jaxlib", "jaxpp", "flax", "optax", "numpy")
_OPTIONS = """
enable_x64 default_matmul_precision default_prng_impl threefry_partitionable enable_custom_prng numpy_dtype_promotion
numpy_rank_promotion softmax_custom_jvp high_dynamic_range_gumbel random_seed_offset disable_jit debug_nans debug_infs
use_shardy_partitioner disable_most_optimizations exec_time_optimization_effort optimization_level
""".split()
"""Those that change what is traced or computed; others, such as folders and addresses, may differ from host to host."""

_FREE = ("--xla_dump", "--xla_gpu_dump", "--xla_gpu_per_fusion_autotune_cache_dir")  # flags of XLA that may differ
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_SET = re.compile(r"\{([^{}\n]*)\}")
_LARGE = 1 << 20  # bytes of a constant above which only its shape is compared
_MOST_PARTS = 3  # parts whose difference is shown; others are named
_FOLLOW = frozenset({"loss", "optimizer", "init", "cuts", "lines"})  # shown only if no other part differs

_BEFORE, _WIDTH = 40, 120  # letters of a line that are shown before the first difference, and in all
_RULE = "all processes run the same pipeline, made by the same code"
_CALLS = "give every process the same batches, and call the same methods in the same order, also where one of them prints or saves"
_REMEDIES = {
    "call": _CALLS,
    "versions": "install the same versions on every host",
    "flags": "set the same options of JAX, and the same XLA_FLAGS, in every process",
    "devices": "give every process the same devices or mesh, made of jax.devices(), which lists those of all processes",
    "batch": "pass batches of the same shapes in every process; a loader that divides the data gives each as many examples",
    "key": "make the key of the same seed in every process",
}
_SAME_CODE = "start the same script, with the same arguments, on every host"


def plain(text: str) -> str:
    """A text without addresses, and with its sets in order.

    Example:
        >>> plain("<function f at 0x7f3b5c0d1e50> frozenset({'model', 'data'})")
        "<function f at 0x> frozenset({'data', 'model'})"
    """
    ordered = _SET.sub(lambda match: "{" + ", ".join(sorted(match[1].split(", "))) + "}", text)
    return _ADDRESS.sub("0x", ordered)


def listing(graph: Graph) -> str:
    """The equations of a graph, a line each: results, operation, arguments, and the module that it is part of.

    Example:
        >>> from jaxpp.stages.graph import trace
        >>> print(listing(trace(lambda x: 2 * jax.numpy.tanh(x), jax.numpy.ones(3))[0]))
        0 f32[3]
        1 f32[3] = tanh 0
        2 f32[3] = mul 2.0:f32[] 1
        out 2
    """
    numbers: dict[Var, int] = {}

    def define(var: Var) -> str:
        numbers[var] = len(numbers)
        return f"{numbers[var]} {describe(aval_of(var))}"

    def read(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{plain(str(atom.val))}:{describe(aval_of(atom))}"
        return str(numbers.get(atom, "?"))

    lines = [define(var) for var in graph.inputs]
    lines += [f"{define(var)} constant {_digest(value)}" for var, value in graph.constants.items()]
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        arguments, module = map(read, eqn.invars), [f"({name})"] if name else []
        made = ", ".join(map(define, eqn.outvars))
        lines.append(" ".join([made, "=", kind_of(eqn) + _parameters(eqn.params), *arguments, *module]))
    return "\n".join([*lines, " ".join(["out", *map(read, graph.outputs)])])


def _parameters(params: Mapping[str, Any]) -> str:
    said = []
    for name, value in sorted(params.items()):
        if value is not None and value is not False:
            text = plain(" ".join(str(value).split()))
            if len(text) > 400:  # such as the body of a loop
                text = f"{text[:400]}...{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            said.append(f"{name}={text}")
    return f"[{' '.join(said)}]" if said else ""


def _digest(value: Any) -> str:
    typed = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if typed or value.nbytes > _LARGE or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return ""
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]


@functools.cache
def versions_text() -> str:
    """The versions of Python and of the libraries."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "jax": jax.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return "\n".join(f"{name} {version}" for name, version in versions.items())


def flags_text() -> str:
    """The options of JAX and the flags of XLA, as they are now."""
    config: Any = jax.config  # whose options checkers of types do not know
    names = [f"jax_{name}" for name in _OPTIONS]
    lines = [f"{name} = {getattr(config, name)!r}" for name in names if hasattr(config, name)]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FREE))
    return "\n".join([*lines, *(f"XLA_FLAGS {flag}" for flag in flags)])


def listed(processes: Sequence[int]) -> str:
    """Processes as people write them.

    Example:
        >>> listed([1]), listed([0, 1, 2, 4])
        ('process 1', 'processes 0 to 2 and 4')
    """
    runs: list[list[int]] = []
    for process in processes:
        if runs and runs[-1][-1] == process - 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    joined = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"process{'es' if len(processes) > 1 else ''} {joined}"


def difference(where: str, texts: Mapping[str, Mapping[int, str]]) -> ProcessError:
    """The error for texts that differ: of each part, what each process says; parts that cause others come first."""
    texts = {part: said for part, said in texts.items() if part not in _FOLLOW} or texts
    got = [line for part in list(texts)[:_MOST_PARTS] for line in _shown(part, texts[part])]
    if others := list(texts)[_MOST_PARTS:]:
        got.append(f"also different: {', '.join(others)}")
    return ProcessError(where, _RULE, got, _REMEDIES.get(next(iter(texts)), _SAME_CODE))


def _shown(part: str, said: Mapping[int, str]) -> list[str]:
    rows = list(itertools.zip_longest(*map(str.splitlines, said.values()), fillvalue="(nothing)"))
    number = next((k for k, row in enumerate(rows) if len(set(row)) > 1), len(rows) - 1)
    groups: dict[str, list[int]] = {}
    for process, line in zip(said, rows[number], strict=True):
        groups.setdefault(line, []).append(process)
    where = part if len(rows) == 1 else f"{part}, line {number + 1}"
    same = sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*groups, strict=False)))
    begin = max(0, same - _BEFORE)
    shown = []
    for line, who in groups.items():
        window = ("..." if begin else "") + line[begin : begin + _WIDTH] + ("..." if begin + _WIDTH < len(line) else "")
        shown.append(f"{where}: {listed(who)}: {window}")
    return shown
