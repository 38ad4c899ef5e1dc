"""Whom the agent believes: its own identity, the orders that it obeys, the locations that it passes on."""
