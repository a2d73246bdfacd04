"""What is written elsewhere in the project (notebooks, READMEs, sources) as Markdown for the pages.

Everything here is text in, text out. Notebooks and READMEs are written in the Markdown of Jupyter and GitHub; ``for_pages`` brings
their lists and folded answers into the form that Python-Markdown reads.
"""

import base64
import dataclasses
import itertools
import pathlib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "NotebookPage",
    "as_text",
    "figure",
    "first_block",
    "first_sentence",
    "for_pages",
    "linked",
    "notebook_page",
    "source_page",
    "title_of",
]

_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]) ")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_LINKED = re.compile(r"\[([^\[\]]*)\]\([^)\s]+\)")
_QUOTED_FILE = re.compile(r"(?<![\[`])`([\w.-]+(?:/[\w.-]+)*\.py)`(?!\])")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Change a document, but for its fenced blocks."""
    parts = re.split(r"(^(`{3,}).*?^\2`*[ ]*$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(change(part) if k % 3 == 0 else part * (k % 3 == 1) for k, part in enumerate(parts))


def for_pages(text: str) -> str:
    """Markdown as Jupyter reads it, as Python-Markdown reads it: a blank line before a list, Markdown inside folded answers."""

    def change(part: str) -> str:
        lines = []
        for line in part.split("\n"):
            before = lines[-1] if lines else ""
            if _LIST_ITEM.match(line) and before.strip() and not _LIST_ITEM.match(before) and not before.startswith(" "):
                lines.append("")
            lines.append(line)
        return re.sub(r"<details>\s*<summary>", '<details markdown="1"><summary>', "\n".join(lines))

    return _outside_fences(text, change)


def title_of(text: str) -> str:
    """The first heading, without the quotes of code."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph after the first heading."""
    body = text[text.index("\n", text.index("# ")) :] if re.search(r"^# .*\n", text, re.MULTILINE) else ""
    for paragraph in re.split(r"\n\s*\n", body):
        flat = " ".join(paragraph.split())
        if flat and not flat.startswith(("#", "<", "|", "!", "```")):
            return re.split(r"(?<=[.?!])\s", _LINKED.sub(r"\1", flat))[0]
    return ""


def first_block(text: str, language: str) -> str:
    """The first fenced block of a language, with its fences."""
    blocks = re.finditer(r"^```(\w*)\n.*?^```$", text, re.DOTALL | re.MULTILINE)
    return next((block[0] for block in blocks if block[1] == language), "")


def linked(text: str, here: str, page: str, page_of: Callable[[str], str | None], *, quotes: bool = True) -> str:
    """A document whose links lead to pages: those to files that have none become plain text.

    Args:
        text: the document.
        here: the folder of the document in the project.
        page: where the document will be among the pages.
        page_of: the page that shows a file or folder of the project, or None.
        quotes: whether names of files in backticks become links.
    """

    def towards(target: str, folder: str) -> str | None:
        path, mark, anchor = target.partition("#")
        found = page_of(posixpath.normpath(posixpath.join(folder, path)))
        return None if found is None else posixpath.relpath(found, posixpath.dirname(page)) + mark + anchor

    def link(match: re.Match[str]) -> str:
        target = match.group(1)
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        found = towards(target, here)
        return f"]({target})" if found is None else f"]({found})"  # a link to nothing stays: the strict build names it

    def quoted(match: re.Match[str]) -> str:
        name = match.group(1)
        found = towards(name, "" if name.split("/")[0] in ("jaxpp", "models", "experiments", "tests") else here)
        return match.group(0) if found is None else f"[`{name}`]({found})"

    def change(part: str) -> str:
        part = _LINK.sub(link, part)
        return _QUOTED_FILE.sub(quoted, part) if quotes else part

    return _outside_fences(text, change)


def source_page(path: str, text: str) -> str:
    """A page that shows a file; the search leaves it out."""
    fence = "`" * 10
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n# {posixpath.basename(path)}\n\n`{path}`"
    return f'{head}\n\n{fence} {{ .python linenums="1" }}\n{text}{fence}\n'


@dataclasses.dataclass
class NotebookPage:
    """A notebook that has run, as a page.

    Attributes:
        title: its first heading.
        summary: the first sentence of its takeaway, or else its first sentence.
        markdown: the page, with a mark where the HTML of an output belongs.
        pictures: files by name, relative to the page.
        outputs: the HTML of outputs, by their marks.
        tags: words by which readers search for it, from the ``tags`` of its header.
        defects: what a finished notebook does not print.
    """

    title: str = ""
    tags: Sequence[str] = ()
    summary: str = ""
    markdown: str = ""
    pictures: dict[str, bytes] = dataclasses.field(default_factory=dict)
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)
    defects: list[str] = dataclasses.field(default_factory=list)

    def marked(self, html: str) -> str:
        """A mark for HTML that Markdown shall leave alone."""
        mark = f"html{len(self.outputs)}mark"
        self.outputs[mark] = html
        return mark


