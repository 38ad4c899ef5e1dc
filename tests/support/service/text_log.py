"""What a command that runs inside a test sets up for its whole process."""

import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def no_text_log_outlives_its_test() -> Iterator[None]:
    """A log into the captured stderr of a test that has ended would fail whoever logs after it."""
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
