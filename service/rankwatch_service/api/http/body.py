"""Limits of request bodies. A body that is too long is refused before it is read or as soon as it exceeds them."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from rankwatch.wire import BATCH_BYTES_MAX

TELEMETRY_PATH: Final = "/api/v1/telemetry"
BODY_BYTES_MAX: Final = 1024 * 1024
"""Limit for all but telemetry: a policy of 200 rules has 60 KB, the view of a host with 1,024 ranks 150 KB."""


def limited(path: str, headers: Headers, receive: Receive) -> Receive:
    """Wrap `receive`, so that it raises a 413 for a body that is too long."""
    limit = BATCH_BYTES_MAX if path == TELEMETRY_PATH else BODY_BYTES_MAX
    length = headers.get("content-length", "0")
    announced = int(length) if length.isdecimal() else 0
    received = 0

    async def limited_receive() -> Message:
        nonlocal received
        if announced <= limit:
            message = await receive()
            received += len(message.get("body", b""))
            if received <= limit:
                return message
        raise HTTPException(413, f"the body is longer than {limit} bytes")

    return limited_receive
