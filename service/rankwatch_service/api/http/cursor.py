"""Cursors of lists: opaque and signed. A cursor that was changed, or that belongs to another list, is refused."""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any, Final

TAG_BYTES: Final = 12
CURSOR_CHARS_MAX: Final = 1_024


class CursorSigner:
    """Signs cursors with a key that all api processes of one database share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encode(self, list_name: str, place: Any) -> str:
        """Make the cursor of a place, which is any small JSON value, in one list."""
        content = json.dumps(place, separators=(",", ":")).encode()
        return urlsafe_b64encode(self._tag(list_name, content) + content).decode().rstrip("=")

    def decode(self, list_name: str, text: str) -> Any:
        """The place that a cursor of this list stands for.

        Raises:
            ValueError: it is malformed, was changed, or belongs to another list.
        """
        if len(text) > CURSOR_CHARS_MAX or not text.isascii():
            raise ValueError("not a cursor of this list")
        signed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        tag, content = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(list_name, content)):
            raise ValueError("not a cursor of this list")
        return json.loads(content)

    def _tag(self, list_name: str, content: bytes) -> bytes:
        return hmac.new(self._key, list_name.encode() + b"\0" + content, sha256).digest()[:TAG_BYTES]
