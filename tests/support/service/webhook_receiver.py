"""A real HTTP server that receives webhooks and answers as the test sets."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sqlalchemy import Connection, Engine, insert

from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.notify.router import Router
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.store.rows import announcement_row
from tests.support.service.process import serving
from tests.support.values.incidents import receiver_row

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    body: bytes = b""


@dataclass(frozen=True)
class Call:
    path: str
    headers: dict[str, str]
    body: bytes
    at_s: float

    @property
    def message_id(self) -> str:
        return self.headers["webhook-id"]


class WebhookReceiver:
    """Keeps every call; `answer` decides on the reply, by the number of calls before it."""

    def __init__(self, answer: Callable[[int, Call], Answer]):
        self.calls: list[Call] = []
        self._answer = answer
        self._came = threading.Condition()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = self.rfile.read(length)
                if len(body) < length:
                    return  # the sender died in the middle: this never became a message
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Call(self.path, headers, body, time.monotonic())
                with outer._came:
                    answer = outer._answer(len(outer.calls), call)
                    outer.calls.append(call)
                    outer._came.notify_all()
                if answer.delay_s:
                    time.sleep(answer.delay_s)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def handle(self) -> None:
                # The sender was killed or gave up; what counts was kept.
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, *_arguments: object) -> None:
                pass

        return Handler

    @property
    def ids(self) -> list[str]:
        return [call.message_id for call in self.calls]

    def wait_for(self, done: Callable[[list[Call]], bool], deadline_s: float = DEADLINE_S) -> None:
        with self._came:
            assert self._came.wait_for(lambda: done(self.calls), deadline_s), f"after {deadline_s} s: {self.ids}"


@contextmanager
def webhook_receiver(answer: Callable[[int, Call], Answer] = lambda *_: Answer()) -> Iterator[WebhookReceiver]:
    receiver = WebhookReceiver(answer)
    with serving(receiver.server):
        yield receiver


class HeldLease(Lease):
    """Nobody takes it over."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "notify", SystemClock())

    def confirm(self, connection: Connection) -> None:
        pass


def subscribe(engine: Engine, *routes: ReceiverRoute) -> None:
    """Let there be these receivers."""
    lists = ("kinds", "severities", "jobs", "projects", "matchers")
    with write(engine) as connection:
        for route in routes:
            wants = {name: list(getattr(route, name)) for name in lists}
            row = receiver_row(route.name, **wants, enabled=route.enabled, after_s=route.after_s)
            connection.execute(insert(models.Receiver).values(**row))


def announce(engine: Engine, announcements: Iterable[Announcement]) -> None:
    """Write announcements, as stream and api do."""
    if rows := list(map(announcement_row, announcements)):
        with write(engine) as connection:
            connection.execute(insert(models.Announcement), rows)


def route_all(engine: Engine, now_unix_ns: int = 0) -> None:
    """Decide who is notified of all that was announced."""
    router = Router(engine, HeldLease(engine))
    while router.route():
        pass
    router.release(now_unix_ns)
