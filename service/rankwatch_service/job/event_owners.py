"""Which rank or host an event belongs to, who may report it, and how often a job may declare a change. Pure.

Who sends an event carries a rank of its attempt, or its batch is refused (`attempts.RankOwners`). Of a rank only its
own agent reports, and on a host only an agent of that host, since ranks of other hosts are never its own. This table
says besides which events name a rank, so that nobody reports them of a job as a whole. That a checkpoint is gone counts
only from an agent of one of the ranks that have saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from rankwatch import wire
from rankwatch_detectors.base import Occurrence


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


DECLARATIONS_MAX: Final = 32
"""Changes that a job may declare at once ..."""

DECLARATION_STEPS: Final = 256
"""... and one more after as many steps. With each a curve begins anew, and is not judged until it is learned."""

REMEMBERED_MAX: Final = 64
"""Changes that are known again when another rank declares them too."""


class Declarations:
    """The changes of one job. Memory: `REMEMBERED_MAX` texts."""

    def __init__(self) -> None:
        self._left = float(DECLARATIONS_MAX)
        self._step = 0
        self._known: dict[str, bool] = {}

    def allow(self, declared: Occurrence, last_step: int) -> bool:
        """Whether a change is heeded; one that several ranks declare counts once.

        Args:
            declared: the event.
            last_step: the newest step of the attempt; -1: none yet.
        """
        name = f"{declared.attempt} {declared.step} {declared.fields.get('what')}"[:1_000]
        if name in self._known:
            return self._known[name]
        if last_step >= 0:
            self._left = min(self._left + max(last_step - self._step, 0) / DECLARATION_STEPS, DECLARATIONS_MAX)
            self._step = last_step  # a rollback takes nothing away
        allowed = self._left >= 1.0
        self._left -= allowed
        self._known[name] = allowed
        if len(self._known) > REMEMBERED_MAX:
            del self._known[next(iter(self._known))]
        return allowed

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {"left": self._left, "step": self._step, "known": [[name, ok] for name, ok in self._known.items()]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Declarations:
        """The object that gave this state."""
        declarations = cls()
        declarations._left, declarations._step = state["left"], state["step"]
        declarations._known = dict(state["known"])
        return declarations
