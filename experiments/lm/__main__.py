"""``python -m experiments.lm``."""

import signal

from experiments.lm.main import main

signal.signal(signal.SIGINT, signal.SIG_DFL)  # where no run is saved, Ctrl-C ends the process at once and without a traceback
main()
