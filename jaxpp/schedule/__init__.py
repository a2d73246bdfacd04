"""What order: schedules as plain values. Nothing in this folder imports JAX."""

from jaxpp.schedule.action import Action, Kind, parse
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import dependencies
from jaxpp.schedule.csv import from_csv
from jaxpp.schedule.generators.forward import forward
from jaxpp.schedule.generators.ring import ring
from jaxpp.schedule.prefetch import simulate_prefetch
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.schedule.simulate import Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "Simulation",
    "dependencies",
    "forward",
    "from_csv",
    "make",
    "parse",
    "ring",
    "simulate",
    "simulate_prefetch",
]
