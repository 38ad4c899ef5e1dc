"""Synthetic jobs with labelled faults."""
