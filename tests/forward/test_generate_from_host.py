"""A generation whose parameters wait in host memory: the tokens of one that has them on devices, of which two stages are there."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import StateError
from jaxpp.lowering.builder import MemoryCopy
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.stages.program import Role
from tests.decoders import VOCAB, Decoder, plain, prompts_of

LAYERS = 3
DECODER, ONE = plain(num_layers=LAYERS), {"devices": jax.devices()[:1]}
SHORT = prompts_of(9, 1, 17, 3)
AGAIN = [SHORT[2], SHORT[2], SHORT[0], SHORT[0], SHORT[0]]
SIZES = {"num_groups": 2, "group_size": 2, "chunk": 8}


@pytest.fixture(scope="module")
def forwards():
    """Over three stages on one device: resident, and with parameters in host memory."""
    return {host: DECODER.forward(LAYERS, host=host, **ONE) for host in (None, "params")}


def made(forward, prompts=SHORT, decoder=DECODER, num_tokens=3, **options):
    found, params = forward
    return sorted(found.generate(params, decoder.fn, decoder.carry, prompts, num_tokens, **SIZES | options))


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.size > 1}


CASES = {
    "groups side by side": {},
    "prompts that come again": {"prompts": AGAIN},
    "one sequence a group": {"group_size": 1},
    "sampled": {"sample": jaxpp.Sampling(temperature=1.3), "key": jax.random.key(4)},
    "one large group": {"num_groups": 1, "group_size": 4},
    "one token": {"num_tokens": 1},
    "numbers of their own": {"num_tokens": [1, 4, 2, 3]},
}


@pytest.mark.parametrize("case", [*list(CASES)[:2], *(pytest.param(case, marks=pytest.mark.long) for case in list(CASES)[2:])])
def test_tokens_and_probabilities_have_the_bits_of_a_resident_pipeline(forwards, case):
    expected = made(forwards[None], **CASES[case])
    assert made(forwards["params"], **CASES[case]) == expected
    assert len({token.prompt for token in expected}) == len(CASES[case].get("prompts", SHORT))


def passes(forwards, count):
    found, params = forwards["params"]
    ring = found.generate(params, DECODER.fn, DECODER.carry, SHORT, 3, **SIZES)._rings[0]
    return ring.together.prepare(np.zeros((2, 1, 1), np.int32), count)


@pytest.mark.parametrize("count", [1, 3])
def test_parameters_come_once_for_all_groups_and_those_of_a_stage_while_the_one_before_works(forwards, count):
    found, _ = forwards["params"]
    lines, owner = passes(forwards, count).bound.lines, found.engine.layout.owner
    brought = [(name.stage, name.ref.index) for line in lines if line.copies for name in line.outputs]
    read = {(stage, leaf) for stage, leaf in brought if owner[leaf] != stage}
    assert sorted(brought) == sorted({(stage, leaf) for leaf, stage in enumerate(owner)} | read)
    assert not any(line.copies == MemoryCopy.TO_HOST for line in lines)
    works = {(line.action.stage, line.action.microbatch): k for k, line in enumerate(lines) if line.program and line.action}
    assert list(works) == [(stage, group) for stage in range(LAYERS) for group in range(count)]
    for number, line in enumerate(lines):
        if line.copies and line.stage:
            assert number < works[line.stage - 1, 0], "before the stage before it begins"
            assert line.stage < 2 or number > works[line.stage - 2, count - 1], "and not before that one has the device alone"


def wide(width=64, num_layers=8) -> Decoder:
    """Eight layers with many parameters and a small carry."""

    def fn(params, carry, tokens):
        x, new = params["embed"][tokens], []
        for layer, before in zip(params["layers"], carry, strict=True):
            x = x + jnp.tanh(x @ layer) + before
            new.append(before + x.mean())
        return new, x @ params["embed"].T

    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    layers = [jax.random.normal(key, (width, width)) / 8 for key in keys[1:]]
    return Decoder(
        "wide", fn, {"embed": jax.random.normal(keys[0], (VOCAB, width)), "layers": layers}, [jnp.float32(0)] * num_layers
    )


def test_a_device_holds_two_stages_and_the_carries_as_forecast():
    decoder = wide()
    found, params = decoder.forward(8, host="params", **ONE)
    state, device = sum(leaf.nbytes for leaf in jax.tree.leaves(params)), jax.devices()[0]
    stages = [
        sum(leaf.nbytes for leaf, owner in zip(jax.tree.leaves(params), found.engine.layout.owner, strict=True) if owner == k)
        for k in range(8)
    ]
    generation = found.generate(params, decoder.fn, decoder.carry, SHORT, 3, progress=False, **SIZES)
    forecast = generation.forecast()
    gc.collect()
    before, most = live_bytes(device), [0]

    def look(instruction, slots):
        jax.block_until_ready([slots[k] for k in instruction.outputs])
        most[0] = max(most[0], live_bytes(device) - before)

    generation.observer = look
    tokens = generation.collect()
    assert [len(each) for each in tokens] == [3] * 4
    embed = params["embed"].nbytes
    assert most[0] <= 2 * max(stages) + embed + 4096 < state / 2, "and the table, which the last stage reads too"
    foreseen = forecast.liveness.levels[device].sum(axis=1).max()
    assert 0 <= foreseen - most[0] <= 0.06 * foreseen, "the empty carry was there before; tokens that were read"
    assert forecast.hosted[device] == state
    assert "a pass through the stages copies" in str(forecast)


def loss(params, tokens):
    logits = jax.vmap(lambda row: DECODER.fn(params, DECODER.carry, row[None])[1][0])(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def trained(host, **options):
    order = jaxpp.schedule.make("looped-bfs", num_ranks=2, num_microbatches=2, stages_per_rank=2)
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=4, num_microbatches=2, schedule=order, host=host, **options)
    state = pipe.init(DECODER.params, jnp.ones((4, 5), int))
    return pipe, pipe.step(state, jnp.ones((4, 5), int))[0]


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2}], ids=["two devices", "replicas"])
@pytest.mark.long
def test_a_trained_state_generates_from_host_memory(options):
    pipe, state = trained("params", **options)
    assert made((pipe, state), SHORT * 2) == made(trained(None, **options), SHORT * 2)
    assert kinds(state.params) == {"pinned_host"}


@pytest.mark.long
def test_with_the_optimizer_alone_in_host_memory_nothing_of_it_comes_to_the_devices():
    pipe, state = trained("optimizer")
    generation = pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, 3, **SIZES)
    forecast = generation.forecast()
    kept = {life.name.ref.role for life in forecast.liveness.lives if life.num_bytes > 4}
    assert Role.OPT not in kept and Role.PARAM in kept
    assert sum(forecast.hosted.values()) >= 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert sorted(generation) == made(trained(None))


@pytest.mark.long
def test_a_profile_shows_the_copies_and_each_group_as_a_pass(forwards):
    found, params = forwards["params"]
    profile = found.generate(params, DECODER.fn, DECODER.carry, SHORT, 3, **SIZES).profile(num_runs=1)
    assert len(profile.actions) == LAYERS * len(profile.passes)
    assert {each.beside for each in profile.passes if not each.is_prompt} == {0, 1}
    for number, each in enumerate(profile.passes):
        if each.awaits >= 0:
            ends = profile.actions[jaxpp.schedule.Action(LAYERS - 1, "F", each.awaits)].end
            assert ends <= profile.actions[jaxpp.schedule.Action(0, "F", number)].start + 1e-5
    assert any(span.copies for span in profile.spans)
    assert "groups" in str(profile)


@pytest.mark.long
def test_what_a_forward_with_parameters_in_host_memory_says_of_a_batch(forwards):
    tokens = jnp.ones((4, 3), int)
    (resident, there), (found, params) = forwards.values()
    np.testing.assert_array_equal(found.apply(params, tokens), resident.apply(there, tokens))
    np.testing.assert_array_equal(next(iter(found.stream(params, [tokens]))), resident.apply(there, tokens))
    assert kinds(params) == kinds(found.abstract_params(DECODER.params, tokens)) == {"pinned_host"}


@pytest.mark.long
def test_a_step_that_consumes_the_state_of_a_generation_is_named():
    pipe, state = trained("params")
    generation = pipe.generate(state, DECODER.fn, DECODER.carry, SHORT, 8, **SIZES)
    next(generation)
    pipe.step(state, jnp.ones((4, 5), int))
    with pytest.raises(StateError, match="a generation reads the state"):
        generation.collect()
