"""What training computes: NaN, differing replicas, loss and gradient norm."""
