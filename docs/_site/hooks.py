"""The pages that are made while the site is built: notebooks, recipes, READMEs, sources; and the table of contents.

What is not there (a chapter, an executed notebook) is not listed, and code of pages that has not run is shown without its output.
"""

import base64
import itertools
import json
import pathlib
import posixpath
import re
import sys
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from blocks import kept, with_outputs
from lists import NOTEBOOKS, REGION, ROOT, numbered
from pages import NotebookPage, is_text, linked, notebook_page, opened_by_clicks, source_page

EXECUTED = ROOT / "build" / "notebooks"
RAN = ROOT / "build" / "blocks"
DOCUMENTS = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md"}
"""Documents of the project and the pages that show them."""
REFERENCE = {
    "Training": ["training", "Pipeline", "State", "Metrics", "Tuning", "Planning", "GPU", "Bank", "Microbatches", "Offload"],
    "Predicting": ["predicting", "Forward", "Stream", "Generation", "Token", "Sampling", "History"],
    "Schedules": ["schedules", "Schedule", "Simulation", "Action", "Kind"],
    "Observing": [
        "observing",
        "Profile",
        "Forecast",
        "Frontier",
        "StepBound",
        "Prediction",
        "Ledger",
        "Collectives",
        "ProgramTable",
        "ProgramRow",
    ],
}
"""The subjects of the reference: the page of its functions, and the classes, which have pages of their own."""
OUTPUT = "``` { .text .output .no-copy }"
"""How a block of printed output begins."""
PICTURES = (".png", ".gif", ".svg")
log = get_plugin_logger("jaxpp")


