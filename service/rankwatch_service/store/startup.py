"""The start of a role whose database is away for a moment, as it is when both restart at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from rankwatch_service.clock import Clock
from rankwatch_service.store.errors import StoreBusyError

START_S: Final = 60.0
"""How long a role waits for its database; then it ends, and who supervises it decides."""

RETRY_S: Final = 1.0

Begun = TypeVar("Begun")
_log = structlog.get_logger(__name__)


def once_it_answers(begin: Callable[[], Begun], clock: Clock) -> Begun:
    """What `begin` returns; called again as long as the database is not available.

    Args:
        begin: reads and writes the database; what it did before it failed may be repeated.
        clock: for the pauses.

    Raises:
        StoreBusyError: the database has not been available for `START_S`.
    """
    give_up_s = clock.monotonic_s() + START_S
    while True:
        try:
            return begin()
        except StoreBusyError as error:
            if clock.monotonic_s() >= give_up_s:
                raise
            _log.warning("database_away", error=str(error))
        clock.sleep(RETRY_S)
