"""Refused requests are counted and audited, and whoever guesses tokens is slowed down."""

from rankwatch_service.access.refusals import TRIES_MAX, WINDOW_S
from rankwatch_service.access.scopes import Scope

ON_BOTH_DATABASES = True

WRONG = "rankwatch_api_000000000000_guess"
JOBS = "/api/v1/jobs"


def guess(api, times=1):
    return [api.ask("GET", JOBS, token=WRONG).status_code for _ in range(times)]


def audited(api):
    api.app.state.context.refusals.store()
    return [
        (line["actor"], line["target"], line["outcome"], line["fields"]["times"])
        for line in api.get("/api/v1/audit").json()["items"]
        if line["action"] == "request.refuse"
    ]


def test_who_guesses_tokens_has_to_wait_and_who_has_used_a_valid_one_goes_on(api):
    reader = api.token(Scope.READ)
    assert api.ask("GET", JOBS, token=reader).status_code == 200
    assert guess(api, TRIES_MAX + 2) == [401] * TRIES_MAX + [429] * 2
    assert 0 < int(api.ask("GET", JOBS, token=WRONG).headers["retry-after"]) <= WINDOW_S
    assert api.ask("GET", JOBS, token=reader).status_code == 200


def test_wrong_logins_count_too(api):
    login = {"json": {"token": WRONG}, "headers": {"Sec-Fetch-Site": "same-origin"}}
    answers = [api.client.post("/api/v1/session", **login).status_code for _ in range(TRIES_MAX + 1)]
    assert answers == [401] * TRIES_MAX + [429]


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
    assert len(audited(api)) == 2, "each is written once"
    assert api.get("/api/v1/audit/chain").json()["whole"]


def test_the_metrics_count_refused_requests(api):
    assert api.get("/metrics").status_code == 200  # whose token is known by then is not kept waiting
    guess(api, TRIES_MAX + 1)
    lines = api.get("/metrics").text.splitlines()
    assert f'rankwatch_requests_refused_total{{status="401"}} {float(TRIES_MAX)}' in lines
    assert 'rankwatch_requests_refused_total{status="429"} 1.0' in lines
