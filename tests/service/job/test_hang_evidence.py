"""What ranks answer when their job hangs becomes the evidence of its incident, and notifies nobody."""

from rankwatch import wire
from rankwatch_service.incidents import hang
from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.job.job import JobStream
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.stream.saved import pack, unpack
from tests.support.detection.scripted_job import Scripted, World


def stack_dump(rank: int, order: str, place: str) -> wire.Event:
    fields = {"order": order, "place": place, "where": f"{place} (train.py:7)", "stack": f"File {place}", "reason": ""}
    return wire.Event("stack_dump", 1, rank, 100, fields)


def test_the_stacks_of_all_ranks_of_a_hang_are_requested_and_become_its_evidence_together():
    world = World()
    world.find("hang", ranks=[3])
    (command,) = world.effects.commands
    assert (command.action, command.params, command.attempt) == (
        "stacks",
        {"ranks": []},
        "l.0",
    )
    notified = len(world.effects.notifications)
    for rank in (3, 1, 0, 2):
        world.send(events=(stack_dump(rank, command.id, "load" if rank == 3 else "step"),))
    again = JobStream("gpt", lambda: [Scripted()], lambda job, incident: {}, SettingsInForce())
    again.restore(unpack(pack(world.job.state())))
    world.job = again
    world.tick()
    assert world.told() == ["opened", "evidence"]
    evidence = world.effects.transitions[-1].incident.evidence
    assert world.effects.stacks == [("gpt", StacksReceived(command.id, 4, 4))]
    assert evidence["ranks_stand"] == "3 of 4 ranks stand in step (train.py:7); rank 3 in load (train.py:7)."
    assert [(one["ranks"], one["rank"], one["stack"]) for one in evidence["stacks"]] == [
        ("3", 3, "File load"),
        ("0-2", 0, "File step"),
    ]
    world.send(events=(stack_dump(1, command.id, "load"),))
    world.tick()
    assert world.told() == ["opened", "evidence"], "each rank answers once"
    assert len(world.effects.notifications) == notified


def test_the_answers_of_many_ranks_are_told_every_ten_seconds(monkeypatch):
    monkeypatch.setattr(hang, "MANY", 1)
    world = World()
    world.find("hang", ranks=[3])
    order = world.effects.commands[0].id
    for rank in range(2):
        world.send(events=(stack_dump(rank, order, "step"),))
    world.tick()
    world.send(events=(stack_dump(2, order, "step"),))
    for _ in range(9):
        world.tick()
    assert world.told() == ["opened", "evidence"]
    world.tick()
    assert world.told() == ["opened", "evidence", "evidence"]
    assert world.effects.transitions[-1].incident.evidence["ranks_stand"].startswith("All 3 ranks")


def test_stacks_stay_in_the_evidence_when_the_hang_turns_out_to_have_a_cause():
    world = World()
    world.find("hang")
    world.send(events=(stack_dump(0, world.effects.commands[0].id, "step"),))
    world.tick()
    world.find("rank_lost", scope="rank:2", ranks=[2], onset_step=90)
    incident = world.effects.transitions[-1].incident
    assert (incident.kind, incident.evidence["ranks_stand"]) == (
        "rank_lost",
        "The rank stands in step (train.py:7); no answer of 3 ranks.",
    )
    assert "stacks" not in incident.evidence["hang"]


def test_a_rank_that_hangs_at_its_own_pace_is_asked_alone():
    world = World()
    world.find("hang", scope="rank:3", ranks=[3])
    (command,) = world.effects.commands
    assert command.params == {"ranks": [3]}
    world.send(events=(stack_dump(3, command.id, "load"),))
    world.tick()
    assert world.effects.stacks == [("gpt", StacksReceived(command.id, 1, 1))]
