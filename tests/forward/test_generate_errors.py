"""What generation refuses, and how it ends when something goes wrong; the parameters are as they were, and nothing stays alive."""

import dis
import gc
import io
import itertools
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, CutError, OutputError, ParamsError, StateError
from jaxpp.forward import generate as driver
from jaxpp.runtime import interrupts
from tests.decoders import WIDTH, loop, plain, prompts_of
from tests.forward.test_generate_carries import live
from tests.runtime.test_interrupts import AtBytecode

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROMPTS, NUM_TOKENS = prompts_of(1, 9, 5, 2), 4
DECODER = plain(num_layers=2)
FN = "fn(params, carry, tokens): "


@pytest.fixture(scope="module")
def two_stages():
    return DECODER.forward(2)


def with_logits(change):
    """The decoder with its logits changed."""

    def fn(params, carry, tokens):
        carry, logits = DECODER.fn(params, carry, tokens)
        return carry, change(logits)

    return fn


def with_carry(change):
    """The decoder with its new carry changed."""

    def fn(params, carry, tokens):
        carry, logits = DECODER.fn(params, carry, tokens)
        return change(carry), logits

    return fn


def shorter(carry):
    return {**carry, "layers": [{"k": each["k"][:, 1:], "v": each["v"].astype("bfloat16")} for each in carry["layers"]]}


def fed_back(params, carry, tokens):
    own, logits = DECODER.fn({**params, "positions": params["positions"] + carry["fed"]}, carry["own"], tokens)
    return {"own": own, "fed": logits[0, -1, :WIDTH]}, logits


