"""The real agent on a real broker: telemetry goes there, orders and views stay with the service."""

from collections import Counter
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, decoded, rows, until
from tests.support.kafka.broker import kafka_broker, new_prefix, read_topic
from tests.support.ranks.recording_rank import RecordingRank

pytestmark = pytest.mark.integration

PARTITIONS = 4


def topics_at(bootstrap: str) -> KafkaSettings:
    settings = Settings(kafka=bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
    ensure_topics(settings)
    return settings.kafka_settings()


def environment(kafka: KafkaSettings) -> dict[str, str]:
    return {"RANKWATCH_KAFKA": kafka.bootstrap, "RANKWATCH_KAFKA_PREFIX": kafka.prefix}


def batches(kafka: KafkaSettings, steps: int) -> list[wire.Batch]:
    """Everything in the topic once it holds so many step records."""

    def enough(found: list) -> bool:
        return sum(steps_in(decoded(one.value)) for one in found) >= steps

    found = read_topic(kafka.bootstrap, kafka.telemetry_topic, enough, PARTITIONS, within_s=60.0)
    assert {one.key for one in found} == {"gpt"}
    return [decoded(one.value) for one in found]


def steps_in(batch: wire.Batch) -> int:
    return 0 if batch.steps is None else batch.steps.rows


def test_step_records_go_to_the_topic_in_order_and_views_to_the_service(any_broker, tmp_path: Path) -> None:
    kafka = topics_at(any_broker.bootstrap)
    with (
        AgentService() as service,
        RecordingRank(tmp_path) as rank,
        AgentProcess(tmp_path, service.environment | environment(kafka)) as agent,
    ):
        rank.do("steps", 300)
        until(lambda: service.views, 60.0)
        rank.say("exit", 0)
        rank.wait()
        assert agent.wait(60.0) == 0
        came = batches(kafka, 300)
        assert service.batches == []
    assert [batch.seq for batch in came] == list(range(len(came)))
    assert max(Counter(row for batch in came for row in rows(batch)).values()) == 1
    assert [step for batch in came for _, step, _ in rows(batch)] == list(range(300))
    assert not list(tmp_path.glob("*.ring"))


@pytest.mark.ci
def test_an_outage_of_the_broker_is_spooled_and_nothing_is_lost(tmp_path: Path) -> None:
    with kafka_broker("noida") as broker:
        kafka = topics_at(broker.bootstrap)
        with RecordingRank(tmp_path) as rank, AgentProcess(tmp_path, environment(kafka)) as agent:
            rank.do("steps", 50)
            batches(kafka, 50)
            broker.stop()
            rank.do("steps", 500)
            until(lambda: list(tmp_path.glob("**/*.seg")), 60.0)
            rank.do("steps", 500)
            broker.start()
            came = batches(kafka, 1_050)
            until(lambda: "accepts telemetry again" in agent.log, 60.0)
    steps = list(dict.fromkeys(step for batch in came for _, step, _ in rows(batch)))
    assert steps == list(range(1_050))
    assert not [event for batch in came for event in batch.events if event.kind == "records_lost"]


def test_settings_that_cannot_be_are_said_in_the_log_and_lose_nothing(tmp_path: Path) -> None:
    with RecordingRank(tmp_path) as rank, AgentProcess(tmp_path, {}, arguments=["--kafka", "nowhere"]) as agent:
        rank.do("steps", 20)
        until(lambda: "'nowhere' is not HOST:PORT" in agent.log, 60.0)
        until(lambda: list(tmp_path.glob("**/*.seg")), 60.0)
