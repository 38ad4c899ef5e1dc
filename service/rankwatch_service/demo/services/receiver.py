"""A webhook receiver that checks every Standard Webhooks signature and keeps the times of receipt."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rankwatch_service.clock import Clock, SystemClock

BODY_BYTES_MAX = 1024 * 1024
"""Largest body that is read; an incident with a stack dump has about 20 KB."""
AGE_MAX_S = 300
"""Largest difference between a signature's timestamp and now, as in the Standard Webhooks specification."""


@dataclass(frozen=True, slots=True)
class Received:
    """One webhook as received. `verified` is False if the signature, the time stamp or the body is wrong."""

    webhook_id: str
    type: str
    incident: str
    transition: int
    """Number of the incident's transition that it reports."""
    verified: bool
    unix_ns: int


class WebhookReceiver:
    """Listens on a free local port from construction until `close`."""

    def __init__(self, secret: str, clock: Clock | None = None) -> None:
        """Start listening; `secret` is the one that the service signs with: "whsec_" and base64."""
        receipt_clock = clock or SystemClock()
        self._key = base64.b64decode(secret.removeprefix("whsec_"))
        self._received: list[Received] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                now_ns = receipt_clock.unix_ns()
                body = self.rfile.read(min(int(self.headers.get("content-length", 0)), BODY_BYTES_MAX))
                receiver.take(dict(self.headers.items()), body, now_ns)
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                """Keep the terminal for the demo."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL for webhooks."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/rankwatch"

    @property
    def received(self) -> list[Received]:
        """All webhooks so far, in order of receipt."""
        with self._lock:
            return list(self._received)

    def take(self, headers: dict[str, str], body: bytes, now_ns: int) -> None:
        """Verify and keep one delivery."""
        lowered = {name.lower(): value for name, value in headers.items()}
        verified = self._is_genuine(lowered, body, now_ns)
        try:
            message: dict[str, Any] = json.loads(body)
            kind, incident = str(message["type"]), str(message["data"]["id"])
            transition = int(message["data"]["transition"]["number"])
        except (ValueError, KeyError, TypeError):
            kind, incident, transition, verified = "", "", -1, False
        with self._lock:
            self._received.append(Received(lowered.get("webhook-id", ""), kind, incident, transition, verified, now_ns))

    def _is_genuine(self, headers: dict[str, str], body: bytes, now_ns: int) -> bool:
        webhook_id, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
        if not (webhook_id and stamp.isdecimal() and abs(now_ns / 1e9 - int(stamp)) <= AGE_MAX_S):
            return False
        signed = f"{webhook_id}.{stamp}.".encode() + body
        wanted = base64.b64encode(hmac.new(self._key, signed, hashlib.sha256).digest()).decode()
        offered = headers.get("webhook-signature", "").split()
        return any(hmac.compare_digest(f"v1,{wanted}", signature) for signature in offered)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
