"""Signed messages: what an agent that has enrolled sends, and what the service answers it. Standard library only.

A signed message is a fixed head and the message itself:

    1 byte    0xC1, which begins no msgpack message and no JSON text
    1 byte    version of this form
    8 bytes   id of the agent
    32 bytes  HMAC-SHA256 by the agent's secret over the purpose, the id and the message
    the rest  the message

The purpose keeps a message of one kind from being sent again as another.
"""

from __future__ import annotations

import hmac
from enum import StrEnum
from hashlib import sha256
from typing import Final, NamedTuple

MARK: Final = 0xC1
VERSION: Final = 1
AGENT_BYTES: Final = 8
CODE_BYTES: Final = 32
HEAD_BYTES: Final = 2 + AGENT_BYTES + CODE_BYTES
HOST_ID_DIGITS: Final = AGENT_BYTES
"""Half of an agent's id: the same for all agents of one host."""


class Purpose(StrEnum):
    """What a signed message is for."""

    BATCH = "batch"
    VIEW = "view"
    LISTEN = "listen"
    ORDERS = "orders"


class Signed(NamedTuple):
    """A signed message in its parts; nothing about it is verified yet."""

    agent: str
    code: bytes
    message: bytes

    def is_by(self, secret: bytes, purpose: Purpose) -> bool:
        """Whether the holder of this secret signed it for this purpose."""
        return hmac.compare_digest(self.code, code_of(purpose, self.agent, secret, self.message))


def code_of(purpose: Purpose, agent: str, secret: bytes, message: bytes) -> bytes:
    """The authentication code of a message.

    Args:
        purpose: what the message is for.
        agent: id of the agent that sends it, or that it is for: 16 hexadecimal digits.
        secret: the agent's.
        message: the bytes to sign.
    """
    return hmac.digest(secret, b"%s\0%s%s" % (purpose.encode(), bytes.fromhex(agent), message), sha256)


def sign(purpose: Purpose, agent: str, secret: bytes, message: bytes) -> bytes:
    """The message in its signed form; arguments as of `code_of`."""
    return bytes((MARK, VERSION)) + bytes.fromhex(agent) + code_of(purpose, agent, secret, message) + message


def proof_of(enrolment_key: bytes, nonce: str, agent: str, secret: str) -> str:
    """What shows an agent that enrols that the answer is from the service that issued its token.

    Args:
        enrolment_key: of the token; it is never sent.
        nonce: of the request.
        agent: id that the answer gives it.
        secret: the secret beside it, in hexadecimal.
    """
    return hmac.digest(enrolment_key, f"{nonce}\0{agent}\0{secret}".encode(), sha256).hex()


def host_of(agent: str) -> str:
    """The id of the host of an agent; empty for the empty id.

    Agents share it that have shown that they read one folder, whatever they call their host.
    """
    return agent[:HOST_ID_DIGITS]


def split(body: bytes) -> Signed | None:
    """The parts of a signed message; None for bytes that are none, or of another version of the form."""
    if len(body) < HEAD_BYTES or body[0] != MARK or body[1] != VERSION:
        return None
    code, message = body[2 + AGENT_BYTES : HEAD_BYTES], body[HEAD_BYTES:]
    return Signed(body[2 : 2 + AGENT_BYTES].hex(), code, message)


def nonce_of(body: bytes) -> str:
    """What the answer to a signed message must bring back: half of the message's own code, which differs each time.

    32 hexadecimal digits, whatever was sent.
    """
    return body[HEAD_BYTES - CODE_BYTES // 2 : HEAD_BYTES].hex()
