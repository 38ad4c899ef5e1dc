"""What torch can tell about a rank: gradient norms, non-finite gradients, fingerprints, waits in collectives."""
