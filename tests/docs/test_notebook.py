"""What a notebook shows, asked of a real kernel: figures once and sharp, bars for people only, tables as HTML, no warnings."""

import base64
import gc
import io
import queue
import warnings

import pytest
from jupyter_client.manager import start_new_kernel
from PIL import Image

pytestmark = pytest.mark.long

BAR = """
from jaxpp.runtime.progress import progress
with progress(range(3), desc="a<b", mininterval=0) as bar:
    for k in bar:
        {inside}
print("done")
"""


class Notebook:
    """A kernel, and what it sends to the page for a cell."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code, person=True):
        """The type and content of every message that changes the output of the cell; ``person``: whether input can be asked for."""
        request, found = self.client.execute(code, allow_stdin=person), []
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") == request:
                kind, content = message["msg_type"], message["content"]
                if kind == "status" and content["execution_state"] == "idle":
                    return found
                if kind not in ("status", "execute_input"):
                    found.append((kind, content))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        del self.client, self.manager
        with warnings.catch_warnings():  # of sockets and loops that the client leaves open
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="module")
def notebook():
    made = Notebook()
    try:
        assert made.run("from jaxpp.schedule import make, simulate\ns = make('1f1b', num_ranks=4, num_microbatches=8)") == []
        yield made
    finally:
        made.close()


def picture(messages):
    """The one picture that was shown, and the size that it is shown with."""
    ((_, content),) = messages
    size = content["metadata"]["image/png"]
    return Image.open(io.BytesIO(base64.b64decode(content["data"]["image/png"]))), size["width"], size["height"]


@pytest.mark.parametrize("before", ["", "import matplotlib.pyplot as plt\nplt.plot([1]); plt.close('all')", "%matplotlib inline"])
def test_a_figure_as_the_last_line_of_a_cell_is_shown_once_and_sharp(notebook, before):
    notebook.run(before)
    for line in ("s.figure()", "s.pebble_figure()", "simulate(s, transfer=0.5).figure()", "for _ in range(25): f = s.figure()\nf"):
        found = notebook.run(line)
        image, width, height = picture(found)
        assert width <= 900 and image.width == 2 * width and abs(image.height - 2 * height) <= 1, line


def test_a_figure_is_shown_once_by_display_and_not_at_all_if_a_cell_does_not_ask(notebook):
    picture(notebook.run("import matplotlib.pyplot\ndisplay(s.figure())"))
    assert notebook.run("f = s.figure()\nNone") == []


def test_a_schedule_and_a_simulation_show_themselves_as_html(notebook):
    ((_, schedule),) = notebook.run("s")
    ((_, simulation),) = notebook.run("simulate(s)")
    assert "<svg" in schedule["data"]["text/html"] and "<table" not in schedule["data"]["text/html"]
    assert "<svg" in simulation["data"]["text/html"]
    assert simulation["data"]["text/html"].count("<tr>") == 1 + 4


@pytest.mark.parametrize("inside", ["pass", "1 / (1 - k)"], ids=["done", "raises"])
def test_a_person_sees_a_bar_that_leaves_nothing_behind(notebook, inside):
    found = notebook.run(BAR.format(inside=inside))
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "display_data" and kinds[-1] == ("stream" if inside == "pass" else "error")
    shown = [content for kind, content in found if kind.endswith("display_data")]
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    assert "a&lt;b" in shown[0]["data"]["text/html"] and "<progress" in shown[0]["data"]["text/html"]
    assert shown[-1]["data"] == {}
    assert "stderr" not in [content.get("name") for _, content in found]


def test_bars_of_unknown_length_and_of_nested_loops_are_bars_too(notebook):
    code = """
from jaxpp.runtime.progress import progress
with progress(iter("ab"), desc="outer", mininterval=0) as outer:
    for _ in outer:
        with progress(range(2), desc="inner", mininterval=0) as inner:
            list(inner)
"""
    last = {content["transient"]["display_id"]: content["data"] for _, content in notebook.run(code)}
    assert list(last.values()) == [{}, {}, {}]


def test_a_program_that_runs_a_notebook_gets_no_bar(notebook):
    assert notebook.run(BAR.format(inside="pass"), person=False) == [("stream", {"name": "stdout", "text": "done\n"})]


def test_work_that_is_done_soon_shows_no_bar(notebook):
    code = "from jaxpp.runtime.progress import progress\nwith progress(range(3), after=60) as bar: list(bar)\nNone"
    assert notebook.run(code) == []
    with pytest.raises(queue.Empty):
        notebook.client.get_iopub_msg(timeout=0.2)
