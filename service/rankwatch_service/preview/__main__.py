"""Compares two tunings in a process of its own: `python -m rankwatch_service.preview FILE JOB`.

Both tunings come as JSON on standard input, the answer goes to standard output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from rankwatch_service.preview.compare import compare
from rankwatch_service.tuning.tunings import TuningSet

if __name__ == "__main__":
    os.nice(10)
    path, job = sys.argv[1:]
    before, after = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[TuningSet, TuningSet])
    sys.stdout.buffer.write(msgspec.json.encode(compare(Path(path), job, before, after)))
