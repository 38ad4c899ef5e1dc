"""The agent's identity: enrolled once, kept over restarts, renewed where the service does not know it.

Orders are the service's: signed for this agent and this request, in order, and not old.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rankwatch import wire
from rankwatch.agent.endpoint import Endpoint
from rankwatch.agent.enrolment import AgentIdentity, Enrolment, ForgedOrdersError, NotEnrolledError, OrderCheck
from rankwatch.agent.service_connection import ServiceConnection, Unreachable
from rankwatch.agent.uplink import HttpPublisher
from rankwatch.outcome import Accepted, Later, Outcome, Refused
from rankwatch.signed import Purpose, code_of, nonce_of
from rankwatch.trust import Trust
from tests.support.agent.service import TOKEN, AgentService
from tests.support.clock import FakeClock

KEY = bytes(range(16))
BODY = wire.encode(wire.Batch(1, "gpt", "l.0", "h", "b", 0, 0))


@pytest.fixture
def service() -> Iterator[AgentService]:
    with AgentService() as service:
        yield service


def enrolment(service: AgentService, folder: Path, host: str = "h", key: bytes = b"") -> Enrolment:
    endpoint = Endpoint(service.url, TOKEN, Trust(enrolment_key=key))
    made = Enrolment(folder / "gpt.agent.identity", "gpt", ServiceConnection(lambda: endpoint))
    if host:
        made.introduce(host)
    return made


@pytest.fixture
def published(service: AgentService) -> Iterator[Callable[[Enrolment], Outcome]]:
    """Publishes one batch."""
    line = ServiceConnection(lambda: Endpoint(service.url, TOKEN))
    yield lambda enrolled: HttpPublisher(line, enrolled)(BODY)
    line.close()


def test_an_agent_enrols_once_and_its_next_worker_goes_on_with_the_identity(service, tmp_path):
    first = enrolment(service, tmp_path).identity()
    assert list(service.agents) == [first.agent]
    assert service.agents[first.agent] == ("h", first.secret)
    service.stop()
    assert enrolment(service, tmp_path, host="").identity() == first, "without the service, and before any rank"


def test_the_secret_is_for_its_user_alone_and_in_no_text(service, tmp_path):
    identity = enrolment(service, tmp_path).identity()
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert identity.secret.hex() not in repr(identity)


def test_threads_that_need_it_at_once_share_one_identity(service, tmp_path):
    enrolled, found = enrolment(service, tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(enrolled.identity())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1
    assert len(service.agents) == 1


def test_an_agent_that_the_service_does_not_know_enrols_again(service, tmp_path, published):
    enrolled = enrolment(service, tmp_path)
    assert published(enrolled) == Accepted()
    service.agents.clear()  # another database, another key, or a place that another host took
    assert isinstance(published(enrolled), Later)
    assert published(enrolled) == Accepted()
    assert list(service.agents) == [enrolment(service, tmp_path).identity().agent]


def test_before_a_rank_has_named_the_host_there_is_nothing_to_enrol(service, tmp_path, published):
    with pytest.raises(NotEnrolledError, match="which host"):
        enrolment(service, tmp_path, host="").identity()
    assert published(enrolment(service, tmp_path, host="")) == Later("no rank has said yet which host this is")


def test_a_service_that_does_not_enrol_the_agent_is_not_asked_again_at_once(service, tmp_path):
    clock, token = FakeClock(), [TOKEN]
    service.enrols, service.enrolment_key = False, b""
    asked: list[str] = []
    line = ServiceConnection(lambda: Endpoint(service.url, token[0], Trust(enrolment_key=KEY)))
    post = line.post
    line.post = lambda *args: asked.append(token[0]) or post(*args)
    enrolled = Enrolment(tmp_path / "gpt.agent.identity", "gpt", line, clock.monotonic_s)
    enrolled.introduce("h")

    def refused_for(seconds: float) -> int:
        """How often the service is asked, by three threads that try twice a second each."""
        before = len(asked)
        for _ in range(int(6 * seconds)):
            with pytest.raises(NotEnrolledError, match="does not enrol this agent"):
                enrolled.identity()
            clock.advance(1 / 6)
        return len(asked) - before

    assert refused_for(60) == 4, "after 5, 10 and 20 s, then every 30 s"
    assert refused_for(60) == 2
    token[0] = TOKEN + "x"
    assert refused_for(1) == 1, "another token is tried at once"
    service.enrols, service.enrolment_key = True, KEY
    token[0] = TOKEN
    assert enrolled.identity() is not None


def test_a_token_with_an_enrolment_key_is_for_the_service_that_knows_it(service, tmp_path):
    service.enrolment_key = KEY
    identity = enrolment(service, tmp_path, key=KEY).identity()
    assert service.agents[identity.agent][1] == identity.secret


@pytest.mark.parametrize(
    ("own", "known", "enrols"), [(KEY, b"", True), (KEY, bytes(16), True), (KEY, b"", False), (b"", b"", False)]
)
def test_a_service_that_does_not_know_the_enrolment_key_enrols_no_agent_and_gets_nothing(
    service, tmp_path, published, own, known, enrols
):
    service.enrolment_key, service.enrols = known, enrols
    enrolled = enrolment(service, tmp_path, key=own)
    assert isinstance(published(enrolled), Later | Refused)
    with pytest.raises(NotEnrolledError, match=r"not issue the token|does not enrol"):
        enrolled.identity()
    assert service.batches == []
    assert list(tmp_path.iterdir()) == []


def test_an_agent_that_has_enrolled_never_sends_unsigned_again(service, tmp_path):
    identity = enrolment(service, tmp_path).identity()
    service.enrols = False
    assert enrolment(service, tmp_path).identity() == identity


def test_a_file_that_cannot_be_read_is_replaced(service, tmp_path):
    (tmp_path / "gpt.agent.identity").write_text('{"agent": "x", "secret": "not hex"}')
    identity = enrolment(service, tmp_path).identity()
    assert enrolment(service, tmp_path, host="").identity() == identity


def test_nobody_answers(service, tmp_path):
    service.stop()
    with pytest.raises(Unreachable):
        enrolment(service, tmp_path).identity()


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
