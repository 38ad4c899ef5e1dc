"""The service itself: health, metrics, stream, tokens, sessions, the audit trail."""
