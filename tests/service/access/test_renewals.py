"""Tokens with which enrolled agents report move on; all others expire."""

import pytest
from sqlalchemy import select

from rankwatch_service.access.agents import PAUSE_S, Renewals
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import CACHE_S, Authenticator
from rankwatch_service.access.tokens import RENEWED_MIN_S, issue_token, revoke_token, token_state
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.errors import StoreBusyError
from rankwatch_service.store.models import Audit, Token
from tests.support.clock import FakeClock

DAY_S = 86_400.0
DAY_NS = 86_400 * 10**9


class World:
    """One token of 30 days, and a process that receives its agents' reports."""

    def __init__(self, engine, scopes=frozenset({Scope.INGEST}), job="gpt", lasts_s=30 * DAY_S):
        self.engine, self.clock = engine, FakeClock()
        self.began = self.clock.unix_ns()
        expires = None if lasts_s is None else self.began + int(lasts_s * 1e9)
        with write(engine) as connection:
            self.id, self.text = issue_token(
                connection, "test", "agents", scopes, self.began, makers=(), job=job, expires_unix_ns=expires
            )
        self.authenticator = Authenticator(engine, self.clock)
        self.renewals = Renewals(engine, self.authenticator, self.clock)

    def reports(self, renewals=None):
        identity = self.authenticator.cached(self.text) or self.authenticator.authenticate(self.text)
        if identity is None:
            return False
        (renewals or self.renewals).reported(identity)
        return True

    def days(self):
        """After how many days it expires, from its beginning."""
        with read(self.engine) as connection:
            expires = connection.scalar(select(Token.expires_unix_ns).where(Token.id == self.id))
        return None if expires is None else (expires - self.began) / DAY_NS

    def renewed(self):
        with read(self.engine) as connection:
            query = select(Audit.target).where(Audit.action == "token.renew")
            return list(connection.scalars(query))


def test_a_token_moves_on_by_its_lifetime_when_less_than_half_of_it_is_left(engine):
    world = World(engine)
    world.clock.advance(15 * DAY_S)
    assert world.reports()
    assert world.days() == 30
    world.clock.advance(60)
    assert world.reports()
    assert world.days() == 60
    assert world.renewed() == [world.id]
    with read(engine) as connection:
        fields = connection.scalar(select(Audit.fields).where(Audit.action == "token.renew"))
    assert fields == {"expires_unix_ns": world.began + 60 * DAY_NS}


def test_it_lives_as_long_as_agents_report_and_then_expires(engine):
    world = World(engine)
    for _ in range(200):
        world.clock.advance(DAY_S)
        assert world.reports()
    assert world.days() - 200 <= 45
    assert len(world.renewed()) <= 200 / 15
    world.clock.advance(46 * DAY_S)
    assert not world.reports()


def test_agents_of_several_processes_renew_it_once(engine):
    world = World(engine)
    others = [Renewals(engine, world.authenticator, world.clock) for _ in range(3)]
    world.clock.advance(20 * DAY_S)
    identity = world.authenticator.authenticate(world.text)
    for renewals in (world.renewals, *others):
        renewals.reported(identity)
    assert world.days() == 60
    assert len(world.renewed()) == 1


def test_a_revoked_or_expired_token_stays_so_even_if_it_was_just_cached(engine):
    world = World(engine)
    world.clock.advance(20 * DAY_S)
    identity = world.authenticator.authenticate(world.text)
    with write(engine) as connection:
        revoke_token(connection, world.id)
    world.renewals.reported(identity)
    assert world.days() == 30
    other = World(engine)
    other.clock.advance(30 * DAY_S - 0.5 * CACHE_S)
    identity = other.authenticator.authenticate(other.text)
    other.clock.advance(0.5 * CACHE_S)
    other.renewals.reported(identity)
    assert other.days() == 30
    assert world.renewed() == []


@pytest.mark.parametrize(
    ("what", "renewed"),
    [
        ({}, True),
        ({"job": ""}, True),
        ({"scopes": {Scope.INGEST, Scope.READ}}, False),
        ({"scopes": {Scope.ADMIN}}, False),
        ({"lasts_s": RENEWED_MIN_S}, True),
        ({"lasts_s": RENEWED_MIN_S - 1}, False),
        ({"lasts_s": None}, False),
    ],
)
def test_only_tokens_for_agents_alone_are_renewed_and_only_those_that_last(engine, what, renewed):
    world = World(engine, **what)
    world.clock.advance(0.9 * (what.get("lasts_s") or 30 * DAY_S) if "lasts_s" in what else 27 * DAY_S)
    assert world.reports()
    assert (world.renewed() == [world.id]) == renewed


def test_a_renewal_that_fails_is_tried_again_and_keeps_no_message_away(engine, monkeypatch):
    world = World(engine)
    world.clock.advance(20 * DAY_S)

    def busy(_engine):
        raise StoreBusyError("busy")

    with monkeypatch.context() as broken:
        broken.setattr("rankwatch_service.access.agents.write", busy)
        assert world.reports()
    assert world.reports()
    assert world.renewed() == []  # not at once
    world.clock.advance(PAUSE_S)
    assert world.reports()
    assert world.renewed() == [world.id]


def test_a_token_is_valid_until_it_expires_or_is_revoked():
    assert token_state(False, True, None, 5) == "valid"
    assert token_state(False, True, 6, 5) == "valid"
    assert token_state(False, True, 5, 5) == "expired"
    assert token_state(False, False, 6, 5) == "waiting"
    assert token_state(False, False, 5, 5) == "expired"
    assert token_state(True, True, 5, 5) == "revoked"
