"""The gpu experiment, small and on a CPU: each case in a process of its own, what fails is a row, and nothing else stops."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from experiments.gpu.exactness import distance
from experiments.gpu.gaps import Gap, Span, device_lanes, gaps_between
from experiments.gpu.host import TRACE
from experiments.gpu.main import Config, run, table
from experiments.gpu.parts import PARTS, TURNS, perform, run_beside, run_process, saved_rows
from experiments.gpu.rows import Job, Row, markdown
from experiments.gpu.send import is_direct
from experiments.gpu.sizes import SMALL
from experiments.gpu.trace import PERFETTO
from jaxpp.runtime.send import Send

ROOT = pathlib.Path(__file__).parents[2]
CASES = [(name, case) for name, part in PARTS.items() for case in part.cases]


@pytest.mark.long
def test_the_command_measures_in_other_processes_and_writes_the_table_and_the_json(tmp_path, capsys):
    result = run(Config(("send",), small=True, out=tmp_path))
    assert result.whole
    assert list(result.seconds) == ["environment, device", "send, copies"]
    assert {row.part for row in result.rows} == {"environment", "send"}
    assert not [row for row in result.rows if row.what == "failed"], table(result)
    found = {row.what: row for row in result.rows}
    assert found["device"].numbers["platform"] == "cpu"
    assert found["cpu: send of 2 KiB"].numbers["put"] > 0
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["what"] for row in saved["rows"]] == [row.what for row in result.rows]
    assert (tmp_path / "table.md").read_text().count("\n| ") == 2 + len(result.rows)  # the heading and its rule
    printed = capsys.readouterr().out
    assert "send, copies: begins" in printed
    assert "send, copies: ends" in printed


def test_what_there_is_no_time_for_is_a_row(tmp_path):
    result = run(Config(("send",), small=True, minutes=0.01, out=tmp_path))
    assert [(row.part, row.measured) for row in result.rows] == [("environment", "left out"), ("send", "left out")]


def test_a_case_that_raises_keeps_the_rows_it_had_and_says_why(tmp_path, monkeypatch):
    def rows(job):
        yield job.row("first", "1 ms")
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more lines")

    monkeypatch.setitem(sys.modules, "experiments.gpu.broken", types.SimpleNamespace(rows=rows))
    with pytest.raises(RuntimeError, match="out of memory"):
        perform("broken", "case", tmp_path, tmp_path / "rows.json", small=True, seconds=60)
    first, failed = saved_rows(tmp_path / "rows.json")
    assert (first.what, first.measured) == ("first", "1 ms")
    assert (failed.what, failed.note) == ("failed", "RuntimeError: RESOURCE_EXHAUSTED: out of memory")


def test_a_package_that_is_missing_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    def rows(job):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setitem(sys.modules, "experiments.gpu.broken", types.SimpleNamespace(rows=rows))
    perform("broken", "case", tmp_path, tmp_path / "rows.json", small=True, seconds=60)
    (row,) = saved_rows(tmp_path / "rows.json")
    assert row.note.startswith("sklearn is not installed. Fix: ")
    assert row.note.endswith("-m pip install scikit-learn")


def test_a_process_that_hangs_is_stopped_and_its_end_is_told():
    def told(code, seconds=60.0):
        return run_process([sys.executable, "-c", code], seconds, subprocess.DEVNULL, {})

    assert told("pass") == ""
    assert told("import time; time.sleep(600)", 0.3).startswith("stopped after ")
    assert told("raise SystemExit(3)") == "ended with code 3"
    assert told("import os; os.abort()") == "ended with signal SIGABRT"


def test_variables_of_a_process_beside_a_case_go_before_those_of_the_user_and_it_ends_with_the_case(tmp_path, monkeypatch):
    def printed(*always):
        code = "import os; print(os.environ['XLA_FLAGS'], os.getpgrp())"
        with (tmp_path / "log").open("w") as log:
            assert run_process([sys.executable, "-c", code], 60, log, {"XLA_FLAGS": "--extra"}, *always) == ""
        return (tmp_path / "log").read_text().split()

    monkeypatch.setenv("XLA_FLAGS", "--user")
    flags, group = printed()
    assert (flags, int(group) == os.getpgrp()) == ("--user", False)
    flags, group = printed({"XLA_FLAGS": "--always"})
    assert (flags, int(group) == os.getpgrp()) == ("--always", True)
    begun = time.perf_counter()
    assert run_process([sys.executable, "-c", "import time; time.sleep(600)"], 0.3, subprocess.DEVNULL, {}, {}).startswith(
        "stopped"
    )
    assert time.perf_counter() - begun < 60


@pytest.mark.long
def test_a_process_beside_a_case_says_what_it_found_and_why_it_failed(tmp_path):
    def beside(part, case, **variables):
        return run_beside(Job(part, case, SMALL, tmp_path, 60), case, 60, tmp_path / "log", variables)

    rows, trouble = beside("environment", "device", JAX_PLATFORMS="cpu")
    assert trouble == ""
    assert rows[0].numbers["platform"] == "cpu"
    rows, trouble = beside("graphs", "gpt, flags", XLA_FLAGS="--xla_no_such_flag=1")
    assert rows == []
    assert trouble.startswith("ended with code 1: ")
    assert trouble.endswith("Unknown flag in XLA_FLAGS: --xla_no_such_flag=1")
    assert beside("graphs", "gpt, no such variant") == ([], "ended with code 1: KeyError: 'no such variant'")


def test_what_jaxpp_imports_is_looked_for_before_anything_is_imported():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-m", "experiments.gpu"]  # -S: as if nothing were installed
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "jaxpp imports jax, jaxlib, flax, optax, numpy, scipy, tqdm, jaxtyping, not installed" in done.stderr
    assert "-m pip install jax jaxlib" in done.stderr


@pytest.mark.long
def test_no_part_needs_tyro():
    modules = ", ".join(f"experiments.gpu.{name}" for name in ("main", *PARTS))
    code = f"import sys; sys.modules['tyro'] = sys.modules['matplotlib'] = None; import {modules}"  # None: cannot be imported
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_case_has_its_turn_and_its_module():
    assert sorted((name, case) for name, cases in TURNS for case in cases) == sorted(CASES)
    for name in PARTS:
        assert (ROOT / "experiments" / "gpu" / f"{name}.py").exists()


def event(name, start, end, **stats):
    return types.SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=list(stats.items()))


def line(name, *events):
    return types.SimpleNamespace(name=name, events=events)


def test_the_lanes_of_a_gpu_are_its_compute_streams_with_the_programs_of_their_kernels():
    kernels = line("Stream #13(Compute)", event("gemm", 0, 10, hlo_module="jit_stage_0_forward"), event("add", 12, 20))
    others = line("XLA Modules", event("jit_stage_0_forward", 0, 20)), line("Stream #14(MemcpyH2D)", event("copy", 0, 500))
    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("python", event("call", 0, 900))]),
        types.SimpleNamespace(name="/device:GPU:0", lines=[kernels, *others]),
    ]
    assert device_lanes(planes) == {"/device:GPU:0": [Span(0, 1e-8, "stage_0_forward"), Span(1.2e-8, 2e-8, "add")]}
    assert device_lanes(planes[:1]) == {}


def test_gaps_are_the_idle_times_in_the_middle_of_a_trace():
    spans = [Span(k, k + 0.5, f"program {k}") for k in range(9)] + [Span(4.4, 4.75, "beside")]
    found = gaps_between(spans, 2)  # from 0 to 8.5: those in the first and the last quarter do not count
    assert [(gap.before, gap.after) for gap in found] == [
        ("program 2", "program 3"),
        ("program 3", "program 4"),
        ("beside", "program 5"),
        ("program 5", "program 6"),
    ]
    assert found[2] == Gap(0.25, "beside", "program 5")
    assert gaps_between([], 2) == []


def test_the_distance_of_gradients_is_relative_to_their_size_or_a_part_of_the_largest():
    wanted = {"large": np.array([4.0, -8.0]), "small": np.array([0.01])}
    found = {"large": np.array([4.0, -7.0]), "small": np.array([0.05])}
    assert distance(wanted, wanted, 0.01) == (0.0, 0.0)
    assert distance(found, wanted, 0.01) == pytest.approx((0.5, 1.0))


def test_whether_a_send_is_direct_is_seen_from_what_it_calls(monkeypatch):
    first, second = jax.devices()[:2]
    value = jax.device_put(np.ones(4, "f"), first)
    assert Send(second).bind()(value)[0].devices() == {second}
    monkeypatch.setattr(Send, "bind", lambda send: lambda x: (jax.device_put(x, send.target),))
    assert not is_direct(second, value)
    monkeypatch.setattr(Send, "bind", lambda _: lambda x: (x,))
    assert is_direct(second, value)


def test_a_bar_in_a_cell_does_not_end_it():
    assert r"a \| b" in markdown([Row("part", "case", "what", "a | b")])


@pytest.mark.slow
@pytest.mark.parametrize(("part", "case"), CASES, ids=lambda name: name.replace(", ", "-"))
def test_every_case_runs_small(part, case, tmp_path):
    perform(part, case, tmp_path, tmp_path / "rows.json", small=True, seconds=900)
    rows = {row.what: row for row in saved_rows(tmp_path / "rows.json")}
    assert rows
    assert "failed" not in {row.measured for row in rows.values()}
    if part == "exactness":
        assert [row.numbers["equal"] for row in rows.values() if "equal" in row.numbers] == [True] * 12
        assert {row.measured for row in rows.values() if row.what.startswith("bits")} == {"equal"}
    if part == "memory":
        ratios = [row.numbers["ratio"] for row in rows.values() if "ratio" in row.numbers]
        assert len(ratios) == 4
        assert ratios == pytest.approx([1.0] * 4, abs=0.1)
    if (part, case) == ("host", "gaps"):
        assert rows["jaxpp.observe.from_trace"].measured == "reads it"
        assert (tmp_path / TRACE).stat().st_size > 0
        assert "plane '/host:CPU'" in (tmp_path / "trace_planes.txt").read_text()
    if part == "graphs":
        assert rows["as it comes, bits of the copies"].measured == "the same"
        assert rows["as it comes, bits of the copies"].numbers["loaded"] > 0
        values = [rows[f"as it comes, {way}"].numbers["values"][0] for way in ("one program", "a copy for each call")]
        assert values[0] == values[1] > 0
        assert "cpu has no CUDA graphs" in rows["no graphs"].note
    if part == "lanes":
        assert [rows[f"{schedule}, a thread for each rank: bits"].measured for schedule in ("1f1b", "zb-h1")] == ["the same"] * 2
    if part == "trace":
        assert (tmp_path / PERFETTO).stat().st_size > 0
