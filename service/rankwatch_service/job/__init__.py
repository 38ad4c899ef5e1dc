"""One job: its batches and ticks in, observations, findings and effects out. Pure."""
