"""The course and the recipes as texts: short cells, words defined at first use, folded answers. ``.ci/docs`` runs them."""

import ast
import itertools
import pathlib
import re
import sys

import jupytext
import pytest

ROOT = pathlib.Path(__file__).parents[2]
COURSE = sorted((ROOT / "experiments" / "notebooks").glob("[0-9]*.py"))
RECIPES = sorted((ROOT / "docs" / "how-to").glob("*.py"))
LIBRARIES = {"jax", "flax", "optax", "orbax", "numpy", "matplotlib", "sklearn", "jaxpp"}
MOST_LINES = 15
"""Of code in a cell, not counting blank lines."""

WORDS = {
    1: ["pipeline parallelism", "optimizer state", "forward pass", "backward pass", "activation", "residual", "pullback", "remat"],
    2: ["cotangent", "stage"],
    3: ["action", "microbatch", "rank", "schedule", "naive", "makespan", "bubble", "pebble graph"],
    4: ["gradient accumulation", "asynchronous dispatch"],
    5: ["1F1B", "warm-up", "steady state", "cool-down", "in flight"],
    6: ["interleaving", "zero-bubble", "deadlock"],
    7: ["tied embedding"],
    8: [r"theta\[t\]", "replica", "prefetch"],
    9: ["mesh", "collective", "all-reduce"],
    11: ["checkpoint", "abstract state"],
    12: ["cache", "greedy", "prefill", "ring", "temperature"],
    13: ["cost model"],
}
"""The words of the field, by the chapter that defines them."""


def cells(file, kind):
    """The sources of a notebook's cells of one kind."""
    return [cell.source for cell in jupytext.reads(file.read_text(), fmt="py:percent").cells if cell.cell_type == kind]


def prose(file):
    """What a reader reads as sentences: without headings, code, and the targets of links."""
    text = "\n\n".join(cells(file, "markdown"))
    text = re.sub(r"^#.*$|^Next: .*$|`[^`]*`", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def title(file):
    return re.match(r"# (.*)", cells(file, "markdown")[0]).group(1)


def modules(code):
    """The modules that code imports, by the first part of their names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or ".").split(".")[0]


def each(files):
    return pytest.mark.parametrize("file", files, ids=lambda file: file.stem)


def test_there_is_a_course():
    assert len(COURSE) >= 6
    assert [file.name[:2] for file in COURSE] == [f"{k:02}" for k in range(1, len(COURSE) + 1)]


@each(COURSE + RECIPES)
def test_no_cell_is_empty_or_has_more_than_fifteen_lines_of_code(file):
    for source in cells(file, "code"):
        lines = [line for line in source.splitlines() if line.strip()]
        assert 1 <= len(lines) <= MOST_LINES, f"{len(lines)} lines:\n{source}"
    assert all(source.strip() for source in cells(file, "markdown"))


@each(COURSE + RECIPES)
def test_there_is_one_title_and_it_comes_first(file):
    titles = re.findall(r"^# .*", "\n".join(cells(file, "markdown")), re.MULTILINE)
    assert titles == [f"# {title(file)}"]
    if file in COURSE:
        assert title(file).startswith(f"{int(file.name[:2])}. ")


@each(COURSE + RECIPES)
def test_the_first_code_is_the_imports_and_the_devices_of_a_laptop(file):
    first, *others = cells(file, "code")
    if {"jax", "jaxpp"} & set(modules(first)):
        assert re.search(r'^jax\.config\.update\("jax_num_cpu_devices", \d\)', first, re.MULTILINE)
    assert not [name for source in others for name in modules(source)]


@each(COURSE + RECIPES)
def test_nothing_is_imported_that_hides_code(file):
    allowed = LIBRARIES | sys.stdlib_module_names
    foreign = set(modules("\n".join(cells(file, "code")))) - allowed
    if file in RECIPES:
        listed = (file.parent / "requirements.txt").read_text().lower() if foreign else ""
        foreign = {name for name in foreign if name.lower() not in listed}
    assert not foreign


@each(COURSE + RECIPES)
def test_code_can_be_pasted(file):
    for source in cells(file, "code"):
        ast.parse(source)  # no magic, no shell
    for source in cells(file, "markdown"):
        assert ">>>" not in source


@each(COURSE + RECIPES)
def test_something_is_checked(file):
    code = "\n".join(cells(file, "code"))
    names = {getattr(node.func, "attr", "") for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    asserted = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
    assert asserted or names & {"verify", "assert_allclose", "assert_array_equal"}


@each(COURSE + RECIPES)
def test_the_prose_needs_no_formula_renderer_and_does_not_shout(file):
    assert not re.search(r"[$!]", prose(file))


@each(COURSE)
def test_a_chapter_ends_with_a_takeaway_and_three_questions_whose_answers_are_folded(file):
    last = cells(file, "markdown")[-1]
    takeaway, questions = re.search(r"^## Takeaway\n(.*?)^## Questions\n(.*)", last, re.DOTALL | re.MULTILINE).groups()
    assert 2 <= len(re.findall(r"[.](?:\s|$)", takeaway)) <= 5
    answers = re.findall(r"^<details><summary>Answer</summary>\n\n(.+?)\n\n</details>$", questions, re.DOTALL | re.MULTILINE)
    assert len(answers) == questions.count("<details") == 3
    assert re.findall(r"^(?:\*\*)?(\d)\.(?:\*\*)? ", questions, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize(("file", "after"), list(itertools.zip_longest(COURSE, COURSE[1:])), ids=[file.stem for file in COURSE])
def test_a_chapter_leads_to_the_next(file, after):
    links = re.findall(r"^Next: \[(.*)\]\((.*)\)$", cells(file, "markdown")[-1], re.MULTILINE)
    assert links == ([(title(after), f"{after.stem}.ipynb")] if after else [])


@pytest.mark.parametrize(("chapter", "word"), [(k, word) for k, words in WORDS.items() for word in words if k <= len(COURSE)])
def test_a_word_of_the_field_is_in_bold_where_it_first_occurs(chapter, word):
    for file in COURSE:
        text = prose(file)
        use = re.search(rf"\b{word}", text, re.IGNORECASE)
        if use:
            bold = [found.span() for found in re.finditer(r"\*\*[^*]+\*\*", text)]
            around = text[max(0, use.start() - 40) : use.end() + 40]
            assert int(file.name[:2]) == chapter, f"{file.name} uses it before: {around!r}"
            assert any(start < use.start() and use.end() <= end for start, end in bold), around
            return
    pytest.fail("no chapter uses it")
