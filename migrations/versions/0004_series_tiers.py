"""Roll-ups of series, and sizes that can be summed up without reading what they are of.

What is stored already gets no roll-ups: charts of up to 64 steps a point show it, longer ones begin with what is
written from now on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_BLOBS = ("low", "high", "mark", "lines")


def upgrade() -> None:
    op.create_table(
        "series_rollup",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("level", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("chunk", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.LargeBinary(), nullable=False) for name in _BLOBS),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "metric", "level", "chunk", "attempt", name=op.f("pk_series_rollup")),
    )
    op.create_index("ix_series_rollup_age", "series_rollup", ["at_unix_ns", "size_bytes"])
    op.add_column("series_chunk", sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE series_chunk SET size_bytes = length(data)")
    op.drop_index("ix_series_chunk_at_unix_ns", "series_chunk")
    op.create_index("ix_series_chunk_age", "series_chunk", ["at_unix_ns", "size_bytes"])
    op.create_index("ix_series_chunk_steps", "series_chunk", ["job", "metric", "chunk"])
    if op.get_bind().dialect.name == "postgresql":
        # They are compressed already.
        for name in _BLOBS:
            op.execute(f"ALTER TABLE series_rollup ALTER COLUMN {name} SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.drop_index("ix_series_chunk_steps", "series_chunk")
    op.drop_index("ix_series_chunk_age", "series_chunk")
    # What this version wrote, the one before cannot read.
    op.execute("DELETE FROM series_chunk")
    op.drop_column("series_chunk", "size_bytes")
    op.create_index("ix_series_chunk_at_unix_ns", "series_chunk", ["at_unix_ns"])
    op.drop_table("series_rollup")
