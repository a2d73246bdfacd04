"""The language model experiment: its text, its devices, and that it learns the same through the pipeline as without."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.devices import has_accelerator, is_chosen, runs_on_cpu
from experiments.lm import delay, text
from experiments.lm.main import Config, main, run, summary
from experiments.lm.plain import Plain
from experiments.options import ConfigError
from jaxpp.errors import JaxppError

TINY = Config(
    stages=2, microbatches=2, width=16, depth=2, heads=2, length=8, batch=4, steps=3, eval_every=2, eval_batches=2, sample=5
)


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("\n".join(f"{i} and then {i + 1}" for i in range(200)))
    return path


@pytest.mark.long
def test_pipelined_and_plain_training_print_the_same_losses(story, capsys):
    config = dataclasses.replace(TINY, text=story)
    pipelined, plain = run(config), run(dataclasses.replace(config, plain=True))
    assert len(pipelined.losses) == 3
    assert [f"{loss:.4f}" for loss in pipelined.losses] == [f"{loss:.4f}" for loss in plain.losses]
    assert [done for done, _ in pipelined.val_losses] == [0, 2, 3]
    np.testing.assert_allclose(pipelined.val_losses, plain.val_losses, rtol=1e-5)
    assert (len(pipelined.devices), len(plain.devices)) == (2, 1)
    out = capsys.readouterr().out
    assert out.startswith("Compiling the programs of 2 stages, ")  # before it takes its time
    assert out.count("step  0: loss ") == 0 and [out.count(f"step  {k}: loss ") for k in (1, 2, 3)] == [2, 2, 2]
    assert out.index("step  3: loss ") < out.index("after 3 steps: held-out loss ")  # the counts agree
    first, second, *sample = summary(pipelined).splitlines()
    assert first.startswith("3 steps on 2 stages took ")
    assert second.startswith(f"training loss {pipelined.losses[0]:.4f} -> {pipelined.losses[-1]:.4f}, held-out loss ")
    assert (sample[0], sample[-1]) == ("--- a sample ---", "---")
    line = json.loads(pipelined.to_json())
    assert line["final_loss"] == pipelined.losses[-1]
    assert line["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("batch_size", [6, 7], ids=["equal microbatches", "unequal microbatches"])
def test_a_plain_step_is_the_weighted_mean_over_microbatches(batch_size):
    def loss_fn(params, batch, key):
        return ((batch @ params - jax.random.normal(key)) ** 2).mean()

    batch = jnp.asarray(np.random.default_rng(0).normal(size=(batch_size, 2)), "float32")
    key, params = jax.random.key(1), jnp.ones(2)
    parts = jnp.split(batch, [2, 4] if batch_size == 6 else [3, 5])
    found = [jax.value_and_grad(loss_fn)(params, part, jax.random.fold_in(key, i)) for i, part in enumerate(parts)]
    loss, grad = (sum(value[k] * len(part) for value, part in zip(found, parts, strict=True)) / batch_size for k in (0, 1))
    plain = Plain(loss_fn, optax.sgd(1.0), num_microbatches=3)
    state, metrics = plain.step(plain.init(lambda _: jnp.ones(2), key, batch), batch, key)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(state.params, params - grad, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "feedback"), [("adamw", 0.0), ("muon", 1.0), ("sgd", 0.5)])
def test_late_gradients_are_as_late_on_one_device(story, optimizer, feedback):
    config = dataclasses.replace(TINY, text=story, optimizer=optimizer, delay=1, feedback=feedback, steps=4, sample=1)
    pipelined, plain = run(config), run(dataclasses.replace(config, plain=True))
    np.testing.assert_allclose(pipelined.losses, plain.losses, rtol=1e-5)
    np.testing.assert_allclose(pipelined.val_losses, plain.val_losses, rtol=1e-5)
    assert pipelined.losses[:2] != run(dataclasses.replace(config, plain=True, delay=0)).losses[:2]


def test_a_plain_step_with_delay_has_the_gradient_of_the_parameters_before():
    def loss_fn(params, batch, key):
        return (batch * params**2).mean()

    batch, rate = jnp.ones(2), 0.1
    plain = Plain(loss_fn, optax.sgd(rate), num_microbatches=2, delay=1)
    state = plain.init(lambda _: jnp.ones(()), jax.random.key(0), batch)
    expected = [1.0, 1.0]
    for _ in range(3):
        state, _ = plain.step(state, batch, jax.random.key(0))
        expected.append(expected[-1] - rate * 2 * expected[-2])
        np.testing.assert_allclose([state.previous, state.params], expected[-2:], rtol=1e-6)
    assert jax.tree.structure(plain.abstract_state(lambda _: jnp.ones(()), jax.random.key(0), batch)) == jax.tree.structure(state)


@pytest.mark.long
def test_the_table_of_delays_says_what_each_optimizer_loses(story, tmp_path):
    training = dataclasses.replace(TINY, text=story)
    config = delay.Config(optimizers=("adamw", "sgd"), steps=3, plain=True, feedback=1.0, figure=tmp_path / "delay.svg")
    found = delay.run(config, training)
    assert [(row.optimizer, row.how) for row in found.rows] == [
        (name, how) for name in ("adamw", "sgd") for how in ("no delay", "delay", "delay, feedback 1")
    ]
    head, adamw, sgd = delay.table(found).splitlines()
    assert head.split() == "optimizer no delay delay it adds delay, feedback 1 it adds".split()
    assert [line.split()[0] for line in (adamw, sgd)] == ["adamw", "sgd"]
    waits, late, added = map(float, adamw.split()[1:4])
    assert added == pytest.approx(late - waits, abs=2e-4)
    assert "<svg" in config.figure.read_text()
    with pytest.raises(ConfigError, match="--feedback 0: a correction adds something"):
        delay.Config(feedback=0)


@pytest.mark.long
def test_the_standard_library_reads_the_same_twice_and_without_tests():
    first, second = text.read(None, 64), text.read(None, 64)
    assert first.digest == second.digest
    assert 1_000_000 < len(first.train) + len(first.held_out) <= text.MAX_BYTES
    assert len(first.held_out) == (len(first.train) + len(first.held_out)) // 20


def test_a_text_is_divided_without_a_byte_twice_and_a_folder_is_its_text_files_in_order_of_their_names(story, tmp_path):
    corpus = text.read(story, 8)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == story.read_bytes()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.txt").write_bytes(b"b" * 100)
    (folder / "a").mkdir()
    (folder / "a" / "z.txt").write_bytes(b"a" * 100)
    (folder / "image").write_bytes(b"\0" * 100)
    (folder / ".hidden").write_bytes(b"h" * 100)
    corpus = text.read(folder, 8)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == b"a" * 100 + b"b" * 100


def test_batches_depend_on_the_seed_and_the_step_alone_and_held_out_ones_are_the_whole_text():
    data = np.arange(200, dtype=np.uint8)
    first = text.batch(data, 8, 4, seed=0, step=3)
    assert first.shape == (4, 9)
    assert (np.diff(first) == 1).all()
    assert (first == text.batch(data, 8, 4, seed=0, step=3)).all()
    assert not (first == text.batch(data, 8, 4, seed=0, step=4)).all()
    assert not (first == text.batch(data, 8, 4, seed=1, step=3)).all()
    data = np.arange(50, dtype=np.uint8)
    batches = text.held_out_batches(data, 8, 3, 2)
    assert [batch.shape for batch in batches] == [(3, 9), (3, 9)]
    assert (batches[0][0, 0], batches[-1][-1, -1]) == (0, 49)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory). Fix: name a text file, or a folder of them."),
        (b"", "0 bytes of text, where its last 5% must hold a sequence of 65. Fix: pass a --text of at least 1300 bytes"),
        (b"too short", "9 bytes of text"),
    ],
)
def test_a_bad_text_is_refused_in_one_line(tmp_path, monkeypatch, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["lm", "--text", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    said = str(caught.value)
    assert said.startswith(f"lm: --text {path}: ")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_smaller_than_the_microbatches_is_refused_either_way(story, plain):
    with pytest.raises(JaxppError, match="each microbatch needs at least one example"):
        run(dataclasses.replace(TINY, text=story, batch=1, plain=plain))


@pytest.mark.parametrize(
    ("plugins", "files", "environment", "found"),
    [
        ([], ["/dev/nvidia0"], {}, False),
        (["xla_cuda12"], [], {}, False),
        (["xla_cuda12"], ["/dev/nvidiactl"], {}, False),
        (["xla_cuda13"], ["/dev/nvidia0"], {}, True),
        (["xla_cuda12"], ["/dev/nvidia3"], {"CUDA_VISIBLE_DEVICES": ""}, False),
        (["xla_cuda12"], ["/dev/nvidia3"], {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        (["xla_cuda12"], ["/dev/nvidia3"], {"CUDA_VISIBLE_DEVICES": "3"}, True),
        (["xla_rocm7"], ["/dev/nvidia0"], {}, False),
        (["xla_rocm7"], ["/dev/kfd"], {}, True),
        (["libtpu"], [], {}, False),
        (["libtpu"], ["/dev/accel0"], {}, True),
        (["metal"], [], {}, True),
    ],
)
def test_an_accelerator_is_a_plugin_and_a_visible_device(plugins, files, environment, found):
    assert has_accelerator(plugins, files, environment) is found


@pytest.mark.parametrize(
    ("platforms", "accelerator", "cpu"),
    [(None, False, True), ("", True, False), ("cpu", True, True), ("cpu,cuda", True, True), ("cuda,cpu", False, False)],
)
def test_the_platform_is_the_one_named_first_or_the_accelerator(platforms, accelerator, cpu):
    assert runs_on_cpu(platforms, accelerator) is cpu


def test_a_number_of_devices_chosen_before_is_noticed():
    assert not is_chosen("--xla_cpu_enable_fast_math=false", -1)
    assert is_chosen("--xla_force_host_platform_device_count=2", -1)
    assert is_chosen("", 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "devices", "said"),
    [("", 3, "forcing 3 CPU devices"), ("jax.devices();", 1, "")],
    ids=["before JAX starts", "after JAX has started"],
)
def test_devices_are_forced_only_before_jax_starts(before, devices, said):
    code = f"import jax; from experiments.devices import ensure_devices; {before} ensure_devices(3); print(len(jax.devices()))"
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == devices
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
