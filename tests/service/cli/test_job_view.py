"""A job as `rankwatch jobs show` prints it for people."""

from typing import Any

import pytest

from rankwatch_service.cli.job_view import can_obey, show_job_for_people
from rankwatch_service.clock import SystemClock

SECOND_NS = 10**9


def job(**changes: Any) -> dict[str, Any]:
    """As the api gives it: 16 ranks on two hosts, of which one rank is silent."""
    now = SystemClock().unix_ns()
    ranks = [{"rank": rank, "host": f"host-{rank // 8}"} for rank in range(16)]
    saves = dict.fromkeys(("rollback_to", "rollback_mode", "relaunch_from", "save_s", "interval_s"))
    return {
        "name": "a b",
        "project": "",
        "owner": "ann",
        "state": "running",
        "world_size": 16,
        "ranks_reporting": 15,
        "step": 1_499,
        "step_time_s": 2.0,
        "loss": 1.25,
        "first_seen_unix_ns": 0,
        "last_progress_unix_ns": now - 65 * SECOND_NS,
        "incidents": 0,
        "launches_at_once": [],
        "topology": {"ranks": ranks, "watched": ""},
        "can": ["trace", "pause", "rollback_memory"],
        "checkpoints": saves,
        "orders": [],
        "dropped": {},
        "configuration": [],
    } | changes


HUNG = {"severity": "critical", "summary": "Rank 3 hangs.", "acknowledged_by": "bob", "short_id": "77aa"}


def shown(capsys: pytest.CaptureFixture[str], found: Any = (), **changes: Any) -> dict[str, str]:
    """The fields that are printed."""
    show_job_for_people(job(**changes), found, [])
    lines = capsys.readouterr().out.splitlines()
    return {name.strip(): rest.strip() for name, _, rest in (line.partition("  ") for line in lines)}


def test_a_job_that_trains_is_shown_with_its_progress_and_places(capsys):
    fields = shown(capsys)
    assert list(fields) == [
        "job", "state", "incidents", "progress", "ranks", "hosts", "can obey", "owner", "first seen", "",
    ]  # fmt: skip
    assert fields["incidents"] == "none is open"
    assert fields["progress"].startswith("step 1,499 ended 1 min ")
    assert fields["progress"].endswith(" ago, 2 s a step, loss 1.25")
    assert fields["ranks"] == "16, of which 1 do not report"
    assert fields["hosts"] == "2 with 8 ranks each: host-0, host-1"
    assert fields["can obey"] == "pause, trace (`rankwatch pause 'a b'`)"


def test_an_open_incident_is_a_sentence_and_a_command_to_read_on(capsys):
    fields = shown(capsys, [HUNG], state="stalled", incidents=3)
    assert fields["state"].startswith("stalled: no rank has made progress for 1 min")
    assert fields["critical"] == "Rank 3 hangs. (acknowledged by bob)"
    assert fields["progress"].endswith("2 s a step before, loss 1.25 before")


@pytest.mark.parametrize(
    ("state", "can", "said"),
    [
        ("ended", ["pause"], "nothing: it has ended"),
        ("running", [], "nothing: rankwatch can only watch it (docs/sdk.md has what its loop needs)"),
    ],
)
def test_a_job_that_obeys_nothing_says_why(state, can, said):
    assert can_obey(job(state=state, can=can)) == said
