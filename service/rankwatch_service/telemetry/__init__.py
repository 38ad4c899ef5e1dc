"""A batch of telemetry from bytes to arrays. Pure."""
