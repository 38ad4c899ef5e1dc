"""Changes of the configuration of jobs, which charts mark."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("configuration", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("job", "configuration")
