"""While an update is held together, signals wait; afterwards all is as before, and Ctrl-C pressed again breaks a held part off."""

import asyncio
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxpp.runtime import interrupts
from jaxpp.runtime.interrupts import Hold

ROOT = pathlib.Path(__file__).parents[2]
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def calls():
    """What the handlers of the held signals were called with; those of SIGINT raise."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    seen = []

    def note(number, frame):
        assert frame is not None
        seen.append(number)

    old = {number: signal.signal(number, note) for number in HELD[1:]}
    old[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield seen
    for number, handler in old.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in HELD]


def held(*numbers, body=lambda: None):
    with Hold() as hold:
        hold.begin()
        for number in numbers:
            signal.raise_signal(number)
        body()


def notes(error):
    return "".join(getattr(error, "__notes__", ()))


def test_signals_wait_and_each_handler_is_called_once(calls):
    before, seen = handlers(), []
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGUSR1, signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, body=lambda: seen.extend(calls))
    assert seen == [] and sorted(calls) == [signal.SIGUSR1, signal.SIGTERM]
    assert handlers() == before
    assert "go on with state = pipe.state" in notes(caught.value)


def test_before_begin_nothing_waits_and_begin_may_be_called_twice(calls):
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as caught, Hold():
        signal.raise_signal(signal.SIGINT)
    assert not notes(caught.value)
    with Hold() as hold:
        assert not hold.begun
        hold.begin()
        hold.begin()
        assert hold.begun
    assert handlers() == before


def test_every_ctrl_c_is_as_good_as_the_first(calls):
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            held(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        held()


def test_what_is_not_handled_by_a_python_function_is_left_alone(calls):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    before = handlers()
    held(signal.SIGTERM, body=lambda: calls.append(handlers()[3]))
    assert handlers() == before and calls == [signal.SIG_DFL]


def test_a_handler_that_replaces_itself_has_its_way(calls):
    # The usual "once: finish; twice: now" of training scripts.
    def first(number, frame):
        calls.append("first")
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, first)
    held(signal.SIGINT)
    assert calls == ["first"]
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT)


def test_an_error_of_the_block_is_the_context_of_the_interrupt(calls):
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGINT, body=lambda: 1 // 0)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not notes(caught.value), "the step was not completed"


def test_a_hold_in_another_thread_holds_nothing_and_changes_no_handler(calls):
    before, found = handlers(), []

    def work():
        with Hold() as hold:
            hold.begin()
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before] and handlers() == before


def test_ctrl_c_pressed_again_in_a_hold_within_a_hold_breaks_off_both(calls, monkeypatch):
    # The inner one let it through to the outer, which held it back as if it had come once.
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    went_on = []

    def inner():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt) as caught:
        held(body=lambda: held(body=inner))
    assert not went_on and "broke off" in notes(caught.value)


def test_a_hold_in_a_hold_gives_back_to_the_outer(calls):
    def outer():
        with Hold() as hold:
            hold.begin()
            held(signal.SIGINT)
            calls.append("after the inner")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert calls == ["after the inner"]


def hangs():
    """A part that never ends, as when a device does not answer, while Ctrl-C is pressed each 0.05 s."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    time.sleep(60)


@pytest.mark.parametrize("patience", [0.3, 0.02])
def test_ctrl_c_pressed_again_after_a_while_breaks_a_held_part_off(calls, monkeypatch, patience):
    monkeypatch.setattr(interrupts, "_PATIENCE", patience)
    monkeypatch.setattr(interrupts, "_SIGNALS", [signal.SIGINT])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            held(body=hangs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert "so go on from a checkpoint" in notes(caught.value)
    assert "completed" not in notes(caught.value)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_held_part_that_is_broken_off_at_its_very_end_leaves_all_handlers_as_they_were(calls, monkeypatch):
    # The second Ctrl-C came where the block ends, before anything was given back: SIGTERM was held for as long as the process ran.
    def press_at_the_end(frame, *_):
        if frame.f_code is Hold.__exit__.__code__:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    before, tracing = handlers(), sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            held(signal.SIGINT, body=lambda: (time.sleep(0.01), sys.settrace(press_at_the_end)))
    finally:
        sys.settrace(tracing)
    assert "broke off the update" in notes(caught.value)
    assert handlers() == before
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_a_slip_of_the_finger_and_other_signals_do_not_break_a_held_part_off(calls, monkeypatch):
    with pytest.raises(KeyboardInterrupt) as caught:
        held(signal.SIGINT, signal.SIGINT, body=lambda: signal.raise_signal(signal.SIGINT))
    assert "completed first" in notes(caught.value)
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    held(signal.SIGTERM, signal.SIGTERM, body=lambda: time.sleep(0.01))
    assert calls == [signal.SIGTERM]


def test_under_asyncio_the_first_ctrl_c_cancels_and_a_second_raises(monkeypatch):
    # There the handler raises at its second call only, so both that came must reach it.
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.02)
    monkeypatch.setattr(interrupts, "_SIGNALS", [signal.SIGINT])
    old, alarm = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGALRM)
    cancelled = []

    async def main():
        try:
            held(signal.SIGINT)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def hanging():
        held(body=hangs)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        assert cancelled
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(hanging())
        assert "broke off" in notes(caught.value)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, old)


TWICE = """
import time
from jaxpp.runtime.interrupts import Hold
with Hold() as hold:
    hold.begin()
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_process_that_hangs_in_a_held_part_ends_at_the_second_ctrl_c():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen([sys.executable, "-c", TWICE], cwd=ROOT, text=True, **pipes)
    assert run.stdout.readline() == "held\n"
    run.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(timeout=1.2)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("so go on from a checkpoint"), errors
