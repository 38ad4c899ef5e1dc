"""A host is who has its key, in one project, not who has its name: what takes or soils the record of another's host is
refused, each beside agents of one host that go on adding to its record.
"""

import fcntl
import secrets
from pathlib import Path
from typing import Any

import pytest

from rankwatch import wire
from rankwatch.agent import enrolment as enrolment_module
from rankwatch.agent.endpoint import Endpoint
from rankwatch.agent.enrolment import Enrolment
from rankwatch.agent.service_connection import ServiceConnection
from rankwatch.signed import host_of, proof_of
from rankwatch.trust import Trust
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.access.agents import HOST_FREE_NS
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import issue_token
from rankwatch_service.incidents.host_incidents import HostIncident
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import HostRecord
from rankwatch_service.store.rows import host_record_row
from tests.support.agent.service import AgentService
from tests.support.clock import FakeClock
from tests.support.service.api import Api, running_api
from tests.support.service.partition import PlayedPartition
from tests.support.service.signed_job import ONE, THIEF, TWO, host, secret_of
from tests.support.store.database import add

FREE_S = HOST_FREE_NS / 1e9
XID_79 = {"xid": 79, "device_uuid": "GPU-3", "class": "hardware"}


class Service:
    """What agents and people of several projects ask of one api."""

    def __init__(self, api: Api, clock: FakeClock) -> None:
        self.api, self.clock = api, clock

    def enrol(
        self, job: str, key: Any = None, name: str = "gpu-7", project: str = "", **changed: Any
    ) -> dict[str, Any]:
        """Enrol an agent of a job; `key`: the answer to an agent before it on its host."""
        nonce = secrets.token_hex(16)
        body = {"job": job, "host": name, "nonce": nonce}
        if key:
            proof = proof_of(bytes.fromhex(key["host_key"]), nonce, job, name)
            body |= {"host_id": host_of(key["agent"]), "host_proof": proof}
        with write(self.api.engine) as connection:
            now = self.clock.unix_ns()
            _, token = issue_token(connection, "test", "a", [Scope.INGEST], now, makers=(), job=job, project=project)
        answer = self.api.post("/api/v1/agents/enrol", body | changed, token=token)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def fault(self, job: str, agent: str, incident: str) -> None:
        """A critical fault of the agent's rank is on the record of its host."""
        entry = HostIncident(
            "gpu-7", host_of(agent), "GPU-0", incident, job, "device_fault", "critical", self.clock.unix_ns()
        )
        add(self.api.engine, HostRecord, host_record_row(entry))

    def verdicts(self) -> list[tuple[str, str, str, str]]:
        items = self.api.get("/api/v1/hosts?host=gpu-7").json()["items"]
        return sorted((one["project"], one["host_id"], one["job"], one["verdict"]) for one in items)


@pytest.fixture
def service(tmp_path):
    clock = FakeClock()
    with running_api(tmp_path, clock) as api:
        yield Service(api, clock)


def test_a_second_agent_of_a_name_that_reports_is_on_another_host_unless_it_has_the_key(service):
    first = service.enrol("gpt")
    assert host_of(service.enrol("other", first)["agent"]) == host_of(first["agent"]), "of the same user"
    stranger = service.enrol("gpt")
    assert host_of(stranger["agent"]) != host_of(first["agent"])
    assert host_of(service.enrol("its own", stranger)["agent"]) == host_of(stranger["agent"]), "a host of its own"


@pytest.mark.parametrize(
    "changed",
    [{"host_proof": "0" * 64}, {"host_proof": ""}, {"nonce": ""}, {"nonce": "0" * 32}],
    ids=["guessed", "left out", "of no request", "of another request"],
)
def test_a_proof_that_is_not_for_this_request_gives_no_host(service, changed):
    first = service.enrol("gpt")
    assert host_of(service.enrol("gpt", first, **changed)["agent"]) != host_of(first["agent"])
    assert host_of(service.enrol("gpt", first)["agent"]) == host_of(first["agent"])


def test_the_key_of_a_host_is_good_for_no_other_host_and_no_other_name(service):
    mine, theirs = service.enrol("gpt"), service.enrol("theirs", name="gpu-8")
    claimed = mine | {"agent": theirs["agent"]}
    assert host_of(service.enrol("gpt", claimed, name="gpu-8")["agent"]) != host_of(theirs["agent"])
    assert host_of(service.enrol("gpt", claimed)["agent"]) not in {host_of(theirs["agent"]), host_of(mine["agent"])}


