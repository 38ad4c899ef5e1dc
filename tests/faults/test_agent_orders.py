"""Orders from a service to real ranks and their answers back, also while agents die."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rankwatch import layout, wire
from rankwatch.agent.checkpoints import LOOK_EVERY_S
from rankwatch.reader import RingReader
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, until
from tests.support.ranks.recording_rank import RecordingRank

pytestmark = pytest.mark.integration

STEPS = 100_000


def answers(service: AgentService, order: str, attempt: str = "l.0") -> dict[int, wire.Progress]:
    """The newest answer of each rank to an order, from the views of the order's attempt."""
    found = {}
    for view in list(service.views):
        if view.attempt == attempt:
            found |= {block.rank: block for block in view.ranks if block.order == order}
    return found


def all_answered(service: AgentService, order: str, answer: str, count: int = 2) -> Callable[[], bool]:
    return lambda: [block.answer for block in answers(service, order).values()] == [answer] * count


def newest_step(service: AgentService) -> int:
    return max(block.step for view in service.views[-4:] for block in view.ranks)


def order(service: AgentService, name: str, action: str, margin: int = 60, **fields: object) -> wire.OrderView:
    """An order that holds some steps from now."""
    until(lambda: service.views and newest_step(service) > 0)
    hold = wire.OrderView(name, "gpt", "l.0", "hold", action, step=newest_step(service) + margin, lease_s=20.0)
    return msgspec.structs.replace(hold, **fields)


def phase(view: wire.OrderView, name: str, **fields: object) -> wire.OrderView:
    return msgspec.structs.replace(view, phase=name, **fields)


def test_a_checkpoint_is_held_done_and_gone_on_from_at_the_same_step(service, rank, peer, agent):
    for each in (rank, peer):
        each.do("follow_orders", STEPS)
    hold = order(service, "o1", "checkpoint")
    service.order(hold)
    until(all_answered(service, "o1", "held"))
    assert {block.answer_step for block in answers(service, "o1").values()} == {hold.step}
    service.order(phase(hold, "do"))
    until(all_answered(service, "o1", "done"))
    assert {block.answer_detail for block in answers(service, "o1").values()} == {f"/checkpoints/{hold.step}"}
    service.order(phase(hold, "go"))
    until(all_answered(service, "o1", "went"))
    service.order(phase(hold, "closed"))
    until(lambda: newest_step(service) > hold.step + 5)
    # Progress has a way of its own, and may come before what was recorded earlier.
    until(lambda: {event.rank for event in service.events("checkpoint_saved")} == {0, 1})


def test_a_rollback_is_answered_under_the_orders_attempt_and_training_goes_on_under_the_next(service, rank, agent):
    rank.do("follow_orders", STEPS)
    hold = order(service, "o1", "rollback", checkpoint="c", location="/checkpoints/3", checkpoint_step=3, k=1)
    service.order(hold)
    until(all_answered(service, "o1", "held", 1))
    service.order(phase(hold, "do"))
    until(all_answered(service, "o1", "done", 1))
    block = answers(service, "o1")[0]
    assert (block.answer_step, block.answer_k, block.answer_detail) == (3, 1, "c")
    service.order(phase(hold, "go"))
    until(all_answered(service, "o1", "went", 1))
    service.order(phase(hold, "closed"))
    until(lambda: ("l.1", 4, 0) in service.rows())
    until(lambda: service.views[-1].attempt == "l.1")
    again = [info.rank for batch in service.batches if batch.attempt == "l.1" for info in batch.ranks]
    assert again == [0]


def test_views_come_every_50_ms_while_an_order_is_open_and_once_a_second_else(service, rank, agent):
    rank.do("steps", 3)
    until(lambda: len(service.views) >= 4)
    calm = [view.sent_unix_ns for view in service.views][1:4]
    assert 0.5e9 < (calm[2] - calm[0]) / 2 < 5e9
    service.order(wire.OrderView("o1", "gpt", "l.0", "view", "pause"))
    before = len(service.views)
    until(lambda: len(service.views) >= before + 40)
    open_ = [view.sent_unix_ns for view in service.views][before + 2 : before + 40]
    # Nominally two seconds; once a second they would be 38.
    assert open_[-1] - open_[0] < 19e9
    service.order()
    time.sleep(0.3)
    before = len(service.views)
    time.sleep(1.0)
    assert len(service.views) - before <= 4


