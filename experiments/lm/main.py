"""Does a language model trained through the pipeline learn as it does on one device? See README.md beside this file.

``Plain`` has the calls of ``jaxpp.Pipeline``, so everything below it is written once and runs either way.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jaxpp
from experiments.devices import ensure_devices
from experiments.lm import text
from experiments.options import ConfigError, check_multiple, check_numbers
from experiments.results import Findings, command
from jaxpp.runtime.progress import progress
from jaxpp.stages.loss.microbatch import check_batch, sizes
from models.gpt import GPT

__all__ = ["Config", "Plain", "Result", "main", "run"]

DESCRIPTION = "Train a GPT on text as bytes, pipelined over several devices, or with --plain on one."
NUM_PRINTED = 20  # losses of the first steps, to compare by eye with --plain


@dataclass(frozen=True)
class Config:
    """A GPT, the text it reads and the devices it is trained on.

    Attributes:
        stages: pipeline stages, one a device.
        microbatches: parts of a batch.
        schedule: order of the actions, such as naive, gpipe or 1f1b.
        plain: train on one device, with one jax.jit step and no pipeline.
        width: features of the residual stream.
        depth: transformer blocks.
        heads: attention heads a block.
        length: tokens of a sequence; a token is a byte.
        batch: sequences a step.
        steps: optimizer steps.
        lr: the highest learning rate, after a warm-up and before a cosine decay to a tenth of it.
        dropout: rate.
        dtype: type to compute in; parameters are float32.
        eval_every: steps between losses on the held-out text.
        eval_batches: held-out batches each time.
        seed: of the parameters, the batches, the dropout and the sample.
        text: a file, or a folder of text files, instead of the Python standard library's sources.
        sample: bytes to write at the end.
        temperature: of that sample; lower is more careful.
        json: file to add the line of results to.
    """

    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    plain: bool = False
    width: int = 128
    depth: int = 8
    heads: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 300
    lr: float = 3e-3
    dropout: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    eval_every: int = 50
    eval_batches: int = 8
    seed: int = 0
    text: Path | None = None
    sample: int = 200
    temperature: float = 0.8
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)
        check_multiple(self, "width", "heads", "heads share the width equally")
        if not (self.lr > 0 and self.temperature > 0):
            raise ConfigError(f"--lr {self.lr} --temperature {self.temperature}: both are above 0. Fix: pass a number above 0.")


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        corpus: the text's name, bytes trained on and held out, and digest.
        losses: the training loss of every step, dropout included.
        val_losses: pairs of the steps done and the loss on the held-out text, without dropout, in nats a byte.
        tokens_per_second: in training, the first step and the evaluations not counted.
        seconds: the whole run.
        compile_seconds: from ``init`` to the end of the first evaluation and the first step.
        sample: text that the model wrote, after the start of the held-out text.
    """

    config: Config
    corpus: dict[str, Any]
    losses: tuple[float, ...]
    val_losses: tuple[tuple[int, float], ...]
    tokens_per_second: float | None
    seconds: float
    compile_seconds: float
    sample: str

    def to_json(self) -> str:
        """One line: everything but the sample and the losses between the first and the last."""
        kept = dataclasses.asdict(self)
        del kept["sample"]
        losses = kept.pop("losses")
        return json.dumps(kept | {"first_loss": losses[0], "final_loss": losses[-1]}, default=str)


