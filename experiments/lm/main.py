"""Does a language model trained through the pipeline learn as it does on one device? See README.md beside this file.

``Plain`` (plain.py) has the calls of ``jaxpp.Pipeline``, so everything here is written once and runs either way.
"""

import dataclasses
import json
import math
import signal
import sys
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
from experiments.devices import ensure_devices, join_hosts
from experiments.lm import text
from experiments.lm.checkpoints import Checkpoints, History, Times
from experiments.lm.interrupts import Interrupted, StopRequest
from experiments.lm.meter import Meter
from experiments.lm.optimizers import RATES, OptimizerName, make_optimizer
from experiments.lm.plain import Plain
from experiments.options import ConfigError, check_multiple, check_numbers
from experiments.results import Findings, command
from models.gpt import GPT

__all__ = ["Config", "Result", "main", "run"]

DESCRIPTION = "Train a GPT on text as bytes, pipelined over several devices, or with --plain on one."
# What a resumed run may not change: its losses would not be those of the run that was interrupted.
FIXED = "width depth heads length batch steps optimizer lr delay feedback dropout dtype eval_batches seed".split()


@dataclass(frozen=True)
class Config:
    """A GPT, the text it reads and the devices it is trained on.

    Attributes:
        stages: pipeline stages, one a device.
        microbatches: parts of a batch.
        schedule: order of the actions, such as naive, gpipe or 1f1b.
        plain: train on one device, with one jax.jit step and no pipeline.
        hosts: this command runs on several hosts, once on each (under Slurm: srun python -m experiments.lm --hosts).
        width: features of the residual stream.
        depth: transformer blocks.
        heads: attention heads a block.
        length: tokens of a sequence; a token is a byte.
        batch: sequences a step.
        steps: optimizer steps.
        optimizer: muon trains the embedding, the biases and the norms with adamw, at that one's own learning rate.
        lr: the highest learning rate, after a warm-up and before a cosine decay to a tenth of it; each optimizer has its own.
        delay: 1 for gradients that are late by one step, so that no step waits for the optimizer; 0 for none.
        feedback: a correction of late gradients: each update has this much of its difference to the last one added.
        dropout: rate.
        dtype: type to compute in; parameters are float32.
        eval_every: steps between losses on the held-out text.
        eval_batches: held-out batches each time.
        seed: of the parameters, the batches, the dropout and the sample.
        text: a file, or a folder of text files, instead of the Python standard library's sources.
        sample: bytes to write at the end.
        temperature: of that sample; lower is more careful.
        json: file to add the line of results to.
        checkpoint: folder to save the run in; if it was saved there before, it goes on from there.
        every: steps between checkpoints.
        on_save_error: whether the run stops or goes on if a checkpoint cannot be written.
    """

    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    plain: bool = False
    hosts: bool = False
    width: int = 128
    depth: int = 8
    heads: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 300
    optimizer: OptimizerName = "adamw"
    lr: float | None = None
    delay: Literal[0, 1] = 0
    feedback: float = 0.0
    dropout: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    eval_every: int = 50
    eval_batches: int = 8
    seed: int = 0
    text: Path | None = None
    sample: int = 200
    temperature: float = 0.8
    json: Path | None = None
    checkpoint: Path | None = None
    every: int = 50
    on_save_error: Literal["stop", "go-on"] = "stop"

    def __post_init__(self):
        check_numbers(self)
        check_multiple(self, "width", "heads", "heads share the width equally")
        if self.plain and self.hosts:
            raise ConfigError("--plain --hosts: --plain trains on one device. Fix: pass one of the two.")
        if not ((self.lr is None or self.lr > 0) and self.temperature > 0):
            raise ConfigError(f"--lr {self.lr} --temperature {self.temperature}: both are above 0. Fix: pass a number above 0.")
        if not 0 <= self.feedback < math.inf:
            raise ConfigError(f"--feedback {self.feedback}: a share of a difference is 0 or more. Fix: pass 0.5, or 0 for none.")

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return RATES[self.optimizer] if self.lr is None else self.lr


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
        resumed_from: the step that this process began with, from a checkpoint; 0 if the run was not resumed. The losses before it
            came with the checkpoint, the times are of this process alone.
        safe_step: the step of the newest checkpoint; None without one.
        checkpoint_times: what saving and restoring took; None without ``checkpoint``.
    """

    config: Config
    corpus: dict[str, Any]
    losses: tuple[float, ...]
    val_losses: tuple[tuple[int, float], ...]
    tokens_per_second: float | None
    seconds: float
    compile_seconds: float
    sample: str
    resumed_from: int = 0
    safe_step: int | None = None
    checkpoint_times: Times | None = None

    def to_json(self) -> str:
        """One line: everything but the sample and the losses between the first and the last."""
        kept = dataclasses.asdict(self)
        del kept["sample"]
        losses = kept.pop("losses")
        return json.dumps(kept | {"first_loss": losses[0], "final_loss": losses[-1]}, default=str)


def run(config: Config) -> Result:
    """Train, evaluate and write a sample; prints as it goes.

    Raises:
        TextError: the text cannot be read or is too short.
        ConfigError: the folder of checkpoints cannot be written, or holds another run.
        CheckpointError: a checkpoint cannot be read; or written, with ``on_save_error="stop"``.
        JaxppError: the model cannot be cut, or the batch split, as asked.
        Interrupted: by Ctrl-C or SIGTERM, with ``checkpoint``; the newest step is saved.
    """
    began = time.perf_counter()
    corpus = text.read(config.text, config.length)
    if config.hosts:
        join_hosts()
    elif not config.plain:
        ensure_devices(config.stages)
    checkpoints = open_checkpoints(config, corpus)
    history = History() if checkpoints is None else checkpoints.history
    resumed_from = len(history.losses)
    model = GPT(
        width=config.width,
        depth=config.depth,
        num_heads=config.heads,
        max_length=config.length,
        dropout=config.dropout,
        dtype=config.dtype,
    )
    meter = Meter(config.steps, config.batch * config.length, history)
    if not config.plain:
        _say(f"Compiling the programs of {config.stages} stages, which takes a minute or so; the table of stages comes next.")
    try:
        state = train(config, model, corpus, meter, checkpoints)
    finally:
        meter.close()
        if checkpoints is not None:
            checkpoints.close()
    sample_key = jax.random.key(config.seed + 1)
    written = generate(model, jaxpp.gather(state.params), corpus.held_out[: config.length], config, sample_key)
    return Result(
        config=config,
        corpus={"name": corpus.name, "train": len(corpus.train), "held_out": len(corpus.held_out), "digest": corpus.digest},
        losses=tuple(history.losses),
        val_losses=tuple(history.val_losses),
        tokens_per_second=meter.tokens_per_second,
        seconds=time.perf_counter() - began,
        compile_seconds=meter.compile_seconds,
        sample=written,
        devices=_devices_of(state.params),
        resumed_from=resumed_from,
        safe_step=None if checkpoints is None else checkpoints.safe_step,
        checkpoint_times=None if checkpoints is None else checkpoints.times,
    )


def open_checkpoints(config: Config, corpus: text.Corpus) -> Checkpoints | None:
    """The folder of checkpoints, if there is to be one, and if the run that is saved there is this one.

    The batch and the key of a step depend on the seed and the step alone, so the state's step is also the place in the data. With
    dropout, microbatch i has its own masks, so their number may not change either.
    """
    if config.checkpoint is None:
        return None
    names = [*FIXED, "microbatches"] if config.dropout else FIXED
    settings = {name: getattr(config, name) for name in names} | {"lr": config.rate, "text": corpus.digest}
    return Checkpoints(config.checkpoint, settings, go_on=config.on_save_error == "go-on")


def train(config: Config, model: GPT, corpus: text.Corpus, meter: Meter, checkpoints: Checkpoints | None) -> jaxpp.State:
    """The trained state; the meter's history gets the losses, those on the held-out text before, in between and after included.

    Raises:
        Interrupted: after a signal, with checkpoints.
    """

    def loss_fn(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    def eval_loss(params: Any, batch: jax.Array) -> jax.Array:
        return _cross_entropy(model.apply({"params": params}, batch[:, :-1], deterministic=True), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, config.length), int), deterministic=True)["params"]

    def evaluate(state: jaxpp.State) -> None:
        found = [trainer.evaluate(state, batch, loss_fn=eval_loss).loss for batch in held_out]
        loss = float(np.mean([float(loss) for loss in found]))
        tqdm.write(f"after {state.step} steps: held-out loss {loss:.4f}")
        meter.history.val_losses.append((state.step, loss))

    held_out = text.held_out_batches(corpus.held_out, config.length, config.batch, config.eval_batches)
    trainer = make_trainer(config, loss_fn)
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    if checkpoints is None or checkpoints.safe_step is None:
        state = trainer.init(init, init_key, held_out[0])
    else:
        state = checkpoints.restore(trainer.abstract_state(init, init_key, held_out[0]))
    _say(describe(config, trainer, state.step))
    if not meter.history.val_losses:
        evaluate(state)
    first = state.step + 1
    with StopRequest(wanted=checkpoints is not None and not config.hosts) as stop:  # of several processes none ends alone
        while state.step < config.steps and stop.number is None:
            batch = text.batch(corpus.train, config.length, config.batch, config.seed, state.step)
            state, metrics = trainer.step(state, batch, jax.random.fold_in(train_key, state.step))
            meter.add(metrics.loss)
            due = state.step == config.steps or state.step % config.eval_every == 0
            if due or state.step == first:
                meter.pause()
                if due:
                    evaluate(state)
                meter.start()
            if checkpoints is not None:
                save(config, checkpoints, state, meter)
        if checkpoints is not None:
            meter.pause()
            checkpoints.finish(state, meter.history)
            check_interrupted(config, checkpoints, state, stop)
    return state


def save(config: Config, checkpoints: Checkpoints, state: jaxpp.State, meter: Meter) -> None:
    """Begin to save the state where it is due, and see how the last save ended."""
    checkpoints.look()
    if state.step % config.every == 0:
        meter.read()
        checkpoints.save(state, meter.history)


def check_interrupted(config: Config, checkpoints: Checkpoints, state: jaxpp.State, stop: StopRequest) -> None:
    """End a run that a signal has stopped before its last step.

    Raises:
        Interrupted: it has; the message says what is saved.
    """
    if stop.number is None or state.step == config.steps:
        return
    folder, safe = config.checkpoint, checkpoints.safe_step
    saved = f"saved in {folder}; the same command goes on from there"
    if safe != state.step:
        saved = f"not saved: step {safe} is the newest in {folder}"
    name = signal.Signals(stop.number).name
    raise Interrupted(f"{name}: ended after step {state.step} of {config.steps}, which is {saved}", stop.number)


def make_trainer(config: Config, loss_fn: Any) -> jaxpp.Pipeline | Plain:
    """The pipeline, or its equivalent on one device."""
    optimizer = make_optimizer(config.optimizer, config.steps, config.rate, config.feedback)
    if config.plain:
        return Plain(loss_fn, optimizer, num_microbatches=config.microbatches, delay=config.delay)
    return jaxpp.Pipeline(
        loss_fn,
        optimizer,
        num_stages=config.stages,
        num_microbatches=config.microbatches,
        schedule=config.schedule,
        delay=config.delay,
    )


def describe(config: Config, trainer: jaxpp.Pipeline | Plain, step: int) -> str:
    """How the training runs, from which step, in words and the table of stages."""
    resumed = f"Resumed after step {step} of {config.steps}, from {config.checkpoint}.\n" if step else ""
    if isinstance(trainer, Plain):
        return f"{resumed}Plain: one jax.jit step on one device, {config.microbatches} microbatches."
    how = f"Schedule {config.schedule}: {config.microbatches} microbatches over {config.stages} stages."
    return f"{resumed}{how}\n{trainer.stages}"


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
    steps = f"{config.steps - result.resumed_from} of {config.steps}" if result.resumed_from else f"{config.steps}"
    lines = [
        f"{steps} steps on {where} took {times}{speed}",
        f"{training}, held-out loss {before:.4f} -> {after:.4f} (nats a byte)",
        *_saving(result.checkpoint_times),
        f"--- a sample ---\n{result.sample}\n---",
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print a summary and the sample, and write the line of JSON.

    Raises:
        SystemExit: the options make no run; a signal has stopped the run; or the last checkpoint could not be written.
    """
    try:
        found = command("lm", Config, DESCRIPTION, run, summary)
    except Interrupted as stopped:
        print(f"lm: {stopped}", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    config = found.config
    if config.checkpoint is not None and found.safe_step != config.steps:
        raise SystemExit(f"lm: step {config.steps} is not saved in {config.checkpoint}: step {found.safe_step} is the newest there")


def _say(text: str) -> None:
    """Print above the progress bar, at once in a pipe too, where a while passes until the next line."""
    tqdm.write(text)
    sys.stdout.flush()


def _saving(times: Times | None) -> list[str]:
    if times is None or not times.saves:
        return []
    waited, written = (1000 * float(np.median(found)) for found in (times.saves, times.writes or [np.nan]))
    waits = f"the training waited {waited:.0f} ms for each"
    return [f"{len(times.saves)} checkpoints: {waits}, and {written:.0f} ms after its beginning it was on disk"]


def _cross_entropy(logits: Any, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), targets).mean()


def _devices_of(tree: Any) -> tuple[str, ...]:
    found = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
    return tuple(f"{device.platform}:{device.id} {device.device_kind}" for device in sorted(found, key=lambda device: device.id))
