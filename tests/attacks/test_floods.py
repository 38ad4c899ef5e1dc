"""Floods take a stated amount of memory, and honest jobs beside them are watched all the same, also after a restart."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kafka import KafkaProducer

from rankwatch import wire
from rankwatch.kafka.settings import KafkaSettings, client_options, partition_of
from rankwatch_service.api.ingest import NEW_JOBS_MAX
from rankwatch_service.stream import partition
from tests.support.kafka.broker import new_prefix
from tests.support.service.process import Http, Role, Up, children, free_port, until
from tests.support.service.stored_series import read
from tests.support.trials.selection import long_trial
from tests.support.values import batches
from tests.support.values.batches import column

pytestmark = [pytest.mark.integration, pytest.mark.ci]

MB = 1024 * 1024
MSGPACK = {"Content-Type": "application/msgpack"}
METRICS = tuple(f"m{number}" for number in range(20))
STEPS, STEP_S = 420, 0.1
SLOW_FROM, NAN_AT = 150, 350
"""Steps at which the honest job's faults begin: beside the first flood, and beside the one after the restart."""
HONEST = (
    *("--ranks", "64", "--steps", str(STEPS), "--step-s", str(STEP_S)),
    *("--fault", f"straggler:rank=9,at={SLOW_FROM},factor=1.5,until={SLOW_FROM + 100}"),
    *("--fault", f"nonfinite:rank=3,at={NAN_AT}"),
)
FLOOD_S = 8.0
ATTACKER_MB = 300
"""What a flood may add to api and stream together, which have an honest job besides."""
STREAM_MB = 4_000
"""As docs/operations.md states it for a partition."""


class Flooded(Up):
    """`rankwatch up`, which can be started again on the same data."""

    def __init__(self, folder: Path, kafka: KafkaSettings | None) -> None:
        self.kafka = kafka
        named = {"": kafka.bootstrap, "_PREFIX": kafka.prefix, "_PARTITIONS": "2"} if kafka else {}
        environment = {f"RANKWATCH_KAFKA{name}": value for name, value in named.items()}
        super().__init__(folder, port=free_port(), environment=environment)

    def start(self) -> None:
        super().start()
        config = json.loads((self.folder / "config" / "rankwatch" / "ingest.json").read_text())
        self.agents = Http(self.url, config["token"])
        self.person = Http(self.url, self.token())

    def send(self, batch: wire.Batch) -> int:
        """The status of the api's answer."""
        answer = self.agents.ask("POST", "/api/v1/telemetry", content=wire.encode(batch), headers=MSGPACK)
        return answer.status_code

    def resident_mb(self, *roles: str) -> float:
        """Of these processes together, and of both that a flood reaches if none is named."""
        running = children(self.process.pid)
        found = 0.0
        for role in roles or ("api", "stream"):
            with contextlib.suppress(KeyError, OSError):  # it is being started
                found += int(Path(f"/proc/{running[role]}/statm").read_text().split()[1]) * 4096 / MB
        return found

    def stream_mb(self) -> float:
        return self.resident_mb("stream")

    def incidents(self, kind: str, job: str = "") -> list[dict]:
        path = f"/api/v1/incidents?kind={kind}&limit=200" + (f"&job={job}" if job else "")
        return self.person.ask("GET", path).json()["items"]

    def metric(self, line: str) -> float:
        reported = self.person.ask("GET", "/metrics").text
        return sum(float(one.rpartition(" ")[2]) for one in reported.splitlines() if one.startswith(line))

    def ingest_token(self) -> str:
        """One of its own."""
        answer = self.person.ask("POST", "/api/v1/tokens", json={"name": "another team", "scopes": ["ingest"]})
        assert answer.status_code == 201, answer.text
        return answer.json()["token"]

    def kill(self) -> None:
        self._close()
        super().kill()

    def stop(self) -> int:
        self._close()
        return super().stop()

    def _close(self) -> None:
        self.agents.close()
        self.person.close()