class Plain:
    """The same training on one device: what ``jaxpp.Pipeline`` replaces, with the same calls.

    A step is one ``jax.jit`` program: the loop over microbatches with ``jax.value_and_grad``, then the optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch, key) -> loss``.
        optimizer: an optax transformation.
        num_microbatches: parts of the batch; part i is evaluated with ``jax.random.fold_in(key, i)``.
    """

    def __init__(self, loss_fn: Any, optimizer: optax.GradientTransformation, *, num_microbatches: int):
        self._grad = jax.value_and_grad(loss_fn)
        self._optimizer = optimizer
        self._num_microbatches = num_microbatches
        self._step = jax.jit(self._update, donate_argnums=0)

    def init(self, init_fn: Any, key: jax.Array, batch: Any) -> jaxpp.State:
        """The first parameters and optimizer state."""
        check_batch(batch, self._num_microbatches)
        params = jax.jit(init_fn)(key)
        return jaxpp.State(params, jax.jit(self._optimizer.init)(params))

    def step(self, state: jaxpp.State, batch: Any, key: jax.Array) -> tuple[jaxpp.State, jaxpp.Metrics]:
        """One training step; the old state is consumed."""
        return self._step(state, batch, key)

    def evaluate(self, state: jaxpp.State, batch: Any, *, loss_fn: Any) -> jaxpp.Metrics:
        """The loss of a batch."""
        return jaxpp.Metrics(loss=jax.jit(loss_fn)(state.params, batch))

    def _update(self, state: jaxpp.State, batch: jax.Array, key: jax.Array) -> tuple[jaxpp.State, jaxpp.Metrics]:
        total = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        parts = sizes(len(batch), self._num_microbatches)

        def add(total: Any, part: jax.Array, i: Any) -> Any:
            found = self._grad(state.params, part, jax.random.fold_in(key, i))
            return jax.tree.map(lambda a, b: a + b * (len(part) / len(batch)), total, found)

        if parts[0] == parts[-1]:
            pieces = batch.reshape(len(parts), parts[0], *batch.shape[1:]), jnp.arange(len(parts))
            total, _ = jax.lax.scan(lambda total, piece: (add(total, *piece), None), total, pieces)
        else:
            for i, part in enumerate(jnp.split(batch, np.cumsum(parts)[:-1])):
                total = add(total, part, i)
        loss, grads = total
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        return jaxpp.State(optax.apply_updates(state.params, updates), opt_state), jaxpp.Metrics(loss=loss)


class Meter:
    """Reads losses one step late, so that the devices always have a step to work on, and times the steps.

    Args:
        config: of the run; its first ``pause`` is taken to end the compilation.
    """

    def __init__(self, config: Config):
        self.losses: list[float] = []
        self.compile_seconds = 0.0
        self.tokens_per_second: float | None = None
        self._tokens_a_step = config.batch * config.length
        self._waiting: list[jax.Array] = []
        self._began = time.perf_counter()
        self._timed, self._seconds, self._since = 0, 0.0, 0.0
        self._bar = progress(total=config.steps, unit="step", desc="compile")

    def add(self, loss: jax.Array) -> None:
        """Take the loss of the newest step and read that of the one before."""
        self._waiting.append(loss)
        self._read(keep=1)

    def pause(self) -> None:
        """Wait for every step taken, and stop the clock."""
        self._read(keep=0)
        if not self.compile_seconds:
            self.compile_seconds = time.perf_counter() - self._began
            self._bar.set_description("train")
        elif self._since:
            self._seconds, self._since = self._seconds + time.perf_counter() - self._since, 0.0

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def close(self) -> None:
        """End the progress bar."""
        self._bar.close()

    def _read(self, keep: int) -> None:
        while len(self._waiting) > keep:
            loss = float(self._waiting.pop(0))
            if len(self.losses) < NUM_PRINTED:
                tqdm.write(f"step {len(self.losses):2d}: loss {loss:.4f}")
            self.losses.append(loss)
            if self._since:
                self._timed += 1
                seconds = self._seconds + time.perf_counter() - self._since
                self.tokens_per_second = self._timed * self._tokens_a_step / seconds
                self._bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update()


def run(config: Config) -> Result:
    """Train, evaluate and write a sample; prints as it goes.

    Raises:
        TextError: the text cannot be read or is too short.
        JaxppError: the model cannot be cut, or the batch split, as asked.
    """
    began = time.perf_counter()
    corpus = text.read(config.text, config.length)
    if not config.plain:
        ensure_devices(config.stages)
    model = GPT(
        width=config.width,
        depth=config.depth,
        num_heads=config.heads,
        max_length=config.length,
        dropout=config.dropout,
        dtype=config.dtype,
    )
    meter = Meter(config)
    try:
        state, val_losses = train(config, model, corpus, meter)
    finally:
        meter.close()
    sample_key = jax.random.key(config.seed + 1)
    written = generate(model, jaxpp.gather(state.params), corpus.held_out[: config.length], config, sample_key)
    return Result(
        config=config,
        corpus={"name": corpus.name, "train": len(corpus.train), "held_out": len(corpus.held_out), "digest": corpus.digest},
        losses=tuple(meter.losses),
        val_losses=val_losses,
        tokens_per_second=meter.tokens_per_second,
        seconds=time.perf_counter() - began,
        compile_seconds=meter.compile_seconds,
        sample=written,
        devices=_devices_of(state.params),
    )


