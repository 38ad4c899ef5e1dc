"""Recorded logs, and what a stream makes of them."""
