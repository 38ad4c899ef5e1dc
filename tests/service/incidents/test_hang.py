"""What is told of a hang: stacks in few groups, whom to continue and where, and which conditions may have caused it."""

import json
import random

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Occurrence, Severity
from rankwatch_detectors.progress.hang import NOBODY
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.hang import (
    GROUPS_MAX,
    LEFT_OUT,
    NO_ANSWER,
    OUTPUT_LINES_MAX,
    PIDS_MAX,
    RANKS_CHARS_MAX,
    STACK_CHARS_MAX,
    TEXTS_MAX,
    HangEvidence,
    StackGroups,
    hang_steps,
    rank_ranges,
)
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import SENTENCE, Incident
from rankwatch_service.job.topology_state import TopologyState
from tests.support.values.incidents import finding, topology_state

REDUCE = "all_reduce (distributed_c10d.py:2810), from train (train.py:41)"
LOAD = "load (data.py:12)"


def dump(place: str, text: str = "", **fields) -> dict:
    return {"place": place, "where": place, "stack": text or f"stack of {place}", "reason": "", "order": "c1"} | fields


def grouped(dumps: dict[int, dict], asked: int = 0) -> dict:
    groups = StackGroups()
    for rank, fields in dumps.items():
        assert groups.add(rank, fields)
    return StackGroups.restored(json.loads(json.dumps(groups.state()))).evidence(asked or len(dumps))


def test_the_few_that_stand_elsewhere_come_first_and_all_are_told_in_a_sentence():
    shown = grouped({rank: dump(LOAD if rank == 3 else REDUCE, os_state="S", junk="x") for rank in range(8)})
    assert [(one["ranks"], one["count"], one["stack"]) for one in shown["stacks"]] == [
        ("3", 1, f"stack of {LOAD}"),
        ("0-2,4-7", 7, f"stack of {REDUCE}"),
    ]
    assert shown[SENTENCE] == f"7 of 8 ranks stand in {REDUCE}; rank 3 in {LOAD}."
    assert shown["stacks"][0]["os_state"] == "S"
    assert not {"order", "junk"} & set(shown["stacks"][0])
    assert LEFT_OUT not in shown


def test_where_all_stand_at_one_place_there_is_one_stack():
    shown = grouped({rank: dump(REDUCE) for rank in range(4)})
    assert [one["ranks"] for one in shown["stacks"]] == ["0-3"]
    assert shown[SENTENCE] == f"All 4 ranks stand in {REDUCE}."


def test_ranks_that_have_not_answered_are_told_and_counted_nowhere_else():
    shown = grouped({0: dump(REDUCE), 1: dump(REDUCE), 2: dump(LOAD)}, asked=4)
    assert shown[SENTENCE] == f"2 of 3 ranks stand in {REDUCE}; rank 2 in {LOAD}; no answer of 1 rank."


def test_a_rank_without_a_stack_says_why():
    stopped = {"stack": "", "place": "", "where": "", "reason": "stopped by a signal"}
    shown = grouped({0: dump(REDUCE), 1: stopped, 2: dump(REDUCE), 5: stopped, 6: dump(REDUCE)})
    assert shown[SENTENCE] == f"3 of 5 ranks stand in {REDUCE}; ranks 1,5 gave no stack: stopped by a signal."


def test_stacks_of_agents_that_name_no_place_are_grouped_by_their_text_without_addresses():
    def reported(address: str, line: int) -> dict:
        return {"stack": f"Thread 0x{address}:\n  File a.py, line {line}", "os_state": "R", "reason": ""}

    shown = grouped({0: reported("7f00", 3), 1: reported("7f01", 3), 2: reported("7f02", 9)})
    assert [one["ranks"] for one in shown["stacks"]] == ["2", "0-1"]
    assert shown[SENTENCE] == "2 of 3 ranks stand at one place; rank 2 elsewhere."


