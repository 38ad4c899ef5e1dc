"""Rank processes, their recorders and what they train."""
