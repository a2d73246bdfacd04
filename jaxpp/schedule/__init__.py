"""What order: schedules as plain values. Nothing in this folder imports JAX."""

from jaxpp.schedule.action import Action, Kind, parse
from jaxpp.schedule.base import Schedule, from_csv
from jaxpp.schedule.clock import dependencies
from jaxpp.schedule.flow import flow
from jaxpp.schedule.forward import forward, ring
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.schedule.simulate import Simulation, simulate, simulate_prefetch
from jaxpp.schedule.synthesis.synthesise import synthesise

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "Simulation",
    "dependencies",
    "flow",
    "forward",
    "from_csv",
    "make",
    "parse",
    "ring",
    "simulate",
    "simulate_prefetch",
    "synthesise",
]
