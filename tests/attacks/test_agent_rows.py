"""What an agent's token stores is bounded: rows of agents, their views, and what of these are the sender's names."""

from contextlib import ExitStack

import pytest
from sqlalchemy import func, insert, select

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.signed import Purpose
from rankwatch_service.access import agents as agents_module
from rankwatch_service.access.agents import CACHE_S, ENROLMENTS_S, SILENT_NS
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api.background.housekeeping import VIEW_NS, remove_expired
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Agent, Job, LogRecord, SignedJob
from rankwatch_service.telemetry.envelope import read_envelope
from tests.support.clock import FakeClock
from tests.support.service.api import running_api
from tests.support.service.signed_job import THIEF, host, job_of_two_hosts, secret_of
from tests.support.store.rows import add, job_row, rows_of
from tests.support.values.batches import batch, progress

DAY_S = 86_400.0


class World:
    """An api, its clock, and agents of any token."""

    def __init__(self, api) -> None:
        self.api, self.clock = api, api.clock

    def token(self, job: str = "", hosts_max: int | None = None) -> str:
        with write(self.api.engine) as connection:
            now, kind = self.clock.unix_ns(), TokenKind.JOB if job else TokenKind.INGEST
            fields = {"job": job, "hosts_max": hosts_max}
            return create_token(connection, kind, "agents", [Scope.INGEST], now, **fields)[1]

    def ask_to_enrol(self, token: str, name: str = "node-0", job: str = "gpt"):
        return self.api.ask("POST", "/api/v1/agents/enrol", json={"job": job, "host": name}, token=token)

    def agent(self, token: str, name: str = "node-0", job: str = "gpt") -> AgentIdentity:
        told = self.ask_to_enrol(token, name, job).json()
        return AgentIdentity(told["agent"], bytes.fromhex(told["secret"]))

    def view(self, token: str, by: AgentIdentity | None, name: str = "node-0", attempt: str = "l.0", **fields):
        told = fields.pop("ranks", (progress(0, 5, **fields),))
        body = wire.encode(wire.View("gpt", attempt, name, "b", 1, told))
        return self.api.send(by.sign(Purpose.VIEW, body) if by else body, "agents/view", token=token)

    def send(self, token: str, by: AgentIdentity | None, **fields):
        body = wire.encode(batch(job="gpt", host="node-0", **fields))
        return self.api.send(by.sign(Purpose.BATCH, body) if by else body, token=token)

    def clean(self) -> None:
        """What an api process does each minute, and what it does not remember any more."""
        remove_expired(self.api.engine, self.clock.unix_ns())
        self.clock.advance(CACHE_S + 0.1)

    def count(self, table) -> int:
        return rows_of(self.api.engine, select(func.count()).select_from(table))[0][0]

    def refused(self, what: str) -> float:
        line = f'rankwatch_budget_refused_total{{what="{what}",whose="agent"}} '
        told = self.api.get("/metrics").text.splitlines()
        return next((float(one.removeprefix(line)) for one in told if one.startswith(line)), 0.0)


@pytest.fixture
def world(tmp_path):
    with ExitStack() as stack:
        yield World(stack.enter_context(running_api(tmp_path, FakeClock())))


# ---- agents ----------------------------------------------------------------------------------------------------------


def test_made_up_hosts_are_told_to_wait_and_those_of_another_token_enrol(world, monkeypatch):
    monkeypatch.setattr(agents_module, "ENROLMENTS_MAX", 20)
    thief, honest = world.token(), world.token()
    statuses = [world.ask_to_enrol(thief, f"made-up-{n}").status_code for n in range(30)]
    assert statuses == [201] * 20 + [429] * 10
    told = world.ask_to_enrol(thief, "made-up")
    assert int(told.headers["Retry-After"]) == ENROLMENTS_S / 20
    assert "enrolments: 20 in 60 s" in told.json()["detail"]
    assert world.refused("enrolments") == 11
    assert world.ask_to_enrol(honest, "node-0").status_code == 201
    world.clock.advance(ENROLMENTS_S / 20)
    assert world.ask_to_enrol(thief, "made-up").status_code == 201


def test_made_up_jobs_are_no_way_round(world, monkeypatch):
    monkeypatch.setattr(agents_module, "ENROLMENTS_MAX", 20)
    thief = world.token()
    assert [world.ask_to_enrol(thief, "h", f"job-{n}").status_code for n in range(25)] == [201] * 20 + [429] * 5


