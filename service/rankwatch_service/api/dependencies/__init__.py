"""Dependencies of the routes: the shared context, idempotency, event streams."""
