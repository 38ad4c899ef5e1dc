"""Turns findings into incidents: what belongs together, what caused it, and when it is over. Pure."""