WRONG = {
    "no pair": (
        {"fn": lambda *given: DECODER.fn(*given)[1]},
        OutputError,
        FN,
        "Got: one array, f32[1,1,23].",
        "return the new carry",
    ),
    "nothing": ({"fn": lambda *_: None}, OutputError, FN, "Got: None.", "return the new carry"),
    "three": ({"fn": lambda *given: (*DECODER.fn(*given), 1)}, OutputError, FN, "Got: a tuple of 3.", "return the new carry"),
    "a carry of another shape": (
        {"fn": with_carry(shorter)},
        OutputError,
        FN,
        "Got: carry['layers'][0]['k']: f32[1,32,16] becomes f32[1,31,16]\n"
        "       carry['layers'][0]['v']: f32[1,32,16] becomes bf16[1,32,16]",
        "write into a cache of fixed size, and cast with .astype(old.dtype)",
    ),
    "a carry without its caches": (
        {"fn": with_carry(lambda carry: {"position": carry["position"]})},
        OutputError,
        FN,
        "carry['layers'][1]['v'] is missing in the new carry",
        "return every leaf",
    ),
    "logits without a batch": (
        {"fn": with_logits(lambda logits: logits[0, -1])},
        OutputError,
        FN,
        "Got: one array, f32[23].",
        "for a batch of one sequence",
    ),
    "integers": ({"fn": with_logits(lambda logits: logits.argmax(-1))}, OutputError, FN, "Got: one array, i32[1,1].", "logits"),
    "a dict": (
        {"fn": with_logits(lambda logits: {"logits": logits})},
        OutputError,
        FN,
        "Got: a dict.",
        "return (new_carry, logits)",
    ),
    "a leaf of all stages": (
        {"fn": fed_back, "carry": {"own": DECODER.carry, "fed": jnp.zeros(WIDTH)}},
        CutError,
        "carry: ",
        "Got: fed, which layers of several stages read and change.",
        "give each layer a leaf of its own",
    ),
    "no function": ({"fn": 3}, ArgumentError, "forward.generate(..., fn, ...): ", "Got: 3.", "pass the function itself"),
    "numbers in the carry": (
        {"carry": {**DECODER.carry, "position": 0}},
        ParamsError,
        "carry: ",
        "Got: carry['position']: int.",
        "make the shapes arrays",
    ),
    "shapes": (
        {"carry": jax.eval_shape(lambda: DECODER.carry)},
        ParamsError,
        "carry: ",
        "ShapeDtypeStruct",
        "jnp.zeros(leaf.shape",
    ),
    "an empty prompt": (
        {"prompts": [[1], []]},
        BatchError,
        "forward.generate(..., prompts, ...): ",
        "prompt 1: no token",
        "integers",
    ),
    "floats": ({"prompts": [[1.5]]}, BatchError, "forward.generate(..., prompts, ...): ", "prompt 0: f64[1]", "integers"),
    "two axes": ({"prompts": [np.ones((2, 3), int)]}, BatchError, "forward.generate(", "prompt 0: i64[2,3]", "integers"),
    "long prompts": (
        {"prompts": prompts_of(30, 3, 29)},
        BatchError,
        "forward.generate(..., prompts, ...): ",
        "Got: prompt 0: 30 tokens and 4 to generate are 34, more than 33.",
        "make a carry with more room",
    ),
    "no room": (
        {"max_length": 10},
        BatchError,
        "forward.generate(",
        "Got: prompt 1: 9 tokens and 4 to generate are 13",
        "more than 10",
    ),
    "no prompts": ({"prompts": []}, BatchError, "forward.generate(", "Got: none.", "pass a list"),
    "counts": (
        {"num_groups": 0, "group_size": -1, "chunk": 1.5, "max_length": 0},
        ArgumentError,
        "forward.generate(...): ",
        "Got: num_groups=0\n       group_size=-1\n       chunk=1.5\n       max_length=0.",
        "pass 1 or more",
    ),
    "tokens of another vocabulary": (
        {"prompts": [[1, 2], [22, 23]]},
        BatchError,
        "forward.generate(..., prompts, ...): ",
        "Got: prompt 1: numbers from 22 to 23 where 0 to 22 were expected, for which there are logits.",
        "pad its logits with -inf",
    ),
    "no tokens": ({"num_tokens": 0}, ArgumentError, "forward.generate(..., num_tokens): ", "Got: 0.", "num_tokens=100"),
    "a stop of text": ({"stop": "end"}, ArgumentError, "forward.generate(..., stop='end'): ", "Got: 'end'.", "eos_token_id"),
    "a sample": ({"sample": "beam"}, ArgumentError, "sample: ", "Got: 'beam'.", "jaxpp.Sampling("),
    "a sample of floats": ({"sample": lambda logits, _: logits.max()}, ArgumentError, "sample(", "Got: f32[].", "categorical"),
    "a number as key": ({"key": 3}, ArgumentError, "key: ", "Got: int 3.", "jax.random.key(seed)"),
    "floats as key": ({"key": jnp.ones(3)}, ArgumentError, "key: ", "Got: f32[3].", "jax.random.key(seed)"),
    "several keys": ({"key": jax.random.split(jax.random.key(0))}, ArgumentError, "key: ", "Got: key<fry>[2].", "jax.random.key("),
    "several raw keys": ({"key": np.zeros((2, 2), np.uint32)}, ArgumentError, "key: ", "Got: u32[2,2].", "jax.random.key(seed)"),
    "params of another model": (
        {"params": {"w": jnp.ones(3)}},
        ParamsError,
        "params: ",
        "params['embed'] is missing",
        "init returned",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_runs(two_stages, monkeypatch, name):
    forward, params = two_stages
    changes, kind, where, got, fix = WRONG[name]
    known = {"params": params, "fn": DECODER.fn, "carry": DECODER.carry, "prompts": PROMPTS, "num_tokens": NUM_TOKENS} | changes
    monkeypatch.setattr("jaxpp.forward.passes.execute", lambda *_: pytest.fail("a device has worked"))
    with pytest.raises(kind) as error:
        forward.generate(known.pop("params"), **known)
    text = str(error.value)
    assert text.startswith(where) and re.match(r"[^\n]+\.\n  Got: (.|\n)+\.\n  Fix: [^\n]+\.$", text), text
    assert got in text and fix in text, text


def test_pipelines_that_do_not_generate():
    def loss_fn(params, batch):
        return DECODER.fn(params, DECODER.carry, batch[:1])[1].mean()

    def loss_with_state(params, state, batch):
        return loss_fn(params, batch), (state, ())

    batch, given = jnp.ones((2, 3), int), (DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1)
    with pytest.raises(StateError, match=r"pipe.generate: .*\n.*no call of either has finished yet"):
        pipe.generate(DECODER.params, *given)
    pipe = jaxpp.Pipeline(loss_with_state, optax.sgd(0.1), num_stages=1, num_microbatches=1, has_state=True)
    state = pipe.init((DECODER.params, {"mean": jnp.zeros(())}), batch)
    with pytest.raises(ArgumentError, match=r"pipe.generate: .*\n  Got: has_state=True\.\n  Fix: close over the model state"):
        pipe.generate(state, *given)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1, data_parallel=2)
    state = pipe.init(DECODER.params, batch)
    with pytest.raises(ArgumentError, match=r"pipe.generate: .*\n  Got: 2 replicas\.\n  Fix: make a jaxpp.Forward without"):
        pipe.generate(state, *given)


@pytest.mark.parametrize("kind", ["raw", "numpy", "rbg"])
def test_other_kinds_of_keys(two_stages, kind):
    forward, params = two_stages
    key = {"raw": jax.random.PRNGKey(5), "numpy": np.array([0, 5], np.uint32), "rbg": jax.random.key(5, impl="rbg")}[kind]
    sample = jaxpp.Sampling(temperature=2.0)
    typed = key if kind == "rbg" else jax.random.key(5)
    made = forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, sample=sample, key=key, chunk=8).collect()
    assert [row.tolist() for row in made] == [each.tokens for each in loop(DECODER, PROMPTS, NUM_TOKENS, sample, typed)]


