"""Whom the agent believes: its own identity with the service, and the orders that it obeys.

The agent's identity with the service: enrolled once for each job and host, and kept in a file.

A new worker goes on with the identity of the one before. The service may stop knowing an identity (another database,
another key, a place that another host took): then the agent enrols again. Only the service that issued the token can
enrol it: it knows the token's enrolment key, or has the certificate. The first agent of a host gets a key for the host
besides; others that read it in this folder are on the same host, whatever somebody else calls theirs.

Checks that orders come from the service: signed by this agent's secret, for this request, in order and in time.

Whoever answers at the service's address without its key can neither make orders nor send old ones again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from rankwatch import layout, wire
from rankwatch.agent.service_connection import FOR_A_PERSON, Reply, ServiceConnection, Unreachable, detail
from rankwatch.signed import Purpose, code_of, host_of, nonce_of, proof_of, sign

ENROL_AGAIN: Final = 409
"""Status by which the service answers a signed message of an agent that it does not know."""

REFUSED_FIRST_S: Final = 5.0
"""Wait after an enrolment that only a person can help: three threads ask for it, and the service takes an address that
sends twenty wrong tokens a minute for one that guesses."""
REFUSED_MAX_S: Final = 30.0
"""The wait doubles up to this; another address or token is tried at once."""

HOST_KEY_S: Final = 10.0
"""How long an agent waits while another of this folder enrols. Then it enrols as if it were on another host."""
HOST_KEY_LOOK_S: Final = 0.05
HOST_KEY_BYTES: Final = 128
_HOST_KEY: Final = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{64})\n")

_log = logging.getLogger(__name__)
_ENROLLED: Final = msgspec.json.Decoder(wire.Enrolled)


class NotEnrolledError(Unreachable):
    """The service did not enrol this agent."""

    def __init__(self, text: str, after_s: float | None, *, for_a_person: bool) -> None:
        super().__init__(text)
        self.after_s = after_s
        self.for_a_person = for_a_person


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The id and the secret of an agent."""

    agent: str
    secret: bytes = field(repr=False)

    def sign(self, purpose: Purpose, message: bytes) -> bytes:
        """The message in its signed form."""
        return sign(purpose, self.agent, self.secret, message)


class Enrolment:
    """Enrols this agent when its first message is due. Thread-safe; one thread enrols, and the others wait for it."""

    def __init__(
        self, path: Path, job: str, connection: ServiceConnection, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the identity that an earlier worker left, if there is one.

        Args:
            path: of the file, in a folder that only this user can enter.
            job: the job.
            connection: to the service; used by nothing else.
            now: seconds of a clock that never goes back.
        """
        self._path = path
        self._job = job
        self._connection = connection
        self._lock = threading.Lock()
        self._host = ""
        self._now = now
        self._refused: NotEnrolledError | None = None
        self._refused_until_s = 0.0
        self._wait_s = REFUSED_FIRST_S
        self._identity = self._stored()

    def introduce(self, host: str) -> None:
        """Store the name of this host, as its ranks report it."""
        self._host = host

    def identity(self, batch: bytes = b"") -> AgentIdentity:
        """The identity to sign with.

        Args:
            batch: what it is for. One that an earlier agent left says which host this is, where no rank has said it.

        Raises:
            Unreachable: the service did not answer, or did not enrol this agent; worth a retry.
        """
        with self._lock:
            if batch and not self._host:
                with contextlib.suppress(msgspec.DecodeError):  # the service refuses it, and says so
                    self._host = wire.decode_batch(batch).host
            if self._identity is None:
                self._identity = self._enrol()
            return self._identity

    def forget(self, identity: AgentIdentity) -> None:
        """Enrol again before the next message: the service does not know this identity."""
        with self._lock:
            if self._identity == identity:
                _log.warning("the service does not know agent %s; it enrols again", identity.agent)
                self._identity = None
                self._path.unlink(missing_ok=True)

    def _enrol(self) -> AgentIdentity:
        if not self._host:
            raise NotEnrolledError("no rank has said yet which host this is", None, for_a_person=False)
        if self._refused is not None and self._now() < self._refused_until_s and self._connection.is_as_before():
            raise self._refused.with_traceback(None)
        if not self._connection.is_provable():
            self._connection.close()  # the next look at it reads address and token anew
            text = "the token has no enrolment key: it was not copied as a whole, or is none with which agents enrol"
            raise NotEnrolledError(text, None, for_a_person=True)
        nonce = secrets.token_hex(16)
        asked = wire.EnrolmentRequest(self._job, self._host, nonce)
        with _host_key_file(self._path.parent, self._host, self._connection.url) as (file, is_mine):
            if known := _host_key(file):
                proof = proof_of(bytes.fromhex(known[1]), nonce, self._job, self._host)
                asked = msgspec.structs.replace(asked, host_id=known[0], host_proof=proof)
            reported = self._ask(asked)
            fresh = host_of(reported.agent), reported.host_key
            if file and is_mine and reported.host_key and fresh != known:
                _keep_host_key(file, *fresh)
        self._store(reported)
        _log.info("enrolled as agent %s", reported.agent)
        return AgentIdentity(reported.agent, bytes.fromhex(reported.secret))

    def _ask(self, asked: wire.EnrolmentRequest) -> wire.Enrolled:
        """Request an identity from the service, and check that this service has issued the token."""
        try:
            answer = self._connection.post("/api/v1/agents/enrol", msgspec.json.encode(asked), "application/json")
        finally:
            self._connection.close()  # the next enrolment may be days away
        if answer.status != 201:
            raise self._refusal(answer)
        self._refused, self._wait_s = None, REFUSED_FIRST_S
        try:
            reported = _ENROLLED.decode(answer.body)
            bytes.fromhex(reported.secret + reported.host_key)
        except (msgspec.DecodeError, ValueError) as error:
            raise Unreachable(f"the answer to the enrolment cannot be read: {error}") from error
        key = self._connection.enrolment_key
        if key and not compare_digest(
            reported.proof.encode(), proof_of(key, asked.nonce, reported.agent, reported.secret).encode()
        ):
            text = f"{self._connection.url} did not issue the token: it does not know its enrolment key"
            raise NotEnrolledError(text, None, for_a_person=True)
        return reported

    def _refusal(self, answer: Reply) -> NotEnrolledError:
        """The service's reason for refusing; it is not asked again before this may have changed."""
        definite = answer.status in FOR_A_PERSON
        text = f"{self._connection.url} does not enrol this agent ({answer.status}): {detail(answer)}"
        refusal = NotEnrolledError(text, answer.retry_after_s, for_a_person=definite or answer.status == 429)
        wait_s = answer.retry_after_s or 0.0
        if definite:
            wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, REFUSED_MAX_S)
        self._refused, self._refused_until_s = refusal, self._now() + wait_s
        return refusal

    def _stored(self) -> AgentIdentity | None:
        try:
            reported = _ENROLLED.decode(self._path.read_bytes())
            return AgentIdentity(reported.agent, bytes.fromhex(reported.secret))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, ValueError) as error:
            _log.warning("the agent's identity cannot be read, so it enrols again: %s", error)
            return None

    def _store(self, reported: wire.Enrolled) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(fresh, flags, 0o600), "w") as file:
                json.dump({"agent": reported.agent, "secret": reported.secret}, file)
            os.replace(fresh, self._path)
        except OSError as error:
            # The next worker enrols again.
            _log.warning("the agent's identity cannot be stored: %s", error)