def test_a_rank_answers_once():
    groups = StackGroups()
    assert groups.add(3, dump(LOAD))
    assert not groups.add(3, dump(REDUCE))
    assert groups.evidence(1)[SENTENCE] == f"The rank stands in {LOAD}."


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_makes_no_difference(seed):
    where = [REDUCE, REDUCE, LOAD, REDUCE, "x (y.py:1)", LOAD, REDUCE, REDUCE]
    # On each host of two ranks only the first at a place sends the text.
    dumps = {
        rank: dump(place, f"{place} of {rank}") | ({"stack": ""} if rank % 2 and where[rank - 1] == place else {})
        for rank, place in enumerate(where)
    }
    ranks = list(dumps)
    random.Random(seed).shuffle(ranks)
    assert grouped({rank: dumps[rank] for rank in ranks}) == grouped(dumps)


def test_sixteen_thousand_ranks_at_as_many_places_stay_small():
    dumps = {rank: dump(f"f{rank} (a.py:{rank})", "x" * 65_536) for rank in range(16_384)}
    for rank in range(8_192):
        dumps[2 * rank] |= {"place": REDUCE, "where": REDUCE}
    groups = StackGroups()
    for rank, fields in dumps.items():
        groups.add(rank, fields)
    assert len(json.dumps(groups.state())) < TEXTS_MAX * (STACK_CHARS_MAX + 1_000) + 16_384 * 40
    shown = groups.evidence(16_384)
    assert len(shown["stacks"]) == GROUPS_MAX
    assert all(len(one["stack"]) == STACK_CHARS_MAX for one in shown["stacks"])
    assert shown["stacks"][-1]["count"] == 8_192
    assert len(shown["stacks"][-1]["ranks"]) < RANKS_CHARS_MAX + 20
    assert shown[SENTENCE] == (
        f"8192 of 16384 ranks stand in {REDUCE}; rank 1 in f1 (a.py:1); rank 3 in f3 (a.py:3); rank 5 in f5 (a.py:5); "
        "8,189 ranks at 8,189 other places."
    )
    assert shown[LEFT_OUT] == "8,185 ranks at 8,185 further places"


def test_ranks_are_told_as_ranges_and_how_many_more():
    assert rank_ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"
    assert rank_ranges([5]) == "5"
    text = rank_ranges(range(0, 16_384, 2))
    assert len(text) < RANKS_CHARS_MAX + 20
    listed, _, more = text.partition(" and ")
    assert len(listed.split(",")) + int(more.removesuffix(" more").replace(",", "")) == 8_192


def test_native_frames_stand_below_the_stack_of_their_group():
    groups = StackGroups()
    assert not groups.add_native(0, "early")
    for rank in (1, 0):
        groups.add(rank, dump(REDUCE, text=f"stack of rank {rank}"))
        assert groups.add_native(rank, "ncclGroupEnd") is (rank == 1)
    (group,) = StackGroups.restored(json.loads(json.dumps(groups.state()))).evidence(2)["stacks"]
    assert group["stack"] == "stack of rank 0\n\nWith native frames (py-spy):\n\nncclGroupEnd"
    assert "native" not in group


STOPPED = {"decided_by": "stopped by a signal", "missing": [{"rank": 5, "os_state": "T"}]}


def placement(ranks: int = 8, pid: int = 4_000) -> TopologyState:
    made = TopologyState()
    made.learn(wire.RankInfo(rank, ranks, host=f"node-{rank // 4}", pid=pid and pid + rank) for rank in range(ranks))
    return made


def look(evidence, hosts=()):
    return hang_steps(KINDS[Kind.HANG].first_steps, evidence, hosts)


def hang(topology: TopologyState, evidence, ranks=(5,)):
    correlator = Correlator("gpt")
    correlator.begin("l.0")
    correlator.evaluate([finding(Kind.HANG, ranks=(), evidence={"decided_by": "no evidence"})], topology)
    correlator.evaluate([finding(Kind.HANG, Change.UPDATE, ranks=ranks, evidence=evidence)], topology)
    return correlator.open[0]


def test_its_process_is_named_with_its_host():
    incident = hang(placement(), STOPPED)
    assert incident.evidence["pids"] == {"node-1": [4_005]}
    step = look(incident.evidence, incident.hosts)[0]
    assert step.startswith("Continue the stopped process: `kill -CONT 4005` on node-1 ")


