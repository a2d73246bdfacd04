"""Generation: its tokens are those of a loop on one device, over any pipeline; what it refuses, how it ends and is interrupted."""

import gc
import io
import itertools
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, OutputError, StateError
from jaxpp.forward import generate as driver
from jaxpp.runtime import interrupts
from jaxpp.runtime.threads import Threads
from tests import messages
from tests.decoders import MODELS, VOCAB, WIDTH, Made, loop, plain, prompts_of
from tests.forward.signals import CtrlCAt

NUM_TOKENS, CHUNK = 6, 8
PROMPTS = prompts_of(1, 3, 8, 5, 17, 1, 9, 16)
"""One token, fewer than a chunk, exactly one chunk or two, more than a chunk."""

SHORT, FEW = prompts_of(1, 9, 5, 2), 4
"""For what does not depend on the prompts."""
KEY = jax.random.key(7)
DECODER, SMALL = plain(), plain(num_layers=2)


def near_the_top(logits, key):
    """A user's rule of sampling: the second or the third best."""
    return jnp.argsort(logits)[-2 - jax.random.randint(key, (), 0, 2)]


SAMPLES = {
    "greedy": None,
    "temperature": jaxpp.Sampling(temperature=1.3),
    "top-k": jaxpp.Sampling(temperature=2.0, top_k=5),
    "top-p": jaxpp.Sampling(temperature=1.5, top_k=20, top_p=0.9),
    "function": near_the_top,
}


@pytest.fixture(scope="module")
def decoder():
    return DECODER


@pytest.fixture(scope="module")
def two_stages():
    return SMALL.forward(2)


