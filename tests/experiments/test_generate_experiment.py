"""The generate experiment: its loop on one device, its options, and a small run."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.generate.main import Config, main, run, summary
from experiments.generate.measure import ragged
from experiments.generate.one_thread import Recurrent
from experiments.generate.plain import Groups, Rule, chunks, draw, one_by_one
from experiments.generate.train import decoding
from models.gpt import GPT

MODEL = GPT(vocab_size=32, max_length=24, width=16, depth=1, num_heads=2)
GREEDY, SAMPLED = Rule(temperature=0, top_k=0), Rule(temperature=0.8, top_k=8)


TINY = Config(
    stages=2,
    groups=(2,),
    group_size=2,
    prompts=5,
    tokens=6,
    prompt=3,
    chunk=3,
    rounds=1,
    thread_steps=2,
    thread_tokens=3,
    width=32,
    depth=3,
    heads=2,
    length=16,
    batch=8,
    steps=2,
)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: MODEL.init(key, jnp.ones((1, 8), int), deterministic=True)["params"])(jax.random.key(0))


@pytest.fixture(scope="module")
def empty():
    cache = MODEL.clone(decode=True).init(jax.random.key(0), jnp.ones((1, 24), int))["cache"]
    return jax.tree.map(jnp.zeros_like, cache)


def without_a_cache(params, prompt, i, num_tokens, rule, key, stop):
    """The tokens that follow, where every token reads all tokens before it again."""
    read = jax.jit(lambda tokens: MODEL.apply({"params": params}, tokens, deterministic=True))
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        logits = read(jnp.asarray([tokens + [0] * (24 - len(tokens))]))  # no token reads what comes after it
        key_of_token = jax.random.fold_in(jax.random.fold_in(key, i), len(tokens))
        tokens.append(int(draw(logits[0, len(tokens) - 1], key_of_token, rule)))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@pytest.mark.long
@pytest.mark.parametrize("rule", [GREEDY, SAMPLED])
def test_one_device_generates_what_the_model_without_a_cache_does(params, empty, rule):
    prompts = ragged(np.arange(100) % 32, 4, 14, seed=0)
    assert [*map(len, prompts)] != [len(prompts[0])] * 4
    key = jax.random.key(3)
    expected = [without_a_cache(params, prompt, i, 10, rule, key, ()) for i, prompt in enumerate(prompts)]
    stop = {expected[0][5]}
    expected = [without_a_cache(params, prompt, i, 10, rule, key, stop) for i, prompt in enumerate(prompts)]
    assert len(expected[0]) <= 6
    found = one_by_one(jax.jit(decoding(MODEL)), params, empty, prompts, 10, rule=rule, key=key, stop=stop, chunk=8)
    assert [[drawn.token for drawn in sequence] for sequence in found] == expected
    logits = jnp.asarray(MODEL.apply({"params": params}, jnp.asarray([prompts[0]]), deterministic=True))[0, -1]
    np.testing.assert_allclose(found[0][0].logprob, jax.nn.log_softmax(logits)[expected[0][0]], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_groups_generate_what_one_sequence_after_the_other_does(params, empty, group_size):
    prompts, key = [[k, k + 1, k + 2] for k in range(4)], jax.random.key(3)
    expected = one_by_one(jax.jit(decoding(MODEL)), params, empty, prompts, 6, rule=SAMPLED, key=key, chunk=2)
    found = [[] for _ in prompts]
    for i, drawn in Groups(decoding(MODEL), SAMPLED, 2)(params, empty, prompts, 6, key, group_size):
        found[i].append(drawn.token)
    assert found == [[drawn.token for drawn in sequence] for sequence in expected]


def test_only_the_most_probable_tokens_are_sampled():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=32))
    found = {int(draw(logits, jax.random.key(k), Rule(2.0, 3))) for k in range(60)}
    assert found == set(np.argsort(logits)[-3:].tolist())


@pytest.mark.parametrize(("length", "chunk", "sizes"), [(75, 64, [64, 8, 1, 1, 1]), (5, 2, [2, 2, 1]), (3, 1, [1, 1, 1])])
def test_a_prompt_is_read_in_chunks_without_padding(length, chunk, sizes):
    assert chunks(length, chunk) == sizes


def test_the_stages_of_one_thread_carry_the_same_whatever_number_of_tokens_a_call_takes():
    model = Recurrent(2, 3, width=8)
    params, tokens = model.params, jnp.asarray([[1, 5, 2, 7]])
    carry, expected = model.decode(params, model.empty, tokens)
    now, found = model.empty, []
    for size in (1, 3):
        now, logits = model.decode(params, now, tokens[:, sum(map(len, found)) :][:, :size])
        found.append(logits[0])
    np.testing.assert_allclose(jnp.concatenate(found), expected[0], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), now, carry)


@pytest.fixture(scope="module")
def result():
    return run(TINY)


@pytest.mark.long
def test_a_small_run_has_the_tokens_of_one_device_caches_where_their_blocks_are_and_speeds(result):
    assert len(result.same) == 2
    for row in result.same:
        assert row.prompts > row.places == 4
        assert row.equal == row.tokens > 0
        assert row.logprob < 1e-5
    block = 2 * 16 * 32 * 4 + 4  # keys and values of 16 tokens, 32 features wide, in float32; and the index
    assert [row.caches for row in result.memory] == [4 * (2 * block + 4), 4 * block]  # the first stage counts positions too
    embedding = 256 * 32 * 4
    for row, tied in zip(result.memory, (0, embedding), strict=True):  # the last stage's transposed copy
        assert row.params > 0
        assert row.caches + tied <= row.generating < row.caches + tied + 4 * block  # tokens, keys, and a prompt being read
    assert [(row.groups, row.sequences) for row in result.speed] == [(2, 4)]
    assert all(rate > 0 for row in result.speed for rate in (row.pipeline, row.turns, row.together, row.ratio))
    assert result.one_thread.groups == (1, 2, 4)
    assert result.one_thread.faster[0] == 1
    text = summary(result)
    for head in (
        "2 training steps, loss ",
        "Tokens over the stages and on one device:",
        "Tokens a second:",
        "Bytes on each device:",
    ):
        assert head in text
    found = json.loads(result.to_json())
    assert found["same"][0]["equal"] == result.same[0].equal
    assert found["versions"]["jax"] == jax.__version__


@pytest.mark.long
def test_a_part_alone_runs_alone(monkeypatch):
    monkeypatch.setattr("experiments.generate.main.train", None)
    found = run(dataclasses.replace(TINY, parts=("one-thread",)))
    assert found.one_thread is not None
    assert (found.loss, found.same, found.speed, found.memory) == (None, (), (), ())


@pytest.mark.long
def test_a_folder_without_a_checkpoint_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["generate", "--checkpoint", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value) == (
        f"generate: --checkpoint {Path(tmp_path / 'none')}: nothing is saved there. "
        f"Fix: run python -m experiments.lm --checkpoint {tmp_path / 'none'} before, or leave it out to train here."
    )
