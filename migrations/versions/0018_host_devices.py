"""Network ports and hosts have counters as GPUs have. A table of their own, which earlier versions do not know."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_host_device",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "kind", "number", name=op.f("pk_job_host_device")),
    )
    op.create_index(op.f("ix_job_host_device_host"), "job_host_device", ["host"])


def downgrade() -> None:
    op.drop_index(op.f("ix_job_host_device_host"), table_name="job_host_device")
    op.drop_table("job_host_device")
