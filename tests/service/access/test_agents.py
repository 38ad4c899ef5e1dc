"""Enrolment: who may enter, whose messages are whose."""

import pytest
from sqlalchemy import delete

from rankwatch.signed import Purpose, sign, split
from rankwatch_service.access import agents as agents_module
from rankwatch_service.access.agents import (
    CACHE_S,
    SILENT_NS,
    Agents,
    AgentSecrets,
    ForgedError,
    FullError,
    Origin,
    UnknownAgentError,
)
from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.store.engine import write
from rankwatch_service.store.job_removal import delete_job
from rankwatch_service.store.models import Agent, AgentView
from tests.support.store.database import add, change

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
HERE = Origin("gpt", "node-1")


@pytest.fixture
def agents(engine, clock):
    return Agents(engine, AgentSecrets(SecretKey(b"k" * 32)), clock)


def message(enrolled, purpose=Purpose.BATCH):
    return split(sign(purpose, enrolled.agent, bytes.fromhex(enrolled.secret), b"body"))


def posts_a_view(engine, clock, enrolled, job="gpt"):
    columns = {"job": job, "attempt": "l.0", "host": f"node-1/{enrolled.agent}", "agent": enrolled.agent}
    add(engine, AgentView, **columns, boot="b", ranks=b"", at_unix_ns=clock.unix_ns())


def test_a_message_of_another_or_for_another_purpose_is_forged(agents):
    mine, other = agents.enrol(HERE, "token", None), agents.enrol(HERE, "token", None)
    forged = split(sign(Purpose.BATCH, mine.agent, bytes.fromhex(other.secret), b"body"))
    with pytest.raises(ForgedError) as caught:
        agents.verify(forged, Purpose.BATCH, HERE)
    assert (caught.value.what, caught.value.agent) == ("signature", mine.agent)
    with pytest.raises(ForgedError):
        agents.verify(message(mine, Purpose.VIEW), Purpose.BATCH, HERE)


def test_unsigned_messages_are_taken_until_an_agent_of_their_job_enrols(agents):
    assert agents.verify(None, Purpose.BATCH, HERE) == ""
    agents.enrol(HERE, "token", None)
    with pytest.raises(ForgedError, match="must be signed"):
        agents.verify(None, Purpose.BATCH, Origin("gpt", "node-9"))
    assert agents.verify(None, Purpose.BATCH, Origin("other", "node-1")) == ""


def test_a_job_that_was_deleted_takes_unsigned_messages_again_and_its_agents_enrol_again(agents, engine, clock):
    enrolled = agents.enrol(HERE, "token", None)
    with pytest.raises(ForgedError):
        agents.verify(None, Purpose.BATCH, HERE)
    with write(engine) as connection:
        delete_job(connection, "gpt", clock.unix_ns())
    clock.advance(CACHE_S + 0.1)
    assert agents.verify(None, Purpose.BATCH, HERE) == ""
    with pytest.raises(UnknownAgentError):
        agents.verify(message(enrolled), Purpose.BATCH, HERE)


def test_a_token_admits_as_many_agents_at_a_time_as_it_says(agents, engine, clock):
    first = agents.enrol(HERE, "token", 2)
    second = agents.enrol(Origin("gpt", "node-2"), "token", 2)
    clock.advance(SILENT_NS / 1e9 - 1)
    with pytest.raises(FullError, match="admits 2 hosts"):
        agents.enrol(Origin("gpt", "node-3"), "token", 2)
    agents.enrol(Origin("gpt", "node-3"), "another token", 2)
    posts_a_view(engine, clock, second)
    clock.advance(2)
    agents.enrol(Origin("gpt", "node-3"), "token", 2)
    clock.advance(CACHE_S + 1)
    assert agents.verify(message(second), Purpose.BATCH, Origin("gpt", "node-2")) == second.agent
    with pytest.raises(UnknownAgentError):
        agents.verify(message(first), Purpose.BATCH, HERE)


def test_a_token_that_does_not_say_how_many_admits_a_limited_number_of_agents_that_report(agents, clock, monkeypatch):
    monkeypatch.setattr(agents_module, "AGENTS_MAX", 2)
    for _ in range(2):
        agents.enrol(HERE, "token", None)
    with pytest.raises(FullError, match="2 hosts"):
        agents.enrol(HERE, "token", None)
    agents.enrol(HERE, "another token", None)
    clock.advance(SILENT_NS / 1e9 + 1)
    agents.enrol(HERE, "token", None)


def test_an_agent_that_was_ended_elsewhere_is_known_for_as_long_as_a_revoked_token(agents, engine, clock):
    enrolled = agents.enrol(HERE, "token", None)
    agents.verify(message(enrolled), Purpose.BATCH, HERE)
    change(engine, delete(Agent))
    clock.advance(CACHE_S / 2)
    agents.verify(message(enrolled), Purpose.BATCH, HERE)
    clock.advance(CACHE_S)
    with pytest.raises(UnknownAgentError):
        agents.verify(message(enrolled), Purpose.BATCH, HERE)
