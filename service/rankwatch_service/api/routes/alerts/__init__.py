"""Alerts of a Prometheus: those that it sends, and those that wait."""
