"""The topology of an attempt as far as agents have reported it, and the gradient norm of a whole job. Pure.

The gradient norm of a whole job, from those of the slices that its ranks hold of a sharded model.

Each different slice counts once, however many ranks hold it. A norm is measured of the whole or not at all: it needs
the slices of all ranks to be known, and each of them to be measured in the frame by one of the ranks that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch.locations import ROOTS_MAX, checkpoint_root
from rankwatch.signed import host_of
from rankwatch_detectors.base import Frame, Ints, Topology, on_devices

WHOLE: Final = "grad_norm"
PARTS: Final = tuple(f"{WHOLE}.{number}" for number in range(wire.SLICES_MAX))

AGREE_RATIO: Final = 1e-3
"""Norms of one slice that differ by more are not of one gradient, such as one that nobody has reduced. Kernels that add
up in another order differ by 1e-6."""


class WholeNorm:
    """Adds up the norms of one attempt. Memory: 24 bytes for each rank and slice."""

    def __init__(self, infos: Mapping[int, wire.RankInfo], world_size: int) -> None:
        """Number the different slices.

        Args:
            infos: the rank infos, by rank.
            world_size: ranks of the attempt.
        """
        held = [(number, rank, one.content) for rank in infos for number, one in enumerate(infos[rank].slices or ())]
        self._known = len(infos) == world_size and all(info.slices is not None for info in infos.values())
        self._declared = bool(held)
        contents = {content: index for index, content in enumerate(sorted({content for _, _, content in held}))}
        of = np.array([contents[content] for _, _, content in held], dtype=np.int64)
        order = np.argsort(of, kind="stable")
        self._part: Ints = np.array([number for number, _, _ in held], dtype=np.int64)[order]
        self._rank: Ints = np.array([rank for _, rank, _ in held], dtype=np.int64)[order]
        self._starts: Ints = np.searchsorted(of[order], np.arange(len(contents))).astype(np.int64)

    def of(self, frame: Frame) -> Frame:
        """The frame with the norm of the whole, if it can be known, on all ranks and without those of slices.

        A norm that the job itself logs stays.
        """
        if not (self._declared and any(name in frame.values for name in PARTS)):
            return frame
        values = {name: column for name, column in frame.values.items() if name not in PARTS}
        present = {name: column for name, column in frame.present.items() if name not in PARTS}
        norm = None if WHOLE in values or frame.late else self._sum(frame)
        if norm is not None:
            ranks = next(iter(frame.present.values())).size
            values[WHOLE], present[WHOLE] = np.full(ranks, norm), np.ones(ranks, dtype=np.bool_)
            for column in (values[WHOLE], present[WHOLE]):
                column.flags.writeable = False
        return replace(frame, values=values, present=present)

    def _sum(self, frame: Frame) -> float | None:
        if not self._known:
            return None
        norms, here = np.zeros(self._part.size), np.zeros(self._part.size, dtype=np.bool_)
        for number in range(int(self._part.max()) + 1):
            column = frame.values.get(PARTS[number])
            if column is not None:
                held = self._part == number
                ranks = self._rank[held]
                norms[held], here[held] = column[ranks], frame.present[PARTS[number]][ranks]
        if not np.logical_or.reduceat(here, self._starts).all():
            return None
        if not np.isfinite(norms[here]).all():
            return math.nan if np.isnan(norms[here]).any() else math.inf
        highest = np.maximum.reduceat(np.where(here, norms, 0.0), self._starts)
        lowest = np.minimum.reduceat(np.where(here, norms, math.inf), self._starts)
        if (highest - lowest > AGREE_RATIO * highest).any():
            return None
        return float(np.linalg.norm(highest))


class TopologyState:
    """The rank infos of one attempt, and the world size that they or the rows imply."""

    def __init__(self) -> None:
        self._infos: dict[int, wire.RankInfo] = {}
        self._parameters: tuple[str, ...] = ()
        self._highest = -1
        self._apart = False
        self._roots = set[str]()
        self._savers: tuple[int, int] | None = None
        self._whole_norm: WholeNorm | None = None

    @property
    def infos(self) -> list[wire.RankInfo]:
        """The known rank infos, by rank, without parameter names."""
        return [self._infos[rank] for rank in sorted(self._infos)]

    @property
    def has_rank_infos(self) -> bool:
        """Whether any rank info is known; if so, rows do not change the world size."""
        return bool(self._infos)

    @property
    def world_size(self) -> int:
        """As reported; before any report, the highest rank seen + 1."""
        return max(self._reported, self._highest + 1)

    @property
    def accelerated(self) -> bool:
        """Whether an hour of a rank is one of a GPU or another device; True while nothing is known of the ranks."""
        infos = self._infos.values()
        return not infos or on_devices((one.device_uuid for one in infos), (one.device_type for one in infos))

    @property
    def complete(self) -> bool:
        """Whether the infos of all ranks are known."""
        return bool(self._infos) and len(self._infos) == self.world_size

    @property
    def _reported(self) -> int:
        return next((info.world_size for info in self._infos.values()), 0)

    @property
    def lockstep(self) -> bool:
        """Whether ranks wait for each other in each step: all report so, and no observation contradicts it."""
        return not self._apart and all(info.lockstep for info in self._infos.values())

    def end_lockstep(self) -> None:
        """Record that ranks go at their own pace, for the rest of this launch."""
        self._apart = True

    @property
    def can(self) -> frozenset[str]:
        """The actions that every rank supports."""
        reported = [frozenset(info.can) for info in self._infos.values()]
        return frozenset.intersection(*reported) if reported else frozenset()

    @property
    def checkpoint_roots(self) -> Collection[str]:
        """The folders and URLs below which the checkpoints of this launch lie."""
        return self._roots

    def has(self, rank: int) -> bool:
        """Whether this rank is part of the attempt."""
        return 0 <= rank < self.world_size

    def shards_expected(self, reported: int) -> int:
        """How many ranks save a part of a checkpoint.

        Args:
            reported: the value in the event of a save; 0: every rank that can. It cannot lower what the ranks declare.
        """
        if self._savers is None:
            infos = self._infos.values()
            unable = sum("checkpoint" not in info.can for info in infos)
            # A loop that saves by itself declares no action: then nobody is known to be unable.
            every = self.world_size - (unable if unable < len(infos) else 0)
            self._savers = every, max((info.checkpoint_shards for info in infos), default=0)
        every, declared = self._savers
        return min(max(reported, declared), every) if reported and declared > 0 else every

    def learn(self, infos: Iterable[wire.RankInfo]) -> bool:
        """Add rank infos; return whether the topology changed. An info with another world size is ignored."""
        changed = False
        for reported in infos:
            if self._infos and reported.world_size != self._reported:
                continue
            if reported.parameters and not self._parameters:
                self._parameters, changed = reported.parameters, True
            before = self._infos.get(reported.rank)
            changed |= before is None or _topology(before) != _topology(reported)
            self._take(reported)
        return changed

    @property
    def whole_norm(self) -> WholeNorm:
        """Adds up the gradient norms of the slices that the ranks hold."""
        if self._whole_norm is None:
            self._whole_norm = WholeNorm(self._infos, self.world_size)
        return self._whole_norm

    def _take(self, info: wire.RankInfo) -> None:
        self._savers = self._whole_norm = None
        roots = tuple(_plain_roots(info.checkpoint_roots))
        info = msgspec.structs.replace(info, checkpoint_roots=roots)
        self._roots.update(roots)
        self._infos[info.rank] = _without_parameters(info)

    def see(self, highest_rank: int) -> bool:
        """Raise the world size to the highest rank of some rows, unless an info is known; return whether it changed."""
        if self._infos or highest_rank <= self._highest:
            return False
        self._highest, self._whole_norm = highest_rank, None
        return True

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Hosts of these ranks, each once, in the order of the ranks."""
        return list(dict.fromkeys(self._infos[rank].host for rank in ranks if rank in self._infos))

    def devices_of(self, ranks: Iterable[int]) -> list[str]:
        """Device UUIDs of these ranks, each once, in the order of the ranks."""
        reported = (self._infos[rank].device_uuid for rank in ranks if rank in self._infos)
        return list(dict.fromkeys(device for device in reported if device))

    def host_id_of(self, rank: int) -> str:
        """The id of the host of this rank (`signed.host_of`); empty if its agent has not enrolled."""
        info = self._infos.get(rank)
        return host_of(info.agent) if info else ""

    def pids_of(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Process ids of these ranks by host, as the processes see them, in the order of the ranks."""
        found: dict[str, list[int]] = {}
        for info in (self._infos[rank] for rank in ranks if rank in self._infos):
            if info.pid > 0:
                found.setdefault(info.host, []).append(info.pid)
        return found

    def ranks_of(self, host: str) -> list[int]:
        """Ranks that run on a host, ascending."""
        return sorted(rank for rank, info in self._infos.items() if info.host == host)

    def switch_of(self, hosts: Iterable[str]) -> str:
        """The switch of these hosts; empty unless all have the same and it is known."""
        wanted = frozenset(hosts)
        found = {info.switch for info in self._infos.values() if info.host in wanted}
        return found.pop() if len(found) == 1 else ""

    def ranks_below(self, switch: str) -> list[int]:
        """Ranks on the hosts of a switch, ascending."""
        return sorted(rank for rank, info in self._infos.items() if info.switch == switch)

    @property
    def shared_slices(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same slices of a sharded model, of those that any other rank holds too."""
        groups: dict[tuple[wire.Slice, ...], list[int]] = {}
        for rank in sorted(self._infos):
            shared = tuple(one for one in self._infos[rank].slices or () if one.replica_of >= 0)
            if shared:
                groups.setdefault(shared, []).append(rank)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def topology(self) -> Topology:
        """The topology for the detectors. A rank without an info is alone on a host without a name."""
        size = self.world_size
        infos = [self._infos.get(rank) or wire.RankInfo(rank, size, dp=rank) for rank in range(size)]
        place = {
            name: np.array([getattr(info, name) for info in infos], dtype=np.int64)
            for name in ("dp", "tp", "pp", "cp", "ep")
        }
        return Topology(
            world_size=size,
            host=tuple(info.host for info in infos),
            device_uuid=tuple(info.device_uuid for info in infos),
            replicated=bool(self._infos) and all(info.replicated for info in self._infos.values()),
            parameters=self._parameters,
            lockstep=self.lockstep,
            slices=_slices(infos),
            optimizers=max((info.optimizers for info in infos), default=0),
            device_type=tuple(info.device_type for info in infos),
            switch=tuple(info.switch for info in infos),
            **place,
        )

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "infos": msgspec.to_builtins(self.infos),
            "parameters": list(self._parameters),
            "highest": self._highest,
            "apart": self._apart,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> TopologyState:
        """The object that gave this state."""
        restored = cls()
        infos = msgspec.convert(state["infos"], list[wire.RankInfo])
        for info in infos:
            restored._take(info)
        restored._parameters = tuple(state["parameters"])
        restored._highest = state["highest"]
        restored._apart = state["apart"]
        return restored


def _slices(infos: Sequence[wire.RankInfo]) -> tuple[Ints, ...]:
    """`Topology.slices` of all ranks."""
    numbers: dict[tuple[str, int], int] = {}
    most = max((len(info.slices or ()) for info in infos), default=0)
    found = np.full((most, len(infos)), -1, dtype=np.int64)
    for rank, info in enumerate(infos):
        for number, one in enumerate(info.slices or ()):
            if one.replica_of >= 0:
                found[number, rank] = numbers.setdefault((one.content, one.replica_of), len(numbers))
    return tuple(found)


def _topology(info: wire.RankInfo) -> wire.RankInfo:
    """The part of an info that decides whether the topology has changed."""
    return msgspec.structs.replace(info, parameters=(), pid=0, checkpoint_roots=(), checkpoint_shards=0)


def _without_parameters(info: wire.RankInfo) -> wire.RankInfo:
    """The info without parameter names: they are the same on every rank and kept once."""
    return msgspec.structs.replace(info, parameters=()) if info.parameters else info


def _plain_roots(reported: Iterable[str]) -> Iterator[str]:
    """The valid ones of an agent's roots in their plain form, at most `ROOTS_MAX`."""
    for text in tuple(reported)[:ROOTS_MAX]:
        with suppress(ValueError):
            yield checkpoint_root(text)
