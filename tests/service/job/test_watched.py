"""What the torch probe declares once it has seen the model is in the attempt's topology."""

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart
from rankwatch_service.job.summary import SummaryBuilder
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.store.rows import attempt_columns

LINE = "watching Net (4 parameters), AdamW: gradient norm; not watched: fingerprints (switched off)"


def test_the_line_of_one_rank_is_the_line_of_the_attempt():
    topology_state = TopologyState()
    topology_state.learn([wire.RankInfo(0, 2, watched=LINE, optimizers=1), wire.RankInfo(1, 2, optimizers=1)])
    start = AttemptStart("l.0", topology_state.topology(), 0.0)
    topology = attempt_columns(SummaryBuilder("gpt").attempt_started(start, topology_state, 0.0))["topology"]
    assert topology["watched"] == LINE
    assert all("watched" not in rank for rank in topology["ranks"])


def test_a_line_that_comes_later_changes_the_topology():
    topology_state = TopologyState()
    assert topology_state.learn([wire.RankInfo(0, 1)])
    assert topology_state.learn([wire.RankInfo(0, 1, watched=LINE)])
    assert not topology_state.learn([wire.RankInfo(0, 1, watched=LINE)])


def test_the_switch_of_a_host_is_part_of_the_topology_and_stored_with_it():
    topology_state = TopologyState()
    told = [wire.RankInfo(rank, 3, host=f"node-{rank}", switch=("a", "a", "")[rank]) for rank in range(3)]
    topology_state.learn(told)
    assert topology_state.topology().switch == ("a", "a", "")
    assert topology_state.switch_of(["node-0", "node-1"]) == "a"
    assert topology_state.switch_of(["node-1", "node-2"]) == topology_state.switch_of([]) == ""
    assert topology_state.ranks_below("a") == [0, 1]
    start = AttemptStart("l.0", topology_state.topology(), 0.0)
    stored = attempt_columns(SummaryBuilder("gpt").attempt_started(start, topology_state, 0.0))["topology"]
    assert [rank["switch"] for rank in stored["ranks"]] == ["a", "a", ""]


def test_the_device_of_a_rank_comes_later_too_and_makes_the_job_an_accelerated_one():
    topology_state = TopologyState()
    assert topology_state.accelerated, "as long as nothing is known"
    topology_state.learn([wire.RankInfo(0, 2), wire.RankInfo(1, 2, device_type="cpu")])
    assert not topology_state.topology().accelerated
    assert not topology_state.accelerated
    assert topology_state.learn([wire.RankInfo(0, 2, device_type="cuda", device_uuid="GPU-a")])
    topology = topology_state.topology()
    assert (topology.device_type, topology.accelerated, topology_state.accelerated) == (("cuda", "cpu"), True, True)
    assert TopologyState.restored(topology_state.state()).topology().device_type == ("cuda", "cpu")
    start = AttemptStart("l.0", topology, 0.0)
    stored = attempt_columns(SummaryBuilder("gpt").attempt_started(start, topology_state, 0.0))["topology"]
    assert [(rank["device_type"], rank["device_uuid"]) for rank in stored["ranks"]] == [("cuda", "GPU-a"), ("cpu", "")]
