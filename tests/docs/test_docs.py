"""The pages tell the truth: their code runs as a reader would paste it and prints what stands below. ``.ci/lint`` checks links.

A block fenced as ``python`` (or ``python title="jaxpp"``) is ours and runs, and the page shows what it printed and drew. A block
with the title ``train.py, ...`` is a part of a script for several hosts; the parts of a page run in two processes. Code of other
libraries is fenced as ``{ .python title="..." }``, with the version for which it was written, and does not run. Notebooks and
recipes are run by ``.ci/docs``, which also runs the tests marked ``pages`` and builds the pages strictly.
"""

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import jax
import pytest

import jaxpp

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_site"))  # what makes the pages is no package
blocks, pages = importlib.import_module("blocks"), importlib.import_module("pages")
PAGES = sorted(DOCS.rglob("*.md"))
SCRIPT = r'^``` \{ \.python title="train\.py, on (every host|a laptop)" \}\n(.*?)^```$'
"""A part of a script for several hosts, or what stands in the place of ``jax.distributed.initialize()`` on a laptop."""
EXTRA = 'title="with the extra targets"'
"""Blocks that compile for GPUs, which tests/targets run."""


def name_of(page):
    return str(page.relative_to(DOCS))


def with_code():
    return [page for page in PAGES if blocks.blocks_of(page.read_text())]


@pytest.mark.pages
@pytest.mark.parametrize("page", with_code(), ids=name_of)
def test_the_blocks_of_a_page_pasted_in_order_run_and_print_what_stands_below_them(page, tmp_path):
    cached = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    cached["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir  # as in conftest.py
    ran = blocks.run(page.read_text(), tmp_path, ROOT / "jaxpp", cached)
    for (code, expected), block in zip(blocks.blocks_of(page.read_text()), ran, strict=True):
        assert not expected or block["printed"] == expected.rstrip(), code
    blocks.keep(ran, name_of(page), ROOT / "build" / "blocks")  # for the pages


OTHERS = "PyTorch", "DeepSpeed", "Megatron Core", "praxis", "JaxPP"
"""Libraries whose code stands on our pages, each time with its version."""


@pytest.mark.pages
def test_code_on_a_page_is_run_or_says_whose_it_is():
    scripts = {"train.py, on every host", "train.py, on a laptop", "with the extra targets"}
    wrong = []
    for page in PAGES:
        for fence in re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]:
            title = re.fullmatch(r' \{ \.python title="(.*?)" \}', fence)
            theirs = title and (title[1] in scripts or title[1].startswith(OTHERS))
            if fence not in ("python", 'python title="jaxpp"', "text", "sh") and not theirs:
                wrong.append((name_of(page), fence))
    assert not wrong


