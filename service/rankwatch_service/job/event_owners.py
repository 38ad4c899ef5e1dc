"""Which rank or host an event belongs to, and who may report it. Pure.

Who sends an event carries a rank of its attempt, or its batch is refused (`attempts.RankOwners`). Of a rank only its
own agent reports, and on a host only an agent of that host, since ranks of other hosts are never its own. This table
says besides which events name a rank, so that nobody reports them of a job as a whole. That a checkpoint is gone counts
only from an agent of one of the ranks that have saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from rankwatch import wire


class Owner(StrEnum):
    """What an event is about."""

    RANK = "rank"
    HOST = "host"
    SAVER = "saver"


OWNERS: Final[Mapping[str, Owner]] = {
    "rank_start": Owner.RANK,
    "rank_left": Owner.RANK,
    "loop_broken_off": Owner.RANK,
    "process_exit": Owner.RANK,
    "exception": Owner.RANK,
    "checkpoint_saved": Owner.RANK,
    "checkpoint_loaded": Owner.RANK,
    "checkpoint_failed": Owner.RANK,
    "checkpoint_succeeded": Owner.RANK,
    "checkpoint_gone": Owner.SAVER,
    "checkpoint_disk": Owner.HOST,
    "location_refused": Owner.HOST,
    "stack_dump": Owner.RANK,
    "native_stack": Owner.RANK,
    "trace": Owner.RANK,
    "agent_start": Owner.HOST,
    "agent_stop": Owner.HOST,
    "records_lost": Owner.HOST,
    "declared": Owner.RANK,
    "device_error": Owner.HOST,
    "device_event": Owner.HOST,
    "switch_error": Owner.HOST,
    "device_lost": Owner.HOST,
    "device_throttled": Owner.HOST,
    "driver_silent": Owner.HOST,
    "driver_answers": Owner.HOST,
    "host_notice": Owner.HOST,
    "note": Owner.HOST,
}
"""Owners by kind. An event of another kind belongs to the host, since only the feed shows it."""


def is_of_a_rank(event: wire.Event) -> bool:
    """Whether an event belongs to a rank and names it."""
    return event.rank is not None and OWNERS.get(event.kind) is Owner.RANK
