"""Reads the log, assembles frames, detects, correlates and commits, once."""
