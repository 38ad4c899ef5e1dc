"""No operation works without a token, and each requires the scope that its description names."""

import re

import pytest

from rankwatch.trust import pin_of, split_token
from rankwatch_service.access import refusals
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import DEFAULT_S
from rankwatch_service.api.openapi import PUBLIC
from tests.support.clock import FakeClock
from tests.support.service.api import running_api
from tests.support.service.machine import make_certificate

CLOCK = FakeClock


def operations(api):
    """(method, path with its parameters filled in, scope, whether it is for every job)"""
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            filled = re.sub(r"{job}", "none", re.sub(r"{(?!job)\w+}", "0", path))
            yield method.upper(), path, filled, operation.get("x-scope"), operation.get("x-every-job")


def ask(api, method, path, **how):
    # Streams do not end by themselves; without their parameters they do not begin.
    if path.endswith("/events"):
        path += "?after=-1"
    return api.ask(method, path, **how)


def test_only_the_public_operations_answer_without_a_token(api, monkeypatch):
    monkeypatch.setattr(refusals, "TRIES_MAX", 10**6)  # more than four tries of each operation
    checked, secret = 0, api.admin.partition(".")[0]
    for method, path, filled, _, _ in operations(api):
        for token in ("", "nonsense", "rankwatch_api_0123456789ab_" + "x" * 43, secret[:-1] + "!"):
            answer = ask(api, method, filled, token=token)
            assert (answer.status_code == 401) == ((method, path) not in PUBLIC), f"{method} {path}"
            checked += 1
    assert checked > 150


@pytest.mark.parametrize("held", list(Scope))
def test_each_operation_is_open_to_its_own_scope_and_to_admin_alone(api, held):
    token = api.token(held)
    for method, path, filled, needed, _ in operations(api):
        if needed is None:
            continue
        status = ask(api, method, filled, token=token).status_code
        allowed = held in (needed, Scope.ADMIN)
        assert (status == 403) == (not allowed), f"{held} {method} {path}: {status}"
        assert status < 500, f"{method} {path}"


def test_a_token_for_one_job_sees_no_other_and_nothing_that_belongs_to_all(api):
    token = api.token(Scope.ADMIN, job="mine")
    for method, path, filled, needed, every_job in operations(api):
        if needed is None:
            continue
        status = ask(api, method, filled, token=token).status_code
        if every_job:
            assert status == 403, f"{method} {path}: {status}"
        elif "{job}" in path:
            assert status == 404, f"{method} {path}: {status}"


def test_a_revoked_token_is_refused_at_once(api):
    token = api.token(Scope.READ)
    assert api.get("/api/v1/jobs", token=token).status_code == 200
    assert api.ask("DELETE", f"/api/v1/tokens/{token.split('_')[2]}").status_code == 204
    assert api.get("/api/v1/jobs", token=token).status_code == 401


def test_an_expired_token_is_refused(api):
    token = api.token(Scope.READ, expires_unix_ns=api.clock.unix_ns() + 10**9)
    assert api.get("/api/v1/jobs", token=token).status_code == 200
    api.clock.advance(2.5)
    assert api.get("/api/v1/jobs", token=token).status_code == 401


def test_a_made_token_is_shown_once_and_stored_as_a_hash(api):
    made = api.post("/api/v1/tokens", {"name": "ci", "scopes": ["read"], "expires_s": 60}).json()
    assert api.get("/api/v1/jobs", token=made["token"]).status_code == 200
    secret = made["token"].split("_", 3)[3]
    listed = api.get("/api/v1/tokens").text
    assert made["id"] in listed
    assert secret not in listed
    with api.engine.connect() as connection:
        dump = "".join(
            str(row)
            for table in ("token", "audit", "idempotent_reply")
            for row in connection.exec_driver_sql(f"SELECT * FROM {table}")
        )
    assert secret not in dump


