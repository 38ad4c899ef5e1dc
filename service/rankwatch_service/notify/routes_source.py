"""Where the routes come from: a file, or the database, where people put them by REST. Read again when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import structlog
from sqlalchemy import Engine, select

from rankwatch_service.routing.route import Routing
from rankwatch_service.routing.written_routes import read_routes
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Setting

SETTING: Final = "routes"
"""Setting with {text, actor}: the routes that people have put by REST; an empty text: none."""

_log = structlog.get_logger(__name__)


class RoutesError(Exception):
    """The routes cannot be used; the text names the file and the place."""


class RoutesSource(Protocol):
    """Routes that may change while the notifier runs. Not thread-safe."""

    routing: Routing | None
    """Those in force; None: nothing is configured."""
    error: str
    """Why the newest ones are not in force; empty if they are."""
    text: str
    """Those in force, as people wrote them."""
    is_file: bool
    """They cannot be changed by REST."""

    def changed(self) -> bool:
        """Read them again; returns whether others are in force now. Wrong ones are logged and left out."""
        ...


class StoredRoutes:
    """Routes in the database. They were checked when they were stored, maybe by an earlier version."""

    is_file = False

    def __init__(self, engine: Engine) -> None:
        """Nothing is read before `changed`."""
        self._engine = engine
        self.routing: Routing | None = None
        self.error = ""
        self.text = ""

    def changed(self) -> bool:
        """See `RoutesSource.changed`."""
        with read(self._engine) as connection:
            stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {"text": ""}
        text = stored["text"]
        if text == self.text:
            self.error = ""
            return False
        try:
            self.routing = read_routes(text) if text else None
        except ValueError as error:
            if self.error != str(error):
                _log.error("routes_not_reloaded", error=str(error))
            self.error = str(error)
            return False
        self.text, self.error = text, ""
        _log.info("routes_reloaded")
        return True


class RoutesFile:
    """Routes that follow their file: a change takes effect as a whole, or not at all. Not thread-safe."""

    is_file = True

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            RoutesError: it cannot be read, or something in it is wrong.
        """
        self._path = path
        self.text = ""
        self.error = ""
        """Why the newest content of the file is not in force; empty if it is."""
        self.routing: Routing | None = None
        self.routing = self._read()

    def changed(self) -> bool:
        """Read the file again; returns whether other routes are in force now. Wrong ones are logged and left out."""
        text, error_before = self.text, self.error
        try:
            routing = self._read()
        except RoutesError as error:
            self.error = str(error)
            if self.error != error_before:
                _log.error("routes_not_reloaded", error=self.error)
            return False
        self.error = ""
        if text == self.text:
            return False
        self.routing = routing
        _log.info("routes_reloaded", file=str(self._path))
        return True

    def _read(self) -> Routing:
        try:
            text = self._path.read_text(encoding="utf-8")
            routing = self.routing if self.routing and text == self.text else read_routes(text)
        except (OSError, ValueError) as error:
            raise RoutesError(f"{self._path}: {error}") from error
        self.text = text
        return routing
