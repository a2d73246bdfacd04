"""The key-value store that the processes of a run share, where it can be reached.

``jax.distributed.initialize`` starts a coordination service in process 0: it has the processes meet, watches their heartbeats, and
keeps texts under names. JAX has no public function for these texts. So the client that JAX made is looked up with care, and who
uses the store can do without it: ``agreement`` then compares digests by a public collective (``process_allgather``). That finds the
same differences, but cannot tell who is missing, and waits without a limit.
"""

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

try:
    distributed: Any = importlib.import_module("jax._src.distributed")
except ImportError:  # a later JAX may have another name for it: see ``shared_store``
    distributed = None

__all__ = ["Store", "is_known_alone", "shared_store"]

_METHODS = ("key_value_set", "key_value_dir_get", "blocking_key_value_get", "key_value_delete")


class Store:
    """Texts under names with slashes, as in a file system, which all processes read and write.

    Args:
        client: of the coordination service.
        process: the number of this process. (``jax.process_index`` would open the devices, and wait for all processes to do so.)
    """

    def __init__(self, client: Any, process: int):
        self._client, self.process = client, process

    def put(self, name: str, text: str) -> None:
        """Write a text, over any that has this name."""
        self._client.key_value_set(name, text, allow_overwrite=True)

    def folder(self, name: str) -> Mapping[str, str]:
        """All texts of a folder, by the last part of their names."""
        return {key.rpartition("/")[2]: text for key, text in self._client.key_value_dir_get(name + "/")}

    def wait(self, name: str, seconds: float) -> str | None:
        """The text of a name, waited for; None if nobody has written it when the time is over."""
        try:
            return self._client.blocking_key_value_get(name, int(1000 * seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def drop(self, name: str) -> None:
        """Forget a text, if there is one."""
        with contextlib.suppress(Exception):  # it was forgotten before
            self._client.key_value_delete(name)


def shared_store() -> Store | None:
    """The store of this run; None in a run of one process, and where this version of JAX has no such client."""
    state = getattr(distributed, "global_state", None)
    client, process, count = (getattr(state, name, None) for name in ("client", "process_id", "num_processes"))
    if process is None or count in (None, 1) or not all(hasattr(client, method) for method in _METHODS):
        return None
    return Store(client, process)


def is_known_alone() -> bool:
    """Whether this is a run of one process, as far as that can be said without opening the devices."""
    return getattr(getattr(distributed, "global_state", None), "num_processes", None) == 1
