"""Tables fit: as text they fold to the terminal and lose no cell, as HTML they scroll and names stay plain text."""

import html
import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedule import make, simulate
from jaxpp.tables import fold_lines, html_remarks, html_table, table_lines, whole_rows

CELLS = st.text("abc<>&", min_size=1, max_size=9)
TABLES = st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=5))


@given(TABLES, st.integers(20, 60), st.integers(0, 2), st.booleans())
def test_a_folded_table_fits_has_every_cell_and_each_part_says_what_the_rows_are(rows, width, keep, left):
    keep = min(keep, len(rows[0]) - 1)
    lines = table_lines(rows, keep=keep, left=left, width=width)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts = [part.split("\n") for part in "\n".join(lines).split("\n\n")]
    assert all(len(part) == len(rows) for part in parts)
    for number, row in enumerate(rows):
        named = [part[number].split() for part in parts]
        assert all(cells[:keep] == row[:keep] for cells in named)
        assert [cell for cells in named for cell in cells[keep:]] == row[keep:]
    least = sum(widths[:keep]) + 2 * keep + max(widths[keep:])
    assert max(map(len, lines)) <= max(width, least)


@given(TABLES, st.integers(20, 60))
def test_rows_that_stay_whole_have_every_cell_in_their_own_lines_and_names_beside_those_below(rows, width):
    rows = [[f"#{k}", *(cell.replace("&", "").strip() or "x" for cell in row)] for k, row in enumerate(rows)]
    lines = whole_rows(rows, width=width)
    parts = " ".join(lines).split("#")[1:]
    assert len(parts) == len(rows)
    beside = len(lines[0].split())
    for part, row in zip(parts[1:], rows[1:], strict=True):
        named = [word for pair in zip(rows[0][beside:], row[beside:], strict=True) for word in pair]
        assert part.replace(";", " ").split() == [row[0][1:], *row[1:beside], *named]


def test_a_table_that_fits_is_one_table(monkeypatch):
    rows = [["stage", "params"], ["0", "1,024"]]
    assert table_lines(rows) == ["stage  params", "    0   1,024"]
    assert table_lines(rows, left=True) == ["stage  params", "0      1,024"]
    monkeypatch.setenv("COLUMNS", "12")
    assert table_lines(rows) == ["stage  params", "    0   1,024"], "two columns are the least, as the first says what the row is"


def test_sentences_fold_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert fold_lines(["it fits: cpu:0 needs 1 MiB", "short"]) == ["it fits: cpu:0 needs", "  1 MiB", "short"]
    assert fold_lines(["a  b"]) == ["a  b"]


@pytest.mark.parametrize("left", [True, False])
@given(rows=TABLES)
def test_html_has_every_cell_as_plain_text_in_a_box_that_scrolls(left, rows):
    page = html_table(rows, left=left)
    assert page.startswith('<div style="overflow-x:auto"><table>')
    assert [html.unescape(cell) for cell in re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", page)] == [c for row in rows for c in row]
    assert page.count("<tr>") == len(rows) and page.count("<th ") == len(rows[0])


def test_remarks_are_plain_text():
    assert html_remarks(["a < b", "c & d"]) == "<p>a &lt; b<br>c &amp; d</p>"
    assert html_remarks([]) == ""


def test_under_an_ascii_locale_tables_and_timelines_can_be_printed(monkeypatch):
    timeline = simulate(make("1f1b", 2, 4))
    assert "·" in timeline.overview()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    for text in (
        timeline.overview(),
        str(timeline),
        *table_lines([["größe", "3 µs ±2%"]]),
        *fold_lines(["größe, ± the middle half"]),
    ):
        text.encode("ascii")
    assert table_lines([["größe", "3 µs ±2%"]]) == ["gr\\xf6\\xdfe  3 us +-2%"]
