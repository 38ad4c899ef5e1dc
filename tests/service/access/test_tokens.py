"""How tokens are made, found, cached and revoked, what sessions they open, and how long who guesses waits."""

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import CACHE_S, ENDED_S, LAST_USED_EVERY_NS, Authenticator, Identity
from rankwatch_service.access.refusals import ADDRESSES_MAX, LINES_MAX, TRIES_MAX, WINDOW_S, Refusal, Refusals
from rankwatch_service.access.sessions import SESSION_S, LoginUsedError, open_session
from rankwatch_service.access.tokens import TokenKind, create_token, issue_token, revoke_token
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Audit, Token
from tests.support.clock import FakeClock
from tests.support.store.database import rows_of

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def authenticator(engine: Engine, clock: FakeClock) -> Authenticator:
    return Authenticator(engine, clock)


def made(engine: Engine, kind: TokenKind = TokenKind.API, **more: Any) -> tuple[str, str]:
    """Id and text of a new token."""
    with write(engine) as connection:
        return create_token(connection, kind, "ci", [Scope.READ], FakeClock().unix_ns(), **more)


def test_a_token_leads_to_its_owner_and_only_its_hash_is_stored(engine, clock):
    token_id, text = made(engine, job="llm")
    identity = Authenticator(engine, clock).authenticate(text)
    assert identity is not None
    assert (identity.id, identity.name, identity.scopes, identity.jobs.only) == (token_id, "ci", {"read"}, "llm")
    assert identity.holds(Scope.READ)
    assert not identity.holds(Scope.COMMAND)
    assert identity.may_see("llm")
    assert not identity.may_see("other")
    stored = str(rows_of(engine, select(Token.__table__)))
    assert text.split("_", 3)[3] not in stored


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "nonsense",
        "rankwatch_api",
        "other_api_{id}_{secret}",
        "rankwatch_login_{id}_{secret}",
        "rankwatch_api_{id}_x",
    ],
)
def test_a_text_that_is_not_a_valid_token_has_no_identity(engine, clock, wrong):
    _, text = made(engine)
    _, _, token_id, secret = text.split("_", 3)
    assert Authenticator(engine, clock).authenticate(wrong.format(id=token_id, secret=secret)) is None


def test_the_cache_forgets_a_token_after_a_second_or_when_it_is_cleared(engine, authenticator, clock):
    token_id, text = made(engine)
    assert authenticator.cached(text) is None
    assert authenticator.authenticate(text) == authenticator.cached(text)
    clock.advance(CACHE_S + 0.1)
    assert authenticator.cached(text) is None
    authenticator.authenticate(text)
    with write(engine) as connection:
        assert revoke_token(connection, token_id)
    authenticator.clear_cache()
    assert authenticator.cached(text) is None
    assert authenticator.authenticate(text) is None


def test_a_token_that_was_valid_stays_known_when_others_are_revoked(engine, authenticator, clock):
    _, text = made(engine)
    assert not authenticator.knows(text)
    authenticator.authenticate(text)
    authenticator.clear_cache()
    clock.advance(3_600)
    assert authenticator.knows(text)


def test_the_tokens_that_were_valid_first_make_room(engine, authenticator, monkeypatch):
    monkeypatch.setattr("rankwatch_service.access.identities.KNOWN_MAX", 2)
    texts = [made(engine)[1] for _ in range(3)]
    for text in (texts[0], texts[1], texts[0], texts[2]):
        authenticator.authenticate(text)
    assert [authenticator.knows(text) for text in texts] == [True, False, True]


@pytest.mark.parametrize("revoked", [True, False])
def test_of_a_token_that_has_ended_its_holder_is_told_why_and_nobody_else(engine, authenticator, clock, revoked):
    token_id, text = made(engine, expires_unix_ns=clock.unix_ns() + 60 * 10**9)
    if revoked:
        with write(engine) as connection:
            revoke_token(connection, token_id)
    clock.advance(65)
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    assert [authenticator.authenticate(one) for one in (text, wrong)] == [None, None]
    assert authenticator.ended(text) == ("this token was revoked" if revoked else "this token expired 5 s ago")
    assert authenticator.ended(wrong) == ""
    assert (authenticator.knows(text), authenticator.knows(wrong)) == (True, False)
    clock.advance(ENDED_S + 0.1)
    assert authenticator.ended(text) == "", "it is looked up again"


