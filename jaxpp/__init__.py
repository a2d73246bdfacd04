"""Pipeline parallelism for any JAX/Flax model, from one Python process."""

from jaxpp import schedule
from jaxpp.grad import value_and_grad
from jaxpp.pipeline import Metrics, Pipeline, State
from jaxpp.runtime.transfer import gather

__all__ = ["Metrics", "Pipeline", "State", "gather", "schedule", "value_and_grad"]
