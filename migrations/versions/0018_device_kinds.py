"""Network ports and hosts have counters as GPUs have; each kind of device is numbered by itself."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("job_device") as batch_op:
        batch_op.add_column(sa.Column("kind", sa.Text(), server_default="gpu", nullable=False))
        batch_op.drop_constraint("pk_job_device", type_="primary")
        batch_op.create_primary_key("pk_job_device", ["job", "kind", "number"])


def downgrade() -> None:
    op.execute("DELETE FROM job_device WHERE kind <> 'gpu'")
    with op.batch_alter_table("job_device") as batch_op:
        batch_op.drop_constraint("pk_job_device", type_="primary")
        batch_op.drop_column("kind")
        batch_op.create_primary_key("pk_job_device", ["job", "number"])
