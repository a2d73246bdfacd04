"""``python -m experiments.plan``."""

from experiments.plan.main import main

main()
