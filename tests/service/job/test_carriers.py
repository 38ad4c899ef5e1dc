"""Whose ranks they are, and which attempt runs: what agents of one job may bring, in a real partition."""

import pytest

from rankwatch import wire
from rankwatch.signed import Purpose, sign
from rankwatch_detectors.base import Occurrence
from rankwatch_service.job.attempts import ATTEMPT_FREE_S, BESIDE_S, RANK_FREE_S
from rankwatch_service.policy.control_records import PolicySet
from tests.support.service.signed_job import ONE, THIEF, TWO, World, host, job_of_two_hosts, secret_of
from tests.support.values.batches import progress, ranks, table


@pytest.fixture
def world() -> World:
    """A job of two hosts with two ranks each, whose agents have enrolled."""
    return job_of_two_hosts()


def test_agents_bring_the_ranks_that_they_introduced(world):
    for step in range(2, 6):
        world.send(world.one(step), world.two(step))
        world.tick(1)
    assert world.partition.jobs["gpt"]._assembler.last_step == 5
    assert world.refused() == world.forged() == []
    reported = world.effects.attempts["gpt", "l.0"].topology.ranks
    assert [(info.rank, info.agent) for info in reported] == [(0, ONE), (1, ONE), (2, TWO), (3, TWO)]


@pytest.mark.parametrize(
    "what",
    [
        {"steps": table([2], [3], loss=[float("nan")]), "progress": ()},
        {"progress": (progress(3, 2, state="exited"),)},
        {"progress": (), "events": (wire.Event("process_exit", 1, 3, None, {"signal": 9}),)},
        {"progress": (), "events": (wire.Event("checkpoint_saved", 1, 3, 2, {"checkpoint": "x"}),)},
        {"progress": (), "ranks": ranks(4, "node-0", [3])},
    ],
    ids=["row", "progress", "exit", "checkpoint", "introduction"],
)
def test_an_agent_says_nothing_of_a_rank_that_another_carries(world, what):
    world.send(world.one(**what))
    assert ["forged" in text and "rank 3" in text for text in world.refused()] == [True]
    assert world.forged() == ["telemetry"]
    heard = [o for o in world.heard if isinstance(o, Occurrence) and o.kind in ("process_exit", "checkpoint_saved")]
    assert heard == []


def test_a_forged_batch_among_honest_ones_is_refused_alone(world):
    world.send(world.one(2), world.one(3, of=[3]), world.two(2), world.two(3), world.one(3))
    world.tick(1)
    assert len(world.refused()) == 1
    assert world.partition.jobs["gpt"]._assembler.last_step == 3


def test_a_batch_that_is_not_by_the_agent_it_names_is_refused(world):
    thief = host(1, TWO)
    world.send(sign(Purpose.BATCH, TWO, b"another secret", thief(3, signed_by="")))
    world.send(sign(Purpose.VIEW, TWO, secret_of("gpt", "node-1", TWO), thief(4, signed_by="")))
    world.send(host(1, ONE)(2))  # good for node-1 with its own secret there, and no rank of its own
    assert [text.split(":")[0] for text in world.refused()] == ["forged"] * 3


def test_an_unsigned_batch_is_refused_once_agents_have_enrolled(world):
    world.send(world.two(2, signed_by=""))
    assert ["not signed" in text for text in world.refused()] == [True]
    assert world.forged() == ["telemetry"]


def test_unsigned_jobs_go_on_as_before():
    world = World()
    one, two = host(0, ""), host(1, "")
    world.send(one(), two())
    world.send(one(1, of=[0, 1, 2, 3]), two(1))
    assert world.refused() == []
    world.send(host(0, ONE)())
    assert world.refused() == []
    world.send(one(2))
    assert len(world.refused()) == 1, "an agent has enrolled meanwhile"


def test_what_a_sender_writes_into_the_agent_of_a_rank_counts_for_nothing():
    world = World()
    lying = tuple(wire.RankInfo(rank, 2, host="node-0", agent=THIEF) for rank in (0, 1))
    world.send(host(0, ONE, world_size=2)(1, ranks=lying))
    world.tick(3)
    assert {info.agent for info in world.effects.attempts["gpt", "l.0"].topology.ranks} == {ONE}


def test_another_agent_may_bring_the_ranks_of_one_that_is_silent(world):
    new = host(1, THIEF)
    world.send(new(2))
    assert len(world.refused()) == 1
    for _ in range(int(RANK_FREE_S) + 1):
        world.send(world.one())
        world.tick(1)
    world.send(new(3))
    assert len(world.refused()) == 1
    world.send(world.two(4))
    assert len(world.refused()) == 2, "they are the new agent's now"


