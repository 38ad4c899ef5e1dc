"""Alerts of a Prometheus that fire."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alert",
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("is_reported", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("annotations", sa.JSON(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("starts_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ends_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", "job", name=op.f("pk_alert")),
    )
    op.create_index(op.f("ix_alert_ends_unix_ns"), "alert", ["ends_unix_ns"])


def downgrade() -> None:
    op.drop_index(op.f("ix_alert_ends_unix_ns"), table_name="alert")
    op.drop_table("alert")
