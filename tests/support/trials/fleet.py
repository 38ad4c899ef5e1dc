"""The agents of simulated jobs, in real time: `python -m tests.support.trials.fleet SETTINGS.json`.

Each host of each job has the real sender with its spool, so that outages are lived through as a host lives through
them; only the ranks are made up. Where there is Kafka, every other job's agents publish to it themselves, and the rest
sends over HTTP. Ends when everything was accepted, and says how many messages that were.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from heapq import merge
from pathlib import Path

from rankwatch import wire
from rankwatch.agent.batch_builder import EncodedBatch
from rankwatch.agent.clock import HostClock
from rankwatch.agent.endpoint import Endpoint, endpoint_of
from rankwatch.agent.enrolment import Enrolment
from rankwatch.agent.kafka_publisher import KafkaPublisher
from rankwatch.agent.sender import Publish, Sender, Spool, one_by_one
from rankwatch.agent.service_connection import ServiceConnection
from rankwatch.agent.uplink import HttpPublisher
from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.simulate.batches import TimedBatch, batches
from rankwatch_service.simulate.faults import BitFlip, Hang, LossSpike, NonFinite, NormSpike, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement

AFTER_THE_END_S = 4.0
"""Of a job's time: what is sent after its ranks have left their loops."""
DRAIN_S = 120.0


@dataclass(frozen=True)
class FleetSettings:
    """Where to send what."""

    scenario: str
    folder: str
    url: str
    token: str
    kafka: str = ""
    kafka_prefix: str = "rankwatch"

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


def small() -> dict[str, Job]:
    """Three jobs of half a minute with one fault each. The hang outlasts any outage of the log.

    The steps of beta are long: after an outage its hosts may be heard seconds apart, and a rank that is heard 8 steps
    after the others is named by an update of the job's incident, not by an incident of its own.
    """
    size = {"step_s": 0.5, "placement": RankPlacement(ranks_per_host=4)}
    return {
        "alpha": Job(world_size=16, steps=62, seed=31, **size).inject(Slow(5, 30, 2.0, until_step=48)),
        "beta": Job(world_size=8, steps=36, seed=32, **size | {"step_s": 1.0}).inject(NonFinite(3, 17)),
        "gamma": Job(world_size=8, steps=38, seed=33, **size).inject(Hang(2, 25, seconds=60.0)),
    }


def large() -> dict[str, Job]:
    """1,024 ranks for ten minutes with eight faults, and two small jobs beside them, for other partitions."""
    size = {"step_s": 1.0, "placement": RankPlacement(ranks_per_host=64)}
    main = Job(world_size=1_024, steps=605, seed=41, **size)
    main = main.inject(
        Slow(17, 60, 1.3, until_step=110), NonFinite(700, 140), LossSpike(170, 3.0, 4), BitFlip(900, 190)
    )
    main = main.inject(Slow(300, 220, 1.5, until_step=260), Hang(512, 290, seconds=40.0), NormSpike(330, 8.0, 3))
    main = main.inject(Slow(1_023, 380, 1.2, until_step=430), NonFinite(1, 470))
    side = {"step_s": 0.5, "placement": RankPlacement(ranks_per_host=8)}
    return {
        "main": main,
        "left": Job(world_size=16, steps=1_300, seed=42, **side).inject(
            Slow(3, 300, 1.5, until_step=420), NonFinite(9, 700)
        ),
        "right": Job(world_size=16, steps=1_250, seed=43, **side).inject(
            Hang(5, 250, seconds=40.0), LossSpike(600, 3.0, 4)
        ),
    }


SCENARIOS = {"small": small, "large": large}


def sent(scenario: str, start_unix_ns: int = 0) -> Iterator[TimedBatch]:
    """Every message of the scenario's jobs, in the order of sending."""
    jobs = SCENARIOS[scenario]()
    return merge(*(_until_over(name, job, start_unix_ns) for name, job in jobs.items()), key=lambda one: one.time_s)


def _until_over(name: str, job: Job, start_unix_ns: int) -> Iterator[TimedBatch]:
    end_s = float("inf")
    for message in batches(name, generate(job), start_unix_ns=start_unix_ns):
        if message.time_s > end_s:
            return
        yield message
        if any(event.kind == "rank_left" for event in message.batch.events):
            end_s = min(end_s, message.time_s + AFTER_THE_END_S)


class Fleet:
    """One sender for each host of each job."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._jobs = list(SCENARIOS[settings.scenario]())
        self._senders: dict[tuple[str, str], Sender] = {}
        self._kafka = KafkaSettings(settings.kafka, settings.kafka_prefix) if settings.kafka else None
        self.messages = 0

    def play(self) -> None:
        """Send everything at its time."""
        began_s = time.monotonic()
        for message in sent(self._settings.scenario, time.time_ns()):
            time.sleep(max(0.0, began_s + message.time_s - time.monotonic()))
            self._sender(message.batch.job, message.batch.host).put(EncodedBatch(wire.encode(message.batch)))
            self.messages += 1

    def drain(self) -> bool:
        """Wait until everything was accepted; False if it was not in time."""
        deadline_s = time.monotonic() + DRAIN_S
        while any(sender.behind or not sender.idle for sender in self._senders.values()):
            if time.monotonic() > deadline_s:
                late = {name: sender.trouble for name, sender in self._senders.items() if not sender.idle}
                print(f"not everything was accepted within {DRAIN_S:.0f} s: {late}", flush=True)
                return False
            time.sleep(0.05)
        for sender in self._senders.values():
            assert not sender.take_losses()
            sender.close(1.0)
        return True

    def _sender(self, job: str, host: str) -> Sender:
        sender = self._senders.get((job, host))
        if sender is None:
            folder = Path(self._settings.folder, f"{job}-{host}")
            sender = Sender(self._publisher(job, host), lambda: Spool(folder), HostClock())
            self._senders[job, host] = sender
            sender.start()
        return sender

    def _publisher(self, job: str, host: str) -> Publish:
        def find() -> Endpoint:
            return endpoint_of(self._settings.url, self._settings.token, {})

        enrolment = Enrolment(Path(self._settings.folder, f"{job}-{host}.identity"), job, ServiceConnection(find))
        enrolment.introduce(host)
        if self._kafka is not None and self._jobs.index(job) % 2 == 0:
            return KafkaPublisher(self._kafka, job, enrolment)
        return one_by_one(HttpPublisher(ServiceConnection(find), enrolment))


def main(path: str) -> int:
    fleet = Fleet(FleetSettings(**json.loads(Path(path).read_text())))
    fleet.play()
    print("played", flush=True)
    if not fleet.drain():
        return 1
    print(f"sent {fleet.messages}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
