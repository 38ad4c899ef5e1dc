"""Which incidents a list shows, in which order, and what the totals count."""

import pytest
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Job
from tests.service.api.test_reads import incident, job_row, pages

ON_BOTH_DATABASES = True


@pytest.fixture
def listed(api):
    """Numbers of the incidents that a query finds, in its order."""
    rows = [
        incident(1, ranks=[1, 17], hosts=["host-1"], onset_unix_ns=100, updated_unix_ns=900),
        incident(2, ranks=[7], hosts=["host-1", "host-17"], onset_unix_ns=200, resolved_unix_ns=250, state="resolved"),
        incident(3, ranks=[], hosts=[], onset_unix_ns=300, kind="hang", summary="Loss is 50% HIGHER", job="gpt_a"),
        incident(4, ranks=[171], hosts=['a"b'], onset_unix_ns=400, impact_gpu_hours_per_hour=64.0, job="gptxa",
                 state="acknowledged", acknowledged_by="ada@example.com"),
    ]  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows)

    def found(**query):
        answer = api.get("/api/v1/incidents", params=query)
        assert answer.status_code == 200, answer.text
        return [one["onset_step"] for one in answer.json()["items"]]

    return found


def test_a_rank_or_host_finds_those_that_name_it_whole(listed):
    assert listed(rank=17) == [1]
    assert listed(rank=[7, 171]) == [4, 2]
    assert listed(host="host-1") == [2, 1]
    assert listed(host=["host-17", 'a"b']) == [4, 2]
    assert listed(host="host") == []
    assert listed(host="host-1", state="resolved") == [2]


def test_a_device_or_attempt_finds_those_that_name_it(api, listed):
    rows = [
        incident(5, devices=["GPU-5a", "GPU-5b"], attempt="l.5", onset_unix_ns=500),
        incident(6, devices=["GPU-6"], attempt="l.6", onset_unix_ns=600),
    ]
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows)
    assert listed(device="GPU-5b") == [5]
    assert listed(device=["GPU-6", "GPU-5a"]) == [6, 5]
    assert listed(device="GPU-5") == []
    assert listed(attempt="l.6") == [6]
    assert listed(attempt=["l.5", "l.6"], device="GPU-5a") == [5]


def test_a_range_of_time_finds_what_lasted_into_it(listed):
    assert listed(from_unix_ns=250) == [4, 3, 2, 1]
    assert listed(from_unix_ns=251) == [4, 3, 1]
    assert listed(to_unix_ns=300) == [2, 1]
    assert listed(from_unix_ns=251, to_unix_ns=300) == [1]


def test_a_search_ignores_case_and_takes_wildcards_as_text(listed):
    assert listed(search="50% higher") == [3]
    assert listed(search="HOST-17") == [2]
    assert listed(search="gpt_a") == [3]
    assert listed(search="Ada@") == [4]
    assert listed(search="inc_4") == [4]
    assert listed(search="%") == [3]


def test_ids_find_those_of_them_that_match_the_other_filters(listed):
    assert listed(id=["inc_1", "inc_2", "inc_9"]) == [2, 1]
    assert listed(id=["inc_1", "inc_2"], state="open") == [1]


def test_the_order_is_the_service_s_and_goes_on_over_pages(api, listed):
    expected = {
        "newest": [4, 3, 2, 1],
        "oldest": [1, 2, 3, 4],
        "updated": [1, 4, 3, 2],
        "urgency": [3, 1, 4, 2],
        "cost": [4, 3, 2, 1],
    }
    for order, numbers in expected.items():
        assert listed(order=order) == numbers, order
        walked = pages(api, f"/api/v1/incidents?order={order}&limit=1")
        assert [one["onset_step"] for page in walked for one in page] == numbers, order


def test_a_cursor_holds_for_its_filters_alone(api, listed):
    cursor = api.get("/api/v1/incidents?limit=1&host=host-1").json()["next_cursor"]
    assert api.get("/api/v1/incidents", params={"limit": 1, "host": "host-1", "cursor": cursor}).status_code == 200
    assert api.get("/api/v1/incidents", params={"limit": 1, "host": "host-17", "cursor": cursor}).status_code == 422


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", "-1"), ("rank", "x"), ("rank", str(2**31)), ("host", ""), ("host", "a\0b"), ("host", "h" * 201),
        ("search", ""), ("search", "a\0b"), ("search", "x" * 201), ("from_unix_ns", "-1"), ("to_unix_ns", str(2**63)),
        ("order", "random"), ("kind", "nonsense"), ("hosts", "host-1"),
    ],
    ids=["negative", "text", "too large", "no host", "NUL in a host", "long host", "empty search", "NUL in a search",
         "long search", "negative time", "late time", "order", "kind", "misspelled"],
)  # fmt: skip
def test_a_filter_without_meaning_is_refused_with_its_name(api, name, value):
    answer = api.get("/api/v1/incidents", params={name: value})
    assert answer.status_code == 422
    assert name in answer.text


def test_totals_count_jobs_by_state_and_say_when_anything_changed(api, listed):
    totals = api.get("/api/v1/incidents/totals").json()
    assert totals["jobs"] == dict.fromkeys(("running", "stalled", "paused", "lost", "ended"), 0)
    assert (totals["updated_unix_ns"], totals["telemetry_unix_ns"]) == (900, None)
    rows = [("a", "stalled"), ("b", "stalled"), ("c", "lost"), ("d", "running")]
    with write(api.engine) as connection:
        for n, (name, state) in enumerate(rows):
            connection.execute(insert(Job).values(**job_row(name=name, state=state, last_seen_unix_ns=n)))
    totals = api.get("/api/v1/incidents/totals").json()
    assert totals["jobs"] == {"running": 1, "stalled": 2, "paused": 0, "lost": 1, "ended": 0}
    assert totals["telemetry_unix_ns"] == 3
    assert api.get("/api/v1/incidents/totals?job=a").json()["jobs"]["stalled"] == 1
