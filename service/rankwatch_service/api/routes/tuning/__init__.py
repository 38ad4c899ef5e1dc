"""Tunings, their preview, and the export of what a job has reported."""