def live():
    """Buffers and bytes on the devices."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    buffers = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for array in arrays for shard in array.addressable_shards}
    return len(buffers), sum(buffers.values())


@pytest.fixture(scope="module")
def forwards(decoder):
    """The model over 1, 2 and 4 stages, each cut when it is asked for."""
    known = {}

    def get(num_stages):
        if num_stages not in known:
            known[num_stages] = decoder.forward(num_stages)
        return known[num_stages]

    return get


def stopped(wanted, stop):
    """What is left of sequences that end at a stop token."""
    ends = [next((k + 1 for k, token in enumerate(made.tokens) if token in stop), len(made.tokens)) for made in wanted]
    return [Made(made.tokens[:end], made.logprobs[:end]) for made, end in zip(wanted, ends, strict=True)]


def stops_for(wanted):
    """Two stop tokens that end a sequence at its first token and others later, and leave some as they are."""
    for stop in itertools.combinations(range(VOCAB), 2):
        lengths = {len(made.tokens) for made in stopped(wanted, stop)}
        if {1, NUM_TOKENS} < lengths:
            return stop
    raise AssertionError("no tokens end these sequences at different times")


def check(generation, wanted, tolerance=1e-5):
    """Every token of every prompt, its place, its log-probability, and which one is the last."""
    tokens = list(generation)
    for prompt, made in enumerate(wanted):
        found = [token for token in tokens if token.prompt == prompt]
        assert [token.token for token in found] == made.tokens, f"prompt {prompt}"
        assert [token.index for token in found] == list(range(len(made.tokens)))
        assert [token.last for token in found] == [False] * (len(made.tokens) - 1) + [True]
        np.testing.assert_allclose([token.logprob for token in found], made.logprobs, rtol=tolerance, atol=tolerance)
    assert len(tokens) == sum(len(made.tokens) for made in wanted)


def check_case(decoder, forwards, num_stages, num_groups, group_size, sample):
    forward, params = forwards(num_stages)
    given = {"sample": sample, "key": KEY}
    options = {**given, "num_groups": num_groups, "group_size": group_size, "chunk": CHUNK}
    wanted = loop(decoder, PROMPTS, NUM_TOKENS, **given)
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, **options), wanted)
    stop = stops_for(wanted)
    generation = forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, **options, stop=stop)
    check(generation, stopped(wanted, stop))


CASES = [(2, 1, 3), (4, 4, 1)]
FURTHER = [(1, 2, 3), (1, 1, 1), (2, 2, 1), (4, 1, 1), (4, 8, 1), (4, 2, 3)]


@pytest.mark.parametrize(
    ("num_stages", "num_groups", "group_size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)]
)
def test_tokens_are_those_of_one_device(decoder, forwards, num_stages, num_groups, group_size):
    check_case(decoder, forwards, num_stages, num_groups, group_size, None)


@pytest.mark.parametrize(
    ("num_stages", "num_groups", "group_size"),
    [(2, 3, 1), pytest.param(4, 4, 2, marks=pytest.mark.long), *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER)],
)
def test_a_thread_for_each_rank_makes_the_same_tokens(decoder, num_stages, num_groups, group_size):
    made = {}
    for threads in ("one", "ranks"):
        forward, params = decoder.forward(num_stages, threads=threads)
        options = {"num_groups": num_groups, "group_size": group_size, "chunk": CHUNK, "key": KEY, "sample": SAMPLES["temperature"]}
        generation = forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, **options)
        (ring,) = generation._rings
        assert ring.together.at_once is (threads == "ranks" and num_stages > 1)
        made[threads] = sorted(generation, key=lambda token: (token.prompt, token.index))
        profile = forward.generate(params, decoder.fn, decoder.carry, SHORT, FEW, **options).profile(num_passes=12, num_runs=1)
        assert len({(bar.action.stage, bar.action.microbatch) for bar in profile.bars}) == len(profile.bars)
    assert made["one"] == made["ranks"]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_pass_that_is_handed_over_alone_needs_no_threads_for_no_rank_works_beside_another(monkeypatch, num_groups):
    counts, dispatch = [], Threads.dispatch

    def counted(self, parts, hold=None):
        counts.append(len(parts := list(parts)))
        dispatch(self, parts, hold)

    monkeypatch.setattr(Threads, "dispatch", counted)
    forward, params = SMALL.forward(2, threads="ranks")
    tokens = list(forward.generate(params, SMALL.fn, SMALL.carry, prompts_of(3, 1), FEW, num_groups=num_groups, chunk=CHUNK))
    assert len(tokens) == 2 * FEW
    assert counts == ([] if num_groups == 1 else [2] * (FEW - 1))


@pytest.mark.long
def test_tokens_of_an_int8_model_are_those_of_one_device():
    scale = jnp.float32(1 / 64)

    def rounded(layer):
        return layer | {"mlp": jnp.round(layer["mlp"] / scale).astype(jnp.int8)}

    def fn(params, carry, tokens):
        layers = [layer | {"mlp": layer["mlp"].astype(jnp.float32) * scale} for layer in params["layers"]]
        return SMALL.fn(params | {"layers": layers}, carry, tokens)

    int8 = SMALL._replace(fn=fn, params=SMALL.params | {"layers": list(map(rounded, SMALL.params["layers"]))})
    forward, params = int8.forward(2)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("int8"), jnp.dtype("float32")}
    check(forward.generate(params, fn, int8.carry, PROMPTS[:2], 4), loop(int8, PROMPTS[:2], 4))


@pytest.mark.parametrize("sample", [name if name == "top-k" else pytest.param(name, marks=pytest.mark.long) for name in SAMPLES])
def test_sampled_tokens_are_those_of_one_device(decoder, forwards, sample):
    check_case(decoder, forwards, 2, 2, 1, SAMPLES[sample])


@pytest.mark.long
def test_a_group_draws_the_tokens_of_its_sequences(decoder, forwards):
    check_case(decoder, forwards, 2, 1, 3, SAMPLES["top-p"])


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_tokens_are_those_of_one_device_in_every_case(decoder, forwards, num_stages, sample):
    for groups, size in itertools.product((1, num_stages, 2 * num_stages), (1, 2, 3)):
        check_case(decoder, forwards, num_stages, groups, size, SAMPLES[sample])


@pytest.mark.parametrize(("num_prompts", "group_size"), [(1, 3), (2, 1), (8, 3)])
def test_one_token_for_each_prompt(decoder, forwards, num_prompts, group_size):
    forward, params = forwards(2)
    wanted = loop(decoder, PROMPTS[:num_prompts], 1)
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS[:num_prompts], 1, group_size=group_size), wanted)


@pytest.mark.parametrize("group_size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_samples_of_one_prompt_are_those_of_a_loop_and_the_prompt_is_run_once(decoder, forwards, group_size):
    forward, params = forwards(2)
    one, other = prompts_of(17, 6)
    prompts, key, sample = [one] * 5 + [other] + [other[:1]] * 2 + [one] * 2, jax.random.key(7), jaxpp.Sampling(temperature=1.5)
    wanted = loop(decoder, prompts, 4, sample, key)
    assert len({tuple(made.tokens) for made in wanted[:5]}) > 1
    options = {"sample": sample, "key": key, "chunk": 8, "num_groups": 2, "group_size": group_size}
    generation, apart = (
        forward.generate(params, decoder.fn, decoder.carry, each, 4, **options) for each in (prompts, iter(prompts))
    )
    check(generation, wanted)
    check(apart, wanted)
    spared = 4 * 2 + 1 * 2  # 17 tokens in passes of 8, 8 and 1; the last is run for each
    assert apart.num_passes - generation.num_passes == spared
    first, second = (sum(each.forecast().peaks.values()) for each in (generation, apart))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((decoder.carry, jax.random.key_data(key), np.int32(0))))
    assert 0 <= first - second - size <= 4  # the position is on both stages


@pytest.mark.parametrize("group_size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_fewer_prompts_than_places(decoder, forwards, group_size):
    forward, params = forwards(4)
    wanted = loop(decoder, PROMPTS[:2], NUM_TOKENS)
    options = {"num_groups": 8, "group_size": group_size, "chunk": CHUNK}
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS[:2], NUM_TOKENS, **options), wanted)


def test_each_prompt_may_have_a_number_of_tokens_of_its_own(decoder, forwards):
    forward, params = forwards(2)
    counts = [3, 1, 6, 2, 5, 1, 4, 6]
    wanted = [Made(*(each[:count] for each in made)) for made, count in zip(loop(decoder, PROMPTS, 6), counts, strict=True)]
    check(forward.generate(params, decoder.fn, decoder.carry, PROMPTS, counts, chunk=CHUNK, group_size=3), wanted)
    made = forward.generate(params, decoder.fn, decoder.carry, iter(PROMPTS), counts, chunk=CHUNK).collect()
    assert [row.tolist() for row in made] == [each.tokens for each in wanted]


@pytest.mark.parametrize("group_size", [1, 2])
def test_nothing_of_a_sequence_is_left_for_the_next_in_its_place(decoder, forwards, group_size):
    forward, params = forwards(2)
    prompts = prompts_of(24, 1, 24, 2, 20, 1, 1, seed=3)  # long ones fill the caches of the short ones that follow
    wanted = loop(decoder, prompts, NUM_TOKENS)
    options = {"num_groups": 1, "group_size": group_size, "chunk": CHUNK}
    check(forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, **options), wanted)


def teacher_forced(decoder, prompt, tokens):
    """The logits before each token, on one device, given the tokens before it."""
    step, carry, found = jax.jit(decoder.fn), decoder.carry, []
    for token in [*prompt, *tokens[:-1]]:
        carry, logits = step(decoder.params, carry, np.array([[token]], np.int32))
        found.append(np.asarray(logits.reshape(-1, VOCAB)[-1], np.float32))
    return np.stack(found[len(prompt) - 1 :])


@pytest.mark.long
@pytest.mark.parametrize(
    ("param_dtype", "dtype", "group_size"),
    [("bfloat16", "bfloat16", 3), ("bfloat16", "bfloat16", 1), ("bfloat16", "float32", 1), ("float16", "float32", 3)],
)
def test_in_lower_precision_tokens_are_the_best_within_a_few_roundings(param_dtype, dtype, group_size):
    decoder = plain(param_dtype, dtype)
    forward, params = decoder.forward(2)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {param_dtype}
    prompts = PROMPTS[:5]
    tokens = list(forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, group_size=group_size, chunk=CHUNK))
    for number, prompt in enumerate(prompts):
        mine = [token for token in tokens if token.prompt == number]
        drawn = [token.token for token in mine]
        logits = teacher_forced(decoder, prompt, drawn)
        rounding = 8 * np.abs(logits).max() * float(jnp.finfo(dtype).eps)
        chosen = logits[np.arange(NUM_TOKENS), drawn]
        assert (chosen >= logits.max(-1) - rounding).all(), (number, logits.max(-1) - chosen)
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(NUM_TOKENS), drawn]
        np.testing.assert_allclose([token.logprob for token in mine], logprobs, atol=2 * rounding)


@pytest.mark.parametrize(
    "name", ["linen", *(pytest.param(name, marks=pytest.mark.long) for name in ("recurrent", "nnx", "gpt", "hugging-face"))]
)
def test_models_generate_unedited(name):
    decoder = MODELS[name]()
    forward, params = decoder.forward(2)
    prompts = prompts_of(1, 3, 8, 5, 17, 17, 17)
    wanted = loop(decoder, prompts, NUM_TOKENS)
    assert len({tuple(made.tokens) for made in wanted}) >= 3  # not one token for ever
    for group_size in (1,) if name == "hugging-face" else (1, 2):
        options = {"group_size": group_size, "chunk": 2 if name == "recurrent" else CHUNK}  # its loop is unrolled
        generation = forward.generate(params, decoder.fn, decoder.carry, prompts, NUM_TOKENS, **options)
        check(generation, wanted)
        assert name == "recurrent" or (generation.num_passes > sum(map(len, prompts))) == decoder.one_token


def test_prompts_of_an_iterator_whose_number_is_not_known_may_show_a_bar(decoder, forwards):
    forward, params = forwards(2)
    (wanted,) = loop(decoder, PROMPTS[:1], 2)
    made = forward.generate(params, decoder.fn, decoder.carry, iter(PROMPTS[:1]), 2, chunk=CHUNK, progress=True)
    assert [each.tolist() for each in made.collect()] == [wanted.tokens]


# Every kind of pipeline.

BATCH = np.random.default_rng(0).integers(0, VOCAB, (8, 7))
DECODER = plain()


def next_token_loss(params, batch):
    """The next-token loss of the decoder, with an empty carry for each example."""

    def one(row):
        return DECODER.fn(params, DECODER.carry, row[None, :-1])[1][0]

    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(one)(batch), batch[:, 1:]).mean()


def trained(num_stages=4, loss=next_token_loss, params=None, **options):
    """A pipeline after a step, and its state."""
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=num_stages, num_microbatches=4, **options)
    state = pipe.init(DECODER.params if params is None else params, BATCH)
    return pipe, pipe.step(state, BATCH)[0]


def wanted_of(params, decoder=DECODER):
    return loop(decoder._replace(params=jaxpp.gather(params)), SHORT, FEW)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_trained_pipeline_generates_with_its_parameters(num_stages):
    pipe, state = trained(num_stages)
    homes = [leaf.devices() for leaf in jax.tree.leaves(state.params)]
    wanted = wanted_of(state.params)
    assert wanted != loop(DECODER, SHORT, FEW), "the step has changed the tokens"
    for given in (state, state.params):
        check(pipe.generate(given, DECODER.fn, DECODER.carry, SHORT, FEW), wanted)
    assert [leaf.devices() for leaf in jax.tree.leaves(state.params)] == homes
    state, _ = pipe.step(state, BATCH)  # the next generation reads the new parameters
    check(pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, FEW), wanted_of(state.params))


SEVERAL = [
    pytest.param({"schedule": "interleaved"}, marks=pytest.mark.long),
    pytest.param({"devices": jax.devices()[:1]}, marks=pytest.mark.long),
    pytest.param({"schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param({"devices": jax.devices()[:2]}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", SEVERAL)
def test_several_stages_on_a_device(options):
    pipe, state = trained(4, **options)
    assert len({device for leaf in jax.tree.leaves(state.params) for device in leaf.devices()}) < 4
    for group_size in (1, 3):
        check(pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, FEW, group_size=group_size), wanted_of(state.params))


RULES = {"qkv": P(None, "model"), "out": P("model", None), "mlp": P(None, "model")}
SHARDINGS = jax.tree_util.tree_map_with_path(lambda path, _: RULES.get(getattr(path[-1], "key", None), P()), DECODER.params)


@pytest.mark.long
def test_stages_on_a_mesh_with_tensor_parallelism():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "model"))
    pipe, state = trained(2, mesh=mesh, shardings=SHARDINGS)
    assert len(state.params["layers"][0]["qkv"].devices()) == 2
    check(pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, FEW, group_size=2, chunk=8), wanted_of(state.params))


REPLICAS = {
    "two": {"data_parallel": 2},
    "two that divide parameters": {"data_parallel": 2, "shard": "parameters"},
    "three": {"data_parallel": 3, "devices": jax.devices()[:6]},
    "with shards": {"mesh": Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "model")), "shardings": SHARDINGS},
}
SIX = np.concatenate([BATCH, BATCH[:4]])  # which three replicas share


ON_REPLICAS = [
    pytest.param(name, size, marks=pytest.mark.long) for name in REPLICAS for size in (1, 2) if (name, size) != ("two", 1)
]


@pytest.mark.parametrize(("name", "group_size"), [("two", 1), *ON_REPLICAS])
def test_replicas_share_the_prompts_and_make_the_tokens_of_one(name, group_size):
    pipe = jaxpp.Pipeline(next_token_loss, optax.adam(1e-2), num_stages=2, num_microbatches=2, **REPLICAS[name])
    state, _ = pipe.step(pipe.init(DECODER.params, SIX), SIX)
    decoder, options = DECODER._replace(params=jaxpp.gather(state.params)), {"sample": SAMPLES["top-k"], "key": KEY}
    ran, held = set(), live()

    def see(instruction, slots):
        ran.update(device for slot in instruction.outputs for device in slots[slot].devices())

    for prompts in (PROMPTS, [SHORT[1]] * 5 + [SHORT[2]]):  # equal prompts are run once
        given = {**options, "group_size": group_size, "chunk": CHUNK}
        generation = pipe.generate(state, DECODER.fn, DECODER.carry, prompts, NUM_TOKENS, **given)
        generation.observer = see
        check(generation, loop(decoder, prompts, NUM_TOKENS, **options))
        assert ran == set(pipe.engine.options.devices)
        ran.clear()
    del generation
    assert live() == held, "parameters are not copied for a replica"


@pytest.mark.long
def test_a_generation_over_replicas_is_forecast_and_profiled_and_names_a_step_that_consumes_its_state():
    pipe, state = trained(2, data_parallel=2)
    generation = pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, FEW)
    alone, params = trained(2)
    expected = alone.generate(params, DECODER.fn, DECODER.carry, SHORT, FEW).forecast()
    assert list(generation.forecast().peaks.values()) == list(expected.peaks.values())
    assert generation.profile(num_passes=6, num_runs=1).bubble_fraction >= 0
    next(generation)
    pipe.step(state, BATCH)
    with pytest.raises(StateError, match="consumed by a step while the generation was open"):
        list(generation)


def with_task(params, task_params):
    return {**params, "last": params["last"] + task_params["delta"]}


def task_fn(params, task_params, carry, tokens):
    return DECODER.fn(with_task(params, task_params), carry, tokens)


@pytest.mark.long
def test_with_the_parameters_of_a_task():
    rng = np.random.default_rng(1)
    tasks = {name: {"delta": rng.normal(size=(16, 16)).astype("f")} for name in ("cat", "dog")}
    bank = jaxpp.Bank(tasks, optax.adam(1e-2))
    loss = lambda params, task_params, batch: next_token_loss(with_task(params, task_params), batch)  # noqa: E731
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=2, num_microbatches=2, bank=bank)
    state = pipe.init(DECODER.params, BATCH)
    state, _ = pipe.step(state, BATCH, task="cat")
    found = []
    for name in tasks:
        decoder = DECODER._replace(params=with_task(jaxpp.gather(state.params), bank.params(name)))
        wanted = loop(decoder, SHORT, FEW)
        found.append(wanted)
        check(pipe.generate(state, task_fn, DECODER.carry, SHORT, FEW, task=name), wanted)
    assert found[0] != found[1]
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=2, num_microbatches=2, bank=bank, data_parallel=2)
    state = pipe.init(jaxpp.gather(state.params), BATCH)
    for name, wanted in zip(tasks, found, strict=True):
        check(pipe.generate(state, task_fn, DECODER.carry, SHORT, FEW, task=name), wanted)
    with pytest.raises(ArgumentError, match="a prompt is continued on any replica, so all replicas have the same task"):
        pipe.generate(state, task_fn, DECODER.carry, SHORT, FEW, task=list(tasks))


# What is refused, and how a generation ends.


def with_logits(change):
    """The decoder with its logits changed."""

    def fn(params, carry, tokens):
        carry, logits = SMALL.fn(params, carry, tokens)
        return carry, change(logits)

    return fn


def with_carry(change):
    """The decoder with its new carry changed."""

    def fn(params, carry, tokens):
        carry, logits = SMALL.fn(params, carry, tokens)
        return change(carry), logits

    return fn


def shorter(carry):
    return {**carry, "layers": [{"k": each["k"][:, 1:], "v": each["v"].astype("bfloat16")} for each in carry["layers"]]}


def fed_back(params, carry, tokens):
    own, logits = SMALL.fn({**params, "positions": params["positions"] + carry["fed"]}, carry["own"], tokens)
    return {"own": own, "fed": logits[0, -1, :WIDTH]}, logits


WRONG = {
    "no pair": {"fn": lambda *given: SMALL.fn(*given)[1]},
    "nothing": {"fn": lambda *_: None},
    "three": {"fn": lambda *given: (*SMALL.fn(*given), 1)},
    "a carry of another shape": {"fn": with_carry(shorter)},
    "a carry without its caches": {"fn": with_carry(lambda carry: {"position": carry["position"]})},
    "logits without a batch": {"fn": with_logits(lambda logits: logits[0, -1])},
    "integers": {"fn": with_logits(lambda logits: logits.argmax(-1))},
    "a dict": {"fn": with_logits(lambda logits: {"logits": logits})},
    "a leaf of all stages": {"fn": fed_back, "carry": {"own": SMALL.carry, "fed": jnp.zeros(WIDTH)}},
    "no function": {"fn": 3},
    "numbers in the carry": {"carry": {**SMALL.carry, "position": 0}},
    "shapes": {"carry": jax.eval_shape(lambda: SMALL.carry)},
    "an empty prompt": {"prompts": [[1], []]},
    "floats": {"prompts": [[1.5]]},
    "two axes": {"prompts": [np.ones((2, 3), int)]},
    "long prompts": {"prompts": prompts_of(30, 3, 29)},
    "no room": {"max_length": 10},
    "more tokens than the carry has room for": {"max_length": 10**6},
    "no prompts": {"prompts": []},
    "counts": {"num_groups": 0, "group_size": -1, "chunk": 1.5, "max_length": 0},
    "tokens of another vocabulary": {"prompts": [[1, 2], [22, 23]]},
    "no tokens": {"num_tokens": 0},
    "a stop of text": {"stop": "end"},
    "a sample": {"sample": "beam"},
    "a sample of floats": {"sample": lambda logits, _: logits.max()},
    "a number as key": {"key": 3},
    "floats as key": {"key": jnp.ones(3)},
    "several keys": {"key": jax.random.split(jax.random.key(0))},
    "several raw keys": {"key": np.zeros((2, 2), np.uint32)},
    "params of another model": {"params": {"w": jnp.ones(3)}},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_runs(two_stages, monkeypatch, name):
    forward, params = two_stages
    known = {"params": params, "fn": SMALL.fn, "carry": SMALL.carry, "prompts": SHORT, "num_tokens": FEW} | WRONG[name]
    monkeypatch.setattr("jaxpp.forward.ring.execute", lambda *_: pytest.fail("a device has worked"))
    error = messages.check("generate", WRONG, name, lambda: forward.generate(known.pop("params"), **known))
    assert re.match(r"[^\n]+\.\n  Got: (.|\n)+\.\n  Fix: [^\n]+\.$", str(error))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # the loss takes the first example of each microbatch alone
def test_pipelines_that_do_not_generate():
    def loss_fn(params, batch):
        return SMALL.fn(params, SMALL.carry, batch[:1])[1].mean()

    def loss_with_state(params, state, batch):
        return loss_fn(params, batch), (state, ())

    batch, given = jnp.ones((2, 3), int), (SMALL.fn, SMALL.carry, SHORT, FEW)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1)
    with pytest.raises(StateError, match=r"pipe.generate: .*\n.*no call of either has finished yet"):
        pipe.generate(SMALL.params, *given)
    pipe = jaxpp.Pipeline(loss_with_state, optax.sgd(0.1), num_stages=1, num_microbatches=1, has_state=True)
    state = pipe.init((SMALL.params, {"mean": jnp.zeros(())}), batch)
    with pytest.raises(ArgumentError, match=r"pipe.generate: .*\n  Got: has_state=True\.\n  Fix: close over the model state"):
        pipe.generate(state, *given)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1, data_parallel=2)
    state = pipe.init(SMALL.params, batch)

    def together(params, carry, tokens):
        carry, logits = SMALL.fn(params, carry, tokens)
        return carry, jax.lax.pmean(logits, "data")

    with pytest.raises(ArgumentError, match="a replica continues its own sequences, whatever the others do"):
        pipe.generate(state, together, *given[1:])


@pytest.mark.parametrize("kind", ["raw", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("numpy", "rbg"))])
def test_other_kinds_of_keys(two_stages, kind):
    forward, params = two_stages
    key = {"raw": jax.random.PRNGKey(5), "numpy": np.array([0, 5], np.uint32), "rbg": jax.random.key(5, impl="rbg")}[kind]
    sample = jaxpp.Sampling(temperature=2.0)
    typed = key if kind == "rbg" else jax.random.key(5)
    made = forward.generate(params, SMALL.fn, SMALL.carry, SHORT, FEW, sample=sample, key=key, chunk=8).collect()
    assert [row.tolist() for row in made] == [each.tokens for each in loop(SMALL, SHORT, FEW, sample, typed)]


def test_what_the_model_raises_comes_out_as_it_is(two_stages):
    forward, params = two_stages

    def fn(params, carry, tokens):
        raise LookupError("mine")

    with pytest.raises(LookupError) as error:
        forward.generate(params, fn, SMALL.carry, SHORT, FEW)
    assert error.value.args == ("mine",)
    (note,) = [note for note in error.value.__notes__ if note.startswith("jaxpp: raised while tracing fn with i32[")]
    assert note.endswith("beside its parameters")
    assert "microbatch" not in note


def test_a_carry_for_four_sequences_is_named_where_the_model_stumbles_over_it(two_stages):
    forward, params = two_stages

    def fn(params, carry, tokens):
        assert carry["state"].shape[0] == len(tokens)
        return carry, jnp.zeros((1, 23))

    with pytest.raises(AssertionError) as error:
        forward.generate(params, fn, {"state": jnp.zeros((4, 8)), "position": jnp.int32(0)}, SHORT, FEW)
    (note,) = [note for note in error.value.__notes__ if "make the carry for one" in note]
    assert "each array of the carry is 4 long along its first axis" in note


def not_before(count, stop):
    """Greedy, but no sequence ends at the stop token before it has so many tokens of its own; nor repeats the last two."""

    def sample(logits, key, history):
        made = history.length - history.num_prompt
        last = history.tokens[history.length - jnp.array([1, 2])]
        logits = logits.at[jnp.where(last >= 0, last, 23)].set(-jnp.inf, mode="drop")
        return jnp.where(made < count, logits.at[stop].set(-jnp.inf), logits).argmax()

    return sample


def with_history(decoder, prompts, num_tokens, sample, key, room, stop=()):
    """The tokens of a loop over one sequence at a time on one device, for a rule that reads what there was."""
    step, found = jax.jit(decoder.fn), []
    for number, prompt in enumerate(prompts):
        carry, there = decoder.carry, [int(token) for token in prompt]
        for token in there:
            carry, logits = step(decoder.params, carry, np.array([[token]], np.int32))
        made = []
        while len(made) < num_tokens and not (made and made[-1] in stop):
            own = jax.random.fold_in(jax.random.fold_in(key, number), len(there))
            tokens = jnp.array(there + [-1] * (room - len(there)), jnp.int32)
            history = jaxpp.History(tokens, jnp.int32(len(prompt)), jnp.int32(len(there)))
            made.append(int(sample(logits[0, -1], own, history)))
            there.append(made[-1])
            carry, logits = step(decoder.params, carry, np.array([made[-1:]], np.int32))
        found.append(made)
    return found


RULES = {
    "a penalty": (jaxpp.Sampling(temperature=0.9, top_k=9, repetition_penalty=1.7, never=(3, 5)), ()),
    "a function": (not_before(4, 2), (2,)),
}


@pytest.mark.parametrize(
    ("rule", "group_size"), [("a function", 2), *(pytest.param("a penalty", size, marks=pytest.mark.long) for size in (1, 2))]
)
def test_a_rule_that_reads_what_a_sequence_has_had_draws_what_a_loop_draws(two_stages, rule, group_size):
    forward, params = two_stages
    (sample, stop), key, prompts = RULES[rule], jax.random.key(5), prompts_of(1, 11, 4, 9, 6)
    wanted = with_history(SMALL, prompts, 7, sample, key, 33, stop)
    options = {"sample": sample, "key": key, "chunk": 8, "group_size": group_size, "stop": stop, "num_groups": 2}
    made = forward.generate(params, SMALL.fn, SMALL.carry, prompts, 7, **options).collect()
    assert [row.tolist() for row in made] == wanted
    plain = jaxpp.Sampling(temperature=0.9, top_k=9) if rule == "a penalty" else None
    assert wanted != [each.tokens for each in loop(SMALL, prompts, 7, plain, key)]


@pytest.mark.long
def test_a_rule_that_reads_what_there_was_needs_to_know_how_long_a_sequence_may_be():
    decoder = MODELS["recurrent"]()
    forward, params = decoder.forward(1)
    options = {"sample": jaxpp.Sampling(repetition_penalty=1.2), "chunk": 1}
    with pytest.raises(ArgumentError, match="is told how long a sequence may be"):
        forward.generate(params, decoder.fn, decoder.carry, [[1, 2]], 3, **options)
    made = forward.generate(params, decoder.fn, decoder.carry, [[1, 2]], 3, max_length=5, **options).collect()
    assert made[0].shape == (3,)


def refused_at(token):
    """A rule of sampling, and a function, that fail where the likeliest token is this one."""

    def sample(logits, _):
        return jnp.where(logits.argmax() == token, 23 + token, logits.argmax())

    return sample, with_logits(lambda logits: jnp.where(logits.argmax(-1, keepdims=True) == token, jnp.nan, logits))


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("what", ["a token without a logit", "NaN"])
def test_what_is_no_token_ends_its_sequence_with_an_error_and_the_others_go_on(two_stages, what, group_size):
    forward, params = two_stages
    wanted = [each.tokens for each in loop(SMALL, SHORT, FEW)]
    token = next(token for token in wanted[0] if any(token not in tokens for tokens in wanted))
    sample, fn = refused_at(token)
    options = {"sample": sample} if what != "NaN" else {}
    fn = fn if what == "NaN" else SMALL.fn
    generation = forward.generate(params, fn, SMALL.carry, SHORT, FEW, chunk=8, group_size=group_size, **options)
    made, errors = [[] for _ in SHORT], []
    while True:
        try:
            each = next(generation)
            made[each.prompt].append(each.token)
        except OutputError as error:
            errors.append(str(error))
        except StopIteration:
            break
    assert made == [tokens[: tokens.index(token)] if token in tokens else tokens for tokens in wanted]
    stopped = [number for number, tokens in enumerate(wanted) if token in tokens]
    assert sorted(int(re.search(r"of prompt (\d+)", error).group(1)) for error in errors) == stopped
    told = "Got: NaN for token" if what == "NaN" else f"Got: {23 + token} where there are logits for 23 tokens, for token"
    assert all(told in error for error in errors), errors


def test_a_prompt_that_is_none_comes_out_at_its_place_and_the_others_go_on(two_stages):
    forward, params = two_stages
    prompts = [SHORT[0], [], SHORT[1], [0.5], SHORT[2]]
    generation, tokens, wrong = forward.generate(params, SMALL.fn, SMALL.carry, iter(prompts), FEW, chunk=8), [], []
    while True:
        try:
            tokens.append(next(generation))
        except BatchError as error:
            wrong.append(re.search(r"Got: (prompt \d)", str(error)).group(1))
        except StopIteration:
            break
    assert wrong == ["prompt 1", "prompt 3"]
    wanted = loop(SMALL, SHORT[:3], FEW)
    for number, made in zip((0, 2, 4), wanted, strict=True):
        assert [token.token for token in tokens if token.prompt == number] == made.tokens
    assert [row.tolist() for row in generation.collect()] == [[]] * 3


def test_after_the_iterator_of_prompts_has_raised_the_others_are_finished(two_stages):
    forward, params = two_stages

    def prompts():
        yield SHORT[0]
        raise OSError("the disk is gone")

    generation = forward.generate(params, SMALL.fn, SMALL.carry, prompts(), FEW, chunk=8)
    with pytest.raises(OSError, match="the disk is gone") as error:
        generation.collect()
    assert any("prompt 1" in note for note in error.value.__notes__)
    assert sum(1 for _ in generation) > 0


@pytest.mark.parametrize("group_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_after_ctrl_c_at_any_time_collect_goes_on_and_nothing_is_left_behind(two_stages, group_size, ctrl_c):
    # It was broken off, and collect() lost all that it had collected.
    forward, params = two_stages
    wanted = [made.tokens for made in loop(SMALL, SHORT[:2], 3)]

    def generation():
        return forward.generate(params, SMALL.fn, SMALL.carry, SHORT[:2], 3, group_size=group_size, chunk=8)

    generation().collect()
    before = live()

    def press(instruction, slots):
        nonlocal presses
        presses -= 1
        if not presses:
            signal.raise_signal(signal.SIGINT)

    for number in (1, 6, 15):
        interrupted, presses = generation(), number
        interrupted.observer = press
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupted.collect()
        assert "the generation goes on with its next token" in caught.value.__notes__[0]
        del caught
        assert [row.tolist() for row in interrupted.collect()] == wanted, number
        interrupted.close()
        del interrupted
        assert live() == before, number


def test_after_ctrl_c_wherever_python_handles_it_in_next_every_token_comes_once(two_stages, ctrl_c):
    forward, params = two_stages
    given = params, SMALL.fn, SMALL.carry, SHORT[:1], 2
    wanted, places = list(forward.generate(*given, chunk=8)), [(driver.__file__, {"__next__"}), (interrupts.__file__, None)]
    for number in itertools.count(1):
        generation, found = forward.generate(*given, chunk=8), []
        try:
            with CtrlCAt(places, number) as ctrl_c_at:
                found.extend(generation)
        except KeyboardInterrupt:
            found.extend(generation)
        assert found == wanted, number
        if ctrl_c_at.seen < number:
            break
    assert number > 40


def test_ctrl_c_pressed_again_breaks_off_what_does_not_answer(two_stages, ctrl_c, monkeypatch):
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.0)
    forward, params = two_stages

    def prompts():
        yield SHORT[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield pytest.fail("the second is not held back")

    generation = forward.generate(params, SMALL.fn, SMALL.carry, prompts(), FEW, chunk=8)
    with pytest.raises(KeyboardInterrupt) as error:
        generation.collect()
    assert "broke off the generation; the parameters are as they were" in error.value.__notes__[0]
    for _ in range(2):
        with pytest.raises(StateError, match=r"broken off before its end\.\n  Fix: call generate again"):
            generation.collect()
        generation.close()  # which does not make it look complete


def test_a_generation_that_is_dropped_frees_its_carries_at_once(two_stages):
    # Until the garbage collector ran, in a notebook where a cell was interrupted: two sets of carries when it was run again.
    forward, params = two_stages

    def alive():
        return sum(not array.is_deleted() for array in jax.live_arrays())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        generation = forward.generate(params, SMALL.fn, SMALL.carry, SHORT, FEW, chunk=8)
        next(generation)
        during = alive()
        del generation
        after = alive()
    finally:
        gc.enable()
    assert during > before + 8 and after == before


def test_what_was_collected_is_given_once(two_stages):
    forward, params = two_stages
    generation = forward.generate(params, SMALL.fn, SMALL.carry, SHORT, FEW, chunk=8)
    assert [len(row) for row in generation.collect()] == [FEW] * len(SHORT)
    assert [len(row) for row in generation.collect()] == [0] * len(SHORT)


def test_a_step_that_consumes_the_parameters_of_a_generation_is_named():
    # XLA's own error said that an array was deleted, and not why.
    pipe = jaxpp.Pipeline(
        lambda params, batch: (params["last"] ** 2).mean() + 0 * batch.sum(), optax.sgd(0.1), num_stages=1, num_microbatches=1
    )
    state = pipe.init(SMALL.params, np.ones((2, 3), np.float32))
    generation = pipe.generate(state, SMALL.fn, SMALL.carry, SHORT, FEW, chunk=8)
    next(generation)
    pipe.step(state, np.ones((2, 3), np.float32))
    with pytest.raises(StateError, match=r"arrays were consumed by a step(.|\n)*Fix: .*donate=False"):
        generation.collect()


@pytest.mark.long
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
        generation = forward.generate(params, SMALL.fn, SMALL.carry, SHORT, FEW, chunk=8, progress=how != "off")
        next(generation)
        if how in ("all", "off"):
            assert len(list(generation)) == len(SHORT) * FEW - 1
        elif how == "close":
            generation.close()
        del generation
        gc.collect()
    assert len(shown) == 3 and all(bar.disable for bar in shown), "a closed bar is disabled"
    assert shown[0].n == shown[0].total == len(SHORT) * FEW
    assert sys.stderr.getvalue().endswith("\r")
