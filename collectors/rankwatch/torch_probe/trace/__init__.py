"""Traces: torch's profiler over a few steps, and what it recorded as a summary."""
