"""Whoever has stolen the token of training hosts can neither speak for a job's ranks nor steer it.

An honest job of two hosts trains beside each attack, under `rankwatch up`; its agents are those of the collectors.
"""

import os
import time

import pytest

from rankwatch import wire
from rankwatch.agent.endpoint import Endpoint, endpoint_of
from rankwatch.agent.enrolment import Enrolment, ForgedOrdersError, OrderCheck
from rankwatch.agent.service_connection import ServiceConnection
from rankwatch.agent.uplink import HttpPublisher
from rankwatch.outcome import Accepted
from rankwatch.signed import Purpose, sign
from tests.support.service.process import until
from tests.support.values.batches import batch, progress, ranks, table

pytestmark = [pytest.mark.integration, pytest.mark.ci]

JOB = "honest"
MSGPACK = {"Content-Type": "application/msgpack"}


class Host:
    """One honest host with two ranks."""

    def __init__(self, number: int, endpoint: Endpoint, folder) -> None:
        self.name, self.ranks = f"node-{number}", [2 * number, 2 * number + 1]
        self.line = ServiceConnection(lambda: endpoint)
        self.enrolment = Enrolment(folder / f"{self.name}.identity", JOB, ServiceConnection(lambda: endpoint))
        self.enrolment.introduce(self.name)
        self._publish = HttpPublisher(self.line, self.enrolment)
        self._sequence = 0

    def send(self, step: int, **fields) -> None:
        fields = {
            "ranks": ranks(4, self.name, self.ranks) if self._sequence == 0 else (),
            "steps": table([step] * 2, self.ranks, step_time_s=[0.5] * 2, loss=[1.0] * 2),
            "progress": tuple(progress(rank, step) for rank in self.ranks),
        } | fields
        body = wire.encode(batch(self._sequence, job=JOB, host=self.name, boot="b", **fields))
        self._sequence += 1
        assert self._publish(body) == Accepted()

    def view(self, attempt: str = "l.0") -> None:
        reported = tuple(progress(rank, 9) for rank in self.ranks)
        body = wire.encode(wire.View(JOB, attempt, self.name, "b", time.time_ns(), reported))
        self.line.post("/api/v1/agents/view", self.enrolment.identity().sign(Purpose.VIEW, body))


@pytest.fixture
def thief(up, asking):
    return asking(up.kept("ingest-token"))


