"""``python -m experiments.costs``."""

from experiments.costs.main import main

main()