# ---- attempts --------------------------------------------------------------------------------------------------------


def test_a_newer_attempt_takes_over_when_an_agent_of_the_running_one_brings_it(world):
    world.send(host(0, ONE, "m.0")(1))
    assert world.attempt == "m.0"


def test_a_newer_attempt_of_a_stranger_waits_and_what_trains_goes_on(world):
    stranger = host(7, THIEF, "z.0", world_size=1)
    for step in range(2, 9):
        world.send(world.one(step), world.two(step), stranger(step, of=[0]))
        world.tick(1)
    assert world.attempt == "l.0"
    assert world.partition.jobs["gpt"]._assembler.last_step == 8
    assert world.refused() == world.forged() == []


def test_two_attempts_that_report_at_once_are_reported_once(world):
    stranger = host(7, THIEF, "z.0", world_size=1)
    for step in range(2, int(BESIDE_S) + 20):
        world.send(world.one(step), world.two(step), stranger(step, of=[0]))
        world.tick(1)
    assert world.forged() == ["attempt"]
    assert world.attempt == "l.0"


def test_a_restart_on_other_hosts_takes_over_once_the_old_ranks_have_ended(world):
    new = host(7, THIEF, "m.0", world_size=1)
    world.send(new(1, of=[0]))
    gone = [wire.Event("process_exit", 1, rank, None, {"code": 1}) for rank in range(4)]
    world.send(world.one(progress=(), events=tuple(gone[:2])), world.two(progress=(), events=tuple(gone[2:])))
    world.tick(1)
    assert world.attempt == "m.0"
    world.tick(3)
    assert world.partition.jobs["gpt"]._assembler.last_step == 1, "with what it sent while it waited"


def test_a_restart_on_other_hosts_takes_over_once_the_old_ones_are_silent(world):
    new = host(7, THIEF, "m.0", world_size=1)
    for step in range(1, int(ATTEMPT_FREE_S) + 3):
        world.send(new(step, of=[0]))
        world.tick(1)
    assert world.attempt == "m.0"
    assert world.partition.jobs["gpt"]._assembler.last_step == int(ATTEMPT_FREE_S) + 2
    assert world.forged() == []


def test_the_new_host_of_a_restart_waits_for_one_that_is_known(world):
    """Elastic: node-1 is replaced, and the new host is the first to report the restart."""
    fresh, again = host(1, THIEF, "m.0"), host(0, ONE, "m.0")
    world.send(fresh(1))
    assert world.attempt == "l.0"
    world.send(again(1))
    assert world.attempt == "m.0"
    world.tick(3)
    reported = world.effects.attempts["gpt", "m.0"].topology.ranks
    assert [(info.rank, info.agent) for info in reported] == [(0, ONE), (1, ONE), (2, THIEF), (3, THIEF)]


def test_a_rollback_keeps_whose_the_ranks_are(world):
    world.send(host(0, ONE, "l.1")(2))
    assert world.attempt == "l.1"
    world.send(host(1, THIEF, "l.1")(2))
    assert len(world.refused()) == 1


def test_a_stream_that_was_away_silences_nobody(world):
    world.now_s += 600.0
    world.tick()
    world.send(host(7, THIEF, "z.0", world_size=1)(1, of=[0]))
    assert world.attempt == "l.0"
    world.send(world.one(2), host(1, THIEF)(2))
    assert len(world.refused()) == 1


def test_after_a_restart_of_the_stream_the_same_is_refused_and_the_same_waits(world):
    world.send(host(7, THIEF, "m.0", world_size=1)(1, of=[0]))
    world.restart()
    world.send(world.one(2, of=[3]), world.two(2, signed_by=""), host(1, THIEF)(2))
    assert len(world.refused()) == 3
    for _ in range(int(ATTEMPT_FREE_S) + 1):
        world.tick(1)
    assert world.attempt == "m.0"
    world.tick(3)
    assert world.partition.jobs["gpt"]._assembler.last_step == 1


def test_an_unsigned_batch_is_refused_after_the_date_that_the_policy_sets():
    old = World()
    record = PolicySet(False, (), {}, unsigned_until_unix_ns=int((old.now_s + 5) * 1e9))
    old.partition.settings.apply(record)
    unsigned = host(0, "", world_size=2)
    old.send(unsigned(1))
    assert old.refused() == []
    old.tick(6)
    old.send(unsigned(2))
    assert ["not accepted any more" in text for text in old.refused()] == [True]
