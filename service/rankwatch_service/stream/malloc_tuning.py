"""How a process that takes in telemetry by the megabyte treats its memory.

Python looks for cycles of garbage after every 700 new objects; records, batches and columns have none, and counting
references frees them. The C library gives memory back as soon as it is freed, and the next batch then pays for every
page of it again. `benchmarks/stream.py` measures what both save, by `--untuned`.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

YOUNG_MAX: Final = 20_000
"""Objects between two looks; of some hundred bytes each, so that cycles hold 2 MB at most until they are found."""

KEPT_BYTES: Final = 256 * 1024 * 1024
"""Freed memory that the process keeps: what the most that is read at once, 32 MB, may need as records, columns and
frames."""

ASKED_BYTES: Final = 16 * 1024 * 1024
"""Asked of the system at a time. Only what is used of it counts."""

MAPPED_BYTES: Final = 32 * 1024 * 1024
"""Larger pieces come from the system and go back to it one by one; glibc takes no higher bound."""

# From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def tune() -> bool:
    """Look for cycles seldom, and keep what is freed; returns False where the C library cannot be told to (not glibc).

    Older objects are looked at as seldom as before.
    """
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_TOP_PAD, ASKED_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES))
    taken = [mallopt(name, size) for name, size in wanted]
    return 0 not in taken
