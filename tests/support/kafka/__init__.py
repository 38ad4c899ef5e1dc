"""Kafka brokers."""
