"""What people see while they wait, and what is left on the screen: no bar in a pipe or a log, none in a table, no JSON."""

import functools
import io
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import termios
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from experiments.results import report
from experiments.speed.main import Config, main
from jaxpp.runtime.progress import progress

ROOT = pathlib.Path(jaxpp.__file__).parents[1]
COMMAND = [sys.executable, "-m", "experiments.schedules", "--ranks", "2", "--microbatches", "4", "--no-figures"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def rendered(text):
    """The lines that a terminal shows after it was sent a text."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\r\n\x1b]+", text):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = f"{lines[row][:column].ljust(column)}{part}{lines[row][column + len(part) :]}"
            column += len(part)
    return [line.rstrip() for line in lines]


def drawn(monkeypatch, stream, fail=False):
    monkeypatch.setattr("sys.stderr", stream)
    try:
        with progress(range(3), desc="working", mininterval=0) as bar:
            for k in bar:
                if fail and k == 1:
                    raise KeyError(k)
    except KeyError:
        pass
    stream.write("table")
    return stream.getvalue()


@pytest.mark.parametrize("stream", [types.SimpleNamespace(write=lambda _: None), None], ids=["a logger's", "none"])
def test_a_stream_that_cannot_say_whether_it_is_a_terminal_gets_no_bar(stream, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    with progress(range(3), desc="working") as bar:
        assert list(bar) == [0, 1, 2]


def test_a_terminal_shows_a_bar_and_the_next_line_begins_clean(monkeypatch):
    text = drawn(monkeypatch, Terminal())
    assert "working:  67%" in text
    assert rendered(text) == ["table"]


def test_a_bar_goes_when_the_work_raises(monkeypatch):
    assert rendered(drawn(monkeypatch, Terminal(), fail=True)) == ["table"]


def test_nothing_is_drawn_in_a_pipe_or_a_log(monkeypatch):
    assert drawn(monkeypatch, io.StringIO()) == "table"


def scaled_loss(scale, params, x):
    return scale * jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


def test_compiling_draws_nothing_in_a_log(monkeypatch):
    monkeypatch.setattr("jaxpp.runtime.compile._PATIENCE", 0.0)
    params = {"a": jnp.full((4, 4), 0.1), "b": jnp.ones((4, 2))}
    for scale, stream in ((0.123, io.StringIO()), (0.321, Terminal())):  # losses that nobody has compiled yet
        monkeypatch.setattr("sys.stderr", stream)
        pipe = jaxpp.Pipeline(functools.partial(scaled_loss, scale), optax.sgd(0.1), num_stages=2)
        pipe.init(params, jnp.ones((4, 4)))
        assert bool(stream.getvalue()) == stream.isatty()
        assert rendered(stream.getvalue()) == [""]


@pytest.mark.parametrize("terminal", [pytest.param(False, marks=pytest.mark.long), True], ids=["a pipe", "a terminal"])
def test_an_experiment_prints_its_table_and_nothing_else(terminal, tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    command, environment = [*COMMAND, "--json", str(path)], os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    if terminal:
        leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (40, 200))
        with subprocess.Popen(command, stdout=follower, stderr=follower, cwd=tmp_path, env=environment) as process:
            os.close(follower)
            chunks = []
            while chunk := _read(leader):
                chunks.append(chunk)
        assert process.returncode == 0
        text = b"".join(chunks).decode()
        assert "schedules:" in text  # the bar
        lines = rendered(text)
    else:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
        assert done.stderr == ""
        assert "\r" not in done.stdout
        lines = done.stdout.split("\n")
    assert lines[0].split()[:4] == ["schedule", "stages", "makespan", "bubble"]
    assert [line.split()[0] for line in lines[1:4]] == ["naive", "gpipe", "1f1b"]
    assert lines[-2:] == [f"all numbers: {path}", ""]
    assert not any(line.startswith("{") for line in lines)
    assert len(json.loads(path.read_text())["rows"]) >= 10


def _read(leader):
    try:
        return os.read(leader, 4096)
    except OSError:  # the other end was closed
        return b""


def test_without_a_file_of_results_nothing_but_the_summary_is_printed(capsys):
    report("a table", "{}", None)
    assert capsys.readouterr().out == "a table\n"
    report("a table", "{}", None, "out/table.png")
    assert capsys.readouterr().out == "a table\nfigures: out/table.png\n"


@pytest.mark.long
def test_an_experiment_prints_its_tables_and_a_line_of_json_in_the_file(monkeypatch, capsys, tmp_path):
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", f"speed --parts lowering --lowering 2 2 --no-figure --json {path}".split())
    main()
    captured = capsys.readouterr()
    *lines, last = captured.out.splitlines()
    assert lines[0].startswith("Lowering a schedule")
    assert last == f"all numbers: {path}"
    assert captured.err == ""
    found = json.loads(path.read_text())
    assert found["config"]["parts"] == ["lowering"]
    assert found["versions"]["jax"] == jax.__version__
    assert Config().json is None
