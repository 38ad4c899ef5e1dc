"""What other tunings would have told of a job: its stored telemetry as a file, and a replay of it with both."""
