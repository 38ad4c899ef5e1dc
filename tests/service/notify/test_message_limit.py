"""The law on messages: three an hour of each kind and job without a new cause, and what becomes of the rest."""

import json

import pytest
from sqlalchemy import insert

from rankwatch_service.api.background.counters import notification_metrics
from rankwatch_service.policy.control_records import ReceiverRoute, SilenceSet
from rankwatch_service.policy.message_limit import MESSAGES_PER_HOUR, NEW_CAUSES_PER_HOUR
from rankwatch_service.policy.routing import why_sent
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Incident, Outbox
from rankwatch_service.store.rows import outbox_row
from tests.support.detection.scripted_job import World
from tests.support.values.incidents import NOON_UNIX_NS, incident_row, notified

HOUR_S = 3_600.0


class Told:
    """A job whose detector finds what a test says, and what receivers get."""

    def __init__(self, *receivers: ReceiverRoute) -> None:
        self.world = World()
        self.receive(*receivers or (ReceiverRoute("oncall"),))
        self.world.train(*range(10))

    def receive(self, *receivers: ReceiverRoute) -> None:
        self.world.job.settings.receivers = receivers

    def comes_and_goes(self, kind: str = "slowdown", **fields) -> None:
        for change in ("open", "close"):
            self.world.find(kind, change=change, **({"severity": "warning"} | fields))
            self.world.tick()

    @property
    def sent(self) -> list[tuple[str, dict]]:
        bodies = [json.loads(one.body) for one in self.world.effects.notifications if one.state == "waiting"]
        return [(body["type"].removeprefix("incident."), body["data"]) for body in bodies]

    @property
    def types(self) -> list[str]:
        return [type_ for type_, _ in self.sent]


def test_what_comes_and_goes_sends_three_messages_an_hour_and_the_next_one_counts_the_rest():
    job = Told()
    for _ in range(20):
        job.comes_and_goes()
    assert job.types == ["opened", "resolved", "opened"]
    assert job.world.told().count("opened") == 20, "incidents stay on the pages"
    job.world.train(10)
    job.world.tick(HOUR_S)
    assert job.types == ["opened", "resolved", "opened", "resolved"], "an end is told as soon as there is room"
    _, data = job.sent[-1]
    assert data["held_before"] == 18
    assert "18 more like this were not sent before" in data["text"].split("\n")[1]
    job.comes_and_goes()
    assert job.sent[-1][1]["held_before"] == 0


@pytest.mark.parametrize(
    "new", [{"ranks": [2], "scope": "rank:2"}, {"severity": "critical", "ranks": [3]}, {"ranks": [3, 1]}]
)
def test_a_new_cause_is_told_at_once_and_its_end_as_well(new):
    job = Told()
    for _ in range(3):
        job.comes_and_goes("straggler", ranks=[3], scope="rank:3")
    assert len(job.sent) == MESSAGES_PER_HOUR
    job.comes_and_goes("straggler", **new)
    assert job.types[MESSAGES_PER_HOUR:] == ["opened", "resolved"]
    job.comes_and_goes("straggler", **new)
    assert len(job.sent) == MESSAGES_PER_HOUR + 2, "the second time it is no new cause"


def test_who_accuses_one_rank_after_the_other_has_no_new_cause_each_time():
    job = Told()
    for rank in range(1_000):
        job.world.find("straggler", ranks=[rank], scope=f"rank:{rank}", hosts=[f"h{rank}"])
    assert len(job.sent) <= NEW_CAUSES_PER_HOUR + MESSAGES_PER_HOUR


def test_each_kind_has_its_own_limit():
    job = Told()
    for _ in range(5):
        job.comes_and_goes("slowdown")
        job.comes_and_goes("loss_spike")
    assert len(job.sent) == 2 * MESSAGES_PER_HOUR


def test_what_is_still_open_is_told_when_there_is_room_and_what_somebody_saw_is_not():
    job = Told()
    for _ in range(3):
        job.comes_and_goes()
    job.world.find("slowdown", severity="warning")
    opened = job.world.effects.transitions[-1].incident
    assert (opened.state, len(job.sent)) == ("open", MESSAGES_PER_HOUR)
    for _ in range(120):
        job.world.train(11)
        job.world.tick(HOUR_S / 60)
    told = [data["id"] for type_, data in job.sent[MESSAGES_PER_HOUR:] if type_ == "opened"]
    assert told == [opened.id]


@pytest.mark.parametrize("how", ["nobody subscribes", "a silence mutes it"])
def test_what_was_held_back_and_nobody_gets_any_more_is_tried_once(how: str):
    job = Told()
    for _ in range(3):
        job.comes_and_goes()
    job.world.find("slowdown", severity="warning")
    if how == "nobody subscribes":
        job.receive()
    else:
        job.world.job.settings.silences = {"sil_1": SilenceSet("sil_1", "gpt", "", "", 0, 10**18)}
    for _ in range(65):
        job.world.train(11)
        job.world.tick(HOUR_S / 60)
    assert job.world.told().count("updated") == 1
    assert len(job.sent) == MESSAGES_PER_HOUR


def test_messages_about_the_incident_itself_are_not_others_like_it():
    job = Told()
    for _ in range(3):
        job.comes_and_goes("straggler", ranks=[3], scope="rank:3")
    job.world.find("straggler", ranks=[3], scope="rank:3", severity="warning")
    job.comes_and_goes("straggler", ranks=[2], scope="rank:2")
    for _ in range(61):
        job.world.train(11)
        job.world.tick(HOUR_S / 60)
    held = [data["held_before"] for _, data in job.sent]
    assert max(held) > 0 <= min(held), held


def test_a_restart_keeps_what_was_told_and_what_waits():
    job = Told()
    for _ in range(3):
        job.comes_and_goes()
    job.world.restart()
    job.receive(ReceiverRoute("oncall"))
    job.comes_and_goes()
    assert len(job.sent) == MESSAGES_PER_HOUR
    job.world.train(10)
    job.world.tick(HOUR_S)
    assert job.types[MESSAGES_PER_HOUR:] == ["resolved"]


def test_what_a_silence_mutes_or_nobody_subscribes_to_takes_no_room():
    job = Told(ReceiverRoute("oncall", kinds=("hang",)))
    for _ in range(5):
        job.comes_and_goes()
    job.receive(ReceiverRoute("oncall"))
    mute = SilenceSet("sil_1", "gpt", "", "", 0, 10**18)
    job.world.job.settings.silences = {"sil_1": mute}
    for _ in range(5):
        job.comes_and_goes()
    job.world.job.settings.silences = {}
    assert job.sent == []
    for _ in range(5):
        job.comes_and_goes()
    assert len(job.sent) == MESSAGES_PER_HOUR


def test_what_is_held_back_is_counted_by_kind_and_says_why(engine):
    (one,) = notified("opened", 1, now_unix_ns=NOON_UNIX_NS)
    with write(engine) as connection:
        connection.execute(insert(Incident), [incident_row()])
        connection.execute(insert(Outbox), [outbox_row(one) | {"state": "held"}])
    with read(engine) as connection:
        for later_s, counted in ((1, {"straggler": 1.0}), (HOUR_S + 1, {})):
            families = notification_metrics(connection, NOON_UNIX_NS + int(later_s * 1e9))
            (held,) = (family for family in families if family.name == "rankwatch_notifications_held")
            assert {sample.labels["kind"]: sample.value for sample in held.samples} == counted
    assert "3 messages like it" in why_sent("held", "", 0, 0, 0)
