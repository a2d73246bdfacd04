"""Do models of other people train unedited? Those whose packages are installed, made small, in two stages. See README.md.

Each model is used as its authors publish it. The lines that a pipeline needs beside the loss of plain JAX end in ``# glue``, and
are counted. ``python -m experiments.zoo.public`` prints a row for each model: its package, the glue, the largest share of a step
that a stage has (50% would be even), and the difference of the loss from plain JAX on one device, after as many steps of the same
optimizer. ``pipe.verify`` has compared every gradient of a step by then; a difference ends in an error in place of the row.
"""

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import check_names, check_numbers
from experiments.results import Findings, columns, command
from jaxpp.errors import JaxppError

__all__ = ["MODELS", "Config", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Train models of other packages, those that are installed, as a pipeline and in plain JAX."
VOCABULARY, LENGTH, EXAMPLES, SIZE, CLASSES = 64, 16, 4, 16, 10

Loss = Callable[[Any, Any], Any]
Case = tuple[Loss, Any, Any]
"""A loss, its parameters, and a batch."""


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def text() -> dict[str, Any]:
    """Tokens, and those that follow them."""
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (EXAMPLES, LENGTH + 1), dtype=np.int32)
    return {"x": rows[:, :-1], "y": rows[:, 1:]}


def images() -> dict[str, Any]:
    """Pictures and their classes."""
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(EXAMPLES, SIZE, SIZE, 3)).astype("f"), "y": rng.integers(0, CLASSES, EXAMPLES, dtype=np.int32)}


def of_nnx(model: Any, call: Callable[[Any, Any], Any], batch: Any) -> Case:
    """A model of Flax NNX."""
    nnx: Any = importlib.import_module("flax.nnx")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)  # glue

    def loss_fn(params: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)  # glue
        return cross_entropy(call(model, batch["x"]), batch["y"])

    return loss_fn, params, batch


def of_linen(model: Any, batch: Any, pick: Callable[[Any], Any] = lambda out: out) -> Case:
    """A model of Flax Linen: its loss is that of plain JAX."""
    params = model.init(jax.random.key(0), batch["x"])
    return lambda params, batch: cross_entropy(pick(model.apply(params, batch["x"])), batch["y"]), params, batch


def of_equinox(model: Any, call: Callable[[Any, Any], Any], batch: Any) -> Case:
    """A model of Equinox, which computes one example."""
    eqx: Any = importlib.import_module("equinox")
    params, static = eqx.partition(model, eqx.is_inexact_array)  # glue

    def loss_fn(params: Any, batch: Any) -> Any:
        model = eqx.combine(params, static)  # glue
        return cross_entropy(jax.vmap(lambda x: call(model, x))(batch["x"]), batch["y"])

    return loss_fn, params, batch


def of_tunix(module: str, name: str, **options: Any) -> Case:
    """A language model of tunix."""
    found, nnx = importlib.import_module(f"tunix.models.{module}.model"), importlib.import_module("flax.nnx")
    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 2, "head_dim": 16, "num_kv_heads": 1}
    model = getattr(found, name)(found.ModelConfig(**sizes, **options), rngs=nnx.Rngs(0))
    positions, causal = np.tile(np.arange(LENGTH), (1, 1)), np.tril(np.ones((1, LENGTH, LENGTH), bool))

    def call(model: Any, x: Any) -> Any:
        return model(x, jnp.broadcast_to(positions, x.shape), None, jnp.broadcast_to(causal, (len(x), LENGTH, LENGTH)))[0]

    return of_nnx(model, call, text())


def qwen3() -> Case:
    """Qwen3 of tunix."""
    return of_tunix("qwen3", "Qwen3", vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-6)


def qwen2() -> Case:
    """Qwen2 of tunix."""
    return of_tunix("qwen2", "Qwen2", vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-6)


def llama3() -> Case:
    """Llama 3 of tunix."""
    return of_tunix("llama3", "Llama3", vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-6)


def gemma3() -> Case:
    """Gemma 3 of tunix, with a sliding window."""
    return of_tunix("gemma3", "Gemma3", num_embed=VOCABULARY, sliding_window_size=8, param_dtype=jnp.float32)


def mamba2() -> Case:
    """Mamba-2, a state-space model."""
    found, nnx = importlib.import_module("mamba2_jax"), importlib.import_module("flax.nnx")
    sizes = {"hidden_size": 32, "state_size": 16, "head_dim": 16, "chunk_size": 8, "num_hidden_layers": 2}
    model = found.Mamba2ForCausalLM(found.Mamba2Config(vocab_size=VOCABULARY, **sizes), rngs=nnx.Rngs(0))
    return of_nnx(model, lambda model, x: model(x)["logits"], text())


def mamba3() -> Case:
    """Mamba-3, a state-space model."""
    found, nnx = importlib.import_module("mamba3_jax"), importlib.import_module("flax.nnx")
    sizes = {"hidden_size": 32, "state_size": 16, "head_dim": 16, "chunk_size": 8, "num_hidden_layers": 2}
    model = found.Mamba3ForCausalLM(found.Mamba3Config(vocab_size=VOCABULARY, **sizes), rngs=nnx.Rngs(0))
    return of_nnx(model, lambda model, x: model(x)["logits"], text())


