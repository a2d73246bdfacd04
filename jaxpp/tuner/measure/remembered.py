"""What was measured, kept in a file, so that a second search measures nothing.

A file holds the results of one problem on one machine. Its name is a digest of all that decides them: the equations of the loss and
of the optimizer, the shapes, the options, the devices, and the versions of the libraries. So a file never has to be judged: what is
in it holds, or the file has another name. A file that cannot be read is ignored, and written anew.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxpp.runtime.processes.channel import texts_of_all

__all__ = ["Remembered", "folder_of", "names_digest"]

_KIND = "jaxpp tune 1"
"""What a file says of itself; another number for other contents."""


def folder_of(keep: bool | str | os.PathLike[str]) -> Path | None:
    """The folder of the files: the user's cache folder, or the one given; None if nothing is kept."""
    if keep is False:
        return None
    if keep is not True:
        return Path(keep)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpp" / "tune"


def names_digest(texts: Mapping[str, str]) -> str:
    """A digest of named texts."""
    return hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()[:32]


class Remembered:
    """Results by kind and name, in a file if there is one.

    Of several processes the first reads and writes, and tells the others what it has read.

    Args:
        path: the file; None to keep nothing.
        several: whether several processes search together.
    """

    def __init__(self, path: Path | None, *, several: bool = False):
        self._path = path if jax.process_index() == 0 else None
        self._found: dict[str, dict[str, Any]] = {}
        self.remark = ""
        text, self.remark = _read(self._path)
        if several:
            text, self.remark = json.loads(texts_of_all(json.dumps([text, self.remark]))[0])
        if text:
            self._found = json.loads(text)["found"]

    def get(self, kind: str, name: str) -> Any:
        """What was kept under this name; None if nothing was."""
        return self._found.get(kind, {}).get(name)

    def put(self, kind: str, name: str, value: Any) -> None:
        """Keep a result, as JSON has it. A file that cannot be written is a remark, and no error."""
        self._found.setdefault(kind, {})[name] = value
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, json.dumps({"kind": _KIND, "found": self._found}))
        except OSError as error:
            self.remark, self._path = f"results are not kept: {error}", None


def _read(path: Path | None) -> tuple[str, str]:
    """The text of a file that holds results, or nothing; and what is wrong with it, if something is."""
    if path is None or not path.exists():
        return "", ""
    try:
        text = path.read_text()
        said = json.loads(text)
        good = said["kind"] == _KIND and all(isinstance(each, dict) for each in said["found"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "", f"{path} is ignored, and will be written anew: {type(error).__name__}: {error}"
    return (text, "") if good else ("", f"{path} is ignored, and will be written anew: it is no file of jaxpp.tune")


def _write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
