"""The service's own text log: one line for each event, on stderr, without secrets."""

from __future__ import annotations

import logging
import sys
from typing import Final

import structlog

FIELD_CHARS_MAX: Final = 4_000
"""Longest text value, since names and errors come from outside."""


def configure(level: str, role: str) -> None:
    """Set up logging for this process: readable lines on a terminal, JSON lines elsewhere."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=number, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    # The HTTP client writes the URL of every request, and that of a webhook is often a secret.
    for library in ("alembic", "httpx2"):
        logging.getLogger(library).setLevel(max(number, logging.WARNING))
    terminal = sys.stderr.isatty()
    last: structlog.typing.Processor
    last = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _shortened,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(role=role)


def _shortened(
    _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in fields.items():
        if isinstance(value, str) and len(value) > FIELD_CHARS_MAX:
            fields[key] = value[:FIELD_CHARS_MAX] + "…"
    return fields
