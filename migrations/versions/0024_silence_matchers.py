"""Matchers of silences.

The version before knows none: a silence that has some mutes there all that its job, kind and scope match.
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("silence", sa.Column("matchers", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("silence", "matchers")
