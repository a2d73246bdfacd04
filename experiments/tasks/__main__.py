"""``python -m experiments.tasks``."""

from experiments.tasks.main import main

main()
