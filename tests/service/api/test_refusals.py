"""Refused requests are counted and audited, and whoever guesses tokens is slowed down."""

import json
from collections import Counter

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.refusals import TRIES_MAX, WINDOW_S
from tests.support.service.api import OURS

ON_BOTH_DATABASES = True

WRONG = "rankwatch_api_000000000000_guess"
JOBS = "/api/v1/jobs"


def guess(api, times=1):
    return [api.ask("GET", JOBS, token=WRONG).status_code for _ in range(times)]


def audited(api):
    """How often each kind of request was refused; the service writes what has come every few seconds."""
    api.app.state.context.refusals.store()
    times = Counter()
    for line in api.get("/api/v1/audit").json()["items"]:
        if line["action"] == "request.refuse":
            times[line["actor"], line["target"], line["outcome"]] += line["fields"]["times"]
    return [(*refused, count) for refused, count in times.items()]


def test_who_guesses_tokens_has_to_wait_and_who_has_used_a_valid_one_goes_on(api):
    reader = api.token(Scope.READ)
    assert api.ask("GET", JOBS, token=reader).status_code == 200
    assert guess(api, TRIES_MAX + 2) == [401] * TRIES_MAX + [429] * 2
    assert 0 < int(api.ask("GET", JOBS, token=WRONG).headers["retry-after"]) <= WINDOW_S
    assert api.ask("GET", JOBS, token=reader).status_code == 200


def test_a_token_that_has_ended_is_no_guess_and_locks_nobody_out(api):
    old, new = api.token(Scope.READ), api.token(Scope.READ)
    token_id = old.split("_")[2]
    assert api.ask("DELETE", f"/api/v1/tokens/{token_id}").status_code in (200, 204)
    answers = [api.ask("GET", JOBS, token=old) for _ in range(2 * TRIES_MAX)]
    assert {answer.status_code for answer in answers} == {401}
    assert answers[-1].json()["detail"] == "this token was revoked"
    assert api.ask("GET", JOBS, token=new).status_code == 200, "which nobody has used before"


def test_wrong_logins_count_too(api):
    assert [api.log_in(WRONG).status_code for _ in range(TRIES_MAX + 1)] == [401] * TRIES_MAX + [429]
    beside = OURS | {"Authorization": f"Bearer {api.admin}"}
    assert api.log_in(WRONG, beside).status_code == 429, "a valid token beside it does not help"


def test_a_browser_without_a_session_does_not_count_as_a_guesser(api):
    api.client.headers.pop("authorization", None)
    assert {api.client.get(JOBS).status_code for _ in range(TRIES_MAX + 5)} == {401}


def test_refused_requests_are_in_the_audit_trail_with_their_number(api):
    reader = api.token(Scope.READ)
    guess(api, 3)
    for _ in range(2):
        assert api.ask("GET", "/api/v1/tokens", token=reader).status_code == 403
    [forbidden, unknown] = sorted(audited(api), key=lambda line: line[2], reverse=True)
    assert unknown == ("unknown", JOBS, "401", 3)
    assert forbidden[1:] == ("/api/v1/tokens", "403", 2)
    assert reader.split("_")[2] in forbidden[0]
    assert sum(line[3] for line in audited(api)) == 5, "each is written once"


def test_an_address_that_has_to_wait_is_in_the_audit_trail_too(api):
    assert api.get("/api/v1/audit").status_code == 200  # whose token is known by then is not kept waiting
    guess(api, TRIES_MAX + 2)
    assert sorted(audited(api)) == [("unknown", JOBS, "401", TRIES_MAX), ("unknown", JOBS, "429", 2)]


def test_the_export_has_what_was_refused(api):
    guess(api)
    audited(api)
    reply = api.get("/api/v1/audit/export")
    assert reply.headers["content-type"].startswith("application/jsonl")
    rows = [json.loads(line) for line in reply.text.splitlines()]
    assert [(row["action"], row["outcome"]) for row in rows] == [("request.refuse", "401")]
    assert api.get(f"/api/v1/audit/export?since_unix_ns={rows[0]['at_unix_ns'] + 1}").text == ""
    assert api.get("/api/v1/audit/export", token=api.token(Scope.READ, Scope.COMMAND)).status_code == 403


def test_the_metrics_count_refused_requests(api):
    assert api.get("/metrics").status_code == 200  # whose token is known by then is not kept waiting
    guess(api, TRIES_MAX + 1)
    lines = api.get("/metrics").text.splitlines()
    assert f'rankwatch_requests_refused_total{{status="401"}} {float(TRIES_MAX)}' in lines
    assert 'rankwatch_requests_refused_total{status="429"} 1.0' in lines
