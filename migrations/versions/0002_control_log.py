"""The control log beside the log of telemetry: ticks bring its records to the stream.

Columns are added and dropped in place: copying a table, as a batch on SQLite does, would take its chunks with it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_PLACES = ("stream_position", "stream_tick", "snapshot")


def upgrade() -> None:
    op.create_table(
        "control_end",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_control_end")),
    )
    op.create_table(
        "control_record",
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("appended_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_control_record")),
    )
    for table in _PLACES:
        op.add_column(table, sa.Column("control_position", sa.BigInteger(), nullable=False, server_default="0"))
    for needed in ("position_needed", "control_needed"):
        op.add_column("stream_position", sa.Column(needed, sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "stream_report",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("tick_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("lost_records", sa.BigInteger(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", name=op.f("pk_stream_report")),
    )
    op.create_table(
        "stream_process",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("counters", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_stream_process")),
    )
    _move_control_records()
    op.drop_column("log_record", "kind")


def _move_control_records() -> None:
    """What stood between telemetry takes its place in the new log; each old place knew those that lay before it."""
    op.execute(
        "INSERT INTO control_record (position, key, value, appended_unix_ns) "
        "SELECT row_number() OVER (ORDER BY partition, position) - 1, key, value, appended_unix_ns "
        "FROM log_record WHERE kind = 'control'"
    )
    op.execute("INSERT INTO control_end (id, next_position) SELECT 0, count(*) FROM control_record")
    for table in _PLACES:
        op.execute(
            f"UPDATE {table} SET control_position = (SELECT count(*) FROM log_record WHERE kind = 'control' "  # noqa: S608
            f"AND log_record.partition = {table}.partition AND log_record.position < {table}.position)"
        )
    op.execute("DELETE FROM log_record WHERE kind = 'control'")
    oldest = "SELECT min(position) FROM log_record WHERE log_record.partition"
    op.execute(
        "UPDATE stream_position SET position_needed = "  # noqa: S608
        f"coalesce(({oldest} = stream_position.partition AND log_record.position < stream_position.position), "
        "stream_position.position)"
    )
    # Where a control record stood at a snapshot's place, the next telemetry stands there now.
    op.execute(
        f"UPDATE snapshot SET position = coalesce(({oldest} = snapshot.partition "  # noqa: S608
        "AND log_record.position >= snapshot.position), (SELECT position FROM stream_position "
        "WHERE stream_position.partition = snapshot.partition), position)"
    )


def downgrade() -> None:
    op.add_column("log_record", sa.Column("kind", sa.Text(), nullable=False, server_default="telemetry"))
    _append_control_records()
    for table in _PLACES:
        op.drop_column(table, "control_position")
    op.drop_column("stream_position", "control_needed")
    op.drop_column("stream_position", "position_needed")
    op.drop_table("stream_process")
    op.drop_table("stream_report")
    op.drop_table("control_record")
    op.drop_table("control_end")


def _append_control_records() -> None:
    """What no partition has applied yet goes to the end of the log; what was applied lives in snapshots and rows."""
    applied = "(SELECT coalesce(max(control_position), 0) FROM stream_position)"
    op.execute(
        "INSERT INTO log_record (partition, position, key, kind, value, appended_unix_ns) "  # noqa: S608
        "SELECT 0, (SELECT coalesce(max(next_position), 0) FROM log_partition WHERE partition = 0) "
        "+ row_number() OVER (ORDER BY position) - 1, key, 'control', value, appended_unix_ns "
        f"FROM control_record WHERE position >= {applied}"
    )
    op.execute(
        "INSERT INTO log_partition (partition, next_position) SELECT 0, 0 "
        "WHERE NOT EXISTS (SELECT 1 FROM log_partition WHERE partition = 0)"
    )
    op.execute(
        "UPDATE log_partition SET next_position = next_position + "  # noqa: S608
        f"(SELECT count(*) FROM control_record WHERE position >= {applied}) WHERE partition = 0"
    )