def test_an_order_of_another_attempt_reaches_nobody(service, rank, agent):
    rank.do("follow_orders", STEPS)
    ours = order(service, "ours", "pause", margin=100)
    others = [
        wire.OrderView("o2", "gpt", "l.1", "hold", "pause", step=ours.step - 50),
        wire.OrderView("o3", "gpt", "m.0", "kill", "relaunch"),
        wire.OrderView("o4", "other", "l.0", "kill", "relaunch"),
    ]
    service.order(*others, ours)
    until(all_answered(service, "ours", "held", 1))
    assert rank.process.poll() is None
    assert not answers(service, "o2", "l.1")


def test_a_kill_writes_the_advice_first_and_ends_the_culprits_first(tmp_path, service):
    ranks = [RecordingRank(tmp_path, number) for number in range(4)]
    with AgentProcess(tmp_path, service.environment) as agent:
        until(lambda: len({info.rank for batch in service.batches for info in batch.ranks}) == 4)
        service.order(
            wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch", culprits=(3, 2)),
            resume=wire.ResumeAdvice("gpt", "local:l.0:40", "/checkpoints/40", 40),
        )
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 4
        advice = json.loads(Path(layout.resume_path(str(tmp_path), "gpt")).read_text())
        assert advice == {"job": "gpt", "checkpoint": "local:l.0:40", "location": "/checkpoints/40", "step": 40}
        until(lambda: len(service.events("process_exit")) == 4)
        until(lambda: {block.state for block in service.views[-1].ranks} == {"exited"})
        service.order()
        assert agent.wait() == 0
    for rank in ranks:
        rank.close()
    killed = re.findall(r"killed rank (\d)", agent.log)
    assert sorted(killed[:2]) == ["2", "3"]
    assert {event.fields["signal"] for event in service.events("process_exit")} == {signal.SIGKILL}


