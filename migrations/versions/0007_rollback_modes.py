"""What a rollback took back, and which tries the ranks refused. Rows from before say nothing of it.

The version before shows such commands without their mode.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("command", sa.Column("mode", sa.Text(), nullable=False, server_default=""))
    op.add_column("command_order", sa.Column("mode", sa.Text(), nullable=False, server_default=""))
    op.add_column("command_order", sa.Column("refused", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("policy_rule", sa.Column("rollback_mode", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("policy_rule", "rollback_mode")
    op.drop_column("command_order", "refused")
    op.drop_column("command_order", "mode")
    op.drop_column("command", "mode")
