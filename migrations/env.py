"""Alembic's entry point. `store.migrate` hands in a connection that already holds the lock and a transaction."""

from alembic import context

from rankwatch_service.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
