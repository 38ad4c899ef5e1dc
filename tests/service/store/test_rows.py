"""Values become rows of their tables and come back: no column is forgotten, and none is made up."""

import contextlib
import json
from dataclasses import replace

import pytest
import structlog
from sqlalchemy import inspect
from structlog.testing import LogCapture

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_service.incidents.host_incidents import HostIncident
from rankwatch_service.incidents.model import Consequence
from rankwatch_service.policy.actions import APPROVAL_S, EXPIRES_S, CommandRequest
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry, Verdict
from rankwatch_service.policy.policy import Mode, Rule
from rankwatch_service.store import audit_trail, models, rows
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Audit
from tests.support.values.incidents import NOON_UNIX_NS, announced, incident_version, notified, transition

RULE = Rule("r1", Mode.ACT, kind="hang", severity="critical", confidence_min=0.9, action="rollback")
ENTRY = LedgerEntry("l.0", 80, CheckpointTier.LOCAL, "/x", 2, (0, 1), 1.5, 20, NOON_UNIX_NS, Verdict.GOOD, "20 clean")
ON_RECORD = HostIncident("node-1", "3fa9c1d2", "GPU-3", "inc_1", "gpt", Kind.HANG, Severity.CRITICAL, NOON_UNIX_NS)


def asked(**changes) -> CommandRequest:
    fields = {"id": "cmd_1", "job": "gpt", "attempt": "l.0", "action": "pause", "params": {}, "reason": "to look"}
    return CommandRequest(**fields | {"requested_by": "ann", "requested_unix_ns": NOON_UNIX_NS} | changes)


@pytest.mark.parametrize(
    ("row", "table"),
    [
        (rows.incident_row(incident_version()), models.Incident),
        (rows.transition_row(transition()), models.IncidentTransition),
        (notified("opened", 1, now_unix_ns=NOON_UNIX_NS)[0], models.Outbox),
        (rows.announcement_row(announced()) | {"id": 1, "held": False}, models.Announcement),
        (rows.host_record_row(ON_RECORD), models.HostRecord),
        (rows.command_row(asked()), models.Command),
        (rows.checkpoint_row("gpt", ENTRY), models.Checkpoint),
        (rows.policy_rule_row(RULE, 0), models.PolicyRule),
    ],
    ids=lambda value: getattr(value, "__tablename__", ""),
)
def test_a_row_has_the_columns_of_its_table_and_no_others(row, table):
    assert set(row) == {column.name for column in inspect(table).columns}


def test_an_incidents_row_holds_plain_types_alone():
    brought = Consequence(Kind.HANG, WHOLE_JOB, (1, 2), "no progress", 500)
    row = rows.incident_row(incident_version(consequences=(brought,)))
    assert json.loads(json.dumps(row)) == row
    assert row["consequences"] == [
        {"kind": "hang", "scope": "job", "ranks": [1, 2], "summary": "no progress", "step": 500}
    ]
    assert {type(row[name]) for name in ("kind", "scope", "severity")} == {str}


def test_an_incident_comes_back_from_its_row_without_its_consequences():
    version = incident_version(scope=IncidentScope.of_host("node-a"), ranks=(2, 3))
    assert rows.incident_of(rows.incident_row(version)).version() == replace(version, consequences=())


def test_an_announcement_comes_back_from_its_row():
    assert rows.announcement_of(json.loads(json.dumps(rows.announcement_row(announced())))) == announced()


def test_a_checkpoint_and_a_policy_rule_come_back_from_their_rows():
    assert rows.checkpoint_of(rows.checkpoint_row("gpt", ENTRY)) == ENTRY
    assert rows.policy_rule_of(rows.policy_rule_row(RULE, 3)) == RULE


@pytest.mark.parametrize(
    ("fields", "seconds"), [({}, EXPIRES_S), ({"approval_required": True}, APPROVAL_S), ({"expires_s": 7.0}, 7.0)]
)
def test_a_command_that_needs_approval_may_wait_longer_and_whoever_asks_may_say_how_long(fields, seconds):
    assert rows.command_row(asked(**fields))["expires_unix_ns"] == NOON_UNIX_NS + int(seconds * 1e9)


def append(engine, at_unix_ns, target):
    with write(engine) as connection:
        audit_trail.append(connection, at_unix_ns, "me", "did", target, "ok", fields={"n": at_unix_ns})


@pytest.fixture
def lines():
    """Lines of the log."""
    captured = LogCapture()
    structlog.configure(processors=[captured])
    yield captured.entries
    structlog.reset_defaults()


def test_an_export_since_a_time_leaves_no_row_out_after_its_first(engine, monkeypatch):
    monkeypatch.setattr(audit_trail, "PAGE_ROWS", 2)
    for n in range(5):
        append(engine, n, f"thing {n}")
    append(engine, 0, "of a clock that is late")
    rows = list(audit_trail.export(engine))
    assert [row["target"] for row in rows] == [*(f"thing {n}" for n in range(5)), "of a clock that is late"]
    assert set(rows[0]) == set(Audit.__table__.columns.keys())
    assert [row["at_unix_ns"] for row in audit_trail.export(engine, 3)] == [3, 4, 0]
    assert list(audit_trail.export(engine, 5)) == []


def test_a_row_is_a_line_of_the_log_once_it_is_committed(engine, lines):
    with write(engine) as connection:
        audit_trail.append(connection, 7, "me", "did", "thing", "ok", source="10.0.0.1", fields={"n": 1})
        assert lines == []
    assert lines == [
        {"event": "audit", "log_level": "info", "at_unix_ns": 7, "actor": "me", "source": "10.0.0.1", "action": "did",
         "target": "thing", "outcome": "ok", "fields": {"n": 1}}
    ]  # fmt: skip


def test_a_row_that_was_undone_is_not_in_the_log(engine, lines):
    with contextlib.suppress(ZeroDivisionError), write(engine) as connection:
        audit_trail.append(connection, 7, "me", "did", "thing", "ok")
        _ = 1 / 0
    assert lines == []


def test_a_command_that_does_not_log_prints_nothing(engine, capsys):
    append(engine, 1, "thing")
    assert capsys.readouterr() == ("", "")
