"""Findings become incidents: what belongs together, what brought it about, and when it is over. Pure."""
