"""Tables and remarks as text that fits the terminal, and as HTML for notebooks and pages; numbers as people say them."""

import html
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

_GAP = 2  # spaces between columns


_PLAIN = str.maketrans({"·": ".", "µ": "u", "±": "+-"})


def printable(text: str) -> str:
    """The text in letters that standard output can print, where its encoding (of an ASCII locale, say) has few.

    Example:
        >>> printable("F··B, 3 µs ±2%").translate(_PLAIN)
        'F..B, 3 us +-2%'
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


def terminal_columns() -> int:
    """How many characters fit into a line: of the terminal, or 120 where there is none, as in a file or a notebook."""
    return shutil.get_terminal_size((120, 24)).columns


def table_lines(rows: Sequence[Sequence[str]], *, keep: int = 1, left: bool = False, width: int | None = None) -> list[str]:
    r"""The lines of a table, every column as wide as its widest cell.

    A table that is wider than ``width``, or than the terminal, is folded into several tables, an empty line between them. Each
    begins with the columns that say what the rows are, so many as ``keep``. Cells are flush right unless asked for.

    Example:
        >>> rows = [["stage", "params", "bytes"], ["0", "33,024", "129 KiB"]]
        >>> print("\n".join(table_lines(rows)))
        stage  params    bytes
            0  33,024  129 KiB
        >>> print("\n".join(table_lines(rows, width=16)))
        stage  params
            0  33,024
        <BLANKLINE>
        stage    bytes
            0  129 KiB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for block in _blocks(widths, keep, width or terminal_columns()):
        lines += [""] * bool(lines)
        for row in rows:
            cells = (row[k].ljust(widths[k]) if left else row[k].rjust(widths[k]) for k in block)
            lines.append(printable((" " * _GAP).join(cells).rstrip()))
    return lines


def whole_rows(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    r"""The lines of a table whose rows stay whole: what has no room beside the first columns stands below them, with its names.

    Cells are flush left.

    Example:
        >>> rows = [["stage", "params", "sends"], ["0", "33,024", "f32[4,128] to 1"]]
        >>> print("\n".join(whole_rows(rows)))
        stage  params  sends
        0      33,024  f32[4,128] to 1
        >>> print("\n".join(whole_rows(rows, width=28)))
        stage  params
        0      33,024
               sends f32[4,128] to 1
    """
    room = width or terminal_columns()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    beside = len(next(_blocks(widths, 1, room)))
    head, *body = table_lines([row[:beside] for row in rows], left=True, width=room)
    indent, found = " " * (widths[0] + _GAP), [head]
    for line, row in zip(body, rows[1:], strict=True):
        rest = "; ".join(f"{name} {cell}" for name, cell in zip(rows[0][beside:], row[beside:], strict=True))
        found += [line, *_wrapped(printable(rest), room, indent, indent)]
    return found


def _blocks(widths: Sequence[int], keep: int, room: int) -> Iterator[list[int]]:
    """The numbers of the columns that stand beside one another: the first ones, and as many others as there is room for."""
    first = list(range(keep))
    block = first
    for column in range(keep, len(widths)):
        if len(block) > keep and sum(widths[k] + _GAP for k in [*block, column]) - _GAP > room:
            yield block
            block = first
        block = [*block, column]
    yield block


def fold_lines(lines: Iterable[str], width: int | None = None) -> list[str]:
    """Sentences in lines that fit, the terminal unless ``width`` is given; what continues a line is indented."""
    room = width or terminal_columns()
    found = []
    for line in map(printable, lines):
        found += [line] if len(line) <= room else _wrapped(line, room, "", "  ")
    return found


def _wrapped(text: str, room: int, first: str, others: str) -> list[str]:
    """A sentence in lines, folded between words, and what the first and the other lines begin with."""
    return textwrap.wrap(text, room, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)


def html_table(rows: Sequence[Sequence[str]], *, left: bool = False) -> str:
    """A table of plain text in a box that scrolls; the first row is the head. Cells are flush right unless asked for."""
    align = "left" if left else "right"
    style = f'style="text-align:{align};white-space:nowrap;padding:.15em .7em"'  # on each cell: notebooks have styles for cells
    tags = ["th"] + ["td"] * (len(rows) - 1)
    lines = ["".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return f'<div style="overflow-x:auto"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def html_remarks(lines: Iterable[str]) -> str:
    """Remarks in plain text, a line each."""
    found = "<br>".join(map(html.escape, lines))
    return f"<p>{found}</p>" if found else ""


_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_in_words(num_bytes: float) -> str:
    """As people say it, with four digits: ``12.35 MiB``."""
    return in_units(num_bytes, 1024, _BYTES)


def in_bytes(num_bytes: int) -> str:
    """The same in a cell of a table, where nothing is ``0``."""
    return bytes_in_words(num_bytes) if num_bytes else "0"


def unit_of_bytes(most: int) -> tuple[str, int]:
    """The unit in which sizes are written of which this is the largest, and its bytes: ``("MiB", 1048576)``."""
    unit = bytes_in_words(most).rpartition(" ")[2]
    return unit, 1024 ** _BYTES.index(unit)


def flops_in_words(flops: float) -> str:
    """As people say it, with four digits: ``12.35 GFLOP``."""
    return in_units(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def time_in_words(seconds: float) -> str:
    """A time as people say it, with three digits: ``12.3 ms``."""
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1e3 * seconds)} ms"


def three_digits(value: float) -> str:
    """A number with three digits, and from 100 on with all before the point: ``12.3``, ``1,234``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_units(value: float, base: int, names: Sequence[str]) -> str:
    """A number in the first of some units, each ``base`` times the one before, in which it is small; with four digits."""
    for name in names[:-1]:
        if value < base:
            return f"{value:.4g} {name}".rstrip()
        value /= base
    return f"{value:.4g} {names[-1]}"
