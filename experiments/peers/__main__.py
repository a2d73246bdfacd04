"""``python -m experiments.peers``."""

from experiments.peers.main import main

if __name__ == "__main__":  # each worker process imports this file again
    main()
