"""What an agent may report of a job, and decide for it, follows from the ranks that it owns: refused, each beside what
is honest and goes on.
"""

from typing import Any

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Occurrence
from rankwatch_service.job.attempts import AHEAD_MAX, ATTEMPT_FREE_S, EARLIER_MAX, RANK_FREE_S
from rankwatch_service.job.event_owners import DECLARATION_STEPS, DECLARATIONS_MAX, OWNERS
from rankwatch_service.policy.checkpoint_ledger import Verdict
from tests.support.service.signed_job import ONE, THIEF, TWO, World, host, job_of_two_hosts
from tests.support.values.batches import progress, ranks, table

NOTHING: dict[str, Any] = {"progress": (), "ranks": ()}


@pytest.fixture
def world() -> World:
    """Steps 1 to 3 are trained."""
    world = job_of_two_hosts()
    for step in (2, 3):
        world.send(world.one(step), world.two(step))
        world.tick(1)
    return world


def outsider(attempt: str = "l.0") -> Any:
    """The messages of an agent that has enrolled for the job and carries none of its ranks."""
    return host(7, THIEF, attempt)


def heard(world: World, kind: str) -> int:
    return sum(isinstance(one, Occurrence) and one.kind == kind for one in world.heard)


def last_step(world: World) -> int:
    return world.partition.jobs["gpt"]._assembler.last_step


@pytest.mark.parametrize("attempt", ["l.999999999", "l.1", "zzz.0"])
def test_an_agent_without_a_rank_takes_no_attempt_over(world, attempt):
    world.send(outsider()(**NOTHING), outsider(attempt)(**NOTHING))
    assert ["has no rank of attempt" in text or "does not follow" in text for text in world.refused()] == [True, True]
    world.send(world.one(4), world.two(4))
    world.tick(1)
    assert (world.attempt, last_step(world)) == ("l.0", 4)
    world.send(host(0, ONE, "l.1")(2))
    assert world.attempt == "l.1", "a rollback"


@pytest.mark.parametrize(
    "what",
    [
        {"ranks": ranks(5, "node-7", [4])},
        {"progress": (progress(4, 1),)},
        {"steps": table([3], [400], loss=[1.0])},
        {"devices": (wire.DeviceSample("GPU-3", 1, 0, 99.0),)},
        {"events": (wire.Event("note", 1, fields={"text": "hello"}),)},
    ],
    ids=["introduction", "progress", "row", "device", "event"],
)
def test_a_rank_that_the_job_does_not_have_gives_no_rights(world, what):
    world.send(outsider()(**(NOTHING | what)))
    assert ["has no rank of attempt l.0" in text for text in world.refused()] == [True]
    world.send(outsider("zzz.0")(**NOTHING))
    world.tick(1)
    assert world.attempt == "l.0"


def test_a_number_that_does_not_follow_is_refused_from_whoever_brings_it(world):
    world.send(host(0, ONE, f"l.{AHEAD_MAX + 1}")(4))
    assert ["does not follow l.0" in text for text in world.refused()] == [True]
    world.send(host(0, ONE, f"l.{AHEAD_MAX}")(4))
    assert world.attempt == f"l.{AHEAD_MAX}", "rollbacks of which nothing was recorded"


def test_nobody_keeps_a_dead_attempt_from_being_silent(world):
    """All hosts die, and the job starts again on others."""
    stranger, new = outsider(), host(5, "e" * 16, "m.0", world_size=2)
    for step in range(int(ATTEMPT_FREE_S) + 3):
        world.send(stranger(**NOTHING), new(step, of=[0, 1]))
        world.tick(1)
    assert world.attempt == "m.0"
    assert not any("node-5" in text for text in world.refused())
    assert "attempt" not in world.forged()


def test_who_carried_a_rank_and_brings_it_no_more_keeps_nothing_alive(world):
    new = host(5, "e" * 16, "m.0", world_size=2)
    for step in range(int(ATTEMPT_FREE_S) + 3):
        world.send(world.one(**NOTHING), new(step, of=[0, 1]))
        world.tick(1)
    assert world.attempt == "m.0"
    assert not world.refused()


def test_a_job_without_agents_is_not_made_a_signed_one_by_an_agent_without_a_rank():
    world = World()
    one = host(0, "", world_size=2)
    world.send(one(1))
    world.send(outsider()(**NOTHING))
    assert len(world.refused()) == 1
    world.send(one(2))
    assert len(world.refused()) == 1, "it goes on unsigned"
    world.send(host(0, ONE, world_size=2)(3))
    world.send(one(4))
    assert len(world.refused()) == 2, "its own agent has enrolled"


