"""Online statistics that detectors are made of: levels, shifts, spreads, quantiles."""
