"""Random models, one a seed: layers on x[batch, length, width] that differ in what their backward reads, joined in many ways."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tests import layers as with_state
from tests.layers import STATES, WAVE, clip, normalise

TOKENS = 7


@jax.custom_jvp
def soft_sign(x):
    return x / (1 + jnp.abs(x))


@soft_sign.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return soft_sign(x), t / (1 + jnp.abs(x)) ** 2


@jax.custom_vjp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 3, g, 0),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def damped(most, w, x):
    return jnp.tanh(x @ w)


def damped_backward(most, kept, g):
    w, x, y = kept
    g = jnp.where(jnp.abs(y) < most, g * (1 - y**2), 0.5 * g)
    return jnp.einsum("blv,blw->vw", x, g), g @ w.T


damped.defvjp(lambda most, w, x: (damped(most, w, x), (w, x, jnp.tanh(x @ w))), damped_backward)


def dense(p, x, batch, key):
    return x @ p["w"] + p["bias"]


def unbiased(p, x, batch, key):
    return x @ p["w"].T


def conv(p, x, batch, key):
    return jax.lax.conv_general_dilated(x, p["taps"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def attention(p, x, batch, key):
    q, k, v = (x @ p["heads"][i] for i in range(3))
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), q @ k.swapaxes(1, 2), -1e4)
    return jax.nn.softmax(scores) @ v


def layer_norm(p, x, batch, key):
    return normalise(x, {"scale": p["scale"], "bias": p["bias"]}, -1)


def batch_norm(p, x, batch, key):
    return normalise(x, {"scale": p["scale"], "bias": p["bias"]}, (0, 1))


def scaled(p, x, batch, key):
    return x * p["scale"] + p["bias"]


def positions(p, x, batch, key):
    return x * jnp.asarray(WAVE[: x.shape[1], None], x.dtype) + p["w"][jnp.arange(x.shape[1])]


def words(p, x, batch, key):
    return x + p["table"][batch["tokens"]]


def masked(p, x, batch, key):
    return x * (batch["tokens"] != 0)[..., None]


def dropout(p, x, batch, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def noise(p, x, batch, key):
    return x + p["scale"] * jax.random.normal(key, x.shape, x.dtype)


def pool(p, x, batch, key):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")


def peak(p, x, batch, key):
    return x - p["scale"] * x.max(-1, keepdims=True)


def route(p, x, batch, key):
    return jnp.einsum("blw,blwv->blv", x, p["heads"][x[..., :3].argmax(-1)])


def best(p, x, batch, key):
    values, places = jax.lax.top_k(x, 2)
    return x * values[..., :1] + places.sum(-1, keepdims=True) * p["scale"]


def in_order(p, x, batch, key):
    return jnp.sort(x, -1)


def running(p, x, batch, key):
    return jnp.cumsum(x, 1) / x.shape[1] + jax.lax.cummax(x, 1)


def loop(p, x, batch, key):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["heads"])[0]


def blocks(p, x, batch, key):
    def block(x, row):
        w, key = row
        y = jax.nn.gelu(normalise(x, {"scale": p["scale"], "bias": 0.1}, -1) @ w)
        return x + jnp.where(jax.random.bernoulli(key, 0.8, y.shape), jax.nn.relu(y) @ w.T, 0), y.max()

    x, tops = jax.lax.scan(block, x, (p["heads"], jax.random.split(key, 3)))
    return x + tops.mean()


def choice(p, x, batch, key):
    return jax.lax.cond(x[..., 0].sum() > 0.1, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["scale"], x)


def named(p, x, batch, key):
    return checkpoint_name(jnp.tanh(x), "tanh") * p["scale"]


def checkpointed(p, x, batch, key):
    return jax.checkpoint(lambda p, x: jax.nn.gelu(x @ p["w"]) * p["scale"])(p, x)


def half(p, x, batch, key):
    return jax.nn.gelu(x.astype("bfloat16") * p["scale"].astype("bfloat16")).astype(x.dtype)


def from_host(p, x, batch, key):
    given = jax.lax.stop_gradient(x)
    found = jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), given, vmap_method="sequential")
    return x * found


def frozen(p, x, batch, key):
    return x + jax.nn.relu(x @ jax.lax.stop_gradient(p["w"])) * jax.lax.stop_gradient(jax.nn.softmax(x))


def inner(p, x, batch, key):
    return x - 0.1 * jax.grad(lambda x: jnp.logaddexp(0, x @ p["w"]).sum())(x)


def experts(p, x, batch, key):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
    shares = (gates[..., None] * jax.nn.one_hot(chosen, 3, dtype=x.dtype)).sum(-2)
    return jnp.einsum("ble,blev->blv", shares, jnp.tanh(jnp.einsum("blw,ewv->blev", x, p["heads"])))


def rows(p, x, batch, key):
    for i in range(3):
        x = x + jnp.tanh(x @ p["heads"][i])
    return x


def own_rule(p, x, batch, key):
    return x + damped(0.5, p["w"], x)


def spectrum(p, x, batch, key):
    waves = jnp.asarray(np.fft.fft(np.eye(x.shape[-1])))  # XLA has no fft of doubles whose axis is sharded
    return ((x @ waves * p["turn"]) @ waves.conj()).real / x.shape[-1]


def quantised(p, x, batch, key):
    return x + jnp.tanh(x @ (p["codes"].astype(x.dtype) / 50) * p["scale"])


def keyed(p, x, batch, key):
    return x * (1 + 0.1 * jax.random.normal(p["secret"], x.shape[1:], x.dtype)) * p["scale"]


def single(p, x, batch, key):
    return x + jnp.sin(x.astype("float32") * p["single"]).astype(x.dtype)


def closed(p, x, batch, key):
    array, secret = closed_over()
    return x * array[: x.shape[1], None] + 0.1 * jax.random.normal(secret, x.shape[1:], x.dtype)


@functools.cache
def closed_over():
    with jax.ensure_compile_time_eval():
        return jnp.asarray(WAVE), jax.random.key(7)


SHAPES = {"w": "ww", "heads": "3ww", "taps": "3ww", "scale": "w", "bias": "w", "table": "tw"}
SHAPES |= {"gate": "w3", "turn": "w", "codes": "ww", "single": "w", "secret": "w"}
TYPES: dict[str, Callable[[Any], Any]] = {  # of parameters that are of another type than the others
    "turn": lambda x: jax.lax.complex(1 + x, x[::-1]),
    "codes": lambda x: jnp.round(9 * x).astype("int8"),
    "single": lambda x: x.astype("float32"),
    "secret": lambda x: jax.random.key(3),
}
LAYERS: dict[Callable[..., Any], str] = {
    dense: "w bias",
    unbiased: "w",
    conv: "taps",
    attention: "heads",
    layer_norm: "scale bias",
    batch_norm: "scale bias",
    scaled: "scale bias",
    positions: "w",
    words: "table",
    masked: "",
    dropout: "",
    noise: "scale",
    pool: "",
    peak: "scale",
    route: "heads",
    best: "scale",
    in_order: "",
    running: "",
    loop: "heads",
    blocks: "heads scale",
    choice: "w scale",
    named: "scale",
    checkpointed: "w scale",
    half: "scale",
    from_host: "",
    frozen: "w",
    inner: "w",
}
MORE: dict[Callable[..., Any], str] = {  # the seeds of other tests are of models without these
    experts: "gate heads",
    rows: "heads",
    own_rule: "w",
    spectrum: "turn",
    quantised: "codes scale",
    keyed: "scale secret",
    single: "single",
    closed: "",
}
STATEFUL: dict[Callable[..., Any], str] = {kind: " ".join(with_state.LAYERS[kind]) for kind in STATES}
"""Layers with model state: ``layer(params, state, x, mask, key) -> (x, state)``."""
PARAMETERS = LAYERS | MORE | STATEFUL
RANDOM = (dropout, noise, blocks)
ELEMENTWISE = (
    jax.nn.gelu,
    functools.partial(jax.nn.gelu, approximate=False),
    jax.nn.silu,
    jax.nn.relu,
    jax.nn.relu6,
    jax.nn.leaky_relu,
    jax.nn.elu,
    jax.nn.softmax,
    jax.nn.log_softmax,
    jnp.tanh,
    jnp.sin,
    jnp.abs,
    jnp.exp2,
    lambda x: jnp.sqrt(1 + x**2),
    lambda x: jnp.log1p(x**2) ** 1.5,
    lambda x: jnp.clip(x, -0.5, 0.5),
    lambda x: jnp.where(x > 0.1, x, x**3),
    lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x),
    lambda x: x * jnp.sign(x - 0.3) + jnp.floor(2 * x),
    lambda x: jnp.maximum(x, x[..., ::-1]),
    lambda x: jnp.remainder(x, 1.5),
    soft_sign,
    rounded,
    clip,
)
JOINS = ("none", "none", "none", "add", "mul", "where", "concatenate", "maximum", "stop")


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer is, whose parameters it has, which elementwise function follows, and what it is joined with."""

    kind: Callable[..., Any]
    owner: int
    after: Callable[..., Any]
    join: str
    source: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss, its parameters, one microbatch and a key; into how many stages it is to be cut, and which parameters are frozen.

    ``outputs(params, model_state, batch, key)`` are the logits, the new model state, and what the first layer returns.
    """

    layers: tuple[Layer, ...]
    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    key: Any
    stages: int
    frozen: frozenset[int]
    outputs: Callable[..., Any]
    model_state: Any

    def __str__(self) -> str:
        names = [
            f"{layer.kind.__name__}({layer.owner})+{getattr(layer.after, '__name__', 'gelu')}~{layer.join}" for layer in self.layers
        ]
        return f"{self.stages} stages of {' '.join(names)}, frozen {sorted(self.frozen)}"


def random_model(
    seed: int,
    dtype: str = "float32",
    kinds: Any = tuple(LAYERS),
    size: int = 4,
    width: int = 6,
    most: int = 8,
    without: frozenset[int] = frozenset(),
) -> Model:
    """The model of a seed, with two layers to ``most``; some of which may be left out, and nothing else changes."""
    rng, length = np.random.default_rng(seed), 4
    layers = random_layers(rng, kinds, most)
    sizes = {"w": width, "3": 3, "t": TOKENS}

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), dtype)

    def parameter(name):
        return TYPES.get(name, lambda x: x)(array(*(sizes[c] for c in SHAPES[name])))

    params: dict[str, Any] = {"embed": array(TOKENS, width), "head": array(width, TOKENS)}
    for k, layer in enumerate(layers):
        own = {name: parameter(name) for name in PARAMETERS[layer.kind].split()} if layer.owner == k else {}
        own |= {"join": array(2 * width, width)} if layer.join == "concatenate" else {}
        params |= {f"layer_{k}": own} if own else {}
    batch = {"tokens": jnp.asarray(rng.integers(0, TOKENS, (size, length))), "x": array(size, length, width)}
    floats = rng.random() < 0.5
    count = len(jax.tree.leaves(params))
    frozen = frozenset(k for k in range(count - 1) if rng.random() < 0.1) if rng.random() < 0.3 else frozenset()
    stages = int(rng.integers(1, 5))
    there = {k: layer for k, layer in enumerate(layers) if k not in without}
    special = {"count": jnp.asarray(1), "key": jax.random.key(seed)}
    model_state: dict[str, Any] = {}
    for k, layer in there.items():
        made = {
            name: special[name] if name in special else array(*(width for _ in word)) for name, word in states_of(layer).items()
        }
        model_state |= {f"layer_{k}": made} if made else {}
    outputs = outputs_of(there, len(layers), floats)

    def loss_fn(params, batch, key):
        logits = jax.nn.log_softmax(outputs(params, model_state, batch, key)[0])
        return -jnp.take_along_axis(logits, batch["tokens"][..., None], -1).mean()

    params = needed(params, there)
    return Model(tuple(there.values()), loss_fn, params, batch, jax.random.key(seed), stages, frozen, outputs, model_state)


def random_layers(rng: np.random.Generator, kinds: Any, most: int) -> list[Layer]:
    pick = lambda options: options[rng.integers(len(options))]  # noqa: E731
    layers: list[Layer] = []
    for k in range(rng.integers(2, most + 1)):
        tied = [layer for layer in layers if PARAMETERS[layer.kind]]
        earlier = pick(tied) if tied and rng.random() < 0.15 else None
        kind, owner = (earlier.kind, earlier.owner) if earlier else (pick(kinds), k)
        layers.append(Layer(kind, owner, pick(ELEMENTWISE), pick(JOINS), int(rng.integers(k + 1))))
    return layers


def states_of(layer: Layer) -> dict[str, str]:
    return STATES.get(layer.kind, {})


def needed(params: Any, there: dict[int, Layer]) -> Any:
    """The parameters without those of layers that are not there."""
    names = {"embed": None, "head": None} | {f"layer_{k}": None for k in there}
    names |= {f"layer_{layer.owner}": None for layer in there.values()}
    gone = {f"layer_{layer.owner}" for layer in there.values() if layer.owner not in there}  # of which a later layer reads all but
    return {
        name: {each: leaf for each, leaf in own.items() if each != "join"} if name in gone else own
        for name, own in params.items()
        if name in names
    }


def outputs_of(there: dict[int, Layer], count: int, floats: bool) -> Callable[..., Any]:
    """The function of layers by number, of which some of ``count`` are not there."""

    def outputs(params, model_state, batch, key):
        x = batch["x"] if floats else params["embed"][batch["tokens"]]
        seen, new = [x], {}
        for k in range(count):
            if layer := there.get(k):
                name, p = f"layer_{k}", params.get(f"layer_{layer.owner}")
                own_key = None if key is None else jax.random.fold_in(key, k)
                with jax.named_scope(name):
                    if states_of(layer):
                        x, new[name] = layer.kind(p, model_state[name], x, None, own_key)
                    else:
                        x = layer.kind(p, x, batch, own_key)
                    x = joined(layer.join, params.get(name), layer.after(x), seen[layer.source])
            seen.append(x)
        return x @ params["head"], new, seen[1]

    return outputs


def joined(how: str, p: Any, x: Any, early: Any) -> Any:
    made = {
        "none": lambda: x,
        "add": lambda: x + early,
        "mul": lambda: x * early,
        "where": lambda: jnp.where(early > 0, x, 0.5 * x),
        "concatenate": lambda: jnp.concatenate([x, early], -1) @ p["join"],
        "maximum": lambda: jnp.maximum(x, early),
        "stop": lambda: x + jax.lax.stop_gradient(jnp.exp(-(early**2))),
    }
    return made[how]()
