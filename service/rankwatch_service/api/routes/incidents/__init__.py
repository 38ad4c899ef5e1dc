"""Incidents: the list with its filters, totals, one incident, and what people say about it."""
