"""Which settings detectors have in which jobs. Pure."""
