"""Measures a rank through torch: gradient norms, non-finite gradients, fingerprints, waits in collectives."""

from rankwatch.torch_probe.fingerprint import fingerprint
from rankwatch.torch_probe.probe import TorchProbe

__all__ = ["TorchProbe", "fingerprint"]
