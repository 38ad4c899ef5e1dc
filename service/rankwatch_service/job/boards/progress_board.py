"""The newest progress block of every rank of an attempt. Pure; times of arrival are stream time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Presence

GONE_STATES: Final = frozenset({"left", "exited"})
"""States after which a rank does not report again."""

FLOATS: Final = ("heard_s", "told_s", "phase_age_s", "step_age_s", "cpu_s", "outside_s")
"""Columns of numbers, named as in `Presence`."""


class ProgressBoard:
    """Keeps progress by rank, as arrays for the detectors. Memory: about 200 bytes for each rank."""

    def __init__(self, attempt: str, world_size: int) -> None:
        self.attempt = attempt
        self._heard = np.zeros(world_size, dtype=bool)
        self._floats = {name: np.zeros(world_size) for name in FLOATS}
        self._floats["outside_s"] -= 1.0
        self._ints = {"step": np.full(world_size, -1), "collective_seq": np.zeros(world_size, dtype=np.int64)}
        self._texts = {name: [""] * world_size for name in ("phase", "state", "os_state")}

    @property
    def world_size(self) -> int:
        """Number of ranks on the board."""
        return len(self._heard)

    def hear(self, batches: Iterable[wire.Batch], now_s: float) -> list[tuple[int, str]]:
        """Take the progress blocks of newer batches, in their order; ranks beyond the world size are ignored.

        Returns:
            (rank, state) of each rank that has left or exited since its last block.
        """
        world_size = self.world_size
        told = [(block, batch) for batch in batches for block in batch.progress if block.rank < world_size]
        if not told:
            return []
        known = [block for block, _ in told]
        ranks = np.array([block.rank for block in known], dtype=np.intp)
        self._heard[ranks] = True
        self._floats["heard_s"][ranks] = now_s
        # Of several blocks of one rank the last counts, since NumPy assigns in order. A sender may leave its time 0.
        self._floats["told_s"][ranks] = [batch.sent_unix_ns / 1e9 or now_s for _, batch in told]
        self._floats["phase_age_s"][ranks] = [block.phase_age_s for block in known]
        self._floats["step_age_s"][ranks] = [block.step_age_s for block in known]
        self._floats["cpu_s"][ranks] = [block.cpu_s for block in known]
        self._floats["outside_s"][ranks] = [block.outside_s for block in known]
        self._ints["step"][ranks] = [block.step for block in known]
        self._ints["collective_seq"][ranks] = [block.collective_seq for block in known]
        phases, os_states, states = self._texts["phase"], self._texts["os_state"], self._texts["state"]
        gone = []
        for block in known:
            rank = block.rank
            phases[rank], os_states[rank] = block.phase, block.os_state
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

    def blind(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything, so that no rank counts as silent for it."""
        self._floats["heard_s"] += seconds

    def resize(self, world_size: int) -> None:
        """Make room for the ranks of a larger world size; it never shrinks."""
        more = world_size - self.world_size
        self._heard = np.pad(self._heard, (0, more))
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
        recent = self._heard & (now_s - self._floats["heard_s"] <= within_s)
        return sum(self._texts["state"][rank] not in GONE_STATES for rank in np.flatnonzero(recent))

    def any_in(self, phases: Collection[str]) -> bool:
        """Whether any rank that has neither left nor exited is in one of these phases."""
        told = zip(self._texts["phase"], self._texts["state"], strict=True)
        return any(phase in phases and state not in GONE_STATES for phase, state in told)

    def presence(self) -> Presence:
        """A copy for the detectors."""
        return Presence(
            attempt=self.attempt,
            heard=self._heard.copy(),
            heard_s=self._floats["heard_s"].copy(),
            told_s=self._floats["told_s"].copy(),
            step=self._ints["step"].copy(),
            phase=tuple(self._texts["phase"]),
            phase_age_s=self._floats["phase_age_s"].copy(),
            step_age_s=self._floats["step_age_s"].copy(),
            collective_seq=self._ints["collective_seq"].copy(),
            state=tuple(self._texts["state"]),
            os_state=tuple(self._texts["os_state"]),
            cpu_s=self._floats["cpu_s"].copy(),
            outside_s=self._floats["outside_s"].copy(),
        )

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays."""
        return {
            "attempt": self.attempt,
            "heard": self._heard,
            "floats": self._floats,
            "ints": self._ints,
            "texts": self._texts,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> ProgressBoard:
        """The board that gave this state."""
        board = cls(state["attempt"], len(state["heard"]))
        board._heard, board._ints, board._floats = state["heard"], state["ints"], state["floats"]
        board._texts = {name: list(column) for name, column in state["texts"].items()}
        return board
