"""What ranks and devices last reported. Pure."""
