"""Logs: telemetry and control records, ordered and durable, and dead letters."""
