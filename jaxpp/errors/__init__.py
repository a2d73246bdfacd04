"""What can go wrong: the errors and their template, arguments checked as the user wrote them, tracebacks that end at the user."""

from jaxpp.errors.kinds import (
    ArgumentError,
    BankError,
    BatchError,
    CutError,
    InitError,
    JaxppError,
    LossError,
    NonFiniteError,
    OptimizerError,
    ParamsError,
    PullbackError,
    ScheduleError,
    StateError,
    VerifyError,
    shown,
    warn,
)

__all__ = [
    "ArgumentError",
    "BankError",
    "BatchError",
    "CutError",
    "InitError",
    "JaxppError",
    "LossError",
    "NonFiniteError",
    "OptimizerError",
    "ParamsError",
    "PullbackError",
    "ScheduleError",
    "StateError",
    "VerifyError",
    "shown",
    "warn",
]