def saved(world: World, *names: str) -> None:
    """Checkpoints of which each rank has saved a part, and that are proven by later steps."""
    for step, name in enumerate(names, start=1):
        events = [
            wire.Event("checkpoint_saved", 1, rank, step, {"checkpoint": name, "tier": "memory", "seconds": 1.0})
            for rank in range(4)
        ]
        world.send(world.one(events=tuple(events[:2])), world.two(events=tuple(events[2:])))


def verdicts(world: World) -> dict[str, Verdict]:
    return {entry.id: entry.verdict for entry in world.partition.jobs["gpt"].history.ledger.entries}


def gone(id_: str, rank: int | None = None) -> dict[str, Any]:
    return {"events": (wire.Event("checkpoint_gone", 1, rank, None, {"checkpoint": id_, "reason": "deleted"}),)}


def test_the_ledger_is_not_emptied_by_an_agent_without_a_rank(world):
    saved(world, "a", "b")
    before = verdicts(world)
    assert len(before) == 2
    for id_ in before:
        world.send(outsider()(**NOTHING | gone(id_)))
    assert verdicts(world) == before
    assert len(world.refused()) == 2
    first = next(iter(before))
    world.send(world.one(**gone(first)))
    assert verdicts(world)[first] is Verdict.GONE


def test_the_ledger_is_not_emptied_by_the_name_of_an_earlier_launch(world):
    one, two = host(0, ONE, "m.0"), host(1, TWO, "m.0")
    world.send(one(1), two(1))
    assert world.attempt == "m.0"
    events = [
        wire.Event("checkpoint_saved", 1, rank, 1, {"checkpoint": "a", "tier": "memory", "seconds": 1.0})
        for rank in range(4)
    ]
    world.send(one(2, events=tuple(events[:2])), two(2, events=tuple(events[2:])))
    (before,) = verdicts(world).items()
    for rank in (None, 0, 5):
        world.send(outsider("l.0")(**NOTHING | gone(before[0], rank)))
    assert [*verdicts(world).items()] == [before]


def test_a_checkpoint_goes_only_by_who_has_saved_a_part_of_it(world):
    one = wire.Event(
        "checkpoint_saved",
        1,
        0,
        2,
        {"checkpoint": "x", "tier": "local", "location": "/saved/x", "seconds": 1.0, "shards": 1},
    )
    roots = tuple(wire.RankInfo(rank, 4, rank, "node-0", checkpoint_roots=("/saved",)) for rank in (0, 1))
    world.send(world.one(ranks=roots), world.one(events=(one,)))
    (id_,) = verdicts(world)
    before = verdicts(world)
    world.send(world.two(**gone(id_)))
    assert verdicts(world) == before
    assert world.partition.jobs["gpt"].history.counts["checkpoint_gone"] == 1
    assert world.forged() == [], "its rank 0 may have been on this host before"
    world.send(world.one(**gone(id_)))
    assert verdicts(world)[id_] is Verdict.GONE


@pytest.mark.parametrize("kind", sorted(kind for kind, owner in OWNERS.items() if owner == "rank"))
def test_an_event_of_a_rank_names_one_that_its_sender_carries(world, kind):
    before = heard(world, kind)
    world.send(world.one(events=(wire.Event(kind, 1, None, 3, {"what": "all is planned"}),)))
    assert world.forged() == ["event"]
    world.send(world.one(events=(wire.Event(kind, 1, 3, 3, {"what": "all is planned"}),)))
    world.send(outsider()(**NOTHING | {"events": (wire.Event(kind, 1, None, 3, {"what": "all is planned"}),)}))
    assert len(world.refused()) == 2
    assert heard(world, kind) == before
    world.send(world.one(events=(wire.Event(kind, 1, 1, 3, {"what": "new data"}),)))
    assert heard(world, kind) == before + 1


@pytest.mark.parametrize("kind", ["device_error", "host_notice", "checkpoint_disk", "location_refused", "records_lost"])
def test_a_second_agent_under_the_name_of_a_host_tells_nothing_of_it(world, kind):
    same_name = host(1, THIEF)
    world.send(same_name(**NOTHING | {"events": (wire.Event(kind, 1, fields={"xid": 79, "device_uuid": "GPU-3"}),)}))
    assert heard(world, kind) == 0
    assert ["has no rank of attempt" in text for text in world.refused()] == [True]
    world.send(world.two(events=(wire.Event(kind, 1, fields={"xid": 79, "device_uuid": "GPU-3"}),)))
    assert heard(world, kind) == 1