def test_last_used_is_written_once_in_five_minutes(engine, authenticator, clock):
    _, text = made(engine)

    def last_used_unix_ns() -> int:
        authenticator.authenticate(text)
        authenticator.store_last_used()
        with read(engine) as connection:
            return connection.scalar(select(Token.last_used_unix_ns))

    first = last_used_unix_ns()
    assert first == clock.unix_ns()
    clock.advance(LAST_USED_EVERY_NS / 1e9 - 1)
    assert last_used_unix_ns() == first
    clock.advance(2)
    assert last_used_unix_ns() == clock.unix_ns()


@pytest.mark.parametrize(
    ("scopes", "kind"), [([Scope.INGEST], "ingest"), ([Scope.READ], "api"), ([Scope.INGEST, Scope.READ], "api")]
)
def test_an_issued_token_is_an_ingest_token_only_with_that_scope_alone_and_is_audited(engine, scopes, kind):
    with write(engine) as connection:
        token_id, text = issue_token(connection, "ada (1)", "ci", scopes, 7, makers=("ada",))
    assert text.startswith(f"rankwatch_{kind}_{token_id}_")
    with read(engine) as connection:
        line = connection.execute(select(Audit.__table__)).one()
    assert (line.actor, line.action, line.target, line.at_unix_ns) == ("ada (1)", "token.make", token_id, 7)


def test_revoking_a_token_revokes_the_sessions_that_it_opened(engine, clock):
    token_id, _ = made(engine)
    _, session = made(engine, TokenKind.SESSION, parent=token_id)
    with write(engine) as connection:
        assert revoke_token(connection, token_id)
        assert not revoke_token(connection, "000000000000")
    assert Authenticator(engine, clock).authenticate(session) is None


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


def test_a_login_token_opens_one_session_and_another_token_as_many_as_asked_for(engine, clock):
    login, api = (holder(engine, clock, kind, None) for kind in (TokenKind.LOGIN, TokenKind.API))
    with write(engine) as connection:
        open_session(connection, login, clock.unix_ns(), "")
        with pytest.raises(LoginUsedError):
            open_session(connection, login, clock.unix_ns(), "")
        for _ in range(2):
            open_session(connection, api, clock.unix_ns(), "")


def guess(refusals: Refusals, source: str, times: int) -> None:
    for _ in range(times):
        refusals.add(Refusal(401, source, ""), "/api/v1/jobs", invalid_token=True)


def test_an_address_waits_until_a_minute_after_its_first_try(engine: Engine, clock: FakeClock) -> None:
    refusals = Refusals(engine, clock, lambda _status: None)
    guess(refusals, "a", TRIES_MAX - 1)
    assert refusals.wait_s("a") == 0
    clock.advance(20.0)
    guess(refusals, "a", 1)
    assert (refusals.wait_s("a"), refusals.wait_s("b")) == (WINDOW_S - 20, 0)
    clock.advance(WINDOW_S - 20)
    assert refusals.wait_s("a") == 0
    guess(refusals, "a", 1)
    assert refusals.wait_s("a") == 0


def test_refusals_without_a_token_make_nobody_wait(engine: Engine) -> None:
    refusals = Refusals(engine, FakeClock(), lambda _status: None)
    for _ in range(TRIES_MAX + 1):
        refusals.add(Refusal(401, "a", ""), "/api/v1/jobs", invalid_token=False)
    assert refusals.wait_s("a") == 0


def test_a_flood_of_addresses_takes_bounded_memory_and_few_lines_and_every_refusal_is_counted(engine: Engine) -> None:
    counted: Counter[int] = Counter()
    refusals = Refusals(engine, FakeClock(), lambda status: counted.update([status]))
    for number in range(ADDRESSES_MAX + 100):
        guess(refusals, f"address {number}", 1)
    assert len(refusals._windows) == ADDRESSES_MAX
    refusals.store()
    lines = rows_of(engine, select(Audit.source, Audit.fields))
    assert len(lines) == LINES_MAX + 1
    assert sum(fields["times"] for _, fields in lines) == counted[401] == ADDRESSES_MAX + 100