def equimo_vit() -> Case:
    """A vision transformer of Equimo."""
    found = importlib.import_module("equimo.models")
    sizes = {"img_size": SIZE, "in_channels": 3, "dim": 32, "patch_size": 4, "num_heads": [2], "depths": [2]}
    model = found.VisionTransformer(**sizes, num_classes=CLASSES, key=jax.random.key(0))
    call = lambda model, x: model(jnp.moveaxis(x, -1, 0), key=jax.random.key(0))  # noqa: E731
    return of_equinox(model, call, images())


def nano_moe() -> Case:
    """A mixture of experts in Linen."""
    found = importlib.import_module("nano_moe")
    config = found.NanoMoEConfig(vocab_size=VOCABULARY, n_layers=2, n_heads=2, d_model=32, d_ff=64, block_size=LENGTH)
    return of_linen(found.NanoMoE(config), text(), lambda out: out[0])


def tnt() -> Case:
    """A transformer in transformer in Linen."""
    found = importlib.import_module("transformer_in_transformer_flax.tnt")
    sizes = {"depth": 2, "image_size": SIZE, "patch_size": 16, "inner_dim": 8, "inner_heads": 2, "inner_dim_head": 4}
    config = found.TNTConfig(num_classes=CLASSES, **sizes, outer_dim=32, outer_heads=2, outer_dim_head=16)
    return of_linen(found.TransformerInTransformer(config), images())


def of_transformers(name: str, config: str, **options: Any) -> Case:
    """A language model of Hugging Face's transformers; version 4 is the last with Flax models. Its loss is that of plain JAX."""
    found = importlib.import_module("transformers")
    model = getattr(found, name)(getattr(found, config)(vocab_size=VOCABULARY, **options), input_shape=(1, LENGTH))
    return lambda params, batch: cross_entropy(model(batch["x"], params=params).logits, batch["y"]), model.params, text()


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2 * LENGTH}


def gpt2() -> Case:
    """GPT-2."""
    return of_transformers("FlaxGPT2LMHeadModel", "GPT2Config", n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)


def gpt_neo() -> Case:
    """GPT-Neo, every other layer of which attends locally."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    return of_transformers("FlaxGPTNeoForCausalLM", "GPTNeoConfig", max_position_embeddings=LENGTH, window_size=8, **sizes)


def llama_hf() -> Case:
    """Llama."""
    return of_transformers("FlaxLlamaForCausalLM", "LlamaConfig", intermediate_size=64, **SIZES)


def mistral() -> Case:
    """Mistral, with grouped queries."""
    return of_transformers("FlaxMistralForCausalLM", "MistralConfig", intermediate_size=64, num_key_value_heads=1, **SIZES)


def bert() -> Case:
    """BERT, with its head for masked tokens."""
    return of_transformers("FlaxBertForMaskedLM", "BertConfig", intermediate_size=64, **SIZES)


def roberta() -> Case:
    """RoBERTa, with its head for masked tokens."""
    return of_transformers("FlaxRobertaForMaskedLM", "RobertaConfig", intermediate_size=64, **SIZES)


def electra() -> Case:
    """ELECTRA, with its head for masked tokens."""
    return of_transformers("FlaxElectraForMaskedLM", "ElectraConfig", intermediate_size=64, embedding_size=32, **SIZES)


def bloom() -> Case:
    """BLOOM, with ALiBi."""
    return of_transformers("FlaxBloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=2)


def haiku_mlp() -> Case:
    """The multilayer perceptron of Haiku."""
    hk: Any = importlib.import_module("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 64, 64, CLASSES])(x.reshape(len(x), -1))))
    batch = images()
    params = model.init(jax.random.key(0), batch["x"])
    return lambda params, batch: cross_entropy(model.apply(params, batch["x"]), batch["y"]), params, batch


def equinox_mlp() -> Case:
    """The multilayer perceptron of Equinox."""
    eqx: Any = importlib.import_module("equinox")
    model = eqx.nn.MLP(SIZE * SIZE * 3, CLASSES, 64, 4, key=jax.random.key(0))
    return of_equinox(model, lambda model, x: model(x.ravel()), images())


MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "Qwen3": ("google-tunix", qwen3),
    "Qwen2": ("google-tunix", qwen2),
    "Llama 3": ("google-tunix", llama3),
    "Gemma 3": ("google-tunix", gemma3),
    "Mamba-2": ("mamba2-jax", mamba2),
    "Mamba-3": ("mamba3-jax", mamba3),
    "ViT of Equimo": ("equimo", equimo_vit),
    "NanoMoE": ("nano-moe-jax", nano_moe),
    "TNT": ("transformer-in-transformer-flax", tnt),
    "GPT-2": ("transformers", gpt2),
    "GPT-Neo": ("transformers", gpt_neo),
    "Llama": ("transformers", llama_hf),
    "Mistral": ("transformers", mistral),
    "BERT": ("transformers", bert),
    "RoBERTa": ("transformers", roberta),
    "ELECTRA": ("transformers", electra),
    "BLOOM": ("transformers", bloom),
    "MLP of Haiku": ("dm-haiku", haiku_mlp),
    "MLP of Equinox": ("equinox", equinox_mlp),
}
"""The package of each model, and what makes it."""
FRAMES = {"of_nnx": of_nnx, "of_equinox": of_equinox}


@dataclass(frozen=True)
class Config:
    """Which models.

    Attributes:
        models: their names; all that are installed unless given.
        stages: pipeline stages.
        microbatches: parts of a batch of four examples.
        steps: of the optimizer.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ()
    stages: int = 2
    microbatches: int = 2
    steps: int = 10
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, MODELS)
        check_numbers(self)


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        model: its name.
        package: its package, with the version.
        num_params: parameters.
        glue: lines that a pipeline needs beside the loss of plain JAX.
        share: the largest part of a step that one stage has.
        before: the first loss.
        after: the last.
        error: its difference from that of plain JAX, as a part of it.
        failed: why there is nothing else, if so.
    """

    model: str
    package: str
    num_params: int = 0
    glue: int = 0
    share: float = 0.0
    before: float = 0.0
    after: float = 0.0
    error: float = 0.0
    failed: str = ""


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model.
    """

    config: Config
    rows: tuple[Row, ...]


