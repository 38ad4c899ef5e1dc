"""Secrets of receivers, and signatures of messages as in Standard Webhooks (symmetric, v1)."""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from hashlib import sha256
from typing import Final

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - the public marker, not a secret
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64


def new_secret() -> str:
    """Generate a secret for a receiver: whsec_ and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def signing_key(secret: str) -> bytes:
    """Decode one secret.

    Raises:
        ValueError: it does not begin with whsec_, is not base64, or does not have 24 to 64 bytes.
    """
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError("a receiver's secret must begin with whsec_")
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a receiver's secret must be whsec_ followed by base64") from error
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise ValueError(f"a receiver's secret must have {SECRET_BYTES_MIN}-{SECRET_BYTES_MAX} bytes, not {len(key)}")
    return key


def signed_headers(secret: str, message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The three headers that authenticate a message.

    Args:
        secret: one secret, or two with a space between while the receiver rotates them; each gives a signature.
        message_id: the same in all tries of one message.
        timestamp_s: Unix seconds of this try.
        body: the exact bytes that are sent.

    Raises:
        ValueError: a secret is malformed.
    """
    content = f"{message_id}.{timestamp_s}.".encode() + body
    digests = [hmac.digest(signing_key(one), content, sha256) for one in secret.split()]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join("v1," + base64.b64encode(digest).decode() for digest in digests),
    }
