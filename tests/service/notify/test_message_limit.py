"""The law on messages: three an hour of each kind and job without a new cause, and what becomes of the rest."""

import json

import pytest
from sqlalchemy import delete, func, insert, select

from rankwatch_service.api.background.counters import notification_metrics
from rankwatch_service.notify.message_limit import MESSAGES_PER_HOUR, NEW_CAUSES_PER_HOUR
from rankwatch_service.notify.pipeline import ReceiverRoute, why_sent
from rankwatch_service.notify.router import Router
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Announcement, Incident, Outbox, Receiver, Silence
from rankwatch_service.store.rows import incident_row as row_of
from tests.support.detection.scripted_job import World
from tests.support.service.webhook_receiver import HeldLease, announce, subscribe
from tests.support.values.incidents import NOON_UNIX_NS, incident_row, notified

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

HOUR_S = 3_600.0


class Reported:
    """A job whose detector finds what a test says, and a notifier that decides what receivers get."""

    def __init__(self, engine, *receivers: ReceiverRoute) -> None:
        self.engine = engine
        self.world = World()
        self.router = Router(engine, HeldLease(engine))
        self.receive(*receivers or (ReceiverRoute("oncall"),))
        self.world.train(*range(10))

    def receive(self, *receivers: ReceiverRoute) -> None:
        with write(self.engine) as connection:
            connection.execute(delete(Receiver))
        subscribe(self.engine, *receivers)

    def silence(self) -> None:
        silence = {
            "id": "sil_1",
            "job": "gpt",
            "kind": "",
            "scope": "",
            "matchers": [],
            "created_by": "",
            "comment": "",
        }
        with write(self.engine) as connection:
            connection.execute(insert(Silence).values(**silence, starts_unix_ns=0, ends_unix_ns=10**18))

    def find(self, kind: str, **fields) -> None:
        self.world.find(kind, **fields)
        self.route()

    def tick(self, seconds: float = 1.0) -> None:
        self.world.tick(seconds)
        self.route()

    def route(self) -> None:
        """What has changed is committed, and the notifier looks."""
        effects = self.world.effects
        with write(self.engine) as connection:
            for transition in effects.transitions:
                row = row_of(transition.incident)
                connection.execute(upsert(connection, Incident, row), row)
        announce(self.engine, effects.announcements)
        effects.announcements.clear()
        while self.router.route():
            pass
        self.router.release(int(self.world.now_s * 1e9))

    def comes_and_goes(self, kind: str = "slowdown", **fields) -> None:
        for change in ("open", "close"):
            self.world.find(kind, change=change, **({"severity": "warning"} | fields))
            self.tick()

    @property
    def sent(self) -> list[tuple[str, dict]]:
        waiting = select(Outbox.body).where(Outbox.state == "waiting")
        order = (Outbox.created_unix_ns, Outbox.incident_id, Outbox.transition)
        with read(self.engine) as connection:
            bodies = [json.loads(body) for body in connection.scalars(waiting.order_by(*order))]
        return [(body["type"].removeprefix("incident."), body["data"]) for body in bodies]

    @property
    def types(self) -> list[str]:
        return [type_ for type_, _ in self.sent]


@pytest.fixture
def job(engine) -> Reported:
    return Reported(engine)


def test_what_comes_and_goes_sends_three_messages_an_hour_and_the_next_one_counts_the_rest(job):
    for _ in range(20):
        job.comes_and_goes()
    assert job.types == ["opened", "resolved", "opened"]
    assert job.world.reported().count("opened") == 20, "incidents stay on the pages"
    job.world.train(10)
    job.tick(HOUR_S)
    assert job.types == ["opened", "resolved", "opened", "resolved"], "an end is told as soon as there is room"
    _, data = job.sent[-1]
    assert data["held_before"] == 18
    assert "18 more like this were not sent before" in data["text"].split("\n")[1]
    job.comes_and_goes()
    assert job.sent[-1][1]["held_before"] == 0


@pytest.mark.parametrize(
    "new", [{"ranks": [2], "scope": "rank:2"}, {"severity": "critical", "ranks": [3]}, {"ranks": [3, 1]}]
)
def test_a_new_cause_is_reported_at_once_and_its_end_as_well(job, new):
    for _ in range(3):
        job.comes_and_goes("straggler", ranks=[3], scope="rank:3")
    assert len(job.sent) == MESSAGES_PER_HOUR
    job.comes_and_goes("straggler", **new)
    assert job.types[MESSAGES_PER_HOUR:] == ["opened", "resolved"]
    job.comes_and_goes("straggler", **new)
    assert len(job.sent) == MESSAGES_PER_HOUR + 2, "the second time it is no new cause"


