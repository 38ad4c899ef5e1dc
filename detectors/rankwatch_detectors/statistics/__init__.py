"""Online statistics that detectors are built from: levels, shifts, spreads, quantiles."""
