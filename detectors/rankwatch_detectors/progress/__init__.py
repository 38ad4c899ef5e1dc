"""Whether steps are made at all."""
