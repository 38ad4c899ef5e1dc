"""The policy, and what another one would have done."""
