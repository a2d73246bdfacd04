"""Generation over every kind of pipeline: trained ones, with a bank, on a mesh, with several stages on a device."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.decoders import VOCAB, loop, plain, prompts_of
from tests.forward.test_generate import check

PROMPTS, NUM_TOKENS = prompts_of(2, 9, 1, 12, 8), 5
BATCH = np.random.default_rng(0).integers(0, VOCAB, (8, 7))
DECODER = plain()


def loss_fn(params, batch):
    """The next-token loss of the decoder, with an empty carry for each example."""

    def one(row):
        return DECODER.fn(params, DECODER.carry, row[None, :-1])[1][0]

    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(one)(batch), batch[:, 1:]).mean()


def trained(num_stages=4, loss=loss_fn, params=None, **options):
    """A pipeline after a step, and its state."""
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=num_stages, num_microbatches=4, **options)
    state = pipe.init(DECODER.params if params is None else params, BATCH)
    return pipe, pipe.step(state, BATCH)[0]


def wanted_of(params, decoder=DECODER):
    return loop(decoder._replace(params=jaxpp.gather(params)), PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_trained_pipeline_generates_with_its_parameters(num_stages):
    pipe, state = trained(num_stages)
    homes = [leaf.devices() for leaf in jax.tree.leaves(state.params)]
    wanted = wanted_of(state.params)
    assert wanted != loop(DECODER, PROMPTS, NUM_TOKENS), "the step has changed the tokens"
    for given in (state, state.params):
        check(pipe.generate(given, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS), wanted)
    assert [leaf.devices() for leaf in jax.tree.leaves(state.params)] == homes
    state, _ = pipe.step(state, BATCH)  # the next generation reads the new parameters
    check(pipe.generate(state, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS), wanted_of(state.params))


SEVERAL = [{"schedule": "interleaved"}, {"devices": jax.devices()[:1]}]
FURTHER = [{"schedule": "zb-v"}, {"devices": jax.devices()[:2]}]


@pytest.mark.parametrize("options", [*SEVERAL, *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER)])
def test_several_stages_on_a_device(options):
    pipe, state = trained(4, **options)
    assert len({device for leaf in jax.tree.leaves(state.params) for device in leaf.devices()}) < 4
    check(pipe.generate(state, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS), wanted_of(state.params))
    check(pipe.generate(state, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, group_size=3), wanted_of(state.params))


def test_stages_on_a_mesh_with_tensor_parallelism():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "model"))
    rules = {"qkv": P(None, "model"), "out": P("model", None), "mlp": P(None, "model")}
    shardings = jax.tree_util.tree_map_with_path(lambda path, _: rules.get(getattr(path[-1], "key", None), P()), DECODER.params)
    pipe, state = trained(2, mesh=mesh, shardings=shardings)
    assert len(state.params["layers"][0]["qkv"].devices()) == 2
    check(pipe.generate(state, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, group_size=2, chunk=8), wanted_of(state.params))


def with_task(params, task_params):
    return {**params, "last": params["last"] + task_params["delta"]}


def task_fn(params, task_params, carry, tokens):
    return DECODER.fn(with_task(params, task_params), carry, tokens)


def test_with_the_parameters_of_a_task():
    rng = np.random.default_rng(1)
    tasks = {name: {"delta": rng.normal(size=(16, 16)).astype("f")} for name in ("cat", "dog")}
    bank = jaxpp.Bank(tasks, optax.adam(1e-2))
    loss = lambda params, task_params, batch: loss_fn(with_task(params, task_params), batch)  # noqa: E731
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=2, num_microbatches=2, bank=bank)
    state = pipe.init(DECODER.params, BATCH)
    state, _ = pipe.step(state, BATCH, task="cat")
    found = []
    for name in tasks:
        decoder = DECODER._replace(params=with_task(jaxpp.gather(state.params), bank.params(name)))
        wanted = loop(decoder, PROMPTS, NUM_TOKENS)
        found.append(wanted)
        check(pipe.generate(state, task_fn, DECODER.carry, PROMPTS, NUM_TOKENS, task=name), wanted)
    assert found[0] != found[1]