class HonestJob:
    """A job of 64 ranks, with a token of its own and a fault beside each flood."""

    def __init__(self, up: Flooded) -> None:
        self._up = up
        to = ("--live", "--url", up.url, "--token", up.ingest_token(), "--job", "honest")
        self._sender = Role(up.folder / "honest", "simulate", *to, *HONEST)
        self._sender.start()

    def await_step(self, step: int) -> None:
        until(f"step {step}", lambda: self._read().get("step", -1) >= step)

    def await_found(self, kind: str, rank: int, at_step: int) -> None:
        """Wait until the incident is in REST; prints how long after the step that began it."""
        (found,) = until(kind, lambda: self._up.incidents(kind, "honest"))
        assert found["ranks"][0] == rank
        (attempt,) = self._up.person.ask("GET", "/api/v1/jobs/honest/attempts").json()["items"]
        delay_s = time.time() - attempt["started_unix_ns"] / 1e9 - at_step * STEP_S
        print(f"{kind}: {delay_s:.1f} s after its step")

    def assert_nothing_lost(self) -> None:
        """It runs to its end, and every step of every rank is stored."""
        assert self._sender.process is not None
        assert self._sender.process.wait(120) == 0, self._sender.said()

        def all_stored() -> bool:
            path = f"/api/v1/jobs/honest/heatmap.bin?metric=busy_s&columns={STEPS}&rows=64"
            values = read(self._up.person.ask("GET", path).content)[2]
            return values.shape == (64, STEPS) and bool(np.all(np.isfinite(values)))

        until("every step of every rank", all_stored)
        dropped = self._read()["dropped"]
        print(f"dropped: {dropped}")
        # What is late counts for the charts only; what the api could not acknowledge before it was killed came twice.
        assert set(dropped) <= {"late", "incomplete", "repeated_batches"}
        assert self._up.incidents("telemetry_lost", "honest") == []

    def _read(self) -> dict:
        answer = self._up.person.ask("GET", "/api/v1/jobs/honest")
        return answer.json() if answer.status_code == 200 else {}


class HighestMemory(threading.Thread):
    """Looks ten times a second, from now on until it is asked for the highest."""

    def __init__(self, read_mb: Callable[[], float]) -> None:
        super().__init__(daemon=True)
        self._read_mb = read_mb
        self._asked = threading.Event()
        self._highest_mb = 0.0
        self.start()

    def run(self) -> None:
        while not self._asked.wait(0.1):
            self._highest_mb = max(self._highest_mb, self._read_mb())

    def mb(self) -> float:
        self._asked.set()
        self.join()
        return self._highest_mb


@pytest.fixture(params=["sqlite", "kafka"])
def up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Flooded]:
    kafka = None
    if request.param == "kafka":
        kafka = KafkaSettings(request.getfixturevalue("any_broker").bootstrap, new_prefix())
    one = Flooded(tmp_path, kafka)
    one.start()
    yield one
    one.stop()


def batch(job: str, seq: int, ranks: range, world_size: int, *, introduce: bool, step: int = -1) -> wire.Batch:
    fields: dict[str, Any] = {"job": job, "attempt": f"{job}.0", "host": "attacker", "sent_unix_ns": time.time_ns()}
    if introduce:
        fields["ranks"] = tuple(wire.RankInfo(rank, world_size) for rank in ranks)
    if step >= 0:
        columns = {"step": column([step] * len(ranks), "u4"), "rank": column(ranks, "u4")}
        columns |= dict.fromkeys(METRICS, column([1.0] * len(ranks), "f4"))
        fields["steps"] = wire.Table(len(ranks), columns)
    return batches.batch(seq, **fields)


def declare(up: Flooded, jobs: int) -> None:
    """Four batches of one row each for every job, which declare 131,072 ranks."""
    for number in range(jobs):
        for seq in range(4):
            sent = batch(f"declared-{number:02}", seq, range(1), 131_072, introduce=seq == 0, step=seq)
            assert up.send(sent) == 202


def declarations(up: Flooded) -> None:
    """Of 20 jobs, each of which gets one incident, whatever it sends."""
    before = up.metric("rankwatch_dead_letters_total")
    declare(up, 20)
    until("all are refused", lambda: up.metric("rankwatch_dead_letters_total") >= before + 80)
    assert len(until("an incident of each", lambda: len(found := up.incidents("limit_reached")) >= 20 and found)) == 20
    time.sleep(FLOOD_S)  # frames of ranks that never report would close, and be charted, meanwhile


def job_names(up: Flooded, seconds: float = FLOOD_S) -> int:
    """Without end, by one token, for at least so long and until some are told to wait: how many."""
    statuses, began_s = [], time.monotonic()
    while (took_s := time.monotonic() - began_s) < seconds or 429 not in statuses:
        statuses.append(up.send(batch(f"made-up-{time.time_ns()}", 0, range(1), 1, introduce=True)))
    assert NEW_JOBS_MAX <= statuses.count(202) <= NEW_JOBS_MAX + 2 * took_s
    assert set(statuses) == {202, 429}
    return statuses.count(429)


