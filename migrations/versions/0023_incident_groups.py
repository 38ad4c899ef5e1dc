"""Groups of incidents that share their messages, and to which group a message belongs.

The version before goes on without them: it sends what is waiting, and what is not grouped yet to nobody.
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "incident_group",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_incident_group")),
    )
    op.add_column("outbox", sa.Column("group_key", sa.Text(), nullable=False, server_default=""))
    op.create_index(op.f("ix_outbox_group_key"), "outbox", ["group_key"])


def downgrade() -> None:
    op.drop_index(op.f("ix_outbox_group_key"), table_name="outbox")
    op.drop_column("outbox", "group_key")
    op.drop_table("incident_group")
