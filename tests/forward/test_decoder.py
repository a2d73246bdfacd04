"""Language models of three libraries, as what ``generate`` asks for of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpp
from jaxpp.errors import ArgumentError
from models.gpt import GPT
from models.nnx_gpt import NNXGPT
from tests.decoders import MODELS, ROOM, VOCAB, WIDTH, Decoder, _Linen, _Nnx, loop, prompts_of

PROMPTS, FEW = prompts_of(1, 5, 3), 6
SIZES = {"vocab_size": VOCAB, "max_length": ROOM, "width": WIDTH, "depth": 2, "num_heads": 2, "dropout": 0.0}


def hugging_face(name="GPT2LMHeadModel", **sizes):
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    kind = getattr(transformers, f"Flax{name}")
    return kind(kind.config_class(vocab_size=VOCAB, initializer_range=0.5, **sizes), seed=0)


LIBRARIES = {
    "linen": _Linen,
    "gpt": lambda: GPT(**SIZES),
    "nnx": lambda: _Nnx(nnx.Rngs(0)),
    "hugging-face": lambda: hugging_face(n_positions=ROOM, n_embd=WIDTH, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("name", ["linen", *(pytest.param(name, marks=pytest.mark.long) for name in LIBRARIES if name != "linen")])
def test_tokens_are_those_of_the_function_written_by_hand(name):
    by_hand, model = MODELS[name](), LIBRARIES[name]()
    fn, carry = jaxpp.decoder(model, ROOM)
    forward, params = Decoder(name, fn, by_hand.params, carry).forward(2)
    made = forward.generate(params, *jaxpp.decoder(model, ROOM), prompts=PROMPTS, num_tokens=FEW).collect()
    assert [row.tolist() for row in made] == [each.tokens for each in loop(by_hand, PROMPTS, FEW)]


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": ROOM,
}
PUBLIC = {
    "LlamaForCausalLM": TINY,
    "MistralForCausalLM": TINY | {"num_key_value_heads": 1},
    "GemmaForCausalLM": TINY | {"num_key_value_heads": 1, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"},
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "GPTJForCausalLM": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": ROOM, "rotary_dim": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_give_the_logits_that_they_give_without_a_cache(name):
    model = hugging_face(name, **PUBLIC[name])
    fn, carry = jaxpp.decoder(model, ROOM)
    tokens = np.array([[3, 5, 7, 2, 11]])
    carry, first = fn(model.params, carry, tokens[:, :3])
    _, rest = fn(model.params, carry, tokens[:, 3:])
    wanted = model(tokens, params=model.params).logits
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), wanted, rtol=2e-5, atol=2e-5)


class Plain(nn.Module):
    """Has no cache."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB)(nn.Embed(VOCAB, 4)(tokens))


def test_a_decoder_that_is_made_again_is_the_same_function_and_leaves_the_model_alone():
    model = NNXGPT(**SIZES, rngs=nnx.Rngs(0))
    before = jax.tree.structure(nnx.state(model))
    functions = [jaxpp.decoder(model, ROOM)[0] for _ in range(2)]
    assert functions[0] == functions[1] and hash(functions[0]) == hash(functions[1])
    assert jax.tree.structure(nnx.state(model)) == before
    assert jaxpp.decoder(_Linen(), ROOM)[0] == jaxpp.decoder(_Linen(), ROOM)[0]


class Drops(_Nnx):
    """Has random keys and running statistics too, which are neither parameters nor cache."""

    def __init__(self, rngs, scale=1.0):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.statistics = nnx.BatchStat(scale * jnp.arange(3.0))


def test_functions_of_models_with_other_state_are_equal_where_that_is():
    one, same, other = (jaxpp.decoder(Drops(nnx.Rngs(0), scale), ROOM)[0] for scale in (1.0, 1.0, 2.0))
    assert one == same and hash(one) == hash(same)
    assert one not in (other, 3)


@pytest.mark.parametrize("whole", [False, True])
def test_linen_parameters_come_with_or_without_their_collection(whole):
    model = GPT(**SIZES)
    params = model.init(jax.random.key(0), jnp.ones((1, ROOM), int))["params"]
    fn, carry = jaxpp.decoder(model, ROOM)
    tokens = jnp.array([[1, 2, 3]])
    logits = fn({"params": params} if whole else params, carry, tokens)[1]
    np.testing.assert_allclose(logits, model.apply({"params": params}, tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "length", "got"),
    [
        (lambda tokens: tokens, 8, "Got: <function"),
        (Plain(), 8, "Got: Plain with the collections params, and no cache among them."),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 8, "Got: Linear, in which nothing has the type nnx.Cache."),
        (_Linen(), 0, "Got: 0."),
    ],
)
def test_models_without_a_cache_are_refused(model, length, got):
    with pytest.raises(ArgumentError) as error:
        jaxpp.decoder(model, length)
    assert str(error.value).startswith("jaxpp.decoder(model, max_length): ") and got in str(error.value)
