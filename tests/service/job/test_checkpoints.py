"""Which reports of a checkpoint count: from whom, how many, and from where."""

import pytest

from rankwatch import wire
from rankwatch_service.policy.checkpoint_ledger import PROOF_STEPS
from tests.support.detection.scripted_job import World

CAN = ("pause", "checkpoint", "rollback", "rollback_memory", "rollback_disk")


def declare(world: World, *roots: str, shards: int = 0, can: tuple[str, ...] = CAN, attempt: str = "l.0") -> None:
    """What agents say of the four ranks."""
    infos = [wire.RankInfo(rank, 4, host=f"node-{rank // 2}", can=can, checkpoint_roots=roots) for rank in range(4)]
    infos[0] = wire.RankInfo(0, 4, host="node-0", can=can, checkpoint_roots=roots, checkpoint_shards=shards)
    world.send(attempt, ranks=tuple(infos))


@pytest.fixture
def world() -> World:
    """Its agents have said that ranks save below /ckpt."""
    world = World(roots=())
    declare(world, "/ckpt")
    return world


def report(world: World, rank: int | None, step: int = 10, attempt: str = "l.0", **fields: object) -> None:
    reported = {"tier": "local", "location": f"/ckpt/{step}.pt", "seconds": 1.0, "bytes": 1, "shards": 0} | fields
    world.send(attempt, events=(wire.Event("checkpoint_saved", 1, rank, step, reported),))


def report_all(world: World, **fields: object) -> None:
    for rank in range(4):
        report(world, rank, **fields)


def newest(world: World) -> str | None:
    """The location of the newest good checkpoint after enough clean steps."""
    step = world.job._assembler.last_step
    world.train(*range(step + 1, max(step, 60) + 2 * PROOF_STEPS))
    good = world.job.history.ledger.newest_good()
    return None if good is None else good.location


def dropped(world: World) -> dict[str, int]:
    world.tick()
    return {name: count for name, count in world.effects.jobs["gpt"].dropped.items() if name.startswith("checkpoint")}


def test_one_forged_event_is_no_checkpoint(world):
    report(world, 0, shards=1, location="/evil/x.pt")
    assert world.verdicts() == {"local:l.0:10": "refused"}
    (entry,) = world.job.history.ledger.entries
    assert entry.reason == "its location is not below a checkpoint root of the job (/ckpt)"
    assert newest(world) is None
    assert dropped(world) == {"checkpoint_location": 1}


def test_a_forged_event_about_an_honest_save_changes_nothing(world):
    for rank in range(4):
        report(world, 0, shards=1, location="/evil/x.pt")
        report(world, rank)
    assert newest(world) == "/ckpt/10.pt"
    report(world, 0, location="/evil/x.pt")
    assert newest(world) == "/ckpt/10.pt"
    assert world.verdicts()["local:l.0:10"] == "good"


def test_one_rank_that_saves_all_declares_it():
    world = World(roots=())
    declare(world, "/ckpt", shards=1)
    report(world, 0, shards=1)
    assert newest(world) == "/ckpt/10.pt"


def test_where_all_ranks_save_on_command_all_are_waited_for_though_one_saves_in_the_loop():
    world = World(roots=())
    declare(world, "/ckpt", shards=1)
    report(world, 1)
    assert newest(world) is None


def test_ranks_that_cannot_save_are_not_waited_for(world):
    world.send(ranks=(wire.RankInfo(3, 4, host="node-1", can=("pause",), checkpoint_roots=("/ckpt",)),))
    for rank in range(3):
        report(world, rank)
    assert newest(world) == "/ckpt/10.pt"


def test_a_loop_that_saves_by_itself_is_waited_for_on_every_rank():
    world = World(roots=())
    declare(world, "/ckpt", can=("pause",))
    for rank in range(3):
        report(world, rank)
    assert newest(world) is None
    report(world, 3)
    assert newest(world) == "/ckpt/10.pt"


@pytest.mark.parametrize("rank", [None, 4, 10_000])
def test_who_is_no_rank_of_the_attempt_reports_nothing(world, rank):
    report(world, rank)
    assert world.effects.checkpoints == []
    assert dropped(world) == {"checkpoint_rank": 1}


def test_a_launch_that_is_over_reports_nothing_more(world):
    world.train(1)
    declare(world, "/ckpt", attempt="m.0")
    world.train(2, attempt="m.0")
    report_all(world)
    assert world.effects.checkpoints == []
    assert dropped(world) == {"checkpoint_rank": 4}


