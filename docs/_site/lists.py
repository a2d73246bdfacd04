"""The lists of recipes, chapters and experiments, and parts of the README, as they stand in the sources of other pages.

The sources are complete to read, so each list stands there, between two marks. ``python docs/_site/lists.py`` writes all of them
again after a recipe, a chapter, an experiment or the README has changed; ``tests/docs/test_lists.py`` finds what was forgotten.
"""

import pathlib
import re
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from pages import first_block, notebook_page, title_of

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = {"course": "experiments/notebooks", "how-to": "docs/how-to"}
"""The folders of the site that hold notebooks, and where their sources are."""
REGION = re.compile(r"<!-- (\w+): written by docs/_site/lists\.py -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
"""A list in a page, with its name."""
_CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)


def numbered(name: str, title: str) -> str:
    """The title of a chapter with its number, if it has none of its own; ``name`` is that of its file."""
    number = re.match(r"(\d+)_", name)
    return title if number is None or title[:1].isdigit() else f"{int(number[1])}. {title}"


def notebook_of(text: str) -> dict[str, object]:
    r"""The cells of a notebook that has not run, from its source in the percent format.

    Example:
        >>> notebook_of("# ---\n\n# %% [markdown]\n# # A title\n#\n# Text.\n\n# %%\nx = 1\n")["cells"][0]["source"]
        '# A title\n\nText.'
    """
    _, *parts = _CELL.split(text)
    cells = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        is_text = "[markdown]" in head
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_text else body
        cells.append({"cell_type": "markdown" if is_text else "code", "source": source.strip(), "outputs": []})
    return {"cells": cells}


def _notebooks(folder: str, to: str) -> Iterator[tuple[str, str]]:
    for source in sorted((ROOT / NOTEBOOKS[folder]).glob("*.py")):
        page = notebook_page(notebook_of(source.read_text()), source.stem)
        title = numbered(source.stem, page.title)
        yield title, f"- [{title}]({to}{source.name}): {page.summary}"


def _experiments() -> Iterator[str]:
    for readme in sorted(ROOT.glob("experiments/*/README.md")):
        if readme.parent.name != "notebooks":
            yield f"- [{readme.parent.name}](../../experiments/{readme.parent.name}/README.md): {title_of(readme.read_text())}"


def lists() -> dict[str, str]:
    """What stands between the marks, by name."""
    readme = (ROOT / "README.md").read_text()
    return {
        "chapters": "\n".join(line for _, line in _notebooks("course", "../../experiments/notebooks/")),
        "recipes": "\n".join(line for _, line in sorted(_notebooks("how-to", ""))),
        "experiments": "\n".join(_experiments()),
        "schedules": readme.split("<!-- schedules -->")[1].strip(),
        "snippet": first_block(readme, "python"),
        "table": first_block(readme, "").replace("```\n", "```text\n", 1),
    }


def written(text: str, found: dict[str, str]) -> str:
    """A page with its lists as they are now."""
    return REGION.sub(
        lambda match: f"<!-- {match[1]}: written by docs/_site/lists.py -->\n\n{found[match[1]]}\n\n<!-- end -->", text
    )


if __name__ == "__main__":
    for file in sorted((ROOT / "docs").rglob("*.md")):
        before = file.read_text()
        if (after := written(before, lists()) if REGION.search(before) else before) != before:
            file.write_text(after)
            print(f"docs: {file.relative_to(ROOT)} is up to date again")