@pytest.mark.pages
def test_the_numbers_of_the_page_of_limits_are_those_of_the_experiments():
    rows = re.findall(
        r"^\| .*? \| (.*?) \| \[\w+\]\(\.\./experiments/(\w+)/README\.md\) \|$", (DOCS / "limits.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 6
    for quoted, experiment in rows:
        measured = (ROOT / "experiments" / experiment / "README.md").read_text()
        for number in re.findall(r"\d[\d.]*\d|\d", quoted):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", measured), f"experiments/{experiment} has no {number}"


@pytest.mark.pages
def test_the_script_for_several_hosts_runs_in_two_processes_as_it_would_on_a_laptop(tmp_path):
    parts = re.findall(SCRIPT, (DOCS / "guide" / "hosts.md").read_text(), re.DOTALL | re.MULTILINE)
    (laptop,) = (code for where, code in parts if where == "a laptop")
    script = "\n".join(code for where, code in parts if where == "every host")
    (line,) = re.findall(r"^jax\.distributed\.initialize\(\).*\n", script, re.MULTILINE)
    (port,) = re.findall(r"port = .*?(\d+)  #", laptop)
    (tmp_path / "train.py").write_text(
        script.replace(line, laptop.replace(port, str(free_ports(3)))).replace("/shared", str(tmp_path))
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "8"}
    options = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in "01":
            files = [stack.enter_context((tmp_path / f"{name}{number}").open("w")) for name in ("out", "errors")]
            command = [sys.executable, "-W", "error::UserWarning", "train.py", number]
            processes.append(subprocess.Popen(command, stdout=files[0], stderr=files[1], **options))
            stack.callback(end, processes[-1])
        ended = [process.wait(timeout=120) for process in processes]
    assert ended == [0, 0], "".join((tmp_path / f"errors{number}").read_text()[-3000:] for number in "01")
    printed = [(tmp_path / f"out{number}").read_text() for number in "01"]  # between what gloo prints, at times in one line with it
    assert [re.findall(r"step (\d) loss", text) for text in printed] == [["1", "2", "3"], []]
    held = [re.search(r"process (\d) holds ([\d,]+) of ([\d,]+) bytes; loss ([\d.]+)", text) for text in printed]
    assert [found[1] for found in held] == ["0", "1"]
    assert sum(int(found[2].replace(",", "")) for found in held) == int(held[0][3].replace(",", ""))
    assert held[0][4] == held[1][4] == re.search(r"step 1 loss ([\d.]+)", printed[0])[1]  # the first step of a new state


def end(process):
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_ports(count):
    """The first of so many ports in a row on which nobody listens, below those that systems give to whoever asks for any."""
    for first in range(20000 + os.getpid() % 10000, 32000):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports are free")


def test_every_page_whose_output_is_promised_has_been_found():
    promised = {name_of(page) for page in PAGES if "```text\n" in page.read_text() and EXTRA not in page.read_text()}
    assert promised <= set(map(name_of, with_code()))
    assert {"corrections.md", "start.md", "coming-from.md"} <= set(map(name_of, with_code()))


def public_name(name):
    """A function in a module of its own name is shown by both names: ``jaxpp.schedule.simulate.simulate``."""
    return re.sub(r"(\.\w+)\1$", r"\1", name)


def test_a_block_is_shown_with_what_it_printed_and_drew(tmp_path):
    page = 'Text.\n\n```python\nprint(1 + 1)\n```\n\n```python\nprint("a")\n```\n\n```text\na\n```\n\n```python\n'
    page += 'open("figure.gif", "w").write("hello")\n```\n\nEnd.\n'
    blocks.keep(blocks.run(page, tmp_path, ROOT / "jaxpp", {}), "guide/name.md", tmp_path / "kept")
    ran = blocks.kept(tmp_path / "kept")["guide/name.md"]
    shown = blocks.with_outputs(page, ran, "guide/name.md")
    assert "```python\nprint(1 + 1)\n```\n\n````` { .text .output .no-copy }\n2\n`````\n" in shown
    assert shown.count('print("a")\n```\n\n```text\na\n```\n') == shown.count("\na\n") == 1  # it stands in the page
    assert "```\n\n![The figure that this code draws](name/figure.gif){ .figure loading=lazy }\n\nEnd.\n" in shown
    assert ran[2]["figures"] == {"figure.gif": "aGVsbG8="}


def test_output_is_not_shown_below_other_code_than_what_printed_it(tmp_path):
    ran = blocks.run("```python\nprint(1)\n```\n", tmp_path, ROOT / "jaxpp", {})
    with pytest.raises(ValueError, match="not what ran"):
        blocks.with_outputs("```python\nprint(2)\n```\n", ran, "name.md")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        blocks.run("```python\n1 / 0\n```\n", tmp_path / "other", ROOT / "jaxpp", {})


def test_the_moving_schedule_of_the_front_page_is_what_its_code_draws():
    drawing = importlib.import_module("schedule_picture")
    assert drawing.front_page() == drawing.TARGET.read_text()


def test_a_moving_schedule_has_a_bar_for_each_action_that_grows_while_it_runs():
    run = jaxpp.schedule.simulate(jaxpp.schedule.make("gpipe", num_ranks=2, num_microbatches=2))
    drawn = importlib.import_module("schedule_picture").picture(run)
    assert re.findall(r'animation-name:(b[\d-]+)"', drawn) == [f"b{bar.start:g}-{bar.end:g}" for bar in run.bars]
    # Rank 1 begins its first backward at 3 of 9 units of 0.25 s, and at the end are 2 s of rest.
    assert "@keyframes b3-5{0%,17.65%{transform:scaleX(0)}29.41%,to{transform:none}}" in drawn


def test_every_name_of_ours_that_a_page_links_exists():
    linked = {name: page for page in PAGES for name in re.findall(r"\]\[(jaxpp[\w.]*)\]", page.read_text())}
    for name, page in linked.items():
        value = jaxpp
        for part in public_name(name).split(".")[1:]:
            assert hasattr(value, part) or importlib.util.find_spec(f"{value.__name__}.{part}"), f"{name_of(page)}: {name}"
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(f"{value.__name__}.{part}")


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    shown = set(map(public_name, re.findall(r"^::: (\S+)", text, re.MULTILINE)))
    modules = {name: importlib.import_module(name) for name in ("jaxpp", "jaxpp.schedule", "jaxpp.observe", "jaxpp.errors")}
    public = {f"{name}.{public}" for name, module in modules.items() for public in module.__all__}
    tools = {"jaxpp.errors.is_count", "jaxpp.errors.shown", "jaxpp.errors.warn"}  # what jaxpp writes its own messages with
    twice = {"jaxpp.JaxppError"}  # stands under jaxpp.errors
    numbers = {"jaxpp.targets"}  # of GPUs: the guide says what to ask it
    assert shown == public - set(modules) - tools - twice - numbers


def code_cell(source, *outputs):
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def result(**data):
    shown = {kind.replace("_", "/", 1): value for kind, value in data.items()}
    return {"output_type": "execute_result", "data": shown, "metadata": {}}


def parameters_told(documentation):
    """The parameters in the section ``Args`` of a docstring, in order."""
    section = re.search(r"^Args:\n((?:    .*\n?|\s*\n)+)", inspect.cleandoc(documentation or ""), re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE) if section else []


def test_parameters_are_told_in_the_order_of_the_signature():
    told = {}
    for module in map(importlib.import_module, ("jaxpp", "jaxpp.schedule", "jaxpp.observe")):
        for name, value in ((name, getattr(module, name)) for name in module.__all__):
            members = [getattr(value, name, None) for name in dir(value) if name[0] != "_"] if inspect.isclass(value) else []
            told |= {f: (name, parameters_told(f.__doc__)) for f in (value, *members) if inspect.isclass(f) or inspect.isroutine(f)}
    told = {function: (name, found) for function, (name, found) in told.items() if found}
    assert len(told) > 30
    for function, (name, found) in told.items():
        assert found == [parameter for parameter in inspect.signature(function).parameters if parameter in found], name


def test_the_groups_of_the_parameters_of_a_pipeline_are_in_the_order_of_the_signature_and_name_each_once():
    first, groups = jaxpp.Pipeline.__doc__.split("Args:")[0].split("first six parameters.")
    listed = [name for line in re.findall(r"^    - .*", groups, re.MULTILINE) for name in re.findall(r"``(\w+)``", line)]
    names = list(inspect.signature(jaxpp.Pipeline).parameters)
    assert names[:6] == ["loss_fn", "optimizer", "num_stages", "num_microbatches", "schedule", "has_aux"]
    assert names[6:] == listed and parameters_told(jaxpp.Pipeline.__doc__) == names and first


def test_the_page_of_the_pipeline_has_all_its_members_init_and_step_first():
    members = re.findall(r"^ +- (\w+)$", (DOCS / "reference" / "pipeline.md").read_text(), re.MULTILINE)
    assert members[:2] == ["init", "step"]
    assert sorted(members) == sorted(name for name in dir(jaxpp.Pipeline) if name[0] != "_")


def test_every_public_class_has_a_page_of_the_reference_to_itself():
    for module in map(importlib.import_module, ("jaxpp", "jaxpp.schedule", "jaxpp.observe")):
        for name in (name for name in module.__all__ if inspect.isclass(getattr(module, name))):
            if not issubclass(getattr(module, name), Exception):  # errors and warnings are on one page
                page = DOCS / "reference" / f"{name.lower()}.md"
                assert re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE) == [f"{module.__name__}.{name}"]


def test_a_notebook_becomes_a_page_with_its_code_its_text_and_its_pictures():
    title = {"cell_type": "markdown", "source": ["# A title\n", "\n", "What it does. And more:\n", "- one\n"]}
    cells = [title, code_cell("print(1)", stream("1\n"), stream("2\n")), code_cell("fig", result(image_png="aGVsbG8="))]
    cells.append(code_cell("table", result(text_html="<table></table>", text_plain="a table")))
    page = pages.notebook_page({"cells": cells, "metadata": {"tags": ["a word"]}}, "name")
    assert (page.title, page.summary, page.tags) == ("A title", "What it does.", ["a word"])
    assert page.markdown.startswith("# A title\n\nWhat it does. And more:\n\n- one")
    assert "```python\nprint(1)\n```\n\n````` { .text .output .no-copy }\n1\n2\n`````" in page.markdown
    assert page.pictures == {"name/2_0.png": b"hello"}
    assert "(name/2_0.png)" in page.markdown
    assert [html for mark, html in page.outputs.items() if f'<div class="output-html">{mark}</div>' in page.markdown] == [
        "<table></table>"
    ]
    assert not page.defects


def test_a_figure_is_as_large_on_the_page_as_it_was_drawn():
    out = io.BytesIO()
    jaxpp.schedule.make("gpipe", num_ranks=2, num_microbatches=2).figure(width=6).savefig(out)
    high = re.search(r'\(a\.png\){ \.figure width="576" height="(\d+)" loading=lazy }$', pages.figure("a.png", out.getvalue()))
    assert 100 < int(high[1]) < 300  # two rows, the key and the axis


def test_figures_are_links_to_themselves_but_pictures_in_links_are_not():
    linked = '<a href="page.html"> <img alt="b" src="b.png"></a>'
    found = pages.opened_by_clicks(f'<p><img alt="a" src="a.png" /></p>{linked}')
    assert found == f'<p><a class="open" href="a.png"><img alt="a" src="a.png" /></a></p>{linked}'


def test_the_summary_of_a_chapter_is_its_takeaway():
    text = {"cell_type": "markdown", "source": "# A title\n\nFirst, a story.\n\n## Takeaway\n\nIt is *so*. And so on."}
    assert pages.notebook_page({"cells": [text]}, "name").summary == "It is *so*."


def test_what_a_finished_notebook_does_not_print_is_a_defect():
    cells = [code_cell("f()", stream("UserWarning: no\n", "stderr")), code_cell("fig", result(text_plain="<Figure size 640x480>"))]
    cells.append(code_cell("g()", {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}))
    cells += [code_cell(""), {"cell_type": "markdown", "source": "It is $$\\frac{p}{2}$$."}]
    page = pages.notebook_page({"cells": cells}, "name")
    assert [defect.split(":")[0] for defect in page.defects] == [
        "cell 0 writes to stderr",
        "cell 1 shows <Figure size 640x480>",
        "cell 2 raised ValueError",
        "cell 3 is empty",
        "cell 4 has a formula in dollars, which these pages show as it is written",
    ]


def test_folded_answers_are_markdown_and_fences_stay_as_they_are():
    text = "Why:\n- so\n\n<details>\n<summary>Answer</summary>\n\n**Because**\n\n</details>\n\n```text\na:\n- b\n```"
    changed = pages.for_pages(text)
    assert changed.startswith('Why:\n\n- so\n\n<details markdown="1"><summary>')
    assert changed.endswith("```text\na:\n- b\n```")


def test_links_of_included_documents_lead_to_pages():
    shown = {"jaxpp/lowering/lower.py": "source/lower.py.md", "experiments/lm/main.py": "source/main.py.md"}
    fenced = "\n\n```sh\npython `main.py`\n```\n"
    text = "[a](../../jaxpp/lowering/lower.py), `main.py`, `jaxpp/lowering/lower.py`, [b](https://example.org)" + fenced
    found = pages.linked(text, "experiments/lm", "experiments/lm.md", shown.get)
    links = "[a](../source/lower.py.md), [`main.py`](../source/main.py.md), [`jaxpp/lowering/lower.py`](../source/lower.py.md)"
    assert found == f"{links}, [b](https://example.org){fenced}"