def test_who_accuses_one_rank_after_the_other_has_no_new_cause_each_time(job):
    for rank in range(200):
        job.world.find("straggler", ranks=[rank], scope=f"rank:{rank}", hosts=[f"h{rank}"])
    job.route()
    assert len(job.sent) <= NEW_CAUSES_PER_HOUR + MESSAGES_PER_HOUR


def test_each_kind_has_its_own_limit(job):
    for _ in range(5):
        job.comes_and_goes("slowdown")
        job.comes_and_goes("loss_spike")
    assert len(job.sent) == 2 * MESSAGES_PER_HOUR


def test_what_is_still_open_is_reported_when_there_is_room_and_what_somebody_saw_is_not(job):
    for _ in range(3):
        job.comes_and_goes()
    job.find("slowdown", severity="warning")
    opened = job.world.effects.transitions[-1].incident
    assert (opened.state, len(job.sent)) == ("open", MESSAGES_PER_HOUR)
    for _ in range(120):
        job.world.train(11)
        job.tick(HOUR_S / 60)
    notified = [data["id"] for type_, data in job.sent[MESSAGES_PER_HOUR:] if type_ == "opened"]
    assert notified == [opened.id]


@pytest.mark.parametrize("how", ["nobody subscribes", "a silence mutes it"])
def test_what_was_held_back_and_nobody_gets_any_more_is_tried_once(job, how: str):
    for _ in range(3):
        job.comes_and_goes()
    job.find("slowdown", severity="warning")
    if how == "nobody subscribes":
        job.receive()
    else:
        job.silence()
    for _ in range(65):
        job.world.train(11)
        job.tick(HOUR_S / 60)
    assert len(job.sent) == MESSAGES_PER_HOUR
    with read(job.engine) as connection:
        assert connection.scalar(select(func.count()).select_from(Announcement)) == 0


def test_messages_about_the_incident_itself_are_not_others_like_it(job):
    for _ in range(3):
        job.comes_and_goes("straggler", ranks=[3], scope="rank:3")
    job.find("straggler", ranks=[3], scope="rank:3", severity="warning")
    job.comes_and_goes("straggler", ranks=[2], scope="rank:2")
    for _ in range(61):
        job.world.train(11)
        job.tick(HOUR_S / 60)
    held = [data["held_before"] for _, data in job.sent]
    assert max(held) > 0 <= min(held), held


def test_another_notifier_knows_what_was_reported_and_what_waits(job):
    for _ in range(3):
        job.comes_and_goes()
    job.router = Router(job.engine, HeldLease(job.engine))
    job.comes_and_goes()
    assert len(job.sent) == MESSAGES_PER_HOUR
    job.world.train(10)
    job.tick(HOUR_S)
    assert job.types[MESSAGES_PER_HOUR:] == ["resolved"]


def test_what_a_silence_mutes_or_nobody_subscribes_to_takes_no_room(engine):
    job = Reported(engine, ReceiverRoute("oncall", kinds=("hang",)))
    for _ in range(5):
        job.comes_and_goes()
    job.receive(ReceiverRoute("oncall"))
    job.silence()
    for _ in range(5):
        job.comes_and_goes()
    with write(engine) as connection:
        connection.execute(delete(Silence))
    assert job.sent == []
    for _ in range(5):
        job.comes_and_goes()
    assert len(job.sent) == MESSAGES_PER_HOUR


def test_what_is_held_back_is_counted_by_kind_and_says_why(engine):
    (one,) = notified("opened", 1, now_unix_ns=NOON_UNIX_NS)
    with write(engine) as connection:
        connection.execute(insert(Incident), [incident_row()])
        connection.execute(insert(Outbox), [one | {"state": "held"}])
    with read(engine) as connection:
        for later_s, counted in ((1, {"straggler": 1.0}), (HOUR_S + 1, {})):
            families = notification_metrics(connection, NOON_UNIX_NS + int(later_s * 1e9))
            (held,) = (family for family in families if family.name == "rankwatch_notifications_held")
            assert {sample.labels["kind"]: sample.value for sample in held.samples} == counted
    assert "3 messages like it" in why_sent("held", "", 0, 0, 0)
