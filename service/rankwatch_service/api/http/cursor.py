"""Opaque, signed texts for cursors: what comes back is what was handed out, for the same list, or it is refused."""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import Engine, insert, select

from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Setting

SETTING: Final = "api.seal"
TAG_BYTES: Final = 12
CURSOR_CHARS_MAX: Final = 1_024


class Seal:
    """Signs small JSON values with a key that all api processes of one database share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def close(self, purpose: str, value: Any) -> str:
        """Sign a value for one purpose."""
        content = json.dumps(value, separators=(",", ":")).encode()
        return urlsafe_b64encode(self._tag(purpose, content) + content).decode().rstrip("=")

    def open(self, purpose: str, text: str) -> Any:
        """Take back a value that was signed for this purpose.

        Raises:
            ValueError: it was not, or was changed.
        """
        if len(text) > CURSOR_CHARS_MAX or not text.isascii():
            raise ValueError("not one of ours")
        sealed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        tag, content = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(purpose, content)):
            raise ValueError("not one of ours")
        return json.loads(content)

    def _tag(self, purpose: str, content: bytes) -> bytes:
        return hmac.new(self._key, purpose.encode() + b"\0" + content, sha256).digest()[:TAG_BYTES]


def open_seal(engine: Engine, clock: Clock) -> Seal:
    """The database's seal; the first process to ask makes its key."""
    query = select(Setting.value).where(Setting.name == SETTING)
    with read(engine) as connection:
        stored = connection.scalar(query)
    if stored is None:
        with write(engine) as connection:
            stored = connection.scalar(query)
            if stored is None:
                stored = {"key": secrets.token_hex(32)}
                connection.execute(insert(Setting).values(name=SETTING, value=stored, updated_unix_ns=clock.unix_ns()))
    return Seal(bytes.fromhex(stored["key"]))
