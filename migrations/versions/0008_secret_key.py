"""The key of cursors is derived from the service's secret key, which is not in the database. The stored one goes.

Roles encrypt the URLs and secrets of receivers when they start, since a migration has no key.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("DELETE FROM setting WHERE name = 'api.seal'")


def downgrade() -> None:
    """Remove what the version before cannot decrypt; it creates a key of cursors again."""
    op.execute("DELETE FROM receiver WHERE secret NOT LIKE 'whsec_%'")
    op.execute("DELETE FROM idempotent_reply")
    op.execute("DELETE FROM setting WHERE name = 'access.secret_key'")
