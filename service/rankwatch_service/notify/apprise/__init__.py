"""Delivery by Apprise, an optional extra: the sender, and the process that makes one try."""
