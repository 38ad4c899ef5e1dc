"""Recorded telemetry with labels: what the detectors make of it."""