@contextlib.contextmanager
def _host_key_file(folder: Path, host: str, url: str) -> Iterator[tuple[BinaryIO | None, bool]]:
    """The file with the key of this host, or None if it cannot be had; and whether it may be written: no other agent
    has it.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.fdopen(os.open(layout.host_key_path(str(folder), host, url), flags, 0o600), "r+b", buffering=0)
    except OSError as error:
        _log.warning("the key of this host cannot be kept: %s", error)
        yield None, False
        return
    with opened as file:
        yield file, _is_locked(file)


def _is_locked(file: BinaryIO) -> bool:
    until_s = time.monotonic() + HOST_KEY_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until_s:
                return False
            time.sleep(HOST_KEY_LOOK_S)
        else:
            return True


def _host_key(file: BinaryIO | None) -> tuple[str, str] | None:
    """The id of this host, and its key in hexadecimal; None if there is none yet, or it is cut off."""
    found = _HOST_KEY.fullmatch(file.read(HOST_KEY_BYTES)) if file else None
    return (found[1].decode(), found[2].decode()) if found else None


def _keep_host_key(file: BinaryIO, host_id: str, key: str) -> None:
    try:
        file.seek(0)
        file.truncate()
        file.write(f"{host_id} {key}\n".encode())
    except OSError as error:
        # The next agent of this folder counts as one of another host.
        _log.warning("the key of this host cannot be stored: %s", error)


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
        reported: wire.SignedOrders = _decoded(_SIGNED, body)
        _verify(identity, reported, nonce_of(request))
        with self._lock:
            self._ahead_ns = reported.at_unix_ns - self._monotonic_ns()
        return _decoded(_ORDERS, reported.orders)

    def event(self, identity: AgentIdentity, data: str, request: bytes, sequence: int) -> tuple[wire.Orders, int]:
        """The orders in an event of the stream, and the sequence number of the event.

        Args:
            identity: that the stream was opened for.
            data: of the event.
            request: with which the stream was opened.
            sequence: number of the event before; -1 for the first.

        Raises:
            ForgedOrdersError: they are not from the service, not for this stream, repeated, or expired.
        """
        reported: wire.SignedOrders = _decoded(_SIGNED, data)
        _verify(identity, reported, nonce_of(request))
        if reported.sequence <= sequence:
            raise ForgedOrdersError(f"orders {reported.sequence} came after {sequence}")
        with self._lock:
            ahead_ns = self._ahead_ns
        # Before the first answer to a view nothing is known of the service's clock; the nonce says that it is recent.
        if ahead_ns is not None:
            age_s = (self._monotonic_ns() + ahead_ns - reported.at_unix_ns) / 1e9
            if age_s > wire.ORDERS_VALID_S:
                raise ForgedOrdersError(f"orders expired: they are {age_s:.0f} s old")
        return _decoded(_ORDERS, reported.orders), reported.sequence


def _verify(identity: AgentIdentity, reported: wire.SignedOrders, nonce: str) -> None:
    code = code_of(Purpose.ORDERS, identity.agent, identity.secret, reported.signed_part()).hex()
    if not hmac.compare_digest(code.encode(), reported.code.encode()):
        raise ForgedOrdersError("orders are not signed by the service")
    if reported.nonce != nonce:
        raise ForgedOrdersError("signed orders answer another request")


def _decoded(decoder: msgspec.json.Decoder[T], text: str | bytes) -> T:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ForgedOrdersError(f"orders cannot be read: {error}") from error
