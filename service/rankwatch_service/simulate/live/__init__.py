"""Sends a synthetic job into a running service."""
