"""Lines in the training output for the person who starts the training: few, and at the start."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Write one line to stderr, independent of logging. Never raises, even if the job has closed stderr."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"rankwatch: {line}\n")
        sys.stderr.flush()
