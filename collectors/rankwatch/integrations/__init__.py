"""Step boundaries where the loop is not ours: what untouched scripts and frameworks share, and each framework."""
