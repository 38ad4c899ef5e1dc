"""Logs as training programs write them."""
