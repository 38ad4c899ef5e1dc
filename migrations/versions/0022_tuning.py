"""Versions of the tunings of detectors."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tuning_version",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tunings", sa.JSON(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_tuning_version")),
    )


def downgrade() -> None:
    op.drop_table("tuning_version")
