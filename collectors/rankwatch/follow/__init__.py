"""`rankwatch follow FILE`: the log of a job that nobody may change, read while it grows, as telemetry of one rank."""
