"""``python -m experiments.zoo``."""

from experiments.zoo.main import main

main()
