"""Whether the job makes progress."""
