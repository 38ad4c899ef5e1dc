"""Rules on metrics that jobs log, and their preview."""
