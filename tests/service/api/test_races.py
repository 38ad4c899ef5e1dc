"""Concurrent requests have the same outcome as requests in sequence, also over several api processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Feed

ON_BOTH_DATABASES = True
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
    with read(api.engine) as connection:
        assert len(connection.scalars(select(Feed.id)).all()) == TOGETHER
