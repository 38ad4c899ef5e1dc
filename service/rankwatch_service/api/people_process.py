"""The second api process, which answers people: started and kept by the first, see `http.relay`.

    python -m rankwatch_service.api.people_process SOCKET

It has the settings of its environment, and ends when its standard input does, so with the first process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI

from rankwatch import children
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.api.app import create_people_app
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.settings import Settings, as_environment
from rankwatch_service.store.engine import open_engine
from rankwatch_service.text_log import configure

RESTART_S: Final = 2.0
"""Time between the end of one process and the start of the next."""
END_S: Final = 5.0
NICE: Final = 10
"""How far it steps back behind agents and the stream where processor time is short."""

_log = structlog.get_logger(__name__)


class PeopleProcess:
    """Keeps the second process running, from the first."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Start nothing yet.

        Args:
            settings: those of the first process.
            clock: the pause before a restart.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="rankwatch-api-")  # its mode is 0700
        self.socket = Path(self._folder.name) / "people"
        self._environment = {**os.environ, **as_environment(settings)}
        self._clock = clock
        self._child: children.Child | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="people_process", daemon=True)

    def start(self) -> None:
        """Start the process, and another one whenever it ends."""
        self._thread.start()

    def stop(self) -> None:
        """End it; call it once, after `start`."""
        self._stopping.set()
        child = self._child
        if child is not None:
            child.terminate()
        self._thread.join(END_S)
        if child is not None and child.poll() is None:
            child.kill()
        self._folder.cleanup()

    def _keep(self) -> None:
        command = children.python_module("rankwatch_service.api.people_process", str(self.socket))
        while not self._stopping.is_set():
            # A session of its own: Ctrl-C reaches the first process, which ends it.
            self._child = children.start(command, self._environment, stdin=subprocess.PIPE, start_new_session=True)
            if self._stopping.is_set():
                self._child.terminate()
            status = self._child.wait()
            assert self._child.stdin is not None
            self._child.stdin.close()
            if not self._stopping.is_set():
                _log.warning("people_process_died", status=status, restart_in_s=RESTART_S)
                self._clock.sleep(RESTART_S)


def people_server(app: FastAPI, socket: Path) -> uvicorn.Server:
    """A server of the application, at this path; the first process adds the headers that all answers have."""
    config = uvicorn.Config(
        app,
        uds=str(socket),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )
    return uvicorn.Server(config)


def main(socket: str) -> None:
    """Answer people until standard input ends, or SIGTERM."""
    settings = Settings()
    configure(settings.log_level, "api")
    os.nice(NICE)
    engine, clock = open_engine(settings.database_url, "api"), SystemClock()
    app = create_people_app(settings, engine, clock, load_secret_key(settings, engine, clock))
    server = people_server(app, Path(socket))

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True
        shutil.rmtree(Path(socket).parent, ignore_errors=True)  # nobody else does where the first was killed

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.run()
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1])
