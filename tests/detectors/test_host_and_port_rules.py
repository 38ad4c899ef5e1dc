"""Hosts and ports judged by their counters: each rule at its edge, and nothing said of how a job always runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rankwatch_detectors.base import (
    AttemptStart,
    Change,
    Detector,
    DeviceCounters,
    Finding,
    Frame,
    Occurrence,
    Severity,
    StepKind,
    Tick,
)
from rankwatch_detectors.devices.host_degraded import LIMITS, HostDegradedConfig, HostDegradedDetector, HostRulesConfig
from rankwatch_detectors.devices.network_degraded import NetworkDegradedConfig, NetworkDegradedDetector, PortRulesConfig
from tests.support.values.presences import topology

HOST, PORT = HostRulesConfig(), PortRulesConfig()
SLOT_S = 5.0
SICK = 1
HOSTS = 4
USUAL = {
    "host": {"cpu_throttled_ratio": 0.0, "cpu_steal_ratio": 0.01, "memory_pressure_ratio": 0.0, "oom_kills": 3.0},
    "port": {
        "link_up": 1.0, "link_downs": 5.0, "port_errors": 9.0, "link_bits_per_s": 4e11, "retransmissions_per_s": 1.0
    },
}  # fmt: skip
Counters = Mapping[str, float]


class Hosts:
    """A job on four hosts, each with one port."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        host, network = HostDegradedDetector(HostDegradedConfig()), NetworkDegradedDetector(NetworkDegradedConfig())
        self.detector: Detector = host if kind == "host" else network
        self.slot = 0
        self.begin("a")

    def begin(self, launch: str, *, trains: bool = True) -> list[Finding]:
        """Another launch; `trains`: it has made its first step."""
        now_s = self.slot * SLOT_S
        findings = list(self.detector.observe(AttemptStart(f"{launch}.0", topology(8, hosts=HOSTS), now_s)))
        if trains:
            self.detector.observe(Frame(f"{launch}.0", "steps", 0, StepKind.TRAIN, now_s, {}, {}))
        return findings

    def see(self, slots: int = 1, sick: Counters | None = None, all_of: Counters | None = None) -> list[Finding]:
        """So many slots; `sick` changes the counters of host-1, `all_of` those of all."""
        findings: list[Finding] = []
        for _ in range(slots):
            self.slot += 1
            usual = USUAL[self.kind] | dict(all_of or {})
            values = {name: np.full(HOSTS, value) for name, value in usual.items()}
            for name, value in (sick or {}).items():
                values[name][SICK] = value
            present = {name: np.isfinite(reported) for name, reported in values.items()}
            named = tuple((f"host-{number}", "mlx5_0/1" * (self.kind == "port")) for number in range(HOSTS))
            now_s = self.slot * SLOT_S
            counters = DeviceCounters(self.slot, now_s, named, values, present, self.kind)
            findings += self.detector.observe(counters)
            findings += self.detector.observe(Tick(now_s, None))
        return findings


def learned(kind: str) -> Hosts:
    hosts = Hosts(kind)
    assert hosts.see(HOST.learning_slots + 1) == []
    return hosts


@pytest.mark.parametrize("what", LIMITS)
def test_a_share_of_time_beyond_its_limit_is_reported_after_a_minute_and_warned_of_after_five(what: str) -> None:
    name, limit = LIMITS[what]
    hosts = learned("host")
    assert hosts.see(2 * HOST.held_slots, {name: limit - 0.001}) == []
    assert hosts.see(HOST.held_slots - 1, {name: limit}) == []
    (finding,) = hosts.see(1, {name: limit})
    assert (finding.change, finding.severity, finding.cause) == (Change.OPEN, Severity.INFO, "host")
    assert (str(finding.scope), finding.evidence["rule"]) == ("host:host-1", what)
    assert finding.evidence[name] == limit
    (warned,) = hosts.see(HOST.warning_slots - HOST.held_slots, {name: limit})
    assert (warned.change, warned.severity) == (Change.UPDATE, Severity.WARNING)
    assert hosts.see(HOST.held_slots - 1) == []
    (over,) = hosts.see(1)
    assert (over.change, over.summary) == (Change.CLOSE, "The host is back to its usual state.")


def test_what_a_host_had_from_the_start_is_reported_only_from_twice_of_it_on() -> None:
    assert learned("host").see(100, all_of={"memory_pressure_ratio": 0.5}) == [], "of most hosts it is about none"
    hosts = Hosts("host")
    assert hosts.see(100, {"cpu_throttled_ratio": 0.4}) == []
    assert hosts.see(2 * HOST.held_slots, {"cpu_throttled_ratio": 0.79}) == []
    assert hosts.see(HOST.held_slots, {"cpu_throttled_ratio": 0.81})


