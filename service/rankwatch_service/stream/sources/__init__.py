"""Sources of telemetry: the log in the store, or Kafka."""
