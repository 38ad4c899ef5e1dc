"""The second api process, which answers people: started and kept by the first, see `http.relay`.

    python -m rankwatch_service.api.people_process SOCKET

It has the settings of its environment, and ends when its standard input does, so with the first process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI

from rankwatch import children
from rankwatch_service.access.secret_key import SecretKey, load_secret_key
from rankwatch_service.api.app import create_people_app
from rankwatch_service.api.garbage import collect_in_parts
from rankwatch_service.api.http.relay import LIVE_PATH
from rankwatch_service.api.http.turns import SWITCH_S
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.settings import Settings, as_environment
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import once_it_answers
from rankwatch_service.text_log import configure

LOOK_S: Final = 2.0
"""How often it is looked whether the process runs and answers."""
ANSWER_S: Final = 20.0
"""A process that has listened and does not answer for as long stands still, and is killed."""
RESTART_FIRST_S: Final = 2.0
RESTART_MAX_S: Final = 60.0
"""Pauses before a restart double up to here while processes end within `YOUNG_S`."""
YOUNG_S: Final = 60.0
END_S: Final = 3.0
DRAIN_S: Final = 2
"""How long running requests may take after SIGTERM."""
NICE: Final = 10
"""How far it steps back behind agents and the stream where processor time is short."""

_log = structlog.get_logger(__name__)


class PeopleProcess:
    """Keeps the second process running, from the first."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Start nothing yet."""
        self.socket = Path(tempfile.gettempdir()) / f"rankwatch-api-{secrets.token_hex(8)}" / "people"
        self._environment = {**os.environ, **as_environment(settings)}
        self._clock = clock
        self._child: children.Child | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="people_process", daemon=True)

    def start(self) -> None:
        """Start the process, and another one whenever it ends or stands still."""
        self._thread.start()

    def end(self) -> None:
        """Request its end, and start no other."""
        self._ending.set()
        if (child := self._child) is not None:
            child.terminate()

    def stop(self) -> None:
        """End it and wait until it has ended; call it after `start`."""
        self.end()
        self._thread.join(END_S)
        if (child := self._child) is not None and child.poll() is None:
            child.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def _keep(self) -> None:
        pause_s = RESTART_FIRST_S
        while not self._ending.is_set():
            began_s = self._clock.monotonic_s()
            try:
                why = f"status {self._run()}"
            except OSError as error:
                why = str(error)
            if self._ending.is_set():
                return
            lived_s = self._clock.monotonic_s() - began_s
            pause_s = min(pause_s * 2, RESTART_MAX_S) if lived_s < YOUNG_S else RESTART_FIRST_S
            _log.warning("people_process_died", why=why, restart_in_s=pause_s)
            self._ending.wait(pause_s)

    def _run(self) -> int:
        """Start it, and wait for its end; returns its status, or raises OSError if it cannot be started."""
        self.socket.parent.mkdir(mode=0o700, exist_ok=True)
        command = children.python_module("rankwatch_service.api.people_process", str(self.socket))
        # A session of its own: Ctrl-C reaches the first process, which ends it.
        child = children.start(command, self._environment, stdin=subprocess.PIPE, start_new_session=True)
        self._child = child
        if self._ending.is_set():
            child.terminate()
        assert child.stdin is not None
        with child.stdin:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(LOOK_S)
                if self._stands_still():
                    _log.warning("people_process_stands_still", silent_s=ANSWER_S)
                    child.kill()

    def _stands_still(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(ANSWER_S)
                client.connect(str(self.socket))
                client.sendall(f"GET {LIVE_PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                client.recv(1)
        except TimeoutError:
            return True
        except OSError:  # it does not listen yet, or has just ended
            return False
        return False


class PeopleServer(uvicorn.Server):
    """Serves the application at a path of this machine; the first process adds the headers that all answers have."""

    def __init__(self, app: FastAPI, path: Path) -> None:
        config = uvicorn.Config(
            app,
            uds=str(path),
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
        super().__init__(config)
        self._changes = app.state.context.changes

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop serving: requests that wait for a change are answered at once."""
        self._changes.stop()
        super().handle_exit(sig, frame)


def main(path: Path) -> None:
    """Answer people until standard input ends, or SIGTERM."""
    settings = Settings()
    configure(settings.log_level, "api-people")
    os.nice(NICE)
    sys.setswitchinterval(SWITCH_S)
    engine, clock = open_engine(settings.database_url, "api-people"), SystemClock()

    def secret_key() -> SecretKey:
        return load_secret_key(settings, engine, clock)

    server = PeopleServer(create_people_app(settings, engine, clock, once_it_answers(secret_key, clock)), path)

    def end_with_parent() -> None:
        while os.read(0, 1):
            pass
        server.should_exit = True
        shutil.rmtree(path.parent, ignore_errors=True)  # nobody else does where the first process was killed

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    collect_in_parts(clock)
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
