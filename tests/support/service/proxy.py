"""A reverse proxy in this process: each request goes to the next of several services, whatever connection it is on."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.support.service.process import serving

PIECE_BYTES = 65_536
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[tuple[str, Counter[tuple[str, int, int]]]]:
    """The URL of a proxy before services on these ports, and how often each (path, port, status) was answered.

    Each path has turns of its own: clients that ask for two paths by turns would else find one service for each.
    """
    turns: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.cycle(ports))
    lock = threading.Lock()
    answered: Counter[tuple[str, int, int]] = Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            with lock:
                port = next(turns[path])
            service = http.client.HTTPConnection("127.0.0.1", port)
            try:
                service.request(self.command, self.path, body, dict(self.headers))
                answer = service.getresponse()
                with lock:
                    answered[path, port, answer.status] += 1
                self._pass_on(answer)
            except (OSError, http.client.HTTPException):
                self.close_connection = True  # either side is gone
            finally:
                service.close()

        do_POST = do_GET  # noqa: N815 - as http.server calls it

        def _pass_on(self, answer: http.client.HTTPResponse) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            if answer.length is None:
                self.send_header("Connection", "close")  # an event stream ends with its connection
            self.end_headers()
            while piece := answer.read1(PIECE_BYTES):
                self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # clients are killed
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}", answered
