"""Checks that orders come from the service: signed by this agent's secret, for this request, in order and in time.

Whoever answers at the service's address without its key can neither make orders nor send old ones again.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rankwatch import wire
from rankwatch.agent.access.enrolment import AgentIdentity
from rankwatch.agent.service_connection import Unreachable
from rankwatch.signed import Purpose, code_of, nonce_of

T = TypeVar("T")
_ORDERS = msgspec.json.Decoder(wire.Orders)
_SIGNED = msgspec.json.Decoder(wire.SignedOrders)


class ForgedOrdersError(Unreachable):
    """What arrived as orders is not from the service, or is old. The connection is worth nothing; open another."""


class OrderCheck:
    """Checks the orders on both of an agent's ways. Thread-safe."""

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._ahead_ns: int | None = None
        """The service's time minus the monotonic one, by the newest answer that was to a request of ours."""

    def answer(self, identity: AgentIdentity, body: bytes, request: bytes) -> wire.Orders:
        """The orders in the answer to a signed request.

        Args:
            identity: that signed the request.
            body: of the answer.
            request: as it was sent.

        Raises:
            ForgedOrdersError: they are not from the service, or not for this request.
        """
        told: wire.SignedOrders = _decoded(_SIGNED, body)
        _verify(identity, told, nonce_of(request))
        with self._lock:
            self._ahead_ns = told.at_unix_ns - self._monotonic_ns()
        return _decoded(_ORDERS, told.orders)

    def event(self, identity: AgentIdentity, data: str, nonce: str, sequence: int) -> tuple[wire.Orders, int]:
        """The orders in an event of the stream, and the sequence number of the event.

        Args:
            identity: that the stream was opened for.
            data: of the event.
            nonce: that the stream was opened with.
            sequence: number of the event before; -1 for the first.

        Raises:
            ForgedOrdersError: they are not from the service, not for this stream, repeated, or expired.
        """
        told: wire.SignedOrders = _decoded(_SIGNED, data)
        _verify(identity, told, nonce)
        if told.sequence <= sequence:
            raise ForgedOrdersError(f"orders {told.sequence} came after {sequence}")
        with self._lock:
            ahead_ns = self._ahead_ns
        # Before the first answer to a view nothing is known of the service's clock; the nonce says that it is recent.
        if ahead_ns is not None:
            age_s = (self._monotonic_ns() + ahead_ns - told.at_unix_ns) / 1e9
            if age_s > wire.ORDERS_VALID_S:
                raise ForgedOrdersError(f"orders expired: they are {age_s:.0f} s old")
        return _decoded(_ORDERS, told.orders), told.sequence


def _verify(identity: AgentIdentity, told: wire.SignedOrders, nonce: str) -> None:
    code = code_of(Purpose.ORDERS, identity.agent, identity.secret, told.signed_part()).hex()
    if not hmac.compare_digest(code.encode(), told.code.encode()):
        raise ForgedOrdersError("orders are not signed by the service")
    if told.nonce != nonce:
        raise ForgedOrdersError("signed orders answer another request")


def _decoded(decoder: msgspec.json.Decoder[T], text: str | bytes) -> T:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ForgedOrdersError(f"orders cannot be read: {error}") from error
