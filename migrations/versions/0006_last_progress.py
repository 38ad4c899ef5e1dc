"""When a job last finished a step. The version before shows a job that hangs as running."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("last_progress_unix_ns", sa.BigInteger(), nullable=True))
    op.execute("UPDATE job SET last_progress_unix_ns = last_seen_unix_ns WHERE step >= 0")


def downgrade() -> None:
    op.execute("UPDATE job SET state = 'running' WHERE state = 'stalled'")
    op.drop_column("job", "last_progress_unix_ns")
