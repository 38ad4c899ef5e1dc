"""The newest progress block of every rank of an attempt, and whether ranks go in lockstep. Pure.

Detects ranks that go at their own pace although they are reported to train in lockstep.

Synchronous training keeps all ranks within a few steps of each other. A progress block is up to some seconds old, so a
rank may seem to be behind by as many steps as the job makes in that time. A larger distance means that the ranks do not
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Bools, Floats, Presence

GONE_STATES: Final = frozenset({"left", "exited"})
"""States after which a rank does not report again."""

TIMES: Final = ("received_s", "sent_s")
FLOATS: Final = (*TIMES, "phase_age_s", "step_age_s", "cpu_s", "outside_s")
"""Columns of numbers, named as in `Presence` and, but for the times, in `wire.Progress`."""
TEXTS: Final = ("phase", "state", "os_state", "doing")
"""Columns of texts."""


class ProgressBoard:
    """Keeps progress by rank, as arrays for the detectors. Memory: about 200 bytes for each rank."""

    def __init__(self, attempt: str, world_size: int) -> None:
        self.attempt = attempt
        self._reported = np.zeros(world_size, dtype=bool)
        self._floats = {name: np.zeros(world_size) for name in FLOATS}
        self._floats["outside_s"] -= 1.0
        self._ints = {"step": np.full(world_size, -1), "collective_seq": np.zeros(world_size, dtype=np.int64)}
        self._texts = {name: [""] * world_size for name in TEXTS}

    @property
    def world_size(self) -> int:
        """Number of ranks on the board."""
        return len(self._reported)

    def apply(self, batches: Iterable[wire.Batch], now_s: float) -> list[tuple[int, str]]:
        """Apply the progress blocks of newer batches, in their order; ranks beyond the world size are ignored.

        Returns:
            (rank, state) of each rank that has left or exited since its last block.
        """
        world_size = self.world_size
        reported = [(block, batch) for batch in batches for block in batch.progress if block.rank < world_size]
        if not reported:
            return []
        known = [block for block, _ in reported]
        ranks = np.array([block.rank for block in known], dtype=np.intp)
        self._reported[ranks] = True
        self._floats["received_s"][ranks] = now_s
        # Of several blocks of one rank the last counts, since NumPy assigns in order. A sender may leave its time 0.
        self._floats["sent_s"][ranks] = [batch.sent_unix_ns / 1e9 or now_s for _, batch in reported]
        for name, column in (self._floats | self._ints).items():
            if name not in TIMES:
                column[ranks] = list(map(attrgetter(name), known))
        phases, os_states, states, doing = (self._texts[name] for name in ("phase", "os_state", "state", "doing"))
        gone = []
        for block in known:
            rank = block.rank
            phases[rank], os_states[rank], doing[rank] = block.phase, block.os_state, block.doing
            if states[rank] != block.state:
                self._set_state(rank, block.state)
                if block.state in GONE_STATES:
                    gone.append((rank, block.state))
        return gone

    def depart(self, rank: int, state: str, *, broken_off: bool = False) -> None:
        """Record that a rank has left or exited, which an event reports before a progress block does.

        Args:
            rank: the rank; ignored beyond the world size.
            state: left or exited.
            broken_off: whether an error ended its loop. Then the state replaces `left`, which a progress block may say.
        """
        if rank < self.world_size:
            if broken_off:
                self._texts["state"][rank] = state
            self._set_state(rank, state)

    def _set_state(self, rank: int, state: str) -> None:
        # A rank that finished its loop has not crashed when its process ends later.
        if self._texts["state"][rank] != "left":
            self._texts["state"][rank] = state

    def discount_outage(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything, so that no rank counts as silent for it."""
        self._floats["received_s"] += seconds

    def resize(self, world_size: int) -> None:
        """Make room for the ranks of a larger world size; it never shrinks."""
        more = world_size - self.world_size
        self._reported = np.pad(self._reported, (0, more))
        self._floats = {name: np.pad(column, (0, more)) for name, column in self._floats.items()}
        self._ints = {name: np.pad(column, (0, more)) for name, column in self._ints.items()}
        self._ints["step"][world_size - more :] = -1
        for column in self._texts.values():
            column.extend([""] * more)

    def departed(self) -> bool:
        """Whether every rank has left or exited."""
        return all(state in GONE_STATES for state in self._texts["state"])

    def left(self) -> bool:
        """Whether every rank has finished its training loop."""
        return all(state == "left" for state in self._texts["state"])

    def reporting(self, now_s: float, within_s: float) -> int:
        """Number of ranks that reported in the last `within_s` and have neither left nor exited."""
        recent = self._reported & (now_s - self._floats["received_s"] <= within_s)
        return sum(self._texts["state"][rank] not in GONE_STATES for rank in np.flatnonzero(recent))

    def any_in(self, phases: Collection[str]) -> bool:
        """Whether any rank that has neither left nor exited is in one of these phases."""
        reported = zip(self._texts["phase"], self._texts["state"], strict=True)
        return any(phase in phases and state not in GONE_STATES for phase, state in reported)

    def presence(self) -> Presence:
        """A copy for the detectors."""
        columns: dict[str, Any] = {name: column.copy() for name, column in (self._floats | self._ints).items()}
        columns |= {name: tuple(column) for name, column in self._texts.items()}
        return Presence(attempt=self.attempt, has_reported=self._reported.copy(), **columns)

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays."""
        return {
            "attempt": self.attempt,
            "has_reported": self._reported,
            "floats": self._floats,
            "ints": self._ints,
            "texts": self._texts,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> ProgressBoard:
        """The board that gave this state."""
        board = cls(state["attempt"], len(state["has_reported"]))
        board._reported, board._ints, board._floats = state["has_reported"], state["ints"], state["floats"]
        board._texts = {name: list(column) for name, column in state["texts"].items()}
        return board


FRESH_S: Final = 5.0
"""Blocks that are older, or whose delay changed by more than this, are ignored."""

APART_STEPS: Final = 8.0
"""Ranks in lockstep may seem this many steps apart ..."""

APART_S: Final = 10.0
"""... and as many more as the fastest rank makes in this time: twice `FRESH_S`."""

LOOKS: Final = 10
"""How many checks in a row, about one a second, must find the ranks apart."""


class LockstepCheck:
    """Counts the steps of each rank from a common start. Memory: 24 bytes for each rank."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._step: Floats = np.zeros(0)
        self._sent_s: Floats = np.zeros(0)
        self._last: Floats = np.zeros(0)
        self._looks = 0

    def has_failed(self, seen: Presence, now_s: float) -> bool:
        """Whether the newest blocks show that ranks go at their own pace; call it once for each tick."""
        running = seen.has_reported & (now_s - seen.received_s <= FRESH_S)
        running &= seen.where("state", "running")
        # Begin again if a rank reports for the first time, or its loop counts from the start.
        if self._last.size != running.size or not (seen.step >= self._last)[running].all():
            self._begin(seen, running, now_s)
            return False
        self._last = np.where(running, seen.step, self._last)
        passed_s = now_s - self._since_s
        in_time = running & (np.abs(seen.sent_s - self._sent_s - passed_s) <= FRESH_S)
        made = seen.step[in_time] - self._step[in_time]
        if passed_s < APART_S or made.size < 2:
            return False
        apart = made.max() - made.min() > APART_STEPS + APART_S * made.max() / passed_s
        self._looks = self._looks + 1 if apart else 0
        return self._looks >= LOOKS

    def _begin(self, seen: Presence, running: Bools, now_s: float) -> None:
        self._since_s, self._looks = now_s, 0
        self._step = self._last = np.where(running, seen.step, math.nan)
        self._sent_s = np.where(running, seen.sent_s, math.nan)

    def state(self) -> dict[str, Any]:
        """Everything that decides the future."""
        arrays = {"step": self._step, "sent_s": self._sent_s, "last": self._last}
        return {"since_s": self._since_s, "looks": self._looks, **arrays}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> LockstepCheck:
        """The check that gave this state."""
        check = cls()
        check._since_s, check._looks = state["since_s"], state["looks"]
        check._step, check._sent_s, check._last = state["step"], state["sent_s"], state["last"]
        return check
