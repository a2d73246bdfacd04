"""A check that every process makes: what one of them finds, all of them raise."""

import json
from collections.abc import Callable

import jax

from jaxpp.errors import JaxppError, ProcessError
from jaxpp.runtime.agreement.leaving import FAILED, named
from jaxpp.runtime.processes.exchange import texts_of_all

__all__ = ["raise_alike"]


def raise_alike(where: str, check: Callable[[], None], kind: type[JaxppError]) -> None:
    """Make a check, and raise in every process if it fails in one; every process calls this.

    Args:
        where: the call, as the user wrote it.
        check: does not wait for other processes.
        kind: the errors by which it says what it has found.

    Raises:
        JaxppError: of that kind, what the first process found that found something.
        ProcessError: another process raised another exception.
        Exception: what the check raised here.
    """
    error, said = None, {}
    try:
        check()
    except Exception as found:  # noqa: BLE001  (the others must not wait for this process)
        error, said = found, {"parts": found.parts} if isinstance(found, kind) else {"failed": named(found)}
    told = [json.loads(text) for text in texts_of_all(json.dumps(said))]
    first = next((process for process, other in enumerate(told) if "parts" in other), None)
    if error is not None and (not isinstance(error, kind) or first == jax.process_index()):
        raise error
    for process, other in enumerate(told):
        if "parts" in other:
            raise kind(*other["parts"])
        if "failed" in other:
            rule, fix = "all processes check the same", "mend that error, whose traceback is in the log of its process"
            raise ProcessError(where, rule, f"process {process} {FAILED} {other['failed']}", fix)
