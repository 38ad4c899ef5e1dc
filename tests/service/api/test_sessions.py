"""A browser logs in with a token, and writes only from pages of this service; requests that meet, as in sequence."""

import threading
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.sessions import LOGIN_S, issue_login
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Feed
from tests.support.service.api import OURS
from tests.support.store.database import values_of

ON_BOTH_DATABASES = True


def login_token(api):
    with write(api.engine) as connection:
        return create_token(connection, TokenKind.LOGIN, "first login", [Scope.ADMIN], api.clock.unix_ns())[1]


def test_a_session_is_a_cookie_that_scripts_cannot_read(api):
    answer = api.log_in(api.admin)
    assert answer.status_code == 201
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert api.admin not in cookie
    assert api.client.get("/api/v1/jobs").status_code == 200
    assert api.client.get("/api/v1/session").json()["scopes"] == ["admin"]


def test_a_login_link_works_once(api):
    token = login_token(api)
    assert api.log_in(token).status_code == 201
    assert api.log_in(token).status_code == 401


def test_a_login_link_is_no_token_for_requests(api):
    token = login_token(api)
    for method, path in (("GET", "/api/v1/jobs"), ("GET", "/api/v1/session"), ("POST", "/api/v1/tokens")):
        answer = api.client.request(method, path, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 401
    assert api.log_in(token).status_code == 201


def test_a_token_that_can_only_send_opens_no_session(api):
    for scope in (Scope.INGEST, Scope.ALERT):
        answer = api.log_in(api.token(scope))
        assert (answer.status_code, "opens no session" in answer.json()["detail"]) == (403, True)


def test_a_login_link_is_valid_for_ten_minutes(api):
    with write(api.engine) as connection:
        token = issue_login(connection, "up", api.clock.unix_ns() - LOGIN_S * 10**9)
    assert api.log_in(token).status_code == 401


def test_after_logging_out_the_cookie_is_not_valid(api):
    api.log_in(api.admin)
    [(name, value)] = api.client.cookies.items()
    assert api.client.delete("/api/v1/session", headers=OURS).status_code == 204
    api.client.cookies.set(name, value)
    assert api.client.get("/api/v1/jobs").status_code == 401


def test_revoking_a_token_ends_the_sessions_that_it_opened(api):
    token = api.token(Scope.READ)
    api.log_in(token)
    assert api.client.get("/api/v1/jobs").status_code == 200
    api.ask("DELETE", f"/api/v1/tokens/{token.split('_')[2]}")
    api.client.headers.pop("authorization", None)
    assert api.client.get("/api/v1/jobs").status_code == 401


def test_another_site_can_neither_log_in_nor_write_with_the_cookie(api):
    foreign = (
        {"Origin": "https://testserver"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {},
    )
    for headers in foreign:
        assert api.log_in(api.admin, headers).status_code == 403
    api.log_in(api.admin)
    body = {"hands_off": True}
    for headers in foreign:
        assert api.client.put("/api/v1/policy/hands-off", json=body, headers=headers).status_code == 403
    for headers in (OURS, {"Origin": "http://testserver"}):
        assert api.client.put("/api/v1/policy/hands-off", json=body, headers=headers).status_code == 200


def test_a_wrong_token_opens_no_session_and_is_not_repeated_in_the_answer(api):
    answer = api.log_in("rankwatch_api_0123456789ab_guess")
    assert answer.status_code == 401
    assert "guess" not in answer.text


TOGETHER = 8


def at_once(call):
    """The answers of `TOGETHER` calls that start together."""
    ready = threading.Barrier(TOGETHER)

    def work(number):
        ready.wait()
        return call(number)

    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(work, range(TOGETHER)))


def silence(api, number):
    return {"ends_unix_ns": api.clock.unix_ns() + 10**12, "comment": str(number)}


def test_the_same_key_does_a_thing_once(api):
    body = silence(api, 0)
    answers = at_once(lambda _: api.post("/api/v1/silences", body, key="one"))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(api.get("/api/v1/silences").json()["items"]) == 1


def test_a_login_link_opens_one_session(api):
    with write(api.engine) as connection:
        token = create_token(connection, TokenKind.LOGIN, "first", [Scope.ADMIN], api.clock.unix_ns())[1]
    answers = at_once(lambda _: api.log_in(token))
    assert sorted(answer.status_code for answer in answers) == [201] + [401] * (TOGETHER - 1)


def test_one_name_is_one_receiver(api):
    body = {"name": "pager", "url": "https://hooks.example/x"}
    answers = at_once(lambda _: api.post("/api/v1/receivers", body))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * (TOGETHER - 1)


def test_writers_that_meet_are_each_in_the_feed(api):
    answers = at_once(lambda number: api.post("/api/v1/silences", silence(api, number)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(values_of(api.engine, select(Feed.id))) == TOGETHER
