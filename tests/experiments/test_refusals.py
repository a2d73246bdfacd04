"""What no experiment can run is refused in one line that names the option and says what to pass; each row is one experiment's."""

import sys
from pathlib import Path

import pytest

from experiments.generate import main as generate
from experiments.gpu import main as gpu
from experiments.hosts import main as hosts
from experiments.lm import main as lm
from experiments.memory import kept
from experiments.memory import main as memory
from experiments.mesh import main as mesh
from experiments.options import ConfigError
from experiments.plan import main as plan
from experiments.remat import main as remat
from experiments.speed import main as speed
from experiments.tasks import main as tasks
from experiments.tune import main as tune
from experiments.zoo import main as zoo

NO_FIGURE = "tasks.bmp: it ends in none of .pdf, .png, .svg. Fix: "
REFUSED = {
    generate: [
        ({"parts": ("bars",)}, "--parts bars: there is no such part. Fix: pass some of tokens, speed, memory, one-thread"),
        ({"groups": (1, 0)}, "--groups 1 0: counts start at 1. Fix: "),
        ({"width": 10}, "a --width that is a multiple of 4"),
        ({"temperature": 0.0}, "--temperature 0.0: it is above 0. Fix: "),
        ({"tokens": 64, "length": 64}, "--prompt 8 --tokens 64 --length 64: a cache has room for --length tokens. Fix: "),
    ],
    gpu: [
        ({"parts": ("sped",)}, "--parts sped: there is no such part. Fix: pass speed, or some of environment, send, uses"),
        ({"minutes": 0}, "--minutes 0: there is no time"),
        (
            {"plan": ("h100",), "models": ("gtp",)},
            "--models gtp: there is no such model. Fix: pass gpt, or some of gpt, scanned_gpt, mlp",
        ),
        ({"plan": ("h100",), "models": ()}, "--models: there is none. Fix: "),
        ({"plan": ("h100",), "devices": 0}, "--devices 0: counts start at 1. Fix: pass 1 or more."),
        ({"plan": ("h100",), "parts": ("speed",)}, "--plan with --parts: a plan has models instead of parts. Fix: "),
        ({"models": ("mlp",)}, "--models and --devices: only a plan has them. Fix: pass for example --plan h100."),
        ({"devices": 2}, "--models and --devices: only a plan has them."),
    ],
    hosts: [
        ({"ranks": 6, "processes": (4,)}, "--processes 4 --ranks 6: each process has as many devices"),
        ({"schedule": "2f2b"}, "--schedule 2f2b: there is no such schedule"),
        ({"batch": 4}, "--batch 4 --microbatches 8: each microbatch needs an example"),
        ({"processes": (0,)}, "--processes 0: counts start at 1"),
    ],
    kept: [
        ({"models": ("bert",)}, "--models bert: there is no such model. Fix: pass some of gpt-blocks, "),
        ({"stages": 0, "length": -1}, "--stages 0, --length -1: counts start at 1"),
        ({"width": 6}, "--width 6: 4 heads share the width equally. Fix: pass a multiple of 4"),
    ],
    lm: [
        ({"steps": 0, "batch": -1}, "--batch -1, --steps 0: counts start at 1"),
        ({"width": 10, "heads": 4}, "a --width that is a multiple of 4"),
        ({"dropout": 1.0}, "--dropout 1.0: a rate is at least 0 and below 1"),
        ({"lr": 0.0}, "--lr 0.0 --temperature 0.8: both are above 0"),
    ],
    memory: [
        (
            {"pairs": ("mlp-1f1b", "mlp-2f2b")},
            "--pairs mlp-2f2b: there is no such pair. Fix: pass mlp-1f1b, or some of mlp-gpipe, ",
        ),
        ({"ranks": 0, "gpt_depth": -1}, "--ranks 0, --gpt-depth -1: counts start at 1. Fix: "),
        ({"gpt_width": 10, "gpt_heads": 4}, "a --gpt-width that is a multiple of 4"),
        ({"dropout": 1.0}, "--dropout 1.0: a rate is at least 0 and below 1"),
        ({"figure": Path("tasks.bmp")}, f"--figure {NO_FIGURE}"),
    ],
    mesh: [
        (
            {"meshes": ("2x2x2", "2x2x4", "2x2x1")},
            "--meshes, --devices 8: each mesh has all devices, and 2x2x4 is 16, 2x2x1 is 4. ",
        ),
        ({"meshes": ("2x4", "0x2x4")}, "--meshes 2x4 0x2x4: a mesh is pipe x data x model. Fix: write it like 2x2x2."),
        ({"meshes": ()}, "--meshes: there is none. Fix: "),
        ({"meshes": ("1x8x1",), "microbatches": 4}, "--microbatches 4 with 1x8x1: replicas have equally many microbatches. "),
        ({"meshes": ("2x1x4",), "gpt_heads": 2}, "--gpt-heads 2: shards are equal. Fix: pass a multiple of 4."),
        ({"every": True, "devices": 6}, "--every --devices 6: there is no such mesh. Fix: "),
        ({"models": ("mlp", "cnn")}, "--models cnn: there is no such model. Fix: pass some of gpt, mlp."),
        ({"models": ()}, "--models: there is none. Fix: pass some of gpt, mlp."),
        ({"steps": 0, "gpt_depth": -1}, "--steps 0, --gpt-depth -1: counts start at 1. Fix: "),
        ({"seed": -1}, "--seed -1: seeds start at 0. Fix: "),
        ({"batch": 9}, "--batch 9 --microbatches 8: microbatches are of one size here. Fix: "),
        ({"gpt_width": 12}, "--gpt-width 12 --gpt-heads 8: heads share the width equally. Fix: "),
        ({"dropout": 1.0}, "--dropout 1.0: a rate is at least 0 and below 1. Fix: "),
        ({"figure": Path("tasks.bmp")}, f"--figure {NO_FIGURE}"),
    ],
    plan: [
        (
            {"model": "gpt2"},
            "--model gpt2: there is no such model. Fix: pass gpt2-124m or gpt2-355m or gpt2-774m or gpt2-1.5b, or some",
        ),
        ({"model": "lama-3-8b"}, "--model lama-3-8b: there is no such model. Fix: pass llama-3-8b, or some of gpt2-124m"),
    ],
    remat: [
        ({"models": ("gpt", "bert")}, "--models bert: there is no such model. Fix: pass some of gpt, resnet, mlp"),
        ({"ways": ()}, "Fix: pass some of keep, least, recompute"),
        ({"computes": ("int8",)}, "--computes int8: not a floating type"),
        ({"gpt_depth": 0, "rounds": -1}, "--rounds -1, --gpt-depth 0: counts start at 1"),
        ({"dropout": 1.0}, "--dropout 1.0: a rate is at least 0 and below 1"),
        ({"gpt_batch": 9}, "--gpt-batch 9: the plain step divides its batch evenly"),
    ],
    speed: [
        ({"parts": ("bars",)}, "--parts bars: there is no such part. Fix: pass some of steps, host"),
        ({"problems": ()}, "Fix: pass some of tiny, mlp2k, gpt-small, resnet"),
        ({"schedules": ("2f2b",)}, "--schedules 2f2b: there is no such schedule"),
        ({"microbatches": ()}, "--microbatches: counts start at 1"),
        ({"rounds": 0}, "--rounds 0: counts start at 1"),
    ],
    tasks: [
        ({"tasks": (4, 0)}, "--tasks 4 0: counts start at 1. Fix: "),
        ({"tasks": ()}, "--tasks: counts start at 1. Fix: "),
        ({"steps": 0, "warm_up": -1}, "--steps 0, --warm-up -1: counts start at 1. Fix: "),
        ({"seed": -1}, "--seed -1: seeds start at 0. Fix: "),
        ({"rate": 0.0}, "--rate 0.0: nothing is learned without a rate above 0. Fix: "),
        ({"batch": 3}, "--batch 3 --microbatches 4: each microbatch needs an example. Fix: "),
        ({"figure": Path("tasks.bmp")}, f"--figure {NO_FIGURE}"),
    ],
    tune: [
        ({"problem": "bogus"}, "--problem bogus: there is no such problem"),
        ({"schedules": ("bogus",)}, "--schedules bogus: there is no such schedule"),
        ({"rounds": 0}, "--rounds 0: counts start at 1"),
        ({"remat": ("bogus",)}, "--remat bogus: there is no such remat"),
    ],
    zoo: [
        ({"models": ("mlp", "cnn")}, "--models cnn: there is no such model. Fix: pass some of mlp, "),
        ({"stages": 0, "steps": -1}, "--stages 0, --steps -1: counts start at 1. Fix: "),
        ({"batch": 3, "microbatches": 4}, "--batch 3 --microbatches 4: each microbatch needs an example. Fix: "),
        ({"seed": -1}, "--seed -1: seeds start at 0. Fix: "),
    ],
}


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__.removeprefix("experiments."))
def test_options_that_make_no_run_are_refused_in_one_line(module):
    for options, message in REFUSED[module]:
        with pytest.raises(ConfigError) as caught:
            module.Config(**options)
        said = str(caught.value)
        assert said.startswith(message) if message.startswith("--") else message in said
        assert "Fix: " in said and "\n" not in said


