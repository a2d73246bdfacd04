"""``python -m experiments.published``."""

from experiments.published.main import main

main()
