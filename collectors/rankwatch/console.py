"""What a person who starts the training must know: lines in the training output, few and at the start."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Write one line to stderr, whatever logging is set up. Never raises: a closed stderr is the job's business."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"rankwatch: {line}\n")
        sys.stderr.flush()