def test_a_job_of_another_project_puts_nobodys_host_on_probation(service):
    """Its ranks are "on" gpu-7 as it says; the job that trains there has no incident."""
    owner = service.enrol("honest", project="nlp")
    service.fault("honest", owner["agent"], "i0")
    thief = service.enrol("mine", project="vision")
    for number in range(3):
        service.fault("mine", thief["agent"], f"t{number}")
    assert service.verdicts() == [
        ("nlp", host_of(owner["agent"]), "", "probation"),
        ("vision", host_of(thief["agent"]), "", "refused"),
    ]
    second = service.enrol("beside it", owner, project="nlp")
    service.fault("beside it", second["agent"], "i1")
    assert service.verdicts()[0] == ("nlp", host_of(owner["agent"]), "", "refused"), "two jobs of one host add up"


def test_what_a_host_shows_in_two_projects_adds_up_in_neither(service):
    one = service.enrol("a", project="nlp")
    two = service.enrol("b", one, project="vision")
    service.fault("a", one["agent"], "i0")
    service.fault("b", two["agent"], "i1")
    assert [(project, verdict) for project, _, _, verdict in service.verdicts()] == [
        ("nlp", "probation"),
        ("vision", "probation"),
    ]


def test_a_job_of_its_own_adds_nothing_to_a_host_of_its_project_that_reports(service):
    owner, thief = service.enrol("honest"), service.enrol("mine")
    for number in range(3):
        service.fault("mine", thief["agent"], f"t{number}")
    service.fault("honest", owner["agent"], "i0")
    own = {host_id: verdict for _, host_id, _, verdict in service.verdicts()}
    assert own == {host_of(owner["agent"]): "probation", host_of(thief["agent"]): "refused"}


def test_jobs_whose_agents_have_not_enrolled_do_not_add_up(service):
    for number, job in enumerate(("a", "b", "c")):
        service.fault(job, "", f"i{number}")
    assert [(job, verdict) for _, _, job, verdict in service.verdicts()] == [
        ("a", "probation"),
        ("b", "probation"),
        ("c", "probation"),
    ]


def test_the_record_of_a_silent_name_goes_to_who_comes_and_of_one_that_reports_to_nobody(service):
    service.clock.advance(FREE_S)
    old = service.enrol("gpt", project="nlp")
    service.fault("gpt", old["agent"], "i0")
    service.clock.advance(FREE_S - 1)
    service.enrol("gpt", project="nlp")
    assert service.verdicts() == [("nlp", host_of(old["agent"]), "", "probation")]
    service.clock.advance(FREE_S + 1)
    elsewhere = service.enrol("mine", project="vision")
    assert service.verdicts() == [("nlp", host_of(old["agent"]), "", "probation")], "of another project"
    new = service.enrol("after a reboot", project="nlp")
    assert service.verdicts() == [("nlp", host_of(new["agent"]), "", "probation")]
    assert host_of(elsewhere["agent"]) != host_of(new["agent"])
    service.fault("after a reboot", new["agent"], "i1")
    assert service.verdicts() == [("nlp", host_of(new["agent"]), "", "refused")], "hardware does not heal by a reboot"


def test_nobody_takes_a_name_because_the_service_was_away(tmp_path):
    clock = FakeClock()
    with running_api(tmp_path, clock) as api:
        old = Service(api, clock).enrol("honest")
        Service(api, clock).fault("honest", old["agent"], "i0")
    clock.advance(3_600)
    with running_api(tmp_path, clock, database_url=api.engine.url.render_as_string(False)) as api:
        service = Service(api, clock)
        service.enrol("mine")
        assert service.verdicts() == [("", host_of(old["agent"]), "", "probation")]
        clock.advance(2 * FREE_S)
        new = service.enrol("another day")
        assert service.verdicts() == [("", host_of(new["agent"]), "", "probation")]


