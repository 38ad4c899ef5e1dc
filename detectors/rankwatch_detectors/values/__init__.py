"""Detectors of the values that training computes: NaN, differing replicas, loss and gradient norm."""