def test_a_job_declares_so_many_changes_and_no_more_until_steps_follow(world):
    def declare(number: int, rank: int = 0) -> bytes:
        event = wire.Event("declared", 1, rank, number, {"what": f"change {number}"})
        return (world.one if rank < 2 else world.two)(progress=(), events=(event,))

    for number in range(DECLARATIONS_MAX):
        world.send(declare(number), declare(number, 1), declare(number, 2))
    assert heard(world, "declared") == 3 * DECLARATIONS_MAX, "one that several ranks declare counts once"
    assert heard(world, "limit") == 0
    world.restart()
    world.send(declare(1_000), declare(1_001), declare(1_000, 2))
    assert heard(world, "declared") == 3 * DECLARATIONS_MAX
    assert heard(world, "limit") == 3
    for step in range(4, DECLARATION_STEPS + 8):
        world.send(world.one(step), world.two(step))
    world.tick(1)
    world.send(declare(1_002), declare(1_003))
    assert heard(world, "declared") == 3 * DECLARATIONS_MAX + 1


def test_how_a_launch_ended_is_reported_by_those_that_carried_it(world):
    exit_ = wire.Event("process_exit", 1, 3, None, {"code": 1})
    world.send(host(0, ONE, "m.0", world_size=2)(1))
    assert world.attempt == "m.0"
    of_host = wire.Event("device_error", 1, fields={"xid": 79, "device_uuid": "GPU-3"})
    world.send(outsider("l.0")(progress=(), ranks=(), events=(of_host,)))
    assert heard(world, "device_error") == 0
    world.send(world.two(progress=(), events=(exit_,)))
    assert heard(world, "process_exit") == 1
    world.restart()
    world.send(world.two(progress=(), events=(exit_, of_host)))
    assert heard(world, "process_exit") == 2
    assert heard(world, "device_error") == 1
    assert [text.partition(":")[0] for text in world.refused()] == ["no_rank"]


def test_a_host_that_is_first_heard_when_its_launch_is_over_tells_how_its_ranks_ended():
    world = World()
    world.send(host(0, ONE)())
    world.send(host(0, ONE, "m.0", world_size=2)(1))
    assert world.attempt == "m.0"
    exit_ = wire.Event("process_exit", 1, 3, None, {"code": 1})
    of_host = wire.Event("device_error", 1, fields={"xid": 79, "device_uuid": "GPU-3"})
    world.send(host(1, TWO)(events=(exit_, of_host)))
    assert (heard(world, "process_exit"), heard(world, "device_error")) == (1, 0)
    assert world.refused() == world.forged() == []


def test_an_agent_whose_ranks_were_taken_over_is_not_called_a_forger(world):
    new = host(1, THIEF)
    for step in range(int(RANK_FREE_S) + 2):
        world.send(world.one(4 + step), *([new(4 + step)] if step > RANK_FREE_S else []))
        world.tick(1)
    world.send(world.two(**NOTHING | {"events": (wire.Event("agent_stop", 1),)}))
    assert [text.partition(":")[0] for text in world.refused()] == ["no_rank"]
    assert world.forged() == []


def test_a_rank_beyond_the_world_that_was_brought_before_its_size_was_known_gives_nothing():
    world = World()
    world.send(outsider()(**NOTHING | {"progress": (progress(9, 1),)}))
    world.send(host(0, ONE)(), host(1, TWO)())
    world.send(host(0, ONE)(1), host(1, TWO)(1))
    world.tick(1)
    world.send(outsider("z.0")(1, of=[0]))
    assert world.attempt == "l.0"


def test_what_is_remembered_of_agents_does_not_grow(world):
    """Each rank is taken over again and again, by agents that then fall silent."""
    for number in range(3):
        world.tick(RANK_FREE_S + 1)
        for rank in range(4):
            world.send(host(9, f"{number}{rank}".rjust(16, "a"), world_size=4)(of=[rank]))
    carriers = world.partition.jobs["gpt"]._rank_owners
    assert len(carriers.state()["names"]) <= 64
    for launch in range(8):
        world.send(host(0, f"{launch}".rjust(16, "b"), f"n{launch}.0", world_size=2)(1))
        world.tick(ATTEMPT_FREE_S + 1)
    assert 0 < len(carriers.state()["earlier"]) <= EARLIER_MAX
    assert TWO not in carriers.state()["names"]


def test_the_table_of_owners_has_every_kind_of_event():
    assert set(OWNERS) == set(wire.EVENT_KINDS)
