"""The life of a browser session, without HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.sessions import SESSION_S, LoginUsedError, open_session
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.store.engine import write
from tests.support.clock import FakeClock
from tests.support.store.database import new_database


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def holder(engine: Engine, clock: FakeClock, kind: TokenKind, expires_unix_ns: int | None) -> Identity:
    with write(engine) as connection:
        _, text = create_token(
            connection, kind, "ada", [Scope.READ], clock.unix_ns(), job="llm", expires_unix_ns=expires_unix_ns
        )
    identity = Authenticator(engine, clock).authenticate(text)
    assert identity is not None
    return identity


@pytest.mark.parametrize(
    ("kind", "token_lasts_s", "session_lasts_s"),
    [
        (TokenKind.API, None, SESSION_S),
        (TokenKind.API, 2 * SESSION_S, SESSION_S),
        (TokenKind.API, 60, 60),
        (TokenKind.LOGIN, 60, SESSION_S),
    ],
)
def test_a_session_ends_after_a_shift_or_with_its_token_unless_that_is_a_login_token(
    engine, kind, token_lasts_s, session_lasts_s
):
    clock = FakeClock()
    now = clock.unix_ns()
    identity = holder(engine, clock, kind, None if token_lasts_s is None else now + token_lasts_s * 10**9)
    with write(engine) as connection:
        text, expires_unix_ns = open_session(connection, identity, now, "127.0.0.1")
    assert expires_unix_ns == now + session_lasts_s * 10**9
    session = Authenticator(engine, clock).authenticate(text)
    assert session is not None
    assert (session.kind, session.name, session.scopes, session.jobs.only) == ("session", "ada", {"read"}, "llm")


def test_a_login_token_opens_one_session_and_another_token_as_many_as_asked_for(engine):
    clock = FakeClock()
    login, api = (holder(engine, clock, kind, None) for kind in (TokenKind.LOGIN, TokenKind.API))
    with write(engine) as connection:
        open_session(connection, login, clock.unix_ns(), "")
        with pytest.raises(LoginUsedError):
            open_session(connection, login, clock.unix_ns(), "")
        for _ in range(2):
            open_session(connection, api, clock.unix_ns(), "")
