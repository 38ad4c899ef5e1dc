"""Who carries a job's ranks: the agents, or where none has enrolled the hosts, whose batches bring them. Pure.

In a job whose agents have enrolled, a rank of the running attempt belongs to the agent that brought it first. Another
agent may bring it only once that one has been silent. A newer attempt takes over when one of those who carry the
running one brings it, or when the running one has ended or nobody carries it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Ints
from rankwatch_service.telemetry.bundle import Bundle
from rankwatch_service.telemetry.envelope import Envelope

RANK_FREE_S: Final = 10.0
"""Silence of an agent after which another may bring its ranks, as it may enrol in its place."""

ATTEMPT_FREE_S: Final = 5.0
"""Silence of all who carry an attempt after which any other attempt takes over; agents report every second."""

CARRIERS_MIN: Final = 64
"""Carriers of an attempt: so many, or two for each of its ranks if that is more. Further hosts without an agent carry
nothing: whoever makes up names of hosts takes no more memory."""

_NOBODY: Final = -1


class Carriers:
    """Who carries which rank of the running attempt. Memory: 4 bytes for each rank, 100 for each carrier."""

    def __init__(self) -> None:
        self.signed = False
        """Whether an agent of this job has enrolled: from then on unsigned batches are forged."""
        self._numbers: dict[str, int] = {}
        self._heard_s: list[float] = []
        self._of_rank: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def begin(self, *, new_launch: bool) -> None:
        """An attempt begins; in a new launch the ranks are others."""
        if new_launch:
            self._numbers, self._heard_s = {}, []
            self._of_rank = np.zeros(0, dtype=np.int32)

    def objection(self, bundle: Bundle, now_s: float, *, same_ranks: bool) -> str:
        """Why a bundle is forged; empty if it is not. Changes nothing.

        Of several batches also why they must be taken one by one: one of them may decide on a later one.

        Args:
            bundle: of any attempt.
            now_s: stream time.
            same_ranks: whether its ranks are those of the running attempt: it is of the same launch.
        """
        unsigned = next((batch for batch in bundle.batches if not batch.agent), None)
        several = len(bundle.batches) > 1
        if not self.signed:
            return "the first signed batch" if several and any(batch.agent for batch in bundle.batches) else ""
        if unsigned is not None:
            return f"a batch of host {unsigned.host!r} is not signed, and agents of this job have enrolled"
        if not same_ranks:
            return ""
        ranks, mine = self._brought(bundle)
        owners = np.append(self._of_rank, np.int32(_NOBODY))[np.minimum(ranks, len(self._of_rank))]
        silent = np.array([now_s - heard_s > RANK_FREE_S for heard_s in self._heard_s] + [not several])
        others = np.flatnonzero((owners != mine) & ~silent[owners])
        if not len(others):
            return ""
        batch, rank = bundle.batches[0], int(ranks[others[0]])
        return f"agent {batch.agent} of host {batch.host!r} brings rank {rank}, which another agent carries"

    def take(self, bundle: Bundle, now_s: float, ranks: int) -> None:
        """Take a bundle of the running attempt, which has so many ranks, to which there is no objection."""
        for batch in bundle.batches:
            self.signed |= bool(batch.agent)
            full = len(self._numbers) >= max(CARRIERS_MIN, 2 * ranks)
            if full and not batch.agent and _name(batch) not in self._numbers:
                continue
            number = self._numbers.setdefault(_name(batch), len(self._numbers))
            self._heard_s[number : number + 1] = [now_s]
        if not self.signed:
            return
        brought, mine = self._brought(bundle)
        missing = int(brought.max(initial=-1)) + 1 - len(self._of_rank)
        if missing > 0:
            self._of_rank = np.pad(self._of_rank, (0, missing), constant_values=_NOBODY)
        self._of_rank[brought] = mine

    def _brought(self, bundle: Bundle) -> tuple[Ints, Ints]:
        """The ranks that a bundle names, and who brings each: its number, or `_NOBODY` for a new one."""
        numbers = np.array([self._numbers.get(_name(batch), _NOBODY) for batch in bundle.batches])
        ranks, batches = [], []
        for table in bundle.tables.values():
            ranks.append(table.rows.rank)
            batches.append(table.batch)
        for number, batch in enumerate(bundle.batches):
            named = [info.rank for info in batch.ranks] + [block.rank for block in batch.progress]
            named += [event.rank for event in batch.events if event.rank is not None]
            if named:
                ranks.append(np.array(named, dtype=np.int64))
                batches.append(np.full(len(named), number))
        if not ranks:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return np.concatenate(ranks), numbers[np.concatenate(batches)]

    def has(self, batch: Envelope) -> bool:
        """Whether whoever sent this batch carries the running attempt."""
        return _name(batch) in self._numbers

    def silent(self, now_s: float) -> bool:
        """Whether nobody has brought the running attempt for `ATTEMPT_FREE_S`."""
        return now_s - max(self._heard_s, default=-np.inf) > ATTEMPT_FREE_S

    def blind(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything."""
        self._heard_s = [heard_s + seconds for heard_s in self._heard_s]

    def state(self) -> dict[str, Any]:
        """Everything: JSON types and an array."""
        return {
            "signed": self.signed,
            "names": list(self._numbers),
            "heard_s": list(self._heard_s),
            "of_rank": self._of_rank,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Carriers:
        """The object that gave this state."""
        carriers = cls()
        carriers.signed = state["signed"]
        carriers._numbers = {name: number for number, name in enumerate(state["names"])}
        carriers._heard_s, carriers._of_rank = list(state["heard_s"]), state["of_rank"]
        return carriers


def _name(batch: Envelope) -> str:
    """Of who sent a batch. No agent's id is that of a host: a name holds no slash."""
    return batch.agent or f"host/{batch.host}"
