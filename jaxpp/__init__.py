"""Pipeline parallelism for any JAX/Flax model, from one Python process.

Each name is imported when it is first used, so ``import jaxpp`` takes no time and ``jaxpp.schedule`` loads no JAX.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; ``_HOMES`` says the same to Python
    from jaxpp import errors, observe, schedule, targets
    from jaxpp.drop_in import value_and_grad
    from jaxpp.engine.layout import ModelStateWarning
    from jaxpp.engine.state import Metrics, State
    from jaxpp.errors import JaxppError
    from jaxpp.forward.decoder import decoder
    from jaxpp.forward.forward import Forward
    from jaxpp.forward.generate import Generation
    from jaxpp.forward.prompts import Token
    from jaxpp.forward.sampling import History, Sampling
    from jaxpp.forward.stream import Stream
    from jaxpp.losses import linear_cross_entropy
    from jaxpp.observe.dead_stages import DeadStageWarning, NanLossWarning
    from jaxpp.options import OptionWarning
    from jaxpp.pipeline import Pipeline
    from jaxpp.planning import Planning, plan
    from jaxpp.runtime.place import DevicesWarning
    from jaxpp.runtime.processes.trees import array_handler, gather
    from jaxpp.shardings import propose_shardings
    from jaxpp.stages.cuts.balance import UnevenStagesWarning
    from jaxpp.stages.loss.example_axis import MicrobatchWarning
    from jaxpp.stages.loss.microbatch import Microbatches
    from jaxpp.stages.remat import Offload
    from jaxpp.targets import GPU, target
    from jaxpp.tasks.bank import Bank
    from jaxpp.tuning import Tuning, tune

__all__ = [
    "GPU",
    "Bank",
    "DeadStageWarning",
    "DevicesWarning",
    "Forward",
    "Generation",
    "History",
    "JaxppError",
    "Metrics",
    "MicrobatchWarning",
    "Microbatches",
    "ModelStateWarning",
    "NanLossWarning",
    "Offload",
    "OptionWarning",
    "Pipeline",
    "Planning",
    "Sampling",
    "State",
    "Stream",
    "Token",
    "Tuning",
    "UnevenStagesWarning",
    "array_handler",
    "decoder",
    "errors",
    "gather",
    "linear_cross_entropy",
    "observe",
    "plan",
    "propose_shardings",
    "schedule",
    "target",
    "targets",
    "tune",
    "value_and_grad",
]

__version__ = "0.1.0"

_HOMES = {
    "GPU": "targets",
    "Bank": "tasks.bank",
    "DeadStageWarning": "observe.dead_stages",
    "DevicesWarning": "runtime.place",
    "Forward": "forward.forward",
    "Generation": "forward.generate",
    "History": "forward.sampling",
    "JaxppError": "errors",
    "Metrics": "engine.state",
    "NanLossWarning": "observe.dead_stages",
    "Offload": "stages.remat",
    "OptionWarning": "options",
    "Pipeline": "pipeline",
    "Planning": "planning",
    "Sampling": "forward.sampling",
    "State": "engine.state",
    "Stream": "forward.stream",
    "Token": "forward.prompts",
    "Tuning": "tuning",
    "ModelStateWarning": "engine.layout",
    "MicrobatchWarning": "stages.loss.example_axis",
    "Microbatches": "stages.loss.microbatch",
    "UnevenStagesWarning": "stages.cuts.balance",
    "array_handler": "runtime.processes.trees",
    "decoder": "forward.decoder",
    "gather": "runtime.processes.trees",
    "linear_cross_entropy": "losses",
    "target": "targets",
    "plan": "planning",
    "propose_shardings": "shardings",
    "tune": "tuning",
    "value_and_grad": "drop_in",
}
"""The module below ``jaxpp`` that defines each public name."""


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name not in __all__:
        near = [each for each in __all__ if len(name) > 2 and name.lower() in each.lower()] if not name.startswith("_") else []
        said = f"module {__name__!r} has no attribute {name!r}" + f"; there is {', '.join(near)}" * bool(near)
        raise AttributeError(said, name=name, obj=sys.modules[__name__])
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    globals()[name] = value = getattr(home, name) if name in _HOMES else home
    return value


def __dir__() -> list[str]:
    """The public names alone, before they are used and after."""
    return sorted([*__all__, "__version__"])
