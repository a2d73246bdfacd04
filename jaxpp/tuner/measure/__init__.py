"""What the programs of a family cost on real devices: steps that are run, looked at, and remembered."""
