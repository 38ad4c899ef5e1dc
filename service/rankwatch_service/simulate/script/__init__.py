"""Faults written as text."""
