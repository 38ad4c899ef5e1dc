"""The demo's service and the receiver of its webhooks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2

from rankwatch import children
from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.processes import ChildError, end, started

START_S = 60.0
"""Limit for the start of the service; the first start creates its tables."""
STOP_S = 10.0
"""Time for the service to end before it is killed."""
ANSWER_S = 10.0
TRY_PAUSE_S = 0.25
TRY_FOR_S = 60.0
"""Time for retries: an api that died is back in two seconds, or in twenty on an overloaded machine."""
TOKEN_S = 24 * 3_600.0
"""Lifetime of the demo's token; `--keep` leaves the service up for a while."""
LOGIN = re.compile(r"(https?://\S+)/login#(\S+)")
"""The login link that `up` prints."""


class ServiceError(RuntimeError):
    """The service did not start, or refused a request."""


class ServiceProcess:
    """Runs from `start` to `stop`. `url` and `token` are known once it has started."""

    def __init__(self, folder: Path, port: int, environment: Mapping[str, str]) -> None:
        """Prepare the service; it runs from `start` on.

        Args:
            folder: its data folder.
            port: its port; 0: any free one.
            environment: its environment, which should not contain the user's own configuration.
        """
        self._folder = folder
        self._log = folder / "service.log"
        self._environment = environment
        self._port = port
        self._process: children.Child | None = None
        self._client = httpx2.Client(timeout=ANSWER_S)
        self._login = ""
        self.url = ""
        self.token = ""

    def start(self) -> None:
        """Start the service and wait until it answers.

        Raises:
            ServiceError: it ended, or did not answer within `START_S`; the message has the end of its output.
        """
        arguments = ("up", "--data", str(self._folder), "--port", str(self._port))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)  # the login link of an earlier start is no longer valid
        command = children.python_module("rankwatch_service", *arguments)
        try:
            self._process = started(command, self._log, self._answers, START_S, env=dict(self._environment))
        except ChildError as error:
            raise ServiceError(f"the service does not answer; its output:\n{error}") from error
        self._log_in()

    def stop(self) -> None:
        """Stop the service with all its roles."""
        self._client.close()
        if self._process is not None:
            end(self._process, STOP_S)

    @property
    def login_url(self) -> str:
        """A link to the dashboard that logs in."""
        return f"{self.url}/login#{self.token}"

    def login_link(self) -> str:
        """A link to the dashboard that logs in once, within 10 minutes.

        Raises:
            ServiceError: no link could be made; the message has the output of the command.
        """
        command = children.python_module("rankwatch_service", "token", "login", "--data", str(self._folder))
        made = children.run(command, self._environment, capture_output=True, text=True, check=False)
        link = LOGIN.search(made.stdout)
        if link is None:
            raise ServiceError(f"no login link: {made.stderr.strip()}")
        return link.group()

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Read one resource."""
        return self._ask("GET", path, parameters=parameters)

    def find(self, path: str) -> dict[str, Any]:
        """Read one resource; {} if it does not exist yet."""
        return self._ask("GET", path, missing_ok=True)

    def items(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        """Read a whole list, page by page."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = self._ask("GET", path, parameters={**parameters, **cursor})
            found += page["items"]
            if not page.get("next_cursor"):
                return found
            cursor = {"cursor": page["next_cursor"]}

    def write(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write one resource exactly once, with retries."""
        return self._ask(method, path, body=body, key=uuid.uuid4().hex)

    def _answers(self) -> bool:
        login = LOGIN.search(self._log.read_text())
        if login is None:
            return False
        self.url, self._login = login.groups()
        try:
            return self._client.get(f"{self.url}/readyz").status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False

    def _log_in(self) -> None:
        """Log in like a browser, and create a token for the rest of the demo."""
        origin = {"Origin": self.url}
        self._client.post(f"{self.url}/api/v1/session", json={"token": self._login}, headers=origin).raise_for_status()
        wanted = {"name": "demo", "scopes": ["admin"], "expires_s": TOKEN_S}
        made = self._client.post(f"{self.url}/api/v1/tokens", json=wanted, headers=origin)
        made.raise_for_status()
        self.token = made.json()["token"]
        self._client.cookies.clear()

    def _ask(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        key: str = "",
        missing_ok: bool = False,
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}"} | ({"Idempotency-Key": key} if key else {})
        said = ""
        deadline_s = time.monotonic() + TRY_FOR_S
        while time.monotonic() < deadline_s:
            try:
                answer = self._client.request(
                    method, f"{self.url}{path}", params=parameters, json=body, headers=headers
                )
            except httpx2.TransportError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    content: dict[str, Any] = answer.json() if answer.content else {}
                    return content
                if missing_ok and answer.status_code == httpx2.codes.NOT_FOUND:
                    return {}
                said = f"{answer.status_code} {answer.text[:500]}"
                if answer.status_code < httpx2.codes.INTERNAL_SERVER_ERROR:
                    break
            time.sleep(TRY_PAUSE_S)
        raise ServiceError(f"{method} {path}: {said}")


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

    def __init__(self, secret: str) -> None:
        """Start listening; `secret` is the one that the service signs with: "whsec_" and base64."""
        clock = SystemClock()
        self._key = base64.b64decode(secret.removeprefix("whsec_"))
        self._received: list[Received] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                now_ns = clock.unix_ns()
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
