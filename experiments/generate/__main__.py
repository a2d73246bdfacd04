"""``python -m experiments.generate``."""

from experiments.generate.main import main

main()
