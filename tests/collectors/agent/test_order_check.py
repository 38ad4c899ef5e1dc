"""Orders are the service's: signed for this agent and this request, in order, and not old."""

import msgspec
import pytest

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity, ForgedOrdersError, OrderCheck
from rankwatch.signed import Purpose, code_of, nonce_of

S = 10**9
IDENTITY = AgentIdentity("00112233445566aa", bytes(range(32)))
ORDERS = wire.Orders((wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch"),))


class Time:
    """A clock that a test sets."""

    ns = 5 * S

    def __call__(self) -> int:
        return self.ns


def told(nonce: str, sequence: int = 0, at_s: float = 1_000.0, secret: bytes = IDENTITY.secret) -> bytes:
    """What a service with this secret says."""
    orders = wire.SignedOrders(msgspec.json.encode(ORDERS).decode(), nonce, sequence, int(at_s * S))
    code = code_of(Purpose.ORDERS, IDENTITY.agent, secret, orders.signed_part()).hex()
    return msgspec.json.encode(msgspec.structs.replace(orders, code=code))


def test_orders_of_the_service_are_taken_on_both_ways():
    check, request = OrderCheck(), IDENTITY.sign(Purpose.VIEW, b"view")
    assert check.answer(IDENTITY, told(nonce_of(request)), request) == ORDERS
    assert check.event(IDENTITY, told("n", 3).decode(), "n", 2) == (ORDERS, 3)


def test_orders_that_are_not_signed_or_by_somebody_else_are_not_taken():
    check, request = OrderCheck(), IDENTITY.sign(Purpose.VIEW, b"view")
    for body in (msgspec.json.encode(ORDERS), told(nonce_of(request), secret=bytes(32)), b"{", b""):
        with pytest.raises(ForgedOrdersError):
            check.answer(IDENTITY, body, request)
        with pytest.raises(ForgedOrdersError):
            check.event(IDENTITY, body.decode(), nonce_of(request), -1)


@pytest.mark.parametrize(
    "changed",
    [
        {"orders": '{"orders": []}'},
        {"nonce": "another"},
        {"sequence": 9},
        {"at_unix_ns": 2_000 * S},
        {"code": ""},
        {"code": "ü"},
    ],
)
def test_every_field_is_signed(changed):
    on_its_way = msgspec.json.decode(told("n")) | changed
    with pytest.raises(ForgedOrdersError, match="not signed"):
        OrderCheck().event(IDENTITY, msgspec.json.encode(on_its_way).decode(), changed.get("nonce", "n"), -1)


def test_the_answer_to_another_request_is_not_taken():
    first, second = (IDENTITY.sign(Purpose.VIEW, body) for body in (b"1", b"2"))
    with pytest.raises(ForgedOrdersError, match="another request"):
        OrderCheck().answer(IDENTITY, told(nonce_of(first)), second)
    with pytest.raises(ForgedOrdersError, match="another request"):
        OrderCheck().event(IDENTITY, told("an earlier stream").decode(), "this stream", -1)


def test_an_event_that_comes_again_or_late_is_not_taken():
    check = OrderCheck()
    for sequence in (4, 5):
        with pytest.raises(ForgedOrdersError, match="came after 5"):
            check.event(IDENTITY, told("n", sequence).decode(), "n", 5)


def test_an_event_that_was_held_back_expires_by_the_service_s_clock():
    time = Time()
    check, request = OrderCheck(time), IDENTITY.sign(Purpose.VIEW, b"view")
    held_back = told("n", 1, at_s=1_000.0).decode()
    check.answer(IDENTITY, told(nonce_of(request), at_s=1_000.0), request)
    time.ns += int(wire.ORDERS_VALID_S * S)
    assert check.event(IDENTITY, held_back, "n", 0) == (ORDERS, 1)
    time.ns += S
    with pytest.raises(ForgedOrdersError, match="expired"):
        check.event(IDENTITY, held_back, "n", 0)
