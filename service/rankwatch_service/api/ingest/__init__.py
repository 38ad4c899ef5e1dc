"""Accepted telemetry on its way to the log: batched into the store, or published to Kafka."""
