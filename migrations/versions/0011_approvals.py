"""Who asked for a command and who approved it, for how many ranks; notifications about commands.

The version before goes on without them: it shows no break-glass, and lets a requester's other token approve.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("command", sa.Column("requester", sa.Text(), nullable=False, server_default=""))
    op.add_column("command", sa.Column("world_size", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("command", sa.Column("approved_by", sa.Text(), nullable=True))
    op.add_column("command", sa.Column("break_glass", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("outbox", sa.Column("command_id", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("outbox", "command_id")
    op.drop_column("command", "break_glass")
    op.drop_column("command", "approved_by")
    op.drop_column("command", "world_size")
    op.drop_column("command", "requester")