@long_trial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flood", [declarations, job_names], ids=lambda flood: flood.__name__)
def test_an_honest_job_is_watched_beside_a_flood_and_also_after_a_restart(up, flood):
    before_mb = up.resident_mb()
    highest = HighestMemory(up.resident_mb)
    honest = HonestJob(up)
    honest.await_step(SLOW_FROM - 50)
    with ThreadPoolExecutor(1) as attacker:
        attack = attacker.submit(flood, up)
        honest.await_found("straggler", 9, SLOW_FROM)
        attack.result()
        up.kill()
        up.start()
        attack = attacker.submit(flood, up)
        honest.await_found("nonfinite", 3, NAN_AT)
        attack.result()
    honest.assert_nothing_lost()
    grown_mb = highest.mb() - before_mb
    print(f"api and stream: {before_mb:.0f} MB, and {grown_mb:.0f} MB more beside the flood")
    assert grown_mb < ATTACKER_MB


def test_a_token_that_makes_up_jobs_is_told_to_wait_and_others_have_room(up: Flooded) -> None:
    refused = job_names(up, 5.0)
    assert up.metric('rankwatch_ingest_batches_total{result="too_many_jobs"}') == refused
    (incident,) = until("the incident", lambda: up.incidents("limit_reached"))
    assert incident["job"].startswith("made-up-")
    assert incident["evidence"]["what"] == "new jobs of one token within a minute"
    others = Http(up.url, up.ingest_token())
    sent = wire.encode(batch("honest", 0, range(1), 1, introduce=True))
    assert others.ask("POST", "/api/v1/telemetry", content=sent, headers=MSGPACK).status_code == 202
    others.close()
    until("it is listed", lambda: up.person.ask("GET", "/api/v1/jobs/honest").status_code == 200)


@long_trial
@pytest.mark.parametrize("up", ["kafka"], indirect=True)
def test_job_names_without_end_in_a_topic_fill_a_partition_and_open_an_incident(up: Flooded) -> None:
    assert up.kafka is not None
    producer = KafkaProducer(**client_options(up.kafka))
    for number in range(3 * partition.JOBS_MAX):
        name = f"made-up-{number}"
        body = wire.encode(batch(name, 0, range(1), 1, introduce=True))
        producer.send(up.kafka.telemetry_topic, body, name.encode(), partition=partition_of(name, 2))
    producer.flush()
    producer.close()
    found = until("the incident", lambda: up.incidents("limit_reached"))
    assert found[0]["evidence"]["what"] == "active jobs in a partition"
    until("the rest is refused", lambda: up.metric("rankwatch_dead_letters_total") == partition.JOBS_MAX)
    assert up.stream_mb() < STREAM_MB


@long_trial
@pytest.mark.timeout(600)
def test_whoever_sends_all_that_they_declare_stays_within_the_stated_bound(up: Flooded) -> None:
    """Jobs of 16,384 ranks, all introduced and with rows, until much more was sent than there is room for."""
    world_size, together = 16_384, 8_192
    highest = HighestMemory(up.stream_mb)
    honest = HonestJob(up)
    for number in range(16):
        for seq, low in enumerate(range(0, world_size, together)):
            ranks = range(low, low + together)
            assert up.send(batch(f"heard-{number}", seq, ranks, world_size, introduce=True)) == 202
        for seq in range(2, 22):
            low = seq % 2 * together
            ranks, step = range(low, low + together), seq // 2 - 1
            assert up.send(batch(f"heard-{number}", seq, ranks, world_size, introduce=False, step=step)) == 202
    honest.await_found("straggler", 9, SLOW_FROM)
    honest.await_found("nonfinite", 3, NAN_AT)
    honest.assert_nothing_lost()
    assert up.incidents("limit_reached")
    up.kill()
    up.start()
    before = up.metric("rankwatch_dead_letters_total")
    for number in range(16):
        assert up.send(batch(f"heard-{number}", 22, range(together), world_size, introduce=False, step=10)) == 202
    # A partition that is full has room for a few ranks without metrics; with Kafka there are two partitions.
    for number in range(16, 32):
        assert up.send(batch(f"heard-{number}", 0, range(together), world_size, introduce=True)) == 202
    until("what is full is full after a restart too", lambda: up.metric("rankwatch_dead_letters_total") > before)
    time.sleep(20.0)  # charts are written meanwhile
    highest_mb = highest.mb()
    print(f"stream: {highest_mb:.0f} MB")
    assert highest_mb < STREAM_MB
