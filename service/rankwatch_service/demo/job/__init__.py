"""The training jobs of the demo."""
