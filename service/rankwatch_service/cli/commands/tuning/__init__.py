"""`rankwatch tuning`."""
