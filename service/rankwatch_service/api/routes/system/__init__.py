"""The service itself: health, metrics, tokens, sessions, the audit trail."""
