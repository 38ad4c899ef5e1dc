"""What holds for every request: identity, bodies, problems, pages, cursors, idempotency."""
