"""``python -m experiments.memory``."""

from experiments.memory.main import main

main()
