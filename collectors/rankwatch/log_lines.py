"""Lines of the agent's log: one JSON object each, as the service writes them."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """Formats a record with the fields that the service's log has: `timestamp` (UTC), `level`, `role` and `event`.

    `logger` names the module, and `exception` has the traceback of an error.
    """

    def __init__(self, role: str) -> None:
        """`role`: of this process."""
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        fields = {
            "role": self._role,
            "logger": record.name,
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": at,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
