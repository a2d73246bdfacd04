"""Order x stages: a step as a flat list of instructions over ranks. No device is touched here."""
