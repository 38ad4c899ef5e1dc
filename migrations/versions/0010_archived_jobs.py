"""Jobs that people have archived. The version before shows them like all others."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("archived_unix_ns", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "archived_unix_ns")
