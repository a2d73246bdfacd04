"""The models with their batch on the device, and a pipeline of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxpp
from experiments.problems import Problem
from experiments.remat.main import Config as Models
from experiments.remat.problems import PROBLEMS
from jaxpp.schedule import SCHEDULES, make
from jaxpp.types import Device

__all__ = ["OPTIMIZER", "Ready", "ready"]

OPTIMIZER = optax.adamw(1e-3)


class Ready(NamedTuple):
    """A model that can be trained.

    Attributes:
        problem: loss and init.
        batch: on the device.
        key: of the parameters and of the steps.
        models: the sizes.
    """

    problem: Problem
    batch: Any
    key: Any
    models: Models

    def pipe(self, schedule: str, remat: Any = "least", devices: Sequence[Device] | None = None, **options: Any) -> jaxpp.Pipeline:
        """A pipeline of the model, with further options of it; its stages share the devices there are, a single one if need be."""
        count = self.models.microbatches
        made = make(schedule, num_ranks=self.models.stages // SCHEDULES[schedule].stages_per_rank, num_microbatches=count)
        more: dict[str, Any] = {"num_stages": self.models.stages, "num_microbatches": count, **options}
        return jaxpp.Pipeline(self.problem.loss_fn, OPTIMIZER, schedule=made, remat=remat, devices=devices, **more)

    def init(self, pipe: jaxpp.Pipeline) -> jaxpp.State:
        """The first state of such a pipeline."""
        return pipe.init(self.problem.init, self.key, self.batch)


def ready(model: str, models: Models, compute: str) -> Ready:
    """A model by its name.

    Args:
        model: gpt, resnet or mlp.
        models: its sizes.
        compute: the type to compute in.
    """
    problem = PROBLEMS[model](models, compute)
    return Ready(problem, jax.tree.map(jnp.asarray, problem.batch), jax.random.key(0), models)
