"""Do two cores show that no stage waits? Stages that are one thread wide, with one group in flight and with several."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from experiments.generate.plain import Groups, Rule

__all__ = ["OneThread", "Recurrent", "measure_one_thread"]

GREEDY = Rule(temperature=0, top_k=0)


@dataclass(frozen=True)
class OneThread:
    """Stages that are one thread wide.

    Attributes:
        stages: one on each device.
        groups: numbers of groups.
        group_size: sequences of a group.
        rates: tokens a second with each number of groups, after the first token of each sequence; the median.
        cores: how many cores each keeps busy: the process's CPU time over the time; the median.
        faster: how many times as many tokens a second as with the first number of groups: the median of the rounds' ratios.
        quartiles: of these ratios.
        plain: tokens a second of one group on one device; the median.
    """

    stages: int
    groups: tuple[int, ...]
    group_size: int
    rates: tuple[float, ...]
    cores: tuple[float, ...]
    faster: tuple[float, ...]
    quartiles: tuple[tuple[float, float], ...]
    plain: float


class Recurrent:
    """A model whose stages use one thread each: loops of matrix products that are too small to be divided.

    What a stage carries is the sum of all inputs that it has seen; as with a cache, tokens may come one by one or many at a time.

    Args:
        num_stages: such stages in a row.
        num_steps: products of a stage for each token.
        width: features, and tokens there are.

    Attributes:
        params: drawn from a fixed seed.
    """

    def __init__(self, num_stages: int, num_steps: int, width: int = 256):
        rng = np.random.default_rng(0)
        self.num_stages, self.num_steps, self.width = num_stages, num_steps, width
        self._fixed = [_orthogonal(rng, width) for _ in range(num_stages)]
        self.params = {"embed": rng.normal(size=(width, width)).astype("float32"), "head": _orthogonal(rng, width)}
        self.params |= {f"stage_{k}": _orthogonal(rng, width) for k in range(num_stages)}

    @property
    def empty(self) -> Any:
        """What one sequence carries before its first token."""
        return {f"stage_{k}": jnp.zeros((1, 1, self.width)) for k in range(self.num_stages)}

    def decode(self, params: Any, carry: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        """The carry after ``tokens`` ``[1, length]``, and the logits of what follows each of them."""
        x, after = jnp.take(params["embed"], tokens, axis=0), {}
        for k, fixed in enumerate(self._fixed):
            seen = carry[f"stage_{k}"] + jnp.cumsum(x, axis=1)
            after[f"stage_{k}"] = seen[:, -1:]
            x = jnp.tanh(seen @ params[f"stage_{k}"])
            x, _ = jax.lax.scan(lambda x, _, w=fixed: (jnp.tanh(x @ w), None), x, None, length=self.num_steps)
        return after, x @ params["head"]


def measure_one_thread(
    num_stages: int, groups: Sequence[int], group_size: int, num_steps: int, num_tokens: int, rounds: int, bar: Any
) -> OneThread:
    """Tokens a second with each number of groups, in interleaved rounds.

    Args:
        num_stages: one on each device.
        groups: numbers of groups.
        group_size: sequences of a group.
        num_steps: matrix products of a stage for each token.
        num_tokens: generated for each sequence.
        rounds: interleaved rounds.
        bar: counts the rounds.
    """
    model, prompt = Recurrent(num_stages, num_steps), [1]
    decode, empty = model.decode, model.empty
    forward = jaxpp.Forward(lambda params, tokens: decode(params, empty, tokens)[1], num_stages=num_stages)
    params = forward.init(model.params, jnp.zeros((num_stages, 1), int))
    alone, own = Groups(decode, GREEDY, 1), jax.tree.map(jnp.asarray, model.params)

    def pipeline(count: int) -> Iterator[Any]:
        options: dict[str, Any] = {"num_groups": count, "group_size": group_size, "progress": False}
        return forward.generate(params, decode, empty, [prompt] * count * group_size, num_tokens, **options)

    def plain(count: int) -> Iterator[Any]:
        return alone(own, empty, [prompt] * count * group_size, num_tokens, jax.random.key(0), group_size)

    ways: dict[int, Callable[[], Iterator[Any]]] = {count: functools.partial(pipeline, count) for count in groups}
    ways[0] = functools.partial(plain, 1)
    rates: dict[int, list[float]] = {name: [] for name in ways}
    busy: dict[int, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, way in ways.items():
            rate, cores = _rate(way(), max(name, 1) * group_size)
            if round_number:  # the first only compiles
                rates[name].append(rate)
                busy[name].append(cores)
        bar.update(bool(round_number))
    ratios = [np.quantile(np.divide(rates[count], rates[groups[0]]), (0.25, 0.5, 0.75)) for count in groups]
    return OneThread(
        stages=num_stages,
        groups=tuple(groups),
        group_size=group_size,
        rates=tuple(float(np.median(rates[count])) for count in groups),
        cores=tuple(float(np.median(busy[count])) for count in groups),
        faster=tuple(float(found[1]) for found in ratios),
        quartiles=tuple((float(found[0]), float(found[2])) for found in ratios),
        plain=float(np.median(rates[0])),
    )


def _rate(tokens: Iterator[Any], sequences: int) -> tuple[float, float]:
    """Tokens a second after the first token of each sequence, and how many cores were busy."""
    for _ in range(sequences):
        next(tokens)
    start, used = time.perf_counter(), time.process_time()
    count = sum(1 for _ in tokens)
    seconds = time.perf_counter() - start
    return count / seconds, (time.process_time() - used) / seconds


def _orthogonal(rng: np.random.Generator, width: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(width, width)))[0].astype("float32")