def glue_of(make: Callable[[], Case]) -> int:
    """The marked lines of what makes a model, and of the functions that it leaves the loss to."""
    called = inspect.getsource(make) + (inspect.getsource(of_tunix) if "of_tunix(" in inspect.getsource(make) else "")
    sources = [called, *(inspect.getsource(each) for name, each in FRAMES.items() if f"{name}(" in called)]
    return sum(line.rstrip().endswith("# glue") for source in sources for line in source.splitlines())


def plain_losses(
    loss_fn: Loss, params: Any, batch: Any, optimizer: optax.GradientTransformation, config: Config
) -> Iterator[float]:
    """The losses of the same steps on one device: gradient accumulation in plain JAX."""
    parts = [
        jax.tree.map(lambda leaf, k=k: np.array_split(leaf, config.microbatches)[k], batch) for k in range(config.microbatches)
    ]
    grad_fn, opt_state = jax.jit(jax.value_and_grad(loss_fn)), optimizer.init(params)
    for _ in range(config.steps):
        losses, grads = zip(*(grad_fn(params, part) for part in parts), strict=True)
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = optax.apply_updates(params, updates)
        yield float(sum(losses)) / len(losses)


def train(name: str, config: Config) -> Row:
    """Train one model as a pipeline and in plain JAX, and compare."""
    package, make = MODELS[name]
    try:
        package = f"{package} {importlib.metadata.version(package)}"
        loss_fn, params, batch = make()
    except (ImportError, AttributeError) as error:
        return Row(name, package, failed=f"not installed: {error}" if isinstance(error, ImportError) else str(error))
    optimizer = optax.sgd(0.1)
    pipe = jaxpp.Pipeline(loss_fn, optimizer, num_stages=config.stages, num_microbatches=config.microbatches)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxpp.UnevenStagesWarning)  # the table says how uneven such small models are
            state = pipe.init(params, batch)
        pipe.verify(state, batch)
        losses = []
        for _ in range(config.steps):
            state, metrics = pipe.step(state, batch)
            losses.append(float(metrics.loss))
    except JaxppError as error:
        return Row(name, package, failed=str(error).split("\n", maxsplit=1)[0])
    seconds = [stage.seconds for stage in pipe.stages]
    *_, plain = plain_losses(loss_fn, params, batch, optimizer, config)
    return Row(
        name,
        package,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(params)),
        glue=glue_of(make),
        share=max(seconds) / sum(seconds),
        before=losses[0],
        after=losses[-1],
        error=abs(losses[-1] - plain) / abs(plain),
    )


def run(config: Config) -> Result:
    """Train every model; a model that cannot be had, or is refused, has a row that says why."""
    ensure_devices(config.stages)
    return Result(config, tuple(train(name, config) for name in config.models or tuple(MODELS)))


def table(result: Result) -> str:
    """The result as text: a row a model."""
    cells = [["model", "package", "params", "glue", "largest share", "loss", "difference from plain JAX"]]
    for row in result.rows:
        found = [
            f"{row.num_params:,}",
            str(row.glue),
            f"{row.share:.0%}",
            f"{row.before:.3f} -> {row.after:.3f}",
            f"{row.error:.0e}",
        ]
        cells.append([row.model, row.package, *(found if not row.failed else [row.failed, *[""] * 4])])
    return "\n".join(columns(cells, left=range(len(cells[0]))))


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("zoo.public", Config, DESCRIPTION, run, table)


if __name__ == "__main__":
    main()