class Site:
    """What is generated for one build."""

    def __init__(self, config: MkDocsConfig):
        self.config = config
        self.files: dict[str, File] = {}
        self.notebooks: dict[str, NotebookPage] = {}
        self.ran = kept(RAN)
        self.experiments = {readme.parent.name: readme for readme in sorted(ROOT.glob("experiments/*/README.md"))}
        self.experiments.pop("notebooks", None)
        self.documents = DOCUMENTS | {f"experiments/{name}/README.md": f"experiments/{name}.md" for name in self.experiments}

    def add(self, uri: str, content: str | bytes) -> None:
        """A page or a picture."""
        self.files[uri] = File.generated(self.config, uri, content=content)

    def page_of(self, path: str) -> str | None:
        """The page that shows a file or a folder of the project; sources get their pages when they are first asked for."""
        if path in self.documents:
            return self.documents[path]
        if f"{path}/README.md" in self.documents:
            return self.documents[f"{path}/README.md"]
        file = ROOT / path
        for folder, sources in NOTEBOOKS.items():
            if file.suffix in (".py", ".ipynb") and path.startswith(sources) and (ROOT / sources / f"{file.stem}.py").exists():
                return f"{folder}/{file.stem}.md"
        if path.startswith("docs/"):
            return path.removeprefix("docs/") if file.exists() else None
        if file.suffix in PICTURES and file.exists():
            self.add(path, file.read_bytes())
            return path
        uri = f"source/{path}.md"
        if uri not in self.files and file.is_file() and is_text(file):
            self.add(uri, source_page(path, file.read_text()))
        elif uri not in self.files and file.is_dir():
            self.add(uri, "")  # so that a folder that names itself ends
            self.add(uri, self.folder(path, uri))
        return uri if uri in self.files else None

    def folder(self, path: str, uri: str) -> str:
        """A page that lists a folder."""
        names = sorted(file.name for file in (ROOT / path).glob("*.py") if file.name != "__init__.py")
        listed = "\n".join(f"- `{name}`" for name in names)
        return linked(f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{listed}\n", path, uri, self.page_of)

    def add_documents(self) -> None:
        """ARCHITECTURE, CHANGELOG and the READMEs of the experiments."""
        for path, uri in self.documents.items():
            if path != "README.md":
                folder = str(pathlib.PurePosixPath(path).parent)
                self.add(uri, linked((ROOT / path).read_text(), folder, uri, self.page_of))

    def add_notebooks(self, folder: str) -> None:
        """The executed notebooks of a folder, as pages and for download."""
        for file in sorted((EXECUTED / folder).glob("*.ipynb")):
            uri = f"{folder}/{file.stem}.md"
            page = notebook_page(json.loads(file.read_text()), file.stem)
            for defect in page.defects:
                log.warning("%s: %s", file.name, defect)
            self.notebooks[uri] = page
            text = linked(page.markdown, NOTEBOOKS[folder], uri, self.page_of)
            under = f"[Download this notebook]({file.name}){{ .download }} · [Glossary](../glossary.md)"
            text = re.sub(r"^# .+$", lambda match, under=under: f"{match[0]}\n\n{under}", text, count=1, flags=re.MULTILINE)
            self.add(uri, f"---\ntags: {json.dumps(page.tags)}\n---\n{text}" if page.tags else text)
            self.add(f"{folder}/{file.name}", file.read_bytes())
            for name, picture in page.pictures.items():
                self.add(f"{folder}/{name}", picture)

    def add_figures(self) -> None:
        """The figures that the code of the pages drew."""
        for uri, blocks in self.ran.items():
            for name, data in itertools.chain.from_iterable(block["figures"].items() for block in blocks):
                self.add(f"{uri.removesuffix('.md')}/{name}", base64.b64decode(data))

    def outputs(self, markdown: str, uri: str) -> str:
        """A page with what its code printed and drew."""
        try:
            return with_outputs(markdown, self.ran[uri], uri)
        except ValueError as error:
            log.warning("%s: %s: run .ci/docs blocks", uri, error)
        return markdown

    def listed(self, folder: str) -> Iterator[tuple[str, NotebookPage]]:
        """The notebooks of a folder in order."""
        return ((uri, page) for uri, page in self.notebooks.items() if uri.startswith(f"{folder}/"))

    def nav(self) -> list[Any]:
        """The table of contents."""
        chapters = [{numbered(pathlib.PurePosixPath(uri).name, page.title): uri} for uri, page in self.listed("course")]
        recipes = [{page.title: uri} for uri, page in sorted(self.listed("how-to"), key=lambda item: item[1].title)]
        experiments = [{name: f"experiments/{name}.md"} for name in self.experiments]
        guides = "gpus train predict save memory speed plan targets tune profile schedules mesh hosts tasks".split()
        return [
            {"Home": "index.md"},
            {"First hour": "start.md"},
            {"Guide": [f"guide/{name}.md" for name in guides]},
            {"Course": ["course/index.md", *chapters]},
            {"How to": ["how-to/index.md", *recipes]},
            {"Reference": ["reference/index.md", *reference(), "reference/errors.md", "glossary.md"]},
            {
                "Background": [
                    "alternatives.md",
                    "coming-from.md",
                    "limits.md",
                    "together.md",
                    "corrections.md",
                    "architecture.md",
                    {"Experiments": ["experiments/index.md", *experiments]},
                    "changelog.md",
                ]
            },
        ]


def reference() -> list[Any]:
    """The pages of the reference by subject: its functions, then a page for each class."""
    return [
        {subject: [f"reference/{functions}.md", *({name: f"reference/{name.lower()}.md"} for name in classes)]}
        for subject, (functions, *classes) in REFERENCE.items()
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is generated, and writes the table of contents."""
    config.extra["generated"] = site = Site(config)  # for the events below
    site.add_documents()
    site.add_notebooks("course")
    site.add_notebooks("how-to")
    site.add_figures()
    for file in site.files.values():
        files.append(file)
    config.nav = site.nav()
    return files


def built(region: re.Match[str], page: str, found: Site) -> str:
    """A list that stands in the source of a page, without the notebooks that have not been executed."""
    folder = pathlib.PurePosixPath(page).parent

    def is_there(line: str) -> bool:
        target = re.match(r"- \[.*?\]\(([^)]+)\): ", line)
        uri = posixpath.normpath(folder / target[1]) if target else ""
        return uri.split("/")[0] not in NOTEBOOKS or uri in found.notebooks

    return "\n".join(filter(is_there, region[2].split("\n")))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Puts in what code printed, leads links to the pages of files, and marks printed output."""
    site, uri = config.extra["generated"], page.file.src_uri
    if uri in site.ran:
        markdown = site.outputs(markdown, uri)
    if uri not in site.files:
        markdown = linked(markdown, f"docs/{pathlib.PurePosixPath(uri).parent}", uri, site.page_of, quotes=False)
        markdown = REGION.sub(lambda match: built(match, uri, site), markdown)
    return re.sub(r"^```text$", OUTPUT, markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Puts the HTML of outputs into the page of a notebook, lets figures open; refuses prompts, which cannot be copied."""
    if "&gt;&gt;&gt; " in re.sub(r"<[^>]*>", "", html) and not page.file.src_uri.startswith("source/"):
        log.warning("%s has prompts (>>>): its code cannot be copied", page.file.src_uri)
    notebook = config.extra["generated"].notebooks.get(page.file.src_uri)
    if notebook is not None:
        html = re.sub(r"html\d+mark", lambda match: notebook.outputs[match[0]], html)
    return opened_by_clicks(html)
