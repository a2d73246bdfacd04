"""Checkpoints of a run: saved by Orbax beside the training, found again when the command is started again.

A checkpoint is the state, as the user's own trees, and one file of JSON: the options that the run cannot change, and the losses up
to that step. Orbax writes both into a temporary folder and renames the folder when all is written, so a checkpoint is whole or not
there. The writing happens in threads, while the training goes on. What fails there is raised by ``wait_until_finished``, once, and
by nothing else; ``look`` asks for it after every step.

Orbax keeps no checksums of arrays: a file with other bits may come back as other numbers. So each step gets a file of digests when
it is whole, and a run that goes on from the step compares them first.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

import jaxpp
from experiments.options import ConfigError, check_folder

__all__ = ["CheckpointError", "Checkpoints", "History", "Times"]

DIGESTS = "digests.json"  # in the folder of a step: the SHA-256 of each of its files
ADDED = {"optimizer": "adamw", "delay": 0, "feedback": 0.0}  # what runs had that were saved before this could be chosen
KEPT = 2  # checkpoints in the folder; the older ones are deleted when a newer one is whole


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read, or could not be written, in one line: where, what happened, what is safe, what to do."""


class Failure(NamedTuple):
    """A save that failed: what to tell the user, and what was raised."""

    said: str
    error: Exception


@dataclass(frozen=True)
class Times:
    """What checkpoints cost, in seconds.

    Attributes:
        restore: until the state was on its devices, if there was one.
        saves: how long the training waited for each save.
        writes: from the beginning of each save until it was seen to be whole on disk; the run looks after every step.
    """

    restore: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)


