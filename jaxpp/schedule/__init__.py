"""What order: schedules as plain values. Nothing in this wing imports jax."""

from jaxpp.schedule.action import Action, Kind, parse
from jaxpp.schedule.base import Schedule, dependencies
from jaxpp.schedule.registry import SCHEDULES, make

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "dependencies", "make", "parse"]
