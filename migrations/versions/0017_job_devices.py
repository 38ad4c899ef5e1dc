"""The devices of a job's hosts, whose counters are series."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_device",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_job_device")),
    )


def downgrade() -> None:
    op.drop_table("job_device")
