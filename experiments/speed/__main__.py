"""``python -m experiments.speed``."""

from experiments.speed.main import main

main()
