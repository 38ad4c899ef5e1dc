"""Processes that the demo starts besides the training job."""
