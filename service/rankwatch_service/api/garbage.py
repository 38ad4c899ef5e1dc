"""When a process of the api looks for garbage among all its objects, which stops its threads for most of a second.

Thousands of connections are a million objects, and Python looks through them whenever a quarter more have come and
gone: every few seconds. Nearly all of them are freed without it, as soon as nothing refers to them; so it is done where
memory has grown. Young objects are looked through as usual.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Final

from rankwatch_service.clock import Clock

GROWN_FACTOR: Final = 2
"""All objects are looked through when there are so many times as many in memory as after the last time, or at the least
since."""
LOOK_S: Final = 5.0
"""Pause between looks at how many there are."""
NEVER: Final = 2**31 - 1


def collect_rarely(clock: Clock) -> None:
    """Look through all objects only when memory has grown, by a thread that ends with the process.

    What exists now (modules, routes, models) is taken to be in use for good.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    gc.collect()
    gc.freeze()
    threading.Thread(target=_keep_looking, args=(clock,), name="garbage", daemon=True).start()


def _keep_looking(clock: Clock) -> None:
    had = sys.getallocatedblocks()
    while True:
        clock.sleep(LOOK_S)
        have = sys.getallocatedblocks()
        if have > had * GROWN_FACTOR:
            gc.collect()
            have = had = sys.getallocatedblocks()
        had = min(had, have)  # as after a flood, of which the connections have gone