def test_what_the_model_raises_comes_out_as_it_is(two_stages):
    forward, params = two_stages

    def fn(params, carry, tokens):
        raise LookupError("mine")

    with pytest.raises(LookupError) as error:
        forward.generate(params, fn, DECODER.carry, PROMPTS, NUM_TOKENS)
    assert error.value.args == ("mine",)
    (note,) = [note for note in error.value.__notes__ if note.startswith("jaxpp: raised while tracing fn with i32[")]
    assert note.endswith("beside its parameters")
    assert "microbatch" not in note


def test_a_prompt_that_is_none_comes_out_at_its_place_and_the_others_go_on(two_stages):
    forward, params = two_stages
    prompts = [PROMPTS[0], [], PROMPTS[1], [0.5], PROMPTS[2]]
    generation, tokens, wrong = forward.generate(params, DECODER.fn, DECODER.carry, iter(prompts), NUM_TOKENS, chunk=8), [], []
    while True:
        try:
            tokens.append(next(generation))
        except BatchError as error:
            wrong.append(re.search(r"Got: (prompt \d)", str(error)).group(1))
        except StopIteration:
            break
    assert wrong == ["prompt 1", "prompt 3"]
    wanted = loop(DECODER, PROMPTS[:3], NUM_TOKENS)
    for number, made in zip((0, 2, 4), wanted, strict=True):
        assert [token.token for token in tokens if token.prompt == number] == made.tokens
    assert [row.tolist() for row in generation.collect()] == [[]] * 3


def test_after_the_iterator_of_prompts_has_raised_the_others_are_finished(two_stages):
    forward, params = two_stages

    def prompts():
        yield PROMPTS[0]
        raise OSError("the disk is gone")

    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts(), NUM_TOKENS, chunk=8)
    with pytest.raises(OSError, match="the disk is gone") as error:
        generation.collect()
    assert any("prompt 1" in note for note in error.value.__notes__)
    assert sum(1 for _ in generation) > 0


@pytest.mark.parametrize("group_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_ctrl_c_a_generation_goes_on_and_loses_no_token(two_stages, group_size, ctrl_c):
    # It was broken off, and collect() lost all that it had collected.
    forward, params = two_stages
    wanted = [made.tokens for made in loop(DECODER, PROMPTS[:2], 2)]

    def generation():
        return forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS[:2], 2, group_size=group_size, chunk=8)

    generation().collect()
    whole = generation()
    with AtBytecode() as counted:
        whole.collect()
    before, came = live(), 0
    for number in np.random.default_rng(group_size).integers(0, counted.seen, 5):
        interrupted = generation()
        try:
            with AtBytecode(int(number)):
                found = interrupted.collect()
        except KeyboardInterrupt as error:
            came += 1
            del error
            found = interrupted.collect()
        assert [row.tolist() for row in found] == wanted, number
        interrupted.close()
        del interrupted
        gc.collect()
        assert live() == before, number
    assert came >= 4, "signals come while tokens are made"


class InNext(AtBytecode):
    """Counts the bytecodes of ``next(generation)`` alone, and of the block that holds signals back.

    It sends no SIGINT before the bytecode that returns: there Python calls no handler, and what is returned is given.
    """

    def __call__(self, frame, event, given):
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] == dis.opmap["RETURN_VALUE"]:
            return self
        within = frame.f_code.co_filename == driver.__file__ and frame.f_code.co_name == "__next__"
        if within or frame.f_code.co_filename == interrupts.__file__:
            return super().__call__(frame, event, given)
        frame.f_trace_lines = False
        return self


