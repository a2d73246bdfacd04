"""The code on pages that are no notebooks: run as a reader would paste it, and shown with what it printed and drew.

``run`` runs the blocks of a page in order, in a process of its own. ``.ci/docs`` does so for every page and keeps what came out,
with the code, under build/blocks. ``with_outputs`` puts it below the blocks, and refuses a page whose code has changed since.
"""

import base64
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict

from pages import as_text, figure

__all__ = ["Ran", "blocks_of", "keep", "kept", "run", "with_outputs"]

_BLOCK = re.compile(r'^```python(?: title="jaxpp")?\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?', re.DOTALL | re.MULTILINE)
"""A block, and the output that stands below it in the page."""
_FIGURE = re.compile(r'"([\w-]+\.(?:png|gif|svg))"')
"""A file that a block draws."""
_MARK = "-- the next block --"


class Ran(TypedDict):
    """A block that has run: its code, what it printed, and the files that it drew, in base64, by name."""

    code: str
    printed: str
    figures: dict[str, str]


def blocks_of(text: str) -> list[tuple[str, str]]:
    """The code of a page, and the output that the page has below each block, if any."""
    return _BLOCK.findall(text)


def run(text: str, folder: pathlib.Path, package: pathlib.Path, environment: Mapping[str, str]) -> list[Ran]:
    """Run the blocks of a page in a process that finds the package and nothing else of the project; warnings for users are errors.

    Args:
        text: the page.
        folder: an empty folder in which the process runs.
        package: the package to import.
        environment: additions to the environment of the process.

    Raises:
        RuntimeError: the code raised; the message is what it wrote to stderr.
    """
    codes = [code for code, _ in blocks_of(text)]
    (folder / "installed").mkdir(parents=True)
    (folder / "installed" / package.name).symlink_to(package)
    joined = "".join(f"{code}\nprint({_MARK!r})\n" for code in codes)
    paths = {"PYTHONPATH": str(folder / "installed"), "MPLBACKEND": "agg"}
    arguments = [sys.executable, "-W", "error::UserWarning", "-c", joined]
    done = subprocess.run(  # noqa: S603 - the pages' own code
        arguments, cwd=folder, env={**os.environ, **environment, **paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    printed = done.stdout.split(f"{_MARK}\n")[:-1]
    return [
        {"code": code, "printed": text.rstrip(), "figures": _drawn(code, folder)} for code, text in zip(codes, printed, strict=True)
    ]


def _drawn(code: str, folder: pathlib.Path) -> dict[str, str]:
    files = [folder / name for name in _FIGURE.findall(code)]
    return {file.name: base64.b64encode(file.read_bytes()).decode() for file in files if file.exists()}


def keep(ran: Sequence[Ran], uri: str, folder: pathlib.Path) -> None:
    """Write what the blocks of the page ``uri`` did, for ``kept``."""
    target = folder / f"{uri}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(ran))


def kept(folder: pathlib.Path) -> dict[str, list[Ran]]:
    """What the blocks of every page did."""
    return {str(file.relative_to(folder))[: -len(".json")]: json.loads(file.read_text()) for file in folder.rglob("*.json")}


def with_outputs(markdown: str, ran: Sequence[Ran], uri: str) -> str:
    """The page ``uri`` with the output and the figures of each block below it.

    Raises:
        ValueError: the page has other code than what ran.
    """
    if [code for code, _ in blocks_of(markdown)] != [block["code"] for block in ran]:
        raise ValueError("its code is not what ran")
    left = iter(ran)

    def shown(match: re.Match[str]) -> str:
        block, folder = next(left), pathlib.PurePosixPath(uri).stem
        printed = "" if match[2] else as_text(block["printed"])
        drawn = [figure(f"{folder}/{name}", base64.b64decode(data)) for name, data in block["figures"].items()]
        return "\n\n".join(part for part in (match[0].rstrip("\n"), printed, *drawn) if part) + "\n"

    return _BLOCK.sub(shown, markdown)
