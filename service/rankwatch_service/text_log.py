"""The service's own text log: one line for each event, on stderr, without secrets."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Any, Final

import structlog

from rankwatch.terminal import printable

FIELD_CHARS_MAX: Final = 4_000
"""Longest text value, since names and errors come from outside."""

_log = structlog.get_logger(__name__)


def configure(level: str, role: str) -> None:
    """Set up logging for this process: readable lines on a terminal, JSON objects elsewhere.

    Libraries' logs, warnings and errors that nothing has caught are lines of the same form.
    """
    number = logging.getLevelNamesMapping()[level.upper()]

    def with_role(
        _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {"role": role, **fields}

    before: list[structlog.typing.Processor] = [
        with_role,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    after: list[structlog.typing.Processor] = [structlog.processors.format_exc_info, _shortened, _renderer()]
    _configure_libraries(number, [*before, structlog.stdlib.add_logger_name], after)
    structlog.configure(
        processors=[*before, *after],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    _log_what_is_not_caught()


def say(message: str) -> None:
    """Write why this process ends to stderr: as a line of the log if it has one that is not on a terminal."""
    if structlog.is_configured() and not sys.stderr.isatty():
        _log.error("ended", reason=message)
    else:
        sys.stderr.write(f"rankwatch: {printable(message)}\n")


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _renderer() -> structlog.typing.Processor:
    if sys.stderr.isatty():
        render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return lambda log, method, event: render(log, method, {name: _shown(value) for name, value in event.items()})
    return structlog.processors.JSONRenderer()


def _configure_libraries(
    number: int, before: list[structlog.typing.Processor], after: list[structlog.typing.Processor]
) -> None:
    """Make the standard library's logging and warnings write lines of the same form."""
    handler = logging.StreamHandler(sys.stderr)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=[remove, *after]))
    logging.basicConfig(level=number, handlers=[handler])
    logging.captureWarnings(True)
    # The HTTP client writes the URL of every request, and that of a webhook is often a secret.
    for library in ("alembic", "httpx2"):
        logging.getLogger(library).setLevel(max(number, logging.WARNING))


def _log_what_is_not_caught() -> None:
    """Log an error that ends the process or a thread, or is raised in a finaliser, as a line as well."""

    def in_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _log.critical("not_caught", exc_info=(kind, error, trace))

    def in_thread(hooked: threading.ExceptHookArgs) -> None:
        if hooked.exc_value is not None:
            in_process(hooked.exc_type, hooked.exc_value, hooked.exc_traceback)

    sys.excepthook = in_process
    threading.excepthook = in_thread
    sys.unraisablehook = lambda hooked: _log.error("not_raised", exc_info=hooked.exc_value)


def _shortened(
    _logger: structlog.typing.WrappedLogger, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in fields.items():
        if isinstance(value, str) and len(value) > FIELD_CHARS_MAX:
            fields[key] = value[:FIELD_CHARS_MAX] + "…"
    return fields
