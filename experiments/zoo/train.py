"""One model trained a little and verified: what a user of ``jaxpp.Pipeline`` writes."""

import time
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jaxpp
from experiments.zoo.case import Case
from jaxpp.schedule import Schedule

__all__ = ["Row", "crossings", "train"]


@dataclass(frozen=True)
class Row:
    """What one model did. Its last state passed ``pipe.verify``, or there would be no row.

    Attributes:
        model: the name of its file.
        task: what it learned.
        num_params: parameters.
        num_stages: stages it was cut into.
        stages: the table of them, as printed.
        crossings: what crosses between stages.
        kept: bytes that a microbatch holds between forward and backward, all stages together.
        keepable: what they would be with ``remat="keep"``.
        before: loss on held-out data before training.
        after: and after it.
        seconds: compilation, training, evaluation and verification.
    """

    model: str
    task: str
    num_params: int
    num_stages: int
    stages: str
    crossings: str
    kept: int
    keepable: int
    before: float
    after: float
    seconds: float


def train(model: str, case: Case, schedule: Schedule, steps: int, seed: int, bar: Any) -> Row:
    """Make the pipeline, train, evaluate before and after, and verify the step that would come next.

    Args:
        model: its name.
        case: what it learns.
        schedule: of the pipeline.
        steps: to train.
        seed: of the parameters and the dropout.
        bar: counts the steps.

    Raises:
        JaxppError: the model cannot be cut into so many stages, or its step does not equal the plain one.
    """
    began = time.perf_counter()
    pipe = jaxpp.Pipeline(
        case.loss_fn,
        optax.adam(case.rate),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        has_state=case.has_state,
        weight=case.weight,
    )

    def evaluate() -> float:
        found = [pipe.evaluate(state, batch, loss_fn=case.eval_loss).loss for batch in case.held_out]
        return float(np.mean([float(loss) for loss in found]))

    init_key, train_key = jax.random.split(jax.random.key(seed))
    keys = [jax.random.fold_in(train_key, step) if case.takes_key else None for step in range(steps + 1)]
    with warnings.catch_warnings():
        if case.has_state:  # batch normalisation knows the microbatch, here as in the plain step with which verify compares
            warnings.simplefilter("ignore", jaxpp.MicrobatchWarning)
        state = pipe.init(case.init, init_key, case.batch(0))
    before = evaluate()
    for step in range(steps):
        state, _ = pipe.step(state, case.batch(step), keys[step])
        bar.update()
    after = evaluate()
    pipe.verify(state, case.batch(steps), keys[steps])
    return Row(
        model=model,
        task=case.task,
        num_params=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        num_stages=len(pipe.stages),
        stages=str(pipe.stages),
        crossings=crossings([stage.sends for stage in pipe.stages]),
        kept=sum(stage.kept for stage in pipe.stages),
        keepable=sum(stage.keepable for stage in pipe.stages),
        before=before,
        after=after,
        seconds=time.perf_counter() - began,
    )


def crossings(sends: list[tuple[str, ...]]) -> str:
    """What crosses between stages, shape by shape.

    Args:
        sends: for each stage what it sends and where, as ``pipe.stages`` has it.

    Example:
        >>> crossings([("f32[8,64] to 1", "i32[8] to 2"), ("f32[8,64] to 2",), ()])
        'f32[8,64] 0>1 1>2, i32[8] 0>2'
    """
    ways: dict[str, list[str]] = {}
    for stage, values in enumerate(sends):
        for value in values:
            shape, peers = value.split(" to ")
            ways.setdefault(shape, []).extend(f"{stage}>{peer}" for peer in peers.split(", "))
    return ", ".join(" ".join([shape, *found]) for shape, found in ways.items()) or "nothing"
