"""The optimizers that the language model is trained with."""

from typing import Any, Literal

import jax
import optax

__all__ = ["RATES", "OptimizerName", "make_optimizer"]

OptimizerName = Literal["adamw", "muon", "sgd"]
RATES: dict[OptimizerName, float] = {"adamw": 3e-3, "muon": 2e-2, "sgd": 0.3}
"""The highest learning rate of each; muon's is that of its matrices."""


def make_optimizer(name: OptimizerName, num_steps: int, rate: float, feedback: float = 0.0) -> optax.GradientTransformation:
    """An optimizer after a clip by the global norm, with a warm-up and a cosine decay of the learning rate to a tenth.

    Args:
        name: of the optimizer.
        num_steps: of the training; a tenth of them warm up.
        rate: the highest learning rate.
        feedback: each update has this much of its difference to the last one added, which makes up for part of a gradient that
            is late: the updates up to a step then sum to where the next one is expected to lead. It is what
            ``optax.scale_by_optimistic_gradient`` does, here to updates instead of gradients.
    """
    highest = _schedule(rate, num_steps)
    if name == "adamw":
        chosen = optax.adamw(highest, b2=0.99, weight_decay=0.1, mask=_is_matrix)
    elif name == "muon":
        chosen = optax.contrib.muon(
            highest,
            weight_decay=0.1,
            weight_decay_mask=_is_matrix,
            adam_b2=0.99,
            adam_learning_rate=_schedule(RATES["adamw"], num_steps),
            muon_weight_dimension_numbers=_matrices,
        )
    else:
        chosen = optax.sgd(highest, momentum=0.9)
    correction = [optax.scale_by_optimistic_gradient(1.0, feedback)] if feedback else []
    return optax.chain(optax.clip_by_global_norm(1.0), chosen, *correction)


def _schedule(highest: float, num_steps: int) -> optax.Schedule:
    warm_up = max(1, num_steps // 10)
    return optax.warmup_cosine_decay_schedule(highest / 10, highest, warm_up, max(num_steps, warm_up + 1), highest / 10)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _matrices(params: Any) -> Any:
    """What muon sees as a matrix: its axes in and out, heads joined; None for the embedding and for vectors."""

    def of(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "embed" in name or leaf.ndim < 2:
            return None
        if leaf.ndim == 2:
            return optax.contrib.MuonDimensionNumbers()
        return optax.contrib.MuonDimensionNumbers((0, 1), 2) if "out" in name else optax.contrib.MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(of, params)
