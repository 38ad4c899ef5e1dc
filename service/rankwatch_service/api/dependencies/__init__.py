"""What FastAPI hands to the routes that ask for it: the shared context, idempotency, event streams."""
