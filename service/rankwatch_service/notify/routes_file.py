"""The file of routes: read when the notifier starts, and again whenever it has changed."""

from __future__ import annotations

from pathlib import Path

import structlog

from rankwatch_service.routing.route import Routing
from rankwatch_service.routing.written_routes import read_routes

_log = structlog.get_logger(__name__)


class RoutesError(Exception):
    """The routes cannot be used; the text names the file and the place."""


class RoutesFile:
    """Routes that follow their file: a change takes effect as a whole, or not at all. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            RoutesError: it cannot be read, or something in it is wrong.
        """
        self._path = path
        self._text = ""
        self.error = ""
        """Why the newest content of the file is not in force; empty if it is."""
        self.routing = self._read()

    def changed(self) -> bool:
        """Read the file again; returns whether other routes are in force now. Wrong ones are logged and left out."""
        text, error_before = self._text, self.error
        try:
            routing = self._read()
        except RoutesError as error:
            self.error = str(error)
            if self.error != error_before:
                _log.error("routes_not_reloaded", error=self.error)
            return False
        self.error = ""
        if text == self._text:
            return False
        self.routing = routing
        _log.info("routes_reloaded", file=str(self._path))
        return True

    def _read(self) -> Routing:
        try:
            text = self._path.read_text(encoding="utf-8")
            routing = self.routing if self._text and text == self._text else read_routes(text)
        except (OSError, ValueError) as error:
            raise RoutesError(f"{self._path}: {error}") from error
        self._text = text
        return routing
