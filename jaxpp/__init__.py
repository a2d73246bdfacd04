"""Pipeline parallelism for any JAX/Flax model, from one Python process."""

from jaxpp import errors, observe, schedule
from jaxpp.engine.state import Metrics, State
from jaxpp.errors import JaxppError
from jaxpp.forward.forward import Forward
from jaxpp.forward.generate import Generation
from jaxpp.forward.prompts import Token
from jaxpp.forward.sampling import Sampling
from jaxpp.forward.stream import Stream
from jaxpp.grad import value_and_grad
from jaxpp.observe.dead_stages import DeadStageWarning
from jaxpp.pipeline import Pipeline
from jaxpp.runtime.processes.trees import array_handler, gather
from jaxpp.stages.cuts.balance import UnevenStagesWarning
from jaxpp.stages.remat import Offload
from jaxpp.tasks.bank import Bank
from jaxpp.tuning import Tuning, tune

__all__ = [
    "Bank",
    "DeadStageWarning",
    "Forward",
    "Generation",
    "JaxppError",
    "Metrics",
    "Offload",
    "Pipeline",
    "Sampling",
    "State",
    "Stream",
    "Token",
    "Tuning",
    "UnevenStagesWarning",
    "array_handler",
    "errors",
    "gather",
    "observe",
    "schedule",
    "tune",
    "value_and_grad",
]

__version__ = "0.1.0"
