"""Tunes the garbage collector and malloc for a process that reads telemetry by the megabyte.

Python looks for reference cycles after every 700 new objects; records, batches and columns have none, and reference
counting frees them. The C library returns freed memory to the system, and the next batch pays for every page of it
again. `benchmarks/stream.py --untuned` measures what both save.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

YOUNG_MAX: Final = 20_000
"""New objects between two collections; of some hundred bytes each, so cycles hold 2 MB at most until then."""

KEPT_BYTES: Final = 256 * 1024 * 1024
"""Freed memory that the process keeps: what one read of 32 MB may need as records, columns and frames."""

ASKED_BYTES: Final = 16 * 1024 * 1024
"""Requested from the system at a time. Pages that are not used take no memory."""

MAPPED_BYTES: Final = 32 * 1024 * 1024
"""Larger blocks are mapped and unmapped one by one; glibc allows no higher threshold."""

# From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def tune() -> bool:
    """Collect young objects less often and keep freed memory; older objects are collected as before.

    Returns:
        False if the C library is not glibc and has no such settings, or if it refused one.
    """
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_TOP_PAD, ASKED_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES))
    taken = [mallopt(name, size) for name, size in wanted]
    return 0 not in taken
