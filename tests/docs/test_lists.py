"""The lists that stand in the sources of pages are those that ``python docs/_site/lists.py`` writes."""

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_site"))  # what makes the pages is no package
lists = importlib.import_module("lists")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if lists.REGION.search(page.read_text())]


def test_every_list_stands_in_a_page():
    named = [match[1] for page in PAGES for match in lists.REGION.finditer(page.read_text())]
    assert sorted(named) == sorted(lists.lists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_lists_of_a_page_are_up_to_date(page):
    assert page.read_text() == lists.written(page.read_text(), lists.lists()), "run python docs/_site/lists.py"