def notebook_page(notebook: Mapping[str, Any], name: str) -> NotebookPage:
    """The page of a notebook: its text, its code, and what the code printed and drew.

    Args:
        notebook: the JSON of the file.
        name: of the file, without its ending.
    """
    page, parts = NotebookPage(tags=notebook.get("metadata", {}).get("tags", ())), []
    for number, cell in enumerate(notebook["cells"]):
        source = _joined(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(for_pages(source))
            if re.search(r"\$[^$`\n]*\\|\$\$", source):
                page.defects.append(f"cell {number} has a formula in dollars, which these pages show as it is written")
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source}\n```")
            for part, output in enumerate(_merged(cell["outputs"])):
                parts.append(_output(page, output, f"{name}/{number}_{part}", f"cell {number}"))
        elif not source.strip():
            page.defects.append(f"cell {number} is empty")
    page.markdown = "\n\n".join(part for part in parts if part)
    told = re.sub(r"\A.*^## Takeaway$", "# Takeaway", page.markdown, flags=re.DOTALL | re.MULTILINE)
    page.title, page.summary = title_of(page.markdown), first_sentence(told)
    return page


def _merged(outputs: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The outputs, those that follow one another in one stream as one."""
    for (kind, stream), group in itertools.groupby(outputs, key=lambda output: (output["output_type"], output.get("name"))):
        if kind == "stream":
            yield {"output_type": kind, "name": stream, "text": "".join(_joined(output["text"]) for output in group)}
        else:
            yield from group


def _joined(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _output(page: NotebookPage, output: Mapping[str, Any], name: str, where: str) -> str:
    """What a cell printed or drew."""
    kind = output["output_type"]
    if kind == "stream":
        if output["name"] == "stderr":
            page.defects.append(f"{where} writes to stderr: {_joined(output['text'])[:300]}")
        return as_text(_joined(output["text"]))
    if kind == "error":
        page.defects.append(f"{where} raised {output['ename']}: {output['evalue'][:300]}")
        return as_text("\n".join(output["traceback"]))
    data = output["data"]
    if "image/svg+xml" in data:
        page.pictures[f"{name}.svg"] = _joined(data["image/svg+xml"]).encode()
        return figure(f"{name}.svg", page.pictures[f"{name}.svg"])
    if "image/png" in data:
        page.pictures[f"{name}.png"] = base64.b64decode(_joined(data["image/png"]))
        return figure(f"{name}.png", page.pictures[f"{name}.png"])
    if "text/html" in data:
        return f'<div class="output-html">{page.marked(_joined(data["text/html"]))}</div>'
    if "text/markdown" in data:
        return for_pages(_joined(data["text/markdown"]))
    text = _joined(data.get("text/plain", ""))
    if re.match(r"<[\w.]*(?:Figure|Axes|object at)", text):
        page.defects.append(f"{where} shows {text[:80]}")
    return as_text(text)


def figure(link: str, picture: bytes) -> str:
    """A figure that code draws, as large as it says: 96 pixels of a page for an inch."""
    at, size = picture.find(b"pHYs"), ""
    if picture.startswith(b"\x89PNG") and at > 0:
        scale = 96 / (0.0254 * int.from_bytes(picture[at + 4 : at + 8]))  # the file has the pixels of a metre
        wide, high = (int.from_bytes(picture[k : k + 4]) * scale for k in (16, 20))
        size = f' width="{wide:.0f}" height="{high:.0f}"'
    return f"![The figure that this code draws]({link}){{ .figure{size} loading=lazy }}"


def opened_by_clicks(html: str) -> str:
    """A page whose figures, drawn for a wide page, are links to themselves: there they can be as large as the reader likes."""
    figures = r'(<a [^>]*>\s*)?(<img [^>]*?src="([^"]*)"[^>]*>)'
    return re.sub(figures, lambda found: found[0] if found[1] else f'<a class="open" href="{found[3]}">{found[2]}</a>', html)


def as_text(text: str) -> str:
    """What code printed, as a block."""
    fence = "`" * 5
    return f"{fence} {{ .text .output .no-copy }}\n{_ANSI.sub('', text).rstrip()}\n{fence}" if text.strip() else ""


def is_text(path: pathlib.Path) -> bool:
    """Whether a file can be shown as a page."""
    return path.suffix in (".py", ".toml", ".txt", ".typed", ".csv")
