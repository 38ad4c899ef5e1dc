"""Outbox to webhooks: what is committed to the outbox reaches its receiver, signed, in order, and survives a crash."""
