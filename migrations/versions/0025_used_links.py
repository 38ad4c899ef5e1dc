"""Links of messages that have been used."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "used_link",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("used_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_used_link")),
    )


def downgrade() -> None:
    op.drop_table("used_link")
