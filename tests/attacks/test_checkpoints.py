"""Whoever holds an ingest token does not choose the checkpoint that ranks load."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankwatch import wire
from rankwatch.agent.endpoint import endpoint_of
from rankwatch.agent.enrolment import Enrolment
from rankwatch.agent.service_connection import ServiceConnection
from rankwatch.agent.uplink import HttpPublisher
from rankwatch.layout import resume_path
from rankwatch.outcome import Accepted
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService
from tests.support.agent.service import until as agent_until
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.service.process import Http, Up, free_port, until
from tests.support.store.postgres import PostgresDatabases
from tests.support.trials.selection import long_trial
from tests.support.values.batches import batch, progress, table

pytestmark = [pytest.mark.integration, pytest.mark.ci]


class Service:
    """`rankwatch up`, and what an attacker with an ingest token says to it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.up = Up(folder, port=free_port(), environment=environment)
        self.up.start()
        self.url, self.token = self.up.url, self.up.kept("ingest-token")
        self.people, self.host = Http(self.url, self.up.token()), Http(self.url, self.token)
        self._numbers = itertools.count()

    def close(self) -> None:
        self.people.close()
        self.host.close()
        self.up.stop()

    def unsigned(self, job: str, boot: str = "thief", **fields: Any) -> int:
        """Send a batch without a signature; the status of the answer."""
        body = wire.encode(batch(next(self._numbers), job=job, boot=boot, **fields))
        content = {"Content-Type": "application/msgpack"}
        return self.host.ask("POST", "/api/v1/telemetry", content=body, headers=content).status_code

    def checkpoints(self, job: str) -> list[dict[str, Any]]:
        found = self.people.ask("GET", f"/api/v1/jobs/{job}/checkpoints?limit=200").json()
        return list(found.get("items", ()))

    def good(self, job: str) -> list[str]:
        return [one["location"] for one in self.checkpoints(job) if one["verdict"] == "good"]

    def step(self, job: str) -> int:
        return int(self.people.ask("GET", f"/api/v1/jobs/{job}").json().get("step", -1))

    def dropped(self, job: str, reason: str) -> int:
        return int(self.people.ask("GET", f"/api/v1/jobs/{job}").json()["dropped"].get(reason, 0))

    def resume(self, job: str) -> str:
        """The location of the checkpoint from which a relaunch of the job would go on now."""
        chosen = self.people.ask("GET", f"/api/v1/jobs/{job}").json()["checkpoints"]["relaunch_from"]
        return next((one["location"] for one in self.checkpoints(job) if one["id"] == chosen), "")


