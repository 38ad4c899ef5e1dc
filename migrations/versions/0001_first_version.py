"""The tables of the first version."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite only auto-increments a column that is INTEGER exactly.
AUTO_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# PostgreSQL need not compress again what these hold.
COMPRESSED = {"series_chunk": ("data",), "series_rollup": ("low", "high", "mark", "lines"), "snapshot_chunk": ("data",)}


def upgrade() -> None:
    op.create_table(
        "agent",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("enrolled_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_agent"),
    )
    op.create_index("ix_agent_host", "agent", ["host"])
    op.create_index("ix_agent_job", "agent", ["job"])
    op.create_index("ix_agent_token_id", "agent", ["token_id"])
    op.create_table(
        "agent_view",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("boot", sa.Text(), nullable=False),
        sa.Column("ranks", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "host", "attempt", name="pk_agent_view"),
    )
    op.create_index("ix_agent_view_agent", "agent_view", ["agent"])
    op.create_table(
        "alert",
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("is_reported", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("annotations", sa.JSON(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("starts_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("ends_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", "job", name="pk_alert"),
    )
    op.create_index("ix_alert_ends_unix_ns", "alert", ["ends_unix_ns"])
    op.create_table(
        "announcement",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("transition", sa.BigInteger(), nullable=False),
        sa.Column("command_id", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("places", sa.JSON(), nullable=False),
        sa.Column("detected_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_announcement"),
    )
    op.create_index("ix_announcement_job", "announcement", ["job"])
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
        sa.PrimaryKeyConstraint("job", "attempt", name="pk_attempt"),
    )
    op.create_table(
        "audit",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
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
        sa.PrimaryKeyConstraint("job", "id", name="pk_checkpoint"),
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
        sa.Column("requester", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("approval_required", sa.Boolean(), nullable=False),
        sa.Column("approved_by", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("applied_step", sa.BigInteger(), nullable=True),
        sa.Column("requested_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("applied_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("finished_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_command"),
        sa.UniqueConstraint("idempotency_key", name="uq_command_idempotency_key"),
    )
    op.create_index("ix_command_job", "command", ["job"])
    op.create_index("ix_command_state", "command", ["state"])
    op.create_table(
        "control_end",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_control_end"),
    )
    op.create_table(
        "control_record",
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("appended_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_control_record"),
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_dead_letter"),
    )
    op.create_table(
        "delivery",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("outbox_id", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_delivery"),
    )
    op.create_index("ix_delivery_outbox_id", "delivery", ["outbox_id"])
    op.create_table(
        "feed",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_feed"),
    )
    op.create_table(
        "host_record",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.Column("device_uuid", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_host_record"),
    )
    op.create_index("ix_host_record_host", "host_record", ["host"])
    op.create_table(
        "idempotent_reply",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name="pk_idempotent_reply"),
    )
    op.create_table(
        "incident",
        sa.Column("id", sa.Text(), nullable=False),
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
        sa.PrimaryKeyConstraint("id", name="pk_incident"),
    )
    op.create_index("ix_incident_detected_unix_ns", "incident", ["detected_unix_ns"])
    op.create_index("ix_incident_job", "incident", ["job"])
    op.create_index("ix_incident_state", "incident", ["state"])
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
        sa.Column("last_progress_unix_ns", sa.BigInteger(), nullable=True),
        sa.Column("dropped", sa.JSON(), nullable=False),
        sa.Column("configuration", sa.JSON(), nullable=False),
        sa.Column("accelerated", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_job"),
    )
    op.create_table(
        "job_device",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "number", name="pk_job_device"),
    )
    op.create_table(
        "job_host_device",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "kind", "number", name="pk_job_host_device"),
    )
    op.create_index("ix_job_host_device_host", "job_host_device", ["host"])
    op.create_table(
        "job_project",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_job_project"),
    )
    op.create_index("ix_job_project_project", "job_project", ["project"])
    op.create_table(
        "lease",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_lease"),
    )
    op.create_table(
        "log_partition",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("next_position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", name="pk_log_partition"),
    )
    op.create_table(
        "log_record",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.Column("appended_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "position", name="pk_log_record"),
    )
    op.create_table(
        "message_limit",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_message_limit"),
    )
    op.create_table(
        "metric_rule",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("rule", sa.JSON(), nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_metric_rule"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("transition", sa.BigInteger(), nullable=False),
        sa.Column("command_id", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("next_try_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("delivered_unix_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
    )
    op.create_index("ix_outbox_due", "outbox", ["state", "next_try_unix_ns"])
    op.create_index("ix_outbox_incident_id", "outbox", ["incident_id"])
    op.create_table(
        "policy_rule",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("confidence_min", sa.Double(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("rollback_mode", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_policy_rule"),
    )
    op.create_table(
        "receiver",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("severities", sa.JSON(), nullable=False),
        sa.Column("jobs", sa.JSON(), nullable=False),
        sa.Column("projects", sa.JSON(), nullable=False),
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.Column("after_s", sa.BigInteger(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=False),
        sa.Column("created_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_receiver"),
    )
    op.create_table(
        "resting_job",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("partition", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("control_position", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_resting_job"),
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
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", "metric", "chunk", name="pk_series_chunk"),
    )
    op.create_index("ix_series_chunk_age", "series_chunk", ["at_unix_ns", "size_bytes"])
    op.create_index("ix_series_chunk_steps", "series_chunk", ["job", "metric", "chunk"])
    op.create_table(
        "series_rollup",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("level", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("chunk", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.Column("ranks", sa.BigInteger(), nullable=False),
        sa.Column("low", sa.LargeBinary(), nullable=False),
        sa.Column("high", sa.LargeBinary(), nullable=False),
        sa.Column("mark", sa.LargeBinary(), nullable=False),
        sa.Column("lines", sa.LargeBinary(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", "metric", "level", "chunk", "attempt", name="pk_series_rollup"),
    )
    op.create_index("ix_series_rollup_age", "series_rollup", ["at_unix_ns", "size_bytes"])
    op.create_table(
        "setting",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("updated_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_setting"),
    )
    op.create_table(
        "signed_job",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("enrolled_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_signed_job"),
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
        sa.Column("matchers", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_silence"),
    )
    op.create_table(
        "snapshot",
        sa.Column("id", AUTO_ID, autoincrement=True, nullable=False),
        sa.Column("partition", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("control_position", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("chunks", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshot"),
    )
    op.create_table(
        "stream_grant",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("cells", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "position", name="pk_stream_grant"),
    )
    op.create_table(
        "stream_position",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tick_number", sa.BigInteger(), nullable=False),
        sa.Column("control_position", sa.BigInteger(), nullable=False),
        sa.Column("position_needed", sa.BigInteger(), nullable=False),
        sa.Column("control_needed", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", name="pk_stream_position"),
    )
    op.create_table(
        "stream_process",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("started_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("counters", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_stream_process"),
    )
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
        sa.PrimaryKeyConstraint("partition", name="pk_stream_report"),
    )
    op.create_table(
        "stream_tick",
        sa.Column("partition", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("control_position", sa.BigInteger(), nullable=False),
        sa.Column("time_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("partition", "number", name="pk_stream_tick"),
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
        sa.Column("hosts_max", sa.BigInteger(), nullable=True),
        sa.Column("loopback", sa.Boolean(), nullable=False),
        sa.Column("enrolment_key", sa.Text(), nullable=False),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("grants", sa.JSON(), nullable=False),
        sa.Column("lasts_ns", sa.BigInteger(), nullable=True),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("makers", sa.JSON(), nullable=False),
        sa.Column("admitted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_token"),
    )
    op.create_table(
        "tuning_version",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tunings", sa.JSON(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_tuning_version"),
    )
    op.create_table(
        "used_link",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("used_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_used_link"),
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
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("refused", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["command_id"], ["command.id"], name="fk_command_order_command_id_command", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_command_order"),
    )
    op.create_index("ix_command_order_command_id", "command_order", ["command_id"])
    op.create_index("ix_command_order_job", "command_order", ["job"])
    op.create_table(
        "incident_feedback",
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incident.id"], name="fk_incident_feedback_incident_id_incident", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("incident_id", "person", name="pk_incident_feedback"),
    )
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
            ["incident_id"], ["incident.id"], name="fk_incident_transition_incident_id_incident", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("incident_id", "number", name="pk_incident_transition"),
    )
    op.create_table(
        "rank_trace",
        sa.Column("command_id", sa.Text(), nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("at_unix_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["command_id"], ["command.id"], name="fk_rank_trace_command_id_command", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("command_id", "rank", name="pk_rank_trace"),
    )
    op.create_table(
        "snapshot_chunk",
        sa.Column("snapshot_id", AUTO_ID, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshot.id"], name="fk_snapshot_chunk_snapshot_id_snapshot", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("snapshot_id", "number", name="pk_snapshot_chunk"),
    )
    op.execute("INSERT INTO control_end (id, next_position) VALUES (0, 0)")
    if op.get_context().dialect.name == "postgresql":
        for table, columns in COMPRESSED.items():
            for column in columns:
                op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def downgrade() -> None:
    for table in (
        "snapshot_chunk",
        "rank_trace",
        "incident_transition",
        "incident_feedback",
        "command_order",
        "used_link",
        "tuning_version",
        "token",
        "stream_tick",
        "stream_report",
        "stream_process",
        "stream_position",
        "stream_grant",
        "snapshot",
        "silence",
        "signed_job",
        "setting",
        "series_rollup",
        "series_chunk",
        "resting_job",
        "receiver",
        "policy_rule",
        "outbox",
        "message_limit",
        "announcement",
        "metric_rule",
        "log_record",
        "log_partition",
        "lease",
        "job_project",
        "job_host_device",
        "job_device",
        "job",
        "incident",
        "idempotent_reply",
        "host_record",
        "feed",
        "delivery",
        "dead_letter",
        "control_record",
        "control_end",
        "command",
        "checkpoint",
        "audit",
        "attempt",
        "alert",
        "agent_view",
        "agent",
    ):
        op.drop_table(table)
