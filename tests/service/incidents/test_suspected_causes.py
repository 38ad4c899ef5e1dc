"""A job that hangs while a condition of hardware is open: the hang is the title, the condition a suspected cause."""

import pytest

from rankwatch_detectors.base import Change, Kind, Occurrence, Severity
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.hang import HangEvidence
from rankwatch_service.incidents.model import Incident
from tests.support.values.findings import finding, topology_state

TOPOLOGY = topology_state()
PORT = finding(Kind.NETWORK_DEGRADED, scope="host:node-0", summary="Port eth1 of host node-0 is down.", cause="network")
HANG = finding(
    Kind.HANG, ranks=(1,), onset_time_s=1_100.0, detected_time_s=1_104.0, onset_step=150, severity=Severity.CRITICAL
)
ASLEEP = {"stack": "File", "place": "sleepy", "where": "sleepy (train.py:31)", "wchan": "hrtimer_nanosleep"}
WAITING = {"stack": "File", "place": "backward", "where": "backward (graph.py:9)", "wchan": "futex_do_wait"}


@pytest.fixture
def correlator() -> Correlator:
    made = Correlator("gpt")
    made.begin("l.0")
    return made


def hang_of(correlator: Correlator) -> Incident:
    return next(incident for incident in correlator.open if incident.kind is Kind.HANG)


def suspected(incident: Incident) -> list[str]:
    return [cause["summary"] for cause in incident.evidence.get("suspected_causes", ())]


@pytest.mark.parametrize(
    "condition",
    [PORT, finding(Kind.HOST_DEGRADED, scope="host:node-0"), finding(Kind.DEVICE_DEGRADED, scope="rank:1")],
    ids=lambda one: str(one.kind),
)
def test_a_hang_after_a_condition_is_an_incident_of_its_own_that_names_it(correlator, condition) -> None:
    correlator.judge([condition], TOPOLOGY)
    (opened, told) = correlator.judge([HANG], TOPOLOGY)
    assert (str(opened.what), opened.incident.kind, opened.incident.summary) == ("opened", Kind.HANG, HANG.summary)
    assert (str(told.what), suspected(told.incident)) == ("evidence", [condition.summary])
    unfelt = condition.kind is Kind.DEVICE_DEGRADED  # what training feels is an incident of its own
    assert [(one.kind, one.severity) for one in correlator.open] == [
        (condition.kind, Severity.INFO if unfelt else Severity.WARNING),
        (Kind.HANG, Severity.CRITICAL),
    ]


def test_a_condition_that_is_found_during_a_hang_is_suspected_once(correlator) -> None:
    correlator.judge([HANG], TOPOLOGY)
    correlator.judge([PORT], TOPOLOGY)
    worse = finding(Kind.NETWORK_DEGRADED, Change.UPDATE, "host:node-0", summary="Port eth1 is down again.")
    correlator.judge([worse], TOPOLOGY)
    assert suspected(hang_of(correlator)) == [PORT.summary]


def test_a_slow_rank_of_a_bad_link_that_then_hangs_is_titled_as_a_hang(correlator) -> None:
    correlator.judge([PORT], TOPOLOGY)
    correlator.judge([finding(Kind.STRAGGLER, scope="rank:1")], TOPOLOGY)
    correlator.judge([HANG], TOPOLOGY)
    assert [one.kind for one in correlator.open] == [Kind.NETWORK_DEGRADED, Kind.HANG]


def test_a_device_fault_stays_the_title_of_the_hang_that_it_caused(correlator) -> None:
    correlator.judge([finding(Kind.DEVICE_FAULT, scope="rank:1")], TOPOLOGY)
    correlator.judge([HANG], TOPOLOGY)
    assert [one.kind for one in correlator.open] == [Kind.DEVICE_FAULT]


def answer(correlator: Correlator, **dumps: dict[str, str]) -> Incident:
    evidence = HangEvidence()
    for name, dump in dumps.items():
        evidence.take(
            Occurrence("stack_dump", "l.0", "node-0", 1_105.0, int(name.removeprefix("rank")), 150, dump),
            correlator.open,
        )
    evidence.due(correlator.open, 8, 1_106.0)
    return hang_of(correlator)


def test_a_rank_that_sleeps_in_its_own_code_clears_the_network_and_not_its_host(correlator) -> None:
    correlator.judge([PORT, finding(Kind.HOST_DEGRADED, scope="host:node-0", summary="Short of memory.")], TOPOLOGY)
    correlator.judge([HANG], TOPOLOGY)
    hang = answer(correlator, rank0=WAITING | {"phase": "collective"}, rank1=ASLEEP)
    assert suspected(hang) == ["Short of memory."]
    assert hang.evidence["not_the_network"] == (
        "rank 1 stands in sleepy (train.py:31), in Python code outside of any collective"
    )
    correlator.judge([finding(Kind.NETWORK_DEGRADED, scope="host:node-1")], TOPOLOGY)
    assert suspected(hang_of(correlator)) == ["Short of memory."]


@pytest.mark.parametrize(
    "dump",
    [ASLEEP | {"phase": "collective"}, WAITING, {"reason": "no answer", "place": "", "where": ""}],
    ids=["in a collective", "waits for what its stack does not tell", "no stack"],
)
def test_without_proof_the_network_stays_suspected(correlator, dump) -> None:
    correlator.judge([PORT], TOPOLOGY)
    correlator.judge([HANG], TOPOLOGY)
    hang = answer(correlator, rank1=dump)
    assert suspected(hang) == [PORT.summary]
    assert "not_the_network" not in hang.evidence
