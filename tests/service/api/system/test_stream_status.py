from collections import Counter

import pytest
from sqlalchemy import insert

from rankwatch_service.api.background.health_facts import partitions
from rankwatch_service.log.base import Entry
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import StreamPosition
from rankwatch_service.stream.process import PartitionReport, Reporter, new_counts


@pytest.fixture
def reporter(api):
    return Reporter(api.engine, api.clock, "host:1")


def committed(api, partition: int, position: int) -> None:
    row = {"partition": partition, "position": position, "tick_number": 1, "epoch": 3}
    with write(api.engine) as connection:
        connection.execute(insert(StreamPosition).values(row))


def test_partitions_show_their_position_and_their_owner(api, reporter):
    api.log.append([Entry("j", b"x")] * 9)
    committed(api, 0, 7)
    reporter.report([PartitionReport(0, 3, 7, 7, 5, 0)], Counter(restarts=0, fenced=2, away=0, rebuilds=1))
    state = api.get("/api/v1/stream").json()
    [partition] = state["partitions"]
    told = {name: partition[name] for name in ("partition", "owner", "epoch", "position", "end", "lag")}
    assert told == {"partition": 0, "owner": "host:1", "epoch": 3, "position": 7, "end": 9, "lag": 2}
    [process] = state["processes"]
    assert process["counters"] == {"restarts": 0, "fenced": 2, "away": 0, "rebuilds": 1}


def test_with_kafka_the_end_of_a_partition_is_what_its_owner_last_reported(api, reporter):
    committed(api, 4, 100)
    reporter.report([PartitionReport(4, 3, 90, 130, 5, 11)], new_counts())
    with read(api.engine) as connection:
        [partition] = partitions(connection, in_store=False)
    assert (partition.partition, partition.lag, partition.lost_records) == (4, 30, 11)


def test_the_newest_report_replaces_the_one_before(api, reporter):
    committed(api, 0, 1)
    for epoch in (1, 2):
        reporter.report([PartitionReport(0, epoch, 1, 1, 5, epoch)], Counter(restarts=epoch))
    state = api.get("/api/v1/stream").json()
    assert [one["lost_records"] for one in state["partitions"]] == [2]
    assert [one["counters"]["restarts"] for one in state["processes"]] == [2]


def test_metrics_have_a_line_for_each_partition(api, reporter):
    committed(api, 0, 0)
    api.log.append([Entry("j", b"x")] * 3)
    reporter.report([PartitionReport(0, 3, 0, 3, 5, 0)], Counter(rebuilds=4))
    lines = api.get("/metrics").text.splitlines()
    assert 'rankwatch_stream_lag_records{partition="0"} 3.0' in lines
    assert 'rankwatch_stream_epoch{partition="0"} 3.0' in lines
    assert 'rankwatch_stream_events_total{process="host:1",what="rebuilds"} 4.0' in lines
    [age] = [line for line in lines if line.startswith("rankwatch_stream_report_age_seconds{")]
    assert float(age.split()[-1]) < 60.0
