"""Detectors on observations that a test changes or writes."""
