"""Telemetry and agents' views come in here."""