def test_a_stopped_rank_is_killed_too(service, rank, agent):
    until(lambda: service.views)
    rank.process.send_signal(signal.SIGSTOP)
    service.order(wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch"))
    assert rank.wait() == -signal.SIGKILL


def test_the_advice_for_a_relaunch_follows_the_service(tmp_path, service, rank, agent):
    path = Path(layout.resume_path(str(tmp_path), "gpt"))
    for step in (10, 20):
        service.order(resume=wire.ResumeAdvice("gpt", f"c{step}", f"/checkpoints/{step}", step))
        until(lambda: path.exists() and json.loads(path.read_text())["step"] == step)  # noqa: B023 - used at once
    service.order(resume=wire.ResumeAdvice("gpt"))
    until(lambda: not path.exists())


def test_a_paused_job_saves_at_its_step_and_stays_paused(service, rank, peer, agent):
    for each in (rank, peer):
        each.do("follow_orders", STEPS)
    pause = order(service, "p1", "pause")
    for name, answer in (("hold", "held"), ("do", "done")):
        service.order(phase(pause, name, lease_s=60.0))
        until(all_answered(service, "p1", answer))
    save = msgspec.structs.replace(pause, order="c1", action="checkpoint", lease_s=60.0)
    service.order(save, phase(pause, "closed"))
    until(all_answered(service, "c1", "held"))
    service.order(phase(save, "do"))
    until(all_answered(service, "c1", "done"))
    details = {block.answer_detail for block in answers(service, "c1").values()}
    service.order(phase(save, "do", action="pause", renewal=1))
    until(lambda: {block.answer_detail for block in answers(service, "c1").values()} == {"paused"})
    assert details == {f"/checkpoints/{pause.step}"}
    assert {block.answer_step for block in answers(service, "c1").values()} == {pause.step}
    assert max(step for _, step, _ in service.rows()) < pause.step
    service.order(phase(save, "go", action="pause", renewal=2))
    until(all_answered(service, "c1", "went"))


@pytest.mark.ci
def test_saves_that_are_deleted_are_reported_and_others_are_not(tmp_path, service, rank, agent):
    folder = tmp_path / "saved"
    folder.mkdir()
    rank.do("save", STEPS, 50, folder)

    def reported() -> list[wire.Event]:
        # Each has been there for more than two looks, whenever those were.
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > 2 * LOOK_EVERY_S + 2:
                path.unlink()
        return service.events("checkpoint_gone")

    until(reported)
    (event, *_) = service.events("checkpoint_gone")
    assert event.fields["checkpoint"].startswith("local:l.0:")
    path = Path(event.fields["reason"].removeprefix("it is not at ").removesuffix(" any more"))
    assert (path.parent, path.exists()) == (folder, False)


@pytest.mark.parametrize("both", [False, True])
def test_an_order_goes_on_when_the_agent_is_killed_in_the_middle(tmp_path, both, service, rank):
    agent = AgentProcess(tmp_path, service.environment)
    rank.do("follow_orders", STEPS)
    hold = order(service, "o1", "rollback", checkpoint="c", location="/checkpoints/3", checkpoint_step=3, k=1)

    def kill_the_agent() -> AgentProcess:
        if not both:
            agent.kill_worker()
            return agent
        agent.kill()
        until(lambda: not agent.running())
        return AgentProcess(tmp_path, service.environment)

    try:
        service.order(hold)
        until(all_answered(service, "o1", "held", 1))
        agent = kill_the_agent()
        service.order(phase(hold, "do"))
        until(all_answered(service, "o1", "done", 1))
        agent = kill_the_agent()
        service.views.clear()
        # The rank has gone back, and counts as l.1 by now; the new agent finds in its slot that it owes an answer.
        until(all_answered(service, "o1", "done", 1))
        service.order(phase(hold, "go"))
        until(all_answered(service, "o1", "went", 1))
        until(lambda: ("l.1", 4, 0) in service.rows())
    finally:
        agent.kill()


def test_orders_reach_ranks_by_views_alone_when_no_stream_can_be_held(tmp_path, service):
    service.streaming = False
    with RecordingRank(tmp_path) as rank, AgentProcess(tmp_path, service.environment):
        rank.do("follow_orders", STEPS)
        service.order(order(service, "o1", "pause", margin=200))
        until(all_answered(service, "o1", "held", 1))


def test_the_last_good_capture_outlives_every_later_one_and_training_goes_back_to_it(tmp_path, service, rank, agent):
    good = "memory:l.0:20"
    rank.do("keep", 4, 10)
    rank.do("steps", 25)
    service.order(proven=good)
    (ring,) = tmp_path.glob("*.ring")
    reader = RingReader(str(ring))
    slot = reader.directives
    until(lambda: slot.persistent.proven == good)
    # Captures of spoilt weights go on, many more than there are places.
    rank.do("steps", 400)
    until(lambda: ("l.0", 424, 0) in service.rows())
    reported = [event.fields["checkpoint"] for event in service.events("checkpoint_saved")]
    assert len(reported) == 43
    gone = [event.fields["checkpoint"] for event in service.events("checkpoint_gone")]
    assert set(reported) - set(gone) == {good, "memory:l.0:400", "memory:l.0:410", "memory:l.0:420"}

    hold = wire.OrderView("o1", "gpt", "l.0", "hold", "rollback", 430, 60.0, good, checkpoint_step=20, k=1)
    service.order(hold, proven=good)
    until(lambda: slot.read() is not None)
    rank.say("steps", STEPS, 0.005)
    for name, answer in (("hold", "held"), ("do", "done"), ("go", "went")):
        service.order(phase(hold, name), proven=good)
        until(all_answered(service, "o1", answer, 1))
    service.order(phase(hold, "closed"), proven=good)
    until(lambda: ("l.1", 25, 0) in service.rows())
    assert ("l.1", 19, 0) not in service.rows()
    reader.close()
