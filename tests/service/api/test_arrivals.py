"""When connections that were accepted begin, and which of them."""

import socket
from collections.abc import Iterator

import pytest

from rankwatch_service.api.http import arrivals
from rankwatch_service.api.http.arrivals import BEGUN_PER_S, AcceptedSocket, Arrivals
from tests.support.clock import FakeClock

AT_ONCE, WAITING = 3, 4


class Listener:
    """Arrivals under a clock, and what has become of them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.arrivals = Arrivals(self.clock, WAITING)
        self._pairs: dict[AcceptedSocket, socket.socket] = {}
        self._names: dict[AcceptedSocket, str] = {}

    def come(self, address: str, name: str = "") -> str | None:
        """A client connects; returns the name of the one that made room."""
        client, accepted = socket.socketpair()
        arrival = AcceptedSocket(accepted, address)
        self._pairs[arrival], self._names[arrival] = client, name or address
        gone = self.arrivals.add(arrival)
        return self._names[gone] if gone else None

    def begun(self) -> list[str]:
        """Those that begin now."""
        names = []
        while arrival := self.arrivals.next():
            self.arrivals.begin()
            names.append(self._names[arrival])
        return names

    def close(self) -> None:
        for arrival, client in self._pairs.items():
            client.close()
            arrival.accepted.close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(arrivals, "BEGUN_AT_ONCE_MAX", AT_ONCE)
    made = Listener()
    yield made
    made.close()


def test_as_many_as_may_be_open_begin_at_once_and_others_at_a_pace(listener: Listener) -> None:
    for name in "abcd":
        listener.come("10.0.0.1", name)
    assert len(listener.begun()) == AT_ONCE
    assert listener.arrivals.wait_s() == pytest.approx(1 / BEGUN_PER_S)
    listener.clock.advance(listener.arrivals.wait_s())
    assert len(listener.begun()) == 1
    assert len(listener.arrivals) == 0
    listener.clock.advance(3_600)
    for name in "efgh":
        listener.come("10.0.0.1", name)
    assert len(listener.begun()) == AT_ONCE  # not what an hour has saved up


def test_one_that_has_come_to_something_gives_its_place_back(listener: Listener) -> None:
    for _ in range(10 * AT_ONCE):  # as through a proxy that connects anew for each request
        listener.come("10.0.0.1")
        assert len(listener.begun()) == 1
        listener.arrivals.give_back()


def test_addresses_take_turns_and_of_an_address_the_newest_is_first(listener: Listener) -> None:
    for name in ("flood 1", "flood 2", "flood 3"):
        listener.come("10.0.0.1", name)
    listener.come("10.0.0.2", "honest")
    assert listener.begun() == ["flood 3", "honest", "flood 2"]


def test_the_oldest_of_the_address_with_most_makes_room(listener: Listener) -> None:
    for name in ("flood 1", "flood 2", "flood 3"):
        assert listener.come("10.0.0.1", name) is None
    assert listener.come("10.0.0.2") is None
    assert listener.come("10.0.0.3") == "flood 1"
    assert len(listener.arrivals) == WAITING


def test_the_addresses_of_an_ipv6_network_are_one(listener: Listener) -> None:
    for number in range(3):
        listener.come(f"2001:db8::{number + 1}", f"flood {number}")
    listener.come("2001:db8:1::1", "honest")
    assert listener.begun() == ["flood 2", "honest", "flood 1"]


def test_who_has_left_is_known_before_it_begins() -> None:
    client, accepted = socket.socketpair()
    with accepted:
        arrival = AcceptedSocket(accepted, "")
        assert not arrival.is_gone()
        client.sendall(b"GET")
        assert not arrival.is_gone()
        assert accepted.recv(3) == b"GET"
        client.close()
        assert arrival.is_gone()
