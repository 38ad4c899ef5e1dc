"""What an agent's token stores is bounded: rows of agents, their views, and what of these are the sender's names."""

from contextlib import ExitStack

import pytest
from sqlalchemy import func, insert, select

from rankwatch import layout, wire
from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.signed import Purpose
from rankwatch_service.access import agents as agents_module
from rankwatch_service.access.agents import CACHE_S, ENROLMENTS_S, SILENT_NS
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api import ingest
from rankwatch_service.api.background.housekeeping import VIEW_NS, remove_expired
from rankwatch_service.api.routes import agents as agents_routes
from rankwatch_service.orders.running_attempt import ATTEMPTS_MAX
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Agent, AgentView, Job, LogRecord, SignedJob
from rankwatch_service.telemetry.envelope import ANSWER_CHARS_MAX, read_envelope
from tests.support.clock import FakeClock
from tests.support.service.api import running_api
from tests.support.service.signed_job import THIEF, host, job_of_two_hosts, secret_of
from tests.support.store.database import add, job_row, rows_of
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
        reported = self.ask_to_enrol(token, name, job).json()
        return AgentIdentity(reported["agent"], bytes.fromhex(reported["secret"]))

    def view(self, token: str, by: AgentIdentity | None, name: str = "node-0", attempt: str = "l.0", **fields):
        reported = fields.get("ranks") or (progress(0, 5, **fields),)
        body = wire.encode(wire.View("gpt", attempt, name, "b", 1, reported))
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
        reported = self.api.get("/metrics").text.splitlines()
        return next((float(one.removeprefix(line)) for one in reported if one.startswith(line)), 0.0)


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
    reported = world.ask_to_enrol(thief, "made-up")
    assert int(reported.headers["Retry-After"]) == ENROLMENTS_S / 20
    assert "enrolments: 20 in 60 s" in reported.json()["detail"]
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
    assert job.partition.jobs["gpt"]._rank_owners.ranks_of(read_envelope(again(4), secret_of)) == {0, 1}


# ---- views -----------------------------------------------------------------------------------------------------------


def kept(world) -> list[tuple[str, str]]:
    return rows_of(world.api.engine, select(AgentView.host, AgentView.attempt).order_by(AgentView.at_unix_ns))


def stored_bytes(world) -> int:
    return sum(len(ranks) for (ranks,) in rows_of(world.api.engine, select(AgentView.ranks)))


def test_a_view_holds_no_more_than_honest_agents_send(world):
    token = world.token("gpt", hosts_max=2)
    agent = world.agent(token)
    long = "x" * 900_000
    for field in ("answer_detail", "phase", "state", "order", "answer", "doing", "os_state"):
        assert world.view(token, agent, **{field: long}).status_code == 422, field
    assert world.view(token, agent, answer_detail="x" * (ANSWER_CHARS_MAX + 1)).status_code == 422
    assert kept(world) == []
    assert world.view(token, agent, phase="p" * layout.NAME_BYTES_MAX, answer_detail="x" * 400).status_code == 200
    assert layout.DETAIL_CHARACTERS_MAX == ANSWER_CHARS_MAX


@pytest.mark.parametrize("attempt", ["invented-{}.0", "l.{}", "{}.{}"])
def test_views_of_invented_attempts_are_four_rows_of_the_agent(world, attempt):
    token = world.token("gpt", hosts_max=2)
    honest, thief = world.agent(token), world.agent(token, "node-1")
    full = tuple(progress(rank, 5, answer_detail="x" * 400) for rank in range(1_024))
    assert world.view(token, honest).status_code == 200
    for number in range(10):
        world.clock.advance(0.1)
        assert world.view(token, thief, "node-1", attempt.format(number, number), ranks=full).status_code == 200
    of_thief = [one for host, one in kept(world) if host == f"node-1/{thief.agent}"]
    assert of_thief == [attempt.format(number, number) for number in range(6, 10)]
    assert stored_bytes(world) < 4 * 1_024 * 700
    assert (f"node-0/{honest.agent}", "l.0") in kept(world)


@pytest.mark.parametrize("name", ["", "x" * 201, "a/b", "..", "no-number"])
def test_a_view_of_no_attempt_is_refused(world, name):
    token = world.token("gpt")
    assert world.view(token, world.agent(token), attempt=name).status_code == 422


def test_around_a_rollback_and_a_restart_an_agent_has_a_view_of_each_attempt(world):
    token = world.token("gpt")
    agent = world.agent(token)
    for second in range(3):
        world.clock.advance(1.0)
        for attempt in ("l.0", "l.1", "next.0"):
            assert world.view(token, agent, attempt=attempt, phase=f"{second}").status_code == 200
    assert sorted(one for _, one in kept(world)) == ["l.0", "l.1", "next.0"]


def test_what_a_token_stores_in_a_day_is_bounded_and_who_has_stored_goes_on(world, monkeypatch):
    """Of a job without agents, where hosts are the sender's names too; others have an account of their own."""
    monkeypatch.setattr(agents_routes, "VIEW_BYTES", agents_routes.VIEW_BYTES._replace(most=30_000))
    thief, honest = world.token(), world.token()
    statuses = [world.view(thief, None, f"made-up-{n}").status_code for n in range(200)]
    assert set(statuses) == {200, 429}
    assert statuses == sorted(statuses)
    assert stored_bytes(world) < 30_000
    assert world.refused("view_bytes") == statuses.count(429)
    refused = world.view(thief, None, "made-up")
    assert "view_bytes: 30,000 in 86,400 s" in refused.json()["detail"]
    assert int(refused.headers["Retry-After"]) > 0
    assert world.view(thief, None, "made-up-0").status_code == 200, "its row does not grow"
    assert world.view(honest, None).status_code == 200
    world.clock.advance(DAY_S)
    assert world.view(thief, None, "made-up").status_code == 200


def test_views_that_change_for_a_day_use_up_nothing(world, monkeypatch):
    monkeypatch.setattr(agents_routes, "VIEW_BYTES", agents_routes.VIEW_BYTES._replace(most=2_000))
    token = world.token("gpt")
    agent = world.agent(token)
    for step in range(300):
        assert world.view(token, agent, phase="checkpoint_save" * (step % 2)).status_code == 200


def test_a_view_that_cannot_be_stored_now_and_comes_again_is_paid_for_once(world, monkeypatch):
    monkeypatch.setattr(agents_routes, "VIEW_BYTES", agents_routes.VIEW_BYTES._replace(most=1_000))
    token = world.token("gpt")
    agent = world.agent(token)
    with monkeypatch.context() as full:
        full.setattr(ingest, "PENDING_BYTES_MAX", 0)
        assert {world.view(token, agent).status_code for _ in range(10)} == {503}
    assert world.view(token, agent).status_code == 200


def test_the_oldest_views_go_for_one_that_could_not_be_stored_at_first(world, monkeypatch):
    token = world.token("gpt")
    agent = world.agent(token)
    *earlier, newest = [f"l.{number}" for number in range(ATTEMPTS_MAX + 1)]
    for attempt in earlier:
        assert world.view(token, agent, attempt=attempt).status_code == 200
        world.clock.advance(1)
    with monkeypatch.context() as full:
        full.setattr(ingest, "PENDING_BYTES_MAX", 0)
        assert world.view(token, agent, attempt=newest).status_code == 503
    assert world.view(token, agent, attempt=newest).status_code == 200
    assert [attempt for _, attempt in kept(world)] == [*earlier[1:], newest]
