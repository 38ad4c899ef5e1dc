"""What causes what: which incident takes up which finding, and which conditions are suspected."""
