"""The stream process: reads telemetry, gives it to jobs, and commits what follows from it once."""
