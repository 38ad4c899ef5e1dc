"""The newest progress block of every rank of an attempt. Pure; heard times are the stream's, never an agent's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Presence

GONE_STATES: Final = frozenset({"left", "exited"})
"""States after which a rank reports no more."""
FLOATS: Final = ("heard_s", "told_s", "phase_age_s", "step_age_s", "cpu_s", "outside_s")


class ProgressBoard:
    """Progress by rank, as arrays for the detectors. Memory: about 200 bytes for each rank."""

    def __init__(self, attempt: str, world_size: int) -> None:
        self.attempt = attempt
        self._heard = np.zeros(world_size, dtype=bool)
        self._floats = {name: np.zeros(world_size) for name in FLOATS}
        self._floats["outside_s"] -= 1.0
        self._ints = {"step": np.full(world_size, -1), "collective_seq": np.zeros(world_size, dtype=np.int64)}
        self._texts = {name: [""] * world_size for name in ("phase", "state", "os_state")}

    @property
    def world_size(self) -> int:
        """How many ranks there is room for."""
        return len(self._heard)

    def hear(self, batches: Iterable[wire.Batch], now_s: float) -> list[tuple[int, str]]:
        """Take up the newer blocks of these batches; ranks that the attempt does not have are left out.

        Returns:
            (rank, state) of blocks that say that a rank has gone, where that is new.
        """
        world_size = self.world_size
        told = [(block, batch) for batch in batches for block in batch.progress if block.rank < world_size]
        if not told:
            return []
        known = [block for block, _ in told]
        ranks = np.array([block.rank for block in known], dtype=np.intp)
        self._heard[ranks] = True
        self._floats["heard_s"][ranks] = now_s
        # Of several blocks of one rank the last one stays.
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
        """An event told that this rank has left or exited, before its progress block did.

        Args:
            rank: which.
            state: left or exited.
            broken_off: that its loop is over was no good order, though its progress block may have said so.
        """
        if rank < self.world_size:
            if broken_off:
                self._texts["state"][rank] = state
            self._set_state(rank, state)

    def _set_state(self, rank: int, state: str) -> None:
        # Who left its loop in good order has not died when its process ends after that.
        if self._texts["state"][rank] != "left":
            self._texts["state"][rank] = state

    def blind(self, seconds: float) -> None:
        """Nothing could have come for so long, for a reason of ours: it makes nobody silent."""
        self._floats["heard_s"] += seconds

    def resize(self, world_size: int) -> None:
        """The attempt turned out to have more ranks."""
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
        """Whether every rank has left its loop in good order."""
        return all(state == "left" for state in self._texts["state"])

    def reporting(self, now_s: float, within_s: float) -> int:
        """How many ranks were heard in the last `within_s` and have not gone."""
        recent = self._heard & (now_s - self._floats["heard_s"] <= within_s)
        return sum(self._texts["state"][rank] not in GONE_STATES for rank in np.flatnonzero(recent))

    def any_in(self, phases: Collection[str]) -> bool:
        """Whether a rank that has not gone is in one of these phases."""
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
        board._heard, board._ints = state["heard"], state["ints"]
        board._floats |= state["floats"]  # snapshots of before lack the newer ones
        board._texts = {name: list(column) for name, column in state["texts"].items()}
        return board
