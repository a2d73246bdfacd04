"""``python -m experiments.overhead``."""

from experiments.overhead.main import main

main()
