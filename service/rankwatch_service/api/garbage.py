"""When a process of the api looks for garbage, which stops all its threads meanwhile.

Python looks when there are many more objects than at the last time. Where thousands of connections come and go there
never are, so that what is looked through at last takes a tenth of a second, and all objects, a million of them, most of
a second. So young objects are looked through often, a few thousand at a time; and all of them, which are nearly always
freed without it, where memory has grown.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Final

from rankwatch_service.clock import Clock

YOUNG_S: Final = 0.1
"""Pause between looks at the objects that came since the last one."""
LOOK_S: Final = 5.0
"""Pause between looks at how many there are."""
GROWN_FACTOR: Final = 2
"""All objects are looked through when there are so many times as many in memory as after the last time, or at the least
since."""
GROWN_BLOCKS: Final = 2_000_000
"""And so many more, some 200 MB: all connections that an api process may have are fewer."""


def collect_in_parts(clock: Clock) -> None:
    """Look for garbage from now on by a thread that ends with the process.

    What exists now (modules, routes, models) is taken to be in use for good.
    """
    gc.disable()
    gc.collect()
    gc.freeze()
    threading.Thread(target=_keep_looking, args=(clock,), name="garbage", daemon=True).start()


def _keep_looking(clock: Clock) -> None:
    had = sys.getallocatedblocks()
    while True:
        for _ in range(round(LOOK_S / YOUNG_S)):
            clock.sleep(YOUNG_S)
            gc.collect(1)
        have = sys.getallocatedblocks()
        if have > max(had * GROWN_FACTOR, had + GROWN_BLOCKS):
            gc.collect()
            have = had = sys.getallocatedblocks()
        had = min(had, have)  # as after a flood, of which the connections have gone
