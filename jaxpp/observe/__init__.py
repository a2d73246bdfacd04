"""What happened, and what will: timelines, why ranks idled, what memory held and will hold, what programs run and communicate."""

from jaxpp.observe.bound import StepBound
from jaxpp.observe.collectives import Collectives, read_collectives
from jaxpp.observe.memory.forecast import Forecast, Frontier
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.profile.export import to_html, to_json, to_perfetto
from jaxpp.observe.profile.profile import Profile
from jaxpp.observe.profile.record import from_trace
from jaxpp.observe.programs import ProgramRow, ProgramTable
from jaxpp.runtime.roofline import Prediction

__all__ = [
    "Collectives",
    "Forecast",
    "Frontier",
    "Ledger",
    "Prediction",
    "Profile",
    "ProgramRow",
    "ProgramTable",
    "StepBound",
    "from_trace",
    "read_collectives",
    "to_html",
    "to_json",
    "to_perfetto",
]