@pytest.fixture(params=[pytest.param("sqlite", marks=long_trial), "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with ExitStack() as stack:
        environment = {}
        if request.param == "postgresql":
            databases: PostgresDatabases = request.getfixturevalue("postgres")
            environment["RANKWATCH_DATABASE_URL"] = stack.enter_context(databases.empty())
        service = Service(tmp_path_factory.mktemp(request.param), environment)
        yield service
        service.close()


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    (tmp_path / "rings").mkdir(mode=0o700)
    return tmp_path / "rings"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    for name in ("ckpt", "evil"):
        (tmp_path / name).mkdir()
    return tmp_path / "ckpt"


def saved(step: int, rank: int | None, location: object, **fields: object) -> wire.Event:
    reported = {"tier": "local", "location": str(location), "seconds": 1.0, "bytes": 1, "shards": 1} | fields
    return wire.Event("checkpoint_saved", 1, rank, step, reported)


class PlainJob:
    """Two ranks that save every ten steps, of agents that do not sign: there the ledger alone decides."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._step = -1
        infos = tuple(wire.RankInfo(rank, 2, host="node-1", checkpoint_roots=("/ckpt",)) for rank in range(2))
        self._send(ranks=infos)

    def train(self, steps: int) -> int:
        """Train on, and wait until the service has it; the step it is at."""
        for _ in range(steps):
            self._step += 1
            events = ()
            if self._step % 10 == 0:
                events = tuple(saved(self._step, rank, f"/ckpt/{self._step}.pt", shards=0) for rank in (0, 1))
            table_ = table([self._step] * 2, [0, 1], loss=[1.0] * 2, step_time_s=[0.1] * 2)
            self._send(steps=table_, progress=tuple(progress(rank, self._step) for rank in (0, 1)), events=events)
        until("the steps", lambda: self._service.step("plain") == self._step)
        return self._step

    def _send(self, **fields: Any) -> None:
        assert self._service.unsigned("plain", boot="honest", **fields) == 202


def test_no_forged_save_of_an_unsigned_job_is_offered_also_after_a_restart(service: Service) -> None:
    job = PlainJob(service)
    job.train(40)
    assert service.resume("plain").startswith("/ckpt/")

    def forge(*events: wire.Event) -> None:
        assert service.unsigned("plain", events=events) == 202

    for restarted in (False, True):
        step = job.train(10 if restarted else 3)  # 42, then 112: no rank saves these or the next few
        before = service.dropped("plain", "checkpoint_location")
        forge(saved(step, 0, "/evil/x.pt"))
        forge(*(saved(step, rank, "/evil/x.pt", shards=0) for rank in (0, 1)))
        forge(saved(step, None, "/ckpt/x.pt"), saved(step, 7, "/ckpt/x.pt"))
        forge(saved(step + 1, 1, "/ckpt/x.pt"))
        for number, location in enumerate(("/ckpt/../evil/x.pt", "s3://evil/x", "/ckpt-2/x.pt", "x.pt"), 2):
            forge(*(saved(step + number, rank, location) for rank in (0, 1)))
        forge(*(saved((step // 10 + 1) * 10, rank, "/evil/x.pt") for rank in (0, 1)))
        until("the refusals", lambda: service.dropped("plain", "checkpoint_location") == before + 13)  # noqa: B023
        for _ in range(6):
            job.train(10)
            assert all(location.startswith("/ckpt/") for location in service.good("plain"))
            assert service.resume("plain").startswith("/ckpt/")
        assert service.resume("plain") > f"/ckpt/{step}", "the newest honest one is offered"
        verdicts = {one["id"]: one["verdict"] for one in service.checkpoints("plain")}
        assert (verdicts[f"local:l.0:{step}"], verdicts[f"local:l.0:{step + 1}"]) == ("refused", "incomplete")
        assert verdicts[f"local:l.0:{(step // 10 + 1) * 10}"] == "good", "what was forged before it was saved"
        if not restarted:
            service.up.stop()
            service.up.start()
            service.people.ask("GET", "/readyz")
            assert service.resume("plain").startswith("/ckpt/")


def test_no_agent_with_a_stolen_token_adds_a_checkpoint_to_a_job_that_trains(service, rings, ckpt):
    with ExitStack() as stack:
        ranks = [stack.enter_context(RecordingRank(rings, number, world_size=2, roots="")) for number in range(2)]
        agent = {"RANKWATCH_URL": service.url, "RANKWATCH_TOKEN": service.token}
        stack.enter_context(AgentProcess(rings, agent))
        for rank in ranks:
            rank.do("save", 1_000_000, 100, ckpt)
        advice = Path(resume_path(str(rings), "gpt"))
        until("an honest checkpoint", lambda: service.good("gpt"))
        until("advice on the host", advice.exists)
        assert service.unsigned("gpt", events=(saved(7, 0, ckpt / "x.pt"),)) == 403

        line = ServiceConnection(lambda: endpoint_of(service.url, service.token, {}))
        stack.callback(line.close)
        enrolment = Enrolment(ckpt.parent / "thief", "gpt", line)
        enrolment.introduce("node-9")
        publish = HttpPublisher(line, enrolment)
        step, evil = service.step("gpt") // 100 * 100 + 107, ckpt.parent / "evil"
        info = wire.RankInfo(7, 8, host="node-9", checkpoint_roots=(str(evil),), checkpoint_shards=1)
        for number, fields in enumerate(
            (
                {"ranks": (info,)},
                {"events": (saved(step, 0, ckpt / "x.pt"),)},
                {"events": (saved(step, 0, evil / "x.pt"), saved(step, 1, evil / "x.pt"))},
                {"events": (saved(step, 7, evil / "x.pt"), saved(step, None, ckpt / "x.pt"))},
            )
        ):
            body = wire.encode(batch(number, host="node-9", boot="thief", **fields))
            assert publish(body) == Accepted()
        until("training goes on", lambda: service.step("gpt") > step + 60)
        newer = f"{ckpt}/step-{step // 100 * 100}.pt"
        until("the honest checkpoint", lambda: newer in service.good("gpt"))
        assert all(location.startswith(f"{ckpt}/step-") for location in service.good("gpt"))
        assert f"local:l.0:{step}" not in {one["id"] for one in service.checkpoints("gpt")}
        assert json.loads(advice.read_text())["location"].startswith(f"{ckpt}/step-")


def elsewhere(ckpt: Path) -> dict[str, str]:
    """Locations that must not be loaded, by what is wrong with each."""
    evil = ckpt.parent / "evil" / "x.pt"
    evil.touch()
    (ckpt / "planted.pt").symlink_to(evil)
    (ckpt / "folder").symlink_to(evil.parent)
    return {
        "elsewhere": str(evil),
        "climbs": f"{ckpt}/../evil/x.pt",
        "a link": f"{ckpt}/planted.pt",
        "below a link": f"{ckpt}/folder/x.pt",
        "a file url": f"file://{evil}",
        "a url": "https://evil.example/x.pt",
        "relative": os.path.relpath(evil),
    }


@pytest.fixture
def honest(rings: Path, ckpt: Path) -> Iterator[AgentService]:
    """A service that has been taken over, the agent of a host and a rank that obeys orders."""
    with (
        AgentService() as service,
        RecordingRank(rings, world_size=1, roots=str(ckpt)) as rank,
        AgentProcess(rings, service.environment),
    ):
        rank.do("follow_orders", 1_000_000)
        agent_until(lambda: service.views and service.views[-1].ranks[0].step > 0)
        yield service


@pytest.mark.parametrize("what", ["elsewhere", "climbs", "a link", "below a link", "a file url", "a url", "relative"])
def test_an_agent_offers_no_launch_what_lies_outside_of_its_roots(honest, rings, ckpt, what):
    advice = Path(resume_path(str(rings), "gpt"))
    location = elsewhere(ckpt)[what]
    honest.order(resume=wire.ResumeAdvice("gpt", "local:l.0:9", location, 9))
    agent_until(lambda: honest.events("location_refused"))
    assert honest.events("location_refused")[0].fields["location"] == location
    assert not advice.exists()
    (ckpt / "step-3.pt").touch()
    honest.order(resume=wire.ResumeAdvice("gpt", "local:l.0:3", f"{ckpt}/step-3.pt", 3))
    agent_until(advice.exists)
    honest.order(resume=wire.ResumeAdvice("gpt", "local:l.0:9", location, 9))
    agent_until(lambda: len(honest.events("location_refused")) == 1 and len(honest.views) > 3)
    assert json.loads(advice.read_text())["location"] == f"{ckpt}/step-3.pt"
    notice = next(rings.glob("*.notice"))
    agent_until(lambda: location in notice.read_text())


@pytest.mark.parametrize("what", ["elsewhere", "climbs", "a link"])
def test_a_rank_never_loads_what_lies_outside_of_its_agents_roots(honest, ckpt, what):
    location = elsewhere(ckpt)[what]
    step = honest.views[-1].ranks[0].step + 100
    order = wire.OrderView(
        "o1", "gpt", "l.0", "hold", "rollback", step, 20.0, "local:l.0:3", location, checkpoint_step=3, k=1
    )
    honest.order(order)
    agent_until(lambda: honest.views[-1].ranks[0].answer == "failed")
    assert "does not load" in honest.views[-1].ranks[0].answer_detail
    honest.order(msgspec.structs.replace(order, phase="do"))
    agent_until(lambda: honest.views[-1].ranks[0].step > step + 20)
    assert honest.views[-1].attempt == "l.0", "training goes on as if nobody had said anything"
