"""How a process of a run ends, so that the others end too.

JAX waits at the end of a script until all processes have come to the end of theirs (``shutdown_timeout_seconds`` of
``jax.distributed.initialize``, five minutes by default). That is right where one finishes a little earlier. It is wrong where a
script has ended with an exception: the others wait for what this process will never send, and this process waits for them. So:

- Every process leaves a note when its script ends, with the exception if there was one. Others that wait for it in an ``agreement``
  read the note, and raise at once.
- A process whose script has ended with an exception waits five seconds for the others, in which they may fail too and all end in
  good order. Then it ends without them, at once. For the others it is then as if it had been killed: a value that they wait for
  becomes an error where the connection breaks (on CPU), or else JAX ends them when the heartbeats stay away
  (``heartbeat_timeout_seconds``, 100 by default).
- A process that ends with an exception prints the notes of those that failed before it, for its own exception may only say that a
  connection was closed.

In a run of one process all of this does nothing. ``sys.exit`` is no exception: a script that ends by it waits for the others.
"""

import atexit
import contextlib
import faulthandler
import os
import sys
from collections.abc import Mapping

import jax

from jaxpp.runtime.processes.store import Store, shared_store

__all__ = ["left", "named"]

_GRACE = 5
"""Seconds that a process which has failed waits for the others."""

_FOLDER = "jaxpp/left"


def left(store: Store) -> Mapping[int, str]:
    """The processes whose scripts have ended, and how."""
    return {int(process): how for process, how in store.folder(_FOLDER).items()}


def named(error: BaseException) -> str:
    """An error as one line.

    Example:
        >>> named(ValueError("too small\\nby far")), named(KeyboardInterrupt())
        ('ValueError: too small', 'KeyboardInterrupt')
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@atexit.register  # so it runs before what JAX registered earlier, which waits for the other processes
def _leave() -> None:
    """Tell the others that this process ends; after an exception, do not wait for them for long."""
    if not jax.distributed.is_initialized():
        return
    error = getattr(sys, "last_value", None)  # Python has printed its traceback
    with contextlib.suppress(Exception):  # the store ends with process 0
        store = shared_store()
        if store is not None:
            _tell(store, error)
    if error is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.devnull, "w") as nowhere:  # a thread cannot be started any more; this timer is none of Python's
            faulthandler.dump_traceback_later(_GRACE, exit=True, file=os.fdopen(os.dup(nowhere.fileno()), "w"))


def _tell(store: Store, error: BaseException | None) -> None:
    """Leave a note, and print those of processes that failed before."""
    me = store.process
    failed = {process: how for process, how in left(store).items() if process != me and how.startswith("raised")}
    store.put(f"{_FOLDER}/{me}", "has come to the end of its script" if error is None else f"raised {named(error)}")
    if error is not None:
        lines = [f"jaxpp: process {process} {how}, earlier than process {me}" for process, how in sorted(failed.items())]
        lines.append(f"jaxpp: process {me} failed; it ends within {_GRACE} seconds, also if the others have not ended by then")
        print("\n".join(lines), file=sys.stderr, flush=True)
