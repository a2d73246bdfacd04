"""The forecast for many hosts: closed forms, links that cost what they should, and a table that says what is assumed."""

import dataclasses
import json
import pathlib
import re
import sys

import pytest
from PIL import Image

from experiments.hosts import on_paper as module
from experiments.hosts.on_paper import LAYOUTS, Config, assumptions, costs_of, crossing, main, run, table
from experiments.options import ConfigError

A_GPU, A_HOST = LAYOUTS
SMALL = Config(hosts=(1, 2, 4), gpus=2, microbatches=(8, 16), no_figure=True)
GUIDE = (pathlib.Path(__file__).parents[2] / "docs" / "guide" / "hosts.md").read_text()
FREE = {"host_link": 1e15, "gpu_link": 1e15, "host_latency": 0.0, "gpu_latency": 0.0, "dispatch": 0.0, "passing": 0.0}
"""Links and a host that cost nothing."""


def rows_of(config, **wanted):
    """The rows of a run with these attributes."""
    found = [row for row in run(config).rows if all(getattr(row, name) == value for name, value in wanted.items())]
    assert found
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_with_free_links_a_step_and_its_bubble_equal_their_formulae(layout, name):
    config = dataclasses.replace(SMALL, schedules=(name,), **FREE)
    unit = sum(costs_of(layout, config)[:3])
    for row in rows_of(config, layout=layout):
        p, m = row.ranks, row.microbatches
        assert p == row.hosts * (2 if layout == A_GPU else 1)
        assert row.seconds == pytest.approx((m + p - 1) * unit)
        assert row.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert row.efficiency == pytest.approx(m / (m + p - 1))
    (last,) = (row for row in rows_of(config, layout=layout, hosts=4) if row.microbatches == 16)
    assert last.sending == pytest.approx(0, abs=1e-9)
    assert last.in_flight == (16 if name == "gpipe" else last.ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_microbatch_after_the_other_crosses_every_link_twice(layout):
    config = dataclasses.replace(SMALL, schedules=("naive",), dispatch=0.0, passing=0.0)
    costs = costs_of(layout, config)
    for row in rows_of(config, layout=layout):
        between = row.hosts - 1
        inside = row.ranks - 1 - between
        way = sum(costs[:3]) * row.ranks + 2 * (inside * costs.inside + between * costs.between)
        assert row.seconds == pytest.approx(row.microbatches * way)


@pytest.mark.long
def test_slower_links_and_a_slower_host_never_shorten_a_step():
    config = dataclasses.replace(SMALL, schedules=("1f1b", "interleaved", "zb-h1", "zb-v"), microbatches=(16,))
    slower = {"host_link": 4.0, "gpu_link": 4.0, "host_latency": 2e3, "gpu_latency": 2e3, "dispatch": 5e3, "passing": 5e3}
    before = run(config).rows
    for name, value in slower.items():
        for one, other in zip(before, run(dataclasses.replace(config, **{name: value})).rows, strict=True):
            assert other.seconds >= one.seconds, (name, one)
            if name == "host_link" and one.hosts > 1:
                assert other.seconds > one.seconds
                assert other.link > one.link
            elif name == "host_link":
                assert (other.seconds, other.link) == (one.seconds, 0)


def test_each_activation_and_cotangent_is_on_a_link_once_for_each_boundary_between_hosts():
    rate = SMALL.host_link * 1e9 / 8
    sent = {(row.layout, row.hosts, row.schedule): row.link * row.seconds * rate for row in rows_of(SMALL, microbatches=16)}
    size = SMALL.activation
    for layout, copies in ((A_GPU, 1), (A_HOST, 2)):
        assert sent[layout, 1, "1f1b"] == 0
        assert sent[layout, 2, "1f1b"] == pytest.approx(16 * copies * size)  # a host sends activations, the other cotangents
        assert sent[layout, 4, "1f1b"] == pytest.approx(2 * 16 * copies * size)  # the inner hosts send both
        assert sent[layout, 4, "interleaved"] == pytest.approx(4 * 16 * copies * size)
        assert sent[layout, 2, "zb-v"] == pytest.approx(2 * 16 * copies * size)


def test_what_leaves_a_host_by_the_axis_that_crosses():
    config = dataclasses.replace(SMALL, hidden=64, length=8, layers=3, sequences=2)
    activation, layers = 2 * 2 * 8 * 64, 3 * 2
    assert [size for _, size, _ in crossing(config)] == [
        2 * 16 * activation,
        2 * 16 * 2 * activation,
        layers * 12 * 64**2 * 4,
        layers * 16 * 4 * activation,
    ]


def test_every_process_hands_over_its_part():
    for row in rows_of(dataclasses.replace(SMALL, passing=0.0)):
        assert row.own_dispatch * row.hosts == pytest.approx(row.all_dispatch)
    few = rows_of(SMALL, schedule="1f1b", microbatches=8, hosts=4, layout=A_GPU)[0]
    assert few.all_dispatch == pytest.approx(1e-4 * 8 * 8 * 2)  # F and B of 8 microbatches on 8 ranks
    passing = 2 * 8 * 2  # over the two of the three boundaries between hosts that the first host has no part in
    assert few.own_dispatch == pytest.approx(1e-4 * 8 * 2 * 2 + 35e-6 * passing)
    slow = dataclasses.replace(SMALL, dispatch=1e5)  # 0.1 s an action: the host is the bottleneck
    for row in rows_of(slow, layout=A_GPU):
        assert row.seconds >= row.own_dispatch
    assert all(row.seconds < row.all_dispatch for row in rows_of(slow, layout=A_GPU, hosts=4, microbatches=16, schedule="1f1b"))


def test_a_host_with_one_gpu_is_the_same_in_both_layouts_and_several_share_the_work():
    single = dataclasses.replace(SMALL, gpus=1)
    assert costs_of(A_GPU, single) == costs_of(A_HOST, single)
    apart, shared = (costs_of(layout, SMALL) for layout in LAYOUTS)
    assert apart.useful == shared.useful  # as many layers on each GPU
    assert apart.forward < shared.forward  # the all-reduces
    assert apart.weight_grad == shared.weight_grad
    assert shared.crossing == SMALL.gpus * apart.crossing
    twice = costs_of(A_GPU, dataclasses.replace(SMALL, sequences=2))
    assert twice.useful == pytest.approx(2 * apart.useful)
    assert twice.crossing == 2 * apart.crossing


def test_the_table_says_what_is_assumed_and_has_a_line_for_every_number_of_hosts():
    result = run(SMALL)
    text = table(result)
    assert text.startswith("\n".join(assumptions(SMALL)))
    for words in ("hidden 4096", "4 on each GPU", "1 x 2048 tokens", "989 TFLOP/s", "40%", "400 Gbit/s", "450 GB/s", "20 and 5 us"):
        assert words in text
    assert "takes 100 us for each action of its ranks, and 35 us for each transfer between others" in text
    for layout in LAYOUTS:
        for count in SMALL.microbatches:
            lines = text.split(f"{layout}, {count} microbatches: seconds of a step and its bubble\n")[1].splitlines()
            assert lines[0].split() == ["hosts", "ranks", *SMALL.schedules]
            for line, hosts in zip(lines[1:4], SMALL.hosts, strict=True):
                found = [r for r in result.rows if (r.layout, r.microbatches, r.hosts) == (layout, count, hosts)]
                cells = [cell for row in found for cell in (f"{row.seconds:.2f}", f"{row.bubble:.1%}")]
                assert line.split() == [str(hosts), str(found[0].ranks), *cells]
        assert f"{layout}, on 4 hosts\n" in text
    assert [row.sending is None for row in result.rows] == [row.hosts < 4 for row in result.rows]


def test_a_schedule_that_there_is_none_of_is_left_out_and_said():
    config = dataclasses.replace(SMALL, schedules=("1f1b", "dualpipe-v"), hosts=(1, 4), microbatches=(8,))
    result = run(config)
    assert [row.hosts for row in result.rows if row.schedule == "dualpipe-v"] == [1, 1, 4]
    (reason,) = result.refused
    assert reason.startswith(f"{A_GPU}, 4 hosts: dualpipe-v, 8 microbatches: ")
    assert reason in table(result)
    line = table(result).split("a rank a GPU, 8 microbatches")[1].splitlines()[3]
    assert line.split()[-2:] == ["-", "-"]


@pytest.mark.long
def test_the_command_prints_the_table_draws_the_figure_and_writes_the_line_of_json(monkeypatch, capsys, tmp_path):
    figure, path = tmp_path / "folder" / "paper.png", tmp_path / "results.jsonl"
    arguments = f"on_paper --hosts 1 2 --gpus 2 --microbatches 4 --schedules 1f1b zb-h1 --figure {figure} --json {path}"
    monkeypatch.setattr(sys, "argv", arguments.split())
    main()
    printed = capsys.readouterr().out
    assert "a rank a host, on 2 hosts" in printed
    assert f"figures: {figure}\nall numbers: {path}\n" in printed
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 8
    assert found["config"]["host_link"] == 400
    assert found["devices"] == []
    with Image.open(figure) as picture:
        assert picture.width > 1000
        assert {(0, 114, 178), (230, 159, 0)} <= {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": ()}, "--hosts: counts start at 1. Fix: pass 1 or more."),
        ({"hosts": (0,)}, "--hosts 0: counts start at 1. Fix: pass 1 or more."),
        ({"host_link": 0.0, "dispatch": -1.0}, "--host-link 0, --dispatch -1: a rate is above 0, and a delay at least 0."),
        ({"utilisation": float("nan")}, "--utilisation nan: a rate is above 0"),
        ({"schedules": ("2f2b",)}, "--schedules 2f2b: there is no such schedule."),
        ({"figure": module.Path("paper.gif")}, "--figure paper.gif: it ends in none of"),
    ],
)
def test_options_that_make_no_forecast_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(Config(), **options)
    assert str(error.value).startswith(message)


