"""Pipeline parallelism for any JAX/Flax model, from one Python process."""

from jaxpp import observe, schedule
from jaxpp.bank import Bank
from jaxpp.grad import value_and_grad
from jaxpp.observe.detector import DeadStageWarning
from jaxpp.pipeline import Pipeline
from jaxpp.runtime.transfer import gather
from jaxpp.stages.uneven import UnevenStagesWarning
from jaxpp.state import Metrics, State

__all__ = [
    "Bank",
    "DeadStageWarning",
    "Metrics",
    "Pipeline",
    "State",
    "UnevenStagesWarning",
    "gather",
    "observe",
    "schedule",
    "value_and_grad",
]
