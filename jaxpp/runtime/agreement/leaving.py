"""How a process of a run ends, so that the others end too.

JAX waits at the end of a script until all processes have come to the end of theirs (``shutdown_timeout_seconds`` of
``jax.distributed.initialize``, five minutes by default). That is right where one finishes a little earlier. It is wrong where a
script has ended with an exception: the others wait for what this process will never send, and this process waits for them. So:

- Every process leaves a note when its script ends, with the exception if there was one. Others that wait for it in an ``agreement``
  read the note, and raise at once; all others print it (``watching``).
- A process whose script has ended with an exception asks the others whether they live, and prints which of them do not answer; for
  its own exception may only say that a connection was closed.
- Then it waits five seconds for the others, in which they may fail too and all end in good order. After that it ends without them,
  at once. For the others it is then as if it had been killed: a value that they wait for becomes an error where the connection
  breaks (on CPU), or else JAX ends them when the heartbeats stay away (``heartbeat_timeout_seconds``, 100 by default).

In a run of one process all of this does nothing. ``sys.exit`` is no exception: a script that ends by it waits for the others.
"""

import atexit
import contextlib
import faulthandler
import functools
import os
import sys
from collections.abc import Mapping

import jax

from jaxpp.runtime.agreement.differences import listed
from jaxpp.runtime.agreement.store import Store, is_known_alone, shared_store
from jaxpp.runtime.agreement.watching import Watcher, silent

__all__ = ["FAILED", "left", "named", "watcher"]

FAILED = "raised"
"""How the note of a process begins whose script has ended with an exception."""

_GRACE = 5
"""Seconds that a process which has failed waits for the others."""

_FOLDER = "jaxpp/left"


def left(store: Store) -> Mapping[int, str]:
    """The processes whose scripts have ended, and how."""
    return {int(process): how for process, how in store.folder(_FOLDER).items()}


def named(error: BaseException) -> str:
    r"""An error as one line.

    Example:
        >>> named(ValueError("too small\nby far")), named(KeyboardInterrupt())
        ('ValueError: too small', 'KeyboardInterrupt')
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@functools.cache
def watcher() -> Watcher | None:
    """What hears the alarms of other processes; None without a store. It begins to listen when it is given the first function."""
    store = shared_store()
    if store is None:
        return None
    found, told = Watcher(store), set[int]()
    found.add(lambda: _print_failures(store, told))
    return found


def _print_failures(store: Store, told: set[int]) -> None:
    """Print which processes have failed, each once."""
    for process, how in sorted(left(store).items()):
        if process not in told and process != store.process and how.startswith(FAILED):
            told.add(process)
            ends = f"process {store.process} cannot go on without it, and ends too: by an error, or by JAX when no heartbeats come"
            print(f"jaxpp: process {process} {how}; {ends}", file=sys.stderr, flush=True)


@atexit.register  # so it runs before what JAX registered earlier, which waits for the other processes
def _leave() -> None:
    """Tell the others that this process ends; after an exception, do not wait for them for long."""
    error = getattr(sys, "last_value", None)  # Python has printed its traceback
    with contextlib.suppress(Exception):  # the store ends with process 0
        store = shared_store()
        if store is not None:
            _tell(store, error)
    found = watcher() if watcher.cache_info().currsize else None
    if found is not None:
        found.stop()
    if error is not None and jax.distributed.is_initialized() and not is_known_alone():
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.devnull, "w") as nowhere:  # a thread cannot be started any more; this timer is none of Python's
            faulthandler.dump_traceback_later(_GRACE, exit=True, file=os.fdopen(os.dup(nowhere.fileno()), "w"))


def _tell(store: Store, error: BaseException | None) -> None:
    """Leave a note; after an exception, look who is left."""
    me = store.process
    store.put(f"{_FOLDER}/{me}", "has come to the end of its script" if error is None else f"{FAILED} {named(error)}")
    if error is not None:
        ends = f"it ends within {_GRACE} seconds, also if the others have not ended by then"
        print(f"jaxpp: process {me} failed; {ends}", file=sys.stderr, flush=True)
        if lost := silent(store, left(store)):
            what = f"{listed(lost)} does not answer: killed (out of memory?), or its host is lost; resume from the last checkpoint"
            print(f"jaxpp: {what}", file=sys.stderr, flush=True)
