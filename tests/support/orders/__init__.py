"""Orders and commands in discrete time."""
