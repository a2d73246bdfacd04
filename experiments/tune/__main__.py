"""``python -m experiments.tune``."""

from experiments.tune.main import main

main()