def promised(hosts):
    """Seconds and bubbles of the guide's row for so many hosts."""
    cells = re.search(rf"^\| {hosts} \| (.*) \|$", GUIDE, re.MULTILINE)[1]
    return re.findall(r"([\d.]+) s, ([\d.]+%)", cells)


@pytest.mark.parametrize("hosts", [1, 8, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.long
def test_the_guide_has_the_seconds_and_bubbles_of_the_forecast(hosts):
    rows = run(dataclasses.replace(Config(no_figure=True), hosts=(hosts,), schedules=("1f1b", "zb-v"), microbatches=(256,))).rows
    assert promised(hosts) == [(f"{row.seconds:.2f}", f"{row.bubble:.1%}") for row in rows]


def test_the_guide_has_what_the_axes_send_and_the_assumptions():
    told = re.findall(r"^\| `(\w+)`.*? \| ([\d.]+) GiB \| ([\d.]+) s \| (.*?) \|$", GUIDE, re.MULTILINE)
    rate = Config().host_link * 1e9 / 8
    found = [(axis.split(",")[0], f"{size / 2**30:.1f}", f"{size / rate:.2f}", when) for axis, size, when in crossing(Config())]
    assert told == found
    costs = costs_of(A_GPU, Config())
    assert f"takes the same time: {256 * costs.useful:.2f} s" in " ".join(GUIDE.split())
    assert f"takes {1e3 * costs.between:.2f} ms where a forward takes {1e3 * costs.forward:.0f} ms" in GUIDE