def test_killed_processes_are_reported_at_once_and_warned_of_when_it_goes_on() -> None:
    hosts = learned("host")
    (finding,) = hosts.see(1, {"oom_kills": 5.0})
    assert finding.severity is Severity.INFO
    assert finding.summary.startswith("Host host-1 ran out of memory: the kernel killed 2 processes")
    assert hosts.see(1, {"oom_kills": 6.0}) == []
    (warned,) = hosts.see(1, {"oom_kills": 7.0})
    assert warned.severity is Severity.WARNING
    assert hosts.see(HOST.oom_quiet_slots - 1, {"oom_kills": 7.0}) == []
    (over,) = hosts.see(1, {"oom_kills": 7.0})
    assert (over.change, over.summary) == (Change.CLOSE, "The host is back to its usual state.")


def test_before_the_first_step_only_killed_processes_count_and_what_is_usual_is_learned_after_it() -> None:
    hosts = Hosts("host")
    hosts.begin("b", trains=False)
    assert hosts.see(100, {"cpu_steal_ratio": 0.9, "memory_pressure_ratio": 0.5}) == []
    assert hosts.see(1, {"oom_kills": 4.0})
    hosts.begin("c")
    assert hosts.see(100, {"cpu_throttled_ratio": 0.4}) == []


def test_what_was_counted_between_two_launches_is_not_told_of_the_later_one() -> None:
    for kind, counter in (("host", "oom_kills"), ("port", "link_downs")):
        hosts = learned(kind)
        hosts.begin("b")
        assert hosts.see(100, {counter: 50.0}) == []


def test_what_was_bad_at_both_ends_of_a_gap_has_begun_anew() -> None:
    hosts = learned("port")
    assert hosts.see(1, {"link_up": 0.0})
    hosts.slot += 2 * PORT.dropped_slots
    found = hosts.see(1, {"link_up": 0.0})
    assert all(one.severity is not Severity.WARNING for one in found if one.change is not Change.CLOSE)


def test_the_worst_of_several_troubles_is_reported_and_when_it_is_over_the_next() -> None:
    hosts = learned("port")
    (first,) = hosts.see(2, {"link_bits_per_s": 2e11})
    assert "200 Gbit/s" in first.summary
    (graver,) = hosts.see(1, {"link_bits_per_s": 2e11, "link_downs": 9.0})
    assert (graver.severity, graver.evidence["rule"]) == (Severity.WARNING, "flap")
    assert graver.evidence["besides"] == [first.summary]
    later = hosts.see(PORT.flap_slots, {"link_bits_per_s": 2e11, "link_downs": 9.0})
    assert later[-1].summary == first.summary
    assert later[-1].change is Change.UPDATE


def test_a_link_that_is_down_is_reported_at_once_and_warned_of_after_four_minutes() -> None:
    down = {"link_up": 0.0, "link_bits_per_s": np.nan}
    assert Hosts("port").see(100, down) == [], "what was down before the launch is not about it"
    hosts = learned("port")
    (finding,) = hosts.see(1, down)
    assert (finding.severity, finding.cause) == (Severity.INFO, "network")
    assert finding.summary == "Port mlx5_0/1 of host host-1 is down."
    assert hosts.see(PORT.dropped_slots - 2, down) == []
    (warned,) = hosts.see(1, down)
    assert warned.severity is Severity.WARNING
    (over,) = hosts.see(1)
    assert over.change is Change.CLOSE


def test_a_link_that_comes_back_from_its_second_drop_goes_on_as_a_flap_until_it_was_up_for_five_minutes() -> None:
    hosts = learned("port")
    assert [one.change for one in hosts.see(1, {"link_up": 0.0})] == [Change.OPEN]
    assert [one.change for one in hosts.see(1, {"link_downs": 6.0})] == [Change.CLOSE]
    assert [one.change for one in hosts.see(1, {"link_up": 0.0, "link_downs": 6.0})] == [Change.OPEN]
    reported = hosts.see(1, {"link_downs": 7.0})
    assert {one.change for one in reported} == {Change.UPDATE}
    assert (reported[-1].severity, reported[-1].evidence["rule"]) == (Severity.WARNING, "flap")
    assert hosts.see(PORT.flap_slots - 1, {"link_downs": 7.0}) == []
    assert [one.change for one in hosts.see(1, {"link_downs": 7.0})] == [Change.CLOSE]


