"""Does a pipeline that generates keep all stages busy, and are the tokens those of one device? See README.md beside this file."""

from dataclasses import dataclass
from pathlib import Path

from experiments.devices import ensure_devices
from experiments.generate.measure import (
    MemoryRow,
    RingRow,
    Same,
    SpeedRow,
    compare_tokens,
    measure_memory,
    measure_ring,
    measure_speed,
    ragged,
)
from experiments.generate.one_thread import OneThread, measure_one_thread
from experiments.generate.plain import Rule
from experiments.generate.train import Trained, train
from experiments.lm.main import Config as Training
from experiments.options import ConfigError, Flag, check_figure, check_multiple, check_names, check_numbers, figure_file
from experiments.results import Findings, columns, command
from jaxpp.runtime.progress import progress
from jaxpp.tables import bytes_in_words

__all__ = ["PARTS", "Config", "Result", "main", "run", "summary"]

DESCRIPTION = "Train a little GPT over several devices, let it write, and compare the tokens and their speed with one device."
PARTS = ("tokens", "speed", "memory", "one-thread", "ring")
GREEDY = Rule(temperature=0, top_k=0)
NEWLINE = ord("\n")


@dataclass(frozen=True)
class Config:
    """The model, the sequences, and what is measured.

    Attributes:
        parts: tokens, speed, memory, one-thread, ring.
        stages: pipeline stages, one a device.
        groups: numbers of groups in flight: 1, p and 2p for p stages.
        group_size: sequences of a group.
        prompts: sequences of the part tokens.
        tokens: the most that are generated for each sequence of the part tokens.
        prompt: tokens of each prompt in the parts speed and memory, which generate as many as there is room for.
        chunk: the most tokens of a prompt that are read at a time in the part tokens.
        temperature: of the sampled tokens.
        top_k: only so many of the most probable tokens are sampled; 0 for all.
        rounds: interleaved rounds of the parts speed and one-thread.
        thread_steps: matrix products of a one-thread-wide stage for each token.
        thread_tokens: generated for each sequence in the part one-thread.
        width: features of the residual stream.
        depth: transformer blocks.
        heads: attention heads a block.
        length: tokens that the model reads at once in training, and that a cache has room for.
        batch: sequences a training step.
        steps: training steps.
        seed: of the parameters, the batches and the prompts.
        checkpoint: folder that python -m experiments.lm saved a model of the same sizes in, instead of training one.
        figure: file for the figure of the part ring; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    parts: tuple[str, ...] = PARTS
    stages: int = 4
    groups: tuple[int, ...] = (1, 4, 8)
    group_size: int = 4
    prompts: int = 24
    tokens: int = 24
    prompt: int = 8
    chunk: int = 32
    temperature: float = 0.8
    top_k: int = 40
    rounds: int = 5
    thread_steps: int = 10000
    thread_tokens: int = 12
    width: int = 128
    depth: int = 8
    heads: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 60
    seed: int = 0
    checkpoint: Path | None = None
    figure: Path = Path("experiments/generate/out/ring.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_names("parts", self.parts, PARTS, none=False)
        check_numbers(self, zero=("top_k",))
        check_figure(self)
        check_multiple(self, "width", "heads", "heads share the width equally")
        if self.temperature <= 0:
            raise ConfigError(f"--temperature {self.temperature}: it is above 0. Fix: pass for example 0.8.")
        if max(self.prompt, self.tokens) >= self.length:
            given = f"--prompt {self.prompt} --tokens {self.tokens} --length {self.length}"
            raise ConfigError(f"{given}: a cache has room for --length tokens. Fix: pass fewer tokens or a greater --length.")

    @property
    def training(self) -> Training:
        """The run of ``experiments.lm`` that trains the model."""
        names = "stages width depth heads length batch steps seed checkpoint".split()
        return Training(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Result(Findings):
    """What a run found; a part that was not asked for is empty.

    Attributes:
        config: what was asked for.
        loss: of the last training step; None if the model was not trained here.
        same: a row for each way to draw tokens.
        speed: a row for each number of groups.
        memory: a row for each stage.
        one_thread: stages that are one thread wide.
        ring: the ring as it ran with as many groups as stages.
        figure: the file, if one was drawn.
    """

    config: Config
    loss: float | None
    same: tuple[Same, ...]
    speed: tuple[SpeedRow, ...]
    memory: tuple[MemoryRow, ...]
    one_thread: OneThread | None
    ring: RingRow | None
    figure: Path | None


def run(config: Config) -> Result:
    """Train, generate, and measure.

    Raises:
        ConfigError: the checkpoint cannot be read, or holds another run.
        JaxppError: the model cannot be cut into so many stages.
    """
    figure = figure_file("generate", config)
    ensure_devices(max(config.stages, 2))
    parts = set(config.parts)
    trained = train(config.training) if parts - {"one-thread"} else None
    one_thread = None
    if "one-thread" in parts:
        with progress(total=config.rounds, unit="round", desc="one-thread-wide stages") as bar:
            one_thread = measure_one_thread(
                2, (1, 2, 4), config.group_size, config.thread_steps, config.thread_tokens, config.rounds, bar
            )
    return Result(
        config=config,
        loss=trained.loss if trained else None,
        same=_same(config, trained) if trained and "tokens" in parts else (),
        speed=_speed(config, trained) if trained and "speed" in parts else (),
        memory=_memory(config, trained) if trained and "memory" in parts else (),
        one_thread=one_thread,
        ring=measure_ring(trained, num_groups=config.stages, **_sizes(config), figure=figure)
        if trained and "ring" in parts
        else None,
        figure=figure if "ring" in parts else None,
    )


def _rules(config: Config) -> tuple[Rule, Rule]:
    return GREEDY, Rule(config.temperature, config.top_k)


def _sizes(config: Config) -> dict[str, int]:
    """Sequences that fill their caches."""
    return {"group_size": config.group_size, "prompt": config.prompt, "num_tokens": config.length - config.prompt}


def _same(config: Config, trained: Trained) -> tuple[Same, ...]:
    """Prompts of many lengths, more than there are places; a new line ends a sequence."""
    prompts = ragged(trained.corpus.held_out, config.prompts, config.length - config.tokens, config.seed)
    sizes = {"num_groups": config.stages, "group_size": config.group_size, "chunk": config.chunk}
    options = {"stop": (NEWLINE,), "length": config.length, **sizes}
    return tuple(compare_tokens(trained, prompts, config.tokens, rule, **options) for rule in _rules(config))


def _speed(config: Config, trained: Trained) -> tuple[SpeedRow, ...]:
    with progress(total=len(config.groups) * config.rounds, unit="round", desc="speed") as bar:
        return tuple(measure_speed(trained, config.groups, **_sizes(config), rule=_rules(config)[1], rounds=config.rounds, bar=bar))


def _memory(config: Config, trained: Trained) -> tuple[MemoryRow, ...]:
    return tuple(measure_memory(trained, num_groups=config.stages, **_sizes(config)))


def summary(result: Result) -> str:
    """The result as text: a table for each part."""
    parts = [_tokens_table(result.same), _speed_table(result.speed), _memory_table(result.memory)]
    parts += [_one_thread_table(result.one_thread)] if result.one_thread else []
    parts += [_ring_lines(result.ring)] if result.ring else []
    if result.loss is not None:
        parts.insert(0, [f"{result.config.steps} training steps, loss {result.loss:.3f} nats a byte"])
    return "\n\n".join("\n".join(part) for part in parts if part)


def _tokens_table(rows: tuple[Same, ...]) -> list[str]:
    cells = [["drawn", "prompts", "places", "stopped", "tokens", "equal", "log-probabilities differ by"]]
    for row in rows:
        counts = map(str, (row.prompts, row.places, row.stopped, row.tokens, row.equal))
        cells.append([_words(row.rule), *counts, f"{row.logprob:.1e}"])
    examples = [f"{_words(row.rule)}: {bytes(row.example).decode(errors='replace')!r}" for row in rows]
    return ["Tokens over the stages and on one device:", *columns(cells), *examples] if rows else []


def _words(rule: Rule) -> str:
    if rule.temperature == 0:
        return "greedy"
    return f"temperature {rule.temperature:g}" + (f", top {rule.top_k}" if rule.top_k else "")


def _speed_table(rows: tuple[SpeedRow, ...]) -> list[str]:
    cells = [["groups", "sequences", "pipeline", "one device, by turns", "one device, together", "pipeline over turns"]]
    for row in rows:
        rates = (f"{rate:,.0f}" for rate in (row.pipeline, row.turns, row.together))
        ratio = f"{row.ratio:.2f} ({row.quartiles[0]:.2f} to {row.quartiles[1]:.2f})"
        cells.append([str(row.groups), str(row.sequences), *rates, ratio])
    return ["Tokens a second:", *columns(cells)] if rows else []


def _memory_table(rows: tuple[MemoryRow, ...]) -> list[str]:
    cells = [["device", "parameters", "while generating", "of them caches"]]
    cells += [[row.device, *map(bytes_in_words, (row.params, row.generating, row.caches))] for row in rows]
    return ["Bytes on each device:", *columns(cells)] if rows else []


def _one_thread_table(found: OneThread) -> list[str]:
    cells = [["groups", "tokens a second", "cores busy", f"over {found.groups[0]} group"]]
    for count, rate, cores, faster, (low, high) in zip(
        found.groups, found.rates, found.cores, found.faster, found.quartiles, strict=True
    ):
        cells.append([str(count), f"{rate:,.0f}", f"{cores:.2f}", f"{faster:.2f} ({low:.2f} to {high:.2f})"])
    head = f"{found.stages} stages, one thread wide; one device generates {found.plain:,.0f} tokens a second:"
    return [head, *columns(cells)]


def _ring_lines(found: RingRow) -> list[str]:
    head = f"The ring as it ran, {found.passes} passes: {found.bubble:.1%} idle of the devices' time, by cause:"
    return [head, ", ".join(f"{cause.replace('_', ' ')} {share:.1%}" for cause, share in found.causes.items())]


def main() -> None:
    """Read the command line, run, print the tables, and write the line of JSON."""
    command("generate", Config, DESCRIPTION, run, summary)
