"""Detectors of faults that devices report."""
