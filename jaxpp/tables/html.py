"""Tables and remarks as HTML. What is wider than its place scrolls inside a box of its own."""

import html
from collections.abc import Iterable, Sequence

__all__ = ["html_remarks", "html_table", "scrolling"]


def html_table(rows: Sequence[Sequence[str]], *, left: bool = False) -> str:
    """A table in a box that scrolls.

    Args:
        rows: cells, as plain text; the first row is the head.
        left: whether cells are flush left; they are flush right unless asked for.
    """
    align = "left" if left else "right"
    style = f'style="text-align:{align};white-space:nowrap;padding:.15em .7em"'  # on each cell: notebooks have styles for cells
    tags = ["th"] + ["td"] * (len(rows) - 1)
    lines = ["".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return scrolling(f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")


def html_remarks(lines: Iterable[str]) -> str:
    """Remarks in plain text, a line each."""
    found = "<br>".join(map(html.escape, lines))
    return f"<p>{found}</p>" if found else ""


def scrolling(content: str) -> str:
    """HTML in a box that scrolls sideways if the content is wider than the page."""
    return f'<div style="overflow-x:auto">{content}</div>'
