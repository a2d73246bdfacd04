"""Eight CPU devices for every test, and the models the cross-cutting tests share."""

import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any

# Most of the suite's time is the compiler's: it optimises less here, which changes no equation (test_default_level.py compiles as
# users do), and each program on one thread, since the workers take all cores. Fusions written by XLA itself instead of LLVM take
# two thirds of what is left; JAX 0.11 cannot leave them out.
# A collective on forced CPU devices waits for all of them; on a busy machine that may take longer than the 40 seconds it is given.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    + "--xla_cpu_use_fusion_emitters=false " * importlib.metadata.version("jaxlib").startswith("0.10.")
    + "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 --xla_cpu_collective_call_terminate_timeout_seconds=600",
)

os.environ.pop("COLUMNS", None)  # workers that share the tests have 80: tables would be folded that are not in a file

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import install_import_hook

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores Ctrl-C for what it starts in the background

jax.config.update("jax_num_cpu_devices", 8)
# Most of the suite's time is XLA's; many tests compile the same programs, so they are kept from one to the next.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(tempfile.gettempdir()) / "jaxpp-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

SHAPED = (
    "models",
    "jaxpp.stages.loss.aux",
    "jaxpp.stages.loss.microbatch",
    "jaxpp.plan.lower",
    "jaxpp.observe.memory.liveness",
)
"""Where annotations with shapes are checked at every call."""

with install_import_hook(SHAPED, "beartype.beartype"):
    import jaxpp  # noqa: F401  (so that its modules are imported while they are checked)
    from models.gpt import GPT
    from models.mlp import MLP


MOST_WORKERS = 4
"""Processes that share the tests; each grows to three GB."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """``python -m pytest`` shares the tests among the cores. What is asked for by name runs here, sooner than workers start."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    alone = hasattr(config, "workerinput") or config.option.usepdb or config.option.collectonly
    if whole and not alone and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = min(MOST_WORKERS, os.cpu_count() or 1)
        config.option.dist = "worksteal"  # neighbours stay together, as do the programs they compile, until a worker has none left


TOGETHER = ("_experiment.py", "test_lm.py", "test_lm_checkpoint.py", "test_kill.py", "test_process", "test_profile.py")
"""Parts of the names of files whose tests share something that takes long to make."""


def pytest_collection_modifyitems(config, items):
    """Where workers share the tests, what takes long to make is made once.

    Each worker begins with an equal part of the list, and one that has none left steals from the end of another's. So the files
    whose tests belong together come first in each part.
    """
    count = getattr(config, "workerinput", {}).get("workercount", 1)
    if count > 1:
        items[:] = in_parts(items, count)


def in_parts(items, count):
    """The tests in an order whose ``count`` equal parts each begin with whole files of those in ``TOGETHER``."""
    files, rest = {}, []
    for item in items:
        together = any(part in item.path.name for part in TOGETHER)
        (files.setdefault(item.path, []) if together else rest).append(item)
    ordered, supply = [], iter(rest)
    for part in range(count):
        end = len(items) * (part + 1) // count
        for path in list(files)[part::count]:
            ordered += files[path]
        ordered += itertools.islice(supply, max(0, end - len(ordered)))
    return [*ordered, *supply]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its loss, its parameters, a batch and a key, all of one floating type."""

    name: str
    loss_fn: Callable[..., Any]
    init: Callable[..., Any]
    params: Any
    batch: Any
    key: Any
    model: Any


def mlp_case(dtype: str = "float32", *, batch_size: int = 19, width: int = 16, depth: int = 7, compute: Any = None) -> Case:
    """A multilayer perceptron with a two-class head; aux holds the accuracy, a count and the logits."""
    model = MLP(width=width, depth=depth, dtype=compute, param_dtype=dtype)
    rng = np.random.default_rng(1)
    batch = {"x": jnp.asarray(rng.normal(size=(batch_size, width)), dtype), "y": jnp.asarray(rng.integers(0, 2, batch_size))}

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["x"]).astype(dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        aux = {"accuracy": (logits.argmax(-1) == batch["y"]).mean(dtype=dtype), "ones": batch["y"].sum(), "logits": logits}
        return losses.mean(), aux

    def init(key):
        return model.init(key, jnp.zeros((1, width), dtype))["params"]

    return Case("mlp", loss_fn, init, jax.jit(init)(jax.random.key(0)), batch, None, model)


def gpt_case(
    dtype: str = "float32", *, batch_size: int = 11, depth: int = 2, compute: Any = None, width: int = 16, heads: int = 2
) -> Case:
    """A small GPT with dropout and a tied head, on random tokens; aux holds the largest logit."""
    model = GPT(
        vocab_size=32, max_length=8, width=width, depth=depth, num_heads=heads, dropout=0.2, dtype=compute, param_dtype=dtype
    )
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 32, (batch_size, 9)))

    def loss_fn(params, batch, key):
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}).astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), {"top": logits.max()}

    def init(key):
        return model.init({"params": key, "dropout": key}, tokens[:1, :-1])["params"]

    return Case("gpt", loss_fn, init, jax.jit(init)(jax.random.key(0)), tokens, jax.random.key(7), model)


@pytest.fixture(params=[mlp_case, gpt_case], ids=["mlp", "gpt"])
def make_case(request):
    return request.param


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def ctrl_c():
    """SIGINT as a user's session has it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)
