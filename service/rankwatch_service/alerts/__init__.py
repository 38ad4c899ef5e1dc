"""Alerts of a Prometheus, as it sends them to an Alertmanager: what they say, which jobs they concern, their rows."""