def test_a_token_expires_after_90_days_unless_another_time_or_never_is_asked_for(api):
    now = api.clock.unix_ns()
    wanted = {"usual": {}, "short": {"expires_s": 60}, "lasting": {"expires_s": None}}
    made = {
        name: api.post("/api/v1/tokens", {"name": name, "scopes": ["read"], **more}).json()
        for name, more in wanted.items()
    }
    lasts_s = {name: one["expires_unix_ns"] and (one["expires_unix_ns"] - now) / 1e9 for name, one in made.items()}
    assert lasts_s == {"usual": DEFAULT_S, "short": 60, "lasting": None}
    assert DEFAULT_S == 90 * 86_400
    api.ask("DELETE", f"/api/v1/tokens/{made['usual']['id']}")
    api.clock.advance(61)
    listed = {one["name"]: one["state"] for one in api.get("/api/v1/tokens").json()["items"]}
    assert {name: listed[name] for name in wanted} == {"usual": "revoked", "short": "expired", "lasting": "valid"}


@pytest.mark.parametrize("expires_s", [0, -1, 1e-12])
def test_a_token_that_would_have_expired_is_refused(api, expires_s):
    wanted = {"name": "ci", "scopes": ["read"], "expires_s": expires_s}
    assert api.post("/api/v1/tokens", wanted).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/nothing", 404),
        ("PATCH", "/api/v1/jobs", 405),
        ("GET", "/api/v1/jobs/none", 404),
        ("GET", "/api/v1/jobs?limit=0", 422),
        ("GET", "/api/v1/jobs?colour=red", 422),
        ("GET", "/elsewhere", 404),
    ],
)
def test_every_refusal_is_a_problem_with_the_requests_id(api, method, path, status):
    answer = api.ask(method, path, headers={"Accept": "text/html"} if path.startswith("/api") else {})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/api/v1/jobs", "GET, OPTIONS"),
        ("/api/v1/tokens", "GET, POST, OPTIONS"),
        ("/api/v1/silences/none", "GET, DELETE, OPTIONS"),
        ("/metrics", "GET, OPTIONS"),
        ("/incidents", "GET, HEAD, OPTIONS"),
    ],
)
def test_options_answers_with_the_methods_of_a_path(api, path, methods):
    answer = api.ask("OPTIONS", path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
    refused = api.ask("PATCH", path)
    assert (refused.status_code, refused.headers["allow"]) == (405, methods)


def test_options_needs_a_token_and_a_path_that_exists(api):
    assert api.ask("OPTIONS", "/api/v1/jobs", token="").status_code == 401
    assert api.ask("OPTIONS", "/api/v1/nothing").status_code == 404


def test_a_misspelled_parameter_is_refused_with_a_suggestion(api):
    problem = api.get("/api/v1/incidents?sevrity=critical").json()
    assert "severity" in problem["errors"][0]["msg"]


def test_an_internal_error_is_reported_without_a_stack_trace(api, monkeypatch):
    def broken(*_):
        raise RuntimeError("the secret reason")

    monkeypatch.setattr("rankwatch_service.api.routes.jobs._jobs", broken)
    answer = api.get("/api/v1/jobs")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret reason" not in answer.text
    assert answer.json()["request_id"]


def test_a_database_that_does_not_answer_is_503_with_retry_after(api, monkeypatch):
    from rankwatch_service.store.errors import StoreBusyError

    def broken(*_):
        raise StoreBusyError("away")

    monkeypatch.setattr("rankwatch_service.api.routes.jobs._jobs", broken)
    answer = api.get("/api/v1/jobs")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_pages_carry_a_strict_policy(api):
    answer = api.client.get("/login")
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"


def test_a_token_for_agents_ends_with_the_pin_of_a_certificate_that_signs_itself(tmp_path):
    files = tmp_path / "certificate.pem", tmp_path / "certificate.key"
    authority = make_certificate(*files)
    with running_api(tmp_path, tls_cert=files[0], tls_key=files[1]) as api:

        def made(*scopes):
            return api.post("/api/v1/tokens", {"name": "agents", "scopes": scopes})

        def pin(*scopes):
            return split_token(made(*scopes).json()["token"]).pin

        assert pin("ingest") == pin_of(files[0])
        assert pin("read") == ""
        files[0].write_text("being renewed")
        assert made("ingest").status_code == 503
        make_certificate(*files, signer=authority)
        assert pin("ingest") == ""
