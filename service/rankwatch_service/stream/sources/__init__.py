"""Where a stream process reads telemetry from: the log in the store, or Kafka."""
