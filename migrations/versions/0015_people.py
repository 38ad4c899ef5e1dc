"""Sessions of people who have logged in with an OIDC provider, and how long tokens of agents are renewed for.

The version before takes such a session for one of its name, of every job: end these sessions before going back.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("token", sa.Column("person", sa.Text(), nullable=False, server_default=""))
    op.add_column("token", sa.Column("grants", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("token", sa.Column("lasts_ns", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.execute("DELETE FROM token WHERE person <> ''")
    op.drop_column("token", "lasts_ns")
    op.drop_column("token", "grants")
    op.drop_column("token", "person")
