"""Requests for traces on their way to a rank's slot, and the answers on their way back."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankwatch import layout, wire
from rankwatch.agent.clock import HostClock
from rankwatch.agent.ranks import LocalRank
from rankwatch.agent.relay import Relay, Traces
from rankwatch.layout import Standing
from rankwatch.reader import RingReader
from rankwatch.recorder import Recorder

REQUEST = wire.TraceRequest("cmd_1", "l.0", (0,), 3)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    identity = {"job": "gpt", "launch": "l", "rank": 0, "world_size": 1}
    recorder = Recorder.create(identity, [str(tmp_path)], monotonic_ns=time.monotonic_ns(), unix_ns=1)
    yield recorder
    recorder.close()


@pytest.fixture
def rank(recorder: Recorder) -> Iterator[LocalRank]:
    reader = RingReader(recorder.path, writable=True)
    yield LocalRank(recorder.path, reader, reader.header, None, 0, 0)
    reader.close()


class Host:
    """The parts of an agent that traces pass through."""

    def __init__(self, rank: LocalRank, folder: Path) -> None:
        self.rank = rank
        self.traces = Traces(HostClock())
        self.relay = Relay([rank], folder / "resume.json", "gpt", lambda _: "")

    def order(self, *requests: wire.TraceRequest, orders: tuple[wire.OrderView, ...] = ()) -> None:
        told = wire.Orders(orders, traces=requests)
        self.traces.ask(told.traces, [self.rank])
        self.relay.apply(told)

    def answer(self, **fields: Any) -> None:
        Path(layout.trace_path(self.rank.path)).write_text(json.dumps(fields))

    def take(self) -> list[tuple[str, int | None, dict[str, Any]]]:
        return [(attempt, event.step, event.fields) for attempt, event in self.traces.take([self.rank])]

    @property
    def slot(self) -> Standing:
        return self.rank.reader.directives.standing


@pytest.fixture
def host(rank: LocalRank, tmp_path: Path) -> Host:
    return Host(rank, tmp_path)


def test_a_request_is_written_into_the_slot_until_the_rank_has_answered(host):
    host.order(REQUEST)
    assert host.slot == Standing("", "cmd_1", 3)
    assert host.take() == []
    host.answer(request="cmd_1", step=7, spans=1)
    assert host.take() == [("l.0", 7, {"request": "cmd_1", "step": 7, "spans": 1})]
    assert host.take() == []
    host.order(REQUEST)
    assert host.slot == Standing()


def test_a_request_that_the_service_withdraws_leaves_the_slot(host):
    host.order(REQUEST)
    host.order()
    assert host.slot == Standing()


@pytest.mark.parametrize(
    "request_", [wire.TraceRequest("cmd_1", "l.1", (0,), 3), wire.TraceRequest("cmd_1", "l.0", (1, 2), 3)]
)
def test_requests_to_other_attempts_and_ranks_are_not_for_this_one(host, request_):
    host.order(request_)
    assert (host.slot, host.take()) == (Standing(), [])


def test_an_open_order_keeps_the_slot_and_the_trace_follows_it(host):
    view = wire.OrderView("o1", "gpt", "l.0", "hold", "pause", step=10)
    host.order(orders=(view,))
    host.order(REQUEST, orders=(view,))
    assert host.rank.reader.directives.read().order == "o1"
    host.order(REQUEST, orders=(msgspec.structs.replace(view, phase="closed"),))
    assert host.slot.trace == "cmd_1"


def test_an_order_during_a_trace_leaves_the_request_in_the_slot(host):
    host.order(REQUEST)
    host.order(REQUEST, orders=(wire.OrderView("o1", "gpt", "l.0", "hold", "pause", step=10),))
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
    assert host.slot == Standing()


def test_a_request_that_an_older_state_of_the_orders_lacks_is_asked_again(host):
    for requests in ((REQUEST,), (), (REQUEST,)):
        host.order(*requests)
    assert host.slot == Standing("", "cmd_1", 3)
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
