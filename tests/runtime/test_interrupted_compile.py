"""Ctrl-C while programs are compiled: it waits for no program that nobody will use, and leaves no lock of Python's taken."""

import concurrent.futures
import inspect
import signal
import sys
import threading

import jax
import pytest

from jaxpp.runtime import compile as compiling
from tests.end_to_end.test_bugs import PARAMS, X, loss_fn, pipeline

# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_ctrl_c_during_init_does_not_wait_for_what_is_not_compiled_yet(ctrl_c, monkeypatch):
    # All programs were compiled before the interrupt was seen: minutes for a large model.
    begun, may_end, ended, compile_lowered = threading.Semaphore(0), threading.Event(), [], compiling.compile_lowered

    def slow(*given, **options):
        begun.release()
        ended.append(may_end.wait(20))
        return compile_lowered(*given, **options)

    def press():
        assert begun.acquire(timeout=60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(compiling, "compile_lowered", slow)
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 1)
    jax.clear_caches()
    pipe, thread = pipeline(stages=3), threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pipe.init(PARAMS, X)
    assert not ended and not begun.acquire(blocking=False), "the first program still waits, and no other was begun"
    may_end.set()
    thread.join()
    monkeypatch.undo()
    state = pipe.init(PARAMS, X)
    pipe.step(state, X)


class InPools:
    """Sends SIGINT before the n-th bytecode of Python's pools and locks that runs in the main thread."""

    files = (concurrent.futures.thread.__file__, concurrent.futures._base.__file__, threading.__file__)

    def __init__(self, number):
        self.number, self.seen = number, 0

    def __enter__(self):
        self.old = sys.gettrace()
        inspect.currentframe().f_trace_opcodes = True  # Python 3.12 looks here whether there will be events for bytecodes
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.old)

    def __call__(self, frame, event, _):
        frame.f_trace_opcodes = frame.f_code.co_filename in self.files
        if event == "opcode":
            self.seen += 1
            if self.seen == self.number:
                signal.raise_signal(signal.SIGINT)
        return self


def test_ctrl_c_in_python_s_own_locks_leaves_none_taken(ctrl_c):
    # Ctrl-C between taking a lock and entering the block that gives it back: the thread that compiles then waited for ever, and
    # with it the end of the process.
    def busy():
        return [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]

    pipe = pipeline()
    pipe.init(PARAMS, X)
    jobs = [line.placed for line in pipe.engine.lower("update", X, None).bound.lines if line.placed is not None][:3]

    def interrupted(number):
        """How many bytecodes ran there, and whether the compiling was interrupted."""
        jax.clear_caches()
        try:
            with InPools(number) as counter:
                compiling.Programs().compile(jobs)
        except KeyboardInterrupt:
            return counter.seen, True
        return counter.seen, False

    seen, hits = interrupted(-1)[0], 0
    for number in range(1, seen, max(1, seen // 60)):
        hits += interrupted(number)[1]
        for thread in busy():
            thread.join(timeout=20)
        assert not busy(), number
    assert hits > 20


def test_an_entry_of_a_cache_of_jax_that_ctrl_c_left_open_is_forgotten():
    # `RecursionError: Recursively calling <weakref to 'Jaxpr'>`, once in about a thousand interrupts while something is compiled.
    open_entries, cleared = [True], jax.jit(lambda x: x + 1)

    def loss(params, x):
        if open_entries:
            open_entries.clear()
            raise RecursionError("Recursively calling <weakref at 0x7f40895a4540; to 'Jaxpr' at 0x7f405a08efe0>")
        return loss_fn(params, x)

    cleared(1.0)
    pipe = pipeline(loss)
    state = pipe.init(PARAMS, X)
    assert not cleared._cache_size()
    open_entries.append(True)
    state, _ = pipe.step(state, X[:6])
    open_entries.append(True)
    pipe.evaluate(state, X[:5])

    def endless(params, x):
        return endless(params, x)

    with pytest.raises(RecursionError, match="maximum recursion depth"):
        pipeline(endless).init(PARAMS, X)
