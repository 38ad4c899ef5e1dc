"""Keys by which the service proves to agents that it has issued their token. The version before gives no proof."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("token", sa.Column("enrolment_key", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("token", "enrolment_key")
