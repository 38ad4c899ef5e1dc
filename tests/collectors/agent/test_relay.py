"""The relay's rules for orders and for requests of traces, on real recorder files whose rank is this process."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankwatch import layout, wire
from rankwatch.agent.clock import HostClock
from rankwatch.agent.ranks import LocalRank, LocalRanks
from rankwatch.agent.relay import FOLLOWED_BY, Relay, Traces
from rankwatch.layout import PersistentRequests
from rankwatch.reader import RingReader
from rankwatch.recorder import Recorder
from tests.support.ranks.recorders import a_recorder, local_rank

HOLD = wire.OrderView("o1", "gpt", "l.0", "hold", "pause", step=10)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = a_recorder(tmp_path, time.monotonic_ns(), rank=0, world_size=1)
    yield recorder
    recorder.close()


@pytest.fixture
def rank(recorder: Recorder) -> Iterator[LocalRank]:
    with local_rank(recorder) as rank:
        yield rank


class Places:
    """What is known of locations; one that is not named may be passed on."""

    def __init__(self) -> None:
        self.known: dict[str, str | None] = {}

    def why_not(self, location: str) -> str | None:
        return self.known.get(location, "")


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def relay(rank: LocalRank, tmp_path: Path, places: Places) -> Relay:
    return Relay([rank], tmp_path / "resume.json", "gpt", places.why_not)


def say(relay: Relay, view: wire.OrderView, phase: str = "", **fields: object) -> None:
    view = msgspec.structs.replace(view, phase=phase or view.phase, **fields)
    relay.apply(wire.Orders((view,)))


def slot(rank: LocalRank) -> tuple[str, str] | None:
    directive = rank.reader.directives.read()
    return None if directive is None else (directive.order, directive.phase)


def writes(rank: LocalRank) -> int:
    return int(rank.reader.directives.cell.words[0])


def test_an_order_is_written_whole_and_once(relay, rank):
    view = wire.OrderView("o1", "gpt", "l.0", "hold", "rollback", 7, 4.0, "c", "/c", 3, 1, (0,), 5)
    say(relay, view)
    say(relay, view)
    assert writes(rank) == 1
    directive = rank.reader.directives.read()
    assert directive._asdict() == {
        "order": "o1", "attempt": "l.0", "phase": "hold", "action": "rollback", "step": 7, "lease_s": 4.0,
        "checkpoint": "c", "location": "/c", "checkpoint_step": 3, "k": 1,
        "proven": "", "trace": "", "trace_steps": 0,
    }  # fmt: skip


def test_a_renewal_writes_the_same_phase_again_and_an_older_one_does_not(relay, rank):
    say(relay, HOLD, "do", renewal=3)
    say(relay, HOLD, "do", renewal=4)
    assert writes(rank) == 2
    say(relay, HOLD, "do", renewal=3)
    assert writes(rank) == 2
    assert relay.late == 1


@pytest.mark.parametrize("earlier", [phase for phase in FOLLOWED_BY if phase != "kill"])
def test_a_phase_that_comes_too_late_is_never_written(relay: Relay, rank: LocalRank, earlier: str) -> None:
    for late in FOLLOWED_BY:
        if late not in FOLLOWED_BY[earlier] and late != earlier:
            say(relay, HOLD, "hold")
            say(relay, HOLD, earlier)
            before = slot(rank)
            say(relay, HOLD, late)
            assert slot(rank) == before


def test_after_a_restart_the_slot_itself_says_how_far_an_order_was(relay, rank, tmp_path):
    say(relay, HOLD)
    say(relay, HOLD, "do")
    reader = RingReader(rank.path, writable=True)
    again = replace(rank, reader=reader, directive=reader.directives.read())
    second = Relay([again], tmp_path / "resume.json", "gpt", lambda _: "")
    second.apply(wire.Orders((HOLD,)))
    assert slot(again) == ("o1", "do")
    assert second.late == 1
    say(second, HOLD, "go")
    assert slot(again) == ("o1", "go")
    reader.close()


def test_closed_clears_the_slot_but_not_that_of_another_order(relay, rank):
    say(relay, HOLD)
    say(relay, HOLD, "closed", order="o0")
    assert slot(rank) == ("o1", "hold")
    say(relay, HOLD, "closed")
    assert slot(rank) is None


def test_an_order_that_the_next_one_has_replaced_does_not_come_back_with_a_late_answer(relay, rank):
    say(relay, HOLD)
    say(relay, HOLD, order="o2")  # that the first was closed was never heard
    assert slot(rank) == ("o2", "hold")
    say(relay, HOLD)  # the answer to a view, overtaken by the stream
    assert slot(rank) == ("o2", "hold")
    assert relay.late == 1
    say(relay, HOLD, "do", order="o2")
    assert slot(rank) == ("o2", "do")


def test_a_slot_passes_from_a_closed_order_to_the_next_without_being_empty(relay, rank):
    say(relay, HOLD, "do")
    before = writes(rank)
    following = msgspec.structs.replace(HOLD, order="o2", action="checkpoint")
    relay.apply(wire.Orders((following, msgspec.structs.replace(HOLD, phase="closed"))))
    assert (slot(rank), writes(rank)) == (("o2", "hold"), before + 1)


def test_views_are_wanted_while_an_order_is_open(relay: Relay) -> None:
    assert not relay.urgent
    say(relay, HOLD, "view")
    assert relay.urgent
    say(relay, HOLD, "closed")
    assert not relay.urgent
    say(relay, HOLD, "view", order="o2")
    relay.apply(wire.Orders())
    assert not relay.urgent


def test_a_phase_of_a_newer_service_is_left_alone_and_a_directive_that_does_not_fit_into_the_slot_refused(relay, rank):
    say(relay, HOLD, "dance")
    assert (slot(rank), relay.urgent) == (None, False)
    say(relay, HOLD)
    say(relay, HOLD, "hold", order="o2", location="x" * 10_000)
    assert slot(rank) == ("o1", "hold")


def test_a_rank_that_cannot_be_held_is_not_killed(relay, rank, caplog):
    say(relay, HOLD, "kill")
    assert "is not killed" in caplog.text


def test_advice_that_cannot_be_written_is_tried_again(rank: LocalRank, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    relay = Relay([rank], folder / "resume.json", "gpt", lambda _: "")
    orders = wire.Orders(resume=wire.ResumeAdvice("gpt", "c", "/c", 4))
    relay.apply(orders)
    folder.mkdir()
    relay.apply(orders)
    assert (folder / "resume.json").read_text() == '{"job": "gpt", "checkpoint": "c", "location": "/c", "step": 4}'
    assert [path.name for path in folder.iterdir()] == ["resume.json"]


def keep(relay: Relay, checkpoint: str, *views: wire.OrderView) -> None:
    relay.apply(wire.Orders(views, proven=checkpoint))


def test_the_capture_to_keep_is_written_once_and_asks_for_nothing(relay, rank):
    for _ in range(3):
        keep(relay, "memory:l.0:300")
    assert (rank.reader.directives.persistent.proven, writes(rank)) == ("memory:l.0:300", 1)
    assert slot(rank) is None
    keep(relay, "")
    assert (rank.reader.directives.persistent.proven, writes(rank)) == ("", 2)


@pytest.mark.parametrize("checkpoint", ["memory:k.0:300", "local:l.0:300", "memory:l:300", ""])
def test_what_no_process_of_this_launch_can_have_is_not_reported(
    relay: Relay, rank: LocalRank, checkpoint: str
) -> None:
    keep(relay, checkpoint)
    assert (rank.reader.directives.persistent.proven, writes(rank)) == ("", 0)


def test_while_an_order_is_in_the_slot_it_is_not_touched_and_the_capture_to_keep_is_told_afterwards(relay, rank):
    keep(relay, "memory:l.0:300")
    keep(relay, "memory:l.0:400", HOLD)
    assert (slot(rank), rank.reader.directives.persistent.proven) == (("o1", "hold"), "memory:l.0:300")
    keep(relay, "memory:l.0:400", HOLD)
    assert writes(rank) == 2
    keep(relay, "memory:l.0:400", msgspec.structs.replace(HOLD, phase="closed"))
    assert (slot(rank), rank.reader.directives.persistent.proven) == (None, "memory:l.0:400")


def test_a_restarted_worker_knows_from_the_slot_what_was_reported(rank: LocalRank, tmp_path: Path) -> None:
    keep(Relay([rank], tmp_path / "resume.json", "gpt", lambda _: ""), "memory:l.0:300")
    ranks = LocalRanks(tmp_path, "gpt")
    (found,) = ranks.scan()
    assert found.persistent.proven == "memory:l.0:300"
    keep(Relay(ranks, tmp_path / "resume.json", "gpt", lambda _: ""), "memory:l.0:300", HOLD)
    assert (writes(rank), rank.reader.directives.persistent.proven) == (2, "memory:l.0:300")
    ranks.close()


ROLLBACK = wire.OrderView("o1", "gpt", "l.0", "hold", "rollback", 7, 4.0, "local:l.0:3", "/evil/3", 3, 1)
ADVICE = wire.Orders(resume=wire.ResumeAdvice("gpt", "local:l.0:3", "/evil/3", 3))


def seen(relay: Relay, rank: LocalRank, order: str = "", answer: str = "") -> wire.Progress:
    return relay.seen_by_service(rank, wire.Progress(0, 5, "", 0.0, 0.0, order=order, answer=answer))


def test_a_refused_location_reaches_no_slot_and_the_order_fails_there(relay, rank, places):
    places.known["/evil/3"] = "it is elsewhere"
    for phase in ("view", "hold", "hold", "do"):
        say(relay, ROLLBACK, phase)
    assert slot(rank) is None
    reported = seen(relay, rank)
    assert (reported.order, reported.answer, reported.answer_step) == ("o1", "failed", 5)
    assert reported.answer_detail == "this host does not load from '/evil/3': it is elsewhere"
    assert [(each.checkpoint, each.reason) for each in relay.take_refused()] == [("local:l.0:3", "it is elsewhere")]
    assert relay.take_refused() == []


def test_a_refusal_ends_with_its_order(relay, rank, places):
    places.known["/evil/3"] = "it is elsewhere"
    say(relay, ROLLBACK)
    say(relay, ROLLBACK, "closed")
    assert seen(relay, rank).order == ""
    say(relay, HOLD, order="o2")
    assert slot(rank) == ("o2", "hold")
    assert seen(relay, rank).order == ""


def test_what_a_rank_itself_has_answered_is_passed_on(relay, rank, places):
    say(relay, ROLLBACK)
    assert slot(rank) == ("o1", "hold")
    places.known["/evil/3"] = "it is elsewhere"
    say(relay, ROLLBACK, "do")
    assert slot(rank) == ("o1", "do"), "the rank has the location since the hold"
    assert seen(relay, rank, "o1", "held").answer == "held"


def test_a_location_that_is_being_looked_up_is_passed_on_with_the_next_orders(relay, rank, places):
    places.known["/evil/3"] = None
    say(relay, ROLLBACK)
    assert (slot(rank), seen(relay, rank).order) == (None, "")
    del places.known["/evil/3"]
    say(relay, ROLLBACK)
    assert slot(rank) == ("o1", "hold")


def test_the_advice_for_a_relaunch_is_written_only_where_it_may_be_loaded(relay, places, tmp_path):
    advice = tmp_path / "resume.json"
    places.known["/evil/3"] = None
    assert not relay.ready(ADVICE)
    relay.apply(ADVICE)
    assert not advice.exists()
    places.known["/evil/3"] = "it is elsewhere"
    assert relay.ready(ADVICE)
    for _ in range(3):
        relay.apply(ADVICE)
    assert not advice.exists()
    assert "it is elsewhere" in relay.trouble
    assert len(relay.take_refused()) == 1
    relay.apply(wire.Orders(resume=wire.ResumeAdvice("gpt", "local:l.0:2", "/ckpt/2", 2)))
    assert '"/ckpt/2"' in advice.read_text()
    assert relay.trouble == ""
    relay.apply(ADVICE)
    assert '"/ckpt/2"' in advice.read_text(), "the checkpoint before it stays"


REQUEST = wire.TraceRequest("cmd_1", "l.0", (0,), 3)


class Host:
    """The parts of an agent that traces pass through."""

    def __init__(self, rank: LocalRank, relay: Relay) -> None:
        self.rank = rank
        self.traces = Traces(HostClock())
        self.relay = relay

    def order(self, *requests: wire.TraceRequest, orders: tuple[wire.OrderView, ...] = ()) -> None:
        reported = wire.Orders(orders, traces=requests)
        self.traces.ask(reported.traces, [self.rank])
        self.relay.apply(reported)

    def answer(self, **fields: Any) -> None:
        Path(layout.trace_path(self.rank.path)).write_text(json.dumps(fields))

    def take(self) -> list[tuple[str, int | None, dict[str, Any]]]:
        return [(attempt, event.step, event.fields) for attempt, event in self.traces.take([self.rank])]

    @property
    def slot(self) -> PersistentRequests:
        return self.rank.reader.directives.persistent


@pytest.fixture
def host(rank: LocalRank, relay: Relay) -> Host:
    return Host(rank, relay)


def test_a_request_is_written_into_the_slot_until_the_rank_has_answered(host):
    host.order(REQUEST)
    assert host.slot == PersistentRequests("", "cmd_1", 3)
    assert host.take() == []
    host.answer(request="cmd_1", step=7, spans=1)
    assert host.take() == [("l.0", 7, {"request": "cmd_1", "step": 7, "spans": 1})]
    assert host.take() == []
    host.order(REQUEST)
    assert host.slot == PersistentRequests()


@pytest.mark.parametrize(
    "request_", [wire.TraceRequest("cmd_1", "l.1", (0,), 3), wire.TraceRequest("cmd_1", "l.0", (1, 2), 3)]
)
def test_requests_to_other_attempts_and_ranks_are_not_for_this_one(host, request_):
    host.order(request_)
    assert (host.slot, host.take()) == (PersistentRequests(), [])


def test_an_open_order_keeps_the_slot_and_the_trace_follows_it(host):
    host.order(orders=(HOLD,))
    host.order(REQUEST, orders=(HOLD,))
    assert host.rank.reader.directives.read().order == "o1"
    host.order(REQUEST, orders=(msgspec.structs.replace(HOLD, phase="closed"),))
    assert host.slot.trace == "cmd_1"


def test_an_order_during_a_trace_leaves_the_request_in_the_slot(host):
    host.order(REQUEST)
    host.order(REQUEST, orders=(HOLD,))
    assert (host.rank.reader.directives.read().order, host.slot.trace) == ("o1", "cmd_1")


def test_answers_to_other_requests_and_halves_of_answers_are_left_alone(host):
    host.order(REQUEST)
    host.answer(request="cmd_0", step=7)
    assert host.take() == []
    Path(layout.trace_path(host.rank.path)).write_text('{"request": "cmd_1", "st')
    assert host.take() == []


def test_an_answer_with_a_path_that_is_not_utf_8_can_be_sent(host):
    host.order(REQUEST)
    host.answer(request="cmd_1", step=7, file="/run/\udcff.py")
    ((_, _, fields),) = host.take()
    assert fields["file"] == "/run/?.py"


def test_an_answer_that_comes_before_the_request_is_withdrawn_is_not_lost(host):
    host.order(REQUEST)
    host.answer(request="cmd_1", step=7)
    host.order()
    assert host.take() == [("l.0", 7, {"request": "cmd_1", "step": 7})]
    assert host.slot == PersistentRequests()


def test_a_request_that_an_older_state_of_the_orders_lacks_is_asked_again(host):
    for requests in ((REQUEST,), (), (REQUEST,)):
        host.order(*requests)
    assert host.slot == PersistentRequests("", "cmd_1", 3)
    host.answer(request="cmd_1", step=7)
    assert [attempt for attempt, _, _ in host.take()] == ["l.0"]


def test_the_answer_of_a_rank_that_has_rolled_back_is_still_taken(host, recorder):
    host.order(REQUEST)
    recorder.words[layout.POSITION] = 1 << 48
    host.order(REQUEST)
    assert host.slot.trace == "cmd_1"
    host.answer(request="cmd_1", error="a rollback")
    assert host.take() == [("l.0", None, {"error": "a rollback", "request": "cmd_1"})]


def test_of_a_rank_that_is_gone_no_answer_can_come(host):
    host.order(REQUEST)
    host.rank.gone_since_s = 1.0
    assert host.take() == [("l.0", None, {"error": "its process is gone", "request": "cmd_1"})]
