"""Examples in docstrings as code that can be copied: no prompts; what is printed stands below as comments."""

import re
import textwrap
from typing import Any

import griffe

__all__ = ["PlainExamples", "plain_examples"]


def plain_examples(text: str) -> str:
    """A docstring with its doctests as plain code."""
    text = re.sub(r"::( *)$", r":\1", text, flags=re.MULTILINE)
    parts = re.split(r"^Example:\n((?:    .*\n?|\s*\n)+)", text + "\n", flags=re.MULTILINE)
    return "".join(f"**Example**\n\n{_plain(part)}\n" if k % 2 else part for k, part in enumerate(parts)).rstrip()


def _plain(section: str) -> str:
    lines = []
    for line in textwrap.dedent(section).strip().split("\n"):
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:].replace("  # doctest: +ELLIPSIS", ""))
        elif line.strip() == "...":
            lines.append("")
        elif line.strip():
            lines.append(f"# {line}")
    return "```python\n" + "\n".join(lines) + "\n```\n"


class PlainExamples(griffe.Extension):
    """Rewrites every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Called for each module, class, function and attribute, once all are loaded."""
        obj.labels.discard("deletable")  # that ``del pipe.state`` works is told where it matters
        if obj.docstring is not None:
            obj.docstring.value = plain_examples(obj.docstring.value)
