"""Detectors of what devices say of themselves."""
