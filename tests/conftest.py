"""Eight CPU devices for every test, the tests shared among workers, and workers that stay small."""

import collections
import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import pathlib
import signal
import tempfile
import threading
import zlib

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

# JAX's CUDA plug-in, with which tests compile for GPUs that are not there, would look for a driver and log that it found none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

os.environ.pop("COLUMNS", None)  # workers that share the tests have 80: tables would be folded that are not in a file

import jax
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
    "jaxpp.lowering.lower",
    "jaxpp.observe.memory.liveness",
)
"""Where annotations with shapes are checked at every call."""

with install_import_hook(SHAPED, "beartype.beartype"):
    import jaxpp.lowering.passes.transform
    import jaxpp.tuning
    from tests.models import gpt_case, mlp_case

jaxpp.lowering.passes.transform.always_check = True


MOST_WORKERS = 4
"""Processes that share the tests."""
MOST_BYTES = 1.2e9
"""Resident memory of a worker from which what it has compiled is forgotten after a test. A worker begins with 0.4 GB. A process
that runs all tests alone may have as much as all workers together."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """``python -m pytest`` shares the tests among the cores. What is asked for by name runs here, sooner than workers start."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    alone = hasattr(config, "workerinput") or config.option.usepdb or config.option.collectonly
    if whole and not alone and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses = min(MOST_WORKERS, os.cpu_count() or 1)
        config.option.dist = "loadfile"  # the tests of a file share fixtures and compiled programs


TIERS = pathlib.Path(__file__).parent / "tiers.txt"
"""The tier of each test that takes more seconds than its marks say: `.ci/tiers` writes the list, from what it has measured."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a long test a sixth stays long, at least one, chosen by name; the others are slow. The list comes last."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("slow") and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        ordered = sorted(same, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in ordered[max(1, len(same) // 6) :]:
            item.add_marker(pytest.mark.slow)
    tiers = {nodeid: tier for tier, nodeid in (line.split(" ", 1) for line in TIERS.read_text().splitlines())}
    for item in items:
        item.user_properties.append(("mark", next((name for name in ("slow", "long") if item.get_closest_marker(name)), "short")))
        if item.nodeid in tiers:
            item.add_marker(tiers[item.nodeid])


def pytest_addoption(parser):
    parser.addoption("--seconds", metavar="FILE", help="write the CPU seconds of each test to a file, and the tier of its marks")


def pytest_configure(config):
    if config.getoption("--seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(config.getoption("--seconds")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGAN] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("seconds", sum(os.times()[:4]) - item.stash[BEGAN]))
    return report


BEGAN = pytest.StashKey[float]()
"""The CPU seconds of this process and of those that it had started, as a test began."""


class Seconds:
    """Collects what the tests of all workers took, and writes it when they are done."""

    def __init__(self, path):
        self.path, self.found = pathlib.Path(path), {}

    def pytest_runtest_logreport(self, report):
        found = dict(report.user_properties)
        if report.when == "teardown" and found.keys() >= {"mark", "seconds"}:
            self.found[report.nodeid] = found["mark"], round(found["seconds"], 3)

    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps(self.found, indent=0))


def pytest_runtest_logfinish():
    """Keep a worker small: JAX and jaxpp keep every program that they have compiled, by the thousand in a process of tests.

    What is compiled again is read from the directory of compiled programs.
    """
    with contextlib.suppress(OSError, AttributeError):  # neither file nor function is known outside of Linux
        resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident > (MOST_BYTES if "PYTEST_XDIST_WORKER" in os.environ else MOST_WORKERS * MOST_BYTES):
            jax.clear_caches()  # jaxpp forgets what it has compiled with it
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


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


@pytest.fixture
def ctrl_c_after(ctrl_c):
    """A function that has SIGINT sent after some milliseconds of work, in the held part of a step too; None: no more."""

    def after(milliseconds):
        signal.setitimer(signal.ITIMER_PROF, 0 if milliseconds is None else milliseconds / 1000)

    timer = signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    yield after
    after(None)
    signal.signal(signal.SIGPROF, timer)
