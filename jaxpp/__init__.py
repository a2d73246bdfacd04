"""Pipeline parallelism for any JAX/Flax model, from one Python process."""

from jaxpp import observe, schedule
from jaxpp.engine.state import Metrics, State
from jaxpp.grad import value_and_grad
from jaxpp.observe.dead_stages import DeadStageWarning
from jaxpp.pipeline import Pipeline
from jaxpp.runtime.processes.trees.array_handler import array_handler
from jaxpp.runtime.transfer import gather
from jaxpp.stages.cuts.uneven import UnevenStagesWarning
from jaxpp.tasks.bank import Bank

__all__ = [
    "Bank",
    "DeadStageWarning",
    "Metrics",
    "Pipeline",
    "State",
    "UnevenStagesWarning",
    "array_handler",
    "gather",
    "observe",
    "schedule",
    "value_and_grad",
]

__version__ = "0.1.0"
