"""What runs: the loss traced, cut, and turned into the programs of each stage. No device is touched here."""
