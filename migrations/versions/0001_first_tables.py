"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "agent_view",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("ranks", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", "host", name=op.f("pk_agent_view")),
    )
    op.create_table(
        "attempt",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ended_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("topology", sa.JSON(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", name=op.f("pk_attempt")),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("previous_sha256", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sa.UniqueConstraint("previous_sha256", name=op.f("uq_audit_previous_sha256")),
    )
    op.create_table(
        "checkpoint",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("shards_expected", sa.BigInteger(), nullable=False),
        sa.Column("shards", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("verdict_reason", sa.Text(), nullable=False),
        sa.Column("saved_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "id", name=op.f("pk_checkpoint")),
    )
    op.create_table(
        "command",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("approval_required", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("applied_step", sa.BigInteger(), nullable=True),
        sa.Column("requested_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("applied_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("finished_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_command")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_command_idempotency_key")),
    )
    with op.batch_alter_table("command", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_command_job"), ["job"], unique=False)
        batch_op.create_index(batch_op.f("ix_command_state"), ["state"], unique=False)

    op.create_table(
        "dead_letter",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
    )
    op.create_table(
        "delivery",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("outbox_id", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_delivery")),
    )
    with op.batch_alter_table("delivery", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_delivery_outbox_id"), ["outbox_id"], unique=False)

    op.create_table(
        "feed",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feed")),
    )
    op.create_table(
        "host_record",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device_uuid", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_host_record")),
    )
    with op.batch_alter_table("host_record", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_host_record_host"), ["host"], unique=False)

    op.create_table(
        "idempotent_reply",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name=op.f("pk_idempotent_reply")),
    )
    op.create_table(
        "incident",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("episode", sa.BigInteger(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.Column("onset_step", sa.BigInteger(), nullable=True),
        sa.Column("detected_step", sa.BigInteger(), nullable=True),
        sa.Column("resolved_step", sa.BigInteger(), nullable=True),
        sa.Column("onset_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("detected_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("resolved_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("confidence", sa.Double(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("consequences", sa.JSON(), nullable=False),
        sa.Column("changes_before", sa.JSON(), nullable=False),
        sa.Column("impact_gpu_hours_per_hour", sa.Double(), nullable=False),
        sa.Column("suggestion", sa.JSON(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("transitions", sa.BigInteger(), nullable=False),
        sa.Column("acknowledged_by", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident")),
    )
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_incident_job"), ["job"], unique=False)
        batch_op.create_index(batch_op.f("ix_incident_state"), ["state"], unique=False)

    op.create_table(
        "job",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("ranks_reporting", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("first_seen_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job")),
    )
    op.create_table(
        "log_partition",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", name=op.f("pk_log_partition")),
    )
    op.create_table(
        "log_record",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("appended_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "position", name=op.f("pk_log_record")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("transition", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("next_try_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("delivered_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.create_index("ix_outbox_due", ["state", "next_try_unix_ns"], unique=False)
        batch_op.create_index(batch_op.f("ix_outbox_incident_id"), ["incident_id"], unique=False)

    op.create_table(
        "policy_rule",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("confidence_min", sa.Double(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_rule")),
    )
    op.create_table(
        "receiver",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("severities", sa.JSON(), nullable=False),
        sa.Column("jobs", sa.JSON(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_receiver")),
    )
    op.create_table(
        "series_chunk",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("chunk", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", "metric", "chunk", name=op.f("pk_series_chunk")),
    )
    with op.batch_alter_table("series_chunk", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_series_chunk_at_unix_ns"), ["at_unix_ns"], unique=False)

    op.create_table(
        "setting",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_setting")),
    )
    op.create_table(
        "silence",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("starts_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ends_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_silence")),
    )
    op.create_table(
        "snapshot",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("partition", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("chunks", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshot")),
    )
    op.create_table(
        "stream_position",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", name=op.f("pk_stream_position")),
    )
    op.create_table(
        "stream_tick",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "number", name=op.f("pk_stream_tick")),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("last_used_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
    )
    op.create_table(
        "command_order",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("command_id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("try_number", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("checkpoint_step", sa.BigInteger(), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=False),
        sa.Column("culprits", sa.JSON(), nullable=False),
        sa.Column("phase_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("lease_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["command_id"], ["command.id"], name=op.f("fk_command_order_command_id_command"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_command_order")),
    )
    with op.batch_alter_table("command_order", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_command_order_command_id"), ["command_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_command_order_job"), ["job"], unique=False)

    op.create_table(
        "incident_transition",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"],
            ["incident.id"],
            name=op.f("fk_incident_transition_incident_id_incident"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("incident_id", "number", name=op.f("pk_incident_transition")),
    )
    op.create_table(
        "snapshot_chunk",
        sa.Column("snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshot.id"], name=op.f("fk_snapshot_chunk_snapshot_id_snapshot"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("snapshot_id", "number", name=op.f("pk_snapshot_chunk")),
    )


def downgrade() -> None:
    op.drop_table("snapshot_chunk")
    op.drop_table("incident_transition")
    with op.batch_alter_table("command_order", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_command_order_job"))
        batch_op.drop_index(batch_op.f("ix_command_order_command_id"))

    op.drop_table("command_order")
    op.drop_table("token")
    op.drop_table("stream_tick")
    op.drop_table("stream_position")
    op.drop_table("snapshot")
    op.drop_table("silence")
    op.drop_table("setting")
    with op.batch_alter_table("series_chunk", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_series_chunk_at_unix_ns"))

    op.drop_table("series_chunk")
    op.drop_table("receiver")
    op.drop_table("policy_rule")
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_outbox_incident_id"))
        batch_op.drop_index("ix_outbox_due")

    op.drop_table("outbox")
    op.drop_table("log_record")
    op.drop_table("log_partition")
    op.drop_table("job")
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_incident_state"))
        batch_op.drop_index(batch_op.f("ix_incident_job"))

    op.drop_table("incident")
    op.drop_table("idempotent_reply")
    with op.batch_alter_table("host_record", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_host_record_host"))

    op.drop_table("host_record")
    op.drop_table("feed")
    with op.batch_alter_table("delivery", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_delivery_outbox_id"))

    op.drop_table("delivery")
    op.drop_table("dead_letter")
    with op.batch_alter_table("command", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_command_state"))
        batch_op.drop_index(batch_op.f("ix_command_job"))

    op.drop_table("command")
    op.drop_table("checkpoint")
    op.drop_table("audit")
    op.drop_table("attempt")
    op.drop_table("agent_view")