def test_no_process_is_named_where_none_is_known():
    assert "pids" not in hang(placement(pid=0), STOPPED).evidence


def test_a_process_that_hangs_by_itself_is_named_for_whoever_looks_at_its_stack():
    incident = hang(placement(), STOPPED | {"decided_by": "it is in an earlier step"})
    step = look(incident.evidence, incident.hosts)[0]
    assert step == "See where rank 5 stands: `py-spy dump --pid 4005` on node-1."
    known = {"stacks": [{"ranks": "5", "stack": "train.py:41 step"}]}
    assert "py-spy" not in look(incident.evidence | known)[0]
    late, asked = incident.evidence | {SENTENCE: NO_ANSWER}, step
    step = look(late, incident.hosts)[0]
    assert step == f"No rank has answered with its stack. {asked}"


@pytest.mark.parametrize(
    ("missing", "groups", "step"),
    [
        ([3], {"3": LOAD, "0-2,4-7": REDUCE}, f"Rank 3 stands in {LOAD}"),
        ([4], {"3": LOAD, "0-2,4-7": REDUCE}, f"Rank 4 stands in {REDUCE}"),
        ([], {"3": LOAD, "0-2,4-7": REDUCE}, f"Rank 3 stands in {LOAD}"),
        ([], {"3,5": LOAD, "0-2,4": REDUCE}, f"Ranks 3,5 stand in {LOAD}"),
        ([], {"0-7": REDUCE}, f"All ranks that answered stand in {REDUCE}"),
    ],
)
def test_the_first_step_says_where_the_named_rank_stands_or_the_fewest(missing, groups, step):
    shown = [{"ranks": ranks, "where": where, "stack": "x"} for ranks, where in groups.items()]
    evidence = {"missing": [{"rank": rank} for rank in missing], "stacks": shown}
    first, *others = look(evidence)
    assert first.startswith(step)
    assert any("network" in other for other in others) is (len(groups) == 1)


def test_where_nobody_is_named_but_stacks_differ_the_summary_says_who_stands_where():
    incident = hang(placement(), STOPPED)
    incident.summary = f"Training stands still in step 3{NOBODY}."
    incident.evidence |= grouped({0: dump(REDUCE), 1: dump(REDUCE)})
    assert incident.version().summary == incident.summary
    incident.evidence |= grouped({0: dump(REDUCE), 1: dump(REDUCE), 2: dump(LOAD)})
    assert incident.version().summary == (
        f"Training stands still in step 3; 2 of 3 ranks stand in {REDUCE}; rank 2 in {LOAD}."
    )


def test_where_no_rank_answers_the_evidence_says_so_once():
    incident = hang(placement(), STOPPED)
    answers = HangEvidence()
    opened_s = incident.opened_time_s
    assert answers.due([incident], 8, opened_s + 100) == [], "nobody was asked"
    incident.actions.append(incident.action_key("stacks"))
    assert answers.due([incident], 8, opened_s + 59) == []
    (reported,) = answers.due([incident], 8, opened_s + 60)
    assert (reported.text, incident.evidence[SENTENCE]) == (NO_ANSWER, NO_ANSWER)
    assert answers.due([incident], 8, opened_s + 61) == []


def test_of_many_stopped_ranks_only_some_are_named():
    incident = hang(placement(64), STOPPED, tuple(range(64)))
    assert sum(map(len, incident.evidence["pids"].values())) == PIDS_MAX
    assert "and on 1 more host " in look(incident.evidence, incident.hosts)[0]


TOPOLOGY = topology_state()
PORT = finding(Kind.NETWORK_DEGRADED, scope="host:node-0", summary="Port eth1 of host node-0 is down.", cause="network")
HANG = finding(
    Kind.HANG, ranks=(1,), onset_time_s=1_100.0, detected_time_s=1_104.0, onset_step=150, severity=Severity.CRITICAL
)
ASLEEP = {"stack": "File", "place": "sleepy", "where": "sleepy (train.py:31)", "doing": "own"}
WAITING = {"stack": "File", "place": "backward", "where": "backward (graph.py:9)", "doing": "collective"}


