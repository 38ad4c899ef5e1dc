"""A time-series engine for charts: chunks of raw values, roll-ups above them, and queries by points."""
