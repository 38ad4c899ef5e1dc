"""Project and owner of jobs, which tokens pass on, and rules and receivers of projects."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_project",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_job_project")),
    )
    op.create_index("ix_job_project_project", "job_project", ["project"])
    for name in ("project", "owner"):
        op.add_column("token", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    op.add_column("policy_rule", sa.Column("project", sa.Text(), nullable=False, server_default=""))
    op.add_column("receiver", sa.Column("projects", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("receiver", "projects")
    op.drop_column("policy_rule", "project")
    for name in ("owner", "project"):
        op.drop_column("token", name)
    op.drop_index("ix_job_project_project", table_name="job_project")
    op.drop_table("job_project")
