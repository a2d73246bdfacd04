"""``python -m experiments.visits``."""

from experiments.visits.main import main

main()
