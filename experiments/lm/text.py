"""Text to train on, as bytes: the Python standard library's own sources, which every reader has, or the user's files.

A byte is a token, so nothing is downloaded and nothing tokenised. The last twentieth is held out: other modules than those
trained on. A batch is a function of the seed and the step alone, so two runs see the same ones in the same order.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.options import ConfigError

__all__ = ["Corpus", "TextError", "batch", "held_out_batches", "read"]

# At most so many bytes of the standard library are used; not its tests and tables, nor what others installed or a build wrote.
MAX_BYTES = 4_000_000
SKIPPED = frozenset(
    "test tests idlelib lib2to3 distutils encodings pydoc_data turtledemo ensurepip site-packages dist-packages __pycache__".split()
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")
HELD_OUT = 20  # one byte of so many


class TextError(ConfigError):
    """A text that cannot be trained on, in one line: where, the rule, what was got, what to do."""


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Attributes:
        name: where it comes from.
        train: bytes to train on.
        held_out: the bytes after them.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that tell whether two runs read the same text."""
        return hashlib.sha256(self.train.tobytes() + self.held_out.tobytes()).hexdigest()[:12]


def read(path: Path | None, length: int) -> Corpus:
    """The corpus, split.

    Args:
        path: a file, or a folder whose text files are joined in order of their names; None is the standard library.
        length: tokens of a sequence; each part must hold one, and the token after it.

    Raises:
        TextError: nothing can be read, or it is too short.
    """
    name = "the Python standard library" if path is None else f"--text {path}"
    try:
        data = _standard_library() if path is None else _user_text(path)
    except OSError as error:
        raise TextError(f"{name}: cannot be read ({error.strerror}). Fix: name a text file, or a folder of them.") from error
    needed = HELD_OUT * (length + 1)
    if len(data) < needed:
        raise TextError(
            f"{name}: {len(data)} bytes of text, where its last {100 // HELD_OUT}% must hold a sequence of {length + 1}. "
            f"Fix: pass a --text of at least {needed} bytes, or a smaller --length."
        )
    tokens = np.frombuffer(data, np.uint8)
    cut = len(tokens) - len(tokens) // HELD_OUT
    return Corpus(name, tokens[:cut], tokens[cut:])


def batch(data: np.ndarray, length: int, size: int, seed: int, step: int) -> np.ndarray:
    """The batch of a step: windows at random places.

    Args:
        data: bytes to take them from.
        length: tokens of a sequence.
        size: sequences.
        seed: of the run.
        step: counted from 0.

    Returns:
        int32 tokens ``[size, length + 1]``; the model reads all but the last and predicts all but the first.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, size)
    return _windows(data, length, starts)


def held_out_batches(data: np.ndarray, length: int, size: int, count: int) -> tuple[np.ndarray, ...]:
    """``count`` batches of windows spread evenly over ``data``: the same ones whatever the seed."""
    starts = np.linspace(0, len(data) - length - 1, count * size).astype(int)
    return tuple(_windows(data, length, part) for part in np.split(starts, count))


def _windows(data: np.ndarray, length: int, starts: np.ndarray) -> np.ndarray:
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _standard_library() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _files(root, "*.py"):
        names = path.relative_to(root).parts
        if not SKIPPED.intersection(names) and not any(name.startswith(SKIPPED_PREFIXES) for name in names):
            text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return bytes(text[:MAX_BYTES])


def _user_text(path: Path) -> bytes:
    """A file's bytes; of a folder, the bytes of its files, hidden ones and those with a zero byte (no text) left out."""
    if not path.is_dir():
        return path.read_bytes()
    visible = (file for file in _files(path, "*") if not any(name.startswith(".") for name in file.relative_to(path).parts))
    return b"".join(data for data in (file.read_bytes() for file in visible) if b"\0" not in data)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    paths = (path for path in root.rglob(pattern) if path.is_file())
    return iter(sorted(paths, key=lambda path: path.relative_to(root).as_posix()))
