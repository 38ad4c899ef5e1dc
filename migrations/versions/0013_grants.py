"""What jobs were allowed to have state for, by record. A version from before has no such limit.

What it has processed already is replayed without one.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stream_grant",
        sa.Column("partition", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("position", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("cells", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "position"),
    )
    op.add_column("stream_position", sa.Column("granted_since", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE stream_position SET granted_since = position")


def downgrade() -> None:
    op.drop_column("stream_position", "granted_since")
    op.drop_table("stream_grant")
