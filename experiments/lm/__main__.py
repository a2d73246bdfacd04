"""``python -m experiments.lm``."""

from experiments.lm.main import main

main()
