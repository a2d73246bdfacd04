"""Training that is interrupted, stopped by its disk, or resumed elsewhere ends with the losses that it would have had."""

import dataclasses
import gc
import json
import logging
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from experiments.lm import main as lm
from experiments.lm import meter, text
from experiments.lm.checkpoints import DIGESTS, CheckpointError, Checkpoints, History
from experiments.lm.interrupts import Interrupted, StopRequest
from experiments.lm.main import open_checkpoints, run
from experiments.options import ConfigError
from tests.experiments.test_lm import TINY

# A write that fails leaves callbacks behind, which tell an event loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
STEPS, STOPPED = 6, 3
HISTORY = History([1.5, float("1e-9")], [(0, 2.0), (2, 1.25)])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("\n".join(f"{i} and then {i + 1}" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def config(story):
    return dataclasses.replace(TINY, text=story, steps=STEPS, every=2)


@pytest.fixture(scope="module")
def whole(config):
    """What the run finds that nothing interrupts, through the pipeline and plain."""
    return {plain: run(dataclasses.replace(config, plain=plain)) for plain in (False, True)}


@contextmanager
def at_step(number, action):
    """Do something when the batch of a step is made: while the training goes on."""
    with pytest.MonkeyPatch.context() as patch:
        made = text.batch

        def batch(data, length, size, seed, step):
            if step == number:
                action()
            return made(data, length, size, seed, step)

        patch.setattr(text, "batch", batch)
        yield


def take_away(folder):
    """The disk goes once the fourth step is there."""
    while not (folder / "4").exists():
        time.sleep(0.01)
    folder.rename(folder.parent / "elsewhere")
    folder.write_text("in the way")


def interrupted(config, folder, number=signal.SIGTERM):
    """Train until a signal comes in the third step; what the process says in the end."""
    config = dataclasses.replace(config, checkpoint=folder)
    with at_step(STOPPED - 1, lambda: signal.raise_signal(number)), pytest.raises(Interrupted) as caught:
        run(config)
    assert caught.value.number == number
    return str(caught.value)


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """Folders of runs that were interrupted, through the pipeline and plain."""
    found = {plain: tmp_path_factory.mktemp("runs") / "checkpoints" for plain in (False, True)}
    for plain, folder in found.items():
        said = interrupted(dataclasses.replace(config, plain=plain), folder, signal.SIGINT if plain else signal.SIGTERM)
        name = "SIGINT" if plain else "SIGTERM"
        assert said == f"{name}: ended after step 3 of 6, which is saved in {folder}; the same command goes on from there"
        assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    return found


def resumed(config, folder, tmp_path, monkeypatch, **options):
    """The run that goes on from a copy of a folder; it makes no first state."""

    def refuse(*_):
        raise AssertionError("a first state was made, to be thrown away")

    copied = shutil.copytree(folder, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(jaxpp.Pipeline, "init", refuse)
        patch.setattr(lm.Plain, "init", refuse)
        return run(dataclasses.replace(config, checkpoint=copied, **options))


@pytest.mark.long
@pytest.mark.parametrize("plain", [False, True], ids=["pipeline", "plain"])
def test_a_run_that_was_interrupted_ends_with_the_bits_of_one_that_was_not(
    config, whole, stopped, tmp_path, monkeypatch, capsys, plain
):
    bars = []
    progress = meter.progress
    monkeypatch.setattr(meter, "progress", lambda **given: bars.append(given) or progress(**given))
    found, wanted = resumed(config, stopped[plain], tmp_path, monkeypatch, plain=plain), whole[plain]
    assert found.losses == wanted.losses and len(found.losses) == STEPS
    assert found.val_losses == wanted.val_losses and [done for done, _ in found.val_losses] == [0, 2, 4, 6]
    assert found.sample == wanted.sample
    assert (found.resumed_from, found.safe_step, wanted.resumed_from, wanted.safe_step) == (3, 6, 0, None)
    assert [(bar["initial"], bar["total"]) for bar in bars] == [(3, 6)]
    assert lm.summary(found).startswith(f"3 of 6 steps on {'one device' if plain else '2 stages'} took ")
    line, before = json.loads(found.to_json()), json.loads(wanted.to_json())
    for name in ("first_loss", "final_loss", "val_losses"):
        assert line[name] == before[name]
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert plain or lines.pop(0).startswith("Compiling ")
    assert lines[0].startswith("Resumed after step 3 of 6, from ")
    assert "step  4: loss " in out and "step  3: loss " not in out and "after 0 steps" not in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("plain", "options"),
    [
        (False, {"stages": 1}),
        (False, {"plain": True}),
        (False, {"stages": 4, "schedule": "zb-v"}),
        (True, {"stages": 2}),
    ],
    ids=["two stages to one", "pipeline to plain", "1f1b to zb-v", "plain to pipeline"],
)
def test_a_run_is_resumed_with_other_stages_schedules_and_without_a_pipeline(
    config, whole, stopped, tmp_path, monkeypatch, plain, options
):
    config = dataclasses.replace(config, plain=plain)
    found = resumed(config, stopped[plain], tmp_path, monkeypatch, **{"plain": False} | options)
    assert found.losses[:STOPPED] == whole[plain].losses[:STOPPED]
    np.testing.assert_allclose(found.losses, whole[plain].losses, rtol=1e-5)
    np.testing.assert_allclose(found.val_losses, whole[plain].val_losses, rtol=1e-5)


@pytest.mark.long
def test_schedules_that_add_in_the_same_order_and_other_evaluations_leave_the_bits(config, whole, stopped, tmp_path, monkeypatch):
    found = resumed(config, stopped[False], tmp_path, monkeypatch, schedule="gpipe", eval_every=5, every=1)
    assert found.losses == whole[False].losses
    assert [done for done, _ in found.val_losses] == [0, 2, 5, 6]
    assert found.val_losses[-1] == whole[False].val_losses[-1]


@pytest.mark.long
def test_a_run_that_is_done_is_not_done_again(config, whole, stopped, tmp_path, monkeypatch):
    config = dataclasses.replace(config, plain=True)
    resumed(config, stopped[True], tmp_path, monkeypatch)
    again, wanted = resumed(config, tmp_path / "copy", tmp_path / "again", monkeypatch), whole[True]
    assert (again.losses, again.val_losses, again.sample) == (wanted.losses, wanted.val_losses, wanted.sample)
    assert (again.resumed_from, again.safe_step, again.tokens_per_second) == (6, 6, None)


@pytest.mark.long
def test_a_run_that_loses_its_disk_is_resumed_when_the_disk_is_back(config, whole, tmp_path, capfd):
    folder = tmp_path / "run"
    config = dataclasses.replace(config, checkpoint=folder, every=1)

    with at_step(4, lambda: take_away(folder)), pytest.raises(CheckpointError) as caught:
        run(config)
    assert "could not be saved (Not a directory); no step is safe there. Fix: " in str(caught.value)
    # Orbax would say what happened in hundreds of lines; step 4 may have been on disk, but for its digests, when the disk went
    assert capfd.readouterr().err in ("", f"lm: --checkpoint {folder}: the digests of step 4 are missing (Not a directory)\n")
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert run(config).losses == whole[False].losses


@pytest.mark.long
def test_a_run_that_goes_on_without_its_disk_says_so_in_the_end(config, whole, tmp_path, capfd, monkeypatch):
    folder, line = tmp_path / "run", tmp_path / "results.jsonl"
    config = dataclasses.replace(config, checkpoint=folder, on_save_error="go-on", json=line)

    monkeypatch.setattr(lm, "command", lambda *_: lm_command(config))
    with at_step(STEPS - 1, lambda: take_away(folder)), pytest.raises(SystemExit) as caught:
        lm.main()
    assert str(caught.value) == f"lm: step 6 is not saved in {folder}: step None is the newest there"
    first, last = capfd.readouterr().err.splitlines()
    assert first in (  # when the disk went, Orbax had ended step 4 or was still at it
        f"lm: --checkpoint {folder}: the digests of step 4 are missing (Not a directory)",
        f"lm: --checkpoint {folder}: step 4 could not be saved (Not a directory); no step is safe there",
    )
    assert last == f"lm: --checkpoint {folder}: step 6 could not be saved (Not a directory); no step is safe there"
    assert json.loads(line.read_text())["final_loss"] == whole[False].losses[-1]


def lm_command(config):
    found = run(config)
    config.json.write_text(found.to_json())
    return found


def state_of(step, size=4):
    return jaxpp.State({"w": jnp.arange(float(size))}, (jnp.ones(3),), step=step)


@pytest.fixture
def folder(tmp_path):
    """A folder with the steps 1 and 2 of a run of one setting."""
    checkpoints = Checkpoints(tmp_path / "saved", {"width": 16})
    for step in (1, 2):
        checkpoints.save(state_of(step), HISTORY)
    checkpoints.close()
    return tmp_path / "saved"


@contextmanager
def no_room(limit):
    """No file may have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LARGE = 200_000


def test_what_was_saved_comes_back_to_the_bit(folder):
    checkpoints = Checkpoints(folder, {"width": 16})
    assert checkpoints.safe_step == 2 and checkpoints.history == HISTORY
    home = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    target = jaxpp.State(
        {"w": jax.ShapeDtypeStruct((4,), "float32", sharding=home)}, (jax.ShapeDtypeStruct((3,), "float32", sharding=home),)
    )
    state = checkpoints.restore(target)
    assert state.step == 2 and state.params["w"].sharding == home
    np.testing.assert_array_equal(state.params["w"], np.arange(4.0))
    checkpoints.close()


@pytest.mark.long
def test_a_save_without_room_stops_the_run_and_leaves_the_last_step(folder, capfd):
    checkpoints, large = Checkpoints(folder, {"width": 16}), state_of(3, LARGE)
    large = large._replace(params={"w": jax.random.normal(jax.random.key(0), (LARGE,))})  # what cannot be compressed
    with no_room(100_000):
        checkpoints.save(large, HISTORY)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.finish(large, HISTORY)
    said = "step 3 could not be saved (File too large); step 2 is safe there"
    fix = "mend that and start the same command again, or pass --on-save-error go-on to train without checkpoints"
    assert str(caught.value) == f"--checkpoint {folder}: {said}. Fix: {fix}."
    checkpoints.close()
    assert capfd.readouterr().err == ""  # Orbax says it in hundreds of lines
    again = Checkpoints(folder, {"width": 16})
    assert again.safe_step == 2
    again.finish(state_of(4), HISTORY)
    again.close()
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]  # and nothing half written


def test_what_is_half_written_may_be_deleted_by_something_else_at_the_same_time(folder, monkeypatch):
    (folder / "9.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    delete, gone = shutil.rmtree, []

    def rmtree(path, *args, **options):
        delete(path, *args, **options)
        if not gone:
            gone.append(path)
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoints = Checkpoints(folder, {"width": 16})
    checkpoints.finish(state_of(4), HISTORY)
    checkpoints.close()
    assert len(gone) == 1 and checkpoints.safe_step == 4


@pytest.mark.long
def test_a_save_without_room_is_seen_while_the_run_goes_on_and_the_next_one_is_made(folder, capfd):
    checkpoints = Checkpoints(folder, {"width": 16}, go_on=True)
    large = state_of(3)._replace(params={"w": jax.random.normal(jax.random.key(0), (LARGE,))})
    with no_room(100_000):
        checkpoints.save(large, HISTORY)
        said = ""
        while not said:
            time.sleep(0.01)
            checkpoints.look()
            said = capfd.readouterr().err
    assert said == f"lm: --checkpoint {folder}: step 3 could not be saved (File too large); step 2 is safe there\n"
    checkpoints.save(state_of(4), HISTORY)
    checkpoints.finish(state_of(4), HISTORY)
    assert checkpoints.safe_step == 4
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(
    ("lost", "reason"),
    [("run", "was not found"), ("run/metadata", "not found"), ("state", "was not found")],
)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_is_offered(folder, lost, reason, digests):
    path = folder / "2" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if digests:
        reason = f"not as it was saved: {lost}"
    else:  # the run was killed before it wrote them
        (folder / "2" / DIGESTS).unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder, {"width": 16}).restore(state_of(0))
    said, fix = str(caught.value).split(" Fix: ")
    assert said.startswith(f"--checkpoint {folder}: step 2 cannot be read (") and reason in said
    assert fix == f"delete {folder / '2'}, to go on from an older step or from the start, or name another folder."
    shutil.rmtree(folder / "2")
    assert Checkpoints(folder, {"width": 16}).safe_step == 1


def test_bits_that_have_changed_on_the_disk_are_found_in_every_file_before_anything_is_restored(folder):
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file() and path.stat().st_size)
    assert sum(path.parent.name == "d" for path in files) >= 2  # arrays
    rng = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step 2 cannot be read \((not as it was saved: .|digests\.json is damaged)"):
            Checkpoints(folder, {"width": 16})
        path.write_bytes(whole)
    checkpoints = Checkpoints(folder, {"width": 16})
    assert checkpoints.safe_step == 2
    checkpoints.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("width", 32),
        ("depth", 3),
        ("heads", 1),
        ("length", 9),
        ("batch", 5),
        ("steps", 7),
        ("lr", 1e-3),
        ("delay", 1),
        ("feedback", 0.5),
        ("dropout", 0.2),
        ("dtype", "bfloat16"),
        ("eval_batches", 3),
        ("seed", 1),
        ("microbatches", 4),
    ],
)
def test_a_run_with_another_model_or_data_is_refused_before_any_work(config, stopped, monkeypatch, option, value):
    monkeypatch.setattr(lm, "train", lambda *_: pytest.fail("the training began"))
    changed = dataclasses.replace(config, checkpoint=stopped[False], **{option: value})
    values = (each.rate if option == "lr" else getattr(each, option) for each in (config, changed))
    was, now = (f"--{option.replace('_', '-')} {value}" for value in values)
    with pytest.raises(ConfigError) as caught:
        run(changed)
    rule = f"the run that is saved there had {was}, and this command has {now}"
    assert str(caught.value) == f"--checkpoint {stopped[False]}: {rule}. Fix: pass {was} to resume it, or name another folder."


@pytest.mark.long
def test_everything_that_differs_is_named_and_another_text_too(config, stopped, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"another story" * 100)
    with pytest.raises(ConfigError) as caught:
        run(dataclasses.replace(config, checkpoint=stopped[False], width=32, lr=1.0, text=other))
    digests = [text.read(path, 8).digest for path in (config.text, other)]
    assert f"had --width 16 --lr 0.003 the text of digest {digests[0]}, and" in str(caught.value)
    assert f"has --width 32 --lr 1.0 the text of digest {digests[1]}. Fix: " in str(caught.value)


def test_without_dropout_the_number_of_microbatches_may_change(config, tmp_path):
    corpus, before = text.read(config.text, 8), dataclasses.replace(config, dropout=0.0, checkpoint=tmp_path / "run")
    checkpoints = open_checkpoints(before, corpus)
    checkpoints.finish(state_of(1), HISTORY)
    checkpoints.close()
    assert open_checkpoints(dataclasses.replace(before, microbatches=4), corpus).safe_step == 1
    with pytest.raises(ConfigError, match=r"had --batch 4, and this command has --batch 8\. Fix: pass --batch 4"):
        open_checkpoints(dataclasses.replace(before, microbatches=4, batch=8), corpus)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(config, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for given, reason in ((path, "it is a file"), (path / "below", "Not a directory")):
        with pytest.raises(ConfigError) as caught:
            run(dataclasses.replace(config, checkpoint=given))
        assert str(caught.value) == f"--checkpoint {given}: cannot be written ({reason}). Fix: name another folder."


def test_orbax_is_asked_for_only_with_a_folder(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    corpus = text.read(config.text, 8)
    assert open_checkpoints(config, corpus) is None
    with pytest.raises(ConfigError, match=r'is not installed. Fix: pip install -e "\.\[checkpoint\]" in the checkout of jaxpp'):
        open_checkpoints(dataclasses.replace(config, checkpoint=tmp_path / "run"), corpus)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_does_what_it_did_before(capfd, number):
    came = []
    before = signal.signal(number, lambda *_: came.append(1))
    try:
        with StopRequest(wanted=True) as stop:
            assert stop.number is None
            signal.raise_signal(number)
            assert (stop.number, came) == (number, [])
            signal.raise_signal(number)
            assert came == [1]
        signal.raise_signal(number)
        assert came == [1, 1]
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err.count("the run ends after this step, and saves it; a second Ctrl-C ends it at once") == 1


def test_signals_are_left_alone_where_nothing_is_saved_and_in_other_threads():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def look(wanted):
        with StopRequest(wanted=wanted) as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.number))

    look(wanted=False)
    thread = threading.Thread(target=look, kwargs={"wanted": True})
    thread.start()
    thread.join()
    assert seen == [(before, None)] * 2


@pytest.fixture(autouse=True)
def _orbax_ends_here(request):
    yield
    if "room" in request.node.name:  # a write that failed: its last callbacks belong to this test, not to the next
        time.sleep(0.3)
        gc.collect()
    logging.getLogger("absl").setLevel(logging.WARNING)
