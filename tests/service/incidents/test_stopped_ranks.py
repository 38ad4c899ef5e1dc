"""A hang of a rank that a signal stopped: whom to continue, and where."""

from rankwatch import wire
from rankwatch_detectors.base import Change, Kind
from rankwatch_service.incidents.answers import first_steps
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.hang import PIDS_MAX
from rankwatch_service.job.topology_state import TopologyState
from tests.support.values.findings import finding

STOPPED = {"decided_by": "stopped by a signal", "missing": [{"rank": 5, "os_state": "T"}]}


def placement(ranks: int = 8, pid: int = 4_000) -> TopologyState:
    made = TopologyState()
    made.learn(wire.RankInfo(rank, ranks, host=f"node-{rank // 4}", pid=pid and pid + rank) for rank in range(ranks))
    return made


def hang(topology: TopologyState, evidence, ranks=(5,)):
    correlator = Correlator("gpt")
    correlator.begin("l.0")
    correlator.judge([finding(Kind.HANG, ranks=(), evidence={"decided_by": "no evidence"})], topology)
    correlator.judge([finding(Kind.HANG, Change.UPDATE, ranks=ranks, evidence=evidence)], topology)
    return correlator.open[0]


def test_its_process_is_named_with_its_host():
    incident = hang(placement(), STOPPED)
    assert incident.evidence["pids"] == {"node-1": [4_005]}
    step = first_steps(incident.kind, incident.severity, incident.evidence, incident.hosts)[0]
    assert step.startswith("Continue the stopped process: `kill -CONT 4005` on host node-1 ")


def test_no_process_is_named_where_none_is_known():
    assert "pids" not in hang(placement(pid=0), STOPPED).evidence


def test_a_process_that_hangs_by_itself_is_named_for_whoever_looks_at_its_stack():
    incident = hang(placement(), STOPPED | {"decided_by": "it is in an earlier step"})
    step = first_steps(incident.kind, incident.severity, incident.evidence, incident.hosts)[0]
    assert step.startswith("Run `py-spy dump --pid 4005` on node-1, ")
    known = {"stacks": [{"ranks": "5", "stack": ["train.py:41 step"]}]}
    assert "py-spy" not in first_steps(incident.kind, "critical", incident.evidence | known)[0]


def test_of_many_stopped_ranks_only_some_are_named():
    incident = hang(placement(64), STOPPED, tuple(range(64)))
    assert sum(map(len, incident.evidence["pids"].values())) == PIDS_MAX
    assert "and on 1 more host " in first_steps("hang", "critical", incident.evidence, incident.hosts)[0]
