"""How long from the commit of an announcement to its webhook received, with a real notifier process on SQLite.

    python benchmarks/notify.py [--samples 300] [--rate 20]

Measured twice: alone, and beside receivers in trouble, each sent the same: one that takes 60 s to answer, one whose TLS
handshake stalls, one that answers 503, one 429 with Retry-After, one a redirect, one 410, and one whose name leads to a
metadata service by the time of the try, as after a DNS rebinding. Says besides what became of the messages to these:
none may be lost but those to the receiver that is gone. fsync is on, as in production.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sqlalchemy import Engine, func, insert, select

from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.receiver_types.base import new_secret
from rankwatch_service.policy.notification import message_id
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Announcement, Delivery, Outbox, Receiver

DEADLINE_S = 60.0
HANG_S = 60.0
RUN = (
    "import sys; from rankwatch_service.notify.serve import run; from rankwatch_service.settings import Settings;"
    "run(Settings(database_url=sys.argv[1], data_dir=sys.argv[2], notify_allow_private=True, log_level='ERROR'))"
)


ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "/storm": (503, {}),
    "/busy": (429, {"retry-after": "30"}),
    "/moved": (302, {"location": "/good"}),
    "/gone": (410, {}),
}


class Receiving(BaseHTTPRequestHandler):
    """Keeps when each message came first; the path says how to answer."""

    came: dict[str, float] = {}  # noqa: RUF012 - one benchmark, one set of arrivals

    def do_POST(self) -> None:
        """Take one webhook."""
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/hang":
            time.sleep(HANG_S)
        elif self.path == "/good":
            self.came.setdefault(self.headers["webhook-id"], time.monotonic())
        status, headers = ANSWERS.get(self.path, (204, {}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


def tell(engine: Engine, project: str, name: str) -> float:
    """Commit one announcement of an incident; returns when the commit returned.

    Args:
        engine: of the database.
        project: "alone" concerns the good receiver, "beside" all of them.
        name: of the incident, and of its job, so that there are never too many messages like it.
    """
    now = time.time_ns()
    labels = {"kind": "hang", "severity": "critical", "job": name, "project": project, "scope": "job"}
    about = {
        "incident_id": name,
        "transition": 1,
        "command_id": "",
        "labels": labels,
        "kinds": ["hang"],
        "places": ["job"],
    }
    times = {"detected_unix_ns": now, "at_unix_ns": now}
    row = {"type": "incident.opened", "job": name, "data": {"id": name, "job": name}, **about, **times}
    with write(engine) as connection:
        connection.execute(insert(Announcement).values(row))
    return time.monotonic()


def measure(engine: Engine, project: str, samples: int, rate: float) -> list[float]:
    """Seconds from commit to arrival at the good receiver."""
    committed: dict[str, float] = {}
    for number in range(samples):
        name = f"{project}{number}"
        committed[message_id(name, 1, "good")] = tell(engine, project, name)
        time.sleep(1 / rate)
    deadline_s = time.monotonic() + DEADLINE_S
    while not committed.keys() <= Receiving.came.keys():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all notifications arrived within {DEADLINE_S} s")
        time.sleep(0.01)
    return [max(0.0, Receiving.came[one] - at_s) for one, at_s in committed.items()]


def stalling() -> socket.socket:
    """A port that accepts connections and never says a word, so that a TLS handshake stalls."""
    return socket.create_server(("127.0.0.1", 0), backlog=1_024)


def outcomes(engine: Engine) -> list[tuple[str, str, int, str]]:
    """For each receiver in trouble: state of its messages, how many, and the newest error."""
    newest = select(func.max(Delivery.id)).join(Outbox, Outbox.id == Delivery.outbox_id).group_by(Outbox.receiver)
    of = select(Outbox.receiver, Delivery.error).join(Outbox, Outbox.id == Delivery.outbox_id)
    counted = select(Outbox.receiver, Outbox.state, func.count()).where(Outbox.receiver != "good")
    with read(engine) as connection:
        errors = {one.receiver: one.error for one in connection.execute(of.where(Delivery.id.in_(newest)))}
        rows = connection.execute(counted.group_by(Outbox.receiver, Outbox.state).order_by(Outbox.receiver)).all()
    return [(receiver, state, count, errors.get(receiver, "no try has ended")) for receiver, state, count in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--rate", type=float, default=20.0)
    options = parser.parse_args()
    ThreadingHTTPServer.request_queue_size = 1_024
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiving)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stall = stalling()
    here = f"http://127.0.0.1:{server.server_port}"
    urls = {name: f"{here}/{name}" for name in ("good", "hang", "storm", "busy", "moved", "gone")}
    urls["tls"] = f"https://127.0.0.1:{stall.getsockname()[1]}/"
    urls["rebound"] = "http://169.254.169.254/latest"
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder) / 'rankwatch.db'}")
        upgrade(engine)
        settings = Settings(database_url=str(engine.url), data_dir=Path(folder))
        key = load_secret_key(settings, engine, SystemClock())
        for name, url in urls.items():
            row = {"name": name, "url": key.encrypt(url), "secret": key.encrypt(new_secret())}
            projects = [] if name == "good" else ["beside"]
            lists = {"kinds": [], "severities": [], "jobs": [], "projects": projects, "created_unix_ns": 0}
            with write(engine) as connection:
                connection.execute(insert(Receiver).values(**row, **lists))
        notifier = subprocess.Popen([sys.executable, "-c", RUN, str(engine.url), folder])
        try:
            measure(engine, "warm", 5, options.rate)
            alone = measure(engine, "alone", options.samples, options.rate)
            beside = measure(engine, "beside", options.samples, options.rate)
        finally:
            notifier.terminate()
            notifier.wait()
        became = outcomes(engine)
        engine.dispose()
    stall.close()
    server.shutdown()
    print(f"{options.samples} notifications at {options.rate:g}/s, fsync on")
    print(f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores")
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}")
    print("| committed -> received, ms | median | p95 | p99 | max |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for label, seconds in (("one receiver", alone), ("beside seven receivers in trouble", beside)):
        quantiles = statistics.quantiles(seconds, n=100)
        row = (quantiles[49], quantiles[94], quantiles[98], max(seconds))
        print(f"| {label} | " + " | ".join(f"{value * 1000:.0f}" for value in row) + " |")
    print("| receiver in trouble | state | messages | newest error |")
    print("| --- | --- | ---: | --- |")
    for receiver, state, count, error in became:
        print(f"| {receiver} | {state} | {count} | {error} |")


if __name__ == "__main__":
    main()
