"""People's feedback on incidents."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "incident_feedback",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"],
            ["incident.id"],
            name=op.f("fk_incident_feedback_incident_id_incident"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("incident_id", "person", name=op.f("pk_incident_feedback")),
    )
    op.create_index(op.f("ix_incident_detected_unix_ns"), "incident", ["detected_unix_ns"])


def downgrade() -> None:
    # An earlier stream forgets the precision that it was told, so after an upgrade it has to be told again.
    op.execute(sa.text("DELETE FROM setting WHERE name = 'precision'"))
    op.drop_index(op.f("ix_incident_detected_unix_ns"), table_name="incident")
    op.drop_table("incident_feedback")
