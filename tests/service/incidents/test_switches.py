"""Incidents of hosts that are connected to one switch."""

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.correlator import Correlator
from tests.support.values.findings import finding, topology_state


@pytest.fixture
def correlator():
    made = Correlator("gpt")
    made.begin("l.0")
    return made


def test_hosts_of_one_switch_that_fall_silent_together_are_the_switchs_incident(correlator):
    placement = topology_state(ranks=24, hosts_per_switch=2)
    silent = {"ranks": (), "evidence": {"hosts": ["node-2", "node-3"]}}
    correlator.judge([finding(Kind.TELEMETRY_LOST, scope="host:node-2", **silent)], placement)
    (incident,) = correlator.open
    assert (str(incident.scope), incident.hosts) == ("switch:leaf-1", ["node-2", "node-3"])
    assert incident.summary.startswith("8 of 8 ranks of switch leaf-1: ")


@pytest.mark.parametrize(
    ("hosts", "hosts_per_switch"), [(["node-1", "node-2"], 2), (["node-0", "node-1"], 0), (["node-0", "node-1"], 6)]
)
def test_hosts_of_several_unknown_or_the_only_switch_are_the_jobs_incident(correlator, hosts, hosts_per_switch):
    placement = topology_state(ranks=24, hosts_per_switch=hosts_per_switch)
    silent = finding(Kind.TELEMETRY_LOST, scope="host:node-1", ranks=(), evidence={"hosts": hosts})
    correlator.judge([silent], placement)
    assert str(correlator.open[0].scope) == "job"


def test_a_list_of_hosts_that_was_cut_names_no_switch(correlator):
    placement = topology_state(ranks=24, hosts_per_switch=2)
    listed = {"hosts": ["node-2", "node-3"], "hosts_hit": 6}
    correlator.judge([finding(Kind.TELEMETRY_LOST, scope="job", ranks=(), evidence=listed)], placement)
    assert str(correlator.open[0].scope) == "job"


def test_a_switch_that_is_slow_as_a_whole_takes_over_the_incidents_of_its_ranks(correlator):
    placement = topology_state(ranks=24, hosts_per_switch=2)
    for scope, onset in (("rank:8", 100), ("rank:12", 101)):
        correlator.judge([finding(Kind.STRAGGLER, scope=scope, onset_step=onset, detected_step=106)], placement)
    first, second = correlator.open
    whole = finding(Kind.STRAGGLER, scope="switch:leaf-1", ranks=tuple(range(8, 16)), onset_step=104, detected_step=120)
    correlator.judge([whole], placement)
    assert (first.state, str(first.scope), first.ranks) == ("open", "switch:leaf-1", tuple(range(8, 16)))
    assert (first.hosts, first.summary) == (["node-2", "node-3"], "straggler of switch:leaf-1")
    assert second.state == "resolved"