class OneJob(PlayedPartition):
    """A job of two hosts with two ranks each, and a fifth rank of whoever took it, with real detectors."""

    def __init__(self) -> None:
        super().__init__(detectors, secret_of=secret_of)
        self.now_s = 1_000.0
        self.one, self.two = host(0, ONE, world_size=5), host(1, TWO, world_size=5)
        self.thief = host(1, THIEF, world_size=5)
        self.send(self.one(), self.two(), self.thief(of=[4]))
        for step in range(1, 4):
            self.train(step)

    def send(self, *messages: bytes) -> None:
        self.records(messages)
        self.now_s += 1
        self.tick_at(self.now_s)

    def train(self, step: int) -> None:
        self.send(self.one(step), self.two(step), self.thief(step, of=[4]))

    def reported_by(self, message: Any, of: list[int], kind: str = "device_error") -> None:
        self.send(message(of=of, events=(wire.Event(kind, int(self.now_s * 1e9), fields=XID_79),)))

    def on_record(self) -> set[tuple[str, str, str]]:
        return {(one.host, one.host_id, one.device_uuid) for one in self.effects.host_incidents}

    def accused(self) -> set[int]:
        return {rank for one in self.effects.transitions for rank in one.incident.ranks}


@pytest.mark.parametrize("kind", ["device_error", "device_lost"])
def test_who_has_a_rank_of_the_job_tells_of_no_other_host_of_its_name(kind):
    world = OneJob()
    world.reported_by(world.thief, [4], kind)
    world.train(4)
    assert world.accused() <= {4}
    assert not any(host_id == host_of(TWO) for _, host_id, _ in world.on_record())
    world.reported_by(world.two, [2, 3], kind)
    world.train(5)
    assert 3 in world.accused()
    assert ("node-1", host_of(TWO), "GPU-3") in world.on_record()


def test_who_had_a_rank_of_an_earlier_launch_tells_of_no_host_of_the_running_one():
    world = OneJob()
    world.one, world.two = host(0, ONE, "m.0", world_size=4), host(1, TWO, "m.0", world_size=4)
    world.send(world.one(), world.two())
    world.send(world.one(1), world.two(1))
    before = world.accused()
    world.send(world.thief(of=[4], events=(wire.Event("device_error", int(world.now_s * 1e9), fields=XID_79),)))
    world.send(world.one(2), world.two(2))
    assert world.accused() <= before | {4}
    world.reported_by(world.two, [2, 3])
    assert 3 in world.accused()


def test_hosts_of_one_name_are_distinguished_after_a_restart_of_the_stream_too():
    world = OneJob()
    world.restart()
    world.reported_by(world.thief, [4])
    assert world.accused() <= {4}
    assert {info.host for info in world.partition.jobs["gpt"]._assembler.topology_state.infos} == {
        "node-0",
        "node-1",
        f"node-1/{host_of(THIEF)}",
    }


def test_an_agent_whose_folder_was_lost_goes_on_under_the_name_of_its_host():
    world = OneJob()
    for step in range(4, 16):
        world.send(world.one(step), world.thief(step, of=[4]))
    again = host(1, "9" * 16, world_size=5)
    world.send(again(of=[2, 3]))
    hosts = {info.rank: info.host for info in world.partition.jobs["gpt"]._assembler.topology_state.infos}
    assert (hosts[3], hosts[4]) == ("node-1", f"node-1/{host_of(THIEF)}")


@pytest.fixture
def agents():
    with AgentService() as service:
        service.enrols = True
        yield service


def enrolled(service: AgentService, folder: Path, job: str) -> str:
    line = ServiceConnection(lambda: Endpoint(service.url, "t", Trust(enrolment_key=service.enrolment_key)))
    made = Enrolment(folder / f"{job}.agent.identity", job, line)
    made.introduce("gpu-7")
    return host_of(made.identity().agent)


def test_agents_of_one_folder_are_on_one_host_and_others_are_not(agents, tmp_path):
    mine, others = tmp_path / "mine", tmp_path / "others"
    mine.mkdir()
    others.mkdir()
    first = enrolled(agents, mine, "a")
    assert enrolled(agents, mine, "b") == first
    assert enrolled(agents, others, "a") != first
    for key in mine.glob("*.host.key"):
        assert key.stat().st_mode & 0o777 == 0o600
        key.write_bytes(key.read_bytes()[:40])
    assert enrolled(agents, mine, "cut off") != first
    assert enrolled(agents, mine, "c") == enrolled(agents, mine, "d") != first


def test_a_key_file_that_is_a_link_or_held_by_another_keeps_nobody_from_enrolling(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(enrolment_module, "HOST_KEY_S", 0.1)
    first = enrolled(agents, tmp_path, "a")
    (path,) = tmp_path.glob("*.host.key")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert enrolled(agents, tmp_path, "b") == first, "it may be read"
    assert enrolled(agents, tmp_path, "c") == first
    target = tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    before = target.read_bytes()
    assert enrolled(agents, tmp_path, "d") != first
    assert target.read_bytes() == before
