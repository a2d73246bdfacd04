"""``python -m experiments.bubble``."""

from experiments.bubble.main import main

main()