@pytest.mark.parametrize("location", ["/ckpt/../evil.pt", "/ckpt-2/x.pt", "ckpt/x.pt", "s3://ckpt/x.pt", "/ckpt/\n"])
def test_only_what_is_below_a_root_is_a_checkpoint(world, location):
    report_all(world, location=location)
    assert newest(world) is None
    assert world.verdicts() == {"local:l.0:10": "refused"}


def test_before_any_rank_has_said_where_it_saves_nothing_is_accepted():
    world = World(roots=())
    declare(world)
    report_all(world, location="/evil/x.pt")
    assert newest(world) is None
    declare(world, "/ckpt")
    report_all(world)
    assert newest(world) == "/ckpt/10.pt"


@pytest.mark.parametrize("root", ["/", "", "/../", "file:///", "x" * 5_000])
def test_a_root_that_holds_everything_counts_for_nothing(root):
    world = World(roots=())
    declare(world, root)
    report_all(world)
    assert newest(world) is None


def test_a_capture_in_memory_has_no_location_whatever_is_said(world):
    report_all(world, tier="memory", location="/evil/x.pt")
    assert newest(world) == ""


def test_learning_where_checkpoints_lie_does_not_announce_the_attempt_anew():
    world = World(roots=())
    declare(world)
    world.train(1)
    before = dict(world.effects.attempts)
    world.effects.attempts.clear()
    declare(world, "/ckpt", shards=1)
    assert world.effects.attempts == {}
    assert before


def test_after_a_restart_from_a_snapshot_the_same_is_refused(world):
    report_all(world)
    assert newest(world) == "/ckpt/10.pt"
    world.restart()
    for rank in range(4):
        report(world, rank, step=80, location="/evil/80.pt")
        report(world, rank, step=90, shards=1) if rank == 0 else None
    assert newest(world) == "/ckpt/10.pt"
    assert world.verdicts()["local:l.0:80"] == "refused"
    assert world.verdicts()["local:l.0:90"] == "incomplete"


def test_what_an_agent_refuses_to_load_is_reported_with_the_next_incident():
    world = World(roots=())
    fields = {"checkpoint": "local:l.0:10", "location": "/evil", "reason": "it is at /evil"}
    world.send(events=(wire.Event("location_refused", 1, None, None, fields),))
    world.find("loss_spike")
    changes = [change["what"] for change in world.effects.transitions[0].incident.changes_before]
    assert any(text.endswith("does not load local:l.0:10: it is at /evil") for text in changes)


def lose(world, checkpoint, rank=0):
    fields = {"checkpoint": checkpoint, "reason": "deleted"}
    world.send(events=(wire.Event("checkpoint_gone", 1, rank, 100, fields),))


def test_an_incident_advises_a_checkpoint_that_still_exists():
    world = World(can=("rollback", "rollback_disk"))
    world.train(*range(60, 70))
    for step in (65, 67):
        world.save(step, tier="local", location=f"/saved/{step}")
    world.train(*range(70, 100))
    world.find("nonfinite", scope="rank:2", onset_step=98)
    advised = []
    for newest in ("local:l.0:67", "local:l.0:65"):
        advised.append(world.effects.transitions[-1].incident)
        lose(world, newest)
        lose(world, newest)
    advised.append(world.effects.transitions[-1].incident)
    assert [one.checkpoint for one in advised] == ["local:l.0:67", "local:l.0:65", None]
    assert [one.suggestion["checkpoint"] for one in advised] == ["local:l.0:67", "local:l.0:65", None]
    assert advised[-1].suggestion["reason"].endswith("no good checkpoint is known to go back to")
    assert world.reported() == ["opened", "evidence", "evidence"]
    assert world.effects.transitions[-1].text == "Checkpoint local:l.0:65 is gone: rank 0: deleted."


def test_a_checkpoint_that_no_incident_advises_goes_quietly():
    world = World(roots=())
    world.train(*range(60, 66))
    world.save(65, tier="local", location="/saved/65")
    world.train(*range(66, 90))
    world.save(89, tier="local", location="/saved/89")
    world.find("nonfinite", scope="rank:2", onset_step=88)
    lose(world, "local:l.0:89")
    assert world.reported() == ["opened"]
    assert world.verdicts()["local:l.0:89"] == "gone"


def test_a_save_that_failed_is_reported_with_the_next_incident():
    world = World(roots=())
    failed = {"what": "save", "type": "OSError", "message": "No space left on device", "errno": 28}
    world.send(events=(wire.Event("checkpoint_failed", 1, 2, 59, failed),))
    world.find("loss_spike")
    changes = [change["what"] for change in world.effects.transitions[0].incident.changes_before]
    assert "save of a checkpoint failed on rank 2: No space left on device" in changes
