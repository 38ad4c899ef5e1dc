"""What is known of jobs that rest: one row each, so that a stream need not hold them.

The version before has such jobs in memory and in snapshots. After a downgrade it begins them cold: with their open
incidents, their numbers and their checkpoints, which stand in tables of their own.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "resting_job",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("partition", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("control_position", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_resting_job")),
    )


def downgrade() -> None:
    op.drop_table("resting_job")