def evaluate(correlator: Correlator, *findings: Finding) -> None:
    """One after the other."""
    for one in findings:
        correlator.evaluate([one], TOPOLOGY)


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
    correlator.evaluate([condition], TOPOLOGY)
    (opened, reported) = correlator.evaluate([HANG], TOPOLOGY)
    assert (str(opened.what), opened.incident.kind, opened.incident.summary) == ("opened", Kind.HANG, HANG.summary)
    assert (str(reported.what), suspected(reported.incident)) == ("evidence", [condition.summary])
    unfelt = condition.kind is Kind.DEVICE_DEGRADED  # what training feels is an incident of its own
    assert [(one.kind, one.severity) for one in correlator.open] == [
        (condition.kind, Severity.INFO if unfelt else Severity.WARNING),
        (Kind.HANG, Severity.CRITICAL),
    ]


def test_a_condition_that_is_found_during_a_hang_is_suspected_once(correlator) -> None:
    worse = finding(Kind.NETWORK_DEGRADED, Change.UPDATE, "host:node-0", summary="Port eth1 is down again.")
    evaluate(correlator, HANG, PORT, worse)
    assert suspected(hang_of(correlator)) == [PORT.summary]


def test_a_slow_rank_of_a_bad_link_that_then_hangs_is_titled_as_a_hang(correlator) -> None:
    evaluate(correlator, PORT, finding(Kind.STRAGGLER, scope="rank:1"), HANG)
    assert [one.kind for one in correlator.open] == [Kind.NETWORK_DEGRADED, Kind.HANG]


def test_a_device_fault_stays_the_title_of_the_hang_that_it_caused(correlator) -> None:
    evaluate(correlator, finding(Kind.DEVICE_FAULT, scope="rank:1"), HANG)
    assert [one.kind for one in correlator.open] == [Kind.DEVICE_FAULT]


def answer(correlator: Correlator, **dumps: dict[str, str]) -> Incident:
    evidence = HangEvidence()
    for name, dump in dumps.items():
        rank = int(name.removeprefix("rank"))
        evidence.take(Occurrence("stack_dump", "l.0", "node-0", 1_105.0, rank, 150, dump), correlator.open)
    evidence.due(correlator.open, 8, 1_106.0)
    return hang_of(correlator)


def test_a_rank_that_sleeps_in_its_own_code_clears_the_network_and_not_its_host(correlator) -> None:
    correlator.evaluate([PORT, finding(Kind.HOST_DEGRADED, scope="host:node-0", summary="Short of memory.")], TOPOLOGY)
    correlator.evaluate([HANG], TOPOLOGY)
    hang = answer(correlator, rank0=WAITING | {"phase": "collective"}, rank1=ASLEEP)
    assert suspected(hang) == ["Short of memory."]
    assert hang.evidence["not_the_network"] == (
        "rank 1 stands in sleepy (train.py:31), in Python code outside of any collective"
    )
    correlator.evaluate([finding(Kind.NETWORK_DEGRADED, scope="host:node-1")], TOPOLOGY)
    assert suspected(hang_of(correlator)) == ["Short of memory."]


@pytest.mark.parametrize(
    "dump",
    [ASLEEP | {"phase": "collective"}, WAITING, {"reason": "no answer", "place": "", "where": ""}],
    ids=["in a collective", "waits for what its stack does not tell", "no stack"],
)
def test_without_proof_the_network_stays_suspected(correlator, dump) -> None:
    evaluate(correlator, PORT, HANG)
    hang = answer(correlator, rank1=dump)
    assert suspected(hang) == [PORT.summary]
    assert "not_the_network" not in hang.evidence


def test_what_the_named_rank_has_printed_last_is_shown(correlator) -> None:
    evaluate(correlator, HANG)
    printed = [f"line {number}" for number in range(20)]
    hang = answer(
        correlator,
        rank0=dump(REDUCE, lines=["of another"]),
        rank1=dump(LOAD, lines=printed),
        rank2=dump(REDUCE, lines=3),
    )
    assert hang.evidence["output"] == printed[-OUTPUT_LINES_MAX:]
    assert not any("lines" in one for one in hang.evidence["stacks"])
