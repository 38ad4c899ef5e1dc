"""Whole installations that are disturbed, and what must hold afterwards."""
