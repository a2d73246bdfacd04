"""``python -m experiments.schedules``."""

from experiments.schedules.main import main

main()
