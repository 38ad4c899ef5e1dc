"""Agents enrol, tokens of jobs admit a number of them, and views say which agent they are from."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "agent",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("enrolled_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_agent_job", "agent", ["job"])
    op.create_index("ix_agent_token_id", "agent", ["token_id"])
    op.add_column("token", sa.Column("hosts_max", sa.BigInteger(), nullable=True))
    op.add_column("token", sa.Column("loopback", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("agent_view", sa.Column("agent", sa.Text(), nullable=False, server_default=""))
    op.create_index("ix_agent_view_agent", "agent_view", ["agent"])


def downgrade() -> None:
    op.drop_index("ix_agent_view_agent", "agent_view")
    op.drop_column("agent_view", "agent")
    op.drop_column("token", "loopback")
    op.drop_column("token", "hosts_max")
    op.drop_table("agent")
