"""The tables of the first version: those of the models until it is released, then written out.

`alembic revision --autogenerate` writes them out; a second revision needs that, as it changes the models.
"""

from alembic import op

from rankwatch_service.store.models import Base

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# PostgreSQL need not compress again what these hold.
COMPRESSED = {"series_chunk": ("data",), "series_rollup": ("low", "high", "mark", "lines"), "snapshot_chunk": ("data",)}


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind(), checkfirst=False)
    op.execute("INSERT INTO control_end (id, next_position) VALUES (0, 0)")
    if op.get_context().dialect.name == "postgresql":
        for table, columns in COMPRESSED.items():
            for column in columns:
                op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
