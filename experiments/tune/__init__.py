"""Does tune choose the fastest pipeline? Its choice beside every candidate, run on this machine."""
