"""What ranks recorded for a trace."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rank_trace",
        sa.Column("command_id", sa.Text(), nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["command_id"], ["command.id"], name=op.f("fk_rank_trace_command_id_command"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("command_id", "rank", name=op.f("pk_rank_trace")),
    )


def downgrade() -> None:
    op.drop_table("rank_trace")