@pytest.fixture(scope="module")
def hosts(up, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    hosts = [Host(number, endpoint_of(up.url, up.kept("ingest-token"), {}), folder) for number in (0, 1)]
    yield hosts
    for host in hosts:
        host.line.close()


def train(hosts, admin, steps=3) -> dict:
    """The job trains on; returns it as the service sees it then."""
    for _ in range(steps):
        train.step += 1
        for host in hosts:
            host.send(train.step)
            host.view()
    step = train.step
    return until("the job's step", lambda: (found := job(admin)) and found["step"] == step and found)


train.step = 0


def job(admin) -> dict | None:
    answer = admin.get(f"/api/v1/jobs/{JOB}")
    return answer.json() if answer.is_success else None


def incidents(admin) -> set[str]:
    return {one["kind"] for one in admin.get("/api/v1/incidents", params={"job": JOB}).json()["items"]}


SAVED = {"checkpoint": "x", "tier": "remote", "location": "/tmp/x", "shards": 1}
FORGED = {
    "a NaN of another host's rank": {"host": "node-1", "steps": table([3], [2], loss=[float("nan")])},
    "its end": {"host": "node-1", "events": (wire.Event("process_exit", 1, 2, None, {"signal": 9}),)},
    "a newer attempt": {"host": "elsewhere", "attempt": "zzz.0", "ranks": ranks(1, "elsewhere")},
    "a checkpoint": {"host": "node-1", "events": (wire.Event("checkpoint_saved", 1, 2, 3, SAVED),)},
}


@pytest.mark.parametrize("what", FORGED)
def test_what_is_not_signed_by_the_agent_is_refused_and_what_trains_goes_on(hosts, admin, thief, what):
    before = train(hosts, admin)
    forged = wire.encode(batch(0, job=JOB, boot="thief", **FORGED[what]))
    answer = thief.post("/api/v1/telemetry", content=forged, headers=MSGPACK)
    assert answer.status_code == 403
    after = train(hosts, admin)
    assert (after["attempt"], after["world_size"]) == (before["attempt"], before["world_size"]) == ("l.0", 4)
    assert not incidents(admin) & {"nonfinite", "rank_lost", "hang"}
    assert admin.get(f"/api/v1/jobs/{JOB}/checkpoints").json()["items"] == []


def test_a_view_of_ranks_that_nobody_has_makes_no_pause(hosts, admin, thief):
    train(hosts, admin)
    reported = tuple(progress(rank, 9, order="x", answer="held") for rank in range(4))
    for attempt in ("l.0", "zzz.0"):
        view = wire.encode(wire.View(JOB, attempt, "node-0", "thief", 1, reported))
        assert thief.post("/api/v1/agents/view", content=view, headers=MSGPACK).status_code == 403


def first_orders(asking_with, host: str, request: bytes | str) -> tuple[int, str]:
    """The status, and the first orders, of a stream that is asked for with this request."""
    query = {"job": JOB, "host": host, "boot": "b", "signed": request if isinstance(request, str) else request.hex()}
    with asking_with.stream("GET", "/api/v1/agents/orders", params=query) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
        return stream.status_code, next(lines, "")


def test_orders_are_signed_for_the_agent_that_asks_and_for_no_other(up, hosts, admin, thief, tmp_path):
    """Whoever could have orders signed for another agent could hand them on where it took the service's address."""
    train(hosts, admin, 1)
    honest = hosts[0].enrolment.identity()
    enemy = Host(7, endpoint_of(up.url, up.kept("ingest-token"), {}), tmp_path)
    own = enemy.enrolment.identity()
    nonce = bytes(wire.LISTEN_BYTES)
    asked = {
        "of nobody": ("node-0", ""),
        "of another agent": ("node-0", sign(Purpose.LISTEN, honest.agent, own.secret, nonce)),
        "of another host": ("node-0", own.sign(Purpose.LISTEN, nonce)),
        "with a view that was overheard": ("node-0", honest.sign(Purpose.VIEW, nonce)),
        "with a NUL in it": ("node-0", honest.sign(Purpose.LISTEN, nonce).hex() + "\0"),
        "of another length": ("node-0", honest.sign(Purpose.LISTEN, b"00")),
    }
    statuses = {what: first_orders(thief, *how)[0] for what, how in asked.items()}
    assert list(statuses.values()) == [403, 403, 409, 403, 422, 422]
    for identity, host in ((honest, "node-0"), (own, "node-7")):
        request = identity.sign(Purpose.LISTEN, os.urandom(wire.LISTEN_BYTES))
        status, reported = first_orders(thief, host, request)
        assert status == 200
        assert OrderCheck().event(identity, reported, request, -1)[1] == 0
        with pytest.raises(ForgedOrdersError):
            OrderCheck().event(identity, reported, identity.sign(Purpose.LISTEN, nonce), -1)
    enemy.line.close()


@pytest.mark.parametrize("nonce", ["n\0", "n" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n"])
def test_a_nonce_is_32_hexadecimal_digits(thief, nonce):
    """It is signed beside other texts, and could not be distinguished from them if it were any text."""
    asked = {"job": "nonces", "host": "h", "nonce": nonce}
    assert thief.post("/api/v1/agents/enrol", json=asked).status_code == 422
    assert thief.post("/api/v1/agents/enrol", json=asked | {"nonce": "0" * 32}).status_code == 201


def test_an_agent_that_enrols_with_the_stolen_token_carries_no_rank_of_others(up, hosts, admin, tmp_path):
    """The token of `up` admits any agent of this machine; what it then says is bound to its own ranks."""
    before = train(hosts, admin)
    enemy = Host(1, endpoint_of(up.url, up.kept("ingest-token"), {}), tmp_path)
    enemy.send(500, ranks=(), steps=table([500], [2], loss=[float("nan")]))
    enemy.view("zzz.0")
    enemy.send(1, attempt="zzz.0")
    after = train(hosts, admin)
    enemy.line.close()
    assert after["attempt"] == before["attempt"]
    assert "nonfinite" not in incidents(admin)
    letters = until("dead letter", lambda: admin.get("/api/v1/dead-letters").json().get("items"))
    assert {one["reason"] for one in letters} == {"forged"}
    until("incident", lambda: "forged_telemetry" in incidents(admin))
