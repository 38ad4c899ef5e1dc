"""Devices by REST: who they are, what they counted last, and counters over time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from rankwatch import wire
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.clock import SystemClock
from rankwatch_service.job.device_boards import SLOT_S
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.sources import SqlSource
from tests.support.clock import FakeClock
from tests.support.service.api import Api, running_api
from tests.support.service.stream import no_links
from tests.support.values.batches import batch, ranks

SLOTS = 60
DOWN_SLOTS = 4
"""Slots at the end in which one of the ports is down."""


@contextmanager
def opened(request, folder) -> Iterator[Api]:
    with ExitStack() as stack:
        url = ""
        if request.param == "postgresql":
            url = stack.enter_context(request.getfixturevalue("postgres").migrated())
        yield stack.enter_context(running_api(folder, database_url=url))


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request, tmp_path_factory) -> Iterator[Api]:
    """An api for all tests that only read."""
    with opened(request, tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture(params=["sqlite", "postgresql"])
def own_api(request, tmp_path) -> Iterator[Api]:
    with opened(request, tmp_path) as api:
        yield api


@pytest.fixture(scope="module")
def began_ns(api) -> int:
    return counted(api)


def counted(api: Api) -> int:
    """A job of two ranks on a host with three devices, that has sent counters for a while; when it began to."""
    clock = FakeClock()
    clock.advance(1_000_000)
    log, began_ns = SqlSource(api.engine, clock), clock.unix_ns()
    stream = Stream(
        api.engine, log, ControlLog(api.engine, clock), clock, detectors, no_links, SeriesWriter(api.engine, clock)
    )
    stream.start()
    for slot in range(SLOTS):
        samples = tuple(
            wire.DeviceSample(f"GPU-{index}", clock.unix_ns(), index, 50.0 + index, extra={"pcie_width": 16.0})
            for index in range(3)
            if index < 2 or slot < SLOTS // 2
        )
        is_up = slot < SLOTS - DOWN_SLOTS
        rates = {"received_bytes_per_s": 6e6, "link_bits_per_s": 25e9} if is_up else {}
        ports = (
            wire.HostDeviceSample(wire.PORT, "eth0", clock.unix_ns(), {"link_up": 1.0}),
            wire.HostDeviceSample(wire.PORT, "eth1", clock.unix_ns(), {"link_up": float(is_up), **rates}),
        )
        body = wire.encode(batch(slot, ranks=ranks(2) if slot == 0 else (), devices=samples, host_devices=ports))
        log.append([Entry("gpt", body)])
        clock.advance(SLOT_S)
        while stream.step():
            pass
    clock.advance(3 * SLOT_S)
    stream.step()
    stream.close()
    return began_ns


def test_devices_are_listed_with_the_ranks_that_use_them_and_their_newest_counters(api, began_ns):
    devices = api.get("/api/v1/jobs/gpt/devices").json()["items"]
    assert [(one["number"], one["host"], one["index"], one["uuid"], one["ranks"]) for one in devices] == [
        (2, "node-1", 2, "GPU-2", []),
        (1, "node-1", 1, "GPU-1", [1]),
        (0, "node-1", 0, "GPU-0", [0]),
    ]
    assert devices[1]["counters"] == {"temperature_celsius": 51.0, "pcie_width": 16.0}
    slot_ns = SLOT_S * 10**9
    assert devices[1]["at_unix_ns"] == (began_ns // slot_ns + SLOTS - 1) * slot_ns
    first, rest = (
        api.get(f"/api/v1/jobs/gpt/devices?limit=2{cursor}").json()
        for cursor in ("", "&cursor=" + api.get("/api/v1/jobs/gpt/devices?limit=2").json()["next_cursor"])
    )
    assert [one["number"] for one in first["items"] + rest["items"]] == [2, 1, 0]


def test_a_counter_over_time_of_all_devices_or_of_some(api, began_ns):
    base = "/api/v1/jobs/gpt/devices"
    assert api.get(f"{base}/counters").json() == {"items": ["pcie_width", "temperature_celsius"]}
    (segment,) = api.get(f"{base}/series?counter=temperature_celsius&reduce=max&points=50").json()["segments"]
    (line,) = segment["lines"]
    assert len(segment["at_unix_ns"]) <= 50
    assert 0 <= began_ns - segment["at_unix_ns"][0] < 65 * SLOT_S * 10**9
    assert (max(line["high"]), line["high"][-1]) == (52.0, 51.0)
    later_ns = began_ns + 10 * SLOT_S * 10**9
    chosen = f"counter=temperature_celsius&reduce=none&devices=0,2&from_unix_ns={later_ns}&to_unix_ns={later_ns}"
    (segment,) = api.get(f"{base}/series?{chosen}").json()["segments"]
    assert [(one["name"], one["high"]) for one in segment["lines"]] == [("device:0", [50.0]), ("device:2", [52.0])]


def test_kinds_of_devices_and_hosts_are_listed_apart(api, began_ns):
    base = "/api/v1/jobs/gpt/devices"
    port = api.get(f"{base}?kind=port").json()["items"][-1]
    assert (port["kind"], port["number"], port["host"], port["uuid"]) == ("port", 0, "node-1", "eth0")
    assert port["counters"] == {"link_up": 1.0}
    assert api.get(f"{base}?kind=host").json()["items"] == []
    assert api.get(f"{base}?kind=disk").status_code == 422
    assert len(api.get(f"{base}?host=node-1").json()["items"]) == 3
    assert api.get(f"{base}?host=node-2").json()["items"] == []
    assert api.get(f"{base}/counters?kind=port").json() == {
        "items": ["link_bits_per_s", "link_up", "received_bytes_per_s"]
    }
    (segment,) = api.get(f"{base}/series?counter=link_up&kind=port&reduce=min").json()["segments"]
    assert set(segment["lines"][0]["high"][:-DOWN_SLOTS]) == {1.0}
    jobs = [one["job"] for one in api.get("/api/v1/hosts/node-1/jobs").json()["items"]]
    assert jobs == ["gpt"]
    assert api.get("/api/v1/hosts/node-2/jobs").json()["items"] == []


def test_a_port_that_is_down_has_neither_the_rates_nor_the_speed_from_before(api, began_ns):
    ports = api.get("/api/v1/jobs/gpt/devices?kind=port").json()["items"]
    assert {one["uuid"]: one["counters"] for one in ports} == {"eth0": {"link_up": 1.0}, "eth1": {"link_up": 0.0}}


def test_a_counter_that_the_devices_do_not_have_is_refused_with_the_names_of_those_they_have(api, began_ns):
    refused = api.get("/api/v1/jobs/gpt/devices/series?counter=nonsense")
    assert refused.status_code == 422
    assert refused.json()["detail"] == (
        "gpu devices of gpt have no counter 'nonsense'; they have pcie_width, temperature_celsius"
    )
    assert api.get("/api/v1/jobs/gpt/devices/series?counter=nonsense&kind=host").json()["segments"] == []


def test_series_of_devices_are_not_among_those_of_steps_and_go_with_their_job(own_api):
    counted(own_api)
    assert own_api.get("/api/v1/jobs/gpt/metrics").json()["items"] == []
    SeriesWriter(own_api.engine, SystemClock()).delete("gpt")
    for kind in wire.DEVICE_KINDS:
        assert own_api.get(f"/api/v1/jobs/gpt/devices/counters?kind={kind}").json()["items"] == []


def test_what_does_not_exist_or_is_malformed_is_refused(api, began_ns):
    for path in ("", "/counters", "/series?counter=power_w"):
        assert api.get(f"/api/v1/jobs/none/devices{path}").status_code == 404
    for query in ("", "counter=x&devices=a", "counter=x&from_unix_ns=-1", "counter=x&reduce=none&devices=0-9999"):
        assert api.get(f"/api/v1/jobs/gpt/devices/series?{query}").status_code == 422, query