def test_a_second_port_that_is_down_is_reported_at_once_and_evidence_is_that_of_the_port_it_names() -> None:
    hosts = Hosts("port")
    names = (("host-1", "mlx5_0/1"), ("host-1", "eth1"))
    reported: list[Finding] = []

    def see(up: tuple[float, float], errors: float) -> list[Finding]:
        hosts.slot += 1
        values = {"link_up": np.array(up), "port_errors": np.array([errors, 0.0])}
        present = {name: np.ones(2, dtype=bool) for name in values}
        now_s = hosts.slot * SLOT_S
        return list(hosts.detector.observe(DeviceCounters(hosts.slot, now_s, names, values, present, "port")))

    for errors in range(5):
        reported += see((1.0, 1.0), float(errors))
    (opened,) = reported
    assert (opened.evidence["port_errors"], opened.evidence["new_errors"]) == (3, 3)
    (second,) = see((1.0, 0.0), 5.0)
    assert second.change is Change.UPDATE
    assert second.summary.endswith("Besides: Port eth1 of host host-1 is down.")
    assert second.evidence["besides"] == ["Port eth1 of host host-1 is down."]
    assert second.evidence["new_errors"] == 4
    warned = [finding for _ in range(PORT.errors_quiet_slots) for finding in see((1.0, 0.0), 5.0)][-1]
    assert (warned.evidence["port"], warned.evidence["rule"]) == ("eth1", "down")
    assert warned.evidence["new_errors"] is warned.evidence["port_errors"] is warned.evidence["besides"] is None


def test_counts_that_rise_are_reported_again_after_a_minute_as_how_many_there_were_since_it_began() -> None:
    hosts = learned("port")
    found = [hosts.see(1, {"port_errors": 9.0 + 10 * reading}) for reading in range(1, 40)]
    reported = [(slot, finding) for slot, findings in enumerate(found, start=1) for finding in findings]
    assert [slot for slot, _ in reported] == [3, 12, 24, 36]
    assert reported[-1][1].summary == "Port mlx5_0/1 of host host-1 counts errors: 360 new ones."
    assert reported[-1][1].evidence["port_errors"] == 369


def test_one_flap_is_tolerated_and_the_second_within_five_minutes_is_not() -> None:
    hosts = learned("port")
    assert hosts.see(PORT.flap_slots - 1, {"link_downs": 6.0}) == []
    (finding,) = hosts.see(1, {"link_downs": 7.0})
    assert (finding.severity, finding.evidence["rule"]) == (Severity.WARNING, "flap")
    apart = learned("port")
    for count in (6.0, 7.0, 8.0):
        assert apart.see(PORT.flap_slots + 1, {"link_downs": count}) == []


def test_a_lower_speed_than_the_port_had_is_reported_after_ten_seconds() -> None:
    hosts = learned("port")
    slow = {"link_bits_per_s": 2e11}
    assert hosts.see(PORT.rate_slots - 1, slow) == []
    (finding,) = hosts.see(1, slow)
    assert finding.summary == "Port mlx5_0/1 of host host-1 runs at 200 Gbit/s, where 400 Gbit/s are usual for it."
    (warned,) = hosts.see(PORT.warning_slots - PORT.rate_slots, slow)
    assert warned.severity is Severity.WARNING


def test_errors_are_told_from_the_third_reading_on_and_warned_of_from_the_twelfth() -> None:
    hosts = learned("port")
    found = [hosts.see(1, {"port_errors": 10.0 + reading}) for reading in range(PORT.errors_warning)]
    assert [len(findings) for findings in found] == [0, 0, 1] + [0] * (PORT.errors_warning - 4) + [1]
    assert (found[2][0].severity, found[-1][0].severity) == (Severity.INFO, Severity.WARNING)


def test_retransmissions_are_reported_beyond_ten_times_those_of_the_other_ports() -> None:
    hosts = learned("port")
    assert hosts.see(2 * PORT.retransmissions_slots, {"retransmissions_per_s": 10.0}) == []
    (finding,) = hosts.see(PORT.retransmissions_slots, {"retransmissions_per_s": 10.1})
    assert finding.severity is Severity.INFO
    hosts = learned("port")
    assert hosts.see(100, all_of={"retransmissions_per_s": 1e4}) == []
    hosts.kind = "host"
    assert hosts.see(100, {"oom_kills": 9.0, "memory_pressure_ratio": 1.0}) == [], "counters of another kind"


def test_what_the_provider_announces_is_a_warning_until_it_is_withdrawn() -> None:
    hosts = learned("host")

    def announce(**fields: str) -> list[Finding]:
        now_s = hosts.slot * SLOT_S
        return list(hosts.detector.observe(Occurrence("host_notice", "a.0", "host-1", now_s, None, None, fields)))

    (finding,) = announce(what="preemption", action="terminate", at="09:00")
    assert finding.severity is Severity.WARNING
    assert finding.summary == "The provider is about to take away host host-1 (terminate), not before 09:00."
    assert hosts.see(30) == []
    assert announce(what="preemption", action="terminate", at="09:00") == []
    (over,) = announce(what="")
    assert (over.change, over.summary) == (Change.CLOSE, "The provider has withdrawn its notice.")
    assert announce(what="") == announce(what="else") == []
    assert announce(what="maintenance")
    (silent,) = hosts.see(100)
    assert silent.summary == "No report about it for 180 s."
