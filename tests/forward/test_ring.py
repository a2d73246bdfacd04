"""Carries stay on their stages and change in place; whatever a model carries, nothing is copied, sent or left behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.forward import ring
from tests.decoders import ROOM, VOCAB, WIDTH, loop, plain, prompts_of, recurrent
from tests.forward.test_generate import check, live

PROMPTS, NUM_TOKENS = prompts_of(1, 9, 5, 2), 4
DECODER = plain(num_layers=2)


@pytest.fixture(scope="module")
def two_stages():
    return DECODER.forward(2)


class Watched:
    """Sees every pass: what was sent in it, and the carries before and after it."""

    def __init__(self, monkeypatch):
        self.sent, self.passes, self.before, self.after, self._hand_over = [], 0, [], [], ring.hand_over
        monkeypatch.setattr(ring, "hand_over", self)

    def __call__(self, parts, observer, threads):
        def see(instruction, slots):
            if instruction.about.sends:
                self.sent += [slots[slot] for slot in instruction.outputs]

        ((run, left),) = parts
        self.passes += 1
        self.before = [run.slots[slot] for slot in run.plan.inputs]
        self._hand_over([(run, left)], see, threads)
        self.after = run.results()


@pytest.mark.parametrize("group_size", [1, 3])
def test_only_tokens_and_activations_cross(two_stages, monkeypatch, group_size):
    forward, params = two_stages
    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts_of(1, 1), 20, group_size=group_size)
    first = next(generation)  # the casts and the tied embedding were sent when the first pass was compiled
    watched = Watched(monkeypatch)
    rest = list(generation)
    assert watched.passes > 10 and first.index == 0 and len(rest) == 39
    shapes = {value.shape for value in watched.sent}
    tokens, hidden = ((group_size, 1, 1), (group_size, 1, 1, WIDTH)) if group_size > 1 else ((1, 1), (1, 1, WIDTH))
    assert {shape for shape in shapes if len(shape) == len(hidden)} <= {hidden, hidden[1:], (group_size, 1, WIDTH)}, shapes
    assert len(watched.sent) == 2 * watched.passes, "the token to stage 0, and its activation to stage 1"
    assert {value.size for value in watched.sent} <= {np.prod(tokens), np.prod(hidden)}


@pytest.mark.parametrize("group_size", [1, 2])
def test_caches_change_in_place(two_stages, monkeypatch, group_size):
    forward, params = two_stages
    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts_of(1), 20, group_size=group_size, num_groups=1)
    watched = Watched(monkeypatch)
    next(generation)
    caches = [array for array in watched.after if array.shape[-2:] == (ROOM, WIDTH)]
    assert len(caches) == 4 and {tuple(array.devices()) for array in caches} == {(jax.devices()[k],) for k in (0, 1)}
    places = {array.unsafe_buffer_pointer() for array in caches}
    del caches
    for _ in range(10):
        next(generation)
    given = [array for array in watched.before if array.is_deleted() or array.shape[-2:] == (ROOM, WIDTH)]
    assert [array.is_deleted() for array in given if array.shape[-2:] == (ROOM, WIDTH)].count(False) == 1, "but for the positions"
    caches = [array for array in watched.after if array.shape[-2:] == (ROOM, WIDTH)]
    assert {array.unsafe_buffer_pointer() for array in caches} == places
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, DECODER.carry)))


@pytest.mark.long
@pytest.mark.parametrize("group_size", [1, 2])
def test_memory_is_flat(two_stages, group_size):
    forward, params = two_stages
    prompts = iter(prompts_of(*[1, 2] * 6))
    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts, 25, group_size=group_size)
    seen = [live() for count, _ in enumerate(generation) if count % 50 == 40]
    assert len(seen) == 6
    assert max(buffers for buffers, _ in seen) - min(buffers for buffers, _ in seen) < 20, (seen, "of passes under way")
    assert max(size for _, size in seen) < 1.05 * min(size for _, size in seen), seen


@pytest.mark.slow
def test_memory_is_flat_over_many_tokens():
    decoder = recurrent()
    forward, params = decoder.forward(2)
    generation = forward.generate(params, decoder.fn, decoder.carry, prompts_of(1, 2, 3, 4, 5), 2000, chunk=1)
    seen = [live()[1] for count, token in enumerate(generation) if count % 500 == 499 and not token.last]
    assert max(seen[:-2]) < 1.1 * min(seen[:-2]), seen


@pytest.mark.parametrize(
    ("how", "group_size"),
    [
        *(("close", 1), ("del", 2), ("break", 1), ("with", 2), ("collect", 2), ("never begun", 1)),
        *(pytest.param(how, 2, marks=pytest.mark.long) for how in ("close", "break", "never begun")),
    ],
)
def test_whoever_stops_early_leaves_nothing_alive(two_stages, how, group_size):
    forward, params = two_stages

    def run():
        generation = forward.generate(params, DECODER.fn, DECODER.carry, PROMPTS, NUM_TOKENS, group_size=group_size)
        if how == "collect":
            return generation, generation.collect()
        if how == "never begun":
            return None, generation.close()
        if how == "break":
            for _ in generation:
                break
            return None, None
        if how == "with":
            with generation:
                next(generation)
        next(generation, None)
        if how == "close":
            generation.close()
            generation.close()
        kept = None if how == "del" else generation
        assert kept is None or how == "with" or list(kept) == []
        return kept, None

    run()  # what is compiled once holds its constants
    before = live()
    kept = run()
    assert live() == before
    del kept


def test_a_second_generation_compiles_nothing():
    decoder, compiled = plain(num_layers=3), []
    forward, params = decoder.forward(2)

    def note(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        counts = []
        for seed, lengths in enumerate([(1, 8, 9), (2, 3, 4, 5, 6, 7), (10, 11, 12, 13, 14, 15, 16, 17, 23), (1, 8, 9)]):
            for group_size in (1, 3):
                compiled.clear()
                given = {"key": jax.random.key(seed), "group_size": group_size, "chunk": 8, "num_groups": 1 + seed % 3}
                forward.generate(params, decoder.fn, decoder.carry, prompts_of(*lengths), 3 + seed, **given).collect()
                counts.append(len(compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert counts[0] > 0, "the first generation compiles, so this counts what it should"
    assert counts[2:] == [0] * 6, counts


def test_prompts_in_chunks_that_fit_the_cache(two_stages):
    """The default chunk has twice the room of this cache."""
    forward, params = two_stages
    generation = forward.generate(params, DECODER.fn, DECODER.carry, prompts_of(17), 1)
    (token,) = generation
    assert token.last and generation.num_passes == 3, "two chunks of 8, and 1"


def test_a_prompt_may_fill_the_cache(two_stages):
    """The last token that is made does not enter the cache."""
    forward, params = two_stages
    prompts = prompts_of(ROOM + 1 - NUM_TOKENS, ROOM - NUM_TOKENS)
    wanted = loop(DECODER, prompts, NUM_TOKENS)
    for group_size in (1, 2):
        given = {"chunk": 8, "group_size": group_size}
        check(forward.generate(params, DECODER.fn, DECODER.carry, prompts, NUM_TOKENS, **given), wanted)


def carried_along(fn, **leaves):
    """The decoder with more in its carry, and ``fn(params, its carry, tokens, logits) -> (carry, logits)``."""

    def whole(params, carry, tokens):
        own, logits = DECODER.fn(params, carry["own"], tokens)
        more, logits = fn(params, {name: carry[name] for name in leaves}, tokens, logits)
        return {"own": own, **more}, logits

    return DECODER._replace(fn=whole, carry={"own": DECODER.carry, **leaves})


def swapped(params, carry, tokens, logits):
    del params
    a, b = (carry["a"], carry["b"])[:: -1 if tokens.shape[1] % 2 else 1]
    return {"a": a, "b": b}, logits + carry["a"]


def constant(params, carry, tokens, logits):
    del params, tokens
    return {**carry, "constant": jnp.float32(3)}, logits * carry["read"] * carry["constant"]


def keyed(params, carry, tokens, logits):
    del params
    for _ in range(tokens.shape[1]):
        carry = {"key": jax.random.split(carry["key"])[0]}
    return carry, logits + 3 * jax.random.normal(carry["key"], (VOCAB,))


def penalised(params, carry, tokens, logits):
    del params
    seen = carry["seen"].at[tokens[0]].set(True)
    return {"seen": seen}, jnp.where(seen, logits - 2, logits)


def window(params, carry, tokens, logits):
    del params, tokens
    return {"window": jnp.concatenate([carry["window"], logits[0]])[-3:]}, logits + carry["window"].sum(0)


ODD = {
    "leaves that change places": carried_along(swapped, a=jnp.arange(23.0), b=-3 * jnp.arange(23.0)[::-1]),
    "leaves that stay, and one set to a constant": carried_along(
        constant, unread=jnp.zeros(2), constant=jnp.float32(3), read=jnp.float32(2), empty=jnp.zeros((0, 3))
    ),
    "a key": carried_along(keyed, key=jax.random.key(3)),
    "the tokens so far, read by the last stage": carried_along(penalised, seen=jnp.zeros(VOCAB, bool)),
    "a window without a length": carried_along(window, window=jnp.zeros((3, VOCAB))),
}


COMMON = {"leaves that change places", "a key"}
ODD_CASES = [name if name == "leaves that change places" else pytest.param(name, marks=pytest.mark.long) for name in ODD]


@pytest.mark.parametrize("name", ODD_CASES)
def test_whatever_is_carried(name):
    decoder = ODD[name]
    forward, params = decoder.forward(2)
    wanted = loop(decoder, PROMPTS, NUM_TOKENS)
    assert name.startswith("leaves that stay") or [made.tokens for made in wanted] != [
        made.tokens for made in loop(DECODER, PROMPTS, NUM_TOKENS)
    ]
    for group_size in (1, 2) if name in COMMON else (1,):
        chunk = 1 if "window" in name else 8  # the logits of a whole chunk would go into the window at once
        generation = forward.generate(params, decoder.fn, decoder.carry, PROMPTS, NUM_TOKENS, group_size=group_size, chunk=chunk)
        check(generation, wanted)


def test_a_function_without_a_carry(two_stages):
    """A model of pairs of tokens."""

    def fn(params, carry, tokens):
        return carry, jnp.tanh(params["embed"][tokens] @ params["last"]) @ params["embed"].T

    forward, params = two_stages
    decoder = DECODER._replace(fn=fn, carry=())
    check(forward.generate(params, fn, (), PROMPTS, NUM_TOKENS), loop(decoder, PROMPTS, NUM_TOKENS))