@dataclass
class History:
    """What a run has found so far, and a resumed run must know.

    Attributes:
        losses: the training loss of every step.
        val_losses: pairs of the steps done and the loss on the held-out text.
    """

    losses: list[float] = field(default_factory=list)
    val_losses: list[tuple[int, float]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run in one folder.

    Args:
        folder: made if it is not there; what was being written in it when an earlier run was killed is deleted.
        settings: what a resumed run may not change, by the names of the options.
        go_on: whether the run goes on if a save fails; otherwise the failure is raised.

    Attributes:
        safe_step: the newest step that is whole on disk; None if there is none.
        history: of the run that was saved there; empty if there is none.
        times: of what was saved and restored.

    Raises:
        ConfigError: the folder cannot be written, Orbax is not installed, or the run that was saved there had other settings.
        CheckpointError: the newest step is not as it was saved.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, go_on: bool = False):
        self._orbax = _orbax()
        self._given, self._folder, self._settings, self._go_on = folder, folder.absolute(), dict(settings), go_on
        self._saving: int | None = None  # the step that is being written
        self._tried: int | None = None  # the newest step of which a save was begun
        self._began, self._failed, self.times = 0.0, False, Times()
        check_folder("--checkpoint", self._folder)
        self._manager = self._open()
        self.safe_step: int | None = self._manager.latest_step()
        self._check_digests()
        self.history = History() if self.safe_step is None else self._read()

    def restore(self, target: jaxpp.State) -> jaxpp.State:
        """The newest state, each leaf straight to its owner.

        Args:
            target: the shapes and shardings, from ``abstract_state``.
        """
        began = time.perf_counter()
        state = jax.block_until_ready(self._restore("state", self._orbax.args.StandardRestore(target)))
        self.times.restore.append(time.perf_counter() - began)
        return state

    def look(self) -> None:
        """See whether the save that was under way has ended, and how; waits for nothing.

        Raises:
            CheckpointError: it failed, and the run is to stop.
        """
        if jax.process_count() > 1:
            return  # a process waits for a save together with the others, when the next begins
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self._report(self._end())

    def save(self, state: jaxpp.State, history: History) -> None:
        """Begin to save a state; the arrays have been copied when this returns, so the next step may consume them.

        Args:
            state: the state.
            history: up to it.

        Raises:
            CheckpointError: this save, or the one before, failed, and the run is to stop.
        """
        began = time.perf_counter()
        self._report(self._end())
        self._report(self._begin(state, history))
        self.times.saves.append(time.perf_counter() - began)

    def finish(self, state: jaxpp.State, history: History) -> None:
        """Save the newest state unless that was begun, and wait until it is on disk.

        Raises:
            CheckpointError: it could not be saved, and the run is to stop.
        """
        failure = self._end()
        if state.step not in (self.safe_step, self._tried):
            self._say(failure)  # an older step matters only if the newest is not saved either
            failure = self._begin(state, history) or self._end()
        self._report(failure)

    def close(self) -> None:
        """Wait for Orbax's threads; what fails here is said, not raised."""
        self._say(self._end())
        self._manager.close()
        if self._failed:  # threads of a failed save, for which Orbax does not wait, may have written after it was cleaned up
            with contextlib.suppress(Exception):  # then the next run cleans up
                self._open().close()

    def _open(self) -> Any:
        options = self._orbax.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        return self._orbax.CheckpointManager(self._folder, options=options)

    def _begin(self, state: jaxpp.State, history: History, *, again: bool = False) -> Failure | None:
        """Begin to save, and see whether that failed at once.

        Orbax first deletes what is half written. If something else deletes the same files, such as the last save's own clean-up,
        they may be gone before Orbax comes to them, so the save is begun ``again``, once.
        """
        found = {"settings": self._settings, "losses": history.losses, "val_losses": history.val_losses}
        args, self._saving, self._tried, self._began = self._orbax.args, state.step, state.step, time.perf_counter()
        both = args.Composite(state=args.StandardSave(state), run=args.JsonSave(found))
        try:
            self._manager.save(state.step, args=both, force=True)
        except Exception as error:  # noqa: BLE001  (whatever the disk makes Orbax raise)
            failure = self._failure(error)
            retry = isinstance(error, FileNotFoundError) and self.safe_step is not None and not again
            return self._begin(state, history, again=True) if retry else failure
        return None

    def _end(self) -> Failure | None:
        """Wait for the save under way, if there is one, and see whether it failed."""
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001  (whatever the disk makes Orbax raise)
            return self._failure(error)
        self.safe_step, self._saving = self._saving, None
        self.times.writes.append(time.perf_counter() - self._began)
        self._write_digests()
        return None

    def _write_digests(self) -> None:
        if jax.process_index() > 0:
            return
        path = self._folder / str(self.safe_step) / DIGESTS
        try:
            half = path.with_suffix(".half")
            half.write_text(json.dumps(_digests(path.parent), indent=1))
            half.replace(path)
        except OSError as error:
            self._say(
                Failure(f"--checkpoint {self._given}: the digests of step {self.safe_step} are missing ({_reason(error)})", error)
            )

    def _check_digests(self) -> None:
        """Compare the files of the newest step with its digests, if it has any: a killed run may have had no time for them."""
        if self.safe_step is None or not (path := self._folder / str(self.safe_step) / DIGESTS).exists():
            return
        try:
            found, known = _digests(path.parent), dict[str, str](json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise self._unreadable(_reason(error) if isinstance(error, OSError) else f"{DIGESTS} is damaged") from error
        if odd := sorted(name for name, digest in known.items() if found.get(name) != digest):
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise self._unreadable(f"not as it was saved: {odd[0]}{more}")

    def _failure(self, error: Exception) -> Failure:
        """Find out what is on disk, and delete what is half written.

        A manager that has failed to save no longer knows which steps are there, and leaves half a step behind; a new manager reads
        the folder.
        """
        step, self._saving, self._failed = self._saving, None, True
        try:
            self._manager.close()
            self._manager = self._open()
            self.safe_step = self._manager.latest_step()
        except Exception:  # noqa: BLE001  (the folder itself is gone)
            self.safe_step = None
        safe = "no step is safe there" if self.safe_step is None else f"step {self.safe_step} is safe there"
        return Failure(f"--checkpoint {self._given}: step {step} could not be saved ({_reason(error)}); {safe}", error)

    def _report(self, failure: Failure | None) -> None:
        if failure is not None and not self._go_on:
            fix = "mend that and start the same command again, or pass --on-save-error go-on to train without checkpoints"
            raise CheckpointError(f"{failure.said}. Fix: {fix}.") from failure.error
        self._say(failure)

    def _say(self, failure: Failure | None) -> None:
        if failure is not None:
            tqdm.write(f"lm: {failure.said}", file=sys.stderr)

    def _read(self) -> History:
        """What was saved beside the newest state, if it was the same run."""
        found = self._restore("run", self._orbax.args.JsonRestore())
        before = ADDED | found["settings"]
        if odd := [name for name, value in self._settings.items() if before.get(name) != value]:
            was, now = (" ".join(_typed(name, values.get(name)) for name in odd) for values in (before, self._settings))
            rule = f"the run that is saved there had {was}, and this command has {now}"
            raise ConfigError(f"--checkpoint {self._given}: {rule}. Fix: pass {was} to resume it, or name another folder.")
        return History(found["losses"], [(done, loss) for done, loss in found["val_losses"]])

    def _restore(self, item: str, args: Any) -> Any:
        try:
            return self._manager.restore(self.safe_step, args=self._orbax.args.Composite(**{item: args}))[item]
        except Exception as error:
            raise self._unreadable(_reason(error)) from error

    def _unreadable(self, reason: str) -> CheckpointError:
        fix = f"delete {self._given / str(self.safe_step)}, to go on from an older step or from the start, or name another folder"
        return CheckpointError(f"--checkpoint {self._given}: step {self.safe_step} cannot be read ({reason}). Fix: {fix}.")


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a step, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stem != Path(DIGESTS).stem:
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _typed(name: str, value: Any) -> str:
    """A setting as it is typed; a text is known by its digest."""
    return f"the text of digest {value}" if name == "text" else f"--{name.replace('_', '-')} {value}"


def _reason(error: Exception) -> str:
    """What the operating system says, in a line; Orbax's writers put its code at the end of long sentences."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _orbax() -> Any:
    """Orbax, whose log is silenced: what it reports of a failed save, in hundreds of lines, is said here in one."""
    try:
        found = importlib.import_module("orbax.checkpoint")
    except ImportError:
        fix = 'pip install -e ".[checkpoint]" in the checkout of jaxpp'
        raise ConfigError(f"--checkpoint: Orbax saves checkpoints, and is not installed. Fix: {fix}.") from None
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    found.type_handlers.register_type_handler(jax.Array, jaxpp.array_handler(), override=True)  # for several hosts
    return found
