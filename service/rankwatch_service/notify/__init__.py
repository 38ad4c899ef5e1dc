"""Delivers the outbox: a committed notification reaches its receiver signed and in order, whatever crashes."""
