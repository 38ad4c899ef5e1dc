"""What a job has lost to incidents, by kind, and its goodput."""

import pytest
from sqlalchemy import insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.incidents.lost_time import HOUR_NS, Loss, lost_by_kind
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Job
from tests.service.api.test_reads import incident, job_row

ON_BOTH_DATABASES = True
H = HOUR_NS
NEARLY = 0.1
"""Time goes on while a test runs; this many GPU-hours are minutes."""


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([], {}),
        ([Loss("hang", 2 * H, H, 8.0)], {}),
        ([Loss("hang", 0, H, 15.0), Loss("straggler", 0, 4 * H, 2.0)], {"straggler": 7.6, "hang": 6.4}),
        ([Loss("hang", 0, H, 99.0), Loss("rank_lost", 0, 2 * H, 8.0)], {"rank_lost": 12.0, "hang": 4.0}),
        ([Loss("hang", 0, H, 2.0), Loss("hang", H, 2 * H, 3.0), Loss("hang", 5 * H, 6 * H, 1.0)], {"hang": 6.0}),
    ],
    ids=["nothing", "already over", "two at once", "more than the job has", "one after another"],
)  # fmt: skip
def test_what_happens_at_once_costs_no_more_than_all_gpus(losses, lost):
    found = lost_by_kind(losses, 8)
    assert list(found) == list(lost)
    assert found == pytest.approx(lost)


@pytest.fixture
def job(api):
    """A job of 8 GPUs that began 10 hours ago."""
    now = api.clock.unix_ns()
    rows = [
        incident(1, kind="hang", onset_unix_ns=now - 9 * H, resolved_unix_ns=now - 8 * H, state="resolved",
                 attempt="l.0", impact_gpu_hours_per_hour=8.0),
        incident(2, onset_unix_ns=now - 2 * H, attempt="l.1", impact_gpu_hours_per_hour=2.0),
        incident(3, kind="nonfinite", onset_unix_ns=now - H, impact_gpu_hours_per_hour=0.0),
        incident(4, kind="hang", job="other", onset_unix_ns=now - H, impact_gpu_hours_per_hour=8.0),
    ]  # fmt: skip
    with write(api.engine) as connection:
        seen = {"first_seen_unix_ns": now - 10 * H, "last_seen_unix_ns": now - H}
        connection.execute(insert(Job), [job_row(name="j", world_size=8, **seen)])
        connection.execute(insert(Incident), rows)
    return now


def test_all_attempts_of_a_job_count_with_the_kind_that_cost_most_first(api, job):
    found = api.get("/api/v1/jobs/j/lost-time").json()
    assert [(one["kind"], one["incidents"], one["gpu_hours"]) for one in found["items"]] == [
        ("hang", 1, pytest.approx(8.0)),
        ("straggler", 1, pytest.approx(4.0, abs=NEARLY)),
    ]
    assert found["gpu_hours"] == pytest.approx(12.0, abs=NEARLY)
    assert found["goodput"] == pytest.approx(1 - 12 / 80, abs=0.01)
    assert found["goodput_now"] == pytest.approx(0.75)
    assert found["from_unix_ns"] == job - 10 * H


def test_a_period_counts_only_what_lies_in_it(api, job):
    found = api.get(f"/api/v1/jobs/j/lost-time?from_unix_ns={job - 4 * H}&to_unix_ns={job - H}").json()
    assert [(one["kind"], one["gpu_hours"]) for one in found["items"]] == [("straggler", pytest.approx(2.0))]
    assert found["goodput"] == pytest.approx(1 - 2 / 24)
    before = api.get("/api/v1/jobs/j/lost-time?to_unix_ns=5").json()
    assert (before["items"], before["gpu_hours"], before["goodput"]) == ([], 0, None)


@pytest.mark.parametrize(("state", "goodput"), [("stalled", 0), ("lost", 0), ("paused", None), ("ended", None)])
def test_a_job_without_progress_has_no_goodput_now(api, job, state, goodput):
    with write(api.engine) as connection:
        connection.execute(update(Job).values(state=state))
    found = api.get("/api/v1/jobs/j/lost-time").json()
    assert found["goodput_now"] == goodput
    assert (found["to_unix_ns"] == job - H) == (state == "ended")


def test_lost_time_of_a_job_that_one_may_not_see_is_refused(api, job):
    assert api.get("/api/v1/jobs/j/lost-time", token=api.token(Scope.READ, job="other")).status_code in (403, 404)
    assert api.get("/api/v1/jobs/nobody/lost-time").status_code == 404