def test_all_hosts_of_a_large_job_enrol_at_once(world, monkeypatch):
    monkeypatch.setattr(agents_module, "ENROLMENTS_MAX", 20)
    token = world.token("gpt", hosts_max=60)
    assert {world.ask_to_enrol(token, f"node-{n}").status_code for n in range(60)} == {201}


def test_rows_of_silent_agents_keep_no_honest_host_out(world, monkeypatch):
    """As many rows as the limit, nearly all silent: for their own token, and for another of the job."""
    monkeypatch.setattr(agents_module, "AGENTS_MAX", 300)
    token = world.token("gpt")
    reports = world.agent(token, "node-0")
    world.clock.advance(60.0)
    assert world.view(token, reports).status_code == 200
    [[token_id]] = rows_of(world.api.engine, select(Agent.token_id))
    silent = {
        "job": "gpt",
        "host": "made-up",
        "token_id": token_id,
        "enrolled_unix_ns": world.clock.unix_ns() - SILENT_NS,
    }
    with write(world.api.engine) as connection:
        connection.execute(insert(Agent), [silent | {"id": f"{n:016x}", "enrolled_unix_ns": n} for n in range(299)])
    assert [world.ask_to_enrol(token, f"node-{n}").status_code for n in range(1, 11)] == [201] * 10
    assert world.ask_to_enrol(world.token("gpt"), "node-11").status_code == 201
    assert world.count(Agent) <= 301
    assert world.view(token, reports).status_code == 200, "who reports has kept its place"


def test_rows_of_agents_that_were_silent_for_a_day_go_and_those_that_report_stay(world):
    token = world.token("gpt")
    reports, never = world.agent(token), world.agent(token, "made-up")
    for _ in range(3):
        world.clock.advance(DAY_S / 2)
        assert world.view(token, reports).status_code == 200
        world.clean()
    assert rows_of(world.api.engine, select(Agent.id)) == [(reports.agent,)]
    assert world.view(token, never, "made-up").status_code == 409


def test_jobs_that_are_only_enrolled_for_leave_nothing_after_a_day(world):
    token = world.token()
    for number in range(5):
        world.agent(token, job=f"made-up-{number}")
    world.clock.advance(VIEW_NS / 1e9 + 1)
    world.clean()
    assert (world.count(Agent), world.count(SignedJob)) == (0, 0)


def test_a_job_whose_agents_are_gone_takes_unsigned_messages_no_more_than_before(world):
    """Else whoever has the token need only wait for a day on which nobody trains."""
    token = world.token("gpt")
    agent = world.agent(token)
    assert world.send(token, agent).status_code == 202
    add(world.api.engine, Job, job_row("gpt"))
    for _ in range(2):
        world.clock.advance(2 * DAY_S)
        world.clean()
    assert world.count(Agent) == 0
    assert world.send(token, None, seq=1).status_code == 403
    assert world.view(token, None).status_code == 403
    query = "/api/v1/agents/orders?job=gpt&host=node-0&boot=b"
    assert world.api.get(query, token=token).status_code == 403
    assert world.api.get("/api/v1/jobs/gpt").json()["signed"]


def test_an_agent_that_was_silent_for_two_days_comes_back_and_its_spool_is_taken(world):
    token = world.token("gpt", hosts_max=1)
    before = world.agent(token)
    assert world.send(token, before).status_code == 202
    add(world.api.engine, Job, job_row("gpt"))
    world.clock.advance(2 * DAY_S)
    world.clean()
    assert world.send(token, before, seq=1).status_code == 409, "by which an agent enrols again, and keeps the batch"
    again = world.agent(token)
    assert world.send(token, again, seq=1).status_code == 202
    with read(world.api.engine) as connection:
        assert len(connection.scalars(select(LogRecord.value)).all()) == 2


def test_the_stream_takes_what_an_agent_signed_before_its_row_went_and_what_it_signs_after():
    """It knows agents by their secrets, not by rows: what comes late is judged as ever."""
    job = job_of_two_hosts()
    job.tick(15.0)
    job.send(job.one(2))
    job.tick(15.0)
    again = host(0, THIEF)
    job.send(again(3))
    job.tick(1.0)
    assert job.forged() == []
    assert job.refused() == []
    assert job.partition.jobs["gpt"]._carriers.ranks_of(read_envelope(again(4), secret_of)) == {0, 1}