@pytest.mark.parametrize(
    ("module", "words"),
    [
        *((memory, words) for words in ("--pairs mlp-2f2b", "--ranks two", "--width 3")),
        *((tasks, words) for words in ("--tasks 0", "--order sorted", "--width wide")),
        (mesh, "--meshes 2x2x4"),
    ],
)
def test_the_command_line_refuses_them_too(monkeypatch, capsys, module, words):
    monkeypatch.setattr(sys, "argv", ["command", *words.split()])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


REFUSED_BY_COMMANDS = {
    lm: {"--json /dev/null/results.jsonl": "lm: --json /dev/null/results.jsonl: cannot be written ("},
    memory: {"--ranks 1 --microbatches 1 --no-figure --json /dev/null/x": "memory: --json /dev/null/x: cannot be written ("},
    tasks: {
        "--no-figure --json /dev/null/x": "tasks: --json /dev/null/x: cannot be written (",
        "--no-figure --json .": "tasks: --json .: cannot be written (Is a directory). Fix: name another file",
    },
    mesh: {"--no-figure --json .": "mesh: --json .: cannot be written (Is a directory). Fix: name another file"},
    gpu: {"--parts speed,sped --small": "gpu: --parts sped"},
    zoo: {
        "--json /dev/null/x": "zoo: --json /dev/null/x: cannot be written (",
        "--schedule 2f2b": "zoo: schedule '2f2b': the schedules are ",
        "--schedule zb-v --stages 3": "zoo: schedule='zb-v': zb-v runs 2 stages on each rank",
    },
}
WORK = {lm: "train", memory: "holdings", tasks: "compare", mesh: "train_plainly", gpu: "run_process", zoo: "train"}
"""What a command would begin to work with."""


@pytest.mark.parametrize("module", REFUSED_BY_COMMANDS, ids=lambda module: module.__name__.split(".")[1])
def test_commands_refuse_before_any_work(monkeypatch, tmp_path, module):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, WORK[module], None)
    for words, message in REFUSED_BY_COMMANDS[module].items():
        monkeypatch.setattr(sys, "argv", [module.__name__, *words.split()])
        with pytest.raises(SystemExit) as caught:
            module.main()
        assert str(caught.value).startswith(message)