def test_after_ctrl_c_at_any_bytecode_of_next_every_token_comes_once(two_stages, ctrl_c):
    forward, params = two_stages
    given = params, DECODER.fn, DECODER.carry, PROMPTS[:1], 2
    wanted = list(forward.generate(*given, chunk=8))
    for number in itertools.count(1, 3):
        generation, found = forward.generate(*given, chunk=8), []
        try:
            with InNext(number) as place:
                found.extend(generation)
        except KeyboardInterrupt:
            found.extend(generation)
        assert found == wanted, number
        if place.seen < number:
            break
    assert number > 100


def test_ctrl_c_pressed_again_breaks_off_what_does_not_answer(two_stages, ctrl_c, monkeypatch):
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    forward, params = two_stages

    def prompts():
        yield PROMPTS[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield pytest.fail("the second is not held back")

    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts(), NUM_TOKENS, chunk=8)
    with pytest.raises(KeyboardInterrupt) as error:
        generation.collect()
    assert "broke off the generation; the parameters are as they were" in error.value.__notes__[0]
    for _ in range(2):
        with pytest.raises(StateError, match=r"broken off before its end\.\n  Fix: call generate again"):
            generation.collect()
        generation.close()  # which does not make it look complete


@pytest.mark.parametrize("line", ["return taken", "self._made.extend"])
def test_a_time_limit_loses_no_token_that_was_made_and_waits_for_none(two_stages, monkeypatch, line):
    # Its handler raises an Exception: one that came while a token was returned was taken for that of the token, which was lost.
    forward, params = two_stages
    given = params, DECODER.fn, DECODER.carry, PROMPTS[:1], 3
    wanted = list(forward.generate(*given, chunk=8))
    numbers = [n for n, text in enumerate(Path(driver.__file__).read_text().splitlines(), 1) if text.strip().startswith(line)]

    def expire(*_):
        raise TimeoutError("the time is over")

    def at_line(frame, event, _):
        if event == "line" and frame.f_lineno in numbers and frame.f_code.co_filename == driver.__file__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGALRM)
        return at_line

    generation, found, old, tracing = forward.generate(*given, chunk=8), [], signal.signal(signal.SIGALRM, expire), sys.gettrace()
    try:
        sys.settrace(at_line)
        with pytest.raises(TimeoutError):
            found.extend(generation)
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGALRM, old)
    found.extend(generation)
    assert found == wanted


def test_a_generation_that_is_dropped_frees_its_carries_at_once(two_stages):
    # Until the garbage collector ran, in a notebook where a cell was interrupted: two sets of carries when it was run again.
    forward, params = two_stages

    def alive():
        return sum(not array.is_deleted() for array in jax.live_arrays())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        generation = forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, chunk=8)
        next(generation)
        during = alive()
        del generation
        after = alive()
    finally:
        gc.enable()
    assert during > before + 8 and after == before


def test_what_was_collected_is_given_once(two_stages):
    forward, params = two_stages
    generation = forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, chunk=8)
    assert [len(row) for row in generation.collect()] == [NUM_TOKENS] * len(PROMPTS)
    assert [len(row) for row in generation.collect()] == [0] * len(PROMPTS)


def test_a_step_that_consumes_the_parameters_of_a_generation_is_named():
    # XLA's own error said that an array was deleted, and not why.
    pipe = jaxpp.Pipeline(
        lambda params, batch: (params["last"] ** 2).mean() + 0 * batch.sum(), optax.sgd(0.1), num_stages=1, num_microbatches=1
    )
    state = pipe.init(DECODER.params, np.ones((2, 3), np.float32))
    generation = pipe.generate(state, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, chunk=8)
    next(generation)
    pipe.step(state, np.ones((2, 3), np.float32))
    with pytest.raises(StateError, match=r"arrays were consumed by a step(.|\n)*Fix: .*donate=False"):
        generation.collect()


def test_the_bar_goes_away_whatever_happens(two_stages, monkeypatch):
    forward, params = two_stages

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = []
    real = driver.progress

    def progress(**options):
        shown.append(real(**{**options, "after": 0.0, "mininterval": 0.0}))
        return shown[-1]

    monkeypatch.setattr(driver, "progress", progress)
    monkeypatch.setattr(sys, "stderr", Terminal())
    for how in ("all", "close", "del", "off"):
        generation = forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, chunk=8, progress=how != "off")
        next(generation)
        if how in ("all", "off"):
            assert len(list(generation)) == len(PROMPTS) * NUM_TOKENS - 1
        elif how == "close":
            generation.close()
        del generation
        gc.collect()
    assert len(shown) == 3 and all(bar.disable for bar in shown), "a closed bar is disabled"
    assert shown[0].n == shown[0].total == len(PROMPTS) * NUM_TOKENS
    assert sys.stderr.getvalue().endswith("\r")
