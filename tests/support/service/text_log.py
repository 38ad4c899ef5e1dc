"""What a command that runs inside a test sets up for its whole process."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def no_text_log_outlives_its_test() -> Iterator[None]:
    """A log into the captured stderr of a test that has ended would fail whoever logs after it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