def train(config: Config, model: GPT, corpus: text.Corpus, meter: Meter) -> tuple[jaxpp.State, tuple[tuple[int, float], ...]]:
    """The trained state, and the held-out loss before, in between and after."""

    def loss_fn(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    def eval_loss(params: Any, batch: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply({"params": params}, batch[:, :-1], deterministic=True), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, config.length), int), deterministic=True)["params"]

    def evaluate(done: int) -> tuple[int, float]:
        found = [trainer.evaluate(state, batch, loss_fn=eval_loss).loss for batch in held_out]
        loss = float(np.mean([float(loss) for loss in found]))
        tqdm.write(f"after {done} steps: held-out loss {loss:.4f}")
        return done, loss

    held_out = text.held_out_batches(corpus.held_out, config.length, config.batch, config.eval_batches)
    trainer = make_trainer(config, loss_fn)
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    state = trainer.init(init, init_key, held_out[0])
    tqdm.write(describe(config, trainer))
    val_losses = [evaluate(0)]
    for step in range(config.steps):
        batch = text.batch(corpus.train, config.length, config.batch, config.seed, step)
        state, metrics = trainer.step(state, batch, jax.random.fold_in(train_key, step))
        meter.add(metrics.loss)
        done, last = step + 1, step + 1 == config.steps
        if step == 0 or last or done % config.eval_every == 0:
            meter.pause()
            if last or done % config.eval_every == 0:
                val_losses.append(evaluate(done))
            meter.start()
    return state, tuple(val_losses)


def make_trainer(config: Config, loss_fn: Any) -> jaxpp.Pipeline | Plain:
    """The pipeline, or its equivalent on one device."""
    warm_up = max(1, config.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(config.lr / 10, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr / 10)
    decayed = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=_is_matrix)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), decayed)
    if config.plain:
        return Plain(loss_fn, optimizer, num_microbatches=config.microbatches)
    return jaxpp.Pipeline(
        loss_fn, optimizer, num_stages=config.stages, num_microbatches=config.microbatches, schedule=config.schedule
    )


def describe(config: Config, trainer: jaxpp.Pipeline | Plain) -> str:
    """How the training runs, in words and the table of stages."""
    if isinstance(trainer, Plain):
        return f"Plain: one jax.jit step on one device, {config.microbatches} microbatches."
    return f"Schedule {config.schedule}: {config.microbatches} microbatches over {config.stages} stages.\n{trainer.stages}"


def generate(model: GPT, params: Any, prompt: np.ndarray, config: Config, key: jax.Array) -> str:
    """What the model writes after the prompt; it sees a window of the prompt's length, which moves on with every byte."""

    @jax.jit
    def write(params: Any, window: jax.Array, keys: jax.Array) -> jax.Array:
        def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits: Any = model.apply({"params": params}, window[None], deterministic=True)
            token = jax.random.categorical(key, logits[0, -1].astype("float32") / config.temperature)
            return jnp.append(window[1:], token), token

        return jax.lax.scan(step, window, keys)[1]

    tokens = write(params, jnp.asarray(prompt, int), jax.random.split(key, config.sample))
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def summary(result: Result) -> str:
    """What came of the training, and what the model writes."""
    config, (_, before), (_, after) = result.config, result.val_losses[0], result.val_losses[-1]
    where = "one device" if config.plain else f"{config.stages} stages"
    times = f"{result.seconds:.0f} s, of which {result.compile_seconds:.0f} s until the first step was done"
    speed = f"; {result.tokens_per_second:,.0f} tokens a second" if result.tokens_per_second else ""
    training = f"training loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
    lines = [
        f"{config.steps} steps on {where} took {times}{speed}",
        f"{training}, held-out loss {before:.4f} -> {after:.4f} (nats a byte)",
        f"--- a sample ---\n{result.sample}\n---",
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print a summary and the sample, and write the line of JSON."""
    command("lm", Config, DESCRIPTION, run, summary)


def _cross_entropy(logits: Any, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), targets).mean()


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _devices_of(tree: Any) -> tuple[str, ...]:
    found = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
    return tuple(f"{device.platform}:{device.id} {device.device_kind}" for device in sorted(found, key=lambda device: device.id))
