"""What experiments share: the error for options that make no run, what they print, and the file of results."""

from pathlib import Path

__all__ = ["ConfigError", "check_writable", "report"]


class ConfigError(ValueError):
    """Sizes or names that make no run, in one line: what was got, the rule, what to do."""


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a file before the run, not after it; a file that was not there is not left behind.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # touch is content with a folder
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror}). Fix: name another file.") from error
    if not there:
        path.unlink()


def report(summary: str, line: str, path: Path | None, figures: str = "") -> None:
    """Print what a run found, and add its line of JSON to the file of results, if there is one.

    Args:
        summary: for the screen.
        line: all that is to be kept.
        path: of the file.
        figures: where the figures are, if any were drawn.
    """
    print(summary)
    if figures:
        print(f"figures: {figures}")
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")
        print(f"all numbers: {path}")
